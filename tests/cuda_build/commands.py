"""Training scripts as users write them, and dry runs of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.cli.command import Done, run_command

TRAIN = """\
import sys
import torch

batch_size, accumulation, steps = (int(word) for word in sys.argv[1:4])
net = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(4)]).cuda()
optimizer = torch.optim.AdamW(net.parameters())
for step in range(steps):
    for _ in range(accumulation):
        x = torch.randn(batch_size, 1024, device="cuda")
        net(x).square().mean().backward()
    torch.cuda.reset_peak_memory_stats()  # as loggers do
    optimizer.step()
    optimizer.zero_grad()
"""
HELPERS = TRAIN.partition("for step")[0].replace("(int(word) for word in sys.argv[1:4])", "(64, 1, 100)")
STEPS = f"""{HELPERS}
def train(count):
    for _ in range(count):
        net(torch.randn(batch_size, 1024, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def dry_run(
    folder: Path, script: str, *options: str, arguments: tuple[str, ...] = (), gpu: str = "t4", **variables: str
) -> Done:
    """A dry run of a script that lies in a folder; JSON unless the options say more."""
    (folder / "train.py").write_text(script)
    command = ("--", sys.executable, "train.py", *arguments)
    shown = options or ("--json",)
    temporary = folder / "temporary"
    temporary.mkdir(exist_ok=True)
    variables["TMPDIR"] = str(temporary)
    done = run_command("dry-run", "--gpu", gpu, *shown, *command, cache=folder / "c", folder=folder, **variables)
    assert not list(temporary.glob("batchfinder-*"))
    return done


def process_of(done: Done) -> dict[str, Any]:
    """The one process that used a card."""
    (process,) = json.loads(done.out)["processes"]
    return dict(process)
