"""Memory of stub cards: what is taken and refused, where segments lie, and what other processes see of it."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from typing import Any

import pytest

from batchfinder.cuda_stub import CudaBuild, StubCard, StubSession
from batchfinder.simulator.segments import CudaAddresses
from tests.cuda_stub.conftest import PRELUDE, Program, run_program

MIB = 1 << 20


def test_what_a_card_has_and_what_is_refused(program: Program) -> None:
    """Segments are held in whole granules of 2 MiB; the last one fits to the byte, and one more does not."""
    seen = program(
        """
        start = info()
        first = malloc(3 * MIB)
        after = info()
        last = malloc(60 * MIB)
        full = info()
        refused = malloc(1)
        error = cuda.cudaGetLastError(), cuda.cudaGetLastError()
        ok(free(first))
        answer([start, after, last > 0, full, refused, error, info()])
        """
    )
    assert seen == [[64 * MIB, 64 * MIB], [60 * MIB, 64 * MIB], True, [0, 64 * MIB], -2, [2, 0], [4 * MIB, 64 * MIB]]


def test_the_context_and_what_others_hold(program: Program) -> None:
    """What something else holds is never free; a context is taken at a process's first use, once."""
    card = StubCard(total_bytes=64 * MIB, context_bytes=10 * MIB, held_bytes=20 * MIB)
    assert program("answer([info()[0], malloc(35 * MIB), malloc(34 * MIB) > 0, info()[0]])", card) == [
        34 * MIB, -2, True, 0,
    ]  # fmt: skip


def test_cards_of_unequal_memory(program: Program) -> None:
    """Each has its own; a process uses the one that it has set."""
    cards = [StubCard(total_bytes=size * MIB) for size in (8, 32, 16)]
    code = """
        sizes = []
        for card in range(3):
            ok(cuda.cudaSetDevice(card))
            sizes.append([info()[1] // MIB, malloc(20 * MIB) > 0])
        answer([sizes, cuda.cudaSetDevice(3)])
        """
    assert program(code, *cards) == [[[8, False], [32, True], [16, False]], 101]


@pytest.mark.parametrize(
    ("visible", "seen"), [("1", [32]), ("2,0", [16, 8]), ("", []), ("0,5,1", [8]), ("1,1", []), ("GPU-00000002", [32])]
)
def test_visible_devices(build: CudaBuild, visible: str, seen: list[int]) -> None:
    """As the driver reads the variable, at its first use."""
    cards = [StubCard(total_bytes=size * MIB) for size in (8, 32, 16)]
    code = """
        count = c_int()
        error = cuda.cudaGetDeviceCount(byref(count))
        sizes = []
        for card in range(count.value):
            ok(cuda.cudaSetDevice(card))
            sizes.append(info()[1] // MIB)
        answer([sizes, error])
        """
    with StubSession(cards, build=build, values="none") as session:
        assert run_program(session, code, CUDA_VISIBLE_DEVICES=visible) == [seen, 0 if seen else 100]


def test_pointers(program: Program) -> None:
    """Within a segment, in pinned memory and elsewhere: the card's, the host's registered, the host's."""
    seen = program(
        """
        class Attributes(ctypes.Structure):
            _fields_ = [("type", c_int), ("device", c_int), ("at", c_void_p), ("host", c_void_p), ("more", c_void_p * 8)]
        def kind(at):
            found = Attributes()
            ok(cuda.cudaPointerGetAttributes(byref(found), c_void_p(at)))
            return found.type
        at = malloc(5 * MIB)
        pinned = new(cuda.cudaHostAlloc, c_size_t(4096), 0).value
        own = ctypes.create_string_buffer(64)
        kinds = [kind(at), kind(at + 5 * MIB - 1), kind(pinned + 4095), kind(ctypes.addressof(own))]
        ok(cuda.cudaHostRegister(own, c_size_t(64), 0))
        kinds.append(kind(ctypes.addressof(own)))
        ok(free(at)); ok(cuda.cudaFreeHost(c_void_p(pinned)))
        answer([kinds, kind(at), kind(pinned), free(at), free(12345)])
        """
    )
    assert seen == [[2, 2, 1, 0, 1], 0, 0, 1, 1]


