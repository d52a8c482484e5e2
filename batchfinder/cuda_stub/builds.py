"""CUDA builds of PyTorch: the one of this environment, or one that was downloaded beside it."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from email.parser import HeaderParser
from importlib import metadata
from pathlib import Path

import platformdirs

from batchfinder.cuda_stub.errors import StubUnavailable

FOLDER_VARIABLE = "BATCHFINDER_STUB_DIR"
OLDEST = (2, 4)
_INSTALL = "batchfinder stub install"
_MARK = "complete"
_PARTIAL = ".partial-"
_MIB = 1 << 20
# What is downloaded beside PyTorch, and why. The versions are those that PyTorch's own metadata ask for.
_BESIDE = {
    "nvidia-cudnn": "cuDNN, which says what its convolutions and attention take",
    "nvidia-cuda-nvrtc": "nvrtc, with which cuDNN compiles some of them",
    "triton": "Triton, for torch.compile",
}
_ABOUT_DOWNLOADED_MIB = {"torch": 700, "nvidia-cudnn": 370, "nvidia-cuda-nvrtc": 90, "triton": 200}
_UNPACKED_SHARE = 3
"""A wheel takes up to so many times its own size once it is unpacked (measured: PyTorch 2.1, Triton 3.5)."""


@dataclass(frozen=True, slots=True)
class CudaBuild:
    """A CUDA build of PyTorch on this machine.

    Attributes:
        version: such as `2.13.0+cu130`.
        cuda: major and minor version of CUDA it is built for.
        torch_folder: the package itself.
        beside: the folder that must come first on the path of a process that uses it; None for this environment's own.
        cudnn_folder: where cuDNN's own libraries are; None where they are not.
        nvrtc_folder: likewise for nvrtc.
        cudnn_version: of the cuDNN that its metadata ask for, as `torch.backends.cudnn.version` says it.
        nccl_version: of NCCL, as `ncclGetVersion` says it.
    """

    version: str
    cuda: tuple[int, int]
    torch_folder: Path
    beside: Path | None
    cudnn_folder: Path | None
    nvrtc_folder: Path | None
    cudnn_version: int
    nccl_version: int


def stub_folder() -> Path:
    """Where downloaded builds and compiled stubs are kept: `BATCHFINDER_STUB_DIR`, or the user's cache folder."""
    given = os.environ.get(FOLDER_VARIABLE)
    return Path(given) if given else Path(platformdirs.user_cache_dir("batchfinder")) / "cuda-stub"


def check_platform() -> None:
    """Whether this machine can run PyTorch's CUDA build at all.

    Raises:
        StubUnavailable: it is no Linux with the GNU C library on x86-64 or arm64.
    """
    if sys.platform != "linux":
        raise StubUnavailable(f"PyTorch's CUDA build on the stub needs Linux; this is {sys.platform}")
    if platform.machine() not in ("x86_64", "aarch64"):
        raise StubUnavailable(f"PyTorch has no CUDA build for {platform.machine()}")
    if platform.libc_ver()[0] != "glibc":
        raise StubUnavailable("PyTorch's CUDA build needs the GNU C library; this system has another, such as musl")


def find_build(version: str | None = None) -> CudaBuild:
    """This environment's PyTorch if it is a CUDA build, else the downloaded CUDA build of its version.

    Args:
        version: such as `2.6.0`, for a downloaded build of another version; None for the environment's.

    Raises:
        StubUnavailable: the platform cannot have one, there is none yet, or it is too old.
    """
    check_platform()
    own = _own_torch()
    if own is not None and (version is None or _version_of(own)[0].partition("+")[0] == version):
        found, cuda = _version_of(own)
        _check_age(found)
        if cuda is not None and (own / "lib" / "libtorch_cuda.so").exists():
            return _describe(own, None)
        version = found.partition("+")[0]
    if version is None:
        raise StubUnavailable("PyTorch is not installed in this environment")
    _check_age(version)
    beside = _place(version)
    if not (beside / _MARK).exists():
        option = "" if own is not None and _version_of(own)[0].partition("+")[0] == version else f" --torch {version}"
        raise StubUnavailable(
            f"the CUDA build of PyTorch {version} is not here: `{_INSTALL}{option}` downloads it (about 1.3 GB)"
        )
    return _describe(beside / "torch", beside)


