"""Which CUDA build of PyTorch is used, and downloading one: with pip, from wheels of a few bytes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from batchfinder.cuda_stub import StubUnavailable, builds, find_build, install, installed_builds, uninstall

TAG = f"cp{sys.version_info.major}{sys.version_info.minor}"
OLD_METADATA = """Metadata-Version: 2.1
Name: torch
Version: 2.6.0
Requires-Dist: nvidia-cudnn-cu12 (==9.1.0.70) ; platform_system == "Linux" and platform_machine == "x86_64"
Requires-Dist: nvidia-cuda-nvrtc-cu12 (==12.4.127) ; platform_system == "Linux" and platform_machine == "x86_64"
Requires-Dist: nvidia-nccl-cu12 (==2.21.5) ; platform_system == "Linux" and platform_machine == "x86_64"
Requires-Dist: triton (==3.2.0) ; platform_system == "Linux" and platform_machine == "x86_64"
"""
NEW_METADATA = """Metadata-Version: 2.4
Name: torch
Version: {version}
Requires-Dist: typing-extensions>=4.10.0
Requires-Dist: cuda-toolkit[cublas,cudart,nvrtc]==13.0.3; platform_system == "Linux"
Requires-Dist: nvidia-cudnn-cu13==9.20.0.48; platform_system == "Linux"
Requires-Dist: nvidia-nccl-cu13==2.29.7; platform_system == "Linux"
Requires-Dist: triton==3.7.1; platform_system == "Linux" and python_version < "3.15"
"""


def wheel(folder: Path, name: str, version: str, files: dict[str, str], metadata: str | None = None) -> Path:
    """A wheel that pip takes."""
    place = folder / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    with zipfile.ZipFile(place, "w") as archive:
        for path, text in files.items():
            entry = zipfile.ZipInfo(path)
            entry.external_attr = (0o755 if "/bin/" in path else 0o644) << 16
            archive.writestr(entry, text)
        archive.writestr(f"{info}/METADATA", metadata or f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return place


def torch_files(version: str, cuda: str | None) -> dict[str, str]:
    """PyTorch's, as far as they are looked at."""
    shown = repr(cuda)
    return {
        "torch/version.py": f"__version__ = '{version}'\ndebug = False\ncuda: Optional[str] = {shown}\nhip = None\n",
        "torch/__init__.py": "",
        **({"torch/lib/libtorch_cuda.so": "elf"} if cuda else {}),
    }


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels, which is all that pip finds; and one for what is downloaded."""
    folder = tmp_path / "index"
    folder.mkdir()
    metadata = NEW_METADATA.format(version="9.9.0")
    wheel(folder, "torch", "9.9.0", torch_files("9.9.0+cu130", "13.0"), metadata)
    cudnn = {"nvidia/cudnn/lib/libcudnn_graph.so.9": "elf"}
    wheel(folder, "nvidia-cudnn-cu13", "9.20.0.48", cudnn)
    wheel(folder, "nvidia-cuda-nvrtc", "13.0.88", {"nvidia/cu13/lib/libnvrtc.so.13": "elf"})
    wheel(folder, "triton", "3.7.1", {"triton/backends/nvidia/bin/ptxas": "#!/bin/sh\n"})
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("BATCHFINDER_STUB_DIR", str(tmp_path / "stub"))
    return folder


def left(tmp_path: Path) -> list[str]:
    """What lies in the folder of builds, but for locks."""
    folder = tmp_path / "stub"
    return sorted(file.name for file in folder.iterdir() if not file.name.endswith(".lock")) if folder.exists() else []


def test_a_download(index: Path, tmp_path: Path) -> None:
    """PyTorch and what its metadata ask for beside it; it is said before what is fetched and where it goes."""
    said: list[str] = []
    build = install("9.9.0", tell=said.append)
    place = tmp_path / "stub" / f"torch-9.9.0-{TAG}"
    assert (build.version, build.cuda, build.beside) == ("9.9.0+cu130", (13, 0), place)
    assert (build.cudnn_version, build.nccl_version) == (92000, 22907)
    assert build.cudnn_folder == place / "nvidia" / "cudnn" / "lib"
    assert build.nvrtc_folder == place / "nvidia" / "cu13" / "lib"
    assert os.access(place / "triton" / "backends" / "nvidia" / "bin" / "ptxas", os.X_OK)
    assert said[0] == f"downloading PyTorch 9.9.0 with CUDA, cuDNN, nvrtc and Triton (about 1360 MiB) to {place}"
    assert left(tmp_path) == [place.name]
    assert find_build("9.9.0") == build
    assert installed_builds() == [build]


def test_it_is_downloaded_once(index: Path, tmp_path: Path) -> None:
    """Also with less; with more, it is fetched again."""
    install("9.9.0", minimal=True, tell=lambda line: None)
    assert find_build("9.9.0").cudnn_folder is None
    said: list[str] = []
    install("9.9.0", minimal=True, tell=said.append)
    assert said == [f"PyTorch 9.9.0+cu130 is in {tmp_path / 'stub' / f'torch-9.9.0-{TAG}'} already"]
    assert install("9.9.0", tell=said.append).cudnn_folder is not None


def test_an_older_pytorch(index: Path) -> None:
    """For CUDA 12: its packages have names of their own, and its metadata are written otherwise."""
    wheel(index, "torch", "2.6.0", torch_files("2.6.0+cu124", "12.4"), OLD_METADATA)
    wheel(index, "nvidia-cudnn-cu12", "9.1.0.70", {"nvidia/cudnn/lib/libcudnn_graph.so.9": "elf"})
    wheel(index, "nvidia-cuda-nvrtc-cu12", "12.4.127", {"nvidia/cuda_nvrtc/lib/libnvrtc.so.12": "elf"})
    wheel(index, "triton", "3.2.0", {"triton/__init__.py": ""})
    build = install("2.6.0", tell=lambda line: None)
    assert (build.cuda, build.cudnn_version, build.nccl_version) == ((12, 4), 90100, 22105)
    assert build.nvrtc_folder is not None


def test_it_is_removed(index: Path, tmp_path: Path) -> None:
    """All of it, and it is said how much; a second time there is nothing."""
    install("9.9.0", tell=lambda line: None)
    said: list[str] = []
    uninstall(said.append)
    uninstall(said.append)
    folder = tmp_path / "stub"
    assert said == [f"removed {folder} (0 MiB)", f"nothing to remove: there is no {folder}"]
    assert not folder.exists()


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("9.8.0", r"pip could not download torch===9\.8\.0: ERROR: Could not find a version"),
        ("2.3.1", r"the stub runs PyTorch 2\.4 and later, not 2\.3\.1"),
        ("nightly", r"the stub runs PyTorch 2\.4 and later, not nightly"),
    ],
)
def test_what_cannot_be_downloaded(index: Path, tmp_path: Path, version: str, said: str) -> None:
    """One sentence, and nothing left."""
    with pytest.raises(StubUnavailable, match=said):
        install(version, tell=lambda line: None)
    assert left(tmp_path) == []


def test_a_cpu_build_under_the_same_number(index: Path, tmp_path: Path) -> None:
    """As an index of CPU builds has it."""
    wheel(index, "torch", "9.7.0", torch_files("9.7.0", None))
    with pytest.raises(
        StubUnavailable, match=r"the PyTorch 9\.7\.0 that pip finds has no CUDA: its index may hold CPU"
    ):
        install("9.7.0", tell=lambda line: None)
    assert left(tmp_path) == []


def test_a_wheel_that_is_cut_short(index: Path, tmp_path: Path) -> None:
    """PyTorch's is whole, and cuDNN's is not: nothing of either stays."""
    (cudnn,) = index.glob("nvidia_cudnn*")
    cudnn.write_bytes(cudnn.read_bytes()[:-40])
    with pytest.raises(
        StubUnavailable, match=r"nvidia_cudnn_cu13-9\.20\.0\.48.*whl|pip could not download nvidia-cudnn"
    ):
        install("9.9.0", tell=lambda line: None)
    assert left(tmp_path) == []


def test_a_disk_without_room(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is seen before anything is fetched."""
    monkeypatch.setitem(builds._ABOUT_DOWNLOADED_MIB, "torch", 1 << 40)
    with pytest.raises(
        StubUnavailable, match=r"stub has \d+ MiB free, and download and unpacking need about \d+: name anoth"
    ):
        install("9.9.0", tell=lambda line: None)
    assert left(tmp_path) == []