def test_copies_come_back(program: Program) -> None:
    """Small ones are made, and a segment that is given back and taken again holds nothing of what was there."""
    assert program(
        """
        at = malloc(2 * MIB)
        data = (c_int * 4)(1, 2, 3, 4)
        ok(cuda.cudaMemcpy(c_void_p(at), data, c_size_t(16), 1))
        back = (c_int * 4)()
        ok(cuda.cudaMemcpy(back, c_void_p(at), c_size_t(16), 2))
        ok(free(at))
        again = malloc(2 * MIB)
        left = (c_int * 4)()
        ok(cuda.cudaMemcpy(left, c_void_p(again), c_size_t(16), 2))
        answer([list(back), at == again, list(left)])
        """
    ) == [[1, 2, 3, 4], True, [0, 0, 0, 0]]


def random_uses(rng: random.Random, number: int) -> list[tuple[int, int]]:
    """Segments to take (the size) and to give back (minus their place in the list)."""
    uses: list[tuple[int, int]] = []
    there: list[int] = []
    for place in range(number):
        if there and rng.random() < 0.45:
            uses.append((-1, there.pop(rng.randrange(len(there)))))
        else:
            uses.append((rng.choice((2, 2, 4, 20, 20, 34, 66, 200)) * MIB, 0))
            there.append(place)
    return uses


REPLAY = """
        uses, taken = {uses}, {{}}
        for place, (size, which) in enumerate(uses):
            if size < 0:
                ok(free(taken[which]))
            else:
                taken[place] = malloc(size)
        top = max(taken.values())
        answer([[place, at - top] for place, at in taken.items()])
        """


@pytest.mark.parametrize("seed", range(4))
def test_segments_lie_where_the_simulator_puts_them(program: Program, seed: int) -> None:
    """By the rule that memory snapshots show, which decides between free blocks of one size."""
    uses = random_uses(random.Random(seed), 300)
    found = dict(program(REPLAY.format(uses=uses), StubCard(total_bytes=1 << 40)))
    rule, expected = CudaAddresses(), {}
    for place, (size, which) in enumerate(uses):
        if size < 0:
            rule.give_back(expected[which], uses[which][0])
        else:
            expected[place] = rule.take(size)
    top = max(expected.values())
    assert found == {place: at - top for place, at in expected.items()}


@pytest.mark.parametrize("addresses", ["low", "rising", "falling"])
def test_other_rules_of_addresses(program: Program, addresses: str) -> None:
    """Always higher, always lower, or in the lowest hole, which the first given back leaves."""
    code = """
        first, second, third = malloc(4 * MIB), malloc(4 * MIB), malloc(4 * MIB)
        ok(free(first))
        fourth = malloc(2 * MIB)
        answer([second - first, third - second, fourth - first])
        """
    expected = {"low": [4, 4, 0], "rising": [4, 4, 12], "falling": [-4, -4, -10]}[addresses]
    assert program(code, addresses=addresses) == [each * MIB for each in expected]


def test_virtual_memory(program: Program) -> None:
    """Addresses cost nothing, what is mapped there does; as PyTorch's expandable segments use both."""
    seen = program(
        """
        at, handle = ctypes.c_uint64(), ctypes.c_uint64()
        ok(cuda.cuMemAddressReserve(byref(at), c_size_t(1 << 40), c_size_t(0), ctypes.c_uint64(0), ctypes.c_uint64(0)))
        reserved = info()[0] // MIB
        properties = (c_int * 8)(1, 0, 1, 0)
        ok(cuda.cuMemCreate(byref(handle), c_size_t(40 * MIB), properties, ctypes.c_uint64(0)))
        more = ctypes.c_uint64()
        refused = cuda.cuMemCreate(byref(more), c_size_t(40 * MIB), properties, ctypes.c_uint64(0))
        ok(cuda.cuMemMap(at, c_size_t(40 * MIB), c_size_t(0), handle, ctypes.c_uint64(0)))
        mapped = info()[0] // MIB
        ok(cuda.cuMemUnmap(at, c_size_t(40 * MIB))); ok(cuda.cuMemRelease(handle))
        ok(cuda.cuMemAddressFree(at, c_size_t(1 << 40)))
        answer([reserved, refused, mapped, info()[0] // MIB])
        """
    )
    assert seen == [64, 2, 24, 64]


