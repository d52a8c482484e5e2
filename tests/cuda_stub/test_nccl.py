"""NCCL between processes that are all there, and of one whose others are not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from typing import Any

import pytest

from batchfinder.cuda_stub import CudaBuild, StubCard, StubSession
from tests.cuda_stub.conftest import PRELUDE

RANK = """
import struct
rank, ranks = int(sys.argv[1]), int(sys.argv[2])
class Id(ctypes.Structure): _fields_ = [("bytes", ctypes.c_char * 128)]
cuda.ncclCommInitRankConfig.argtypes = [c_void_p, c_int, Id, c_int, c_void_p]
TYPES = {"int32": (2, "i"), "int64": (4, "q"), "half": (6, "e"), "float": (7, "f"), "double": (8, "d"), "bfloat16": (9, "H")}
def begin(name=b"job"):
    comm = c_void_p()
    ok(cuda.ncclCommInitRankConfig(byref(comm), ranks, Id(name), rank, None))
    return comm
def packed(kind, values):
    if kind == "bfloat16": values = [struct.unpack("<I", struct.pack("<f", each))[0] >> 16 for each in values]
    return ctypes.create_string_buffer(struct.pack("<%d%s" % (len(values), TYPES[kind][1]), *values))
def unpacked(kind, data, number):
    code = TYPES[kind][1]
    values = struct.unpack("<%d%s" % (number, code), data.raw[: number * struct.calcsize(code)])
    return [struct.unpack("<f", struct.pack("<I", each << 16))[0] for each in values] if kind == "bfloat16" else list(values)
def call(function, kind, values, out, *more, count=None):
    data, room = packed(kind, values), ctypes.create_string_buffer(8 * out + 8)
    error = function(data, room, c_size_t(len(values) if count is None else count), TYPES[kind][0], *more, None)
    return unpacked(kind, room, out) if error == 0 else -error
comm = begin()
"""


def run_ranks(session: StubSession, ranks: int, code: str) -> list[Any]:
    """What each rank answers."""
    environment = {**os.environ, **session.variables()}
    program = PRELUDE + RANK + textwrap.dedent(code)
    processes = [
        subprocess.Popen(
            [sys.executable, "-S", "-c", program, str(rank), str(ranks)],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    ended = [process.communicate(timeout=60) for process in processes]
    assert all("ANSWER" in out for out, _ in ended), ended
    return [json.loads(out.rpartition("ANSWER")[2]) for out, _ in ended]


@pytest.fixture
def cards(build: CudaBuild) -> Any:
    """Three cards for three ranks."""
    with StubSession([StubCard()] * 3, build=build, values="none") as session:
        yield session


@pytest.mark.parametrize("kind", ["int32", "int64", "half", "float", "double", "bfloat16"])
def test_reductions(cards: StubSession, kind: str) -> None:
    """Sum, product, largest and smallest of what the ranks have, in every type; all get the same."""
    code = f"""
        values = [rank + 1, 4 - rank]
        answer([call(cuda.ncclAllReduce, "{kind}", values, 2, operation, comm) for operation in range(4)])
        """
    assert run_ranks(cards, 3, code) == [[[6, 9], [6, 24], [3, 4], [1, 2]]] * 3


def test_an_average_and_a_factor(cards: StubSession) -> None:
    """As DDP and FSDP reduce gradients."""
    code = """
        operation, factor = c_int(), ctypes.c_float(0.5)
        ok(cuda.ncclRedOpCreatePreMulSum(byref(operation), byref(factor), 7, 0, comm))
        answer([call(cuda.ncclAllReduce, "float", [rank + 1.0], 1, 4, comm), call(cuda.ncclAllReduce, "float", [rank + 1.0], 1, operation, comm)])
        """
    assert run_ranks(cards, 3, code) == [[[2.0], [3.0]]] * 3


def test_collectives(cards: StubSession) -> None:
    """Broadcast, gather, scatter of sums, all to all, and a reduction for one rank, which leaves the others' buffers."""
    code = """
        own = packed("int32", [rank])
        ok(cuda.ncclReduce(own, own, c_size_t(1), 2, 0, 1, comm, None))
        answer([
            call(cuda.ncclBroadcast, "int32", [10 + rank], 1, 2, comm),
            call(cuda.ncclAllGather, "int32", [10 * rank, 7], 6, comm),
            call(cuda.ncclReduceScatter, "int32", [1, 2, 3], 1, 0, comm, count=1),
            call(cuda.ncclAlltoAll, "int32", [10 * rank + to for to in range(3)], 3, comm, count=1),
            unpacked("int32", own, 1),
        ])
        """
    found = run_ranks(cards, 3, code)
    assert [each[0] for each in found] == [[12]] * 3
    assert [each[1] for each in found] == [[0, 7, 10, 7, 20, 7]] * 3
    assert [each[2] for each in found] == [[3], [6], [9]]
    assert [each[3] for each in found] == [[0, 10, 20], [1, 11, 21], [2, 12, 22]]
    assert [each[4] for each in found] == [[0], [3], [2]]


