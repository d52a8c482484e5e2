"""Answers for code that reads values of fake tensors: scalars, data-dependent shapes, lengths of packed sequences.

`.item()`, `bool(tensor)` and operators whose output's shape depends on values must not end a recording. Where the
values come from the batch alone (token ids, masks, sizes of images), they are known. Elsewhere each gets one fixed,
plausible answer, and the recording says that it did so. Packed sequences are taken to be of full length, as in
https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/PackedSequence.cpp (read in a copy of 2024).
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.library import Library
from torch.utils import _pytree as pytree
from torch.utils._mode_utils import no_dispatch

from batchfinder.recording.kernel_memory import REPLACED, aten
from batchfinder.recording.value_reads import (
    ANY_BYTES,
    CHOICES_ASSUMED,
    FROM_HOST_BYTES,
    WHOLE_NUMBER_BYTES,
    WHOLE_NUMBERS,
    equally_often,
    most_bytes,
    plausible_scalar,
)

_COPIES = frozenset({aten._to_copy.default, aten.clone.default})
_FAULTS = frozenset({aten.isnan.default, aten.isinf.default})
_COMPARISONS: dict[Any, Callable[[float, float], bool]] = {
    aten.eq.Scalar: operator.eq,
    aten.ne.Scalar: operator.ne,
    aten.gt.Scalar: operator.gt,
    aten.ge.Scalar: operator.ge,
    aten.lt.Scalar: operator.lt,
    aten.le.Scalar: operator.le,
}
# What becomes of the gradient of a loss that is scaled, or divided by a number of micro-batches.
_ARITHMETIC: dict[Any, Callable[[float, float], float]] = {
    aten.mul.Tensor: operator.mul,
    aten.div.Tensor: operator.truediv,
}
# Where the value that fills a new tensor stands among the arguments.
_FILLED = {"aten::full": 1, "aten::full_like": 1, "aten::new_full": 2, "aten::scalar_tensor": 0}


def constant_of(func: Any, args: tuple[Any, ...], known: Callable[[torch.Tensor], float | None]) -> float | None:
    """The value that every element of an operator's new tensor is taken to have; None for an unknown one.

    The constant that a tensor is filled with, also if it is a copy (`known` tells that of an argument); the number of
    elements for the sum of a mask (nothing is masked: `mask.sum() == mask.numel()` is how transformers asks for
    `mask.all()`); what a comparison or a product of such numbers comes to.
    """
    if func in _COPIES:
        return known(args[0])
    if func in _FAULTS:
        return 0.0
    if func is aten.sum.default and args[0].dtype is torch.bool:
        each = known(args[0])
        return float(args[0].numel()) * (1.0 if each is None else each)
    if func in _ARITHMETIC and isinstance(args[1], torch.Tensor):
        factors = known(args[0]), known(args[1])
        return None if factors[0] is None or not factors[1] else _ARITHMETIC[func](factors[0], factors[1])
    if func in _COMPARISONS:
        compared = known(args[0])
        return None if compared is None else float(_COMPARISONS[func](compared, args[1]))
    return filled_with(func, args)


def filled_with(func: Any, args: tuple[Any, ...]) -> float | None:
    """The number that an operator fills its new tensor with; None for operators that do something else."""
    name = func._schema.name
    if name in ("aten::zeros", "aten::zeros_like", "aten::new_zeros"):
        return 0.0
    if name in ("aten::ones", "aten::ones_like", "aten::new_ones"):
        return 1.0
    if name in _FILLED:
        value = args[_FILLED[name]] if len(args) > _FILLED[name] else None
        return float(value) if isinstance(value, (bool, int, float)) else None
    return None


def are_equal(first: torch.Tensor, second: torch.Tensor, known: Callable[[torch.Tensor], float | None]) -> bool | None:
    """What `torch.equal` is known to say of two tensors: of one, of two shapes, of two constants; None for others."""
    if first.shape != second.shape or first is second:
        return first.shape == second.shape
    values = known(first), known(second)
    return None if None in values else values[0] == values[1]


_equal_lists: dict[int, tuple[weakref.ref[Any], int]] = {}


def known_element(tensor: torch.Tensor) -> int | None:
    """What each element of a list of lengths, or of samples per step, is that was made here; None for others."""
    known = _equal_lists.get(tensor.untyped_storage()._cdata)
    return None if known is None or known[0]() is None else known[1]


def _counts(number: int, each: int) -> torch.Tensor:
    """That many equal numbers on the CPU, where PyTorch keeps such lists; remembered, since its code reads them."""
    counts = torch.empty(number, dtype=torch.int64, device="cpu")
    storage = counts.untyped_storage()
    _equal_lists[storage._cdata] = (weakref.ref(storage), each)
    return counts


_MASKS = (torch.bool, torch.uint8)
_CHOICES = {aten.topk.default: 1, aten.argmax.default: None}  # where their indices stand among the outputs
_RANDOM = torch.Tag.nondeterministic_seeded
_UNINITIALIZED = ("aten::empty", "aten::new_empty")


class KnownValues:
    """Values of small tensors on the fake GPU, computed on the CPU beside the recording.

    They start from the batch, from buffers and from operators that fill tensors, and go on through every operator that
    reads nothing else. What a model computes with its weights has no values, but for the experts that a router chooses:
    these are taken in turn, so that all get the same share. How large a tensor may be is in `value_reads`.

    Attributes:
        assumed: what was taken to be so, in words, for `Trace.unmodelled`.
    """

    def __init__(self) -> None:
        self._lost: dict[int, torch.Tensor] = {}  # held, so that no other storage gets the same address
        self.assumed: dict[str, None] = {}

    def give(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        """Say what a tensor on the fake GPU holds, which comes from the host."""
        most = WHOLE_NUMBER_BYTES if tensor.dtype in WHOLE_NUMBERS else FROM_HOST_BYTES
        if isinstance(tensor, FakeTensor) and not isinstance(values, FakeTensor) and values.nbytes <= most:
            tensor.batchfinder_values = values  # type: ignore[attr-defined]

    def of(self, tensor: Any) -> torch.Tensor | None:
        """What a tensor holds, as a tensor on the CPU; None where nobody knows."""
        if not isinstance(tensor, FakeTensor):
            return tensor if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu" else None
        values: torch.Tensor | None = getattr(tensor, "batchfinder_values", None)
        return None if values is None or values.untyped_storage()._cdata in self._lost else values

    def result(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What an operator gives for these arguments, on the CPU; None where it reads what is not known."""
        schema = func._schema.name
        if _RANDOM in func.tags or schema.startswith(_UNINITIALIZED):
            return None
        leaves, form = pytree.tree_flatten((args, kwargs))
        for number, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                known = self.of(leaf)
                if known is None or known.layout is not torch.strided or known.nbytes > most_bytes(func, known.dtype):
                    return None
                leaves[number] = known
            elif isinstance(leaf, torch.device):
                leaves[number] = torch.device("cpu")
        known_args, known_kwargs = pytree.tree_unflatten(leaves, form)
        try:
            with no_dispatch():
                return func(*known_args, **known_kwargs)
        except (RuntimeError, IndexError, NotImplementedError):  # as a view of other strides
            return None

    def follow(self, func: Any, args: Any, kwargs: Any, output: Any) -> None:
        """Give an operator's outputs on the fake GPU their values, or forget those of the tensors it wrote to."""
        mutable, first = func._schema.is_mutable, args[0] if args else None
        if isinstance(first, FakeTensor) and not mutable and func not in _CHOICES and self.of(first) is None:
            return
        leaves = pytree.tree_leaves(output)
        made = [each for each in leaves if isinstance(each, torch.Tensor)]
        strided = all(each.layout is torch.strided and not each.is_nested for each in made)
        fits = strided and all(each.nbytes <= most_bytes(func, each.dtype) for each in made)
        if not fits or not (made or mutable):
            values: Any = None
        elif func in _CHOICES:
            values = self._choices(func, args, leaves)
        elif (constant := filled_with(func, args)) is not None:
            with no_dispatch():
                shape = output.shape if output.nbytes <= ANY_BYTES or output.dtype in WHOLE_NUMBERS else ()
                values = torch.full(shape, constant, dtype=output.dtype, device="cpu").expand(output.shape)
        else:
            values = self.result(func, args, kwargs)
        if values is None:
            if mutable:
                self.forget(func, args, kwargs)
            return
        for tensor, known in zip(leaves, pytree.tree_leaves(values), strict=True):
            if isinstance(tensor, FakeTensor) and isinstance(known, torch.Tensor) and tensor.shape == known.shape:
                tensor.batchfinder_values = known  # type: ignore[attr-defined]

    def forget(self, func: Any, args: Any, kwargs: Any) -> None:
        """Forget what the tensors held that an operator writes to."""
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written = args[place] if place < len(args) else kwargs.get(argument.name)
                for tensor in written if isinstance(written, (list, tuple)) else (written,):
                    values = self.of(tensor)
                    if values is not None and values is not tensor:
                        self._lost[values.untyped_storage()._cdata] = values

    def _choices(self, func: Any, args: Any, made: list[Any]) -> list[torch.Tensor | None] | None:
        """Indices that go through all there is to choose from, one after the other."""
        dim = args[2] if func is aten.topk.default and len(args) > 2 else args[1] if len(args) > 1 else None
        if func is aten.topk.default and len(args) <= 2:
            dim = -1
        if dim not in (-1, args[0].dim() - 1):
            return None
        chosen = made[_CHOICES[func] or 0]
        with no_dispatch():
            indices = equally_often(chosen, args[0].size(-1))
        self.assumed[CHOICES_ASSUMED] = None
        return [indices] if len(made) == 1 else [None, indices]


