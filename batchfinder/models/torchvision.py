"""An import of torchvision where its compiled operators cannot be loaded.

Its wheel on PyPI is for PyTorch with CUDA: beside a PyTorch without, it fails as it describes operators that are not
there. timm and diffusers import it, and call none of them.
"""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec

import torch

_DESCRIBED = ("nms", "qnms")  # of torchvision 0.28, without having asked whether they are there
_defined: list[torch.library.Library] = []


def import_torchvision() -> None:
    """Import it where it is installed, with the names of the operators that it misses."""
    if "torchvision" in sys.modules or find_spec("torchvision") is None:
        return
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in _DESCRIBED:
            if not hasattr(torch.ops.torchvision, name):
                library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _defined.append(library)  # the definitions last as long as this does
        importlib.import_module("torchvision")
