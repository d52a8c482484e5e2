"""Tests of batchfinder/lightning/prediction.py and of the two ends of it: structure, rebuilt and foretelling."""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from batchfinder.devices import Device
from batchfinder.errors import InvalidValue
from batchfinder.find import find_max_batch_size
from batchfinder.lightning.callback import BatchFinder
from batchfinder.lightning.dry_run import Setting
from batchfinder.lightning.portable_pickle import MOST_BYTES
from batchfinder.lightning.prediction import NotPortable, _check, hint, simulated_device
from batchfinder.lightning.stage_tuner import StageTuner
from batchfinder.measure.device_memory import HostMemory
from batchfinder.measure.tuner import SearchLimits
from batchfinder.recording.simulation import Simulation, StepConfig
from batchfinder.results import Shape
from batchfinder.search import Secant
from batchfinder.training.child_process import Child
from batchfinder.training.spec import WorkloadSpec
from batchfinder.units import MIB
from tests.forks import SHARP
from tests.lightning import nets
from tests.lightning.bounded import Bounded, state_of
from tests.lightning.starting import Here, at_start

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
CARD = Device("card", 1024 * MIB, 256 * MIB, (8, 0))


class Noisy(Here):
    """Reads data that draw random numbers, and counts."""

    def train_dataloader(self) -> Any:
        class Jitter(nets.Text):
            def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
                self.read = getattr(self, "read", 0) + int(torch.rand(1) < 2)
                return super().__getitem__(index)

        self.data = Jitter(96, self.seq_len)
        return torch.utils.data.DataLoader(self.data, batch_size=2, shuffle=True)


class Pointing(Bounded):
    """Holds what cannot be pickled."""

    def __init__(self, most: int) -> None:
        super().__init__(most)
        self.pointer = ctypes.pointer(ctypes.c_int(3))


class Deadly:
    """Ends the process that reads it."""

    def __reduce__(self) -> Any:
        return os._exit, (9,)


def asked(trainer: Any, callback: Any, batches: Any, **options: Any) -> int | None:
    """The hint for a card."""
    setting = Setting("fit", accumulation=trainer.accumulate_grad_batches)
    return hint(trainer, callback, setting, batches, Shape(), CARD, False, **options)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this process and its children put their temporary files, and find these tests."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{Path(__file__).parent}")
    return folder


def left_in(folder: Path) -> list[str]:
    """Files and processes of a folder that are still there after a while: a process takes a moment to end."""
    left: list[str] = []
    for _ in range(1200):
        left = [str(path) for path in folder.iterdir()]
        for process in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                left += [process.read_text()] if str(folder) in process.read_text() else []
            except OSError:
                continue
        if not left:
            break
        time.sleep(0.05)
    return left


@pytest.mark.usefixtures("forked_recorders")
def test_the_hint_is_the_answer_of_the_simulated_sweep(elsewhere: Path) -> None:
    """For a class of this module, to the sample; weights, random numbers and attributes stay, bit for bit."""

    def untouched(trainer: Any, callback: Any, batches: Any) -> Any:
        module = trainer.lightning_module
        batches.loaders  # made before, as the finder does
        before, attributes = state_of(trainer), dict(vars(module))
        answer = asked(trainer, callback, batches)
        assert state_of(trainer) == before
        assert list(vars(module)) == list(attributes)
        assert all(vars(module)[name] is value for name, value in attributes.items())
        assert not hasattr(module.data, "read")
        return answer

    answer = at_start(Noisy(), untouched)
    spec = WorkloadSpec("batchfinder.models:build_workload", {"spec": f"{__name__}:Here"})
    with Simulation(spec, StepConfig()) as simulation:
        probe = simulation.probe(CARD, [16])
        search = Secant(limit_bytes=CARD.usable_bytes, tolerance=0.0)
        assert answer == find_max_batch_size(probe, Shape(16), search=search).max_batch_size > 1000
    assert left_in(elsewhere) == []


SCRIPT = """
import json, logging, sys, torch
from tests.lightning import fits, nets

if __name__ != "__main__":
    sys.exit("a script is not to be imported")

def doubled(loss):
    return loss * 2

class Mine(nets.Transformer):
    def loss(self, batch):
        return doubled(super().loss(batch))

nets.Mine = Mine
logging.getLogger("batchfinder").setLevel("INFO")
logging.getLogger("batchfinder").addHandler(logging.StreamHandler(sys.stdout))
print(json.dumps(fits.fit(**json.loads(sys.argv[1]))))
"""


