"""Steps recorded on PyTorch's CUDA build: what is recorded is what the allocator does in the same step."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from batchfinder import estimate, sweep
from batchfinder.cli.parser import build_parser
from batchfinder.cli.sequence_length import lengths_of
from batchfinder.cli.sweep_request import read_request
from batchfinder.cuda_stub import StubUnavailable, find_build
from batchfinder.devices import device_for, find_gpu
from batchfinder.devices.cards import card
from batchfinder.errors import CudaStubUnavailable, InvalidValue, RecordingDied, RecordingFailed, UserCodeFailed
from batchfinder.recording.client import RecordingClient
from batchfinder.recording.simulation import Simulation
from batchfinder.report.estimate import EstimateRequest
from batchfinder.report.progress import StatusLine
from batchfinder.report.sweep import SweepRow, sweep_table
from batchfinder.results import Shape
from batchfinder.simulator.alloc_conf import AllocatorSettings
from batchfinder.simulator.trace import Trace
from batchfinder.sizing.estimate import run_estimate
from batchfinder.sizing.recorder import choose_recorder
from batchfinder.sizing.sweep import find_rows
from batchfinder.sizing.what_fits import PlanSearch, what_fits
from batchfinder.stub_cards import card_of_device
from batchfinder.testing import CudaStub
from batchfinder.training.spec import CUDA_BUILD, FAKE_DEVICE, RecordingJob, StepConfig, StepOptions, WorkloadSpec
from batchfinder.training.step import Workload
from batchfinder.units import MIB
from tests.builders.small import Mlp, mlp, vectors

pytestmark = pytest.mark.cuda_build
# As wide as real ones: the values of smaller tensors would be computed.
BERT = {"model_type": "bert", "num_hidden_layers": 1, "vocab_size": 8000}
GPT2 = {"model_type": "gpt2", "n_layer": 1, "vocab_size": 8000}


@pytest.fixture(autouse=True)
def build() -> None:
    """Without a CUDA build there is nothing to compare."""
    try:
        find_build()
    except StubUnavailable as error:
        if os.environ.get("BATCHFINDER_NO_SKIPS"):
            raise
        pytest.skip(str(error))


def peaks(
    spec: WorkloadSpec, config: StepConfig, batch_size: int, seq_len: int, most_retries: int = 0
) -> tuple[int, int]:
    """Most allocated and most reserved of the step, as the allocator on the card counts them."""
    import torch

    from batchfinder.models import build_workload
    from batchfinder.training.step import Step

    workload = build_workload(**spec.arguments)
    device = torch.device("cuda", 0)
    step = Step(workload, config, device)
    workload.model.to(device, step.weights_dtype)
    step.run(batch_size, seq_len)
    assert torch.cuda.memory_stats()["num_alloc_retries"] <= most_retries
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


@pytest.mark.parametrize(
    ("model", "gpu", "options", "micro_batches", "batch_size"),
    [
        (BERT, "H100", StepOptions(precision="16-mixed"), 1, 8),
        pytest.param(GPT2, "T4", StepOptions(optimizer="adafactor"), 2, 5, marks=pytest.mark.exhaustive),
        pytest.param(GPT2, "T4", StepOptions(lora=8, precision="16-mixed"), 1, 5, marks=pytest.mark.exhaustive),
        # Built on the card, whose attention is its own.
        (GPT2, "A100", StepOptions(lora=8, precision="bf16-mixed", quantization="nf4-double"), 2, 30),
    ],
)
def test_a_recorded_step_is_the_step(
    model: dict[str, Any], gpu: str, options: StepOptions, micro_batches: int, batch_size: int, tmp_path: Path
) -> None:
    """Replayed on the card, it has the peaks that PyTorch counts, to the byte; peft's adapters are built in forks."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(model))
    spec, config = options.workload(str(path)), options.step(micro_batches)
    real = CudaStub(gpu=gpu).run(peaks, spec, config, batch_size, 64).result
    with Simulation(spec, config, CUDA_BUILD) as simulation:
        assert simulation.facts().recorder == CUDA_BUILD
        probe = simulation.probe(device_for(find_gpu(gpu)), [64])
        trace = probe.trace(batch_size, Shape(64), exact=True)
        timeline = probe.steady_state(batch_size, Shape(64), exact=True).timeline
    assert (timeline.max_allocated_bytes, timeline.max_reserved_bytes) == tuple(real)
    assert {"parameter", "optimizer", "gradient", "activation", "input", "workspace"} <= set(trace.structure.kinds)
    assert any("attn" in name or "attention" in name for name in trace.structure.modules)
    assert "float32[8000, 768]" in trace.shapes


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "options",
    [
        StepOptions(precision="bf16-mixed"),
        StepOptions(gpus=2, strategy="fsdp2"),
    ],
)
def test_the_fake_device_records_in_its_process_too(options: StepOptions, tmp_path: Path) -> None:
    """As it does in one of its own, on a PyTorch without CUDA."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GPT2))
    spec, device = options.workload(str(path)), device_for(find_gpu("H100"))

    def trace(simulation: Simulation) -> Trace:
        assert simulation.recorder == FAKE_DEVICE
        return simulation.probe(device, [64]).trace(4, Shape(64), exact=True)

    with Simulation(spec, options.step(), CUDA_BUILD) as there, Simulation(spec, options.step()) as own:
        assert trace(there.on_fake_device()) == trace(own)


@pytest.mark.exhaustive
def test_adapters_on_the_fake_device_leave_the_card_to_later_recordings(tmp_path: Path) -> None:
    """Importing peft initializes CUDA where bitsandbytes is there, after which no fork of that process could use it."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GPT2))
    plain, adapters, device = StepOptions(), StepOptions(lora=8), device_for(find_gpu("H100"))
    with Simulation(plain.workload(str(path)), plain.step(), CUDA_BUILD) as simulation:
        changed = simulation.with_spec(adapters.workload(str(path)), adapters.step())
        for each in (changed.on_fake_device(), changed, simulation):
            assert each.probe(device, [64]).trace(4, Shape(64), exact=True).sizes


