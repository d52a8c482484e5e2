"""Recognising out of memory: errors and the last words of a process that died are looked up in `TYPES` and `MESSAGES`.

What is not in these tables is a bug or a choice of the user's, and propagates unchanged. So do, on purpose:

- an error that merely speaks of memory;
- `CUDA error: too many resources requested for launch` and `device kernel image is invalid`, which a kernel says at any
  batch size on a GPU it was not built for;
- `CUDA error: an illegal memory access was encountered`: kernels with 32-bit offsets fail so on tensors beyond 2**31
  elements, but so does any other bug of a kernel, and the process can do nothing more on its GPU.
"""

from __future__ import annotations

import errno
import re
import signal
from dataclasses import dataclass

from batchfinder.errors import ProbeDied, without_middle
from batchfinder.results import Measurement, Verdict
from batchfinder.training.child_process import ChildDied

_GPU, _HOST, _CEILING = Verdict.OUT_OF_MEMORY, Verdict.HOST_OUT_OF_MEMORY, Verdict.SIZE_CEILING
_RUNTIME = "builtins.RuntimeError"


@dataclass(frozen=True, slots=True)
class OOMPattern:
    """One way in which a library says that a size is too large.

    Attributes:
        library: who says it.
        verdict: what it means. A host allocation that fails is `HOST_OUT_OF_MEMORY`.
        source: a thread or file where it was seen.
        message: a regular expression to be found in the exception's text; empty where the type says enough.
        exception: the type's `module.qualified_name`, compared by name with the type and its bases, so that nothing is
            imported. PyTorch's own errors are RuntimeErrors.
        sure: False where the library says the same of other faults, such as a broken installation.
    """

    library: str
    verdict: Verdict
    source: str
    message: str = ""
    exception: str = _RUNTIME
    sure: bool = True


_GITHUB = "https://github.com/"
_TORCH = _GITHUB + "pytorch/pytorch/"

TYPES = (
    OOMPattern("PyTorch", _GPU, _TORCH + "issues/138002", exception="torch.OutOfMemoryError"),
    OOMPattern(
        "Triton",
        _CEILING,  # shared memory of one block, which grows with the sizes a kernel is compiled for
        _GITHUB + "triton-lang/triton/issues/8182",
        exception="triton.runtime.errors.OutOfResources",
    ),
    OOMPattern(
        "NumPy",
        _HOST,
        _GITHUB + "numpy/numpy/pull/13306",
        exception="numpy._core._exceptions._ArrayMemoryError",
    ),
    OOMPattern(
        "Python", _HOST, "https://docs.python.org/3/library/exceptions.html#MemoryError", "", "builtins.MemoryError"
    ),
)
"""Patterns that a type alone matches."""

