"""`instances`: the cloud instances that can be named, with what each costs."""

from __future__ import annotations

import argparse
import json
import math

from batchfinder.cli.main import OK
from batchfinder.cli.options import read_prices
from batchfinder.devices import Instance, Price, all_instances, find_gpu
from batchfinder.report.table import Columns, Table
from batchfinder.units import GIB, format_bytes, format_dollars, parse_bytes


def main(arguments: argparse.Namespace) -> int:
    """List them, the cheapest first, and last what has no price."""
    least = 0 if arguments.min is None else round(parse_bytes(arguments.min, "--min") / GIB)
    gpu = None if arguments.gpu is None else find_gpu(arguments.gpu)
    prices = read_prices(arguments.prices)
    found = [each for each in all_instances() if gpu in (None, each.gpu) and each.gpu.class_gb >= least]

    def dollars(instance: Instance) -> tuple[float, float, str]:
        price = prices.get(instance.name)
        known = (None, None) if price is None else (price.usd_per_hour, price.spot_usd_per_hour)
        on_demand, spot = (math.inf if each is None else each for each in known)
        return on_demand, spot, instance.name

    found.sort(key=dollars)
    if arguments.json:
        print(json.dumps([_as_json(instance, prices.get(instance.name)) for instance in found], indent=1))
        return OK
    columns: Columns = {
        "instance": [each.name for each in found],
        "provider": [each.provider for each in found],
        "GPUs": [f"{each.num_gpus} x {each.gpu.name}" for each in found],
        "memory": [format_bytes(each.num_gpus * each.gpu.memory_bytes) for each in found],
        "$/h": [],
        "$/h each": [],
        "spot $/h": [],
    }
    for each in found:
        price = prices.get(each.name)
        on_demand, spot = (None, None) if price is None else (price.usd_per_hour, price.spot_usd_per_hour)
        columns["$/h"].append(format_dollars(on_demand))
        columns["$/h each"].append(format_dollars(None if on_demand is None else on_demand / each.num_gpus))
        columns["spot $/h"].append(format_dollars(spot))
    priced = [(each.provider, prices[each.name]) for each in found if each.name in prices]
    notes = ("memory is that of all its GPUs together; $/h each: by the GPU", *_when(priced))
    Table(f"{len(found)} instances that --instance takes", (), columns, notes).show()
    return OK


def _when(priced: list[tuple[str, Price]]) -> tuple[str, ...]:
    """Where and when the prices were so: they change."""
    lists = dict.fromkeys((provider, price.words) for provider, price in priced)
    if not lists:
        return ()
    dated = "; ".join(f"{provider} {words}" for provider, words in lists)
    return (
        "prices change, and are without disks and traffic: --prices takes your own, --json names the sources",
        dated,
    )


def _as_json(instance: Instance, price: Price | None) -> dict[str, object]:
    return {
        "name": instance.name,
        "aliases": list(instance.aliases),
        "provider": instance.provider,
        "gpu": instance.gpu.name,
        "num_gpus": instance.num_gpus,
        "memory_bytes": instance.num_gpus * instance.gpu.memory_bytes,
        "usd_per_hour": price and price.usd_per_hour,
        "spot_usd_per_hour": price and price.spot_usd_per_hour,
        "region": price and price.region,
        "as_of": price and price.as_of and price.as_of.isoformat(),
        "price_source": price and price.source,
        "source": instance.source,
    }
