"""Writes devices.md from the catalogue: `python docs/make_devices.py`. A test keeps the page up to date."""

from __future__ import annotations

from pathlib import Path

from batchfinder.devices import all_gpus, all_instances, device_for, known_prices
from batchfinder.units import format_bytes, format_dollars

PAGE = Path(__file__).with_name("devices.md")

HEAD = """\
# Devices

What batchfinder knows of {gpus} GPUs and {instances} cloud instances. Look-up is forgiving: `titan x`, `V100` and
`v100-32gb` are found, and a miss names the nearest. A bare family name means its smaller card: what fits there fits the
larger one too; `batchfinder gpus --min 24GB --has bf16` lists them. A sweep takes several (`--gpu t4,v100`), all of at
least a size (`--gpu 24GB+`) or `--gpu all`. `--budget 12GiB` names a limit instead, or lowers a card's, and asks for a
card that is not here.

*Total* is what the driver reports to PyTorch. *Usable* is that less what the CUDA context and libraries take before
the first tensor, for one process and no display. A tilde marks a context that was not measured on this card but follows
from the others. Each row's source stands beside it in `batchfinder/devices/gpus.toml` and `instances.toml`. They are
those of a CUDA that loads kernels as they are used, which is usual since 11.7; before, it was 1 GiB and more:
`--context 1.3GiB` takes another size than the table's.

## GPUs

| name | total | usable | compute capability |
|---|---:|---:|---|
"""

INSTANCES = """
## Instances

`batchfinder instances` lists them with what each costs, the cheapest first, and takes `--gpu` and `--min`. A sweep of
several (`--instance p4d.24xlarge,p5.48xlarge`) says what each costs. The prices are on demand, without disks and
traffic, of the region and day that `batchfinder/devices/prices.toml` names with their source; `docs/make_prices.py`
made that file from public price lists. They change: `--prices mine.csv` takes your own, with a first line of
`instance,usd_per_hour` (and `spot_usd_per_hour`, `region`, `as_of`), or the same as TOML in `[[price]]` tables. What is
not sold by the hour, such as Colab and Kaggle, has none.

A simulated step takes no time, so what training costs takes a share of the GPUs' peak FLOP/s that you state, from a run
of yours or a paper: `--mfu 40%` (`mfu=0.4` in `batchfinder.sweep`). Rows with a price then have it, for a million
tokens, or for a million samples where these are no tokens ([an example](gallery.md#what-a-million-tokens-cost)).
It is the price per hour x FLOPs of a sample / (GPUs x 3600 s x share x peak) / tokens of a sample x 10^6. The FLOPs are
those of matrix products, convolutions and attention in the recorded step. What gradient checkpointing recomputes is
among them, so that the share is then of hardware FLOPs (HFU). All samples are taken to be as long as `--seq-len`. The
peak is the datasheet's, dense and of the precision's type, without TF32 for fp32; it stands with its source in
`gpus.toml`, for {peaks} GPUs so far. `--json` and `--csv` have the figure with what it is made of.

| name | provider | GPUs | $/h |
|---|---|---|---:|
"""


def page() -> str:
    """The page's text."""
    lines = [HEAD.format(gpus=len(all_gpus()), instances=len(all_instances()))]
    for gpu in all_gpus():
        device = device_for(gpu)
        mark = "~" if "context_bytes" in gpu.estimated else ""
        capability = gpu.architecture if gpu.compute_capability is None else ".".join(map(str, gpu.compute_capability))
        usable = f"{mark}{format_bytes(device.usable_bytes)}"
        lines.append(f"| {gpu.name} | {format_bytes(device.total_bytes)} | {usable} | {capability} |\n")
    lines.append(INSTANCES.format(peaks=sum(bool(gpu.tflops_source) for gpu in all_gpus())))
    prices = known_prices()
    for instance in all_instances():
        price = prices.get(instance.name)
        dollars = format_dollars(None if price is None else price.usd_per_hour)
        gpus = f"{instance.num_gpus} x {instance.gpu.name}"
        lines.append(f"| {instance.name} | {instance.provider} | {gpus} | {dollars} |\n")
    return "".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
