"""Compiling the stub for a PyTorch, and the ways in which that fails: one sentence each, and nothing half left."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from batchfinder.cuda_stub import CudaBuild, StubUnavailable
from batchfinder.cuda_stub.compile import compiled_stub, preloaded
from batchfinder.cuda_stub.symbols import read_undefined
from tests.cuda_stub.conftest import CALLED, compile_library, small_build


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CudaBuild:
    """A build and a folder of stubs that no other test has."""
    monkeypatch.setenv("BATCHFINDER_STUB_DIR", str(tmp_path / "stubs"))
    return small_build(tmp_path / "own")


def left(tmp_path: Path) -> list[str]:
    """What lies in the folder of stubs."""
    folder = tmp_path / "stubs"
    return sorted(file.name for file in folder.iterdir()) if folder.exists() else []


def test_a_library_for_each_that_pytorch_needs(own: CudaBuild) -> None:
    """By the names that PyTorch's libraries have in them, and the two that it opens by name; the runtime comes first."""
    folder = compiled_stub(own)
    there = {file.name for file in folder.glob("lib*.so.*")}
    assert there == {*CALLED, "libcuda.so.1", "libnvidia-ml.so.1"}
    assert preloaded(own, folder)[0] == "libcudart.so.13"
    assert set(preloaded(own, folder)) == there
    assert {file.name for file in folder.iterdir()} == {*there, "libcuda.so", "complete"}


def test_nvidias_own_nvrtc_is_found_by_its_name(own: CudaBuild, tmp_path: Path) -> None:
    """cuDNN opens it so, and takes no kernel that it cannot compile. It is not loaded where nothing asks for it."""
    theirs = tmp_path / "nvrtc"
    theirs.mkdir()
    for name in ("libnvrtc.so.13", "libnvrtc-builtins.so.13.0"):
        (theirs / name).touch()
    without, build = compiled_stub(own), replace(own, nvrtc_folder=theirs)
    folder = compiled_stub(build)
    assert folder != without
    assert {file.name for file in folder.glob("libnvrtc*") if file.resolve().parent == theirs} == {
        "libnvrtc.so.13",
        "libnvrtc-builtins.so.13.0",
    }
    assert [name for name in preloaded(build, folder) if "nvrtc" in name] == []


def test_symbols_have_their_versions(own: CudaBuild) -> None:
    """So that the loader takes the stub for the library that was asked for."""
    folder = compiled_stub(own)
    printed = subprocess.run(
        ["readelf", "-W", "--dyn-syms", folder / "libcudart.so.13"], capture_output=True, text=True
    )
    assert "cudaMalloc@@libcudart.so.13" in printed.stdout
    assert " stub_take\n" in printed.stdout


