"""A result of `peers.py` as Markdown tables, as statements about batchfinder, and as a figure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from statistics import median
from typing import Any

from batchfinder.report.plots import COLOURS, GREY, drawn

LENGTHS = {"fixed": "Samples of one length", "free": "Samples of different lengths, padded in each batch"}
NEAR = 0.97
"""A share of the largest that counts as near it, as for the random fits."""


def markdown(result: dict[str, Any]) -> str:
    """A table of the peers for each kind of lengths, what batchfinder claims, and every answer."""
    hardware, cases = result["hardware"], result["cases"]
    # The environment's PyTorch may be a CPU build; what has run is the CUDA build of the same version.
    versions = ", ".join(f"{name} {number.partition('+')[0]}" for name, number in result["versions"].items())
    parts = [
        f"`{result['command']}`, {result['date']}: PyTorch's CUDA build without a GPU, on {hardware['cpu']},"
        f" {hardware['cores']} cores, Python {result['python']}; {versions}."
    ]
    for lengths, title in LENGTHS.items():
        if among := [case for case in cases if case["lengths"] == lengths]:
            parts += [f"**{title}, {len(among)} cases**", _summary(result, among)]
    parts += ["batchfinder:", "\n".join(f"- {line}" for line in claims(result))]
    parts += ["**Every answer, as a share of the largest size that trains**", _answers(result)]
    parts.append("\n".join(f"- {name}: {note}." for name, note in result["notes"].items()))
    return "\n\n".join(parts)


def short(result: dict[str, Any]) -> str:
    """The README's table: all cases, a row for a finder of each package."""
    lines = [
        "| finder | share of the largest batch, median: one length | different lengths | answers that do not train |"
        " tries, median | training state |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for peer, title in README_ROWS.items():
        rows = rows_of(result["cases"], peer)
        shares = []
        for lengths in LENGTHS:
            among = [case for case in result["cases"] if case["lengths"] == lengths]
            of_these = [row["share"] for row in rows_of(among, peer) if row["trains"]]
            shares.append(f"{median(of_these):.3f}" if of_these else "none trains")
        lines.append(
            f"| {title} | {' | '.join(shares)} | {_failing(rows)} | {median(row['tries'] for row in rows):g} |"
            f" {_state(result, peer)} |"
        )
    return "\n".join(lines)


README_ROWS = {
    "batchfinder callback": "batchfinder's callback",
    "batchfinder tune_trainer": "batchfinder's tune_trainer",
    "batchfinder loop": "batchfinder's tune_batch_size",
    "Lightning binsearch": "Lightning's BatchSizeFinder, binsearch",
    "accelerate, from 2048": "accelerate's find_executable_batch_size, from 2048",
    "auto_find_batch_size, from 2048": "the Trainer's auto_find_batch_size, from 2048",
    "toma, from 512": "toma, from 512",
    "torch-max-mem, from 2048": "torch-max-mem, from 2048",
    "batch-finder": "batch-finder",
}


def rows_of(cases: Iterable[dict[str, Any]], peer: str) -> list[dict[str, Any]]:
    """A peer's rows that came to an answer."""
    return [row for case in cases for row in case["rows"] if row["peer"] == peer and "failed" not in row]


def _summary(result: dict[str, Any], cases: list[dict[str, Any]]) -> str:
    lines = [
        "| peer | share of the largest: min, median | answers that do not train | train, but the cache was given back |"
        " tries: median, max | out-of-memory errors: median, max | training state |",
        "| --- | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for peer in result["notes"]:
        rows = rows_of(cases, peer)
        if not rows:
            lines.append(f"| {peer} | | | | | | no answer |")
            continue
        shares = [row["share"] for row in rows if row["trains"]]
        best = f"{min(shares):.3f}, {median(shares):.3f}" if shares else ""
        retried = sum(row["trains"] and row["retries"] > 0 for row in rows)
        lines.append(
            f"| {peer} | {best} | {_failing(rows)} | {retried} | {_median_and_max(rows, 'tries')} |"
            f" {_median_and_max(rows, 'out_of_memory')} | {_state(result, peer)} |"
        )
    return "\n".join(lines)


def _failing(rows: list[dict[str, Any]]) -> str:
    return f"{sum(not row['trains'] for row in rows)} of {len(rows)}"


def _median_and_max(rows: list[dict[str, Any]], name: str) -> str:
    values = [row[name] for row in rows]
    return f"{median(values):g}, {max(values)}"


def _state(result: dict[str, Any], peer: str) -> str:
    names = result["changed"].get(peer)
    if names is None:
        return "a new model for each size"
    if isinstance(names, str):
        return f"`{names}`"
    return f"changed: {', '.join(names)}" if names else "unchanged"


def _answers(result: dict[str, Any]) -> str:
    cases = result["cases"]
    lines = [
        "| | " + " | ".join(case["name"] for case in cases) + " |",
        "| --- |" + " ---: |" * len(cases),
        "| the largest, in a loop | " + " | ".join(str(case["true"].get("loop", "")) for case in cases) + " |",
    ]
    for peer in result["notes"]:
        found = [_answer(row) for case in cases for row in case["rows"] if row["peer"] == peer]
        lines.append(f"| {peer} | {' | '.join(found)} |")
    return "\n".join(lines)


def _answer(row: dict[str, Any]) -> str:
    if "failed" in row:
        return f"`{row['failed']}`"
    return f"{row['share']:.3f}" + ("" if row["trains"] else ", does not train")


def claims(result: dict[str, Any]) -> list[str]:
    """What batchfinder should show: how often it holds, and where it does not."""
    ours = [(case, row) for case in result["cases"] for row in case["rows"] if row["peer"].startswith("batchfinder")]
    whole = [(case, row) for case, row in ours if "headroom" not in row["peer"]]
    lines = [
        _claim("every answer trains", ours, lambda row: row["trains"]),
        _claim("it does so without the allocator giving its cache back", ours, lambda row: row["retries"] == 0),
        _claim(f"at least {NEAR} of the largest, without headroom", whole, lambda row: row["share"] >= NEAR),
        _claim("at most one out-of-memory error", ours, lambda row: row["out_of_memory"] <= 1),
    ]
    states = {name: names for name, names in result["changed"].items() if name.startswith("batchfinder")}
    return [
        *lines,
        f"the training state is unchanged: {sum(names == [] for names in states.values())} of {len(states)}",
    ]


def _claim(
    text: str, among: list[tuple[dict[str, Any], dict[str, Any]]], holds: Callable[[dict[str, Any]], bool]
) -> str:
    missed = [(case, row) for case, row in among if "failed" in row or not holds(row)]
    where = "; ".join(
        f"{row['peer'].removeprefix('batchfinder ')} on {case['name']} ({row.get('returned', row.get('failed'))})"
        for case, row in missed
    )
    return f"{text}: {len(among) - len(missed)} of {len(among)}" + (f"; not {where}" if missed else "")


def draw(result: dict[str, Any], path: str) -> None:
    """Draw each answer as a share of the largest size that trains, a row for a peer, to a .png or .svg file."""
    peers = list(result["notes"])
    with drawn("--figure", path, width=9.0, height=1.2 + 0.36 * len(peers)) as (axes,):
        axes.axvline(1, color=GREY, linewidth=1)
        for lengths, colour, above in (("fixed", COLOURS[0], 0.14), ("free", COLOURS[3], -0.14)):
            cases = [case for case in result["cases"] if case["lengths"] == lengths]
            title = LENGTHS[lengths].partition(",")[0].lower()
            for trains, marker in ((True, "o"), (False, "X")):
                points = [
                    (row["share"], len(peers) - place + above)
                    for place, peer in enumerate(peers)
                    for row in rows_of(cases, peer)
                    if row["trains"] == trains
                ]
                if points:
                    axes.scatter(
                        *zip(*points, strict=True),
                        color=colour,
                        marker=marker,
                        s=28 if trains else 60,
                        alpha=0.75,
                        linewidths=0,
                        label=title if trains else f"{title}: does not train",
                    )
        axes.set_yticks(range(len(peers), 0, -1), peers)
        axes.set_xlim(0, None)
        axes.set_xlabel("answer, as a share of the largest size that trains 200 steps")
        axes.grid(axis="y", alpha=0.3)
        assert axes.figure is not None
        axes.figure.legend(loc="outside lower center", ncols=2, frameon=False)
