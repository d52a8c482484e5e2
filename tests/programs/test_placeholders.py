"""Sizes in commands and in config files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from batchfinder.errors import InvalidValue
from batchfinder.programs import CommandTemplate, ConfigPlace
from batchfinder.programs.placeholders import filled

YAML = """\
# the recipe
model: gpt2          # 8 layers
train:
  batch_size: 8      # for 24 GB
  steps: 8
eval:
  batch_size: 8
"""


def test_numbers_take_the_place_of_names() -> None:
    """Other braces stay: they are Hydra's, a shell's or JSON's."""
    values = {"batch_size": 12, "accumulation": 4}
    assert filled("--bs={batch_size}", values) == "--bs=12"
    assert filled('{"bs": {batch_size}, "x": {y}, "n": {seq_len}}', values) == '{"bs": 12, "x": {y}, "n": {seq_len}}'


@pytest.mark.parametrize(
    ("name", "text", "key", "changed"),
    [
        ("cfg.yaml", YAML, "train.batch_size", YAML.replace("batch_size: 8  ", "batch_size: 32  ")),
        ("cfg.yml", YAML, "eval.batch_size", f"{YAML[: YAML.rindex('8')]}32\n"),
        ("cfg.toml", "# kept\n[a]\nn = 8\n[b]\nn = 8 # here\n", "b.n", "# kept\n[a]\nn = 8\n[b]\nn = 32 # here\n"),
        ("cfg.json", '{"a": [8, 8], "n": 8}', "a.1", '{"a": [8, 32], "n": 8}'),
    ],
)
def test_one_number_of_a_file_changes(tmp_path: Path, name: str, text: str, key: str, changed: str) -> None:
    """Comments and the rest stay as they are, equal numbers too."""
    (tmp_path / name).write_text(text)
    ConfigPlace.parse(f"{name}:{key}").write(tmp_path, 32)
    assert (tmp_path / name).read_text() == changed


@pytest.mark.parametrize("key", ["train.nothing", "model", "train", "train.batch_size.more"])
def test_a_key_of_no_number(tmp_path: Path, key: str) -> None:
    """It is named, and the file stays as it was."""
    (tmp_path / "cfg.yaml").write_text(YAML)
    with pytest.raises(InvalidValue, match=f"cfg.yaml:{key}"):
        ConfigPlace.parse(f"cfg.yaml:{key}").write(tmp_path, 32)
    assert (tmp_path / "cfg.yaml").read_text() == YAML


def test_a_file_that_is_not_there_or_cannot_be_read(tmp_path: Path) -> None:
    """The message has its name."""
    (tmp_path / "cfg.json").write_text("{")
    for name in ("cfg.json", "cfg.toml"):
        with pytest.raises(InvalidValue, match=name):
            ConfigPlace.parse(f"{name}:n").write(tmp_path, 1)


def test_a_file_elsewhere_is_not_written(tmp_path: Path) -> None:
    """Neither by its whole path nor through a link: a command in a scratch copy would read another."""
    (tmp_path / "cfg.json").write_text('{"n": 8}')
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy/link.json").symlink_to(tmp_path / "cfg.json")
    for file in (str(tmp_path / "cfg.json"), "../cfg.json", "link.json"):
        with pytest.raises(InvalidValue, match="in the folder"):
            ConfigPlace.parse(f"{file}:n").write(tmp_path / "copy", 9)
    assert (tmp_path / "cfg.json").read_text() == '{"n": 8}'


@pytest.mark.parametrize("text", ["cfg.yaml", ":n", "cfg.yaml:", "cfg.yaml:n={rows}", "cfg.ini:n"])
def test_what_is_no_place(text: str) -> None:
    """FILE:KEY, with a placeholder that there is, in a format that is read."""
    with pytest.raises(InvalidValue, match="--in"):
        ConfigPlace.parse(text)


def test_a_place_says_what_it_is_for() -> None:
    """The batch size, unless it says otherwise."""
    assert ConfigPlace.parse("a.yaml:n").placeholder == "batch_size"
    assert ConfigPlace.parse("C:/a.yaml:n={accumulation}") == ConfigPlace("C:/a.yaml", "n", "accumulation")


def test_a_command_needs_a_place_for_the_batch_size() -> None:
    """Among its arguments, in a variable or in a config file."""
    with pytest.raises(InvalidValue, match="a place for the batch size"):
        CommandTemplate(("python", "train.py"))
    CommandTemplate(("python", "train.py"), {"BS": "{batch_size}"})
    CommandTemplate(("python", "train.py"), config=(ConfigPlace.parse("a.yaml:n"),))
    with pytest.raises(InvalidValue, match="--target-batch-size"):
        CommandTemplate(("python", "train.py", "{batch_size}", "{accumulation}"))


def test_json_stays_json(tmp_path: Path) -> None:
    """A number within a string is no number."""
    (tmp_path / "a.json").write_text('{"name": "run 8", "n": 8}')
    ConfigPlace.parse("a.json:n").write(tmp_path, 9)
    assert json.loads((tmp_path / "a.json").read_text()) == {"name": "run 8", "n": 9}
