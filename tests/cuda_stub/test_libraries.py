"""The other libraries: handles, sizes that PyTorch asks for, and what nobody wrote."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from batchfinder.cuda_stub import CudaBuild, StubCard, StubSession
from tests.cuda_stub.conftest import PRELUDE, Program, run_program, small_build


def test_what_nobody_wrote_fails_by_its_name(build: CudaBuild) -> None:
    """With the library's own error, said once; what only writes to the card succeeds."""
    code = """
        blas = new(cuda.cublasCreate_v2)
        answer([cuda.cudaNobodyWroteThis(), cuda.cudaNobodyWroteThis(), cuda.cublasGetNobodyWroteThis(blas),
                cuda.cudnnGetNobodyWroteThis(), cuda.cublasSgemm_v2(blas)])
        """
    with StubSession([StubCard()], build=build, values="none") as session:
        command = [sys.executable, "-S", "-c", PRELUDE + code.replace("\n        ", "\n")]
        done = subprocess.run(command, env={**os.environ, **session.variables()}, capture_output=True, text=True)
        assert done.stdout == "ANSWER[801, 801, 15, 3000, 0]\n"
        assert done.stderr.count("batchfinder's CUDA stub has no cudaNobodyWroteThis: it fails with 801") == 1
        report = session.report()
        assert report.unwritten == ("cudaNobodyWroteThis", "cublasGetNobodyWroteThis", "cudnnGetNobodyWroteThis")
        assert "the CUDA stub has no cudaNobodyWroteThis: what called it was told" in report.words()[0]


def test_a_driver_entry_that_is_not_there_fails_when_it_is_called(program: Program) -> None:
    """PyTorch keeps entries that it may never call; each has its own name."""
    code = """
        def entry(name):
            at, result = c_void_p(), c_int(9)
            ok(cuda.cudaGetDriverEntryPointByVersion(name, byref(at), 12000, ctypes.c_uint64(0), byref(result)))
            return ctypes.CFUNCTYPE(c_int)(at.value), at.value, result.value
        (one, first, _), (_, second, _), (_, again, found) = entry(b"cuOne"), entry(b"cuTwo"), entry(b"cuOne")
        answer([one(), first != second, first == again, found])
        """
    assert program(code) == [801, True, True, 0]


def test_what_pytorch_looks_up_by_its_name_is_there(program: Program) -> None:
    """Older ones look up all of the driver's functions when they first need one, and end where one is missing."""
    code = """
        there = [hasattr(cuda, name) for name in ("cuFirstLookedUp", "nvmlFirstLookedUp", "curious")]
        answer([*there, cuda.cuFirstLookedUp(), cuda.nvmlFirstLookedUp()])
        """
    assert program(code) == [True, True, False, 801, 3]


FAT = """
        import struct
        def binary(*architectures):
            entries = b"".join(struct.pack("<HHIQIIHHIQ", 2, 1, 64, 16, 0, 0, 0, 0, each, 0) + bytes(64 - 40) + bytes(16)
                               for each in architectures)
            data = ctypes.create_string_buffer(struct.pack("<IHHQ", 0xba55ed50, 1, 16, len(entries)) + entries)
            wrapper = ctypes.create_string_buffer(struct.pack("<iiQQ", 0x466243b1, 1, ctypes.addressof(data), 0))
            cuda.__cudaRegisterFatBinary.restype = c_void_p
            kept.extend([data, wrapper])
            return cuda.__cudaRegisterFatBinary(wrapper)
        kept = []
        def version(handle, number):
            host = ctypes.c_char_p(0x1000 + 16 * number)
            cuda.__cudaRegisterFunction(c_void_p(handle), c_void_p(0x1000 + 16 * number), None, None, 0, None, None, None, None, None)
            out = (c_int * 64)()
            ok(cuda.cudaFuncGetAttributes(out, c_void_p(0x1000 + 16 * number)))
            return out[8], out[9]
        """


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        ((8, 9), [86, 80]),
        ((8, 0), [80, 80]),
        ((9, 0), [90, 80]),
        ((7, 5), [75, 80]),
        ((6, 1), [75, 80]),
        ((10, 3), [100, 80]),
    ],
)
def test_the_architecture_of_a_kernel(program: Program, capability: tuple[int, int], expected: list[int]) -> None:
    """The highest of the card's own generation that it runs, by each object file; the lowest where there is none."""
    code = FAT + "\n        answer([version(binary(75, 80, 86, 90, 100, 120), 1)[0], version(binary(80), 2)[1]])"
    assert program(code, StubCard(compute_capability=capability)) == expected


