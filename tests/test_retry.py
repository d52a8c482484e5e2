from __future__ import annotations

import gc
import inspect
import subprocess
import sys
import time
import traceback
import weakref

import pytest

from batchfinder.errors import InvalidValue
from batchfinder.retry import retrying


class _Flaky:
    """Fails with the given errors in turn, then returns."""

    def __init__(self, *errors: BaseException) -> None:
        self.errors = list(errors)
        self.calls = 0

    def __call__(self) -> str:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return "done"


def test_a_passing_failure_is_not_seen():
    """A call that fails twice and then runs returns its value."""
    flaky = _Flaky(OSError("one"), ConnectionError("two"))
    assert retrying(wait=0)(flaky)() == "done"
    assert flaky.calls == 3


def test_a_lasting_failure_is_raised_unchanged():
    """After the last attempt, that attempt's own error is raised: the same object, none of tenacity's."""
    errors = [OSError("one"), OSError("two"), OSError("three"), OSError("four")]
    flaky = _Flaky(*errors)
    with pytest.raises(OSError) as caught:
        retrying(attempts=3, wait=0)(flaky)()
    assert caught.value is errors[2]
    assert (caught.value.__cause__, caught.value.__context__, flaky.calls) == (None, None, 3)


def test_no_frame_of_tenacity_is_shown():
    """The traceback leads from the caller to the function through this module alone."""
    try:
        retrying(attempts=2, wait=0)(_Flaky(OSError(), OSError()))()
    except OSError as error:
        files = [frame.filename.rsplit("/", 1)[-1] for frame in traceback.extract_tb(error.__traceback__)]
    assert set(files) == {"test_retry.py", "retry.py"}


@pytest.mark.parametrize("error", [ValueError("a bug"), KeyboardInterrupt(), SystemExit(3)])
def test_what_was_not_asked_for_propagates_at_once(error):
    """A bug, Ctrl-C and an exit are not retried."""
    flaky = _Flaky(error)
    with pytest.raises(type(error)) as caught:
        retrying(wait=0)(flaky)()
    assert caught.value is error
    assert flaky.calls == 1


def test_interrupts_are_not_retried_even_when_everything_is():
    """A predicate that says yes to everything is not asked about Ctrl-C."""
    flaky = _Flaky(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        retrying(lambda error: True, wait=0)(flaky)()
    assert flaky.calls == 1


@pytest.mark.parametrize("on", [ValueError, (KeyError, ValueError), lambda error: "again" in str(error)])
def test_what_may_pass_is_a_type_several_or_a_question(on):
    """Errors are chosen by type, by types or by a function."""
    assert retrying(on, wait=0)(_Flaky(ValueError("again")))() == "done"
    flaky = _Flaky(RuntimeError("never"))
    with pytest.raises(RuntimeError):
        retrying(on, wait=0)(flaky)()
    assert flaky.calls == 1


def test_none_is_a_value():
    """A function that returns None returns None, whether or not it failed before."""
    flaky = _Flaky(OSError())
    assert retrying(wait=0)(lambda: [flaky(), None][1])() is None
    assert flaky.calls == 2


class _Tensor:
    """Stands for what a failed step holds."""


@pytest.fixture
def _no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_collector")
def test_the_failed_calls_frames_are_gone_between_attempts():
    """Without the garbage collector, nothing of the failed call is alive when `between` runs, nor at the next call."""
    alive: list[weakref.ref[_Tensor]] = []
    seen: list[bool] = []

    @retrying(attempts=3, wait=0, between=lambda: seen.append(any(ref() is not None for ref in alive)))
    def step() -> None:
        seen.append(any(ref() is not None for ref in alive))
        tensor = _Tensor()
        alive.append(weakref.ref(tensor))
        if len(alive) < 3:
            raise OSError("out of memory")

    step()
    assert seen == [False] * 5


@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize("kind", [OSError, ValueError])
def test_the_failed_calls_frames_are_gone_after_the_last_attempt(kind):
    """Without the garbage collector, nothing of the last failed call outlives the caller's `except` block."""
    alive: list[weakref.ref[_Tensor]] = []

    @retrying(attempts=2, wait=0)
    def step() -> None:
        tensor = _Tensor()
        alive.append(weakref.ref(tensor))
        raise kind("out of memory")

    try:
        step()
    except kind:
        assert alive[-1]() is not None
    assert [ref() for ref in alive] == [None] * len(alive)
    assert len(alive) == (2 if kind is OSError else 1)


def test_waits_double_up_to_their_limit(monkeypatch):
    """The wait doubles from attempt to attempt, never exceeds its limit, and comes after `between`."""
    log: list[object] = []
    monkeypatch.setattr(time, "sleep", log.append)
    flaky = _Flaky(*[OSError()] * 4)
    retrying(attempts=5, wait=0.5, max_wait=3.0, between=lambda: log.append("between"))(flaky)()
    assert log == ["between", 0.5, "between", 1.0, "between", 2.0, "between", 3.0]


def test_one_attempt_never_retries():
    """With one attempt the call is made once and its error is raised."""
    flaky = _Flaky(OSError())
    with pytest.raises(OSError):
        retrying(attempts=1, between=lambda: pytest.fail("between"))(flaky)()
    assert flaky.calls == 1


def test_calls_do_not_share_their_count():
    """A decorated function counts each call's attempts anew, also when it calls itself."""
    depth: list[int] = []

    @retrying(attempts=2, wait=0)
    def outer(inner: bool) -> str:
        depth.append(len(depth))
        if inner:
            outer(False)
        if len(depth) in (2, 4):
            raise OSError
        return "done"

    assert outer(True) == "done"
    assert outer(False) == "done"


def test_the_function_keeps_its_face():
    """Name, docstring, signature and arguments are the function's own."""

    @retrying()
    def add(a: int, b: int = 2) -> int:
        """Adds."""
        return a + b

    assert (add.__name__, add.__doc__, add(1), add(1, b=5)) == ("add", "Adds.", 3, 6)
    assert list(inspect.signature(add).parameters) == ["a", "b"]


def test_no_attempt_at_all_is_refused():
    """Fewer attempts than one cannot be meant."""
    with pytest.raises(InvalidValue) as caught:
        retrying(attempts=0)
    assert str(caught.value) == "attempts: invalid value 0; expected at least 1."


def test_importing_it_is_cheap():
    """tenacity is imported by the first call, not by the import or by decorating."""
    code = "import sys, batchfinder.retry as r; r.retrying()(print); print('tenacity' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "False\n"
