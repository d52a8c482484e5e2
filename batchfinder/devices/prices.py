"""What the instances of the catalog cost by the hour: prices.toml, or a file of the user's."""

from __future__ import annotations

import csv
import io
import tomllib
from collections.abc import Iterable, Mapping
from datetime import date
from functools import cache
from typing import Any

from batchfinder.devices.catalog import Price, find_instance, read_tables
from batchfinder.errors import InvalidValue, UnknownName


@cache
def known_prices() -> Mapping[str, Price]:
    """The prices of prices.toml, by the instances' names."""
    found = {}
    for table in read_tables("prices.toml", "list"):
        on_demand, spot = table["usd_per_hour"], table.get("spot_usd_per_hour", {})
        for name in on_demand | spot:
            where = table["region"], table["as_of"], table["source"]
            found[name] = Price(on_demand.get(name), spot.get(name), *where)
    return found


def parse_prices(option: str, path: str, text: str) -> Mapping[str, Price]:
    """Prices of the user's: CSV with a heading, or TOML with a `[[price]]` for each instance.

    Both have `instance` and `usd_per_hour`, and may have `spot_usd_per_hour`, `region` and `as_of`. Instances that are
    not in the catalog are passed over: a provider's list has many without a GPU.

    Raises:
        InvalidValue: it is neither, a price is not a positive number, or no instance of it is known.
    """
    expected = "CSV with instance,usd_per_hour in its first line, or TOML with a [[price]] for each instance"
    rows: Iterable[Mapping[str, Any]]
    if path.lower().endswith(".toml"):
        try:
            rows = tomllib.loads(text).get("price", ())
        except tomllib.TOMLDecodeError as error:
            raise InvalidValue(option, path, f"{expected} ({error})") from error
        if not isinstance(rows, list):
            raise InvalidValue(option, path, expected)
    else:
        rows = csv.DictReader(io.StringIO(text), skipinitialspace=True)
    found: dict[str, Price] = {}
    for row in rows:
        if not isinstance(row, Mapping) or not {"instance", "usd_per_hour"} <= row.keys():
            raise InvalidValue(option, path, expected)
        try:
            name = find_instance(str(row["instance"])).name
        except UnknownName:
            continue
        on_demand, spot = (_dollars(option, row.get(key)) for key in ("usd_per_hour", "spot_usd_per_hour"))
        as_of = row.get("as_of")
        try:
            day = as_of if isinstance(as_of, date) else date.fromisoformat(as_of) if as_of else None
        except (TypeError, ValueError) as error:
            raise InvalidValue(option, as_of, "as_of as 2026-07-20") from error
        found[name] = Price(on_demand, spot, str(row.get("region") or ""), day, path)
    if not found:
        raise InvalidValue(option, path, f"{expected}, of which one at least is of `batchfinder instances`")
    return found


def _dollars(option: str, value: Any) -> float | None:
    if value in (None, ""):
        return None
    try:
        dollars = float(str(value).strip().removeprefix("$"))
    except ValueError:
        dollars = -1.0
    if not 0 < dollars < float("inf"):
        raise InvalidValue(option, value, "a positive number of US dollars by the hour")
    return dollars