def test_a_grid_beyond_the_card_is_refused(program: Program) -> None:
    """As `cudaErrorInvalidConfiguration`: sizes that no card launches."""
    code = """
        class Dim3(ctypes.Structure): _fields_ = [("x", ctypes.c_uint), ("y", ctypes.c_uint), ("z", ctypes.c_uint)]
        launch = cuda.cudaLaunchKernel
        launch.argtypes = [c_void_p, Dim3, Dim3, c_void_p, c_size_t, c_void_p]
        answer([launch(1, Dim3(*grid), Dim3(*block), None, 0, None) for grid, block in
                (((10, 1, 1), (128, 1, 1)), ((1, 65536, 1), (1, 1, 1)), ((1, 1, 1), (1025, 1, 1)), ((0, 1, 1), (1, 1, 1)))])
        """
    assert program(code) == [0, 9, 9, 9]


RECURRENT = """
        def recurrent(mode, input_size, hidden, layers, both, projected=0, samples=(7, 5)):
            rnn, data = new(cuda.cudnnCreateRNNDescriptor), new(cuda.cudnnCreateRNNDataDescriptor)
            ok(cuda.cudnnSetRNNDescriptor_v8(rnn, 0, mode, 2, both, 0, 0, 0, 0, input_size, hidden, projected or hidden, layers, None, 0))
            ok(cuda.cudnnSetRNNDataDescriptor(data, 0, 0, max(samples), len(samples), input_size, (c_int * len(samples))(*samples), None))
            weights, work, reserve = c_size_t(), c_size_t(), c_size_t()
            ok(cuda.cudnnGetRNNWeightSpaceSize(None, rnn, byref(weights)))
            ok(cuda.cudnnGetRNNTempSpaceSizes(None, rnn, 1, data, byref(work), byref(reserve)))
            parts = []
            for layer in range(layers * (1 + both)):
                for which in range(2 * (4 if mode == 2 else 3 if mode == 3 else 1) + (1 if projected else 0)):
                    matrix, bias = new(cuda.cudnnCreateTensorDescriptor), new(cuda.cudnnCreateTensorDescriptor)
                    at, bias_at = c_void_p(), c_void_p()
                    ok(cuda.cudnnGetRNNWeightParams(None, rnn, layer, weights, c_void_p(1 << 30), which, matrix, byref(at), bias, byref(bias_at)))
                    for tensor, place in ((matrix, at), (bias, bias_at)):
                        kind, count, size, stride = c_int(), c_int(), (c_int * 3)(), (c_int * 3)()
                        ok(cuda.cudnnGetTensorNdDescriptor(tensor, 3, byref(kind), byref(count), size, stride))
                        if count.value: parts.append([place.value - (1 << 30), 4 * size[0] * size[1] * size[2]])
            return weights.value, work.value, reserve.value, sorted(parts)
        """


@pytest.mark.parametrize(
    ("mode", "gates", "kept", "layers", "both", "projected"),
    [(2, 4, 5, 2, 1, 0), (3, 3, 6, 3, 0, 0), (0, 1, 1, 1, 1, 0), (2, 4, 5, 2, 0, 16)],
)
def test_recurrent_layers(
    program: Program, mode: int, gates: int, kept: int, layers: int, both: int, projected: int
) -> None:
    """All weights and biases lie in one block without a gap; the reserve space is by the formula of the fake device."""
    code = RECURRENT + f"\n        answer(recurrent({mode}, 24, 32, {layers}, {both}, {projected}))"
    weights, work, reserve, parts = program(code)
    width, directions, samples = projected or 32, 1 + both, 12
    inputs = [24 if layer == 0 else width * directions for layer in range(layers)]
    each = [gates * 32 * (size + width + 2) + (projected * 32 if projected else 0) for size in inputs]
    assert weights == 4 * directions * sum(each)
    assert reserve == 4 * samples * directions * 32 * (layers * kept + layers - 1)
    assert work == weights + (2 * 4 * samples * directions * width if both else 0)
    assert parts[0][0] == 0
    assert all(at + size == following for (at, size), (following, _) in itertools.pairwise(parts))
    assert sum(parts[-1]) == weights


