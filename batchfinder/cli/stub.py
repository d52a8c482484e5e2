"""`stub`: PyTorch's CUDA build without a GPU: download it, say what is here, run a command on it."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys

from batchfinder.cli.main import OK
from batchfinder.cli.options import whole_number
from batchfinder.cuda_stub import (
    CudaBuild,
    StubCard,
    StubSession,
    StubUnavailable,
    find_build,
    install,
    installed_builds,
    uninstall,
)
from batchfinder.cuda_stub.builds import stub_folder
from batchfinder.cuda_stub.launch import ADDRESSES, EVENTS, VALUES
from batchfinder.devices import find_gpu
from batchfinder.errors import CudaStubUnavailable, InvalidValue
from batchfinder.report.terminal import tell
from batchfinder.stub_cards import open_session, stub_card
from batchfinder.training.synonyms import one_of
from batchfinder.units import MIB, parse_bytes

BOTH_ENDS, _ENDS = "both", ("early", "late")
_IN_A_MACHINE = 8

_PROBE = (
    "import torch; x = torch.ones(1 << 20, device='cuda'); (x * 2).sum(); "
    "print(torch.__version__, torch.cuda.memory_allocated())"
)


def main(arguments: argparse.Namespace) -> int:
    """Run one of its commands."""
    try:
        if arguments.stub_command == "install":
            if arguments.uninstall:
                uninstall(tell)
            else:
                install(arguments.torch, minimal=arguments.minimal, tell=tell)
            return OK
        if arguments.stub_command == "status":
            return _status(arguments.json)
        return _run(arguments)
    except StubUnavailable as error:
        raise CudaStubUnavailable(str(error)) from error


def _status(as_json: bool) -> int:
    """Which builds are here, and whether the one for this environment runs."""
    downloaded = installed_builds()
    found: CudaBuild | None = None
    problem = ""
    try:
        found = find_build()
        with open_session([stub_card()], build=found, values="none") as session:
            done = subprocess.run(
                [sys.executable, "-c", _PROBE],
                env={**os.environ, **session.variables()},
                capture_output=True,
                text=True,
            )
            if done.returncode:
                problem = (done.stderr.strip() or f"it ended with {done.returncode}").splitlines()[-1]
    except (StubUnavailable, CudaStubUnavailable) as error:
        problem = str(error)
    if as_json:
        facts = {
            "folder": str(stub_folder()),
            "builds": [build.version for build in downloaded],
            "used": None if found is None else found.version,
            "cudnn": found is not None and found.cudnn_folder is not None,
            "runs": not problem,
            "problem": problem,
        }
        print(json.dumps(facts, indent=1))
    else:
        print(f"folder      {stub_folder()}")
        print(f"downloaded  {', '.join(build.version for build in downloaded) or 'nothing'}")
        if found is not None:
            where = "this environment" if found.beside is None else str(found.beside)
            beside = (
                "with cuDNN" if found.cudnn_folder is not None else "without cuDNN: convolutions take no workspaces"
            )
            print(f"used        PyTorch {found.version} of {where}, {beside}")
        print(f"runs        {'yes' if not problem else f'no: {problem}'}")
    return OK


def command_of(arguments: argparse.Namespace) -> list[str]:
    """The command that is to be run, which stands after the options."""
    argv: list[str] = arguments.argv[1:] if arguments.argv[:1] == ["--"] else arguments.argv
    if not argv:
        raise InvalidValue("COMMAND", None, "a command after the options, such as: -- python train.py")
    return argv


def cards_of(arguments: argparse.Namespace) -> list[StubCard]:
    """The cards that a command is to be run on."""
    memory = None if arguments.memory is None else parse_bytes(arguments.memory, "--memory")
    held = 0 if arguments.held is None else parse_bytes(arguments.held, "--held")
    count = whole_number("--count", arguments.count)
    kinds = arguments.gpu or [None if memory is not None else "A100 80GB"]
    found = [None if gpu is None else find_gpu(gpu, "--memory") for gpu in kinds]
    return [stub_card(gpu, memory, held) for gpu in found for _ in range(count)]


def ranks_of(arguments: argparse.Namespace) -> tuple[int, int] | None:
    """GPUs and machines of a training whose first rank is run alone; None without `--num-gpus`."""
    if arguments.num_gpus is None:
        if arguments.nodes is not None:
            raise InvalidValue("--nodes", arguments.nodes, "a number beside --num-gpus")
        return None
    if arguments.count != "1":
        raise InvalidValue("--count", arguments.count, "no number beside --num-gpus, which says how many there are")
    count = whole_number("--num-gpus", arguments.num_gpus)
    nodes = -(-count // _IN_A_MACHINE) if arguments.nodes is None else whole_number("--nodes", arguments.nodes)
    if count % nodes:
        raise InvalidValue("--nodes", str(nodes), f"a number that {count} GPUs can be shared out to evenly")
    return count, nodes


def _run(arguments: argparse.Namespace) -> int:
    """Run a command with simulated cards; its exit code is this one's."""
    argv = command_of(arguments)
    cards = cards_of(arguments)
    events = one_of("--events", arguments.events, (*EVENTS, BOTH_ENDS))
    code, reserved = OK, []
    for end in _ENDS if events == BOTH_ENDS else (events,):
        session = open_session(
            cards,
            build=find_build(arguments.torch),
            values=one_of("--values", arguments.values, VALUES),
            events=end,
            addresses=one_of("--addresses", arguments.addresses, ADDRESSES),
        )
        with session:
            ended, report = _ended(argv, session), session.report()
        code = code or ended
        reserved.append(report.reserved_bytes)
        for words in report.words():
            tell(f"batchfinder: {words}")
    for card, peaks in enumerate(zip(*reserved, strict=True)):
        if any(peaks):
            range_of = " to ".join(f"{peak / MIB:,.0f}" for peak in sorted(set(peaks)))
            between = ", by when work on other streams is done" if len(set(peaks)) > 1 else ""
            tell(f"batchfinder: cuda:{card} had {range_of} MiB reserved at most, in one process{between}")
    return code


def _ended(argv: list[str], session: StubSession) -> int:
    """Run a command on a session's cards until it ends; its exit code as a shell would say it."""
    try:
        process = subprocess.Popen(argv, env={**os.environ, **session.variables()})
    except OSError as error:
        raise InvalidValue("COMMAND", argv[0], f"a program that can be started ({error.strerror})") from error
    while True:
        try:
            code = process.wait()
        except KeyboardInterrupt:
            continue  # it has had the signal, too, and ends as it sees fit
        except BaseException:
            process.send_signal(signal.SIGTERM)
            raise
        return code if code >= 0 else 128 - code