MESSAGES = (
    # The allocators of devices. PyTorch before 1.13 raised a RuntimeError with these texts.
    OOMPattern("CUDA", _GPU, _TORCH + "pull/13751", r"CUDA out of memory\."),
    OOMPattern("HIP", _GPU, _GITHUB + "Comfy-Org/ComfyUI/issues/9529", r"HIP out of memory\."),
    OOMPattern("XPU", _GPU, _GITHUB + "intel/torch-xpu-ops/issues/3011", r"XPU out of memory\."),
    OOMPattern("MPS", _GPU, _TORCH + "issues/130112", r"MPS backend out of memory \("),
    # Drivers and run times, outside the caching allocators.
    OOMPattern("CUDA", _GPU, _GITHUB + "deepbeepmeep/Wan2GP/issues/1083", r"CUDA error: out of memory"),
    OOMPattern("CUDA", _GPU, _TORCH + "issues/4844", r"cuda runtime error \(2\) ?: out of memory"),
    OOMPattern("CUDA", _GPU, _TORCH + "issues/188008", r"CUDA driver error: out of memory"),
    OOMPattern("HIP", _GPU, _GITHUB + "keras-team/keras/issues/13889", r"HIP error: out of memory|hipErrorOutOfMemory"),
    OOMPattern(
        "XPU",
        _GPU,
        _GITHUB + "intel/torch-xpu-ops/issues/1170",
        r"UR_RESULT_ERROR_OUT_OF_(RESOURCES|DEVICE_MEMORY)",
    ),
    # Libraries with memory of their own, or none left for their handles.
    OOMPattern("cuBLAS", _GPU, _GITHUB + "QwenLM/Qwen3/issues/873", r"CUBLAS_STATUS_ALLOC_FAILED"),
    OOMPattern(
        "cuBLAS",
        _GPU,
        _GITHUB + "EleutherAI/lm-evaluation-harness/issues/1689",
        r"CUBLAS_STATUS_NOT_INITIALIZED",
        sure=False,
    ),
    OOMPattern("cuDNN", _GPU, _TORCH + "issues/20123", r"CUDNN_STATUS_ALLOC_FAILED"),
    OOMPattern("cuDNN", _GPU, _TORCH + "issues/81620", r"CUDNN_STATUS_INTERNAL_ERROR", sure=False),
    OOMPattern("cuDNN", _GPU, _TORCH + "issues/44473", r"CUDNN_STATUS_NOT_SUPPORTED", sure=False),
    OOMPattern(
        "cuDNN", _GPU, _TORCH + "issues/108645", r"unable to find an engine to execute this computation", sure=False
    ),
    OOMPattern(
        "cuDNN",
        _GPU,
        _GITHUB + "marqo-ai/marqo/issues/101",
        r"[Uu]nable to find a valid cuDNN algorithm to run convolution",
        sure=False,
    ),
    OOMPattern("cuFFT", _GPU, _GITHUB + "cupy/cupy/issues/1063", r"CUFFT_ALLOC_FAILED"),
    OOMPattern(
        "cuSPARSE",
        _GPU,
        _GITHUB + "NVIDIA-Genomics-Research/rapids-single-cell-examples/issues/11",
        r"CUSPARSE_STATUS_ALLOC_FAILED",
    ),
    OOMPattern(
        "cuSOLVER", _GPU, "https://docs.nvidia.com/cuda/cusolver/#cusolverstatus-t", r"CUSOLVER_STATUS_ALLOC_FAILED"
    ),
    OOMPattern(
        "cuSOLVER",
        _GPU,
        _GITHUB + "JIA-Lab-research/UVTR/issues/13",
        r"CUSOLVER_STATUS_INTERNAL_ERROR,? when calling `cusolverDnCreate",
        sure=False,
    ),
    OOMPattern(
        "NCCL",
        _GPU,
        _GITHUB + "THUDM/slime/issues/956",
        r"Failed to CUDA calloc|NCCL[\s\S]*Cuda failure (\d+ )?'out of memory'",
    ),
    OOMPattern("Triton", _GPU, _TORCH + "issues/98186", r"Triton Error \[(CUDA|HIP)\]: out of memory"),
    # The host.
    OOMPattern(
        "PyTorch on the CPU",
        _HOST,
        _TORCH + "pull/20618",
        r"DefaultCPUAllocator: can't allocate memory",
    ),
    OOMPattern(
        "PyTorch on the CPU",
        _HOST,
        _GITHUB + "Comfy-Org/Nvidia_RTX_Nodes_ComfyUI/issues/13",
        r"DefaultCPUAllocator: not enough memory",
    ),
    OOMPattern(
        "PyTorch on the CPU", _HOST, _TORCH + "issues/31302", r"posix_memalign\(&data, gAlignment, nbytes\) == 0\. 12"
    ),
    OOMPattern(
        "PyTorch on the CPU",
        _HOST,
        _TORCH + "blob/v2.13.0/c10/core/impl/alloc_cpu.cpp",
        r"^\[enforce fail a[^\]]*$",  # cut short: there was no memory for the text either (seen under RLIMIT_AS)
    ),
    OOMPattern(
        "oneDNN",
        _HOST,
        _GITHUB + "uxlfoundation/oneDNN/issues/4964",
        r"^could not (create a primitive|create a memory object|execute a primitive)$",
        sure=False,
    ),
    OOMPattern("C++", _HOST, _GITHUB + "SeanNaren/warp-ctc/issues/48", r"std::bad_alloc"),
    OOMPattern("Python", _HOST, _GITHUB + "open-mmlab/OpenPCDet/issues/329", r"can't start new thread", sure=False),
    OOMPattern(
        "PyTorch",
        _HOST,
        _TORCH + "issues/87861",
        r"unable to mmap \d+ bytes from .*Cannot allocate memory",
        sure=False,  # the number of maps (vm.max_map_count) runs out with the same words
    ),
    OOMPattern(
        "operating system",
        _HOST,
        _TORCH + "issues/4387",
        r"\[Errno 12\] Cannot allocate memory",
        exception="builtins.OSError",
    ),
    OOMPattern(
        "DataLoader",
        _HOST,
        _TORCH + "issues/8976",
        r"DataLoader worker \(pid(\(s\))? [\d, ]+\) is killed by signal: Killed",
    ),
    # What C libraries print before they end a process.
    OOMPattern("libgomp", _HOST, _GITHUB + "deepmodeling/deepmd-kit/issues/1757", r"libgomp: Thread creation failed"),
    OOMPattern(
        "glibc",
        _HOST,
        "https://sourceware.org/git/?p=glibc.git;a=blob;f=elf/dl-tls.c",
        r"cannot allocate memory for thread-local data",
    ),
    # Kernels that cannot index or launch as much.
    OOMPattern("CUDA", _CEILING, _TORCH + "pull/185788", r"CUDA error: invalid configuration argument"),
    OOMPattern("HIP", _CEILING, _TORCH + "pull/130994", r"HIP error: invalid configuration argument"),
    OOMPattern("PyTorch", _CEILING, _TORCH + "issues/80020", r"Expected canUse32BitIndexMath\("),
    OOMPattern(
        "PyTorch",
        _CEILING,
        _GITHUB + "nvidia-cosmos/cosmos-transfer1/issues/150",
        r"tensor must fit into 32-bit index math",
    ),
    OOMPattern(
        "PyTorch",
        _CEILING,
        _GITHUB + "huggingface/diffusers/issues/2306",
        r"only supports (in|out)put tensors with less than INT_MAX elements",
    ),
    OOMPattern(
        "PyTorch", _CEILING, _TORCH + "issues/51871", r"is not supported for tensors with more than INT_MAX elements"
    ),
    OOMPattern("PyTorch", _CEILING, _TORCH + "issues/24401", r"sizes too large for THCDeviceTensor conversion"),
    OOMPattern("PyTorch", _CEILING, _TORCH + "issues/43476", r"launch blocks must be positive, but got N= ?-\d"),
    OOMPattern("PyTorch", _CEILING, _TORCH + "pull/42553", r"must be non-negative and less than 2147483647 but got \d"),
    OOMPattern("MPS", _CEILING, _TORCH + "issues/141909", r"larger than currently supported by the MPS backend"),
    OOMPattern("MPS", _CEILING, _TORCH + "issues/141909", r"Invalid buffer size: [\d.]+ [GT]i?B"),
)
"""Patterns of texts; the first that is found counts. A new out-of-memory text is a new row here."""