def installed_builds() -> list[CudaBuild]:
    """The builds that were downloaded for this version of Python, by version."""
    return [
        _describe(mark.parent / "torch", mark.parent)
        for mark in sorted(stub_folder().glob(f"torch-*-{_tag()}/{_MARK}"))
    ]


def _tag() -> str:
    return f"cp{sys.version_info.major}{sys.version_info.minor}"


def _place(version: str) -> Path:
    return stub_folder() / f"torch-{version}-{_tag()}"


def _own_torch() -> Path | None:
    """The folder of this environment's torch, which is not imported."""
    spec = importlib.util.find_spec("torch")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def _version_of(torch_folder: Path) -> tuple[str, tuple[int, int] | None]:
    """A package's version, and CUDA's; None for a build without it.

    Raises:
        StubUnavailable: its version.py cannot be read.
    """
    try:
        text = (torch_folder / "version.py").read_text()
    except OSError as error:
        raise StubUnavailable(f"PyTorch in {torch_folder} is not whole: {error.strerror}, version.py") from error
    version = re.search(r"^__version__\s*=\s*['\"]([^'\"]+)", text, re.MULTILINE)
    cuda = re.search(r"^cuda[^=\n]*=\s*['\"](\d+)\.(\d+)", text, re.MULTILINE)
    if version is None:
        raise StubUnavailable(f"PyTorch in {torch_folder} does not say its version")
    return version[1], None if cuda is None else (int(cuda[1]), int(cuda[2]))


def _check_age(version: str) -> None:
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or (int(numbers[1]), int(numbers[2])) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise StubUnavailable(f"the stub runs PyTorch {oldest} and later, not {version}")


def _describe(torch_folder: Path, beside: Path | None) -> CudaBuild:
    version, cuda = _version_of(torch_folder)
    if cuda is None or not (torch_folder / "lib" / "libtorch_cuda.so").exists():
        raise StubUnavailable(f"PyTorch {version} in {torch_folder} has no CUDA")
    pins = _pins(torch_folder.parent, version)
    site = torch_folder.parent
    cudnn = next(
        (folder for folder in (site / "nvidia" / "cudnn" / "lib",) if any(folder.glob("libcudnn_graph.so.*"))), None
    )
    nvrtc = next((file.parent for file in sorted(site.glob("nvidia/*/lib/libnvrtc.so.*"))), None)
    return CudaBuild(
        version,
        cuda,
        torch_folder,
        beside,
        cudnn,
        nvrtc,
        _number(pins.get("nvidia-cudnn", "9.1.0"), (10000, 100, 1)),
        _number(pins.get("nvidia-nccl", "2.20.5"), (10000, 100, 1)),
    )


def _number(version: str, weights: tuple[int, ...]) -> int:
    return sum(int(part) * weight for part, weight in zip(re.findall(r"\d+", version), weights, strict=False))


def _pins(site: Path, version: str) -> dict[str, str]:
    """What PyTorch's metadata ask for of NVIDIA and of Triton: names without `-cu12` and the like, and versions."""
    texts = [file for file in site.glob("torch-*.dist-info/METADATA") if version.partition("+")[0] in file.parent.name]
    return _pins_of(texts[0].read_text(errors="replace")) if texts else {}


