"""Writes batchfinder/devices/prices.toml from public price lists: `python docs/make_prices.py FOLDER`.

The folder has clones of aws/karpenter-provider-aws, Azure/karpenter-provider-azure and
cloudpilot-ai/karpenter-provider-gcp (Apache-2.0, whose lists are made from the providers' price APIs) and of
huggingface/hub-docs, by their own names.
What no such list has was typed from the pages that `TYPED` names.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

from batchfinder.devices import all_instances

PRICES = Path(__file__).parents[1] / "batchfinder" / "devices" / "prices.toml"
HEAD = """\
# What instances cost, in US dollars by the hour: written by docs/make_prices.py, by lists. The names are those of
# instances.toml; what has no price here is not sold by the hour, or its price was not found.
#
# region        of the prices; empty where they are the same in all, or the list does not say.
# as_of         when the list was made.
# source        the list.
# usd_per_hour  on demand, for the whole instance, without disks and traffic.
# spot_usd_per_hour  for one that may be taken back at any time.
"""


@dataclass
class PriceList:
    """Prices of one provider."""

    provider: str
    region: str
    as_of: date
    source: str
    usd_per_hour: dict[str, float]
    spot_usd_per_hour: dict[str, float] = field(default_factory=dict)


def read(clone: Path, path: str) -> tuple[str, str, date]:
    """A file of a clone, the address of that version of it, and when it was last changed."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", clone, *arguments], capture_output=True, text=True, check=True).stdout

    commit, day = git("log", "-1", "--format=%H %cs", "--", path).split()
    owner = {"karpenter-provider-aws": "aws", "karpenter-provider-azure": "Azure", "hub-docs": "huggingface"}
    address = f"https://github.com/{owner.get(clone.name, 'cloudpilot-ai')}/{clone.name}/blob/{commit}/{path}"
    return git("show", f"{commit}:{path}"), address, date.fromisoformat(day)


def aws(folder: Path) -> PriceList:
    """Karpenter's, of us-east-1."""
    text, source, _ = read(folder / "karpenter-provider-aws", "pkg/providers/pricing/zz_generated.pricing_aws.go")
    made = re.search(r"generated at (\S{10})\S* for (\S+)", text)
    assert made is not None
    prices = {name: float(price) for name, price in re.findall(r'"(\w+[\w-]*\.\w+)": ([\d.]+)', text)}
    return PriceList("AWS", made[2], date.fromisoformat(made[1]), source, prices)


def azure(folder: Path) -> PriceList:
    """Karpenter's, of eastus."""
    text, source, _ = read(folder / "karpenter-provider-azure", "pkg/providers/pricing/zz_generated.pricing.go")
    made = re.search(r"generated at (\S{10})", text)
    assert made is not None
    region = text.partition('initialOnDemandPrices["eastus"]')[2].partition("initialOnDemandPrices[")[0]
    prices = {name: float(price) for name, price in re.findall(r'"(Standard_\w+)":\s+([\d.]+)', region)}
    return PriceList("Azure", "eastus", date.fromisoformat(made[1]), source, prices)


def google(folder: Path) -> PriceList:
    """Of us-central1."""
    text, source, day = read(folder / "karpenter-provider-gcp", "pkg/providers/pricing/initial-prices.json")
    region = json.loads(text)["prices"]["us-central1"]
    return PriceList("Google Cloud", "us-central1", day, source, region["on_demand"], region["spot"])


def hugging_face(folder: Path) -> PriceList:
    """The table of `hf jobs hardware`."""
    text, source, day = read(folder / "hub-docs", "docs/hub/jobs-configuration.md")
    prices = {name: float(price) for name, price in re.findall(r"^([\w-]+) .* \$([\d.]+)$", text, re.MULTILINE)}
    return PriceList("Hugging Face", "", day, source, prices)


