"""Writes sweep.svg, the README's picture: `python docs/make_picture.py`. It is what the command prints."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

os.environ.setdefault("BATCHFINDER_RECORDER", "fake-device")  # as where no CUDA build is installed

PICTURE = Path(__file__).with_name("sweep.svg")
COMMAND = (
    "batchfinder sweep qwen2.5-0.5b --gpu t4,rtx-4090,h100 --seq-len 1024,4096 --precision fp16 "
    "--gradient-checkpointing"
)
COLUMNS = 88


def shown(command: str) -> list[str]:
    """The command as typed on lines of this width, and what it prints."""
    words, lines = shlex.split(command), ["$"]
    for word in words:
        if word.startswith("--") and len(lines[-1]) > COLUMNS - 26:
            lines[-1] += " \\"
            lines.append("   ")
        lines[-1] += f" {word}"
    done = subprocess.run(
        [sys.executable, "-m", *words],
        env={**os.environ, "COLUMNS": str(COLUMNS)},
        capture_output=True,
        text=True,
        check=True,
    )
    return [*lines, "", *done.stdout.rstrip().splitlines()]


def main() -> None:
    """Draw the terminal; fonts are the reader's own, so that nothing is loaded from elsewhere."""
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere)
        for line in shown(COMMAND):
            text = Text(line)
            if line.startswith(("$", "    --")):
                text.stylize("bold")
            text.highlight_regex(r"simulated$", "dim")
            text.highlight_regex(r"  0  1 needs [\d.]+ GiB", "red")
            console.print(text)
        svg = console.export_svg(title="batchfinder sweep")
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    svg = svg.replace("Fira Code", "ui-monospace, SFMono-Regular, Menlo, Consolas, monospace")
    PICTURE.write_text(svg.rstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
