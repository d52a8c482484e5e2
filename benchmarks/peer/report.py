"""A result of `peers.py` as Markdown tables, as statements about batchfinder, and as a figure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from statistics import median
from typing import Any

from batchfinder.report.plots import COLOURS, GREY, MARKERS, drawn

Pair = tuple[dict[str, Any], dict[str, Any]]
"""A case, and one of its rows."""

KINDS = {
    "simulated": "Recorded steps on simulated cards",
    "cpu": "Real training under RLIMIT_AS",
    "cuda": "Real training under a memory fraction",
}

_BINSEARCH = "Lightning binsearch"
_DEFAULT = "batchfinder callback"
_PROBES_ABOVE = 200
_BYTES = re.compile(r"\d{6,}")
"""In error messages, which else are the same from case to case."""


def markdown(result: dict[str, Any], cases: bool = False) -> str:
    """A table of the peers for each kind of case, and what batchfinder claims; with `cases`, a table for each case."""
    hardware = result["hardware"]
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    where = f"{hardware['gpu'] or hardware['cpu']}, {hardware['cores']} cores, Python {result['python']}"
    if hardware["load_average"][1] > hardware["cores"] / 2:
        where += f", a busy machine (load average {hardware['load_average'][1]})"
    parts = [f"`{result['command']}`, {result['date']}, on {where}; {versions}."]
    for kind in dict.fromkeys(case["kind"] for case in result["cases"]):
        among = [case for case in result["cases"] if case["kind"] == kind]
        parts += [f"**{KINDS[kind]}, {len(among)} cases**", _summary(result["notes"], among), "batchfinder:"]
        parts.append("\n".join(f"- {line}" for line in claims(among)))
    parts.append("\n".join(f"- {name}: {note}." for name, note in result["notes"].items()))
    return "\n\n".join([*parts, *(_table(case) for case in result["cases"] if cases)])


def _summary(peers: Iterable[str], cases: list[dict[str, Any]]) -> str:
    lines = [
        "| peer | share of the largest: min, median | answers that train | probes: median, max |"
        " out-of-memory errors: median, max | training state |",
        "| --- | ---: | ---: | ---: | ---: | --- |",
    ]
    for peer in peers:
        rows = [found for case in cases for found in case["rows"] if found["peer"] == peer]
        done = [found for found in rows if "failed" not in found]
        failed = Counter(_BYTES.sub("...", found["failed"]) for found in rows if "failed" in found)
        said = [f"{count} of {len(rows)} ended with `{text}`" for text, count in failed.items()]
        if not done:
            lines.append(f"| {peer} | | 0 of {len(rows)} | | | {'; '.join(said)} |")
            continue
        shares = [found["share"] for found in done if found["trains"]]
        best = f"{min(shares):.3f}, {median(shares):.3f}" if shares else ""
        trained = sum(found["trains"] for found in done)
        lines.append(
            f"| {peer} | {best} | {trained} of {len(rows)} | {_median_and_max(done, 'probes')} |"
            f" {_median_and_max(done, 'out_of_memory')} | {'; '.join([_state(done), *said])} |"
        )
    return "\n".join(lines)


def _median_and_max(rows: list[dict[str, Any]], name: str) -> str:
    values = [found[name] for found in rows]
    return f"{median(values):g}, {max(values)}"


def _state(rows: Iterable[dict[str, Any]]) -> str:
    names = dict.fromkeys(name for found in rows for name in found["changed"])
    return f"changed: {', '.join(names)}" if names else "unchanged"


def _table(case: dict[str, Any]) -> str:
    trues = dict.fromkeys(case["true"].values())
    title = f"{case['name']}: "
    title += "the largest that trains is "
    title += str(*trues) if len(trues) == 1 else "{loop} in a loop, {trainer} in a trainer".format(**case["true"])
    lines = [
        f"**{title}**\n",
        "| peer | answer | share of the largest | trains | probes | sizes | steps | out-of-memory errors | seconds |",
        "| --- | ---: | ---: | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for found in case["rows"]:
        if "failed" in found:
            lines.append(f"| {found['peer']} | {found['failed']} | | | | | | | |")
            continue
        lines.append(
            f"| {found['peer']} | {found['returned']} | {found['share']:.3f} | {'yes' if found['trains'] else 'no'} |"
            f" {found['probes']} | {found['sizes']} | {found['steps']} | {found['out_of_memory']} |"
            f" {found['seconds']} |"
        )
    return "\n".join(lines)


def claims(cases: list[dict[str, Any]]) -> list[str]:
    """What batchfinder should show on the cases of one kind: how often it holds, and where it does not."""
    rows = [(case, found) for case in cases for found in case["rows"]]
    ours = [(case, found) for case, found in rows if found["peer"].startswith("batchfinder")]
    loose = [(case, found) for case, found in ours if not found["peer"].endswith("exact")]
    exact = [(case, found) for case, found in ours if found["peer"].endswith("exact")]
    theirs = {case["name"]: found for case, found in rows if found["peer"] == _BINSEARCH and "failed" not in found}
    large = [
        (case, found)
        for case, found in loose
        if max(case["true"].values()) > _PROBES_ABOVE and case["cap"] is None and case["name"] in theirs
    ]
    wanted: list[tuple[str, list[Pair], Callable[[Any, Any], bool]]] = [
        ("every answer trains", ours, lambda case, found: found["trains"]),
        ("at least 0.99 of the largest", ours, lambda case, found: found["share"] >= 0.99),
        ("the largest itself with tolerance=0", exact, lambda case, found: found["share"] == 1),
        (
            f"the callback: at most a third of the probes of {_BINSEARCH} where the largest is above {_PROBES_ABOVE}",
            [(case, found) for case, found in large if found["peer"] == _DEFAULT],
            lambda case, found: 3 * found["probes"] <= theirs[case["name"]]["probes"],
        ),
        (
            "the same, without a prediction",
            [(case, found) for case, found in large if found["peer"] != _DEFAULT],
            lambda case, found: 3 * found["probes"] <= theirs[case["name"]]["probes"],
        ),
        (
            "at most one out-of-memory error at the default tolerance",
            loose,
            lambda case, found: found["out_of_memory"] <= 1,
        ),
        ("the training state is unchanged", ours, lambda case, found: not found["changed"]),
    ]
    return [_claim(*each) for each in wanted if each[1]]


def _claim(text: str, among: list[Pair], holds: Callable[[Any, Any], bool]) -> str:
    missed: dict[str, dict[str, None]] = {}
    count = 0
    for case, found in among:
        if "failed" in found or not holds(case, found):
            name = f"{case['name']} (largest {min(case['true'].values())})"
            missed.setdefault(name, {})[str(found.get("returned", found.get("failed")))] = None
        else:
            count += 1
    missing = "; except " + "; ".join(f"{name}: {', '.join(which)}" for name, which in missed.items()) if missed else ""
    return f"{text}: {count} of {len(among)}{missing}"


def draw(result: dict[str, Any], path: str) -> None:
    """Draw answers and probes over the largest size that trains, for the first kind of case, to a .png or .svg file.

    Cases with a cap are left out.
    """
    kind = result["cases"][0]["kind"]
    cases = [case for case in result["cases"] if case["kind"] == kind and case["cap"] is None]
    cases.sort(key=lambda case: max(case["true"].values()))
    with drawn("--figure", path, columns=2, width=12.0, height=6.2) as (shares, probes):
        for name, style in _styles(result["notes"]).items():
            rows = [found for case in cases for found in case["rows"] if found["peer"] == name]
            rows = [found for found in rows if "failed" not in found]
            at = [found["true"] for found in rows]
            shares.plot(at, [found["share"] for found in rows], label=name, **style)
            probes.plot(at, [found["probes"] for found in rows], label=name, **style)
        for axes in (shares, probes):
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter(lambda value, position: f"{value:g}")
            axes.set_xlabel("largest batch size that trains")
        shares.set_ylim(0, None)
        shares.axhspan(1, shares.get_ylim()[1], color=GREY, alpha=0.15, zorder=0, label="does not train")
        shares.set_title(f"{KINDS[kind]}: answer, as a share of the largest", loc="left")
        probes.set_yscale("log", base=2)
        probes.yaxis.set_major_formatter(lambda value, position: f"{value:g}")
        probes.set_title("probes", loc="left")
        assert shares.figure is not None
        handles, labels = shares.get_legend_handles_labels()
        shares.figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    if path.endswith(".png"):
        from PIL import Image  # comes with matplotlib

        with Image.open(path) as picture:
            fewer = picture.convert("RGB").quantize(64)
        fewer.save(path, optimize=True)


def _styles(peers: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Line and marker of each peer; markers shrink, so that series that coincide can all be seen."""
    drawn_ones = [name for name in peers if not name.endswith("exact")]
    theirs = [name for name in drawn_ones if not name.startswith("batchfinder")]
    styles: dict[str, dict[str, Any]] = {
        name: {
            "color": COLOURS[1:][number % 6],
            "marker": MARKERS[number % len(MARKERS)],
            "markersize": 12 - number,
            "markerfacecolor": "none",
            "linestyle": ":",
            "linewidth": 1.0,
        }
        for number, name in enumerate(theirs)
    }
    for number, name in enumerate(name for name in drawn_ones if name not in theirs):
        colour, width = (COLOURS[0], COLOURS[7], COLOURS[0])[number % 3], (3.0, 1.2, 1.2)[number % 3]
        styles[name] = {"color": colour, "linewidth": width, "linestyle": ("-", "-", "--")[number % 3], "zorder": 3}
    return styles
