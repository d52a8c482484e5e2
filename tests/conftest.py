"""Recordings in forks of this process, which stays one without the fake GPU."""

from __future__ import annotations

import functools
import gc
import importlib
import json
import os
import signal
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from batchfinder.simulator.trace import Trace
from tests.prefork import Prefork

pytest_plugins = ["batchfinder.testing"]

# A shell that starts the tests in the background has them ignore Ctrl-C, and nohup the hang-up: some are about these.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Before torch is imported, here and in every process that a test starts: the workers keep all cores busy already.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Whether PyTorch's CUDA build is here or not, the commands answer alike, but where a test says otherwise.
os.environ.setdefault("BATCHFINDER_RECORDER", "fake-device")

Record = Callable[..., Trace]


def _record(
    build: Callable[[], Any],
    batch_size: int,
    seq_len: int | None,
    capability: tuple[int, int],
    flash: bool,
    settings: dict[str, Any],
) -> Trace:
    """Build and record, in a process of its own."""
    from batchfinder.recording.fake_device import FakeDeviceMode
    from batchfinder.recording.record_step import record_step
    from batchfinder.training.spec import StepConfig

    mode = FakeDeviceMode(allow_non_fake_inputs=True)
    with mode:
        workload = build()
    return record_step(workload, StepConfig(**settings, flash=flash), capability, batch_size, seq_len, mode)


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One more than there are cores: a test often waits for a process that it has started."""
    return len(os.sched_getaffinity(0)) + 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what needs a CUDA device where there is none; begin with the files that take longest.

    A file is one worker's: the last one to begin should not be the one that all wait for.
    """
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked:
        import torch

        if not torch.cuda.is_available():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Where `BATCHFINDER_NO_SKIPS` is set, as in CI's CUDA stage, a test that is skipped fails."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and os.environ.get("BATCHFINDER_NO_SKIPS"):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} was skipped: {report.longrepr}"
    return report


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test sees what another found."""
    monkeypatch.setenv("BATCHFINDER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Small nets are fastest on one thread."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", autouse=True)
def nothing_old_is_collected() -> Iterator[None]:
    """Each try collects garbage; looking through all that the tests import takes 0.2 s, longer than a small training.

    `gc.get_objects` leaves out what is old. How many are frozen, which each search asks, is counted object by object in
    Python 3.11: for all that is imported that takes as long as a try.
    """
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "get_freeze_count", functools.cache(gc.get_freeze_count))
        yield
    gc.collect()  # what this module has left
    gc.unfreeze()


@pytest.fixture(scope="session")
def prefork() -> Iterator[Prefork]:
    """The process that recording processes are forks of; started when it is first needed."""
    with Prefork() as started:
        yield started


@pytest.fixture(scope="module")
def forked_recorders(prefork: Prefork) -> Iterator[None]:
    """Recording processes are forks in this module: `pytestmark = pytest.mark.usefixtures("forked_recorders")`."""
    with prefork.patched():
        yield


@pytest.fixture(scope="session")
def record(tmp_path_factory: pytest.TempPathFactory) -> Record:
    """`record(build, batch_size, seq_len, capability=..., flash=..., **settings)` in a fork of this process.

    What goes wrong there is raised as an AssertionError with the fork's own words.
    """
    folder = tmp_path_factory.mktemp("traces")
    number = iter(range(1 << 30))

    def record_in_fork(
        build: Callable[[], Any],
        batch_size: int,
        seq_len: int | None = None,
        capability: tuple[int, int] = (7, 0),
        flash: bool = False,
        **settings: Any,
    ) -> Trace:
        # Imported here, once, so that the forks need not; the first optimizer imports the last of these.
        for module in ("batchfinder.recording.record_step", "torch.fx.experimental.symbolic_shapes", "torch._dynamo"):
            importlib.import_module(module)

        path = Path(folder) / f"{next(number)}.json"
        process = os.fork()
        if process == 0:
            try:
                trace = _record(build, batch_size, seq_len, capability, flash, settings)
                result = {"trace": trace.to_json()}
            except BaseException as error:
                result = {"error": f"{type(error).__name__}: {error}"}
            path.write_text(json.dumps(result))
            os._exit(0)
        _, status = os.waitpid(process, 0)
        assert status == 0, f"the fork ended with {os.waitstatus_to_exitcode(status)}"
        result = json.loads(path.read_text())
        path.unlink()
        assert "trace" in result, result
        return Trace.from_json(result["trace"])

    return record_in_fork


@pytest.fixture(autouse=True)
def allocator_as_before(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a fit has the allocator of the device do, where samples differ in length, is not the next test's."""
    before = os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
    yield
    if os.environ.get("PYTORCH_CUDA_ALLOC_CONF") != before and request.node.get_closest_marker("gpu"):
        import torch

        del os.environ["PYTORCH_CUDA_ALLOC_CONF"]
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