def test_what_it_does_not_record_is_said() -> None:
    """DeepSpeed's ZeRO-2, and a model that nothing spreads; one GPU is recorded in the same process."""
    spec = WorkloadSpec("tests.builders.small:mlp")
    with RecordingClient(spec, recorder=CUDA_BUILD) as recorder:
        setting = card_of_device(device_for(find_gpu("T4"))).setting
        steps = StepConfig(), StepConfig(gpus=2, strategy="zero2"), StepConfig(gpus=2)
        jobs = [RecordingJob(step, (7, 5), 4, None, card=setting) for step in steps]
        alone, imitated, own = map(recorder.submit, jobs)
        assert alone.result().structure.order
        with pytest.raises(RecordingFailed, match=r"ZeRO-2 .*imitated.*: PyTorch's CUDA build does not record that"):
            imitated.result()
        with pytest.raises(InvalidValue, match="with 2 GPUs, or a workload with `parallelize`"):
            own.result()


def runs(spec: WorkloadSpec, config: StepConfig, batch_size: int, seq_len: int) -> bool:
    """Whether the step has enough memory, where the allocator may give its cache back once."""
    import torch

    try:
        peaks(spec, config, batch_size, seq_len, most_retries=1)
    except torch.OutOfMemoryError:
        return False
    return True


