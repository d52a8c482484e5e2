"""The stub libraries, compiled for one CUDA build of PyTorch: at first use, and kept.

A library has what its C source writes. What PyTorch needs of it besides either does nothing, where it would only write
to the card or keep a setting, or fails by its name.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from batchfinder.cuda_stub.builds import CudaBuild, packages_on_torch, stub_folder
from batchfinder.cuda_stub.errors import StubUnavailable
from batchfinder.cuda_stub.symbols import Undefined, read_names, read_undefined

SOURCES = Path(__file__).parent / "sources"
_MARK = "complete"


@dataclass(frozen=True, slots=True)
class _Library:
    """A library of CUDA's.

    Attributes:
        names: what its symbols look like, for those that name no library themselves.
        failure: what a function that nobody wrote returns, in the library's own numbers.
        harmless: functions that do nothing and succeed: they write to the card alone, or set what nobody reads.
    """

    names: str
    failure: int
    harmless: str = r"(?!)"


# By the name between `lib` and `.so`, the longer prefix of two first.
_LIBRARIES = {
    "cudart": _Library(r"_*cuda", 801),
    "cuda": _Library(r"cu[A-Z]", 801),
    "nvidia-ml": _Library(r"nvml", 3),
    "cublasLt": _Library(r"cublasLt", 15, r"cublasLt(\w+(Destroy|SetAttribute)|Matmul|MatrixTransform)$"),
    "cublas": _Library(r"cublas", 15, r"cublas(?!\w*(Get|Create|Logger)|[SDCZ]rotm?g)"),
    "cudnn": _Library(
        r"cudnn",
        3000,
        r"cudnn(Set|Destroy|Restore|Convolution|BatchNorm|Norm|Pooling|Softmax|Activation|Dropout(?!Get)|RNN|MultiHead|"
        r"Spatial|CTCLoss|Add|Op|Scale|Reduce|Transform)",
    ),
    "cufft": _Library(r"cufft", 16, r"cufft(Destroy|Set|Exec|XtExec)"),
    "cufile": _Library(r"cuFile", 5),
    "cusparseLt": _Library(r"cusparseLt", 10),
    "cusparse": _Library(r"cusparse", 10, r"cusparse(?!\w*(Size|Get|Create|create|zeroPivot|Nnz|workEstimation))"),
    "cusolver": _Library(r"cusolver", 9, r"cusolver(?!\w*(Size|Get|Create))"),
    "curand": _Library(r"curand", 999),
    "nccl": _Library(r"p?nccl", 3, r"nccl(Comm(Destroy|Abort|Finalize|Deregister)|RedOpDestroy)"),
    "nvrtc": _Library(r"nvrtc", 5),
    "cupti": _Library(
        r"cupti", 27, r"cupti(Activity(Enable|Disable|Flush|Register|Set|Push)|Enable|Unsubscribe|Finalize)"
    ),
    "nvshmem_host": _Library(r"nvshmem", 0),
    "nvToolsExt": _Library(r"nvtx", 0, r"nvtx"),
}
_ALWAYS = ("libcuda.so.1", "libnvidia-ml.so.1")  # opened by their names
_SONAME = re.compile(r"lib(?P<base>[\w-]+)\.so\.\d+")


def compiled_stub(build: CudaBuild) -> Path:
    """The folder of the stub libraries for a build of PyTorch, compiled if they are not there.

    Raises:
        StubUnavailable: there is no compiler, or it fails, or the disk is full, or PyTorch's libraries are not whole.
    """
    libraries = _libraries_to_read(build)
    folder = stub_folder() / f"stub-{build.version}-{_key(build, libraries)}"
    if (folder / _MARK).exists():
        return folder
    if any(sign in str(folder) for sign in " :;"):
        raise StubUnavailable(
            f"{folder} has a space or a colon, which LD_PRELOAD cannot take: name another by BATCHFINDER_STUB_DIR"
        )
    compiler = _find_compiler()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}.partial-", dir=folder.parent))
    except OSError as error:
        raise StubUnavailable(f"{folder.parent} cannot be written: {error.strerror}") from error
    try:
        _compile_all(build, libraries, compiler, partial)
        (partial / _MARK).touch()
        try:
            partial.rename(folder)
        except OSError:
            if not (folder / _MARK).exists():  # else another process was faster
                raise
    except OSError as error:
        raise StubUnavailable(f"{folder.parent} cannot be written: {error.strerror}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def preloaded(build: CudaBuild, folder: Path) -> list[str]:
    """The stub libraries that a process loads before all others, the runtime first; not NVIDIA's own nvrtc."""
    names = sorted(file.name for file in folder.glob("lib*.so.*"))
    if build.nvrtc_folder is not None:
        names = [name for name in names if not name.startswith("libnvrtc")]
    return sorted(names, key=lambda name: not name.startswith("libcudart."))


def _libraries_to_read(build: CudaBuild) -> list[Path]:
    """Libraries that call CUDA's: PyTorch's own, cuDNN's, and those of packages that are built on PyTorch."""
    found = sorted(build.torch_folder.glob("lib/lib*.so"))
    if build.cudnn_folder is not None:
        found += sorted(build.cudnn_folder.glob("libcudnn*.so.*"))
    for package in packages_on_torch():
        if package != build.torch_folder:
            found += sorted(package.rglob("*.so"))
    return found


def _key(build: CudaBuild, libraries: Iterable[Path]) -> str:
    """What the compiled libraries depend on, as a short hash."""
    parts = hashlib.sha256(f"{build.cuda} {build.cudnn_version} {build.nccl_version} {build.nvrtc_folder}".encode())
    for source in sorted([Path(__file__), *SOURCES.rglob("*.[ch]")]):
        parts.update(source.read_bytes())
    for library in libraries:
        status = library.stat()
        parts.update(f"{library} {status.st_size} {status.st_mtime_ns}\n".encode())
    return parts.hexdigest()[:16]


def _find_compiler() -> list[str]:
    """The command of a C compiler.

    Raises:
        StubUnavailable: there is none.
    """
    given = os.environ.get("CC")
    for name in (given, "cc", "gcc", "clang"):
        if name and shutil.which(shlex.split(name)[0]):
            return shlex.split(name)
    if find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "cc"]
    raise StubUnavailable("no C compiler was found for the stub: install gcc or clang, or `pip install ziglang`")


def _compile_all(build: CudaBuild, libraries: Iterable[Path], compiler: list[str], folder: Path) -> None:
    sonames: dict[str, str] = {}
    symbols: dict[str, dict[str, str | None]] = {base: {} for base in _LIBRARIES}
    own = build.torch_folder / "lib"
    for library in libraries:
        needed, undefined = read_undefined(library)
        if library.parent == own:
            for name in (*needed, *_ALWAYS):
                found = _SONAME.fullmatch(name)
                if found and found["base"] in _LIBRARIES:
                    sonames[found["base"]] = name
        for symbol in undefined:
            base = _library_of(symbol)
            if base is not None and (symbol.library is None or sonames.get(base, symbol.library) == symbol.library):
                symbols[base].setdefault(symbol.name, symbol.version)
    # PyTorch looks up the driver's functions by their names, all of them when it first needs one.
    for name in read_names(own / "libc10_cuda.so", r"(?:cu[A-Z]|nvml)\w+"):
        base = _library_of(Undefined(name, None, None))
        if base is not None:
            symbols[base].setdefault(name, None)
    if "cudart" not in sonames:
        raise StubUnavailable(
            f"PyTorch {build.version} does not use the CUDA runtime as a shared library, so the stub cannot stand in"
        )
    if build.nvrtc_folder is not None:  # cuDNN asks for it by name, and compiles attention with it
        sonames.pop("nvrtc", None)
        for file in build.nvrtc_folder.glob("libnvrtc*.so*"):
            (folder / file.name).symlink_to(file)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        # The runtime comes first: it has the state of the cards, and the others are linked with it.
        _compile(build, "cudart", sonames["cudart"], symbols["cudart"], compiler, folder, None)
        rest = [base for base in sonames if base != "cudart"]
        done = [
            pool.submit(_compile, build, base, sonames[base], symbols[base], compiler, folder, sonames["cudart"])
            for base in rest
        ]
        for each in done:
            each.result()
    (folder / "libcuda.so").symlink_to(sonames["cuda"])  # Triton before 3.3 links what it compiles with -lcuda
    for file in folder.glob("*.[cm]*"):
        file.unlink()


def _library_of(symbol: Undefined) -> str | None:
    if symbol.library is not None:
        found = _SONAME.fullmatch(symbol.library)
        return found["base"] if found and found["base"] in _LIBRARIES else None
    return next((base for base, library in _LIBRARIES.items() if _matches(base, library, symbol.name)), None)


def _matches(base: str, library: _Library, name: str) -> bool:
    # `cuda` is a prefix of others, and its own names have a capital letter after `cu`.
    return re.match(library.names, name) is not None and not (base == "cuda" and name.startswith("cuFile"))


def _compile(
    build: CudaBuild,
    base: str,
    soname: str,
    symbols: dict[str, str | None],
    compiler: list[str],
    folder: Path,
    runtime: str | None,
) -> None:
    library = _LIBRARIES[base]
    lines = ['#include "stub.h"']
    for name in sorted(symbols):
        body = (
            "return 0;" if re.match(library.harmless, name) else f'return stub_unwritten("{name}", {library.failure});'
        )
        lines.append(f"__attribute__((weak)) long {name}(void) {{ {body} }}")
    rest = folder / f"{soname}.c"
    rest.write_text("\n".join(lines) + "\n")
    by_version: dict[str, list[str]] = {}
    for name, version in symbols.items():
        if version is not None:
            by_version.setdefault(version, []).append(name)
    versions = folder / f"{soname}.map"
    versions.write_text(
        "".join(f"{version} {{ global: {'; '.join(sorted(names))}; }};\n" for version, names in by_version.items())
    )
    file = {"nvidia-ml": "nvml"}.get(base, base)
    sources = sorted(SOURCES.glob(f"{file}/*.c")) or [source for source in (SOURCES / f"{file}.c",) if source.exists()]
    major, minor = build.cuda
    definitions = {
        "CUDA_MAJOR": major,
        "CUDA_VERSION": 1000 * major + 10 * minor,
        "CUDNN_VERSION": build.cudnn_version,
        "CUDNN_MAJOR_TEXT": f'"{build.cudnn_version // 10000}"',
        "NCCL_VERSION": build.nccl_version,
    }
    command = [
        *compiler, "-shared", "-fPIC", "-O2", "-fno-builtin", "-w", f"-Wl,-soname,{soname}", f"-I{SOURCES}",
        *(f"-D{name}={value}" for name, value in definitions.items()),
        "-o", str(folder / soname), *map(str, sources), str(rest), "-lpthread", "-ldl",
    ]  # fmt: skip
    if by_version:
        command.append(f"-Wl,--version-script={versions}")
    if runtime is not None:
        command += [f"-L{folder}", f"-l:{runtime}"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        message = (done.stderr.strip() or "it does not say why").splitlines()
        raise StubUnavailable(f"{compiler[0]} could not compile the stub of {soname}: {message[0][:300]}")
