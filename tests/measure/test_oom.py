from __future__ import annotations

import errno
import re

import numpy
import pytest
import torch

from batchfinder.errors import ProbeDied
from batchfinder.measure.oom import KILLED, MESSAGES, TYPES, classify, decode, find_pattern
from batchfinder.results import Verdict
from batchfinder.training.child_process import ChildDied

GPU, HOST, CEILING = Verdict.OUT_OF_MEMORY, Verdict.HOST_OUT_OF_MEMORY, Verdict.SIZE_CEILING
_ASYNC = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
    "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)
_CPU = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: "


def _out_of_resources() -> Exception:
    kind = type("OutOfResources", (Exception,), {"__module__": "triton.runtime.errors"})
    return kind(
        "out of resource: shared memory, Required: 131072, Hardware limit: 101376. Reducing block sizes may help."
    )


def _array_memory_error() -> BaseException:
    try:
        numpy.empty(1 << 56)
    except MemoryError as error:
        return error
    raise AssertionError


TEXTS = {
    "CUDA out of memory. Tried to allocate 74.00 MiB (GPU 0; 1.96 GiB total capacity; 1.46 GiB already allocated)": GPU,
    "HIP out of memory. Tried to allocate 432.00 MiB. GPU 0 has a total capacity of 15.92 GiB": GPU,
    "XPU out of memory. Tried to allocate 4.66 GiB. GPU 0 has a total capacity of 5.65 GiB": GPU,
    "MPS backend out of memory (MPS allocated: 5.56 GB, other allocations: 1.10 GB, max allowed: 6.80 GB). Tried to "
    "allocate 768.00 MB on private pool.": GPU,
    "CUDA error: out of memory" + _ASYNC: GPU,
    "cuda runtime error (2) : out of memory at /pytorch/aten/src/THC/THCTensorRandom.cu:25": GPU,
    "CUDA driver error: out of memory": GPU,
    "HIP error: out of memory\nHIP kernel errors might be asynchronously reported": GPU,
    "UR backend failed. UR backend returns:40 (UR_RESULT_ERROR_OUT_OF_RESOURCES)": GPU,
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`": GPU,
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`": GPU,
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED": GPU,
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR\nYou can try to repro this exception using the following snippet.": GPU,
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input.": GPU,
    "GET was unable to find an engine to execute this computation": GPU,
    "Unable to find a valid cuDNN algorithm to run convolution": GPU,
    "cuFFT error: CUFFT_ALLOC_FAILED": GPU,
    "CUDA error: CUSPARSE_STATUS_ALLOC_FAILED when calling `cusparseCreate(handle)`": GPU,
    "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`": GPU,
    "cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR, when calling `cusolverDnCreate(handle)`": GPU,
    "NCCL error in: NCCLUtils.hpp:275, unhandled cuda error, NCCL version 2.20.5\nncclUnhandledCudaError: Call to CUDA "
    "function failed.\nLast error:\nFailed to CUDA calloc async 6291456 bytes": GPU,
    "Triton Error [CUDA]: out of memory": GPU,
    _CPU
    + "can't allocate memory: you tried to allocate 1178729664 bytes. Error code 12 (Cannot allocate memory)": HOST,
    "[enforce fail at ..\\c10\\core\\impl\\alloc_cpu.cpp:72] data. DefaultCPUAllocator: not enough memory: you tried "
    "to allocate 26214400 bytes.": HOST,
    "[enforce fail at CPUAllocator.cpp:56] posix_memalign(&data, gAlignment, nbytes) == 0. 12 vs 0": HOST,
    "[enforce fail a": HOST,
    "could not create a primitive": HOST,
    "std::bad_alloc": HOST,
    "can't start new thread": HOST,
    "unable to mmap 29764 bytes from file </torch_10182_3020184674_63991>: Cannot allocate memory (12)": HOST,
    "DataLoader worker (pid 4024) is killed by signal: Killed. ": HOST,
    "libgomp: Thread creation failed: Resource temporarily unavailable": HOST,
    "cannot allocate memory for thread-local data: ABORT": HOST,
    "CUDA error: invalid configuration argument" + _ASYNC: CEILING,
    "HIP error: invalid configuration argument": CEILING,
    "Expected canUse32BitIndexMath(input) && canUse32BitIndexMath(output) to be true, but got false.  (Could this "
    "error message be improved?  If so, please report an enhancement request to PyTorch.)": CEILING,
    "input tensor must fit into 32-bit index math": CEILING,
    "upsample_nearest_nhwc only supports output tensors with less than INT_MAX elements": CEILING,
    "nonzero is not supported for tensors with more than INT_MAX elements,   file a support request": CEILING,
    "THCudaTensor sizes too large for THCDeviceTensor conversion at /pytorch/aten/src/THC/Utils.cuh:71": CEILING,
    "N > 0 INTERNAL ASSERT FAILED at KernelUtils.h:27, please report a bug to PyTorch. CUDA kernel launch blocks must "
    "be positive, but got N=-2147483648": CEILING,
    "at::cuda::blas::gemm<float> argument m must be non-negative and less than 2147483647 but got 2147483648": CEILING,
    "Output size of the matrix multiplication is larger than currently supported by the MPS backend: 72250,72250, "
    "needs to be less than 2**32 elements": CEILING,
    "Invalid buffer size: 19.45 GB": CEILING,
}
ERRORS: list[tuple[BaseException, Verdict]] = [
    (torch.OutOfMemoryError("CUDA out of memory."), GPU),
    (_out_of_resources(), CEILING),
    (_array_memory_error(), HOST),
    (MemoryError(), HOST),
    (OSError(errno.ENOMEM, "Cannot allocate memory"), HOST),
    *((RuntimeError(text), verdict) for text, verdict in TEXTS.items()),
]
_IDS = [re.sub(r"\W+", "-", f"{type(error).__name__} {error}")[:60] for error, _ in ERRORS]


