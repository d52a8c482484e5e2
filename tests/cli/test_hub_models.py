"""Models of the Hugging Face Hub on the command line, which `--offline` leaves alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.models.hub_server import BERT, Hub, Repository, serving

MAIN = "import sys; from batchfinder.cli.main import main; sys.exit(main(sys.argv[1:]))"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    """A Hub with one model."""
    with serving(tmp_path / "home") as found:
        found.repositories["some/bert"] = Repository({"config.json": BERT})
        yield found


@pytest.mark.parametrize("command", ["sweep", "estimate", "profile", "plan", "check"])
def test_a_wrong_id_is_told_before_anything_is_built(hub: Hub, command: str) -> None:
    """By every command that builds models; with --offline without asking."""
    target = ["--target-batch-size", "8"] if command == "plan" else []
    _, err, _ = hub.run(MAIN, command, "some/brt", *target)
    assert err.startswith("batchfinder: unknown model 'some/brt'. There is no such folder here, and http://127.0.0.1:")
    assert err.count("\n") == 1
    hub.asked.clear()
    _, err, _ = hub.run(MAIN, command, "some/brt", *target, "--offline")
    assert err.startswith("batchfinder: no config.json of 'some/brt': it is not in the local cache (")
    assert err.count("\n") == 1
    assert hub.asked == []


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_model_of_the_hub_is_its_config_json(hub: Hub, tmp_path: Path) -> None:
    """The same estimate as of the file; the second time without the Hub."""
    (tmp_path / "config.json").write_bytes(BERT)

    def peak(model: str, *options: str) -> int:
        out, err, _ = hub.run(MAIN, "estimate", model, "--gpu", "t4", "--json", *options)
        assert [line for line in err.splitlines() if not line.startswith(("building ", "recording "))] == []
        total: int = json.loads(out)["peak_bytes"]
        return total

    of_file = peak(str(tmp_path / "config.json"))
    assert hub.asked == []
    assert peak("some/bert") == of_file
    assert {name for _, name, _ in hub.asked} == {"/some/bert/resolve/main/config.json"}
    hub.asked.clear()
    assert peak("some/bert", "--offline") == of_file
    assert hub.asked == []