FULL = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
from batchfinder.cuda_stub import StubUnavailable, install
try:
    install("9.9.0", tell=lambda line: None)
except StubUnavailable as error:
    print("SAID", error)
"""


def test_a_disk_that_fills_up(index: Path, tmp_path: Path) -> None:
    """While it is unpacked: nothing half is left."""
    files = {**torch_files("9.9.0+cu130", "13.0"), "torch/lib/large.so": "x" * 100_000}
    with zipfile.ZipFile(index / "torch-9.9.0-py3-none-any.whl", "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("torch/lib/large.so", files["torch/lib/large.so"])
    done = subprocess.run([sys.executable, "-c", FULL], capture_output=True, text=True)
    assert done.stdout.startswith("SAID torch-9.9.0-py3-none-any.whl cannot be unpacked to "), done.stderr
    assert left(tmp_path) == []


def test_no_pip(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an environment that uv made: it is said how to bring it."""
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip" / "__init__.py").touch()
    (tmp_path / "pip" / "__main__.py").write_text("import sys; sys.exit('/usr/bin/python: No module named pip')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(StubUnavailable, match=r"this environment has no pip: .* -m ensurepip brings it"):
        install("9.9.0", tell=lambda line: None)
    assert left(tmp_path) == []


SLOWLY = """
import sys, time
from batchfinder.cuda_stub import builds, install
unpack = builds._unpack
def slowly(wheel, folder):
    unpack(wheel, folder)
    print("UNPACKED", flush=True)
    time.sleep(30)
builds._unpack = slowly
install("9.9.0", tell=lambda line: None)
"""


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=[pytest.mark.slow, pytest.mark.exhaustive])]
)
def test_an_interrupted_download(index: Path, tmp_path: Path, number: signal.Signals) -> None:
    """Ctrl-C leaves nothing, and what a killed process leaves is gone after the next download."""
    with subprocess.Popen([sys.executable, "-c", SLOWLY], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"UNPACKED\n"
        with pytest.raises(StubUnavailable, match=r"PyTorch 9\.9\.0 is not here"):
            find_build("9.9.0")
        process.send_signal(number)
        process.wait()
    if number is signal.SIGINT:
        assert left(tmp_path) == []
    assert install("9.9.0", tell=lambda line: None).version == "9.9.0+cu130"
    assert left(tmp_path) == [f"torch-9.9.0-{TAG}"]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_two_downloads_at_once(index: Path, tmp_path: Path) -> None:
    """The second waits, and finds what the first has brought."""
    code = "from batchfinder.cuda_stub import install; install('9.9.0')"
    processes = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = sorted(process.communicate()[0].splitlines()[-1].rpartition(" (")[2] for process in processes)
    assert sum("already" in line for line in said) == 1
    assert left(tmp_path) == [f"torch-9.9.0-{TAG}"]


# -- this environment's own PyTorch


@pytest.fixture
def own_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A torch that is found first, as this environment's."""
    site = tmp_path / "site"
    monkeypatch.setattr(builds, "_own_torch", lambda: site / "torch" if site.exists() else None)
    monkeypatch.setenv("BATCHFINDER_STUB_DIR", str(tmp_path / "stub"))
    return site


def put(site: Path, version: str, cuda: str | None) -> None:
    """Write a torch there."""
    for path, text in torch_files(version, cuda).items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text)


