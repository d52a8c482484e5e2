"""Sweeps on a real Ray cluster, whose nodes are processes of this machine, with a bucket on loopback as the cache."""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from batchfinder.cli.main import main
from batchfinder.cli.parser import build_parser
from batchfinder.cli.sweep_request import SweepRequest, read_request
from batchfinder.errors import InvalidValue
from batchfinder.fleet.ray_sweep import CellGroup, divide

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
GPUS = ("t4", "l4")
LENGTHS = (16, 40)


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


@pytest.fixture
def puts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """An S3 server with a bucket called `lab`; how often each object was put."""
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=True)
    counted: Counter[str] = Counter()

    class Count(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if put := re.search(r"PUT /lab/(\S+?)(\?\S*)? ", record.getMessage()):
                counted[put[1]] += 1

    handler, log = Count(), logging.getLogger("werkzeug")
    log.addHandler(handler)
    server.start()
    host, port = server.get_host_and_port()
    settings = {"AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    for name, value in {**settings, "AWS_DEFAULT_REGION": "us-east-1"}.items():
        monkeypatch.setenv(name, value)
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    s3fs.S3FileSystem().mkdir("lab")
    counted.clear()
    yield counted
    server.stop()
    log.removeHandler(handler)
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, puts: Counter[str]) -> Iterator[tuple[str, Callable[[], None]]]:
    """A cluster of a head and two nodes of one CPU and a pretended GPU each: its address, and what kills one node."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, sys.path)]))
    ended_by = signal.getsignal(signal.SIGTERM)
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as folder:  # short: sockets
        made = Cluster(True, head_node_args={"num_cpus": 0, "include_dashboard": False, "temp_dir": folder})
        try:
            kinds = [{f"accelerator_type:{kind}": 1} for kind in ("T4", "L4")]
            nodes = [made.add_node(num_cpus=1, num_gpus=1, resources=kind) for kind in kinds]
            yield made.address, lambda: made.remove_node(nodes.pop(), allow_graceful=False)
        finally:
            made.shutdown()
            signal.signal(signal.SIGTERM, ended_by)


def _answers(printed: str) -> list[dict[str, Any]]:
    """The rows without what differs from run to run."""
    rows = json.loads(printed)["rows"]
    return [
        {name: row[name] for name in row if name not in ("seconds", "source", "trials", "failed_trials")}
        for row in rows
    ]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_sweep_survives_a_node_and_its_driver(
    cluster: tuple[str, Callable[[], None]], puts: Counter[str], tmp_path: Path
) -> None:
    """With a node killed in the middle, and the driver killed and started again, the table is that of one machine.

    Nothing that was found is lost: it comes from the cache, and no cell is computed twice.
    """
    address, kill_node = cluster
    config = {"model_type": "bert", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    for number in range(2):
        (tmp_path / f"m{number}").mkdir()
        (tmp_path / f"m{number}" / "config.json").write_text(json.dumps({**config, "vocab_size": 500 + number}))
    options = ["--model=m0", "--model=m1", *[f"--gpu={gpu}" for gpu in GPUS], *[f"--seq-len={n}" for n in LENGTHS]]
    command = [sys.executable, "-m", "batchfinder", "sweep", "--json", *options]
    on_ray = [*command, "--engine", "ray", "--address", address, "--cache", "s3://lab/cache"]
    settings: Any = {"cwd": tmp_path, "text": True, "env": {**os.environ, "BATCHFINDER_CACHE": str(tmp_path / "cache")}}
    with subprocess.Popen(on_ray, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, **settings) as driver:
        assert driver.stderr is not None
        found = (line for line in driver.stderr if line.startswith("["))
        assert next(found)
        kill_node()
        assert len(list(islice(found, 4))) == 4  # five in all, and a model has four: of both
        driver.kill()
    again = subprocess.run(on_ray, capture_output=True, check=True, **settings)
    assert again.stdout.startswith("{"), again.stdout[:2000]
    rows = json.loads(again.stdout)["rows"]
    assert sum(row["source"] == "cache" for row in rows) >= 5
    here = subprocess.run([*command, "--no-cache"], capture_output=True, check=True, **settings)
    assert _answers(again.stdout) == _answers(here.stdout)
    assert len(rows) == 2 * len(GPUS) * len(LENGTHS)
    records = {name: count for name, count in puts.items() if name.endswith(".json")}
    assert len(records) == len(rows)
    assert set(records.values()) == {1}
