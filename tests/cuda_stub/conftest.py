"""The stub libraries for a PyTorch that is a few symbols, and programs that call them by ctypes in their own process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from batchfinder.cuda_stub import CudaBuild, StubCard, StubSession

CALLED = {
    "libcudart.so.13": ("cudaMalloc", "cudaFree", "cudaNobodyWroteThis"),
    "libcublas.so.13": ("cublasCreate_v2", "cublasSgemm_v2", "cublasGetNobodyWroteThis"),
    "libcudnn.so.9": ("cudnnCreate", "cudnnGetVersion", "cudnnGetNobodyWroteThis"),
    "libnccl.so.2": ("ncclAllReduce",),
    "libcufft.so.12": ("cufftXtMakePlanMany",),
    "libnvrtc.so.13": ("nvrtcVersion",),
}
Program = Callable[..., Any]


def compile_library(folder: Path, name: str, source: str, *options: str) -> Path:
    """Compile a small shared library."""
    file = folder / f"{name}.c"
    file.write_text(source)
    command = ["gcc", "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", str(folder / name), str(file), *options]
    subprocess.run(command, check=True)
    return folder / name


def small_build(folder: Path, cuda: tuple[int, int] = (13, 0)) -> CudaBuild:
    """A PyTorch whose CUDA library calls a few functions of CUDA's, with versions, as PyTorch's do."""
    beside, torch = folder / "nvidia", folder / "torch"
    (torch / "lib").mkdir(parents=True)
    beside.mkdir()
    names = {name.replace(".13", f".{cuda[0]}"): functions for name, functions in CALLED.items()}
    for name, functions in names.items():
        versions = beside / f"{name}.map"
        versions.write_text(f"{name} {{ global: {'; '.join(functions)}; }};")
        body = "".join(f"int {function}(void) {{ return 0; }}\n" for function in functions)
        compile_library(beside, name, body, f"-Wl,--version-script={versions}")
    every = [function for functions in names.values() for function in functions]
    body = "".join(f"extern int {function}(void);\n" for function in every)
    body += f"int all(void) {{ return {' + '.join(f'{function}()' for function in every)}; }}\n"
    compile_library(torch / "lib", "libtorch_cuda.so", body, f"-L{beside}", *(f"-l:{name}" for name in names))
    looked_up = 'const char *names[] = {"cuFirstLookedUp", "nvmlFirstLookedUp", "cut short", "curious"};\n'
    compile_library(torch / "lib", "libc10_cuda.so", looked_up)
    version = f"9.9.0+cu{cuda[0]}{cuda[1]}"
    (torch / "version.py").write_text(f"__version__ = '{version}'\ncuda = '{cuda[0]}.{cuda[1]}'\n")
    return CudaBuild(version, cuda, torch, folder, None, None, 92000, 22907)


@pytest.fixture(scope="session")
def stub_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where what is compiled is kept while these tests run."""
    folder = tmp_path_factory.mktemp("stub")
    before = os.environ.get("BATCHFINDER_STUB_DIR")
    os.environ["BATCHFINDER_STUB_DIR"] = str(folder)
    yield folder
    if before is None:
        del os.environ["BATCHFINDER_STUB_DIR"]
    else:
        os.environ["BATCHFINDER_STUB_DIR"] = before


@pytest.fixture(scope="session")
def build(stub_dir: Path) -> CudaBuild:
    """For CUDA 13."""
    return small_build(stub_dir / "thirteen")


PRELUDE = """
import ctypes, json, os, sys
from ctypes import byref, c_int, c_size_t, c_void_p
cuda = ctypes.CDLL(None)
def ok(error): assert error == 0, error
def malloc(size):
    at = c_void_p()
    error = cuda.cudaMalloc(byref(at), c_size_t(size))
    return at.value if error == 0 else -error
def free(at): return cuda.cudaFree(c_void_p(at))
def info():
    free_bytes, total = c_size_t(), c_size_t()
    ok(cuda.cudaMemGetInfo(byref(free_bytes), byref(total)))
    return free_bytes.value, total.value
def new(create, *more):
    handle = c_void_p()
    ok(create(byref(handle), *more))
    return handle
def answer(value): print("ANSWER" + json.dumps(value), flush=True)
MIB = 1 << 20
"""


def run_program(session: StubSession, code: str, **more: str) -> Any:
    """What a program answers that runs on the session's cards."""
    command = [sys.executable, "-S", "-c", PRELUDE + textwrap.dedent(code)]
    environment = {**os.environ, **session.variables(), **more}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    answers = [line.removeprefix("ANSWER") for line in done.stdout.splitlines() if line.startswith("ANSWER")]
    return json.loads(answers[-1])


@pytest.fixture
def program(build: CudaBuild) -> Program:
    """`program(code, *cards, **settings)`: what the code answers; without cards there is one of 64 MiB."""

    def run(code: str, *cards: StubCard, **settings: Any) -> Any:
        with StubSession(cards or [StubCard(total_bytes=64 << 20)], build=build, values="none", **settings) as session:
            return run_program(session, code)

    return run