@pytest.mark.parametrize(("error", "verdict"), ERRORS, ids=_IDS)
def test_a_real_text_is_classified(error, verdict):
    """What libraries really raise is classified as memory of the device, memory of the host, or a size ceiling."""
    assert classify(error) is verdict


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("CUDA out of memory.", GPU),
        ("HIP out of memory.", GPU),
        ("XPU out of memory.", GPU),
        ("DefaultCPUAllocator: can't allocate memory", HOST),
        ("DefaultCPUAllocator: not enough memory", HOST),
    ],
)
def test_a_text_that_is_cut_short_is_classified(text, verdict):
    """Libraries and tests raise plain RuntimeErrors with the first words of PyTorch's texts."""
    assert classify(RuntimeError(text)) is verdict
    assert classify(ValueError(text)) is None


def test_every_row_is_needed():
    """Each row of the table is the one that recognises one of the texts above, and each of these has its own row."""
    found = [find_pattern(error) for error, _ in ERRORS]
    assert set(found) == {*TYPES, *MESSAGES}
    assert len(found) == len(TYPES) + len(MESSAGES)


def test_every_row_says_where_it_was_seen():
    """Each row has a source, and a type or a message."""
    for pattern in (*TYPES, *MESSAGES):
        assert pattern.source.startswith("https://"), pattern
        assert pattern.message or pattern.exception != "builtins.RuntimeError", pattern


NEAR_MISSES = [
    RuntimeError("I cannot remember: my memory is full"),
    RuntimeError("the replay memory ran out of samples"),
    RuntimeError("out of memory"),
    RuntimeError("mat1 and mat2 shapes cannot be multiplied (8x16 and 32x16)"),
    RuntimeError("Sizes of tensors must match except in dimension 1. Expected size 4 but got size 5"),
    KeyError("memory"),
    ValueError("CUDA error: out of memory"),
    IndexError("index out of range in self"),
    RuntimeError("CUDA error: device-side assert triggered" + _ASYNC),
    RuntimeError("CUDA error: an illegal memory access was encountered" + _ASYNC),
    RuntimeError("CUDA error: too many resources requested for launch" + _ASYNC),
    RuntimeError("CUDA error: no kernel image is available for execution on the device"),
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`"),
    RuntimeError("cuFFT error: CUFFT_INTERNAL_ERROR"),
    RuntimeError("CUDA kernel launch blocks must be positive, but got N= 0"),
    RuntimeError("Storage size calculation overflowed with sizes=[-1]"),
    RuntimeError("DataLoader worker (pid 23616) is killed by signal: Terminated. "),
    RuntimeError("[enforce fail at tensor.cpp:9] sizes match. 3 vs 4"),
    RuntimeError("element 0 of tensors does not require grad and does not have a grad_fn"),
    RuntimeError("NCCL error: unhandled system error"),
    OSError(errno.ENOSPC, "No space left on device"),
    FileNotFoundError(errno.ENOENT, "No such file", "[Errno 12] Cannot allocate memory"),
    StopIteration(),
    KeyboardInterrupt(),
]


@pytest.mark.parametrize("error", NEAR_MISSES, ids=lambda error: repr(error)[:50])
def test_a_near_miss_is_not_ours(error):
    """A bug, a user's error that speaks of memory, or a fault of the installation is nobody's verdict."""
    assert classify(error) is None


def _raised(raise_it):
    try:
        raise_it()
    except Exception as error:
        return error


def test_a_library_that_wraps_an_out_of_memory_has_run_out():
    """`raise X from oom` is the out-of-memory, through any number of wrappers."""

    def wrap():
        try:
            try:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            except RuntimeError as error:
                raise ValueError("inner") from error
        except ValueError as error:
            raise KeyError("outer") from error

    assert classify(_raised(wrap)) is GPU


def test_a_long_message_is_searched_at_both_ends():
    """Half a million characters of each are."""
    much, words = "x" * 5_000_000, "CUDA out of memory. Tried to allocate 2.00 GiB."
    assert classify(RuntimeError(words + much)) is classify(RuntimeError(much + words)) is GPU
    assert classify(RuntimeError(much + words + much)) is None


def test_a_bug_in_the_handler_of_an_out_of_memory_is_a_bug():
    """An error raised while an out-of-memory was handled, but not from it, is judged for itself."""

    def stumble():
        try:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        except RuntimeError:
            {}["missing"]

    error = _raised(stumble)
    assert isinstance(error.__context__, torch.OutOfMemoryError)
    assert classify(error) is None


def test_causes_that_go_round_in_a_circle_end():
    """An exception that is its own cause's cause is looked at once."""
    one, two = ValueError("one"), ValueError("two")
    one.__cause__, two.__cause__ = two, one
    assert classify(one) is None


def test_on_the_cpu_the_host_is_the_device():
    """A host allocation that fails is the device's where the CPU trains, and the host's where a GPU does."""
    error = RuntimeError(_CPU + "can't allocate memory: you tried to allocate 8 bytes.")
    assert (classify(error, device="cpu"), classify(error, device="cuda")) == (GPU, HOST)


def test_the_real_allocator_says_it_in_these_words():
    """PyTorch's own error on this machine is in the table."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 50)
    assert classify(caught.value) is HOST


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_sigkill_is_the_out_of_memory_killer(device):
    """Nothing else kills without a word."""
    seen = decode(ChildDied(-9, ""), "bert-base at batch size 8", device)
    assert (seen.verdict, seen.message) == (Verdict.HOST_OUT_OF_MEMORY, KILLED)


LAST_WORDS = [
    "step 1\nterminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc",
    "libgomp: Thread creation failed: Resource temporarily unavailable",
    "cannot allocate memory for thread-local data: ABORT",
]


@pytest.mark.parametrize("last_words", LAST_WORDS)
def test_last_words_that_speak_of_memory(last_words):
    """A library that ends the process for want of memory says so before."""
    on_cpu, on_cuda = (decode(ChildDied(-6, last_words), "a model", device) for device in ("cpu", "cuda"))
    assert (on_cpu.verdict, on_cpu.message) == (Verdict.OUT_OF_MEMORY, last_words)
    assert on_cuda.verdict is Verdict.HOST_OUT_OF_MEMORY


@pytest.mark.parametrize(
    ("exit_code", "last_words", "how"),
    [
        (-11, "", "with signal SIGSEGV. It printed nothing."),
        (-11, "Segmentation fault", "with signal SIGSEGV. It printed last:\nSegmentation fault"),
        (-6, "Assertion failed", "with signal SIGABRT. It printed last:\nAssertion failed"),
        (3, "bye", "with exit code 3. It printed last:\nbye"),
        (-200, "", "with signal 200. It printed nothing."),
    ],
)
def test_any_other_death_is_an_error(exit_code, last_words, how):
    """It names the model, the size, the way it ended and the next move."""
    with pytest.raises(ProbeDied) as caught:
        decode(ChildDied(exit_code, last_words), "bert-base at batch size 8", "cuda")
    assert str(caught.value) == (
        f"the process that trained bert-base at batch size 8 ended twice without an answer, {how}\n"
        "Run one training step at this size in a process of your own to see why."
    )
    assert (caught.value.exit_code, caught.value.last_words) == (exit_code, last_words)
