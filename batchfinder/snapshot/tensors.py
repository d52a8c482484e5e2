"""Tensors, recorded and put back in place: storage, shape, type, flags, gradient and hooks.

Contents are copied to the host, once per storage. A plain tensor and its storage are held weakly, so what a step frees
is freed, and a probe measures the memory that training would take. If nothing else holds it at the end, an equal new
tensor takes its place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.weak import TensorWeakRef

PLAIN = (torch.Tensor, torch.nn.Parameter)


class StorageRecord:
    """The bytes of one storage, shared by any number of tensors.

    Attributes:
        nbytes: its size, and that of the copy on the host.
        held: the storage, while a restoration is under way.
    """

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.device = storage.device
        self.held: torch.UntypedStorage | None = None
        self._weak = StorageWeakRef(storage)
        self._size = storage.nbytes()
        # A meta tensor has no contents; `copy=True` makes a CPU storage count like any other.
        self._copy = None if self.device.type == "meta" else _view(storage).to("cpu", copy=True)
        self.nbytes = 0 if self._copy is None else self._size

    def hold(self) -> torch.UntypedStorage:
        """The storage, or a new one where it was freed."""
        if self.held is None:
            alive = torch.UntypedStorage._new_with_weak_ptr(self._weak.cdata)
            self.held = torch.UntypedStorage(self._size, device=self.device) if alive is None else alive
            if alive is None:
                self._weak = StorageWeakRef(self.held)
        return self.held

    def restore(self) -> None:
        """Write the bytes back; a CPU storage that has them already is not touched, as it may be read-only."""
        if self._copy is None:
            return
        storage = self.hold()
        if storage.nbytes() != self._size:  # FSDP frees what it has gathered by a size of 0
            storage.resize_(self._size)
        if self._size == 0:
            return
        now = _view(storage)
        if self.device.type == "cpu":
            by_eight = self._size % 8 == 0 and now.data_ptr() % 8 == 0
            dtype = torch.int64 if by_eight else torch.uint8
            if torch.equal(now.view(dtype), self._copy.view(dtype)):
                return
        now.copy_(self._copy)


class TensorRecord:
    """One tensor.

    Attributes:
        held: the tensor, while a restoration is under way.
        nbytes: host memory taken by a copy of this tensor's own (one without a storage, such as a sparse one).
    """

    def __init__(
        self,
        tensor: torch.Tensor,
        visit: Callable[[Any], Any],
        storages: dict[int, StorageRecord],
    ) -> None:
        self.held: Any = None
        self._class = type(tensor)
        self._attributes = visit(vars(tensor))
        self._leaf = tensor.is_leaf
        self._requires_grad = tensor.requires_grad
        self._has_grad = self._leaf or tensor.retains_grad
        self._grad = visit(tensor.grad) if self._has_grad else None
        self._hooks = visit(tensor._backward_hooks)
        self._late_hooks = visit(tensor._post_accumulate_grad_hooks)
        self._version = None if tensor.is_inference() else tensor._version
        self._dtype, self._device = tensor.dtype, tensor.device
        wrapper = is_traceable_wrapper_subclass(tensor)
        strided = tensor.layout is torch.strided and not wrapper and torch._C._has_storage(tensor)
        self._storage: StorageRecord | None = None
        if strided:
            storage = tensor.untyped_storage()
            self._storage = storages.get(storage._cdata) or StorageRecord(storage)
            storages[storage._cdata] = self._storage
        self._copy = None if strided or wrapper else tensor.detach().to("cpu", copy=True)
        if self._copy is None:
            self.nbytes = 0
        elif self._copy.layout is torch.sparse_coo:
            self.nbytes = self._copy._indices().nbytes + self._copy._values().nbytes
        else:
            self.nbytes = self._copy.nbytes if self._copy.layout is torch.strided else self._copy.to_dense().nbytes
        if strided:
            self._shape = (tensor.storage_offset(), torch.Tensor.size(tensor), tensor.stride())
            self._bits = (tensor.is_conj(), tensor.is_neg())
        plain = self._class in PLAIN and strided and tensor.grad_fn is None and not tensor._is_view()
        self._weak = TensorWeakRef(tensor)
        self._strong = None if plain and self._hooks is None and self._late_hooks is None else tensor

    def hold(self) -> None:
        """Hold the tensor, or an empty one in its place where it was freed."""
        self.held = self._weak() if self._strong is None else self._strong
        if self.held is None:
            data = torch.empty(0, dtype=self._dtype, device=self._device)
            self.held = torch.Tensor._make_subclass(self._class, data, self._requires_grad)
            self.held.__dict__ = self._attributes
            self._weak = TensorWeakRef(self.held)

    def clear(self) -> None:
        """Drop what the step attached: a gradient, a graph."""
        tensor = self.held
        if self._leaf and not tensor.is_leaf and not tensor._is_view():
            tensor.detach_()
        grad = None if self._grad is None else self._grad.held
        if self._has_grad and tensor.is_leaf and tensor.grad is not grad:
            tensor.grad = None

    def restore_data(self) -> None:
        """Restore the class, and the view of the storage."""
        tensor = self.held
        if type(tensor) is not self._class:  # as a lazy parameter changes its own when it learns its shape
            tensor.__class__ = self._class
        if self._copy is not None:
            tensor.data = self._copy.to(self._device, copy=True)
        elif self._storage is not None:
            storage = self._storage.hold()
            if not (
                tensor.dtype is self._dtype
                and tensor.device == self._device
                and (tensor.storage_offset(), torch.Tensor.size(tensor), tensor.stride()) == self._shape
                and (tensor.is_conj(), tensor.is_neg()) == self._bits
                and tensor.untyped_storage()._cdata == storage._cdata
            ):
                data = torch.empty(0, dtype=self._dtype, device=self._device).set_(storage, *self._shape)
                data = data.conj() if self._bits[0] else data
                tensor.data = torch._neg_view(data) if self._bits[1] else data

    def restore_flags(self) -> None:
        """Restore requires_grad, the gradient, hooks and the version; once every tensor has its data."""
        tensor = self.held
        if tensor.is_leaf and tensor.requires_grad is not self._requires_grad:
            tensor.requires_grad_(self._requires_grad)
        grad = None if self._grad is None else self._grad.held
        if self._has_grad and tensor.grad is not grad:
            tensor.grad = grad
        if tensor._backward_hooks is not self._hooks:
            tensor._backward_hooks = self._hooks
        if tensor._post_accumulate_grad_hooks is not self._late_hooks:
            tensor._post_accumulate_grad_hooks = self._late_hooks
        if self._version is not None and tensor._version != self._version:
            set_versions: Any = torch._C._autograd._unsafe_set_version_counter
            try:
                set_versions((tensor,), (self._version,))
            except TypeError:  # one tensor at a time, in PyTorch 2.6
                set_versions(tensor, self._version)


def _view(storage: torch.UntypedStorage) -> torch.Tensor:
    """All of a storage as bytes; writing to it moves no version counter but its own."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