def test_it_is_kept(own: CudaBuild, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is there is not compiled again; what PyTorch's libraries have become otherwise, is."""
    folder = compiled_stub(own)
    monkeypatch.setenv("CC", "false")
    assert compiled_stub(own) == folder
    library = own.torch_folder / "lib" / "libtorch_cuda.so"
    os.utime(library, ns=(0, 0))
    with pytest.raises(StubUnavailable, match="false could not compile the stub of libcudart"):
        compiled_stub(own)
    assert left(tmp_path) == [folder.name]


def test_no_compiler(own: CudaBuild, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It says which to install."""
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("batchfinder.cuda_stub.compile.find_spec", lambda name: None)
    with pytest.raises(
        StubUnavailable, match="no C compiler was found for the stub: install gcc or clang, or `pip inst"
    ):
        compiled_stub(own)
    assert left(tmp_path) == []


def test_a_compiler_from_the_environment(own: CudaBuild, monkeypatch: pytest.MonkeyPatch) -> None:
    """CC may have arguments."""
    monkeypatch.setenv("CC", "gcc -DNOTHING")
    assert (compiled_stub(own) / "complete").exists()


def test_a_compiler_that_fails(own: CudaBuild, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its first line is told."""
    script = tmp_path / "broken"
    script.write_text("#!/bin/sh\necho 'cannot find crt1.o' >&2\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setenv("CC", str(script))
    with pytest.raises(StubUnavailable, match=r"could not compile the stub of libcudart\.so\.13: cannot find crt1\.o"):
        compiled_stub(own)
    assert left(tmp_path) == []


def test_a_library_that_is_cut_short(own: CudaBuild, tmp_path: Path) -> None:
    """As a download that was interrupted leaves it."""
    library = own.torch_folder / "lib" / "libtorch_cuda.so"
    library.write_bytes(library.read_bytes()[:3000])
    with pytest.raises(
        StubUnavailable, match=r"libtorch_cuda\.so is not a whole library \(.*\): install its package again"
    ):
        compiled_stub(own)
    assert left(tmp_path) == []


def test_a_pytorch_with_the_runtime_within(own: CudaBuild) -> None:
    """One that is linked with CUDA statically meets no stub, and is refused."""
    library = own.torch_folder / "lib" / "libtorch_cuda.so"
    library.unlink()
    compile_library(library.parent, library.name, "int nothing(void) { return 0; }\n")
    with pytest.raises(
        StubUnavailable, match=r"PyTorch 9\.9\.0\+cu130 does not use the CUDA runtime as a shared library"
    ):
        compiled_stub(own)


def test_symbols_that_no_stub_knows(own: CudaBuild) -> None:
    """A newer PyTorch's compile, and fail by their names when they are called (`test_libraries`)."""
    assert (compiled_stub(own) / "complete").exists()
    _, undefined = read_undefined(own.torch_folder / "lib" / "libtorch_cuda.so")
    found = {each.name: (each.library, each.version) for each in undefined}
    assert found["cudaNobodyWroteThis"] == ("libcudart.so.13", "libcudart.so.13")
    assert found["ncclAllReduce"] == ("libnccl.so.2", "libnccl.so.2")


def test_a_folder_with_a_space(own: CudaBuild, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """LD_PRELOAD ends a name there."""
    monkeypatch.setenv("BATCHFINDER_STUB_DIR", str(tmp_path / "my stubs"))
    with pytest.raises(StubUnavailable, match="has a space or a colon, which LD_PRELOAD cannot take"):
        compiled_stub(own)


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
from pathlib import Path
from batchfinder.cuda_stub import CudaBuild, StubUnavailable
from batchfinder.cuda_stub.compile import compiled_stub
root = Path(sys.argv[1])
build = CudaBuild("9.9.0+cu130", (13, 0), root / "torch", root, None, None, 92000, 22907)
try:
    compiled_stub(build)
except StubUnavailable as error:
    print("SAID", error)
"""


def test_a_disk_that_is_full(own: CudaBuild, tmp_path: Path) -> None:
    """Nothing is left of what could not be written."""
    root = own.torch_folder.parent
    done = subprocess.run([sys.executable, "-c", LIMITED, str(root)], capture_output=True, text=True)
    assert done.stdout.startswith("SAID "), done.stderr
    assert "\n" not in done.stdout.strip()
    assert left(tmp_path) == []


def test_a_folder_that_cannot_be_written(own: CudaBuild, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As where a file has its name."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("BATCHFINDER_STUB_DIR", str(tmp_path / "file"))
    with pytest.raises(StubUnavailable, match=r"file cannot be written: (Not a directory|File exists)"):
        compiled_stub(own)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_two_at_once(own: CudaBuild, tmp_path: Path) -> None:
    """Both get a whole folder, and one of them is kept."""
    code = LIMITED.replace("resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))", "").replace(
        "    compiled_stub(build)\n", "    print('HERE', compiled_stub(build))\n"
    )
    command = [sys.executable, "-c", code, str(own.torch_folder.parent)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = {process.communicate()[0] for process in processes}
    assert len(said) == 1
    assert len(left(tmp_path)) == 1
    assert shutil.which("gcc")