@pytest.mark.exhaustive
def test_a_sweep_finds_what_runs(tmp_path: Path) -> None:
    """The size found runs on a card of that memory, and the next one runs out of it."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(BERT))
    command = [sys.executable, "-m", "batchfinder", "sweep", "config.json", "--gpu", "t4", "--budget", "1GiB"]
    command += ["--seq-len", "128", "--recorder", "cuda-build", "--no-cache", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True)
    (row,) = json.loads(done.stdout)["rows"]
    assert row["recorder"] == "cuda-build"
    spec, found, one = StepOptions().workload(str(path)), row["max_batch_size"], CudaStub(gpu="T4", memory="1GiB")
    assert [one.run(runs, spec, StepConfig(), size, 128).result for size in (found, found + 1)] == [True, False]


@pytest.mark.parametrize(
    ("options", "gpus", "expected"),
    [
        ({}, ["T4", "H100"], CUDA_BUILD),
        ({"lora": 8, "precision": "bf16-mixed"}, ["T4"], CUDA_BUILD),
        ({"compile": "model"}, ["T4"], CUDA_BUILD),
        ({"lora": 8, "quantization": "nf4"}, ["T4"], CUDA_BUILD),
        ({"lora": 8, "quantization": "int8"}, ["T4"], FAKE_DEVICE),
        ({"optimizer": "adamw-offload"}, ["T4"], FAKE_DEVICE),
        ({"gpus": 2, "strategy": "ddp"}, ["T4"], CUDA_BUILD),
        ({"gpus": 8, "strategy": "fsdp2", "lora": 8}, ["T4", "A100"], CUDA_BUILD),
        ({"gpus": 2, "strategy": "tp"}, ["T4"], FAKE_DEVICE),
        ({"gpus": 2, "strategy": "zero2"}, ["T4"], FAKE_DEVICE),
        ({}, ["MI300X"], FAKE_DEVICE),
        ({}, ["T4", "V100", "A100", "H100", "L4"], FAKE_DEVICE),
    ],
)
def test_it_is_chosen_for_what_it_takes(options: dict[str, Any], gpus: list[str], expected: str) -> None:
    """Steps on NVIDIA's GPUs, and few cards; of several GPUs what PyTorch, or the workload, spreads itself."""
    assert choose_recorder(StepOptions.checked(**options), list(map(card, gpus))) == expected


def asks_for_a_card() -> Workload:
    """A factory that asks `torch.cuda.is_available()`, which is False while it builds."""
    assert not torch.cuda.is_available()
    assert torch.cuda.device_count() == 0
    return mlp()


def on_the_card() -> Workload:
    """One that uses CUDA unasked."""
    if torch.version.cuda:
        torch.cuda.init()
    return mlp()


def keeping_a_tensor() -> Workload:
    """One whose loss computes with a tensor that it made, as large as are not real."""
    kept = torch.zeros(2000, 2000)
    return Workload(Mlp(), vectors, lambda output, batch: output.mean() + kept.mean())


def compiled_without_triton() -> Workload:
    """A model that Dynamo traces with fake tensors of its own, and nothing compiles."""
    made = mlp()
    made.model.compile(backend="aot_eager")
    return made


def fails_on_the_card() -> Workload:
    """One that fails then."""
    on_the_card()
    raise ValueError("no model")


def ends_the_process() -> Workload:
    """One that ends the process that it is in."""
    os._exit(3)


@pytest.mark.exhaustive
def test_a_factory_that_uses_cuda_is_built_in_each_recording() -> None:
    """In whose process the card is the one in question; one that asks for it is built once, without."""
    factories = f"{__name__}:asks_for_a_card", f"{__name__}:on_the_card"
    rows = [sweep(each, gpus="T4", seq_lens=(), cache=False, recorder=CUDA_BUILD)[0] for each in factories]
    assert rows[0].batch_size > 1
    assert len({(row.batch_size, row.peak_reserved_bytes) for row in rows}) == 1


@pytest.mark.parametrize(
    ("factory", "kind", "words"),
    [
        ("fails_on_the_card", UserCodeFailed, "ValueError: no model"),
        pytest.param("ends_the_process", RecordingDied, "exited with 3", marks=pytest.mark.exhaustive),
    ],
)
def test_a_factory_that_fails_says_so(factory: str, kind: type[Exception], words: str) -> None:
    """Its own error, or how its process ended."""
    spec = WorkloadSpec(f"{__name__}:{factory}")
    with RecordingClient(spec, recorder=CUDA_BUILD) as client, pytest.raises(kind, match=words):
        client.facts()


@pytest.mark.exhaustive
def test_what_dynamo_traces_with_is_no_tensor_of_a_factory() -> None:
    """A compiled model of a factory's is recorded and tried, and allocates what it does by itself."""
    device = device_for(find_gpu("T4"))
    with Simulation(WorkloadSpec("tests.builders.small:mlp"), StepConfig(), CUDA_BUILD) as simulation:
        compiled = simulation.with_spec(WorkloadSpec(f"{__name__}:compiled_without_triton"), StepConfig())
        traces = [each.probe(device, [None]).trace(64, Shape(), exact=True) for each in (simulation, compiled)]
        tried = compiled.tried_sizes(device, AllocatorSettings())(64, Shape())
    assert tried.fits
    held = [
        sum(
            size
            for kind, size in zip(each.structure.kinds, each.sizes, strict=True)
            if kind in ("parameter", "optimizer")
        )
        for each in traces
    ]
    assert held[0] == held[1] > 0


