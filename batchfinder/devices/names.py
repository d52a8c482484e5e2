"""Makes names comparable: what people type, what a driver prints and what the catalogue says meet in one key."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass

_SIZE = re.compile(r"(?<![a-z0-9.])(\d+)\s*(?:gib|gb|g)(?![a-z0-9.])")
_NOISE = re.compile(r"nvidia|tesla|geforce|quadro|amd|instinct|corporation|memory|vram|ram|gpu")
_FORM = re.compile(r"sxm\d?|pcie|hbm\d?e?|oam|dgxs")
_PROVIDER = re.compile(r"(?:(?:ml|aws|amazon|ec2|sagemaker|azure|microsoft|gcp|google|cloud|standard)[^a-z0-9]+)+")


@dataclass(frozen=True, slots=True)
class GpuKey:
    """A GPU's name, taken apart.

    Attributes:
        model: the model without vendor, size and punctuation: `v100sxm2`, `rtx3090`, `titanxpascal`.
        size_gb: the memory size in the name; None when there is none.
    """

    model: str
    size_gb: int | None

    @property
    def text(self) -> str:
        """One string for both: `v10032gb`."""
        return self.model if self.size_gb is None else f"{self.model}{self.size_gb}gb"

    def without_form(self) -> GpuKey:
        """The same without board and memory type: `NVIDIA H100 80GB HBM3` and `V100-SXM2-32GB` lose their tails."""
        return GpuKey(_FORM.sub("", self.model), self.size_gb)


def gpu_key(name: str) -> GpuKey:
    """Take a GPU's name apart.

    Args:
        name: as typed or printed: `Tesla V100-SXM2-32GB`, `rtx 3090`, `a100_80g`.
    """
    text = name.lower().replace("_", " ").replace("-", " ")
    sizes = _SIZE.findall(text)
    model = re.sub(r"[^a-z0-9]", "", _NOISE.sub("", _SIZE.sub(" ", text)))
    return GpuKey(model, int(sizes[0]) if sizes else None)


def instance_key(name: str) -> str:
    """Make an instance's name comparable: `ml.p3.2xlarge` to `p32xlarge`, `Standard_NC24s_v3` to `nc24sv3`.

    Args:
        name: as typed, with or without the provider in front.
    """
    text = name.strip().lower()
    prefix = _PROVIDER.match(text)
    return re.sub(r"[^a-z0-9]", "", text[prefix.end() :] if prefix else text)


def nearest(key: str, names: Mapping[str, str], limit: int = 5) -> tuple[str, ...]:
    """Find the known names most like one that is not known.

    Args:
        key: the key that was not found.
        names: every known key and the name it stands for; several keys may stand for one name.
        limit: how many names at most.

    Returns:
        Names, best first, each once; empty when none is like it.
    """
    close = difflib.get_close_matches(key, names, n=4 * limit, cutoff=0.5)
    return tuple(dict.fromkeys(names[match] for match in close))[:limit]