def test_a_cuda_build_of_this_environment(own_torch: Path) -> None:
    """It is used as it is, and nothing is downloaded."""
    put(own_torch, "2.9.1+cu128", "12.8")
    build = find_build()
    assert (build.version, build.cuda, build.beside) == ("2.9.1+cu128", (12, 8), None)
    said: list[str] = []
    assert install(tell=said.append) == build
    assert said == ["PyTorch 2.9.1+cu128 of this environment is a CUDA build already: nothing to download"]


@pytest.mark.parametrize(
    ("version", "cuda", "said"),
    [
        (
            "2.13.0+cpu",
            None,
            r"the CUDA build of PyTorch 2\.13\.0 is not here: `batchfinder stub install` downloads it",
        ),
        ("2.3.0+cu121", "12.1", r"the stub runs PyTorch 2\.4 and later, not 2\.3\.0"),
        ("1.13.1", None, r"the stub runs PyTorch 2\.4 and later, not 1\.13\.1"),
    ],
)
def test_what_this_environment_may_have(own_torch: Path, version: str, cuda: str | None, said: str) -> None:
    """A CPU build needs the download; what is too old is said to be."""
    put(own_torch, version, cuda)
    with pytest.raises(StubUnavailable, match=said):
        find_build()


def test_no_pytorch(own_torch: Path) -> None:
    """Without one there is no version to go by."""
    with pytest.raises(StubUnavailable, match="PyTorch is not installed in this environment"):
        find_build()
    with pytest.raises(StubUnavailable, match="name a version with --torch"):
        install(tell=lambda line: None)


def test_a_pytorch_that_is_not_whole(own_torch: Path) -> None:
    """As an installation that was interrupted leaves it."""
    (own_torch / "torch").mkdir(parents=True)
    with pytest.raises(StubUnavailable, match=r"is not whole: No such file or directory, version\.py"):
        find_build()


@pytest.mark.parametrize(
    ("name", "answer", "said"),
    [
        ("sys.platform", "darwin", "needs Linux; this is darwin"),
        ("sys.platform", "win32", "needs Linux; this is win32"),
        ("platform.machine", lambda: "riscv64", "PyTorch has no CUDA build for riscv64"),
        ("platform.libc_ver", lambda: ("", ""), "needs the GNU C library; this system has another, such as musl"),
    ],
)
def test_other_systems(monkeypatch: pytest.MonkeyPatch, name: str, answer: object, said: str) -> None:
    """One sentence each."""
    monkeypatch.setattr(f"batchfinder.cuda_stub.builds.{name}", answer)
    for function in (find_build, install):
        with pytest.raises(StubUnavailable, match=said):
            function()


def test_nothing_imports_torch() -> None:
    """Looking for a build does not load the one that is there."""
    code = "import sys; from batchfinder import cuda_stub, stub_cards\ntry: cuda_stub.find_build()\nexcept cuda_stub.StubUnavailable: pass\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr
