"""`dry-run` of commands of several processes, and what is left of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import COMMAND, environment, run_command
from tests.cuda_build.commands import STEPS, dry_run, process_of

pytestmark = [pytest.mark.cuda_build, pytest.mark.usefixtures("cuda_stub")]


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
    assert len(first["steps"]) == len(second["steps"]) < 300


FORKED = """
import multiprocessing, os, torch, torch.distributed as dist

def work(rank, count):
    dist.init_process_group("nccl", init_method=f"file://{os.getcwd()}/store", rank=rank, world_size=2)
    torch.cuda.set_device(rank)
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1024, 1024).cuda())
    optimizer = torch.optim.AdamW(net.parameters())
    for _ in range(count):
        net(torch.randn(64, 1024, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

if __name__ == "__main__":
    context = multiprocessing.get_context("METHOD")
    workers = [context.Process(target=work, args=(rank, 3000)) for rank in range(2)]
    for worker in workers: worker.start()
    for worker in workers: worker.join()
"""


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.exhaustive)])
def test_ranks_that_the_script_starts_itself(tmp_path: Path, method: str) -> None:
    """After it has imported torch; they have no launcher's variables."""
    done = dry_run(tmp_path, FORKED.replace("METHOD", method), "--json", "--count", "2")
    found = json.loads(done.out)
    assert (done.code, found["outcome"]) == (0, "fits"), done.err
    assert [(each["rank"], each["device"], each["ended"]) for each in found["processes"]] == [
        (0, 0, "steady"),
        (1, 1, "steady"),
    ]
    first, second = (len(each["steps"]) for each in found["processes"])
    assert first == second < 3000


def test_a_process_that_is_forked_and_ends_by_itself(tmp_path: Path) -> None:
    """Its peaks are whole: multiprocessing ends it without what atexit has."""
    script = """
import multiprocessing, torch

def work():
    torch.ones(1 << 20, device="cuda")
    torch.ones(1 << 28, device="cuda")

worker = multiprocessing.get_context("fork").Process(target=work)
worker.start()
worker.join()
"""
    process = process_of(dry_run(tmp_path, script))
    assert process["peak_allocated_bytes"] == 4 << 28


def test_a_launchers_variables_without_a_process_group(tmp_path: Path) -> None:
    """They are of whatever shell it is: nothing waits for a rank that never comes."""
    process = process_of(dry_run(tmp_path, f"{STEPS}train(3000)", WORLD_SIZE="2", RANK="1"))
    assert (process["rank"], process["world_size"], process["ended"]) == (0, 1, "steady")


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