def test_another_process_on_the_same_card(build: CudaBuild) -> None:
    """It sees what the first holds, its context too; not what one that was killed held."""
    card = StubCard(total_bytes=64 * MIB, context_bytes=4 * MIB)
    with StubSession([card], build=build, values="none") as session:
        environment = {**os.environ, **session.variables()}
        code = PRELUDE + "assert malloc(30 * MIB) > 0; print('there', flush=True); sys.stdin.read()"
        command = [sys.executable, "-S", "-c", code]
        with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as first:
            assert first.stdout is not None
            assert first.stdout.readline() == b"there\n"
            assert run_program(session, "answer([info()[0] // MIB, malloc(28 * MIB)])") == [26, -2]
            first.kill()
        assert run_program(session, "answer(info()[0] // MIB)") == 60


def test_threads_and_forks(program: Program) -> None:
    """Threads take and give at once, and nothing is lost; what a fork does changes nothing here."""
    code = """
        import threading
        def work(seed):
            for turn in range(300):
                at = malloc((1 + (seed + turn) % 5) * 2 * MIB)
                assert at > 0
                ok(free(at))
        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        kept = malloc(2 * MIB)
        for thread in threads: thread.start()
        pids = []
        for turn in range(5):
            pid = os.fork()
            if pid == 0:
                os._exit(0 if malloc(4 * MIB) > 0 else 1)
            pids.append(pid)
        for thread in threads: thread.join()
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        answer([info()[0] // MIB, codes])
        """
    assert program(code, StubCard(total_bytes=256 * MIB)) == [254, [0] * 5]


def test_many_segments_are_found_quickly(program: Program) -> None:
    """Neither their number nor a pointer's place is a matter of time: 20,000 are taken, asked for and given back."""
    code = """
        import time
        def taking(number):
            start = time.perf_counter()
            all_of_them = [malloc(2 * MIB) for _ in range(number)]
            for at in all_of_them: ok(free(at))
            return (time.perf_counter() - start) / number
        taking(500)
        answer(taking(20000) / taking(500))
        """
    assert program(code, StubCard(total_bytes=1 << 40), addresses="rising") < 20


def test_without_a_setting_there_is_no_card(build: CudaBuild) -> None:
    """A process that the stub was not meant for finds none."""
    with StubSession([StubCard()], build=build, values="none") as session:
        assert run_program(session, "n = c_int(7); answer([cuda.cudaGetDeviceCount(byref(n)), n.value])", BATCHFINDER_CUDA_STUB="") == [100, 0]  # fmt: skip


def test_the_address_space_is_limited(build: CudaBuild) -> None:
    """Under `ulimit -v` a smaller range is taken, and a card that does not fit into it runs out of memory, and says so."""
    with StubSession([StubCard(total_bytes=1 << 40)], build=build, values="none") as session:
        environment = {**os.environ, **session.variables()}
        code = PRELUDE + "answer([malloc(1 << 30) > 0, malloc(1 << 39)])"
        command = f"ulimit -v {40 << 20}; exec {sys.executable} -S -c '{code}'"
        done = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True)
        assert done.stdout == "ANSWER[true, -2]\n", done.stderr
        assert any("the address space of this process is too small" in words for words in session.report().assumed)


def test_the_folder_is_gone_afterwards(build: CudaBuild) -> None:
    """Nothing of a session stays."""
    with StubSession([StubCard()], build=build, values="none") as session:
        run_program(session, "answer(malloc(4 * MIB) > 0)")
        assert (session.folder / "memory").exists()
    assert not session.folder.exists()


def test_the_card_says_what_it_is(build: CudaBuild, program: Program) -> None:
    """Name and kind as PyTorch reads them; signs that part a setting are no part of a name."""
    card = StubCard("NVIDIA |;= X", 5 << 30, 0, 0, (8, 6), 84)
    seen: dict[str, Any] = program(
        """
        at = ctypes.create_string_buffer(2048)
        ok(cuda.cudaGetDeviceProperties(at, 0))
        number = lambda place: c_int.from_buffer(at, place).value
        value = c_int()
        def attribute(which):
            ok(cuda.cudaDeviceGetAttribute(byref(value), which, 0))
            return value.value
        answer({"name": at.value.decode(), "total": c_size_t.from_buffer(at, 288).value, "major": number(360),
                "minor": number(364), "attributes": [attribute(each) for each in (75, 76, 16, 39, 97)]})
        """,
        card,
    )
    assert seen == {
        "name": "NVIDIA     X", "total": 5 << 30, "major": 8, "minor": 6, "attributes": [8, 6, 84, 1536, 99 << 10],
    }  # fmt: skip
