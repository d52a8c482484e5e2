"""Values on the stub: operators on small tensors are computed on the CPU, in place, on the stub card's memory.

Importing this follows every operator of PyTorch's from then on, for good: it runs in a process on the stub alone, whose
"device memory" is memory of the process. So masks, lengths, counters, a GradScaler's flags and the losses of small
models are right, and code that branches on them takes the way it takes on a card.

Each storage is known, assumed or neither. What is computed of what is known is known; what reads something that is
assumed is assumed. A small tensor that comes of what is not known is filled with plausible numbers (finite, no mask
set) and assumed. What is read of it is counted, with the user's line.

The operators are followed by a kernel of each at `BackendSelect`, a dispatch key below autograd, autocast, tensor
subclasses and modes, and above every device. So it runs on autograd's own threads too, sees what DTensor and FSDP do on
the tensors within, and torch.compile compiles as it does without it, which a dispatch mode would switch off.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import itertools
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch.library import Library

from batchfinder.cuda_stub.launch import words_of_reads
from batchfinder.recording.cuda_build.events import tells, write_event
from batchfinder.recording.cuda_build.host_operators import ON_HOST, RUNTIME, Attention
from batchfinder.recording.user_code import PACKAGE_FOLDER, TORCH_FOLDER, is_library
from batchfinder.recording.value_reads import (
    ANY_BYTES,
    CHOICES_ASSUMED,
    FROM_HOST_BYTES,
    WHOLE_NUMBER_BYTES,
    WHOLE_NUMBERS,
    equally_often,
    is_asserted,
    most_bytes,
    plausible_scalar,
)

KNOWN, ASSUMED = 1, 2
aten = torch.ops.aten
_key = torch._C.DispatchKey
_BELOW = torch._C._dispatch_keyset_full_after(_key.BackendSelect)
_thread = threading.local()

# Operators that make memory or change what a tensor is, and write nothing.
_NOTHING_WRITTEN = frozenset(
    {
        "empty",
        "empty_like",
        "empty_strided",
        "empty_permuted",
        "empty_quantized",
        "new_empty",
        "new_empty_strided",
        "resize_",
        "resize_as_",
        "set_",
        "record_stream",
        "is_pinned",
        "_pin_memory",
        "_resize_output_",
        "_assert_async",
        "_functional_assert_async",
    }
)
# Operators whose outputs' shapes are computed on the host, as their kernels on a card would say them.
_ANSWERED_ON_HOST = frozenset({"_unique2", "unique_dim", "unique_consecutive", "_unique"})
_CHOICES = {"topk": 1, "argmax": 0, "argmin": 0, "max": 1, "min": 1, "sort": 1, "multinomial": 0, "argsort": 0}
"""Operators that choose among the last dimension or a given one, and where the indices stand among their outputs."""
_OUT_OF_RANGE = ("out of range", "out of bounds")
_CONTEXT_ASSERTED = 710


class Reads:
    """What was read and not known, by the user's line; written to the folder that the processes on the stub share."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        atexit.register(self.tell_counts)

    def add(self, what: str) -> None:
        """Count one read at the line of the user's that is running."""
        line = f"{what} at {user_line()}"
        self.counts[line] = self.counts.get(line, 0) + 1
        if self.counts[line] == 1:
            write_event("value", f"1 {line}")

    def assume(self, what: str) -> None:
        """Note something that is taken to be so, once."""
        if what not in self.counts:
            self.counts[what] = 0
            write_event("assumed", what)

    def words(self) -> tuple[str, ...]:
        """All of it so far as sentences."""
        assumed = [what for what, times in self.counts.items() if not times]
        return (*assumed, *words_of_reads({line: times for line, times in self.counts.items() if times}))

    def tell_counts(self) -> None:
        """Write how often each line read, where it was more than once."""
        if tells():
            for line, count in self.counts.items():
                if count > 1:
                    write_event("value", f"{count} {line}")


