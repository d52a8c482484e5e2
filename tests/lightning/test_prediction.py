"""Tests of batchfinder/lightning/prediction.py: the trainer's own step is recorded, and nothing else notices."""

from __future__ import annotations

import atexit
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from batchfinder.devices import Device
from batchfinder.distributed.agreement import Ranks
from batchfinder.errors import InvalidValue
from batchfinder.find import find_max_batch_size
from batchfinder.lightning import prediction
from batchfinder.lightning.callback import BatchFinder
from batchfinder.lightning.dry_run import TrainBatches, TrialConfig
from batchfinder.lightning.prediction import (
    HOST_SHARE,
    largest_on_gpu,
    largest_on_host,
    live_bytes,
    predict_batch_size,
    simulated_device,
)
from batchfinder.lightning.stage_tuner import StageTuner
from batchfinder.models.build import workload_from_object
from batchfinder.probe import FunctionProbe
from batchfinder.recording import fake_device
from batchfinder.recording.simulation import Simulation
from batchfinder.results import Shape
from batchfinder.search import Prediction, Secant
from batchfinder.simulator.blocks import DeviceMemory
from batchfinder.simulator.scaling import TraceSource
from batchfinder.simulator.steady_state import SimulatedProbe, predict_max_batch_size
from batchfinder.simulator.trace import StageMark, Trace, TraceStructure
from batchfinder.training.spec import StepConfig, WorkloadSpec
from batchfinder.units import MIB
from tests.forks import SHARP
from tests.lightning import nets
from tests.lightning.at_fit_start import Here, at_start
from tests.lightning.oom_net import Bounded, state_of

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
DEVICE = Device("card", 1024 * MIB, 256 * MIB, (8, 0))


class OneByOne(Here):
    """Its optimizer goes tensor by tensor, as all do on a CPU."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, foreach=False)


class Noisy(Here):
    """Reads data that draw random numbers, and counts."""

    def train_dataloader(self) -> Any:
        class Jitter(nets.Text):
            def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
                self.read = getattr(self, "read", 0) + int(torch.rand(1) < 2)
                return super().__getitem__(index)

        self.data = Jitter(96, self.seq_len)
        return torch.utils.data.DataLoader(self.data, batch_size=2, shuffle=True)


class Reading(Bounded):
    """Needs values where there are none, as a C extension does."""

    def loss(self, batch: Any) -> torch.Tensor:
        batch[0].cpu().numpy()
        return super().loss(batch)


class Calling(Here):
    """Calls a function in each step."""

    def __init__(self, function: Callable[[], object]) -> None:
        super().__init__()
        self.function = function

    def loss(self, batch: Any) -> torch.Tensor:
        self.function()
        return super().loss(batch)


def predicted(trainer: Any, callback: Any, batches: Any, **options: Any) -> int | None:
    """The prediction for a device."""
    config = TrialConfig("fit", accumulation=trainer.accumulate_grad_batches)
    found = predict_batch_size(trainer, callback, config, batches.batch, DEVICE, **options)
    return None if found is None else found.batch_size


def reasons(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Why there was no prediction."""
    start = "BatchFinder: no prediction from a simulated step: "
    return [message.removeprefix(start) for message in caplog.messages if message.startswith(start)]