def test_a_tensor_that_a_factory_keeps_is_refused() -> None:
    """It is no parameter and no buffer, and so on no card: what is computed with it would take nothing there."""
    device = device_for(find_gpu("T4"))
    with Simulation(WorkloadSpec(f"{__name__}:keeping_a_tensor"), StepConfig(), CUDA_BUILD) as simulation:
        for take in (simulation.probe(device, [None]).trace, simulation.tried_sizes(device, AllocatorSettings())):
            with pytest.raises(RecordingFailed, match=r"aten.mean.* is neither a parameter nor a buffer"):
                take(8, Shape())


def test_flash_attention_is_the_kernel_or_refused(tmp_path: Path) -> None:
    """An H100 would run cuDNN's, and a T4 has none."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GPT2))
    options, seen = StepOptions(attention="flash", precision="16-mixed"), {}
    with Simulation(options.workload(str(path)), options.step(), CUDA_BUILD) as simulation:
        for gpu in ("H100", "T4"):
            device = device_for(find_gpu(gpu))
            tried = simulation.tried_sizes(device, AllocatorSettings())
            seen[gpu] = simulation.probe(device, [64]), tried
        probe, tried = seen["H100"]
        names = {name for name in probe.trace(4, Shape(64), exact=True).structure.operators if "_attention" in name}
        assert names == {
            "aten._scaled_dot_product_flash_attention.default",
            "aten._scaled_dot_product_flash_attention_backward.default",
        }
        assert tried(4, Shape(64)).fits
        probe, tried = seen["T4"]
        for refused in (lambda: probe.trace(4, Shape(64), exact=True), lambda: tried(4, Shape(64))):
            with pytest.raises(InvalidValue, match=r"flash attention needs compute capability 8.0.* this card has 7.5"):
                refused()


def test_a_workload_is_sharded_by_its_own_calls() -> None:
    """A rank holds its share, as on the fake device; what stays in the host's memory is left to that."""
    spec, device = WorkloadSpec("tests.builders.sharded:sharded_by_hand"), device_for(find_gpu("H100"))
    config, held, peaks = StepConfig(gpus=4, steps=3), [], []
    with Simulation(spec, config, CUDA_BUILD) as simulation:
        for each in (simulation, simulation.on_fake_device()):
            probe = each.probe(device, [16])
            trace = probe.trace(64, Shape(16), exact=True)
            peaks.append(probe.unlimited(64, Shape(16)).max_allocated_bytes)
            by_kind = Counter[str]()
            for kind, size in zip(trace.structure.kinds, trace.sizes, strict=True):
                by_kind[kind] += size
            held.append({kind: by_kind[kind] for kind in ("parameter", "optimizer", "gradient")})
        offloaded = simulation.with_spec(replace(spec, arguments={"offload": True}), config)
        with pytest.raises(RecordingFailed, match="parameters in the host's memory"):
            offloaded.probe(device, [16]).trace(64, Shape(16), exact=True)
    assert held[0] == held[1]
    assert peaks[0] == pytest.approx(peaks[1], rel=0.01)