def test_work_areas_of_cufft(program: Program) -> None:
    """As large as the transform in several dimensions, of a real one the half that it has; none in one dimension."""
    code = """
        def area(sizes, kind_in, kind_out, batch):
            plan, bytes = c_int(), c_size_t(9)
            ok(cuda.cufftCreate(byref(plan)))
            n = (ctypes.c_longlong * len(sizes))(*sizes)
            many = ctypes.c_longlong
            ok(cuda.cufftXtMakePlanMany(plan, len(sizes), n, None, many(1), many(1), kind_in, None, many(1), many(1), kind_out, many(batch), byref(bytes), 0))
            return bytes.value
        answer([area((8, 6), 4, 4, 3), area((8, 6), 0, 4, 3), area((64,), 4, 4, 3), area((4, 4, 4), 5, 5, 1)])
        """
    assert program(code) == [8 * 6 * 3 * 8, 8 * 4 * 3 * 8, 0, 64 * 16]


def test_cards_as_nvml_and_nvidia_smi_tell_of_them(build: CudaBuild) -> None:
    """All of them, whatever is visible, with what is used of each."""
    cards = [StubCard("NVIDIA T4", 15 << 30, 1 << 30, 2 << 30, (7, 5)), StubCard("NVIDIA H100", 80 << 30)]
    code = """
        ok(cuda.nvmlInit_v2())
        count = c_int()
        ok(cuda.nvmlDeviceGetCount_v2(byref(count)))
        seen = []
        for number in range(count.value):
            card = c_void_p()
            ok(cuda.nvmlDeviceGetHandleByIndex_v2(number, byref(card)))
            name, memory = ctypes.create_string_buffer(96), (ctypes.c_uint64 * 3)()
            ok(cuda.nvmlDeviceGetName(card, name, 96)); ok(cuda.nvmlDeviceGetMemoryInfo(card, memory))
            seen.append([name.value.decode(), memory[0] >> 30, memory[2] >> 30])
        answer(seen)
        """
    with StubSession(cards, build=build, values="none") as session:
        assert run_program(session, code, CUDA_VISIBLE_DEVICES="1") == [["NVIDIA T4", 15, 2], ["NVIDIA H100", 80, 0]]
        environment = {**os.environ, **session.variables()}
        query = ["nvidia-smi", "--query-gpu=index,name,memory.total,compute_cap", "--format=csv,noheader,nounits"]
        done = subprocess.run(query, env=environment, capture_output=True, text=True)
        assert done.stdout == "0, NVIDIA T4, 15360, 7.5\n1, NVIDIA H100, 81920, 8.0\n"
        listed = subprocess.run(["nvidia-smi", "-L"], env=environment, capture_output=True, text=True)
        assert listed.stdout.splitlines()[1].startswith("GPU 1: NVIDIA H100 (UUID: GPU-00000002-")
        wrong = subprocess.run(["nvidia-smi", "--query-gpu=nonsense"], env=environment, capture_output=True, text=True)
        assert wrong.returncode == 2


def test_properties_of_cuda_12(stub_dir: Path) -> None:
    """The same facts, where CUDA 12's structure has them."""
    build = small_build(stub_dir / "twelve", (12, 4))
    with StubSession([StubCard(multiprocessors=84, l2_bytes=6 << 20)], build=build, values="none") as session:
        code = """
            at = ctypes.create_string_buffer(2048)
            ok(cuda.cudaGetDeviceProperties_v2(at, 0))
            number = lambda place: c_int.from_buffer(at, place).value
            version = c_int()
            ok(cuda.cudaRuntimeGetVersion(byref(version)))
            answer([number(388), number(616), number(624), c_size_t.from_buffer(at, 696).value, version.value])
            """
        assert run_program(session, code) == [84, 6 << 20, 2048, 163 << 10, 12040]
