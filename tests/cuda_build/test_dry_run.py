"""`dry-run`, on scripts as users write them."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from batchfinder.devices import find_gpu
from tests.cli.command import run_command
from tests.cuda_build.commands import HELPERS, STEPS, TRAIN, dry_run, process_of

pytestmark = [pytest.mark.cuda_build, pytest.mark.usefixtures("cuda_stub")]

PEAKS = """
import atexit, json
from torch.cuda.memory import _snapshot
torch.cuda.reset_peak_memory_stats = lambda: None
atexit.register(lambda: print("PEAKS", torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()))
"""
WEIGHTS = 4 * 4 * (1024 * 1024 + 1024)


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
    shown = dry_run(tmp_path, TRAIN, "--once", arguments=("3000000", "1", "12"))
    assert (
        f"does not fit: out of memory in the forward pass of step 1 at train.py:10, which asked for {wanted} GiB"
        in shown.out
    )


@pytest.mark.exhaustive
def test_what_it_takes_that_does_not_fit(tmp_path: Path) -> None:
    """As much as on a card that has the room, with the GPUs that do and what would make it less."""
    script = f"{TRAIN}\nopen('written', 'a').write('once\\n')"
    done = dry_run(tmp_path, script, "--json", arguments=("1200000", "1", "3"))
    assert done.code == 1, done.err
    roomy = json.loads(done.out)["with_room"]["processes"][0]
    larger = run_command(
        *("dry-run", "--gpu", "h100", "--json", "--", sys.executable, "train.py", "1200000", "1", "3"),
        cache=tmp_path / "c",
        folder=tmp_path,
    )
    (process,) = json.loads(larger.out)["processes"]
    assert roomy["peak_reserved_bytes"] == pytest.approx(process["peak_reserved_bytes"], rel=0.02)  # cuBLAS' workspace
    assert (tmp_path / "written").read_text() == "once\n"  # by the one on an H100
    shown = dry_run(tmp_path, script, "--explain", arguments=("1200000", "1", "3")).out
    takes = f"{roomy['peak_reserved_bytes'] / (1 << 30):.2f} GiB"
    assert f"it takes {takes} reserved where there is room" in shown
    assert "half the batch size with twice the accumulation: about" in shown
    named = re.findall(r"GPUs with as much memory: (.*)", shown)[0].split(", ")
    assert min(find_gpu(name).usable_bytes for name in named) >= roomy["peak_reserved_bytes"]
    assert find_gpu("RTX 4090").usable_bytes < roomy["peak_reserved_bytes"]
    assert len(named) == 3


@pytest.mark.parametrize("values", ["all", "small"])
def test_values_of_all_tensors(tmp_path: Path, values: str) -> None:
    """A network that is too large for values of small tensors alone trains to the CPU's losses; memory is the same."""
    script = """
import sys
import torch

def losses(device):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.Flatten(),
                              torch.nn.Linear(8 * 30 * 30, 64), torch.nn.LayerNorm(64), torch.nn.Linear(64, 10)).to(device)
    x, y = torch.randn(64, 3, 32, 32).to(device), torch.arange(64).remainder(10).to(device)
    optimizer = torch.optim.AdamW(net.parameters())
    for _ in range(4):
        loss = torch.nn.functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()

on_cpu, on_card = list(losses("cpu")), list(losses("cuda"))
print("near", all(abs(a - b) < 1e-4 for a, b in zip(on_cpu, on_card, strict=True)), on_cpu, on_card)
"""
    done = dry_run(tmp_path, script, "--explain", "--values", values)
    assert f"near {values == 'all'}" in done.out, done.out
    assert ("read and not known" in done.out) is (values == "small")