def _pins_of(text: str) -> dict[str, str]:
    pins: dict[str, str] = {}
    for line in HeaderParser().parsestr(text).get_all("Requires-Dist") or ():
        found = re.match(
            r"(?P<name>nvidia-[\w-]+?|triton|cuda-toolkit)(?:-cu\d+)?(?:\[.*?\])?\s*\(?(?:==|~=)\s*(?P<version>[\d.]+)",
            line,
        )
        if found:
            pins[found["name"]] = found["version"]
    return pins


# -- download


def install(version: str | None = None, *, minimal: bool = False, tell: Callable[[str], None] = print) -> CudaBuild:
    """Download the CUDA build of PyTorch beside this environment, which stays as it is.

    Wheels come through pip, with this environment's settings. An interrupted download leaves nothing.

    Args:
        version: such as `2.6.0`; None for the version that is installed here.
        minimal: PyTorch alone, without cuDNN, nvrtc and Triton.
        tell: given a line of progress at a time.

    Raises:
        StubUnavailable: the platform cannot have it, or it cannot be downloaded or unpacked.
    """
    check_platform()
    if version is None:
        own = _own_torch()
        if own is None:
            raise StubUnavailable("PyTorch is not installed in this environment: name a version with --torch")
        version, cuda = _version_of(own)
        version = version.partition("+")[0]
        if cuda is not None and (own / "lib" / "libtorch_cuda.so").exists():
            tell(f"PyTorch {_version_of(own)[0]} of this environment is a CUDA build already: nothing to download")
            return _describe(own, None)
    _check_age(version)
    place = _place(version)
    with _one_at_a_time(place):
        _remove_partial(place)
        if (place / _MARK).exists():
            found = _describe(place / "torch", place)
            if minimal or found.cudnn_folder is not None:
                tell(f"PyTorch {found.version} is in {place} already")
                return found
        wanted = ["torch"] if minimal else ["torch", *_BESIDE]
        about = sum(_ABOUT_DOWNLOADED_MIB[name] for name in wanted)
        needed = about * (1 + _UNPACKED_SHARE)
        also = "" if minimal else ", cuDNN, nvrtc and Triton"
        tell(f"downloading PyTorch {version} with CUDA{also} (about {about} MiB) to {place}")
        partial = _make_folder(place, needed)
        try:
            _download(version, wanted, partial, tell)
            build = _describe(partial / "torch", partial)
            (partial / _MARK).write_text(build.version)
            if place.exists():
                shutil.rmtree(place)
            partial.rename(place)
        except OSError as error:
            raise StubUnavailable(f"{place} cannot be written: {error.strerror}") from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    build = _describe(place / "torch", place)
    taken = sum(file.lstat().st_size for file in place.rglob("*") if not file.is_dir())
    tell(f"PyTorch {build.version} is in {place} ({taken // _MIB} MiB)")
    return build


def uninstall(tell: Callable[[str], None] = print) -> None:
    """Remove all that was downloaded and compiled."""
    folder = stub_folder()
    if not folder.exists():
        tell(f"nothing to remove: there is no {folder}")
        return
    taken = sum(file.lstat().st_size for file in folder.rglob("*") if not file.is_dir())
    try:
        shutil.rmtree(folder)
    except OSError as error:
        raise StubUnavailable(f"{folder} cannot be removed: {error.strerror}") from error
    tell(f"removed {folder} ({taken // _MIB} MiB)")