@pytest.fixture(autouse=True)
def all_reasons(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """The log is kept from level INFO on."""
    with caplog.at_level("INFO", logger="batchfinder"):
        yield


@pytest.mark.usefixtures("forked_recorders")
def test_the_prediction_is_the_answer_of_the_simulation(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In a real fit on a CPU, to the sample: the same model through a factory has the same live bytes."""
    monkeypatch.setattr("batchfinder.lightning.stage_tuner.simulated_device", lambda *args: DEVICE)
    finder = BatchFinder(max_batch_size=10, cache=False, predict=True)
    nets.trainer(callbacks=[finder], max_steps=1).fit(Here())
    [message] = [message for message in caplog.messages if "predicted" in message]
    spec = WorkloadSpec("batchfinder.models:build_workload", {"spec": f"{__name__}:OneByOne"})
    with Simulation(spec, StepConfig()) as simulation:
        probe = simulation.probe(DEVICE, [16])
        live = FunctionProbe(
            lambda size, shape: live_bytes(probe.trace(size, shape)), capacity_bytes=DEVICE.usable_bytes
        )
        largest = find_max_batch_size(
            live, Shape(16), search=Secant(limit_bytes=DEVICE.usable_bytes, tolerance=0.0)
        ).max_batch_size
    assert message == f"BatchFinder: predicted batch size from a simulated step: {int(HOST_SHARE * largest)}"
    assert largest > 1000


def test_nothing_of_the_parent_changes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Weights, random numbers, attributes, handlers and data stay; what files and streams buffer is written once."""
    log = (tmp_path / "log").open("w")
    ended: list[str] = []

    def step() -> None:
        print("from the child")
        log.write("from the child\n")
        log.flush()

    def untouched(trainer: Any, callback: Any, batches: Any) -> Any:
        module = trainer.lightning_module
        batches.loaders  # made before, as the finder does
        before, attributes = state_of(trainer), dict(vars(module))
        seeds = random.getstate(), torch.get_num_threads(), torch.get_default_dtype()
        handlers = [signal.getsignal(number) for number in signal.valid_signals()]
        answer = predicted(trainer, callback, batches)
        assert state_of(trainer) == before
        assert list(vars(module)) == list(attributes)
        assert all(vars(module)[name] is value for name, value in attributes.items())
        assert seeds == (random.getstate(), torch.get_num_threads(), torch.get_default_dtype())
        assert handlers == [signal.getsignal(number) for number in signal.valid_signals()]
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()
        assert not hasattr(getattr(module, "data", None), "read")
        return answer

    class Both(Noisy, Calling):
        pass

    goodbye = atexit.register(lambda: ended.append("the child"))
    try:
        with log:
            log.write("from the parent\n")
            sys.stdout.write("from the parent\n")
            assert at_start(Both(step), untouched) > 1000
    finally:
        atexit.unregister(goodbye)
    assert (tmp_path / "log").read_text() == "from the parent\n"
    assert capfd.readouterr().out.count("from the") == 1
    assert ended == []
    assert torch._C._get_privateuse1_backend_name() == "privateuseone"


SCRIPT = """
import json, logging, sys
from tests.lightning import limited_fits, nets

class Mine(nets.Transformer):
    def loss(self, batch):
        return 2 * super().loss(batch)

nets.Mine = Mine
logging.getLogger("batchfinder").setLevel("INFO")
logging.getLogger("batchfinder").addHandler(logging.StreamHandler(sys.stdout))
print(json.dumps(limited_fits.fit(**json.loads(sys.argv[1]))))
"""


@pytest.mark.exhaustive
def test_a_search_starts_from_the_prediction_and_trains(tmp_path: Path) -> None:
    """A script's own class, under a real limit: the first try is just under the prediction, and the answer trains.

    The prediction is of the answer's order. How many tries the rest takes is a matter of noise here, of which 60 MiB
    have some percent: at most 12, of which 4 fail; tests/measure/test_tuner.py proves the figures where the noise is
    known.
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
        env={**os.environ, **SHARP, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{Path(__file__).parent}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    said = re.findall(r"predicted batch size from a simulated step: (\d+)$", done.stdout, re.MULTILINE)
    assert len(said) == 1, done.stdout
    guess, tries = int(said[0]), found["trials"]
    assert (found["error"], found["steps"]) == (None, 2), found
    assert 0.8 * guess <= tries[0][0] <= guess, "it started from the prediction"
    assert 0.5 * guess <= found["batch_size"] <= 2 * guess, (guess, found)
    assert len(tries) <= 12, found
    assert sum(not fitted for _, fitted, _ in tries) <= 4, found


def test_a_step_that_cannot_be_recorded_is_searched_without(caplog: pytest.LogCaptureFixture) -> None:
    """From one sample on, to the same answer, and a line says why there was no prediction."""
    found = []
    for predict in (True, False):
        finder = BatchFinder(tolerance=0, cache=False, predict=predict)
        nets.trainer(callbacks=[finder], max_steps=1).fit(Reading(23))
        found.append(finder.results["fit"][None].trials[0].batch_size)
        assert finder.batch_size == 23
    assert found == [1, 1]
    [reason] = reasons(caplog)
    assert ".numpy() is not supported for tensor subclasses" in reason


def test_a_value_read_in_a_step_is_recorded() -> None:
    """`loss.item()`, which Lightning's own examples have, is answered with a plausible number."""

    class Looping(Here):
        def loss(self, batch: Any) -> torch.Tensor:
            loss = super().loss(batch)
            for _ in range(int(loss.item())):
                loss = loss * 1
            return loss

    assert at_start(Looping(), predicted) > 1000


def test_who_asks_for_a_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU only those who want one, and nobody whose cap is small; a wrong value is refused."""
    caps: list[Any] = []
    monkeypatch.setattr(
        "batchfinder.lightning.stage_tuner.predict_batch_size", lambda *args, **options: caps.append(args[5])
    )

    def ask(trainer: Any, callback: Any, batches: Any) -> None:
        for predict, cap in ((None, None), (False, None), (True, 8), (True, 9), (True, None)):
            options = BatchFinder(max_batch_size=cap, predict=predict).options
            StageTuner(trainer, callback, options, TrialConfig("fit"), batches, Ranks())._predict(Shape(), 1 << 30)

    at_start(Here(), ask)
    assert caps == [9, len(nets.Transformer().train_dataloader().dataset)]
    with pytest.raises(InvalidValue) as caught:
        BatchFinder(predict="yes")  # type: ignore[arg-type]
    assert str(caught.value) == "predict: invalid value 'yes'; expected True, False, or None for on a GPU only."


def test_a_step_that_fails_is_searched_without(caplog: pytest.LogCaptureFixture) -> None:
    """The log has the error, with the user's line."""
    assert at_start(Calling(lambda: 1 // 0), predicted) is None
    (reason,) = reasons(caplog)
    assert re.fullmatch(
        r"ZeroDivisionError: integer division or modulo by zero at .*test_prediction.py:\d+, in <lambda>: .*", reason
    )


def test_a_child_that_hangs_is_ended(caplog: pytest.LogCaptureFixture) -> None:
    """A lock that another thread held as the process forked is never released in the child."""
    lock = threading.Lock()
    with lock:
        assert at_start(Calling(lock.acquire), lambda *now: predicted(*now, seconds=3.0)) is None
    assert reasons(caplog) == ["recording it took longer than the time limit"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda trainer: setattr(trainer.lightning_module, "automatic_optimization", False), "manual optimization"),
        (
            lambda trainer: trainer.strategy.optimizers.append(trainer.optimizers[0]),
            "2 optimizers, or none that steps",
        ),
    ],
)
def test_what_is_not_recorded(
    change: Callable[[Any], None], reason: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Is noticed before there is a child."""
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("a child"))

    def changed(trainer: Any, callback: Any, batches: Any) -> None:
        change(trainer)
        assert predicted(trainer, callback, batches) is None
        trainer.lightning_module.automatic_optimization = True
        del trainer.strategy.optimizers[1:]

    at_start(Here(), changed)
    assert reasons(caplog) == [reason]


def test_a_system_without_fork(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has no predictions."""
    monkeypatch.delattr(os, "fork")
    assert at_start(Here(), predicted) is None
    assert reasons(caplog) == ["this system cannot fork"]


def test_a_step_that_is_not_lightnings_own(caplog: pytest.LogCaptureFixture) -> None:
    """A strategy, a precision or a transfer of the user's, or a validation in a fit: each is named."""

    def changed(trainer: Any, callback: Any, batches: Any) -> None:
        def transfer(self: Any, batch: Any, device: Any, dataloader_idx: int) -> Any:
            return batch

        parts = (trainer.strategy, trainer.precision_plugin, trainer.lightning_module)
        for part, own in zip(parts, ({}, {}, {"transfer_batch_to_device": transfer}), strict=True):
            was = type(part)
            part.__class__ = type("Mine", (was,), own)
            assert predicted(trainer, callback, batches) is None
            part.__class__ = was
        during_fit = TrialConfig("validate", train=TrainBatches(4, Shape(), batches))
        assert predict_batch_size(trainer, callback, during_fit, batches.batch, DEVICE) is None

    at_start(Here(), changed)
    assert reasons(caplog) == [
        "strategy Mine",
        "precision plugin Mine",
        "transfer_batch_to_device is overridden, or a transfer hook of the datamodule",
        "validation during a fit",
    ]


class Grouped(nets.ConvNet):
    """Two groups of an optimizer with state, and a tensor and a list of parameters beside the module's own."""

    def __init__(self) -> None:
        super().__init__()
        self.again = [self.net[0].weight]

    def loss(self, batch: Any) -> torch.Tensor:
        scaled = batch[0] * self.scale + torch.zeros(3, 1, 1, device=self.device)
        return super().loss((scaled, batch[1]))

    def configure_optimizers(self) -> Any:
        self.scale = torch.ones(3, 1, 1, device=self.device)
        wide = [parameter for parameter in self.parameters() if parameter.ndim > 1]
        narrow = [parameter for parameter in self.parameters() if parameter.ndim < 2]
        groups = [{"params": wide, "weight_decay": 0.1}, {"params": narrow, "lr": 0.2}]
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9, foreach=False)

    def make_batch(self, batch_size: int, seq_len: int | None) -> Any:
        return torch.zeros(batch_size, 3, self.side, self.side), torch.zeros(batch_size, dtype=torch.int64)


class Tied(OneByOne):
    """The output layer's weight is the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


class Eager(OneByOne):
    """An optimizer that makes its state before the first step."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adagrad(self.parameters(), foreach=False)


@pytest.mark.parametrize(
    ("net", "factory", "options", "settings"),
    [
        (Here, OneByOne, {}, {}),
        (Here, OneByOne, {"precision": "bf16-mixed", "accumulate_grad_batches": 3}, {"precision": "bf16-mixed"}),
        (Tied, Tied, {}, {}),
        (Grouped, Grouped, {}, {}),
        (Eager, Eager, {}, {}),
    ],
)
def test_the_recorded_step_allocates_what_the_module_does(
    net: Any,
    factory: Any,
    options: dict[str, Any],
    settings: dict[str, Any],
    record: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Block for block: each event and each size are those of the module itself, through a factory."""
    traces: list[Trace] = []

    def keep(probe: SimulatedProbe) -> int:
        traces.append(probe.trace(13, Shape(), exact=True))
        return 7

    monkeypatch.setattr(prediction, "largest_on_host", keep)
    assert at_start(net(), predicted, **options) == 7
    micro_batches = 2 if options else 1
    own = record(
        # Gradients are summed as on a CPU, which the prediction is for.
        lambda: replace(workload_from_object(on_device(factory()), net.__name__), sums_in_place=True),
        13,
        capability=DEVICE.compute_capability,
        micro_batches=micro_batches,
        **settings,
    )
    assert in_order(traces[0]) == in_order(own)
    assert traces[0].sizes == own.sizes


def in_order(trace: Trace) -> list[list[int]]:
    """The events; releases with nothing between them may come in any order, as a batch's tensors do."""
    runs = itertools.groupby(trace.structure.order, key=lambda event: event < 0)
    return [sorted(run) if released else list(run) for released, run in runs]


def on_device(module: Any) -> Any:
    """Say where the module is, as a trainer's setup would have."""
    if isinstance(module, Grouped):
        module._device = fake_device.register()
    return module


def test_a_step_without_a_loss(caplog: pytest.LogCaptureFixture) -> None:
    """Lightning skips such a batch; what it would take is not known."""

    class Skipping(Here):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return {"loss": None}

    assert at_start(Skipping(), predicted) is None
    assert reasons(caplog) == ["NotRecordable: the step returned NoneType and no loss"]


def test_a_step_that_scales_to_no_other_size(caplog: pytest.LogCaptureFixture) -> None:
    """One whose layers depend on the size has no prediction: the recordings are of no use for other sizes."""

    class Jumping(Here):
        def loss(self, batch: Any) -> torch.Tensor:
            for _ in range(len(batch["labels"]) % 5):
                self.encoder(self.embed(batch["input_ids"]))
            return super().loss(batch)

    assert at_start(Jumping(), predicted) is None
    assert reasons(caplog) == ["its memory is no polynomial of the batch size"]


class FakeCuda:
    """What a GPU's memory says, with 300 MiB in live blocks."""

    name, total_bytes = "card", 1 << 30

    def held_bytes(self) -> int:
        return 300 * MIB


def test_the_device_is_what_is_free_with_the_module_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """What else the process holds is taken off."""
    module = nn.Linear(1024, 1024)
    module.register_buffer("view", module.weight.detach()[0])
    own = 4 * MIB + 4096
    memory: Any = FakeCuda()
    host = simulated_device(torch.device("cpu"), memory, 800 * MIB, module)
    assert host.usable_bytes == 500 * MIB + own
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=114))
    card = simulated_device(torch.device("cuda"), memory, 800 * MIB, module)
    # The module is on the CPU here, so all that is held is somebody else's.
    assert card == replace(card, usable_bytes=500 * MIB, compute_capability=(9, 0), total_bytes=1 << 30)
    assert card.reduces_on == (114, 2048)
    assert simulated_device(torch.device("cuda"), memory, 200 * MIB, module).usable_bytes == 0


ON_A_GPU = """
import json, logging, sys, torch
from tests.lightning import nets
from tests.lightning.at_fit_start import Here, at_start
from tests.lightning.test_prediction import predicted

logging.getLogger("batchfinder").setLevel("INFO")
logging.getLogger("batchfinder").addHandler(logging.StreamHandler(sys.stdout))
held = []

def twice(*now):
    held.append(torch.cuda.memory_allocated())
    answer = predicted(*now)
    held.append(torch.cuda.memory_allocated())
    return answer

answers = [at_start(Here(), twice, accelerator="gpu")]
nets.trainer(accelerator="gpu", max_steps=1).fit(Here())
answers.append(at_start(Here(), predicted, accelerator="gpu"))
print(json.dumps([answers, held]))
"""


@pytest.mark.gpu
def test_a_process_that_uses_cuda() -> None:
    """Its forks record without a CUDA call, until autograd's threads have started: a fork has no use of them."""
    done = subprocess.run([sys.executable, "-c", ON_A_GPU], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    *said, found = done.stdout.splitlines()
    (answer, later), (before, after) = json.loads(found)
    assert answer is not None, said
    assert before == after > 0
    assert later is None
    assert "Unable to handle autograd's threading in combination with fork-based multiprocessing" in "".join(said)


def probe_of(sizes: Callable[[int], tuple[int, ...]], usable: int) -> SimulatedProbe:
    """A step whose first block is a workspace, whose others are alive at one time."""

    def submit(batch_size: int, seq_len: int | None) -> Future[Trace]:
        blocks = sizes(batch_size)
        kinds = ("workspace", *(["temporary"] * (len(blocks) - 1)))
        order = (*range(len(blocks)), ~1)
        names = ("a",) * len(blocks)
        future: Future[Trace] = Future()
        structure = TraceStructure(order, (StageMark(0, -1, "model"),), names, names, kinds)
        future.set_result(Trace(batch_size, seq_len, structure, blocks))
        return future

    return SimulatedProbe(TraceSource(submit, [None]), DeviceMemory(max(usable, 1 << 30), usable))


def test_on_a_gpu_segments_count_and_on_the_host_bytes_do() -> None:
    """A GPU's answer is the replay's, workspace and all; a host's is bytes without it, less the kernels' share."""
    probe = probe_of(lambda batch_size: (8 * MIB, 2 * MIB, 1000 * batch_size), 64 * MIB)
    largest = largest_on_gpu(probe).batch_size
    assert probe(largest, Shape()).fits
    assert not probe(largest + 1, Shape()).fits
    assert live_bytes(probe.trace(100, Shape())) == 2 * MIB + 100_000
    assert largest_on_host(probe) == int(HOST_SHARE * ((62 * MIB) // 1000))


def test_far_beyond_the_cap_a_line_will_do() -> None:
    """So that the search's first try is the cap itself; near it the answer is searched for."""
    probe = probe_of(lambda batch_size: (8 * MIB, 2 * MIB, MIB * batch_size), 513 * MIB)
    exact = largest_on_gpu(probe)
    assert exact.bytes_per_sample == pytest.approx(MIB, rel=0.05)
    assert largest_on_gpu(probe, cap=exact.batch_size) == largest_on_gpu(probe, cap=exact.batch_size // 2 + 10) == exact
    line = largest_on_gpu(probe, cap=20)
    assert line == Prediction(predict_max_batch_size(probe, Shape()))
    assert line.batch_size > exact.batch_size
