"""Everything that changes the answer, and the digest that names its record."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TypeAlias, cast

from batchfinder.errors import InvalidValue

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"

_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "str": ((str,), "text"),
    "bool": ((bool,), "True or False"),
    "int": ((int,), "a whole number"),
    "int | None": ((int, type(None)), "a whole number or None"),
    "float": ((int, float), "a number"),
    "Mapping[str, Json]": ((Mapping,), "a mapping of names to numbers, text, True, False, None, lists or mappings"),
}


@dataclass(frozen=True, kw_only=True, eq=False)  # the generated __eq__ takes True for 1; the digest does not
class CacheKey:
    """Everything that changes the answer. All but `extra` must be given, so that nothing is forgotten.

    Numbers are compared by value: 1 and 1.0 make the same key, as do 0.0 and -0.0. Mappings are copied.

    Attributes:
        model: the fingerprint of structure, shapes, dtypes and which parameters train.
        usable_bytes: what of it the search could use: the budget less the context.
        precision: as the caller spells it: `fp32`, `bf16-mixed`, ...
        optimizer_options: those that change its memory, as `models.fingerprint.fingerprint_optimizer` has them.
        attention: `eager`, `sdpa`, `flash`, or empty for the model's own.
        accumulation: micro-batches per optimizer step in the probed step.
        allocator: settings of the caching allocator (`PYTORCH_CUDA_ALLOC_CONF`).
        floor: the smallest size that was of interest.
        multiple_of: the search's granularity; 1 for any size.
        tolerance: the gap at which the search may end, as a fraction; 0 for exact.
        headroom_bytes: what had to stay free.
        source: `simulated` or `measured`.
        versions: versions of the libraries that took part, batchfinder's own included.
    """

    model: str
    gpu: str
    total_bytes: int
    usable_bytes: int
    seq_len: int | None
    mode: str
    precision: str
    optimizer: str
    optimizer_options: Mapping[str, Json]
    attention: str
    gradient_checkpointing: bool
    accumulation: int
    allocator: Mapping[str, Json]
    max_batch_size: int | None
    floor: int
    multiple_of: int
    tolerance: float
    headroom_bytes: int
    source: str
    versions: Mapping[str, Json]
    extra: Mapping[str, Json] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check and copy every field.

        Raises:
            InvalidValue: a field's value is of the wrong kind, or holds something whose text is not stable (a `dtype`,
                a function, NaN): name it with text of your own instead.
        """
        for item in fields(self):
            value, where = getattr(self, item.name), f"cache key's {item.name}"
            kinds, expected = _KINDS[cast(str, item.type)]
            if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
                raise InvalidValue(where, value, expected)
            object.__setattr__(self, item.name, _plain(value, where))

    def __eq__(self, other: object) -> bool:
        return self.digest == other.digest if isinstance(other, CacheKey) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.digest)

    def as_dict(self) -> dict[str, Json]:
        """Every field by name, as JSON has it; `CacheKey(**key.as_dict()) == key`."""
        return {item.name: getattr(self, item.name) for item in fields(self)}

    def differences(self, other: CacheKey) -> dict[str, tuple[Json, Json]]:
        """What stands in this key and in another one, by the names of the fields (`versions.torch`) that differ."""
        pairs: list[tuple[str, Json, Json]] = [
            (item.name, getattr(self, item.name), getattr(other, item.name)) for item in fields(self)
        ]
        differing: dict[str, tuple[Json, Json]] = {}
        while pairs:
            name, mine, theirs = pairs.pop()
            if isinstance(mine, Mapping) and isinstance(theirs, Mapping):
                pairs += [(f"{name}.{key}", mine.get(key), theirs.get(key)) for key in {*mine, *theirs}]
            elif canonical_json(mine) != canonical_json(theirs):
                differing[name] = (mine, theirs)
        return dict(sorted(differing.items()))

    @property
    def digest(self) -> str:
        """64 hexadecimal digits that change with any field and are the same on every machine."""
        return hashlib.sha256(canonical_json(self.as_dict()).encode()).hexdigest()


def canonical_json(value: Json) -> str:
    """Write JSON in the one way that equal values share: names sorted, no spaces, ASCII, no NaN.

    Raises:
        ValueError: a number is not finite.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _plain(value: object, where: str) -> Json:
    """Copy a value into plain JSON types, with one spelling for equal numbers."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return int(value) if value.is_integer() else value
    if isinstance(value, list | tuple):
        return tuple(_plain(item, f"{where}[{index}]") for index, item in enumerate(value))
    if isinstance(value, Mapping):
        # A name that is not text would be turned into text by JSON, and 1 and "1" would share a record.
        for name in value:
            if not isinstance(name, str):
                raise InvalidValue(f"{where}, a name in it", name, "text")
        return {name: _plain(value[name], f"{where}.{name}") for name in sorted(value)}
    raise InvalidValue(where, value, "a finite number, text, True, False, None, a list or a mapping")
