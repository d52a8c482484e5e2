"""Writes reproductions.md from `batchfinder reproduce all`: `python docs/make_reproductions.py`; a test compares."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

PAGE = Path(__file__).with_name("reproductions.md")

HEAD = """\
# Published tables

Every published figure that this project answers to, beside ours. This page is what

```sh
batchfinder reproduce all
```

prints on a machine without a GPU: no figure was typed by hand. The simulated figures have not been compared with a real
GPU of today yet. Those of 2018 and 2019 were measured on real ones, by others, and are quoted as they stand.

"""


def page(tables: str) -> str:
    """The page's text.

    Args:
        tables: what `reproduce all --markdown` wrote.
    """
    return HEAD + tables


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        # There, since the page says which command made it.
        command = [sys.executable, "-m", "batchfinder", "reproduce", "all", "--markdown", "all.md"]
        subprocess.run(command, check=True, cwd=folder)
        PAGE.write_text(page((Path(folder) / "all.md").read_text(encoding="utf-8")), encoding="utf-8")