_DATA_DEPENDENT = frozenset(
    {
        aten.nonzero.default,
        aten.masked_select.default,
        aten._unique2.default,
        aten.bincount.default,
        aten.index.Tensor,
        aten._pack_padded_sequence.default,
    }
)


def output_of_values(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], values: KnownValues
) -> tuple[Any, bool, int] | None:
    """What an operator gives whose output's shape depends on values, whether they are known, and its scratch in bytes.

    None where the shape does not depend on them. Where they are not known, it is as large as it can get: every element
    is selected, every element is different, every sequence is of full length.
    """
    dependent = func in _DATA_DEPENDENT or (torch.Tag.dynamic_output_shape in func.tags and func not in REPLACED)
    if not dependent or not any(isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves(args)):
        return None
    tensor = args[0]
    new = functools.partial(torch.empty, device=tensor.device)
    if func is aten.index.Tensor:
        # `tensor[mask]`: a mask stands for one index per dimension, of as many rows as are selected.
        rows: list[torch.Tensor | None] = []
        all_known = True
        for index in args[1]:
            if index is None or index.dtype not in _MASKS:
                rows.append(index)
                continue
            known = values.of(index)
            all_known = all_known and known is not None
            if known is None:
                each = functools.partial(torch.empty, index.numel(), dtype=torch.int64, device=index.device)
                rows += [each() for _ in range(index.dim())]
            else:
                with no_dispatch():
                    # Of a mask that was expanded over the features, how many it selects is enough.
                    few = known.numel() <= WHOLE_NUMBER_BYTES // 8
                    places = known.nonzero().unbind(1) if few else ()
                    selected = int(known.sum())
                if not few:
                    rows += [torch.empty(selected, dtype=torch.int64, device=index.device) for _ in range(index.dim())]
                for place in places:
                    on_cpu = index.device.type == "cpu"
                    rows.append(place if on_cpu else torch.empty(place.shape, dtype=torch.int64, device=index.device))
                    values.give(rows[-1], place)  # type: ignore[arg-type]
        if len(rows) == len(args[1]) and all(map(operator.is_, rows, args[1])):
            return None
        # The places are looked for first, as `nonzero` does: `expandTensors` in
        # https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/IndexingUtils.h.
        found = [row for row in rows if row is not None and not any(row is index for index in args[1])]
        return func(tensor, rows), all_known, sum(row.nbytes for row in found)
    if func is aten.masked_select.default:
        mask = values.of(args[1])
        if mask is not None:
            with no_dispatch():
                selected = int(mask.expand(torch.broadcast_shapes(tensor.shape, mask.shape)).sum())
            return new(selected, dtype=tensor.dtype), True, 0
        return new(torch.broadcast_shapes(tensor.shape, args[1].shape).numel(), dtype=tensor.dtype), False, 0
    packs = func is aten._pack_padded_sequence.default  # of full length, whatever is in it
    known_output = None if packs else values.result(func, args, kwargs)
    if known_output is not None and tensor.device.type == "cpu":
        return known_output, True, 0
    if known_output is not None:
        return pytree.tree_map_only(torch.Tensor, lambda each: new(each.shape, dtype=each.dtype), known_output), True, 0
    return _largest_output(func, args), False, 0


