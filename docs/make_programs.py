"""Writes the table of programs.md from benchmarks' results: `python docs/make_programs.py`. A test checks it."""

from __future__ import annotations

import json
from pathlib import Path

PAGE = Path(__file__).with_name("programs.md")
RESULT = Path(__file__).parents[1] / "benchmarks" / "results" / "programs-2-cores.json"
ABOVE, BELOW = "<!-- made by make_programs.py -->\n", "<!-- until here -->\n"

WORDS = """\
And the largest batch size that `find` comes to, two searches at a time on two cores, the last three beside other work:
"""


def table() -> str:
    """A row for each program."""
    rows = json.loads(RESULT.read_text(encoding="utf-8"))["programs"]
    lines = [
        "| program | on | answer | peak reserved, MiB | allocated, MiB | the peak is at | steps | seconds |\n",
        "| --- | --- | --- | ---: | ---: | --- | ---: | ---: |\n",
    ]
    for row in rows:
        name, _, version = row["source"].replace("==", "@").partition("@")
        source = f"[{name}](https://github.com/{name}/tree/{version})" if "/" in name else f"{name} {version}"
        phase = row["peak"]["phase"].replace("_", " ")
        peak = f"{phase}, `{row['peak']['line']}`" if row["peak"]["line"] else phase
        lines.append(
            f"| {row['program']}, of {source} | {row['gpu']} | {row['outcome']} | {row['reserved_mib']:,} | "
            f"{row['allocated_mib']:,.0f} | {peak} | {row['steps']} | {row['seconds']:.0f} |\n"
        )
    return "".join(lines)


def sizes() -> str:
    """The largest batch sizes, a row for each program that was searched."""
    rows = [row for row in json.loads(RESULT.read_text(encoding="utf-8"))["programs"] if "find" in row]
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
        f"{above}{ABOVE}\n{table()}\n{WORDS}\n{sizes()}\n{BELOW}{rest.partition(BELOW)[2]}", encoding="utf-8"
    )
