from __future__ import annotations

import copy
import dataclasses
import enum
import json
import pickle
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchfinder.cache import CacheKey
from batchfinder.errors import InvalidValue

finite = st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | finite | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
mappings = st.dictionaries(st.text(), values, max_size=4)
integers = st.integers(0, 1 << 63)
STRATEGIES = {
    "str": st.text(),
    "bool": st.booleans(),
    "int": integers,
    "int | None": st.none() | integers,
    "float": finite,
    "Mapping[str, Json]": mappings,
}
NAMES = [item.name for item in dataclasses.fields(CacheKey)]
field_values = {item.name: STRATEGIES[item.type] for item in dataclasses.fields(CacheKey)}


@settings(derandomize=True, max_examples=60, deadline=None)
@given(data=st.data(), name=st.sampled_from(NAMES))
def test_any_field_changes_the_digest(data, name, fields):
    """Keys that differ in one field, whichever it is, have different digests; only equal keys have equal ones."""
    one, other = (CacheKey(**{**fields, name: data.draw(field_values[name])}) for _ in range(2))
    assert (one.digest == other.digest) == (one == other) == (repr(one) == repr(other))


@pytest.mark.parametrize("name", NAMES)
def test_each_field_changes_the_digest(name, fields, make_key):
    """No field is left out of the digest."""
    value = fields[name]
    other = (
        not value
        if isinstance(value, bool)
        else value + 1
        if isinstance(value, int | float)
        else value + "x"
        if isinstance(value, str)
        else 7
        if value is None
        else {**value, "one more": 1}
    )
    assert make_key(**{name: other}).digest != make_key().digest


@settings(derandomize=True, max_examples=60, deadline=None)
@given(st.fixed_dictionaries(field_values))
def test_a_key_survives_json(given_fields):
    """A key written as JSON and read back is the same key, with the same digest and hash."""
    key = CacheKey(**given_fields)
    back = CacheKey(**json.loads(json.dumps(key.as_dict())))
    assert (back, back.digest, hash(back)) == (key, key.digest, hash(key))


def test_the_digest_is_what_it_was(make_key):
    """The digest never changes by itself: a cache filled by an earlier version is still found."""
    assert make_key().digest == "b1e2ec8a234b67c29e2e41203506d5e28e88664c2bdd91ef9ccef55719dd4b27"


def test_the_digest_is_the_same_in_another_process(make_key):
    """The digest does not depend on the process's hash seed or on the order of a mapping."""
    fields = {**make_key().as_dict(), "versions": dict(reversed(make_key().versions.items()))}
    code = f"from batchfinder.cache import CacheKey; print(CacheKey(**{fields}).digest)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == make_key().digest


def test_equal_numbers_make_equal_keys(make_key):
    """1 and 1.0, 0.0 and -0.0, and a tuple and a list of the same items are the same value; True and 1 are not."""
    one = make_key(tolerance=0, optimizer_options={"lr": 1, "eps": 0.0, "betas": [0.9, 1]})
    other = make_key(tolerance=-0.0, optimizer_options={"betas": (0.9, 1.0), "eps": -0.0, "lr": 1.0})
    assert (one, one.digest) == (other, other.digest)
    assert make_key(extra={"fused": True}) != make_key(extra={"fused": 1})
    assert make_key(extra={"fused": True}).digest != make_key(extra={"fused": 1}).digest
    assert make_key() != make_key().digest


def test_nothing_runs_together(make_key):
    """Text moved from one field or item into its neighbour makes another key."""
    digests = {
        make_key(model="ab", gpu="c").digest,
        make_key(model="a", gpu="bc").digest,
        make_key(extra={"a": "b", "c": "d"}).digest,
        make_key(extra={"a": 'b","c":"d'}).digest,
        make_key(extra={"a": ["b", "c"]}).digest,
        make_key(extra={"a": "['b', 'c']"}).digest,
        make_key(extra={"a": None}).digest,
        make_key(extra={"a": "null"}).digest,
        make_key(extra={}).digest,
    }
    assert len(digests) == 9


def test_a_key_keeps_its_own_copy(make_key):
    """Changing a mapping after it was given does not change the key."""
    betas = [0.9, 0.999]
    options = {"betas": betas}
    key = make_key(optimizer_options=options)
    before = key.digest
    betas.append(1)
    options["lr"] = 1
    assert key.digest == before


def test_a_key_goes_to_another_process(make_key):
    """A key can be copied and pickled, as sending it to a child process does."""
    key = make_key()
    assert pickle.loads(pickle.dumps(key)) == copy.deepcopy(key) == key
    assert {key: 1}[copy.deepcopy(key)] == 1


class _Opaque:
    def __repr__(self) -> str:
        return "<opaque>"


class _Colour(enum.Enum):
    RED = 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": 3}, "cache key's model: invalid value 3; expected text."),
        ({"seq_len": "128"}, "cache key's seq_len: invalid value '128'; expected a whole number or None."),
        ({"total_bytes": 1.5}, "cache key's total_bytes: invalid value 1.5; expected a whole number."),
        ({"accumulation": True}, "cache key's accumulation: invalid value True; expected a whole number."),
        (
            {"gradient_checkpointing": 1},
            "cache key's gradient_checkpointing: invalid value 1; expected True or False.",
        ),
        ({"tolerance": "1%"}, "cache key's tolerance: invalid value '1%'; expected a number."),
        (
            {"tolerance": float("nan")},
            "cache key's tolerance: invalid value nan; "
            "expected a finite number, text, True, False, None, a list or a mapping.",
        ),
        (
            {"extra": [1]},
            "cache key's extra: invalid value [1]; "
            "expected a mapping of names to numbers, text, True, False, None, lists or mappings.",
        ),
        (
            {"optimizer_options": {"betas": [0.9, _Opaque()]}},
            "cache key's optimizer_options.betas[1]: invalid value <opaque>; "
            "expected a finite number, text, True, False, None, a list or a mapping.",
        ),
        (
            {"extra": {"colour": _Colour.RED}},
            "cache key's extra.colour: invalid value <_Colour.RED: 1>; "
            "expected a finite number, text, True, False, None, a list or a mapping.",
        ),
        ({"extra": {"a": {1: 2}}}, "cache key's extra.a, a name in it: invalid value 1; expected text."),
    ],
)
def test_what_has_no_stable_text_is_refused(changes, message, make_key):
    """A value of the wrong kind, or one whose text could differ between runs, is refused by the name of its place."""
    with pytest.raises(InvalidValue) as caught:
        make_key(**changes)
    assert str(caught.value) == message


def test_nothing_can_be_forgotten(fields):
    """Every field but `extra` must be given."""
    for name in set(fields) - {"extra"}:
        with pytest.raises(TypeError, match=f"missing 1 required keyword-only argument: '{name}'"):
            CacheKey(**{other: value for other, value in fields.items() if other != name})