@contextlib.contextmanager
def _one_at_a_time(place: Path) -> Iterator[None]:
    """A second process that installs the same waits for the first, and finds it there."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(place.with_name(f".{place.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StubUnavailable(f"{place.parent} cannot be written: {error.strerror}") from error
    try:
        with contextlib.suppress(OSError):  # not every file system has locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _remove_partial(place: Path) -> None:
    """What processes that were killed have left; the lock says that nobody is at it."""
    for left in place.parent.glob(f"{place.name}{_PARTIAL}*"):
        shutil.rmtree(left, ignore_errors=True)


def _make_folder(place: Path, needed_mib: int) -> Path:
    try:
        free = shutil.disk_usage(place.parent).free // _MIB
        if free < needed_mib:
            raise StubUnavailable(
                f"{place.parent} has {free} MiB free, and download and unpacking need about {needed_mib}: name "
                f"another folder by {FOLDER_VARIABLE}"
            )
        return Path(tempfile.mkdtemp(prefix=f"{place.name}{_PARTIAL}", dir=place.parent))
    except OSError as error:
        raise StubUnavailable(f"{place.parent} cannot be written: {error.strerror}") from error


def _download(version: str, wanted: list[str], folder: Path, tell: Callable[[str], None]) -> None:
    # With three = pip takes no build of another label, such as a CPU build that an index lists under the same number.
    _unpack(_fetch(f"torch==={version}", folder, tell), folder)
    texts = list(folder.glob("torch-*.dist-info/METADATA"))
    pins = _pins_of(texts[0].read_text(errors="replace")) if texts else {}
    major = _version_of(folder / "torch")[1]
    if major is None:
        raise StubUnavailable(f"the PyTorch {version} that pip finds has no CUDA: its index may hold CPU builds alone")
    label = f"-cu{major[0]}"
    for name in wanted[1:]:
        if name == "nvidia-cuda-nvrtc":
            # Since CUDA 13 the toolkit is one requirement, whose version nvrtc shares up to the second number.
            toolkit = pins.get("cuda-toolkit")
            asked = f"{name}=={toolkit.rpartition('.')[0]}.*" if toolkit else f"{name}{label}=={pins.get(name)}"
        elif name in pins:
            asked = f"{name}{label if name.startswith('nvidia') else ''}=={pins[name]}"
        else:
            continue
        if "None" in asked:
            continue
        _unpack(_fetch(asked, folder, tell), folder)


def _fetch(requirement: str, folder: Path, tell: Callable[[str], None]) -> Path:
    """Download one wheel; pip shows its progress on stderr."""
    into = Path(tempfile.mkdtemp(dir=folder))
    command = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "download",
        "--no-deps",
        "--only-binary=:all:",
    ]
    tell(f"downloading {requirement}")
    try:
        done = subprocess.run(
            [*command, "--dest", str(into), requirement], stdout=sys.stderr.fileno(), stderr=subprocess.PIPE, text=True
        )
    except OSError as error:
        raise StubUnavailable(f"pip cannot be started: {error.strerror}") from error
    if "No module named pip" in done.stderr:
        raise StubUnavailable(f"this environment has no pip: {sys.executable} -m ensurepip brings it")
    wheels = list(into.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()[-1:]
        raise StubUnavailable(f"pip could not download {requirement}: {' '.join(lines[:2]) or 'it does not say why'}")
    return wheels[0]


def _unpack(wheel: Path, folder: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
            for entry in archive.infolist():  # zipfile leaves out who may run a file: Triton's compiler is one
                if entry.external_attr >> 16 & stat.S_IXUSR and not entry.is_dir():
                    (folder / entry.filename).chmod(0o755)
    except (zipfile.BadZipFile, EOFError) as error:
        raise StubUnavailable(f"{wheel.name} was not downloaded whole ({error}): run `{_INSTALL}` again") from error
    except OSError as error:
        raise StubUnavailable(f"{wheel.name} cannot be unpacked to {folder.parent}: {error.strerror}") from error
    shutil.rmtree(wheel.parent)


def packages_on_torch() -> list[Path]:
    """Folders of the packages in this environment that require PyTorch; those with CUDA code call its libraries."""
    folders: dict[Path, None] = {}
    for each in metadata.distributions():
        requires = each.metadata.get_all("Requires-Dist") or ()
        if not any(re.match(r"torch\b(?![\w-])", line) for line in requires):
            continue
        for file in each.files or ():
            if file.suffix == ".so" and len(file.parts) > 1:
                folders[Path(str(each.locate_file(file.parts[0])))] = None
    return list(folders)
