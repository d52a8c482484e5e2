"""Commands on simulated cards: `dry-run` and `find`, on scripts as users write them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from batchfinder.testing import CudaStubFixture
from tests.cli.command import COMMAND, Done, environment, run_command

pytestmark = pytest.mark.cuda_build

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
PEAKS = """
import atexit, json
from torch.cuda.memory import _snapshot
torch.cuda.reset_peak_memory_stats = lambda: None
atexit.register(lambda: print("PEAKS", torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()))
"""
WEIGHTS = 4 * 4 * (1024 * 1024 + 1024)
HELPERS = TRAIN.partition("for step")[0].replace("(int(word) for word in sys.argv[1:4])", "(64, 1, 100)")
STEPS = f"""{HELPERS}
def train(count):
    for _ in range(count):
        net(torch.randn(batch_size, 1024, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.fixture(autouse=True)
def build_is_here(cuda_stub: CudaStubFixture) -> None:
    """Skips where the CUDA build cannot be run."""
    cuda_stub()


def dry_run(folder: Path, script: str, *options: str, arguments: tuple[str, ...] = (), **variables: str) -> Done:
    """A dry run of a script that lies in a folder; JSON unless the options say more."""
    (folder / "train.py").write_text(script)
    command = ("--", sys.executable, "train.py", *arguments)
    shown = options or ("--json",)
    temporary = folder / "temporary"
    temporary.mkdir(exist_ok=True)
    variables["TMPDIR"] = str(temporary)
    done = run_command("dry-run", "--gpu", "t4", *shown, *command, cache=folder / "c", folder=folder, **variables)
    assert not list(temporary.glob("batchfinder-*"))
    return done


def process_of(done: Done) -> dict[str, Any]:
    """The one process that used a card."""
    (process,) = json.loads(done.out)["processes"]
    return dict(process)


def test_peaks_are_what_pytorch_counts(tmp_path: Path) -> None:
    """To the byte, though the script resets them in each step; and what holds them is told."""
    done = dry_run(tmp_path, TRAIN, arguments=("2048", "2", "12"))
    found = json.loads(done.out)
    assert (done.code, found["outcome"]) == (0, "fits")
    process = process_of(done)
    assert process["ended"] == "steady"
    assert 6 <= len(process["steps"]) < 12
    (tmp_path / "plain.py").write_text(TRAIN.replace("import torch\n", f"import torch\n{PEAKS}", 1))
    argv = ("stub", "run", "--gpu", "t4", "--", sys.executable, "plain.py", "2048", "2", "12")
    plain = run_command(*argv, cache=tmp_path / "c", folder=tmp_path)
    allocated, reserved = map(int, re.findall(r"PEAKS (\d+) (\d+)", plain.out)[0])
    assert (process["peak_allocated_bytes"], process["peak_reserved_bytes"]) == (allocated, reserved)

    peak = process["peak"]
    assert (peak["phase"], peak["line"]) == ("backward", "train.py:10")
    assert peak["held"]["weights"] == peak["held"]["gradients"] == WEIGHTS
    assert peak["held"]["optimizer state"] == 2 * WEIGHTS
    assert sum(peak["held"].values()) == pytest.approx(allocated, rel=0.01)
    assert next(iter(peak["lines"])) == "train.py:10"


def test_out_of_memory(tmp_path: Path) -> None:
    """Exit code 1, the user's line, and what PyTorch's own message says."""
    done = dry_run(tmp_path, TRAIN, arguments=("3000000", "1", "12"))
    found = json.loads(done.out)
    assert (done.code, found["outcome"]) == (1, "out of memory")
    (error,) = process_of(done)["out_of_memory"]
    wanted = re.findall(r"Tried to allocate ([\d.]+) GiB", done.err)[0]
    assert f"{error['wanted'] / (1 << 30):.2f}" == wanted
    assert (error["line"], error["phase"], error["step"]) == ("train.py:10", "forward", 1)
    assert process_of(done)["peak"]["held"]["weights"] == WEIGHTS
    shown = dry_run(tmp_path, TRAIN, "--explain", arguments=("3000000", "1", "12"))
    assert (
        f"does not fit: out of memory in the forward pass of step 1 at train.py:10, which asked for {wanted} GiB"
        in shown.out
    )


@pytest.mark.parametrize(
    ("script", "code", "words"),
    [
        (f"{STEPS}train(2); raise ValueError('my own')", 2, "failed by itself, with exit code 1"),
        (f"{STEPS}train(2)\nimport os; os.kill(os.getpid(), 9)", 2, "failed by itself, ended by SIGKILL"),
        ("print('no card')", 2, "ended without using a GPU"),
        (f"{HELPERS}\nnet(torch.randn(64, 1024, device='cuda'))", 0, "no optimizer took a step"),
        (
            f"{STEPS}\ntry: torch.empty(1 << 36, device='cuda')\nexcept torch.OutOfMemoryError: train(20)",
            1,
            "caught 1 out-of-memory error and went on",
        ),
        (f"{STEPS}torch.empty(1 << 50, device='cuda')", 2, "a wrong number rather than a lack of memory"),
        (
            f"{STEPS}kept = []\nfor _ in range(200): kept.append(torch.ones(1 << 18, device='cuda')); train(1)",
            0,
            "memory grows: each of the last steps left 1.00 MiB more alive",
        ),
    ],
)
def test_what_else_may_happen(tmp_path: Path, script: str, code: int, words: str) -> None:
    """A sentence and an exit code for each; the command's own error stays as it is."""
    done = dry_run(tmp_path, script, "--explain")
    assert done.code == code, (done.out, done.err)
    assert words in done.out
    assert ("ValueError: my own" in done.err) is ("my own" in script)
    assert "batchfinder/programs" not in done.err  # no traceback of ours


def test_steps_and_epochs(tmp_path: Path) -> None:
    """As many as asked: an epoch has its evaluation and its checkpoint."""
    done = dry_run(tmp_path, TRAIN, "--json", "--steps", "3", arguments=("64", "1", "100"))
    process = process_of(done)
    assert (len(process["steps"]), process["ended"]) == (3, "steps")
    script = f"""{STEPS}
from torch.utils.data import DataLoader, TensorDataset
rows = DataLoader(TensorDataset(torch.randn(640, 1024)), batch_size=64)
held_out = DataLoader(TensorDataset(torch.randn(64, 1024)), batch_size=64)
for epoch in range(5):
    for number, (x,) in enumerate(rows):
        net(x.cuda()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if number == 4:
            with torch.no_grad(): [net(x.cuda()) for x, in held_out]
    with torch.no_grad(): [net(x.cuda()) for x, in held_out]
    torch.save(net.state_dict(), f"epoch-{{epoch}}.pt")
"""
    process = process_of(dry_run(tmp_path, script, "--json", "--epochs", "2"))
    assert (process["epochs"], len(process["steps"]), process["ended"]) == (2, 20, "epochs")
    assert sorted(path.name for path in tmp_path.glob("*.pt")) == ["epoch-0.pt", "epoch-1.pt"]


def test_ranks_end_at_the_same_step(tmp_path: Path) -> None:
    """With torchrun; a row for each."""
    script = f"""
import os, torch, torch.distributed as dist
dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
{STEPS}
net = torch.nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.AdamW(net.parameters())
train(300)
"""
    (tmp_path / "train.py").write_text(script)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py")
    options = ("dry-run", "--gpu", "t4", "--count", "2", "--json")
    done = run_command(*options, "--", *torchrun, cache=tmp_path / "c", folder=tmp_path)
    found = json.loads(done.out)
    assert (done.code, found["outcome"]) == (0, "fits"), done.err
    first, second = found["processes"]
    assert [each["rank"] for each in (first, second)] == [0, 1]
    assert [each["device"] for each in (first, second)] == [0, 1]
    assert abs(len(first["steps"]) - len(second["steps"])) <= 1
    assert len(first["steps"]) < 300


def test_nothing_is_left_of_it(tmp_path: Path) -> None:
    """Not a process that it has set free, where it ends by itself and where it is interrupted; nor a folder."""
    loose = "[sys.executable, '-c', 'import os, time; os.setsid(); time.sleep(333)']"
    start = f"import subprocess, sys; subprocess.Popen({loose})\n"
    assert dry_run(tmp_path, f"{start}{STEPS}train(20)").code == 0
    assert not _running("time.sleep(333)")

    (tmp_path / "train.py").write_text(f"{start}{STEPS}train(2); print('ready', flush=True)\nwhile True: pass")
    argv = [*COMMAND, "dry-run", "--gpu", "t4", "--json", "--steps", "50", "--", sys.executable, "train.py"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(argv, cwd=tmp_path, env=environment(tmp_path / "c"), **pipes) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "ready" in line:
                break
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    found = json.loads(out)
    assert (process.returncode, found["outcome"]) == (130, "interrupted")
    assert len(found["processes"][0]["steps"]) == 2
    assert not _running("time.sleep(333)")
    assert not _running(str(tmp_path / "train.py"))


def _running(words: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if words in line:
                found.append(int(entry.name))
    return found


def test_loggers_and_the_hub_are_offline(tmp_path: Path) -> None:
    """Unless they may be reached, whatever the user's environment says."""
    script = f"{STEPS}train(1)\nimport os; print(os.environ['WANDB_MODE'], os.environ.get('HF_HUB_OFFLINE'))"
    offline = dry_run(tmp_path, script, "--explain", WANDB_MODE="online", HF_HUB_OFFLINE="0")
    assert "disabled 1" in offline.out
    online = dry_run(tmp_path, script, "--online", WANDB_MODE="online", HF_HUB_OFFLINE="0")
    assert "online 0" in online.out


def test_a_snapshot_for_pytorchs_viewer(tmp_path: Path) -> None:
    """It has the allocator's events, with the script's lines."""
    import pickle

    dry_run(tmp_path, TRAIN, "--snapshot", "memory.pickle", arguments=("64", "1", "12"))
    snapshot = pickle.loads((tmp_path / "memory.pickle").read_bytes())
    files = {frame["filename"] for event in snapshot["device_traces"][0] for frame in event.get("frames", ())}
    assert str(tmp_path / "train.py") in files


def find(folder: Path, script: str, *arguments: str) -> Done:
    """`find` for a script that lies in a folder."""
    (folder / "train.py").write_text(script)
    return run_command("find", "--json", *arguments, cache=folder / "c", folder=folder)


def test_the_size_found_runs_and_the_next_does_not(tmp_path: Path) -> None:
    """On two cards of different memory; what it writes is thrown away, and its line trains to the target."""
    wide = TRAIN.replace("torch.randn(batch_size,", "torch.randn(100 * batch_size,")
    script = f"{wide}\nopen('written.txt', 'w').write('by a run')"
    command = ("--", sys.executable, "train.py", "{batch_size}", "{accumulation}", "12")
    options = ("--memory", "256MiB", "--target-batch-size", "200")
    done = find(tmp_path, script, *options, *command)
    assert done.code == 0, done.err
    (found,) = json.loads(done.out)
    size = found["batch_size"]
    verdicts = {run["batch_size"]: run["verdict"] for run in found["runs"]}
    assert verdicts[size] == "fits"
    assert verdicts[size + 1] != "fits"
    assert len(found["runs"]) <= 8
    assert not (tmp_path / "written.txt").exists()
    assert found["micro_batch_size"] <= size
    assert found["micro_batch_size"] * found["accumulation"] == pytest.approx(200, rel=0.05)

    again = run_command(
        *("dry-run", "--memory", "256MiB", "--json", "--", *found["command"]), cache=tmp_path / "c", folder=tmp_path
    )
    assert again.code == 0, again.out


def test_a_config_file_and_a_variable(tmp_path: Path) -> None:
    """The number in the copy of the file changes, and the file stays."""
    script = "import os, tomllib\n" + TRAIN.replace(
        "(int(word) for word in sys.argv[1:4])",
        "tomllib.load(open('cfg.toml', 'rb'))['n'], 1, int(os.environ['STEPS'])",
    )
    (tmp_path / "cfg.toml").write_text("n = 8  # for the T4\n")
    options = ("--memory", "256MiB", "--in", "cfg.toml:n", "-e", "STEPS=12", "--max-batch-size", "64")
    for where in ((), ("--here",)):
        (found,) = json.loads(find(tmp_path, script, *options, *where, "--", sys.executable, "train.py").out)
        assert found["batch_size"] == 64
        assert found["config"] == {"cfg.toml:n": found["batch_size"]}
        assert (tmp_path / "cfg.toml").read_text() == "n = 8  # for the T4\n"


def test_data_with_fewer_samples_ends_the_search(tmp_path: Path) -> None:
    """A larger batch that takes no more memory has the same samples in it."""
    script = TRAIN.replace("torch.randn(batch_size,", "torch.randn(min(batch_size, 9000),")
    done = find(tmp_path, script, "--gpu", "t4", "--", sys.executable, "train.py", "{batch_size}", "1", "12")
    (found,) = json.loads(done.out)
    assert found["stop"] == "cap"
    assert 2 <= len(found["runs"]) <= 7
    assert 9000 <= found["batch_size"] < 1 << 20


def test_a_command_that_fails_ends_the_search(tmp_path: Path) -> None:
    """With its last lines, and exit code 2."""
    done = find(tmp_path, "raise ValueError('mine')", "--", sys.executable, "train.py", "{batch_size}")
    assert done.code == 2
    assert "failed by itself at batch size 1 (exit code 1)" in done.err
    assert "ValueError: mine" in done.err