def test_it_is_what_a_sweep_and_an_estimate_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is here and nobody names another; the table and each JSON say which, and its version."""
    monkeypatch.delenv("BATCHFINDER_RECORDER")
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps(BERT))
    version = find_build().version
    rows = sweep("config.json", gpus=["T4", "V100 16GB"], seq_lens=[32, 64], cache=False)
    for row in rows:
        said = row.to_json()
        assert (said["recorder"], said["recorder_version"]) == (CUDA_BUILD, version)
        assert [trial.batch_size for trial in row.trials if not trial.fits][-1] == row.batch_size + 1
        assert row.batch_size in [trial.batch_size for trial in row.trials if trial.fits]
    assert f"recorder: CUDA build {version}, on which each size is tried" in str(rows)
    found = estimate("config.json", 8, gpu="T4", seq_len=64)
    assert (found.request.options.recorder, found.recorder_version) == (CUDA_BUILD, version)
    assert f"recorder: CUDA build {version}" in str(found)


def test_what_is_tried_is_what_is_replayed(tmp_path: Path) -> None:
    """From the memory that a step reserves on a large card down, where the allocator gives its cache back, and on."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GPT2))
    options, shape = StepOptions(precision="16-mixed"), Shape(64)
    t4 = device_for(find_gpu("T4"))
    with Simulation(options.workload(str(path)), options.step(2), CUDA_BUILD) as simulation:
        needed = simulation.probe(t4, [64]).needed_bytes(8, shape)
        cards = [replace(t4, usable_bytes=needed - less * 2 * MIB) for less in range(24)]
        tried = [simulation.tried_sizes(card, AllocatorSettings()) for card in cards]
        for sizes in tried:  # at once, each with a card of its own
            sizes.ask(8, shape)
        seen = [sizes(8, shape) for sizes in tried]
        replayed = [simulation.probe(card, [64])(8, shape) for card in cards]
    assert [each.verdict for each in seen] == [each.verdict for each in replayed]
    peaks = [(each.peak_allocated_bytes, each.peak_reserved_bytes) for each in (seen[0], replayed[0])]
    assert peaks[0] == peaks[1]
    assert len({each.verdict for each in seen}) == 2


def swallowing() -> Workload:
    """A step that goes on without its batch where there is no memory for it."""
    model = Mlp()

    def loss(out: torch.Tensor, batch: Any) -> torch.Tensor:
        with torch.no_grad(), suppress(torch.OutOfMemoryError):
            torch.cat([out] * 64)
        return out.mean()

    return Workload(model, vectors, loss)


def summing_in_place() -> Workload:
    """One that is as on a CPU, which the CUDA build cannot take."""
    return replace(mlp(), sums_in_place=True)


def test_a_step_that_swallows_the_error_does_not_fit() -> None:
    """The allocator's own count of such errors decides."""
    (row,) = sweep(f"{__name__}:swallowing", gpus="T4", seq_lens=(), cache=False, recorder=CUDA_BUILD)
    messages = {trial.batch_size: trial.measurement.message for trial in row.trials}
    assert messages[row.batch_size + 1] == "every further step would have to release the allocator's cache (thrashing)"
    assert row.peak_reserved_bytes is not None
    assert 0.9 * row.usable_bytes < row.peak_reserved_bytes < row.usable_bytes


@pytest.mark.exhaustive
def test_where_it_was_only_chosen_the_fake_device_takes_over() -> None:
    """A step that it turns out not to take is recorded all the same, and the row says so."""
    model, said = f"{__name__}:summing_in_place", "PyTorch's CUDA build did not take the step, and the fake device did"
    asked = read_request(
        build_parser().parse_args(["sweep", "--model", model, "--gpu", "T4", "--recorder", "cuda-build", "--no-cache"])
    )
    rows = list(find_rows(replace(asked, chooses_recorder=True), lambda doing, brief: None))
    assert [row.cell.options.recorder for row in rows if isinstance(row, SweepRow)] == [FAKE_DEVICE]
    assert said in str(sweep_table([row for row in rows if isinstance(row, SweepRow)], explain=True))
    options = StepOptions(recorder=CUDA_BUILD)
    request = EstimateRequest(model, 4, None, card("T4"), options, 1, AllocatorSettings(), chooses_recorder=True)
    found = run_estimate(request, False, lambda doing: None)
    assert found.request.options.recorder == FAKE_DEVICE
    assert any(said in each for each in found.unmodelled)


@pytest.mark.exhaustive
def test_the_command(tmp_path: Path) -> None:
    """`estimate --recorder cuda-build` has PyTorch's own peaks, which the fake device misses here, and says so in JSON."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(BERT))
    spec = StepOptions().workload(str(path))
    real = CudaStub(gpu="T4").run(peaks, spec, StepConfig(), 8, 128).result
    command = [sys.executable, "-m", "batchfinder", "estimate", "--model", "config.json", "--gpu", "t4", "--json"]
    done = subprocess.run(
        [*command, "--recorder", "cuda-build"], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    found = json.loads(done.stdout)
    assert found["recorder"] == "cuda-build"
    assert (found["allocated_bytes"], found["reserved_bytes"]) == tuple(real)


@pytest.mark.exhaustive
def test_a_plan_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is to be changed trains on the card, and has the peaks of the step there."""
    monkeypatch.delenv("BATCHFINDER_RECORDER")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GPT2))
    kept = ["precision", "optimizer", "checkpointing", "loss"]
    found = what_fits(str(path), gpu="T4", seq_len=1024, target_batch_size=256, keep=kept)
    assert (found.recorder, found.recorder_version) == (CUDA_BUILD, find_build().version)
    fit = found.fits[0]
    assert fit.tried
    spec, size = fit.options.workload(str(path)), fit.plan.micro_batch_size
    _, reserved = CudaStub(gpu="T4").run(peaks, spec, fit.options.step(2), size, 1024).result
    assert fit.peak_bytes == reserved + device_for(find_gpu("T4")).context_bytes


