from __future__ import annotations

import pytest

from batchfinder.errors import ProbeDied
from batchfinder.measure.oom import KILLED, decode
from batchfinder.results import Verdict
from batchfinder.training.child_process import ChildDied


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_sigkill_is_the_out_of_memory_killer(device):
    """Nothing else kills without a word."""
    seen = decode(ChildDied(-9, ""), "bert-base at batch size 8", device)
    assert (seen.verdict, seen.message) == (Verdict.HOST_OUT_OF_MEMORY, KILLED)


LAST_WORDS = [
    "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc",
    "libgomp: Thread creation failed: Resource temporarily unavailable",
    "cannot allocate memory for thread-local data: ABORT",
]


@pytest.mark.parametrize("last_words", LAST_WORDS)
def test_last_words_that_speak_of_memory(last_words):
    """A library that ends the process for want of memory says so before."""
    on_cpu, on_cuda = (decode(ChildDied(-6, last_words), "a model", device) for device in ("cpu", "cuda"))
    assert (on_cpu.verdict, on_cpu.message) == (Verdict.OUT_OF_MEMORY, last_words)
    assert on_cuda.verdict is Verdict.HOST_OUT_OF_MEMORY


@pytest.mark.parametrize(
    ("exit_code", "last_words", "how"),
    [
        (-11, "", "with signal SIGSEGV. It printed nothing."),
        (-6, "Assertion failed", "with signal SIGABRT. It printed last:\nAssertion failed"),
        (3, "bye", "with exit code 3. It printed last:\nbye"),
        (-200, "", "with signal 200. It printed nothing."),
    ],
)
def test_any_other_death_is_an_error(exit_code, last_words, how):
    """It names the model, the size, the way it ended and the next move."""
    with pytest.raises(ProbeDied) as caught:
        decode(ChildDied(exit_code, last_words), "bert-base at batch size 8", "cuda")
    assert str(caught.value) == (
        f"the process that trained bert-base at batch size 8 ended twice without an answer, {how}\n"
        "Run one training step at this size in a process of your own to see why."
    )
    assert (caught.value.exit_code, caught.value.last_words) == (exit_code, last_words)