def test_a_search_starts_from_the_hint_and_trains(elsewhere: Path, tmp_path: Path) -> None:
    """A script's own class, under a real limit: the first try is just under the hint, and the answer trains.

    The class and what it uses of the script are sent to the recording, not imported there. The hint is of the answer's
    order. How many tries the rest takes is a matter of noise here, of which 60 MiB have some percent: at most 12, of
    which 4 fail; tests/measure/test_answering.py proves the figures where the noise is known.
    """
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    request = {
        "net": "Mine",
        "options": {"rows": 200, "seq_len": 64, "width": 64},
        "finder": {"predict": True, "cache": False, "tolerance": 0.05},
        "limit_mib": 60,
        "steps": 2,
    }
    done = subprocess.run(
        [sys.executable, str(script), json.dumps(request)],
        env={**os.environ, **SHARP, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    said = re.findall(r"the simulated step runs at batch size (\d+)$", done.stdout, re.MULTILINE)
    assert len(said) == 1
    hinted, tries = int(said[0]), found["trials"]
    assert (found["error"], found["steps"]) == (None, 2), found
    assert 0.8 * hinted <= tries[0][0] <= hinted, "it started from the hint"
    assert 0.5 * hinted <= found["batch_size"] <= 2 * hinted, (hinted, found)
    assert len(tries) <= 12, found
    assert sum(not fitted for _, fitted, _ in tries) <= 4, found
    assert left_in(elsewhere) == []


def test_what_cannot_be_pickled_is_searched_without(caplog: pytest.LogCaptureFixture) -> None:
    """From one sample on, to the same answer, and a line says why there was no hint."""
    found = []
    with caplog.at_level("INFO", logger="batchfinder"):
        for predict in (True, False):
            finder = BatchFinder(tolerance=0, cache=False, predict=predict)
            nets.trainer(callbacks=[finder], max_steps=1).fit(Pointing(23))
            found.append(finder.outcomes["fit"][None].trials[0].batch_size)
            assert finder.batch_size == 23
    assert found == [1, 1]
    assert [message for message in caplog.messages if "hint" in message] == [
        "BatchFinder: no hint from the simulated step: ValueError: ctypes objects containing pointers cannot be pickled"
    ]


def test_who_is_asked_for_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU only those who want one, and nobody whose cap is small; a wrong value is refused."""
    asked_with: list[Any] = []
    monkeypatch.setattr("batchfinder.lightning.stage_tuner.hint", lambda *args: asked_with.append(args[-2:]))

    def ask(trainer: Any, callback: Any, batches: Any) -> None:
        for predict, cap in ((None, None), (False, None), (True, 8), (True, 9), (True, None)):
            limits = SearchLimits(cap, 0.01, 0, 0)
            memory, nobody = HostMemory(None), ([], [])
            finding = StageTuner(
                trainer, callback, Setting("fit"), batches, nobody, memory, limits, None, print, predict=predict
            )
            finding._hint(Shape(), 1 << 30)

    at_start(Here(), ask)
    assert asked_with == [(True, 9), (True, None)]
    with pytest.raises(InvalidValue) as caught:
        BatchFinder(predict="yes")  # type: ignore[arg-type]
    assert str(caught.value) == "predict: 'yes' will not do; expected True, False, or None for on a GPU only."


def test_a_process_that_dies_gives_no_hint(elsewhere: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The one that records, the one that asks it, and one whose time is up; nothing is left of any of them."""

    def dies(module: Any, **options: Any) -> str:
        caplog.clear()
        assert at_start(module, lambda *now: asked(*now, **options)) is None
        return next(message for message in caplog.messages if "no hint" in message)

    with caplog.at_level("INFO", logger="batchfinder"):
        deadly = Here()
        deadly.deadly = Deadly()
        assert "exited with 9" in dies(deadly)
        assert "ended with 75" in dies(Here(), seconds=0.0)
    assert left_in(elsewhere) == []


def test_an_interrupt_ends_the_hint(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while the hint is made propagates, and nothing is left."""

    class Interrupted(Child):
        def ask(self, request: Any) -> Any:
            threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
            return super().ask(request)

    monkeypatch.setattr("batchfinder.lightning.prediction.Child", Interrupted)

    def interrupted(*now: Any) -> None:
        with pytest.raises(KeyboardInterrupt):
            asked(*now)

    at_start(Here(), interrupted)
    assert left_in(elsewhere) == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda trainer: setattr(trainer.lightning_module, "automatic_optimization", False), "manual optimization"),
        (
            lambda trainer: trainer.strategy.optimizers.append(trainer.optimizers[0]),
            "2 optimizers, or none that steps",
        ),
        (
            lambda trainer: vars(trainer.lightning_module).update(data=bytes(MOST_BYTES)),
            "it holds more than 64.00 MiB of data beside its tensors",
        ),
        (
            lambda trainer: vars(trainer.lightning_module).update(sparse=torch.eye(2).to_sparse()),
            "a tensor of type Tensor, torch.sparse_coo, on cpu",
        ),
    ],
)
def test_what_cannot_be_rebuilt(
    change: Callable[[Any], None], reason: str, caplog: pytest.LogCaptureFixture, elsewhere: Path
) -> None:
    """Is noticed before a process is started."""

    def changed(trainer: Any, callback: Any, batches: Any) -> None:
        change(trainer)
        assert asked(trainer, callback, batches, seconds=0.0) is None
        trainer.lightning_module.automatic_optimization = True
        del trainer.strategy.optimizers[1:]

    with caplog.at_level("INFO", logger="batchfinder"):
        at_start(Here(), changed)
    (message,) = [message for message in caplog.messages if "no hint" in message]
    assert message == f"BatchFinder: no hint from the simulated step: NotPortable: {reason}"


def test_a_step_that_is_not_lightnings_own() -> None:
    """A strategy, a precision or a transfer of the user's, or a validation in a fit: each is named."""
    reasons = []

    def reason(trainer: Any, setting: Setting) -> str:
        with pytest.raises(NotPortable) as caught:
            _check(trainer, setting)
        return str(caught.value)

    def changed(trainer: Any, callback: Any, batches: Any) -> None:
        def transfer(self: Any, batch: Any, device: Any, dataloader_idx: int) -> Any:
            return batch

        parts = (trainer.strategy, trainer.precision_plugin, trainer.lightning_module)
        for part, own in zip(parts, ({}, {}, {"transfer_batch_to_device": transfer}), strict=True):
            was = type(part)
            part.__class__ = type("Mine", (was,), own)
            reasons.append(reason(trainer, Setting("fit")))
            part.__class__ = was
        reasons.append(reason(trainer, Setting("validate", train=(4, None))))
        assert _check(trainer, Setting("fit"))[0] == "fp32"

    at_start(Here(), changed)
    assert reasons == [
        "a step under Mine",
        "a step in the precision of Mine",
        "batches that are moved to the device in a way of their own",
        "a validation in the middle of training",
    ]


def test_what_is_asked_of_the_far_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step as this trainer takes it, in a process that sees no GPU."""
    asked_for: list[Any] = []

    class Near(Child):
        def __init__(self, module: str, arguments: Any, environment: Any) -> None:
            super().__init__("batchfinder.lightning.prediction_server", arguments, environment)
            asked_for.append(environment)

        def ask(self, request: Any) -> Any:
            asked_for.append(request)
            return {"batch_size": 5}

    monkeypatch.setattr("batchfinder.lightning.prediction.Child", Near)
    assert at_start(Here(), asked, precision="bf16-mixed", accumulate_grad_batches=4) == 5
    environment, request = asked_for
    assert environment["CUDA_VISIBLE_DEVICES"] == ""
    how = request["how"]
    assert (how["mode"], how["precision"], how["micro_batches"]) == ("train", "bf16-mixed", 2)
    assert (request["host"], request["cap"], request["device"]["usable_bytes"]) == (False, None, 256 * MIB)


class FakeCuda:
    """What a GPU's memory says, with 300 MiB in live blocks."""

    name, total_bytes = "card", 1 << 30

    def held_bytes(self) -> int:
        return 300 * MIB


def test_the_device_is_the_room_with_the_module_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU what others hold is taken off; on a CPU, where peaks are growth, the module is put on top."""
    module = nn.Linear(1024, 1024)
    module.register_buffer("view", module.weight.detach()[0])
    own = 4 * 1024 * 1024 + 4096
    memory: Any = FakeCuda()
    host = simulated_device(torch.device("cpu"), memory, 100 * MIB, module)
    assert host.usable_bytes == 100 * MIB + own
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    card = simulated_device(torch.device("cuda"), memory, 800 * MIB, module)
    # The module is on the CPU here, so all that is held is somebody else's.
    assert card == replace(card, usable_bytes=500 * MIB, compute_capability=(9, 0), total_bytes=1 << 30)
    assert simulated_device(torch.device("cuda"), memory, 200 * MIB, module).usable_bytes == 0
