"""Writes devices.md from the catalogue: `python docs/make_devices.py`. A test keeps the page up to date."""

from __future__ import annotations

from pathlib import Path

from batchfinder.devices import all_gpus, all_instances, device_for
from batchfinder.units import format_bytes

PAGE = Path(__file__).with_name("devices.md")

HEAD = """\
# Devices

What batchfinder knows of {gpus} GPUs and {instances} cloud instances. Look-up is forgiving: `titan x`, `V100` and
`v100-32gb` are found, and a miss names the nearest. A bare family name means its smaller card: what fits there fits the
larger one too; `batchfinder gpus --min 24GB --has bf16` lists them.
`--budget 12GiB` names a limit instead, or lowers a card's.

*Total* is what the driver reports to PyTorch. *Usable* is that less what the CUDA context and libraries take before
the first tensor, for one process and no display. A tilde marks a context that was not measured on this card but follows
from the others. Each row's source stands beside it in `batchfinder/devices/gpus.toml` and `instances.toml`. They are
those of a CUDA that loads kernels as they are used, which is usual since 11.7; before, it was 1 GiB and more:
`--context 1.3GiB` takes another size than the table's.

## GPUs

| name | total | usable | compute capability |
|---|---:|---:|---|
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
    lines.append("\n## Instances\n\n| name | provider | GPUs |\n|---|---|---|\n")
    for instance in all_instances():
        lines.append(f"| {instance.name} | {instance.provider} | {instance.num_gpus} x {instance.gpu.name} |\n")
    return "".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
