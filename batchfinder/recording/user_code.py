"""Which files are the user's own code, for messages that name their lines."""

from __future__ import annotations

import os
import sysconfig

import torch

TORCH_FOLDER = os.path.dirname(torch.__file__)
PACKAGE_FOLDER = os.path.dirname(os.path.dirname(__file__)) + os.sep
_NOT_THE_USERS = (
    os.path.dirname(TORCH_FOLDER),  # what is installed beside it
    PACKAGE_FOLDER,
    *(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")),
    os.environ.get("TORCHINDUCTOR_CACHE_DIR", "<"),
    "<frozen",
)


def is_library(file: str) -> bool:
    """Whether a file is PyTorch's, the standard library's, an installed package's, batchfinder's or Inductor's code."""
    return file.startswith(_NOT_THE_USERS) or "/site-packages/" in file or "/dist-packages/" in file
