"""Writes the tables of programs.md from benchmarks' results: `python docs/make_programs.py`. A test checks it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from batchfinder.units import GIB, MIB, parse_bytes

PAGE = Path(__file__).with_name("programs.md")
RESULT = Path(__file__).parents[1] / "benchmarks" / "results" / "programs-2-cores.json"
ABOVE, BELOW = "<!-- made by make_programs.py -->\n", "<!-- until here -->\n"

AGAINST = """\
Where a program's authors published what it takes on real GPUs: the same program of the same days, with their settings.
"""
WORDS = """\
And the largest batch size that `find` comes to, two searches at a time on two cores, the last three beside other work:
"""


def _rows() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(RESULT.read_text(encoding="utf-8"))["programs"]
    return rows


def _program(row: dict[str, Any]) -> str:
    """Its name, and where it is from."""
    name, _, version = row["source"].replace("==", "@").partition("@")
    source = f"[{name}](https://github.com/{name}/tree/{version})" if "/" in name else f"{name} {version}"
    return f"{row['program']}, of {source}"


def table() -> str:
    """A row for each program that nothing was published of."""
    lines = [
        "| program | on | answer | peak reserved, MiB | allocated, MiB | the peak is at | steps | seconds |\n",
        "| --- | --- | --- | ---: | ---: | --- | ---: | ---: |\n",
    ]
    for row in _rows():
        if "published" in row:
            continue
        phase = row["peak"]["phase"].replace("_", " ")
        peak = f"{phase}, `{row['peak']['line']}`" if row["peak"]["line"] else phase
        gpu = f"the first of {row['num_gpus']} {row['gpu']}" if "num_gpus" in row else row["gpu"]
        lines.append(
            f"| {_program(row)} | {gpu} | {row['outcome']} | {row['reserved_mib']:,} | "
            f"{row['allocated_mib']:,.0f} | {peak} | {row['steps']} | {row['seconds']:.0f} |\n"
        )
    return "".join(lines)


def against() -> str:
    """What was published and what a dry run says, a row for each."""
    lines = [
        "| program | on | published, GiB | dry run, GiB | | counted | their PyTorch | ours | seconds |\n",
        "| --- | --- | ---: | ---: | ---: | --- | --- | --- | ---: |\n",
    ]
    for row in _rows():
        if "published" not in row:
            continue
        published = row["published"]
        theirs = parse_bytes(published["figure"]) / GIB
        ours = row["reserved_mib" if published["counts"] == "reserved" else "allocated_mib"] * MIB / GIB
        lines.append(
            f"| {_program(row)} | {published['on']} | [{theirs:.2f}]({published['source']}) | {ours:.2f} | "
            f"{round(100 * (ours / theirs - 1), 1) + 0.0:+} % | {published['counts']} | {published['pytorch']} | "
            f"{row['build'].partition('+')[0]} | {row['seconds']:.0f} |\n"
        )
    return "".join(lines)


def sizes() -> str:
    """The largest batch sizes, a row for each program that was searched."""
    rows = [row for row in _rows() if "find" in row]
    gpus = list(rows[0]["find"]["on"])
    lines = [f"| program | {' | '.join(gpus)} | runs | seconds |\n", f"| --- |{' ---: |' * (len(gpus) + 2)}\n"]
    for row in rows:
        on = row["find"]["on"]
        largest = " | ".join(str(on[gpu]["batch_size"]) for gpu in gpus)
        runs = " + ".join(str(len(on[gpu]["runs"])) for gpu in gpus)
        seconds = " + ".join(f"{on[gpu]['seconds']:.0f}" for gpu in gpus)
        lines.append(f"| {row['program']}, `{row['find']['words']}` | {largest} | {runs} | {seconds} |\n")
    return "".join(lines)


if __name__ == "__main__":
    above, _, rest = PAGE.read_text(encoding="utf-8").partition(ABOVE)
    PAGE.write_text(
        f"{above}{ABOVE}\n{table()}\n{AGAINST}\n{against()}\n{WORDS}\n{sizes()}\n{BELOW}{rest.partition(BELOW)[2]}",
        encoding="utf-8",
    )