_SEARCHED = 1_000_000
"""Characters of a message that are searched, half of them at each end."""


def classify(error: BaseException, *, device: str = "cuda") -> Verdict | None:
    """Say what an error raised by a training step means for the size it ran at.

    A library that catches an out-of-memory and raises its own error `from` it (`__cause__`) has still run out of
    memory. An error raised by chance while another was handled (`__context__` alone) is judged for itself: it is a bug
    in the handler.
    On `cpu` the host's memory is the device's.

    Returns:
        The verdict; None for an error that is not about the size and should propagate.
    """
    pattern = find_pattern(error)
    return None if pattern is None else _verdict_on(device, pattern)


def find_pattern(error: BaseException) -> OOMPattern | None:
    """The row of the table that an error, or the first of its causes that has one, matches."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        names = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(cause).__mro__}
        pattern = next((pattern for pattern in TYPES if pattern.exception in names), None)
        if pattern is None and not (isinstance(cause, OSError) and cause.errno not in (None, errno.ENOMEM)):
            text = without_middle(str(cause), _SEARCHED)
            rows = (pattern for pattern in MESSAGES if pattern.exception in names)
            pattern = next((pattern for pattern in rows if re.search(pattern.message, text)), None)
        if pattern is not None:
            return pattern
        cause = cause.__cause__
    return None


def _verdict_on(device: str, pattern: OOMPattern) -> Verdict:
    """On a CPU the host's memory is the device's."""
    on_device = device == "cpu" and pattern.verdict is Verdict.HOST_OUT_OF_MEMORY
    return Verdict.OUT_OF_MEMORY if on_device else pattern.verdict


KILLED = "killed, probably by the kernel's out-of-memory killer"


def decode(death: ChildDied, what: str, device: str) -> Measurement:
    """The measurement that a death amounts to, of a process that was run again and died again.

    Raises:
        ProbeDied: the death says nothing about memory: a segmentation fault, an assertion, an exit.
    """
    if death.exit_code == -signal.SIGKILL:
        return Measurement(Verdict.HOST_OUT_OF_MEMORY, message=KILLED)
    pattern = next((pattern for pattern in MESSAGES if re.search(pattern.message, death.last_words)), None)
    if pattern is not None:
        return Measurement(_verdict_on(device, pattern), message=death.last_words)
    raise ProbeDied(what, death.exit_code, death.last_words)
