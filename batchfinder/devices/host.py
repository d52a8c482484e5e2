"""The machine itself, for those who train on its CPU."""

from __future__ import annotations

import platform
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")


def host_name() -> str:
    """What the CPU calls itself, such as `AMD EPYC 7B13`; its architecture where it does not say."""
    try:
        lines = _CPUINFO.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    named = (
        value.strip() for name, _, value in (line.partition(":") for line in lines) if name.strip() == "model name"
    )
    return next(filter(None, named), "") or platform.processor() or platform.machine()
