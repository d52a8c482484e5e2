"""The child process that uses the card."""

from __future__ import annotations

import pytest

from benchmarks.cuda.context import CardProcess, RequestFailed


def test_a_process_that_fails_is_replaced() -> None:
    """One that hangs, dies or says that the card is dead costs its own answer, and says why; the next one is right."""
    with CardProcess("cuda:3", module="tests.benchmarks.misbehaving_worker") as process:
        with pytest.raises(RequestFailed, match=r"^no answer within 1 s; the process was killed$"):
            process.ask({"wait": True}, 1)
        with pytest.raises(RequestFailed, match=r"^the process ended with 7: about to die$"):
            process.ask({"die": True}, 60)
        with pytest.raises(RequestFailed, match=r"^it failed$"):
            process.ask({"fail": True}, 60)
        assert process._child is None
        assert process.ask({}, 60) == {"device": "cuda:3"}
