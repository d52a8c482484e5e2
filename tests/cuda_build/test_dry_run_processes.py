"""`dry-run` of commands of several processes, and what is left of them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import COMMAND, environment, run_command
from tests.cuda_build.commands import STEPS, dry_run, process_of

pytestmark = [pytest.mark.cuda_build, pytest.mark.usefixtures("cuda_stub")]


RANKS = f"""
import os, torch, torch.distributed as dist
dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
{STEPS}
net = torch.nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.AdamW(net.parameters())
ranks = [None] * dist.get_world_size()
dist.all_gather_object(ranks, dist.get_rank(), group=dist.new_group(backend="gloo"))
dist.barrier()
train(300)
"""


def test_ranks_end_at_the_same_step_and_one_alone_takes_as_much(tmp_path: Path) -> None:
    """With torchrun, a row for each; without it, as the first of two."""
    (tmp_path / "train.py").write_text(RANKS)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py")
    options = ("dry-run", "--gpu", "t4", "--count", "2", "--json")
    done = run_command(*options, "--", *torchrun, cache=tmp_path / "c", folder=tmp_path)
    found = json.loads(done.out)
    assert (done.code, found["outcome"]) == (0, "fits"), done.err
    first, second = found["processes"]
    assert [each["rank"] for each in (first, second)] == [0, 1]
    assert [each["device"] for each in (first, second)] == [0, 1]
    assert len(first["steps"]) == len(second["steps"]) < 300

    alone = process_of(dry_run(tmp_path, RANKS, "--json", "--num-gpus", "2"))
    assert (alone["rank"], alone["world_size"], alone["ended"]) == (0, 2, "steady")
    for peak in ("peak_allocated_bytes", "peak_reserved_bytes"):
        assert alone[peak] == first[peak]


@pytest.mark.exhaustive
def test_the_first_rank_of_sixty_four(tmp_path: Path) -> None:
    """FSDP2 in eight machines: a shard of the state is on its card; a launcher would start more than this rank."""
    script = """
import os, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
mesh = init_device_mesh("cuda", (8, 8), mesh_dim_names=("replicate", "shard"))
assert (dist.get_rank(), torch.cuda.device_count()) == (0, 8)
net = torch.nn.Sequential(*[torch.nn.Linear(4096, 4096, bias=False, device="meta") for _ in range(4)])
for layer in net: fully_shard(layer, mesh=mesh)
fully_shard(net, mesh=mesh)
net.to_empty(device="cuda")
optimizer = torch.optim.AdamW(net.parameters())
for step in range(100):
    net(torch.randn(64, 4096, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    done = dry_run(tmp_path, script, "--json", "--num-gpus", "64")
    process = process_of(done)
    assert (done.code, process["world_size"], process["ended"]) == (0, 64, "steady"), done.err
    weights = 4 * 4 * 4096 * 4096
    assert process["peak"]["held"]["optimizer state"] == 2 * weights // 8
    assert "the first rank of 64 alone" in dry_run(tmp_path, script, "--explain", "--num-gpus", "64").out

    torchrun = ("--", "torchrun", "train.py")
    done = run_command("dry-run", "--num-gpus", "64", *torchrun, cache=tmp_path / "c", folder=tmp_path)
    assert done.code == 2
    assert "a launcher would start several" in done.err


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


@pytest.mark.exhaustive
def test_two_at_once_with_one_port(tmp_path: Path) -> None:
    """One has it; torchrun's own error says so to the other, which has no answer."""
    (tmp_path / "train.py").write_text(RANKS)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    torchrun = (
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        port,
        "train.py",
    )
    with ThreadPoolExecutor() as pool:
        runs = [
            pool.submit(
                run_command,
                "dry-run",
                "--count",
                "2",
                "--json",
                "--",
                *torchrun,
                cache=tmp_path / each,
                folder=tmp_path,
            )
            for each in ("first", "second")
        ]
    codes = {run.result().code: run.result() for run in runs}
    assert sorted(codes) == [0, 2], [run.result().err for run in runs]
    assert [each["world_size"] for each in json.loads(codes[0].out)["processes"]] == [2, 2]
    assert json.loads(codes[2].out)["outcome"] == "failed"
    assert port in codes[2].err


@pytest.mark.exhaustive
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
