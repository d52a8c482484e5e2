"""Public training programs, unchanged, on simulated GPUs: what `batchfinder dry-run` says of each, and its seconds.

The programs, their commits and commands are in `program/programs.toml`; data and models are generated
(`program/data.py`). Needs `batchfinder stub install`, also with `--torch 2.6.0` for torchtitan and `--torch 2.5.1` for
torchtune, git, and `pip install --no-deps -r benchmarks/programs-requirements.txt`.

Run: `python benchmarks/programs.py`; `--only nanogpt` takes one, and `--sources FOLDER` takes the repositories that lie
there, by their names, instead of cloning them. `--find` has `batchfinder find` look for the largest batch size of those
that have words for it, on three GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tomllib
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # import from the repository

from batchfinder.cuda_stub import StubCard, find_build  # noqa: E402
from batchfinder.programs import CommandTemplate, dry_run, find_for_command  # noqa: E402
from batchfinder.report.find import found_as_json  # noqa: E402
from batchfinder.stub_cards import stub_card  # noqa: E402
from batchfinder.units import MIB, parse_bytes  # noqa: E402

PROGRAMS: dict[str, dict[str, Any]] = tomllib.loads((ROOT / "benchmarks/program/programs.toml").read_text())
FOUND_ON = ("T4", "RTX 4090", "A100 40GB")
OUTPUT = ROOT / f"benchmarks/results/programs-{os.cpu_count()}-cores.json"


def folder_of(program: dict[str, Any], sources: Path, work: Path) -> Path:
    """Where it runs: in its repository at its commit, or, of a package's, in an empty folder."""
    repository, _, commit = program["source"].partition("@")
    if not commit:
        (work / "run").mkdir(exist_ok=True)
        return work / "run"
    clone = sources / repository.split("/")[1]
    if not clone.exists():
        subprocess.run(["git", "clone", "-q", f"https://github.com/{repository}", str(clone)], check=True)
        subprocess.run(["git", "-C", str(clone), "checkout", "-q", commit], check=True)
    at = subprocess.run(["git", "-C", str(clone), "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    if at.stdout.strip() != commit:
        raise SystemExit(f"{clone} is at {at.stdout.strip()}, and the figures are of {commit}")
    return clone


def prepare(program: dict[str, Any], sources: Path, work: Path) -> tuple[Path, list[str]]:
    """Its data, the folder that it runs in, and its command."""
    clone = folder_of(program, sources, work)
    for data in program.get("data", ()):
        where = clone / program["data_folder"] if "data_folder" in program else work
        # On the stub: torchvision is built for the CUDA build.
        make = [sys.executable, "-m", "benchmarks.program.data", str(where), *data.split()]
        stub = [sys.executable, "-m", "batchfinder", "stub", "run", "--"]
        subprocess.run([*stub, *make], cwd=ROOT, check=True)
    argv = [sys.executable, *(word.replace("{work}", str(work)) for word in program["argv"])]
    return clone / program.get("folder", ""), argv


def cards(program: dict[str, Any]) -> list[StubCard]:
    """What it sees: one card, or those of the first of its machines, which have eight."""
    memory = parse_bytes(program["memory"], "memory") if "memory" in program else None
    return [stub_card(program["gpu"], memory)] * min(program.get("num_gpus", 1), 8)


def environment(program: dict[str, Any], work: Path) -> dict[str, str]:
    """Its variables, with the packages of its own before those of this environment."""
    variables = dict(program.get("environment", {}))
    paths = [variables.get("PYTHONPATH"), os.environ.get("PYTHONPATH")]
    if "packages" in program:
        own = work / "packages" / "+".join(program["packages"])
        if not own.exists():
            install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(own)]
            subprocess.run([*install, *program["packages"]], check=True)
        paths.insert(1, str(own))
    return variables | {"PYTHONPATH": os.pathsep.join(each for each in paths if each)}


def find(program: dict[str, Any], sources: Path, work: Path) -> dict[str, Any]:
    """The largest batch size on each GPU, with how many runs and seconds that took."""
    folder, argv = prepare(program, sources, work)
    os.chdir(folder)  # which it is run in copies of
    template = CommandTemplate((*argv, *program["find"]))
    found = find_for_command(template, [stub_card(gpu) for gpu in FOUND_ON], again=True)
    os.chdir(ROOT)
    kept = ("batch_size", "stop", "runs", "seconds")
    rows = [{name: row[name] for name in kept} for row in found_as_json(found)]
    return {"words": " ".join(program["find"]), "on": dict(zip(FOUND_ON, rows, strict=True))}


def run(name: str, program: dict[str, Any], sources: Path, work: Path, log: Path) -> dict[str, Any]:
    """Its row."""
    folder, argv = prepare(program, sources, work)
    with log.open("w") as output:
        found = dry_run(
            argv,
            cards(program),
            world_size=program.get("num_gpus"),
            steps=program.get("steps"),
            seconds=280,
            build=find_build(program.get("torch")),
            folder=folder,
            environment=environment(program, work),
            stdin=subprocess.DEVNULL,
            output=output.fileno(),
        )
    process = found.fullest
    row = {
        "program": name,
        "source": program["source"],
        "command": " ".join(["python", *program["argv"]]),
        **{key: program[key] for key in ("gpu", "memory", "num_gpus", "packages", "published") if key in program},
        "outcome": found.outcome,
        "exit_code": found.exit_code,
        "seconds": found.seconds,
        "build": found.build,
        "assumed": list(found.assumed),
    }
    if process is None:
        return row
    return row | {
        "steps": len(process.steps),
        "ended": process.ended,
        "allocated_mib": round(process.peak_allocated_bytes / MIB, 1),
        "reserved_mib": round(process.peak_reserved_bytes / MIB),
        "retries": process.retries,
        "peak": {name: process.peak.get(name) for name in ("phase", "step", "line", "held")},
    }


def write(rows: dict[str, dict[str, Any]]) -> None:
    """The result file."""
    result = {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "versions": {each: version(each) for each in ("torch", "transformers", "pytorch-lightning", "peft")},
        "command": "python benchmarks/programs.py",
        "programs": [rows[each] for each in PROGRAMS if each in rows],
    }
    OUTPUT.write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    """Run them and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=PROGRAMS, help="a program; repeatable (default: all)")
    parser.add_argument("--sources", type=Path, default=Path("programs"), help="where repositories lie, or are cloned")
    parser.add_argument("--work", type=Path, default=Path("programs-data"), help="for generated data, models and logs")
    parser.add_argument("--find", action="store_true", help="look for the largest batch sizes instead")
    options = parser.parse_args()
    sources, work = options.sources.resolve(), options.work.resolve()
    for each in (sources, work):
        each.mkdir(parents=True, exist_ok=True)
    rows = {} if not OUTPUT.exists() else {row["program"]: row for row in json.loads(OUTPUT.read_text())["programs"]}
    for name in options.only or PROGRAMS:
        if options.find:
            if "find" not in PROGRAMS[name]:
                continue
            rows[name]["find"] = find(PROGRAMS[name], sources, work)
            sizes = {gpu: (row["batch_size"], len(row["runs"])) for gpu, row in rows[name]["find"]["on"].items()}
            print(f"{name}: {sizes}", flush=True)
            write(rows)
            continue
        kept = {key: rows[name][key] for key in ("find",) if key in rows.get(name, {})}
        row = rows[name] = run(name, PROGRAMS[name], sources, work, work / f"{name}.log") | kept
        peaks = f"{row['allocated_mib']} / {row['reserved_mib']} MiB, {row['steps']} steps" if "steps" in row else ""
        print(f"{name}: {row['outcome']} on {row['gpu']}, {peaks}, {row['seconds']} s", flush=True)
        write(rows)


if __name__ == "__main__":
    main()
