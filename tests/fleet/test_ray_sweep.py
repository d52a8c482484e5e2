"""Sweeps on a real Ray cluster, whose nodes are processes of this machine, with a bucket on loopback as the cache."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from batchfinder.cli.main import main
from batchfinder.cli.parser import build_parser
from batchfinder.cli.sweep_request import read_request
from batchfinder.errors import InvalidValue
from batchfinder.fleet.ray_sweep import CellGroup, divide
from batchfinder.sizing.sweep_request import SweepRequest
from benchmarks.fleet_sweep import survive


def _request(*options: str) -> SweepRequest:
    words = ["sweep", "--engine", "ray", "--no-cache", *options]
    arguments: argparse.Namespace = build_parser().parse_args(words)
    return read_request(arguments)


def _node(alive: bool = True, **resources: float) -> dict[str, Any]:
    return {"Alive": alive, "Resources": {name.replace("__", ":"): value for name, value in resources.items()}}


def test_simulated_gpus_are_divided_as_far_as_there_are_cpus() -> None:
    """Each CPU gets a task: a model with all GPUs where models are many, with those of one age where they are few."""
    request = _request("--model", "bert-base", "--model", "gpt2", *[f"--gpu={gpu}" for gpu in ("h100", "t4", "k80")])

    def divided(cpus: float) -> list[tuple[str, ...]]:
        groups = divide(request, [_node(CPU=cpus), _node(False, CPU=64)])
        assert {group.model for group in groups} == {"bert-base", "gpt2"}
        return [tuple(card.name for card in group.request.place.cards) for group in groups if group.model == "gpt2"]

    assert divided(1) == [("K80", "T4", "H100 80GB")]
    assert divided(4) == [("K80", "T4"), ("H100 80GB",)]
    assert divided(100) == [("K80",), ("T4",), ("H100 80GB",)]


def test_measured_ones_are_placed_by_the_type_of_the_accelerator() -> None:
    """One task for each kind of GPU that is up, or for those named, each with that kind's own name in Ray."""
    nodes = [
        _node(CPU=4, accelerator_type__T4=1),
        _node(accelerator_type__A100=1),
        _node(False, accelerator_type__L4=1),
    ]

    def kinds(groups: list[CellGroup]) -> list[str]:
        assert not any(group.request.place.cards for group in groups)
        return [group.accelerator for group in groups]

    assert kinds(divide(_request("--device", "cuda", "--model", "gpt2"), nodes)) == ["A100", "T4"]
    assert kinds(divide(_request("--device", "cuda", "--model", "gpt2", "--gpu", "tesla t4"), nodes)) == ["T4"]
    with pytest.raises(InvalidValue, match="expected a GPU of the cluster, which has A100, T4"):
        divide(_request("--device", "cuda", "--gpu", "l4"), nodes)
    with pytest.raises(InvalidValue, match="which has none that Ray knows the type of"):
        divide(_request("--device", "cuda"), [_node(CPU=4)])


def test_what_the_cluster_does_not_do_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Options that need another engine, or other options, end with exit code 1 and say so."""
    for options, words in {
        "--address auto": "expected --engine ray with it",
        "--engine slurm": "expected one of here, ray",
        "--engine ray --device cpu --budget 1GiB": "expected simulated or cuda with --engine ray",
        "--engine ray --device cuda --instance p4d.24xlarge": "expected --gpu with --device cuda, or neither",
        "--engine ray --find seq-len": "expected here with --find seq-len",
    }.items():
        assert main(["sweep", "--no-cache", *options.split()]) == 1
        assert words in capsys.readouterr().err


def test_without_ray_its_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Where Ray is not installed the error names the extra, and nothing has been built."""
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["sweep", "--no-cache", "--engine", "ray"]) == 1
    said = capsys.readouterr().err
    assert "--engine ray needs ray" in said
    assert "batchfinder[ray]" in said


@pytest.mark.parametrize(
    ("version", "mode", "move"),
    [
        ("2.60.0", "disabled", "set"),
        ("2.58.1", None, "set"),
        ("2.51.0", "token", "install Ray 2.52 or later (2.51.0 is here) and set"),
    ],
)
@pytest.mark.parametrize("variable", [True, False])
def test_a_cluster_that_asks_for_no_token_is_not_started(
    version: str,
    mode: str | None,
    move: str,
    variable: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its ports would be open to the network: a sentence says how to get one with a token, and exit code is 1."""
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "__version__", version)
    monkeypatch.setenv("RAY_AUTH_MODE", mode) if mode else monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.setenv("RAY_ADDRESS", "local")
    address = [] if variable else ["--address", "local"]
    assert main(["sweep", "--no-cache", "--engine", "ray", "--gpu", "t4", *address]) == 1
    assert not ray.is_initialized()
    given = "missing" if variable else "invalid value 'local'"
    assert capsys.readouterr().err.endswith(
        f"batchfinder: --address: {given}; expected the address of a Ray cluster: one that is started here would run "
        f"the code of anyone who can reach this machine. To start one that asks for a token, "
        f"{move} RAY_AUTH_MODE=token.\n"
    )


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_sweep_survives_a_node_and_its_driver(tmp_path: Path) -> None:
    """With a node killed in the middle, and the driver killed and started again, the table is that of one machine.

    Nothing that was found is lost: it comes from the cache, and no record is put twice.
    """
    for package in ("ray", "s3fs", "moto.server"):
        pytest.importorskip(package)
    # A model has four cells: by the fifth, one of the tasks has ended.
    seen = survive(tmp_path, 2, ("t4", "l4"), kinds=("T4", "L4"), node_dies_after=1, driver_dies_after=5)
    assert seen["rows_before_the_driver_died"] == 5 <= seen["from_the_cache"]
    assert seen["rows_of_the_second_start"] == seen["rows_as_on_one_machine"] == seen["cells"] == 8
    assert seen["records_by_times_put"] == {"1": 8}


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_workers_run_no_module_of_the_working_folder(tmp_path: Path) -> None:
    """Which may have the name of one that Ray's workers import as they start."""
    pytest.importorskip("ray")
    for name in ("rich", "queue"):
        (tmp_path / f"{name}.py").write_text("open('ran', 'w').close()\n")
    script = "import sys; from batchfinder.cli.main import main; sys.exit(main(sys.argv[1:]))"
    words = ["sweep", "--engine", "ray", "--model", "bert-base", "--gpu", "t4", "--seq-len", "128", "--no-cache"]
    run = [sys.executable, "-P", "-c", script, *words]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=150)
    assert done.returncode == 0, done.stderr
    assert "bert-base" in done.stdout
    assert not (tmp_path / "ran").exists()