def _largest_output(func: Any, args: tuple[Any, ...]) -> Any:
    tensor = args[0]
    new = functools.partial(torch.empty, device=tensor.device)
    elements = tensor.numel()
    if func is aten.nonzero.default:
        return new((elements, tensor.dim()), dtype=torch.int64)
    if func is aten._unique2.default:
        index = new(elements, dtype=torch.int64)
        return new(elements, dtype=tensor.dtype), index, torch.empty_like(index)
    if func is aten.bincount.default:
        weights = args[1] if len(args) > 1 else None
        least = args[2] if len(args) > 2 else 0
        return new(max(least, elements), dtype=torch.int64 if weights is None else weights.dtype)
    if func is not aten._pack_padded_sequence.default:
        return func(*args)  # which the fake mode refuses, with its name
    # Packed: all steps of the first sample of each, then the second; a copy, of another one if batches come first.
    by_step = (tensor.transpose(0, 1) if args[2] else tensor).contiguous()
    return torch.cat([by_step.flatten(0, 1)]), _counts(by_step.size(0), by_step.size(1))


@functools.cache
def register() -> tuple[Library, ...]:
    """Let the fake GPU unpack sequences and run the backward of packing them, while the libraries returned are held."""

    def pack_backward(
        grad: torch.Tensor, input_size: list[int], batch_sizes: torch.Tensor, batch_first: bool
    ) -> torch.Tensor:
        size = list(input_size)
        if batch_first:
            size[:2] = size[1], size[0]
        padded = torch.zeros(size, dtype=grad.dtype, device=grad.device)
        padded.copy_(grad.view(size))
        return padded.transpose(0, 1) if batch_first else padded

    def unpack(
        packed: torch.Tensor, batch_sizes: torch.Tensor, batch_first: bool, padding_value: float, total_length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        steps = batch_sizes.size(0)
        batch, rest = packed.size(0) // steps, packed.shape[1:]
        length = max(steps, total_length)
        padded = torch.full((length, batch, *rest), padding_value, dtype=packed.dtype, device=packed.device)
        padded.narrow(0, 0, steps).narrow(1, 0, batch).copy_(packed.view(steps, batch, *rest))
        return (padded.transpose(0, 1) if batch_first else padded), _counts(batch, steps)

    def scalar(tensor: torch.Tensor) -> bool | int | float:
        # `torch.tensor([tensor])` asks for values where no mode sees it.
        values = KnownValues().of(tensor)
        return plausible_scalar(tensor, "", None) if values is None else values.item()

    libraries = tuple(Library("aten", "IMPL", key) for key in ("AutogradPrivateUse1", "PrivateUse1"))
    libraries[1].impl("_local_scalar_dense", scalar)
    for library in libraries:
        library.impl("_pack_padded_sequence_backward", pack_backward)
        library.impl("_pad_packed_sequence", unpack)
    return libraries