def test_letters_between_pairs(cards: StubSession) -> None:
    """In a group, in both directions at once and several to one rank, they neither wait for each other nor mix."""
    code = """
        rooms = {peer: [ctypes.create_string_buffer(4) for _ in range(6)] for peer in range(ranks)}
        letters = {peer: [packed("int32", [100 * rank + 10 * peer + number]) for number in range(6)] for peer in range(ranks)}
        ok(cuda.ncclGroupStart())
        for peer in range(ranks):
            for letter, room in zip(letters[peer], rooms[peer]):
                ok(cuda.ncclSend(letter, c_size_t(1), 2, peer, comm, None))
                ok(cuda.ncclRecv(room, c_size_t(1), 2, peer, comm, None))
        ok(cuda.ncclGroupEnd())
        answer([[unpacked("int32", each, 1)[0] for each in rooms[peer]] for peer in range(ranks)])
        """
    found = run_ranks(cards, 3, code)
    assert found == [
        [[100 * peer + 10 * rank + number for number in range(6)] for peer in range(3)] for rank in range(3)
    ]


def test_a_split(cards: StubSession) -> None:
    """Ranks of one colour are a communicator of their own, ordered by key; without a colour there is none."""
    code = """
        part = c_void_p()
        ok(cuda.ncclCommSplit(comm, 0 if rank < 2 else -1, -rank, byref(part), None))
        if part.value is None:
            answer(None)
        else:
            count, own = c_int(), c_int()
            ok(cuda.ncclCommCount(part, byref(count))); ok(cuda.ncclCommUserRank(part, byref(own)))
            answer([count.value, own.value, call(cuda.ncclAllGather, "int32", [rank], 2, part)])
        """
    assert run_ranks(cards, 3, code) == [[2, 1, [1, 0]], [2, 0, [1, 0]], None]


def test_ranks_that_call_different_things(cards: StubSession) -> None:
    """They are told; on a card they would hang."""
    code = """
        try:
            answer(call(cuda.ncclAllReduce, "int32", [1] * (2 if rank else 1), 1, 0, comm))
        finally:
            sys.stderr.flush()
        """
    assert run_ranks(cards, 2, code) == [-5, -5]


def test_large_buffers_are_not_moved(cards: StubSession) -> None:
    """Gradients stay where they are, and the calls after them still meet."""
    code = """
        count = 300_000
        big = call(cuda.ncclAllReduce, "float", [1.0] * count, 1, 0, comm)
        answer([big, call(cuda.ncclAllReduce, "int32", [rank], 1, 0, comm)])
        """
    assert run_ranks(cards, 3, code) == [[[0.0], [3]]] * 3


def test_a_rank_alone(build: CudaBuild) -> None:
    """All others are taken to be as it is: one process stands for sixty-four."""
    with StubSession([StubCard()], build=build, values="none", ranks=False) as session:
        environment = {**os.environ, **session.variables()}
        code = """
            answer([call(cuda.ncclAllReduce, "int32", [3], 1, 0, comm), call(cuda.ncclAllReduce, "float", [3.0], 1, 4, comm),
                    call(cuda.ncclAllReduce, "int64", [3], 1, 2, comm), call(cuda.ncclAllGather, "int32", [5], 64, comm),
                    call(cuda.ncclReduceScatter, "int32", list(range(64)), 1, 0, comm, count=1)])
            """
        program = PRELUDE + RANK + textwrap.dedent(code)
        done = subprocess.run(
            [sys.executable, "-S", "-c", program, "7", "64"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert json.loads(done.stdout.partition("ANSWER")[2]) == [[192], [3.0], [3], [5] * 64, [7 * 64]], done.stderr