@pytest.mark.parametrize(
    ("script", "code", "words"),
    [
        (f"{STEPS}train(2); raise ValueError('my own')", 2, "failed by itself, with exit code 1"),
        (f"{STEPS}train(2)\nimport os; os.kill(os.getpid(), 9)", 2, "failed by itself, ended by SIGKILL"),
        ("print('no card')", 2, "ended without using a GPU"),
        (
            "from huggingface_hub import hf_hub_download; hf_hub_download('gpt2', 'config.json')",
            2,
            "the Hub and loggers are offline in a dry run: --online lets them be reached",
        ),
        (f"{HELPERS}\nnet(torch.randn(64, 1024, device='cuda'))", 0, "no optimizer took a step"),
        (
            f"{STEPS}\ntry: torch.empty(1 << 36, device='cuda')\nexcept torch.OutOfMemoryError: train(20)",
            1,
            "caught 1 out-of-memory error and went on",
        ),
        (f"{STEPS}torch.empty(1 << 50, device='cuda')", 2, "a wrong number rather than a lack of memory"),
        (
            f"{STEPS}kept = []\nfor _ in range(12): kept.append(torch.ones(1 << 18, device='cuda')); train(1)",
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


def test_what_cudnn_catches_is_no_error_of_the_scripts(tmp_path: Path) -> None:
    """Without the memory for a workspace it does with a smaller one, and the script trains."""
    script = """
import torch

layers = []
for inside, out, stride in ((4, 64, 1), (64, 128, 2), (128, 256, 1)):
    layers += [torch.nn.Conv2d(inside, out, 3, stride, 1), torch.nn.BatchNorm2d(out), torch.nn.ReLU(inplace=True)]
net = torch.nn.Sequential(*layers, torch.nn.AdaptiveAvgPool2d(1)).cuda()
optimizer = torch.optim.SGD(net.parameters(), 1e-3)
for _ in range(12):
    with torch.autocast("cuda", torch.float16):
        loss = net(torch.zeros(800, 4, 48, 48, device="cuda")).float().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print("ooms", torch.cuda.memory_stats()["num_ooms"], flush=True)
"""
    done = dry_run(tmp_path, script, "--memory", "2GiB", "--explain", gpu="v100 16gb")
    assert int(re.findall(r"ooms (\d+)", done.out)[-1]) > 0
    assert done.code == 0, done.out
    assert "out of memory" not in done.out
    assert "out-of-memory" not in done.out


@pytest.mark.exhaustive
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


def test_steps_of_several_optimizers(tmp_path: Path) -> None:
    """Two that take turns are one step; one made anew for each fold goes on where the last one ended."""
    script = f"""{HELPERS}
for fold in range(3):
    optimizer, second = torch.optim.AdamW(net.parameters()), torch.optim.SGD(net.parameters())
    for _ in range(4):
        net(torch.randn(batch_size, 1024, device="cuda")).square().mean().backward()
        optimizer.step()
        second.step()
        optimizer.zero_grad()
"""
    steps = process_of(dry_run(tmp_path, script, "--json", "--steps", "100"))["steps"]
    assert 10 <= len(steps) <= 12  # the first of a new one may be taken for the second of the old one's step


def test_a_scratch_copy(tmp_path: Path) -> None:
    """What it writes is thrown away, and it is told to be where it is."""
    script = "import os; open('written', 'w'); print('same', os.environ['PWD'] == os.getcwd())"
    done = dry_run(tmp_path, script, "--scratch")
    assert "same True" in done.out, done.err
    assert not (tmp_path / "written").exists()
    dry_run(tmp_path, script, "--explain")
    assert (tmp_path / "written").exists()


def test_loggers_and_the_hub_are_offline(tmp_path: Path) -> None:
    """Unless they may be reached, whatever the user's environment says."""
    script = "import os; print(os.environ['WANDB_MODE'], os.environ.get('HF_HUB_OFFLINE'))"
    offline = dry_run(tmp_path, script, "--explain", WANDB_MODE="online", HF_HUB_OFFLINE="0")
    assert "disabled 1" in offline.out
    online = dry_run(tmp_path, script, "--online", WANDB_MODE="online", HF_HUB_OFFLINE="0")
    assert "online 0" in online.out


def test_a_snapshot_and_a_page(tmp_path: Path) -> None:
    """PyTorch's viewer gets the allocator's events, and the page what holds the memory over two steps, to the peak."""
    import pickle

    done = dry_run(
        tmp_path, TRAIN, "--snapshot", "memory.pickle", "--html", "page.html", "--json", arguments=("64", "1", "12")
    )
    page = (tmp_path / "page.html").read_text()
    data = json.loads(re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[0])
    timeline = data["cells"][0]["timeline"]
    totals = [sum(sizes) * timeline["unit"] for sizes in zip(*timeline["by_kind"].values(), strict=True)]
    peak = process_of(done)["peak"]
    assert max(totals) == pytest.approx(process_of(done)["peak_allocated_bytes"], rel=0.01)
    at_peak = {kind: sizes[totals.index(max(totals))] for kind, sizes in timeline["by_kind"].items()}
    names = {"weights": "parameters", "gradients": "gradients", "optimizer state": "optimizer state"}
    for name, kind in names.items():
        assert at_peak[kind] * timeline["unit"] == pytest.approx(peak["held"][name], rel=0.01), name
    assert [stage for _, _, stage in timeline["marks"]].count("backward") == 2
    assert timeline["names"][timeline["modules"][totals.index(max(totals))]] == peak["line"]
    snapshot = pickle.loads((tmp_path / "memory.pickle").read_bytes())
    files = {frame["filename"] for event in snapshot["device_traces"][0] for frame in event.get("frames", ())}
    assert str(tmp_path / "train.py") in files
