"""A sweep on a Ray cluster that loses a node and then its driver, against the same sweep on this machine alone.

The cluster's nodes are processes of this machine, with one CPU and a pretended GPU each. The cache is a bucket of an S3
server (moto) on loopback. After some rows one node is killed, after some more the driver; then the same command is
started again. Counted are the rows that are as on one machine, those found before the driver died that come from the
cache, and how often each record was put. Run: `python benchmarks/fleet_sweep.py [--models 20]`.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # import from the repository

from batchfinder.devices import host_name
from batchfinder.versions import installed

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).parent / "results"
GPUS = ("k80", "t4", "l4", "a100", "h100 80gb", "rtx 3090", "rtx 4090", "v100", "titan x", "mi300x")
LENGTHS = (16, 40)
OF_THE_RUN = {"seconds", "source", "trials", "failed_trials", "unscaled"}
"""How a row was found, not what; all else of it must be the same."""


@contextmanager
def bucket() -> Iterator[tuple[dict[str, str], Counter[str]]]:
    """An S3 server with a bucket called `lab`: its clients' environment, and how often each object was put."""
    import s3fs
    from moto.server import ThreadedMotoServer

    puts: Counter[str] = Counter()

    class Count(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if put := re.search(r"PUT /lab/(\S+?)(\?\S*)? ", record.getMessage()):
                puts[put[1]] += 1

    server, handler, log = ThreadedMotoServer("127.0.0.1", 0, verbose=True), Count(), logging.getLogger("werkzeug")
    log.addHandler(handler)
    server.start()
    try:
        url = "http://{}:{}".format(*server.get_host_and_port())
        s3fs.S3FileSystem(key="a", secret="b", endpoint_url=url, skip_instance_cache=True).mkdir("lab")
        keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"}
        yield {"AWS_ENDPOINT_URL": url, **keys}, puts
    finally:
        server.stop()
        log.removeHandler(handler)


@contextmanager
def cluster(kinds: Sequence[str], environment: Mapping[str, str]) -> Iterator[tuple[str, Callable[[], None]]]:
    """A head without CPUs and a node for each kind of GPU: the cluster's address, and what kills one of the nodes."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    from ray.cluster_utils import Cluster

    ended_by = signal.getsignal(signal.SIGTERM)  # Ray puts a handler of its own there
    with (
        tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as folder,  # short: sockets
        patch.dict(os.environ, RAY_TMPDIR=folder),  # with the file that names the machine's current cluster
    ):
        made = Cluster(True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        try:
            nodes = [
                made.add_node(
                    num_cpus=1, num_gpus=1, resources={f"accelerator_type:{kind}": 1}, env_vars=dict(environment)
                )
                for kind in kinds
            ]
            yield made.address, lambda: made.remove_node(nodes.pop(), allow_graceful=False)
        finally:
            made.shutdown()
            signal.signal(signal.SIGTERM, ended_by)


def survive(
    folder: Path, models: int, gpus: Sequence[str], kinds: Sequence[str], node_dies_after: int, driver_dies_after: int
) -> dict[str, Any]:
    """Sweep some small BERTs on a cluster that loses a node and its driver after so many rows, and on this machine.

    Args:
        folder: an empty one, for the models' configs.
        kinds: of the nodes' pretended GPUs.

    Returns:
        Counts of cells, and seconds of each of the three runs.
    """
    names = [f"m{number:02d}" for number in range(models)]
    for number, name in enumerate(names):
        config = {"model_type": "bert", "num_attention_heads": 2, "hidden_size": 32 * (1 + number % 5)}
        (folder / name).mkdir()
        layers = {"num_hidden_layers": 1 + number // 5, "intermediate_size": 128, "vocab_size": 500 + number}
        (folder / name / "config.json").write_text(json.dumps({**config, **layers}))
    asked = [f"--{option}={each}" for option, of in {"model": names, "gpu": gpus}.items() for each in of]
    command = [sys.executable, "-m", "batchfinder", "sweep", "--json", *asked, *[f"--seq-len={n}" for n in LENGTHS]]
    paths = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    run: dict[str, Any] = {"cwd": folder, "text": True}
    seconds, start = {}, time.perf_counter()

    def lap(name: str) -> None:
        nonlocal start
        seconds[name], start = round(time.perf_counter() - start, 1), time.perf_counter()

    with bucket() as (clients, puts):
        environment = {**clients, "PYTHONPATH": paths, "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
        run["env"] = {**os.environ, **environment}
        with cluster(kinds, environment) as (address, kill_node):
            on_ray = [*command, "--engine=ray", f"--address={address}", "--cache=s3://lab/cache"]
            lap("cluster")
            with subprocess.Popen(on_ray, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, **run) as driver:
                assert driver.stderr is not None
                rows = (line for line in driver.stderr if line.startswith("["))
                before = len(list(islice(rows, node_dies_after)))
                kill_node()
                before += len(list(islice(rows, driver_dies_after - node_dies_after)))
                driver.kill()
            lap("until_the_driver_died")
            again = subprocess.run(on_ray, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True, **run)
            lap("second_start")
        records = Counter(count for name, count in puts.items() if name.endswith(".json"))
    here = subprocess.run(
        [*command, "--no-cache"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True, **run
    )
    lap("on_one_machine")
    found = json.loads(again.stdout)["rows"]
    tables = [
        [{name: row[name] for name in row.keys() - OF_THE_RUN} for row in rows]
        for rows in (found, json.loads(here.stdout)["rows"])
    ]
    return {
        "cells": models * len(gpus) * len(LENGTHS),
        "rows_before_the_driver_died": before,
        "rows_of_the_second_start": len(found),
        "from_the_cache": sum(row["source"] == "cache" for row in found),
        "rows_as_on_one_machine": sum(one == other for one, other in zip(*tables, strict=True)),
        "records_by_times_put": {str(times): count for times, count in sorted(records.items())},
        "seconds": seconds,
    }


def main() -> None:
    """Run it, print the counts, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=20, help="how many (default: 20)")
    models = parser.parse_args().models
    cells = models * len(GPUS) * len(LENGTHS)
    with tempfile.TemporaryDirectory() as folder:
        counts = survive(Path(folder), models, GPUS, ("A100", "T4", "L4"), cells // 10, cells // 2)
    result = {
        "benchmark": "fleet_sweep",
        "command": f"python benchmarks/fleet_sweep.py --models {models}",
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": {"cpu": host_name(), "cores": os.cpu_count(), "gpu": None, "load_at_the_end": os.getloadavg()},
        "versions": installed("torch", "transformers", "ray", "moto", "s3fs"),
        "python": platform.python_version(),
        "models": models,
        "gpus": len(GPUS),
        **counts,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"fleet_sweep-{os.cpu_count()}-cores.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