def user_line() -> str:
    """The innermost line that is no library's, such as `train.py:31`; a library's where there is none."""
    frame: FrameType | None = sys._getframe(1)
    fallback = ""
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((PACKAGE_FOLDER, "<frozen")):
            place = f"{os.path.basename(file)}:{frame.f_lineno}"
            if not is_library(file):
                return place
            if not fallback and not file.startswith(TORCH_FOLDER) and os.sep + "torch" + os.sep not in file:
                fallback = place
        frame = frame.f_back
    return fallback or "PyTorch itself"


reads = Reads()
around: Callable[[Any, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any] | None = None
"""Runs each operator on a card, if it is set: given the operator, what runs it, and its arguments."""
before_operator: Callable[[], None] | None = None
"""Called before each operator on a card, if it is set."""
not_computed: dict[str, str] = {}
"""Operators that the CPU could not compute in place of the card, and why, for tests."""


def state_of(tensor: torch.Tensor) -> int | None:
    """Whether what a tensor's storage holds is known or assumed; None for neither. The host's memory is known."""
    default = KNOWN if tensor.device.type == "cpu" else None
    return getattr(tensor.untyped_storage(), "batchfinder_state", default)


def set_state(tensor: torch.Tensor, state: int | None) -> None:
    """Say so of the storage."""
    storage = tensor.untyped_storage()
    storage.batchfinder_state = state  # type: ignore[attr-defined]
    if getattr(_thread, "touched", None) is not None:
        _thread.touched.add(storage._cdata)


def _span(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first number to its last."""
    if tensor.numel() == 0:
        return 0
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (1 + steps) * tensor.element_size()


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the CPU's on the same memory, of the same shape and strides."""
    if tensor.device.type != "cuda":
        return tensor
    if tensor.numel() == 0:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    room = (ctypes.c_char * _span(tensor)).from_address(tensor.data_ptr())
    return torch.frombuffer(room, dtype=tensor.dtype).as_strided(tensor.shape, tensor.stride())


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor's storage, as numbers of its type."""
    return tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested


class _Followed:
    """An operator's kernel at BackendSelect: calls the device's own, and then gives its outputs their values."""

    def __init__(self, op: Any) -> None:
        schema = op._schema
        self._op = op
        self._redispatch = op.redispatch
        self._name = schema.name.removeprefix("aten::")
        self._mutates = schema.is_mutable
        self._is_random = torch.Tag.nondeterministic_seeded in op.tags
        self._answers_on_host = self._name in _ANSWERED_ON_HOST
        self._limit = sys.maxsize if self._name == "zero_" else most_bytes(op, torch.float32)
        # What an operator writes, by place and name, and whether it reads it too: not where it is given its outputs, or
        # writes all of a tensor, as a copy or a fill does.
        self._written: dict[int | str, bool] = {}
        for place, each in enumerate(schema.arguments):
            if each.alias_info is not None and each.alias_info.is_write:
                reads_it = not each.is_out and self._name not in _OVERWRITES
                self._written |= {place: reads_it, each.name: reads_it}
        # Python gets numbers in place of tensors that PyTorch made of numbers; the device's kernel wants the tensors.
        self._numbers = tuple(
            place for place, each in enumerate(schema.arguments) if str(each.type) in ("Tensor", "Optional[Tensor]")
        )

    def __call__(self, keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if before_operator is not None and keyset.has(_key.CUDA):
            before_operator()
        if around is not None and keyset.has(_key.CUDA):
            return around(self._op, functools.partial(self._run, keyset), args, kwargs)
        return self._run(keyset, *args, **kwargs)

    def _run(self, keyset: Any, *args: Any, **kwargs: Any) -> Any:
        args = self._with_tensors(args)
        quiet = getattr(_thread, "quiet", False)
        if not keyset.has(_key.CUDA):
            if self._name == "_local_scalar_dense" and state_of(args[0]) == ASSUMED:
                reads.add("a number")
            return self._redispatch(keyset & _BELOW, *args, **kwargs)
        if quiet and self._name not in ("nonzero", "_local_scalar_dense"):
            return self._redispatch(keyset & _BELOW, *args, **kwargs)
        try:
            return self._follow(keyset & _BELOW, args, kwargs)
        except BaseException:
            args = kwargs = None  # type: ignore[assignment]  # the traceback keeps no tensors that PyTorch would let go
            raise

    def _with_tensors(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        for place in self._numbers:
            if place < len(args) and isinstance(args[place], (bool, int, float, complex)):
                others = [
                    args[each] for each in self._numbers if each < len(args) and isinstance(args[each], torch.Tensor)
                ]
                if self._name.startswith("where"):
                    others = [each for each in others if each is not args[0]]
                number = args[place]
                dtype = torch.result_type(others[0], number) if others else torch.tensor(number).dtype
                made = torch.scalar_tensor(number, dtype=dtype, device="cpu")
                args = (*args[:place], made, *args[place + 1 :])
        return args

    def _follow(self, keyset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._name in _NOTHING_WRITTEN:
            return self._redispatch(keyset, *args, **kwargs)
        if self._name == "_local_scalar_dense":
            self._read_number(args[0])
            return self._redispatch(keyset, *args, **kwargs)
        if self._name == "nonzero":
            return self._places(keyset, args, kwargs)
        read, written = self._tensors(args, kwargs)
        # New memory of which a part may be written now, and the rest read later.
        blank = [
            _whole(each)
            for each in written
            if state_of(each) is None and each.untyped_storage().nbytes() <= ANY_BYTES and _is_plain(each)
        ]
        if blank:
            self._fill(args, blank)
        state = self._state(read)
        computes = state is not None and self._fits([*read, *written])
        if computes and self._name == "copy_" and args[1].device.type == "cpu" and args[1].dtype not in WHOLE_NUMBERS:
            computes = _span(args[0]) <= FROM_HOST_BYTES
        if computes and self._answers_on_host:
            return self._answer(args, kwargs, state)
        if self._name == "equal" and computes:
            _thread.answered = True  # what the kernel reads is not asked for
            try:
                self._redispatch(keyset, *args, **kwargs)
            finally:
                _thread.answered = False
            return torch.equal(*map(on_host, args))
        random = self._generator(args, kwargs) if computes and self._is_random else None
        # What a kernel does by other operators is followed within it; but a change in place would be made twice.
        before, _thread.quiet = getattr(_thread, "quiet", False), computes and self._mutates
        outside, _thread.touched = getattr(_thread, "touched", None), set()
        try:
            out = self._redispatch(keyset, *args, **kwargs)
        finally:
            _thread.quiet = before
            within = _thread.touched
            _thread.touched = None if outside is None else outside | within
        made = [each for each in leaves((out,)) if each.device.type == "cuda" or written]
        if computes and self._fits(made) and self._compute(args, kwargs, made, random, out):
            if torch._C._cuda_isCurrentStreamCapturing():
                state = ASSUMED  # a graph that is launched again computes nothing
            given = {each.untyped_storage()._cdata for each in (*read, *written)}
            if blank and state == ASSUMED:
                blanks = {each.untyped_storage()._cdata for each in blank}
                others = self._state([each for each in read if each.untyped_storage()._cdata not in blanks])
                if others == KNOWN and self._overwrites(blank, args, kwargs, random):
                    state = KNOWN
            for each in [*made, *written]:
                self._mark(each, state, is_new=each.untyped_storage()._cdata not in given)
        else:
            if self._name in _INDEXED:
                _check_indices(self._name, args)
            left = [each for each in (*made, *written) if each.untyped_storage()._cdata not in within]
            self._fill(args, left)
        return out

    # -- what an operator reads and writes ---------------------------------------------------------------------------

    def _tensors(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """What is read and what is written."""
        read: list[torch.Tensor] = []
        written: list[torch.Tensor] = []
        given: Iterator[tuple[int | str, Any]] = itertools.chain(enumerate(args), kwargs.items())
        for place, value in given:
            tensors = leaves((value,))
            if place in self._written:
                written += tensors
            if self._written.get(place, True):
                read += tensors
        return read, written

    def _state(self, read: Sequence[torch.Tensor]) -> int | None:
        states = {state_of(each) for each in read if each.numel() and _is_plain(each)}
        if None in states or not all(_is_plain(each) for each in read):
            return None
        return ASSUMED if ASSUMED in states else KNOWN

    def _fits(self, tensors: Sequence[torch.Tensor]) -> bool:
        for each in tensors:
            if each.device.type == "meta" or not _is_plain(each):
                return False
            if _span(each) > (WHOLE_NUMBER_BYTES if each.dtype in WHOLE_NUMBERS else self._limit):
                return False
        return True

    # -- values ------------------------------------------------------------------------------------------------------

    def _compute(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        made: list[torch.Tensor],
        random: torch.Generator | None,
        out: Any = None,
    ) -> bool:
        def host(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return on_host(value)
            if isinstance(value, (list, tuple)):
                return type(value)(host(each) for each in value)
            if isinstance(value, torch.device):
                return torch.device("cpu")
            return random if isinstance(value, torch.Generator) else value

        host_args, host_kwargs = (
            host(args),
            {name: host(value) for name, value in kwargs.items() if name != "pin_memory"},
        )
        kept = _seeded(random) if random is not None else contextlib.nullcontext()
        try:
            with torch._C._AutoDispatchBelowAutograd(), kept:
                run = ON_HOST.get(self._name, self._op)
                values = run(*host_args, **host_kwargs)
                if isinstance(run, Attention) and isinstance(values[-1], int):
                    for each in leaves((out,)):  # a seed, by which the backward finds the same dropout
                        if each.numel() <= 2 and not each.is_floating_point():
                            on_host(each).fill_(values[-1])
                for tensor, value in zip(made, leaves((values,)), strict=False):
                    same = tensor.shape == value.shape and tensor.dtype == value.dtype
                    if same and tensor.device.type == "cuda" and tensor.data_ptr() != value.data_ptr():
                        on_host(tensor).copy_(value)
        except (RuntimeError, IndexError, NotImplementedError, TypeError, ValueError) as error:
            if any(words in str(error) for words in _OUT_OF_RANGE) and not isinstance(error, TypeError):
                # A kernel would stop at its assertion, and the context be dead.
                RUNTIME.stub_kill_context(_CONTEXT_ASSERTED)
            not_computed[self._name] = f"{type(error).__name__}: {error}"[:200]
            return False
        return True

    def _overwrites(
        self, blank: list[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any], random: torch.Generator | None
    ) -> bool:
        """Whether an operator leaves nothing of what was there: it gives the same on other numbers."""
        before = [on_host(each).clone() for each in blank]
        for each in blank:
            on_host(each).fill_(each.dtype is not torch.bool and 3)
        if self._compute(args, kwargs, [], random) and all(map(torch.equal, map(on_host, blank), before)):
            return True
        for each, values in zip(blank, before, strict=True):
            on_host(each).copy_(values)
        return False

    def _mark(self, tensor: torch.Tensor, state: int | None, is_new: bool) -> None:
        if tensor.device.type == "cpu":
            if state != KNOWN:
                set_state(tensor, state)
            return
        whole = is_new or _span(tensor) >= tensor.untyped_storage().nbytes()
        before = state_of(tensor)
        if not whole and before is None:
            return  # the rest of it is as it was
        set_state(tensor, state if whole or before == state else ASSUMED)

    def _fill(self, args: tuple[Any, ...], tensors: list[torch.Tensor]) -> None:
        """Give small tensors that come of what nobody knows plausible numbers."""
        if self._name == "_amp_foreach_non_finite_check_and_unscale_":
            tensors = list(leaves((args[0],)))  # gradients are taken to be finite: the flag stays as it is
        for place, each in enumerate(tensors):
            if not _is_plain(each):
                continue
            if each.device.type == "cpu":  # a copy to the host
                self._fill_host(each)
                continue
            if each.device.type != "cuda":
                continue
            nbytes, index = _span(each), _CHOICES.get(self._name) == place and each.dtype in WHOLE_NUMBERS
            if nbytes > (WHOLE_NUMBER_BYTES if index else ANY_BYTES):
                set_state(each, None)
                continue
            if index and args[0].dim():
                dim = args[1] if len(args) > 1 and isinstance(args[1], int) and self._name != "topk" else -1
                dim = args[2] if self._name == "topk" and len(args) > 2 else dim
                on_host(each).copy_(equally_often(each, args[0].size(dim)))
                reads.assume(CHOICES_ASSUMED)
            else:
                on_host(each).fill_(self._plausible(each, args))
            whole = nbytes >= each.untyped_storage().nbytes()
            if whole or state_of(each) is not None:
                set_state(each, ASSUMED)

    def _plausible(self, tensor: torch.Tensor, args: tuple[Any, ...]) -> bool | int | float:
        source = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if self._name == "sum" and source is not None and source.dtype is torch.bool and tensor.numel():
            return source.numel() // tensor.numel()  # nothing is masked
        if self._name in ("isnan", "isinf"):
            return False
        return plausible_scalar(tensor, f"aten.{self._name}", None)

    def _fill_host(self, tensor: torch.Tensor) -> None:
        if _span(tensor) <= ANY_BYTES and state_of(tensor) == KNOWN:
            tensor.fill_(self._plausible(tensor, ()))
        set_state(tensor, ASSUMED)

    # -- operators of which the host wants to know something -----------------------------------------------------------

    def _read_number(self, tensor: torch.Tensor) -> None:
        if tensor.device.type != "cuda" or not _is_plain(tensor) or state_of(tensor) == KNOWN:
            return
        place = on_host(tensor)
        if state_of(tensor) is None:
            place.fill_(plausible_scalar(tensor, "", None))
        if tensor.dtype is torch.bool and not place.item() and is_asserted():
            place.fill_(True)
        if not getattr(_thread, "answered", False):
            reads.add("a number")

    def _places(self, keyset: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`nonzero`: how many there are is told to PyTorch's own code, which then makes room for them."""
        tensor = args[0]
        known = _is_plain(tensor) and state_of(tensor) == KNOWN and _span(tensor) <= WHOLE_NUMBER_BYTES
        if known:
            found = on_host(tensor).nonzero()
        else:  # all of them, the most that there can be
            reads.add("which elements are not zero (taken to be all)")
            if tensor.numel() * 8 * max(1, tensor.dim()) > WHOLE_NUMBER_BYTES:
                found = None
            else:
                found = torch.ones(tensor.shape, dtype=torch.bool, device="cpu").nonzero()
        count = tensor.numel() if found is None else found.size(0)
        RUNTIME.stub_answer_next_read(ctypes.byref(ctypes.c_int32(count)), ctypes.c_size_t(4))
        try:
            out = self._redispatch(keyset, *args, **kwargs)
        finally:
            RUNTIME.stub_answer_next_read(None, ctypes.c_size_t(0))
        if out.size(0) != count:  # another version of PyTorch asks otherwise
            out = torch.empty((count, max(0, tensor.dim())), dtype=torch.int64, device=tensor.device)
        if found is not None and _span(out) <= WHOLE_NUMBER_BYTES:
            on_host(out).copy_(found)
            set_state(out, KNOWN if known else ASSUMED)
        return out

    def _answer(self, args: tuple[Any, ...], kwargs: dict[str, Any], state: int | None) -> Any:
        """What an operator gives, computed on the host and copied to the card; its scratch memory is left out."""
        device = args[0].device
        with torch._C._AutoDispatchBelowAutograd():
            values = self._op(on_host(args[0]), *args[1:], **kwargs)
            made = [each.to(device) if isinstance(each, torch.Tensor) else each for each in values]
        for each in made:
            set_state(each, state)
        return tuple(made)

    def _generator(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Generator:
        """Random numbers of the CPU's, by the card's seed and how many it has drawn."""
        given = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Generator)]
        device = next((each.device for each in leaves(args) if each.device.type == "cuda"), None)
        if given and given[0].device.type == "cuda":
            source = given[0]
        else:
            source = torch.cuda.default_generators[0 if device is None or device.index is None else device.index]
        made = torch.Generator()
        made.manual_seed(
            (source.initial_seed() * 0x9E3779B97F4A7C15 + source.get_offset() * 0xBF58476D1CE4E5B9 + 1) % 2**63
        )
        return made


@contextlib.contextmanager
def _seeded(generator: torch.Generator) -> Iterator[None]:
    """The CPU's own generator in that state, for operators that are given none."""
    before = torch.random.get_rng_state()
    torch.random.set_rng_state(generator.get_state())
    try:
        yield
    finally:
        torch.random.set_rng_state(before)


def leaves(values: Sequence[Any]) -> list[torch.Tensor]:
    """The tensors among some values, in lists and tuples as well."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += leaves(value)
    return found


# Operators that look rows up: where the indices stand, and the dimension of the first argument that they are for.
_INDEXED = {"embedding": (1, 0), "index_select": (2, None), "gather": (2, None), "nll_loss_forward": (1, 1)}


def _check_indices(name: str, args: tuple[Any, ...]) -> None:
    """Kernels assert that indices are in range, also where the rows are too large to be computed here."""
    place, dim = _INDEXED[name]
    indices, dim = args[place], args[1] if dim is None else dim
    if indices.device.type != "cuda" or state_of(indices) != KNOWN or not 0 < _span(indices) <= WHOLE_NUMBER_BYTES:
        return
    # A row's index that is expanded to its length is looked at once: embeddings of BERT have 16 million so.
    values = on_host(indices)[tuple(slice(1) if step == 0 else slice(None) for step in indices.stride())]
    if name == "nll_loss_forward":
        values = values[values != args[4]]
        if not values.numel():
            return
    low, high = (int(each) for each in torch.aminmax(values))
    if low < 0 or high >= args[0].size(dim):
        RUNTIME.stub_kill_context(_CONTEXT_ASSERTED)


# Operators of a number that make a tensor on the card of it, in a way that Python cannot be given, and what does the
# same of a tensor; with the places of the number and of a tensor on its device.
_OF_A_NUMBER = {
    "aten::pow.Scalar": (aten.pow.Tensor_Tensor, 0, 1),
    "aten::isin.Scalar_Tensor": (aten.isin.Tensor_Tensor, 0, 1),
    "aten::searchsorted.Scalar": (aten.searchsorted.Tensor, 1, 0),
}


def _of_a_number(op: Any, of_a_tensor: Any, place: int, beside: int) -> Callable[..., Any]:
    def run(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if not keyset.has(_key.CUDA):
            return op.redispatch(keyset & _BELOW, *args, **kwargs)
        other = args[beside]
        dtype = torch.result_type(other, args[place])
        number = torch.scalar_tensor(args[place], dtype=dtype, device=other.device)
        return of_a_tensor(*args[:place], number, *args[place + 1 :], **kwargs)

    return run


# Operators that write all of what they are given, whatever it held.
_OVERWRITES = frozenset(
    {
        "copy_",
        "fill_",
        "zero_",
        "normal_",
        "uniform_",
        "random_",
        "bernoulli_",
        "exponential_",
        "geometric_",
        "log_normal_",
        "cauchy_",
    }
)


def follow(namespace: str) -> Library:
    """Follow the operators of a namespace, for as long as the library that is returned is held."""
    library = Library(namespace, "IMPL")
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    for full_name in torch._C._dispatch_get_all_op_names():
        space, _, rest = full_name.partition("::")
        name, _, overload = rest.partition(".")
        if space != namespace or has_kernel(full_name, "BackendSelect"):
            continue
        if has_kernel(full_name, "CompositeImplicitAutograd") and not has_kernel(full_name, "CUDA"):
            continue  # made of others, which are followed
        op = getattr(getattr(getattr(torch.ops, namespace), name), overload or "default")
        # A view has its base's values; and what only takes a tensor's data must not have been in Python's hands before.
        if op.is_view or torch.Tag.inplace_view in op.tags or name in ("detach", "alias", "lift", "lift_fresh"):
            continue
        with contextlib.suppress(RuntimeError):
            kernel = _of_a_number(op, *_OF_A_NUMBER[full_name]) if full_name in _OF_A_NUMBER else _Followed(op)
            library.impl(op, kernel, "BackendSelect", with_keyset=True)
    return library


def _override_factories() -> Library:
    """Factories whose kernels write values at once, rather than through another operator."""
    library = Library("aten", "IMPL")
    for name in ("tril_indices", "triu_indices"):
        op = getattr(aten, name).default

        def kernel(keyset: Any, *args: Any, _op: Any = op, **kwargs: Any) -> torch.Tensor:
            device = torch.device(kwargs.get("device") or "cpu")
            target = torch._C.DispatchKeySet(_key.CUDA if device.type == "cuda" else _key.CPU)
            made: torch.Tensor = _op.redispatch(target, *args, **kwargs)
            if made.device.type == "cuda" and made.nbytes <= WHOLE_NUMBER_BYTES:
                on_host(made).copy_(_op(*args, **{**kwargs, "device": torch.device("cpu"), "pin_memory": False}))
                set_state(made, KNOWN)
            return made

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it stands in for PyTorch's own
            library.impl(name, kernel, "BackendSelect", with_keyset=True)
    return library


# Collectives, and which of their arguments only receive: what the stub's NCCL exchanges is right where it is small.
_COLLECTIVE_BYTES = 256 << 10
_RECEIVING = ("output", "recv")


def _follow_collectives() -> Library:
    """Let what small collectives bring be known."""
    library = Library("c10d", "IMPL")
    for full_name in torch._C._dispatch_get_all_op_names():
        space, _, rest = full_name.partition("::")
        if space != "c10d" or torch._C._dispatch_has_kernel_for_dispatch_key(full_name, "BackendSelect"):
            continue
        name, _, overload = rest.partition(".")
        op = getattr(getattr(torch.ops.c10d, name), overload or "default")
        receives = tuple(each.name.startswith(_RECEIVING) for each in op._schema.arguments)

        def kernel(
            keyset: Any, *args: Any, _op: Any = op, _receives: tuple[bool, ...] = receives, **kwargs: Any
        ) -> Any:
            tensors = [each for each in leaves(args) if each.device.type == "cuda"]
            if not tensors:
                return _op.redispatch(keyset & _BELOW, *args, **kwargs)
            given = [args[place] for place in range(len(args)) if not (place < len(_receives) and _receives[place])]
            states = {state_of(each) for each in leaves(given) if each.device.type == "cuda"}
            before, _thread.quiet = getattr(_thread, "quiet", False), True  # what it copies is copied
            try:
                return _op.redispatch(keyset & _BELOW, *args, **kwargs)
            finally:
                _thread.quiet = before
                small = sum(map(_span, tensors)) <= _COLLECTIVE_BYTES
                for each in tensors:
                    set_state(each, None if not small else KNOWN if states == {KNOWN} else ASSUMED)

        library.impl(op, kernel, "BackendSelect", with_keyset=True)
    return library


def _read_past_int64() -> None:
    """Let `item` read what an older PyTorch takes from no operator in Python: a number of uint64 past int64's."""
    item = torch.Tensor.item

    def item_of_any(tensor: torch.Tensor) -> Any:
        return item(tensor.view(torch.int64)) % (1 << 64) if tensor.dtype is torch.uint64 else item(tensor)

    try:
        torch.tensor(-1).view(torch.uint64).item()
    except RuntimeError:
        torch.Tensor.item = item_of_any  # type: ignore[method-assign, assignment]


followed = [follow("aten"), _override_factories(), _follow_collectives()]
_read_past_int64()
