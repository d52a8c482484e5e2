"""When work is done, and what a captured graph is."""

from __future__ import annotations

import pytest

from tests.cuda_stub.conftest import Program

STREAMS = """
        def stream(): return new(cuda.cudaStreamCreateWithPriority, 1, 0)
        def event(on):
            made = new(cuda.cudaEventCreateWithFlags, 2)
            ok(cuda.cudaEventRecord(made, on))
            return made
        def ready(*events): return [cuda.cudaEventQuery(each) == 0 for each in events]
        """


@pytest.mark.parametrize("events", ["early", "late"])
def test_an_event_that_nobody_waited_for(program: Program, events: str) -> None:
    """Done at once, or not before the host has waited for it or for a later one of its stream."""
    code = """
        one = stream()
        first, second, third = event(one), event(one), event(one)
        before = ready(first, second, third)
        ok(cuda.cudaEventSynchronize(second))
        middle = ready(first, second, third)
        ok(cuda.cudaStreamSynchronize(one))
        answer([before, middle, ready(third), cuda.cudaEventQuery(new(cuda.cudaEventCreateWithFlags, 2))])
        """
    late = events == "late"
    assert program(STREAMS + code, events=events) == [
        [not late] * 3, [True, True, not late], [True], 0,
    ]  # fmt: skip


def test_what_waited_for_it_is_enough(program: Program) -> None:
    """An event is complete when something is that waited for it, through any number of streams; not before."""
    code = """
        streams = [stream() for _ in range(5)]
        events = []
        for number, each in enumerate(streams):
            if events: ok(cuda.cudaStreamWaitEvent(each, events[-1], 0))
            events.append(event(each))
        beside = event(streams[2])
        ok(cuda.cudaEventSynchronize(events[3]))
        answer([ready(*events), ready(beside)])
        """
    assert program(STREAMS + code, events="late") == [[True, True, True, True, False], [False]]


def test_in_order_what_was_issued_before_is_done(program: Program) -> None:
    """On whatever stream: no stream falls behind. What was issued later is not, and asking is no waiting."""
    code = """
        one, other = stream(), stream()
        first, second, third, fourth = event(one), event(other), event(one), event(other)
        before = ready(first, second, third, fourth)
        ok(cuda.cudaEventSynchronize(third))
        middle = ready(first, second, third, fourth)
        ok(cuda.cudaEventRecord(first, other))
        again = ready(first, fourth)
        ok(cuda.cudaStreamSynchronize(one))
        answer([before, middle, again, ready(first, fourth)])
        """
    assert program(STREAMS + code, events="in-order") == [
        [False] * 4, [True, True, True, False], [False, False], [True, True],
    ]  # fmt: skip


def test_waiting_counts_what_was_recorded_then(program: Program) -> None:
    """A stream that waited for an event has not waited for what came after it; a later record of it is another."""
    code = """
        one, other = stream(), stream()
        first = event(one)
        ok(cuda.cudaStreamWaitEvent(other, first, 0))
        waited = event(other)
        later = event(one)
        ok(cuda.cudaEventRecord(first, one))
        ok(cuda.cudaEventSynchronize(waited))
        answer(ready(waited, later, first))
        """
    assert program(STREAMS + code, events="late") == [True, False, False]


def test_the_whole_device_is_waited_for(program: Program) -> None:
    """`cudaDeviceSynchronize` and giving memory back complete all; asking a stream is no waiting."""
    code = """
        one, other = stream(), stream()
        first, second = event(one), event(other)
        asked = cuda.cudaStreamQuery(one)
        ok(cuda.cudaDeviceSynchronize())
        done = ready(first, second)
        third = event(one)
        ok(free(malloc(2 * MIB)))
        answer([asked, done, ready(third), cuda.cudaStreamQuery(one)])
        """
    assert program(STREAMS + code, events="late") == [600, [True, True], [True], 0]


def test_streams_join_a_graph(program: Program) -> None:
    """A stream that waits for an event of a capturing one captures too, until the capture ends; others do not."""
    code = """
        one, other, third = stream(), stream(), stream()
        def capturing(*streams):
            found = []
            for each in streams:
                status, number = c_int(), ctypes.c_uint64()
                ok(cuda.cudaStreamGetCaptureInfo(each, byref(status), byref(number), None, None, None, None))
                found.append(number.value if status.value else 0)
            return found
        before = event(third)
        ok(cuda.cudaStreamBeginCapture(one, 0))
        ok(cuda.cudaStreamWaitEvent(third, before, 0))
        ok(cuda.cudaStreamWaitEvent(other, event(one), 0))
        during = capturing(one, other, third)
        graph, executable = c_void_p(), c_void_p()
        ok(cuda.cudaStreamEndCapture(one, byref(graph)))
        after = capturing(one, other)
        ok(cuda.cudaStreamBeginCapture(other, 0))
        again = capturing(one, other)
        second = c_void_p()
        ok(cuda.cudaStreamEndCapture(other, byref(second)))
        ok(cuda.cudaGraphInstantiate(byref(executable), graph, ctypes.c_uint64(0)))
        answer([during, after, again, cuda.cudaGraphLaunch(executable, one), cuda.cudaStreamEndCapture(one, byref(graph))])
        """
    assert program(STREAMS + code) == [[1, 1, 0], [0, 0], [0, 2], 0, 1]


def test_a_dead_context_answers_nothing_else(program: Program) -> None:
    """After a kernel's assertion every call fails with it, and it does not go away."""
    code = """
        at = malloc(2 * MIB)
        cuda.stub_kill_context(710)
        calls = [cuda.cudaStreamSynchronize(None), malloc(2 * MIB), cuda.cudaFree(c_void_p(at)), cuda.cudaDeviceSynchronize()]
        answer([calls, cuda.cudaGetLastError(), cuda.cudaGetLastError()])
        """
    assert program(code) == [[710, -710, 710, 710], 710, 710]