TYPED = (
    PriceList(
        "Lambda",
        "",
        date(2026, 9, 25),
        "https://lambda.ai/pricing, as https://github.com/skypilot-org/skypilot-catalog has it in "
        "catalogs/v8/lambda/vms.csv; the date is when https://github.com/tgarg01/silybench-data found the same prices",
        {
            "gpu_1x_a10": 1.29,
            "gpu_1x_rtx6000": 0.69,
            "gpu_1x_a6000": 1.09,
            "gpu_2x_a6000": 2.18,
            "gpu_4x_a6000": 4.36,
            "gpu_8x_v100_n": 6.32,
            "gpu_1x_a100_sxm4": 1.99,
            "gpu_2x_a100": 3.98,
            "gpu_4x_a100": 7.96,
            "gpu_8x_a100_80gb_sxm4": 22.32,
            "gpu_1x_h100_pcie": 3.29,
            "gpu_1x_h100_sxm5": 4.29,
            "gpu_2x_h100_sxm5": 8.38,
            "gpu_4x_h100_sxm5": 16.36,
            "gpu_8x_h100_sxm5": 31.92,
            "gpu_1x_gh200": 2.29,
            "gpu_1x_b200_sxm6": 6.99,
            "gpu_2x_b200_sxm6": 13.78,
            "gpu_8x_b200_sxm6": 53.52,
        },
    ),
    PriceList(
        "Nebius",
        "",
        date(2026, 9, 25),
        "https://nebius.com/prices by the GPU, as https://github.com/tgarg01/silybench-data has it in "
        "derived/csv/gpu_prices.csv",
        {
            "gpu-l40s-a_1gpu-8vcpu-32gb": 1.55,
            "gpu-h100-sxm_1gpu-16vcpu-200gb": 3.85,
            "gpu-h100-sxm_8gpu-128vcpu-1600gb": 30.80,
            "gpu-h200-sxm_1gpu-16vcpu-200gb": 4.50,
            "gpu-h200-sxm_8gpu-128vcpu-1600gb": 36.00,
            "gpu-b200-sxm_8gpu-160vcpu-1792gb": 57.20,
        },
    ),
    PriceList(
        "RunPod",
        "",
        date(2026, 9, 25),
        "https://www.runpod.io/pricing, Secure Cloud, as https://github.com/tgarg01/silybench-data has it in "
        "derived/csv/gpu_prices.csv",
        {
            "runpod-rtx4090": 0.74,
            "runpod-l40s": 1.09,
            "runpod-a100-pcie": 1.59,
            "runpod-a100-sxm": 1.59,
            "runpod-h100-pcie": 2.89,
            "runpod-h100-nvl": 3.19,
            "runpod-h100-sxm": 3.49,
            "runpod-h200": 4.59,
            "runpod-b200": 6.79,
        },
    ),
    PriceList(
        "CoreWeave",
        "North America",
        date(2026, 9, 20),
        "https://www.coreweave.com/pricing, as https://github.com/api-evangelist/coreweave has it in "
        "plans/coreweave-plans-pricing.yml",
        {
            "coreweave-l40x8": 10.00,
            "coreweave-l40sx8": 18.00,
            "coreweave-a100x8": 21.60,
            "coreweave-rtx-pro-6000x8": 20.00,
            "coreweave-gh200": 6.50,
            "coreweave-h100x8": 49.24,
            "coreweave-h200x8": 50.44,
            "coreweave-b200x8": 68.80,
            "coreweave-gb200x4": 42.00,
        },
        {"coreweave-a100x8": 9.65, "coreweave-h100x8": 19.71, "coreweave-h200x8": 20.93, "coreweave-b200x8": 34.11},
    ),
)


def toml(prices: PriceList) -> str:
    """One list, of the instances that the catalog has."""
    names = [instance.name for instance in all_instances() if instance.provider == prices.provider]
    lines = [
        "\n[[list]]",
        f'provider = "{prices.provider}"',
        f'region = "{prices.region}"',
        f"as_of = {prices.as_of}",
        f'source = "{prices.source}"',
    ]
    for key in ("usd_per_hour", "spot_usd_per_hour"):
        given = getattr(prices, key)
        lines += [f"\n[list.{key}]", *(f'"{name}" = {given[name]:.6g}' for name in names if name in given)]
        if not any(name in given for name in names):
            del lines[-1]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    lists = (aws(folder), azure(folder), google(folder), hugging_face(folder), *TYPED)
    PRICES.write_text(HEAD + "".join(map(toml, lists)), encoding="utf-8")
