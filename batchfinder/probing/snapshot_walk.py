"""Everything that can be reached from some objects, written down once each and put back in place."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from batchfinder.probing.snapshot_contents import (
    ArrayRecord,
    BytesRecord,
    CellRecord,
    DequeRecord,
    ListRecord,
    MappingRecord,
    ObjectRecord,
    RandomRecord,
    Record,
    SetRecord,
    attributes_of,
)
from batchfinder.probing.snapshot_kinds import GUARDS, Kind, has_state_of_its_own, kind_of
from batchfinder.probing.snapshot_tensors import PLAIN, StorageRecord, TensorRecord

_RECORDS: dict[Kind, type[Any]] = {
    Kind.MAPPING: MappingRecord,
    Kind.LIST: ListRecord,
    Kind.SET: SetRecord,
    Kind.DEQUE: DequeRecord,
    Kind.BYTES: BytesRecord,
    Kind.ARRAY: ArrayRecord,
    Kind.RANDOM: RandomRecord,
    Kind.CELL: CellRecord,
    Kind.OBJECT: ObjectRecord,
}
_FOLLOWED_FROM_A_DATASET = (Kind.OBJECT, Kind.UNGUARDED, Kind.DATASET, Kind.RANDOM)
_LIBRARIES = ("torch.", "numpy.", "functools", "contextlib")


class Walk:
    """One walk over the graph of objects; what it remembers ends with it, what it wrote down stays in its lists.

    Args:
        roots: where to start. They are captured by value whatever their class.
        left_alone: objects to leave as they are, and classes whose objects to leave.

    Attributes:
        records: what containers and objects held; objects first, so that an element's hash is itself again before a
            set is refilled.
        tensors: the tensors.
        storages: the storages.
        left_out: classes of objects met that may change and cannot be wound back.
        reached: identities of the objects whose attributes were written down, and which the records keep alive.
    """

    def __init__(self, roots: Iterable[Any], left_alone: Iterable[Any]) -> None:
        self.tensors: list[TensorRecord] = []
        self.left_out: set[str] = set()
        self.reached: set[int] = set()
        self._objects: list[Record] = []
        self._containers: list[Record] = []
        self._storages: dict[int, StorageRecord] = {}
        self._tensors: dict[int, TensorRecord] = {}
        self._kinds: dict[type, Kind] = {}
        left_alone = list(left_alone)
        self._classes = tuple(item for item in left_alone if isinstance(item, type))
        # What has been met, held so that no id is given to another object before the walk is over.
        self._met: dict[int, Any] = {id(item): item for item in left_alone}
        self._pending: list[tuple[Kind, Any]] = []
        for root in roots:
            self._start(root)
        while self._pending:
            self._record(*self._pending.pop())

    @property
    def records(self) -> list[Record]:
        return [*self._objects, *self._containers]

    @property
    def storages(self) -> list[StorageRecord]:
        return list(self._storages.values())

    def refer(self, item: Any) -> Any:
        """What stands for an object in a record; it is written down as well, if it was not met before."""
        kind = self._kinds.get(type(item)) or self._learn(type(item))
        if kind is Kind.ATOM:
            return item
        if kind is Kind.TENSOR:
            return self._tensor(item)
        if id(item) not in self._met:
            self._met[id(item)] = item
            self._pending.append((kind, item))
        return item

    def _learn(self, cls: type) -> Kind:
        kind = Kind.ATOM if issubclass(cls, self._classes) else kind_of(cls)
        self._kinds[cls] = kind
        return kind

    def _start(self, root: Any) -> None:
        kind = self._kinds.get(type(root)) or self._learn(type(root))
        if kind in (Kind.UNGUARDED, Kind.LEFT_OUT) and id(root) not in self._met:
            self._met[id(root)] = root
            self._pending.append((Kind.OBJECT, root))
        else:
            self.refer(root)

    def _record(self, kind: Kind, item: Any) -> None:
        """Write down one object that was not met before."""
        if kind is Kind.UNGUARDED:
            guarded = any(issubclass(type(value), GUARDS) for value in (attributes_of(item) or {}).values())
            kind = Kind.LEFT_OUT if guarded else Kind.OBJECT
        if kind is Kind.LEFT_OUT:
            self.left_out.add(f"{type(item).__module__}.{type(item).__qualname__}")
        elif kind is Kind.DATASET:
            self._objects.append(ObjectRecord(item, self._refer_unless_bulk))
        elif kind in _RECORDS:
            self._append(kind, item)
        else:
            for part in _parts(kind, item):
                self.refer(part)
        if kind is Kind.OBJECT and issubclass(type(item), torch.jit.ScriptModule):
            self.left_out.add("torch.jit.ScriptModule")
            for tensor in (*item.parameters(), *item.buffers()):
                self.refer(tensor)

    def _append(self, kind: Kind, item: Any) -> None:
        if kind is Kind.CELL and not _is_filled(item):
            return
        record = _RECORDS[kind](item, self.refer)
        if kind is Kind.OBJECT:
            self._objects.append(record)
            self.reached.add(id(item))
            return
        self._containers.append(record)
        if kind is not Kind.CELL and has_state_of_its_own(type(item)):
            self._objects.append(ObjectRecord(item, self.refer))

    def _tensor(self, tensor: torch.Tensor) -> TensorRecord:
        record = self._tensors.get(id(tensor))
        if record is None:
            self._met[id(tensor)] = tensor
            # Known before its attributes are followed: a tensor may be its own attribute.
            record = self._tensors[id(tensor)] = TensorRecord.__new__(TensorRecord)
            record.__init__(tensor, self.refer, self._storage)  # type: ignore[misc]
            self.tensors.append(record)
            if type(tensor) not in PLAIN:
                self._objects.append(ObjectRecord(tensor, self.refer))
        return record

    def _storage(self, storage: torch.UntypedStorage) -> StorageRecord:
        key = storage._cdata
        if key not in self._storages:
            self._storages[key] = StorageRecord(storage)
        return self._storages[key]

    def _refer_unless_bulk(self, item: Any) -> Any:
        kind = self._kinds.get(type(item)) or self._learn(type(item))
        return self.refer(item) if kind in _FOLLOWED_FROM_A_DATASET else item


def _parts(kind: Kind, item: Any) -> Iterable[Any]:
    """What an object that is not captured itself holds."""
    if kind is Kind.TUPLE:
        base: Any = tuple if isinstance(item, tuple) else frozenset
        return list(base.__iter__(item))
    if kind is Kind.PARTIAL:
        return (item.func, item.args, item.keywords)
    if kind is Kind.METHOD:
        return (item.__func__, item.__self__)
    library = (item.__module__ or "").startswith(_LIBRARIES)
    return () if library else item.__closure__ or ()


def _is_filled(cell: Any) -> bool:
    """Whether the variable of a closure has a value."""
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