@pytest.mark.exhaustive
def test_what_no_card_takes_is_recorded_in_a_plan(tmp_path: Path) -> None:
    """States in the host's memory: on the fake device, also where the CUDA build was asked for."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GPT2))
    asked = StepOptions(optimizer="adamw-offload")
    kept = ["precision", "checkpointing", "loss"]
    search = PlanSearch(str(path), asked, card("T4"), 8, 1024, keep=kept, recorder=CUDA_BUILD)
    _, found = search.find(lambda doing: None)
    assert [fit.tried for fit in found.fits] == [False]
    assert found.recorder == FAKE_DEVICE


@pytest.mark.exhaustive
def test_the_longest_sequence_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ran on a card of that memory, and the next one ran out of it."""
    monkeypatch.delenv("BATCHFINDER_RECORDER")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GPT2))
    command = ["sweep", "--model", str(path), "--gpu", "t4", "--budget", "1GiB", "--find", "seq-len"]
    request = read_request(build_parser().parse_args(command))
    spec = request.options.workload(str(path))
    with Simulation(spec, request.step, request.options.recorder) as simulation:
        (row,) = lengths_of(str(path), simulation, request, [4], 8, StatusLine())
    assert (row.options.recorder, row.recorder_version) == (CUDA_BUILD, find_build().version)
    tried, found = {trial.batch_size: trial.measurement for trial in row.result.trials}, row.result.max_batch_size
    assert 8 < found < 1024
    assert (tried[found].fits, tried[found + 8].fits) == (True, False)
    assert "Tried to allocate" in tried[found + 8].message


def test_a_process_that_cannot_be_started_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a folder of its own nor one of the stub's, where a process may have no more files open."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    open_now, failures = len(os.listdir("/dev/fd")), 0
    for count in range(open_now - 3, open_now + 12):
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))
        try:
            client = RecordingClient(WorkloadSpec("tests.builders.small:mlp"), recorder=CUDA_BUILD)
        except CudaStubUnavailable:  # its files could not be read
            continue
        except OSError as error:
            failures += error.errno == errno.EMFILE
        else:
            client.close()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert failures > 3
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/dev/fd")) == open_now


def compiled_peaks(spec: WorkloadSpec, config: StepConfig, batch_size: int, seq_len: int, cache: str) -> list[int]:
    """Of a step whose compiled graphs go into a folder, or come from it."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    return [*peaks(spec, config, batch_size, seq_len)]


@pytest.mark.exhaustive
def test_a_compiled_step_is_the_step_compiled_and_from_the_cache(tmp_path: Path) -> None:
    """Inductor's own, Triton's compiler included: recorded as in a first run, tried again as in a second one."""
    pytest.importorskip("triton")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GPT2))
    options = StepOptions(precision="bf16-mixed", compile="model")
    spec, config, device = options.workload(str(path)), options.step(), device_for(find_gpu("A100"))
    stub = CudaStub(gpu="A100")
    first, second = (stub.run(compiled_peaks, spec, config, 4, 64, str(tmp_path)).result for _ in range(2))
    assert first != second
    with Simulation(spec, config, CUDA_BUILD) as simulation:
        timeline = simulation.probe(device, [64]).unlimited(4, Shape(64))
        sizes = simulation.tried_sizes(device, AllocatorSettings())
        assert sizes.twice
        again = sizes(4, Shape(64))
    assert [timeline.max_allocated_bytes, timeline.max_reserved_bytes] == first
    assert [again.peak_allocated_bytes, again.peak_reserved_bytes] == second
