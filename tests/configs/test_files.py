"""Tests of batchfinder/configs/files.py."""

from __future__ import annotations

import pytest

from batchfinder.configs import read_mapping, with_number

YAML = """\
# a recipe
model: gpt2   # 4 heads of 4
micro: 4 # samples
train: {steps: 4, micro: 4}
steps:
list:
  - 4
  - 5
"""


@pytest.mark.parametrize(
    ("name", "text", "key", "changed"),
    [
        ("a.yaml", YAML, "micro", YAML.replace("micro: 4 #", "micro: 12 #")),
        ("a.yml", YAML, "train.micro", YAML.replace("micro: 4}", "micro: 12}")),
        ("a.yaml", YAML, "list.1", YAML.replace("5", "12")),
        ("a.toml", "# kept\n[a]\nn=8\n[b]\n n = 8 # here\n", "b.n", "# kept\n[a]\nn=8\n[b]\n n = 12 # here\n"),
        ("a.json", '{"a": [0.9, 8],\r\n\t"n": 8}', "n", '{"a": [0.9, 8],\r\n\t"n": 12}'),
    ],
)
def test_only_the_number_changes(name: str, text: str, key: str, changed: str) -> None:
    """Comments, order, quotes, ends of lines and equal numbers stay."""
    assert with_number(text, name, key, 12) == changed


@pytest.mark.parametrize(
    ("name", "text", "key", "beside", "changed"),
    [
        ("a.yaml", YAML, "accumulation", "micro", YAML.replace("# samples\n", "# samples\naccumulation: 12\n")),
        ("a.yaml", YAML, "steps", "micro", YAML.replace("steps:\n", "steps: 12\n")),
        ("a.yaml", "micro: 4", "steps", "micro", "micro: 4\nsteps: 12"),
        ("a.yaml", "t:\r\n  micro: 4\r\n", "t.steps", "t.micro", "t:\r\n  micro: 4\r\n  steps: 12\r\n"),
        ("a.toml", "[t]\n  n = 8 # here\n", "t.m", "t.n", "[t]\n  n = 8 # here\n  m = 12\n"),
        ("a.json", '{\n  "n": 8\n}\n', "m", "n", '{\n  "m": 12,\n  "n": 8\n}\n'),
        ("a.json", '{"x": {"n": 8}}', "x.m", "x.n", '{"x": {"m": 12, "n": 8}}'),
    ],
)
def test_a_number_is_added_beside_another(name: str, text: str, key: str, beside: str, changed: str) -> None:
    """Where its key has no value, or else in a line of its own with the indentation of the other."""
    assert with_number(text, name, key, 12, beside) == changed


@pytest.mark.parametrize(
    ("key", "beside"), [("model", "micro"), ("none", ""), ("model.x", "micro"), ("train", "micro"), ("x.y", "micro")]
)
def test_a_key_of_no_number(key: str, beside: str) -> None:
    """What is no number is not replaced by one, and nothing is added where there is no place for it."""
    with pytest.raises(KeyError):
        with_number(YAML, "a.yaml", key, 12, beside)


@pytest.mark.parametrize(("text", "name"), [("n: &x 4\nm: *x\n", "a.yaml"), ("n: 0b100\n", "a.yaml")])
def test_a_number_that_is_not_written_as_such(text: str, name: str) -> None:
    """Another one under an anchor would change elsewhere too; one in base two has no digits of its own."""
    with pytest.raises(ValueError, match="plain number"):
        with_number(text, name, "n", 12)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.yaml", "a: [", "expected"),
        ("a.json", "{", "Expecting"),
        ("a.toml", "a = ", "value"),
        ("a.yaml", "- 1", "not a mapping"),
        ("a.ini", "a=1", "ends in none of .yaml"),
        ("a.yaml", "a: !!python/name:os.system\n", "could not determine a constructor"),
    ],
)
def test_what_cannot_be_read(name: str, text: str, said: str) -> None:
    """Why is said in one line."""
    with pytest.raises(ValueError, match=said) as caught:
        read_mapping(text, name)
    assert "\n" not in str(caught.value)
