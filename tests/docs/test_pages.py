"""Pages that are made from what is in the package, and examples in Python that stand alone."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import inspect
import io
import json
import re
import shlex
from pathlib import Path
from types import ModuleType

import pytest

import batchfinder
from batchfinder.cli.parser import build_parser

DOCS = Path(__file__).parents[2] / "docs"
README = DOCS.parent / "README.md"


def _script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_list_of_devices_is_the_catalogues() -> None:
    """docs/devices.md is what `python docs/make_devices.py` writes."""
    assert (DOCS / "devices.md").read_text(encoding="utf-8") == _script("make_devices").page()


def test_the_tables_of_public_programs_are_the_results() -> None:
    """docs/programs.md has what `python docs/make_programs.py` writes into it."""
    page, made = (DOCS / "programs.md").read_text(encoding="utf-8"), _script("make_programs")
    assert made.table() in page
    assert made.against() in page
    assert made.sizes() in page


def test_every_page_is_in_the_index() -> None:
    """Nothing is written that no reader would find."""
    listed = set(re.findall(r"^([a-z-]+)$", (DOCS / "index.md").read_text(), re.MULTILINE))
    assert listed == {page.stem for page in DOCS.glob("*.md")} - {"index"}


def test_the_reference_lists_what_is_imported_from_the_package() -> None:
    """Every public name and no other; only what helps to test has a module of its own."""
    listed = re.findall(r"^\.\. auto(?:class|function):: (\S+)$", (DOCS / "reference.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(batchfinder.__all__)
    for name in listed:
        assert getattr(batchfinder, name).__name__ == name


def test_the_example_in_python_prints_what_it_says() -> None:
    """The one example that needs no model of the reader's."""
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / "commands.md").read_text(), re.M | re.S)
    (code,) = (block for block in blocks if "FunctionProbe" in block)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {})
    assert printed.getvalue() == code.rpartition("# ")[2]


@pytest.mark.slow
@pytest.mark.usefixtures("forked_recorders")
def test_the_quickstarts_functions_answer_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`sweep` and `estimate`, with the figures in its comments."""
    monkeypatch.setenv("BATCHFINDER_CACHE", str(tmp_path))
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / "quickstart.md").read_text(), re.M | re.S)
    (code,) = (block for block in blocks if "import estimate, sweep" in block)
    said, names = " ".join(re.findall(r"# *(.*)", code)), dict[str, object]()
    for node in ast.parse(code).body:
        if isinstance(node, ast.Expr):
            assert repr(eval(ast.unparse(node), names)) in said
        else:
            exec(ast.unparse(node), names)


def test_the_readmes_lines_of_python_can_be_called() -> None:
    """Each call in its table is of a public name, with arguments that it takes."""
    lines = re.findall(r"\| `(\w+\(.*\))` \|", README.read_text())
    calls = [node for line in lines for node in ast.walk(ast.parse(line)) if isinstance(node, ast.Call)]
    ours = {ast.unparse(call.func): call for call in calls if hasattr(batchfinder, ast.unparse(call.func))}
    assert ours.keys() == {"BatchFinder", "tune_trainer", "tune_batch_size", "simulate", "sweep"}
    for name, call in ours.items():
        keywords = {str(keyword.arg): keyword.value for keyword in call.keywords}
        inspect.signature(getattr(batchfinder, name)).bind(*call.args, **keywords)


def test_how_exact_the_recorders_are_is_what_the_benchmark_found() -> None:
    """The page on the stub has the counts and the worst figures of the committed result."""
    result = json.loads((DOCS.parent / "benchmarks/results/exactness-2-cores.json").read_text())["summary"]
    page = " ".join((DOCS / "cuda-stub.md").read_text().split())
    exact, fake = result["cuda-build, allocated"], result["fake-device, allocated"]
    taken = result["taken"]
    assert exact["equal to the byte"] == result["cuda-build, reserved"]["equal to the byte"] == taken
    for words in (
        f"takes {result['cells']} steps of models",
        f"Of the other {taken}, what the CUDA build recorded",
        f"has PyTorch's peaks to the byte in {taken}, allocated and reserved",
        f"is equal in {fake['equal to the byte']} and within 0.5 % in {fake['within 0.5 %']}",
        f"at worst {-fake['lowest']} % low, and {fake['highest']} % high",
    ):
        assert words in page


def test_the_page_on_the_stub_has_the_figures_of_ranks() -> None:
    """How many recordings of one rank have a real one's peaks, and how far off others are."""
    result = json.loads((DOCS.parent / "benchmarks/results/exactness_ranks-2-cores.json").read_text())["summary"]
    page = " ".join((DOCS / "cuda-stub.md").read_text().split())
    exact, fake = result["sharded, cuda-build, allocated"], result["sharded, fake-device, reserved"]
    assert exact == result["sharded, cuda-build, reserved"]
    ddp = result["DDP, cuda-build, allocated"]
    assert ddp["lowest %"] == 0
    for words in (
        f"{exact['equal']} of {exact['cells']}, one of the ranks has the peaks of the recording to the byte",
        f"reserves from {-fake['lowest %']} % less to {fake['highest %']} % more",
        f"With DDP and ZeRO-1, {ddp['cells']}, the recording allocates as much as the rank in {ddp['equal']} and up to",
        f"up to {ddp['highest %']} % more",
    ):
        assert words in page


def test_the_readme_has_the_figures_of_the_page_on_accuracy() -> None:
    """How many figures and answers from how many sources, the median and the 90th percentile, and the wrong answers."""
    page, readme = (DOCS / "accuracy.md").read_text(), " ".join(README.read_text().split())
    counted = re.search(r"(\d+) figures and (\d+) verdicts from (\d+) sources", page)
    scores = re.search(r"all alike\*\* \| \d+ \| ([\d.]+ %) \| ([\d.]+ %) \| \S+ % \| (\d+) / (\d+)", page)
    assert counted
    assert scores
    figures, verdicts, sources = counted.groups()
    median, ninetieth, right, asked = scores.groups()
    assert asked == verdicts
    for words in (
        f"On {figures} memory figures that others measured, from {sources} sources",
        f"the median error is {median}, and a tenth are off by more than {ninetieth}",
        f'of {verdicts} answers to "does it fit?" {int(asked) - int(right)} are wrong',
    ):
        assert words in readme


def test_the_readme_has_what_others_say_of_the_same_rows() -> None:
    """Medians of xMem's jobs and of OpenTau, as the page on accuracy has them."""
    page, readme = (DOCS / "accuracy.md").read_text(), README.read_text()
    names = {"xMem": "xmem: xMem", "DNNMem": "xmem: DNNMem", "SchedTune": "xmem: SchedTune", "LLMem": "xmem: LLMem"}
    names |= {
        "PyTorch's MemTracker": "xmem: PyTorch's MemTracker",
        "DeepSpeed's estimator": "opentau: DeepSpeed's estimator",
    }
    names |= {"accelerate's formula, Adam": "xmem: accelerate's formula, Adam"}
    for shown, row in names.items():
        exact = re.search(rf"^\| {re.escape(row)} \| \d+ \| ([\d.]+) % ", page, re.MULTILINE)
        rounded = re.search(rf"\| {re.escape(shown)} \| ([\d.]+) % ", readme)
        assert exact, row
        assert rounded, shown
        assert abs(float(exact[1]) - float(rounded[1])) < 0.051, shown
    ours = re.search(r"\| batchfinder \| ([\d.]+) % \| \| batchfinder \| ([\d.]+) % ", readme)
    assert ours
    for source, median in zip(("xmem", "opentau"), ours.groups(), strict=True):
        assert re.search(rf"^\| \[?{source}\b[^|]*\| \d+ \| {median} % ", page, re.MULTILINE), source


def test_the_readme_has_how_near_dry_runs_come_to_published_figures() -> None:
    """How many were published, and how many are within the share that it names."""
    off = [abs(float(each)) for each in re.findall(r"\| ([+-][\d.]+) % \|", _script("make_programs").against())]
    near, within = sorted(off)[:-1], max(sorted(off)[:-1])
    words = f"come within {within} % of {len(near)} of {len(off)} figures that their authors published"
    assert words in " ".join(README.read_text().split())


def test_the_gallery_shows_its_scripts_commands() -> None:
    """docs/gallery.md has the commands of `python docs/make_gallery.py`, in its order; they parse, and files exist."""
    commands = [command for case in _script("make_gallery").CASES for command in case.commands]
    shown = re.findall(r"^\$ (batchfinder .*)$", (DOCS / "gallery.md").read_text(), re.MULTILINE)
    assert shown == commands
    for command in commands:
        build_parser().parse_args(shlex.split(command)[1:])
        assert all((README.parent / word).is_file() for word in shlex.split(command) if word.endswith(".json"))


def test_coverage_page_is_up_to_date() -> None:
    """docs/coverage.md is what `python docs/make_coverage.py` writes."""
    assert (DOCS / "coverage.md").read_text(encoding="utf-8") == _script("make_coverage").page()


def test_the_leaderboard_is_up_to_date() -> None:
    """docs/leaderboard.md is what `python docs/make_leaderboard.py` makes of the committed predictions."""
    assert (DOCS / "leaderboard.md").read_text(encoding="utf-8") == _script("make_leaderboard").page()


def test_the_page_on_accuracy_is_up_to_date() -> None:
    """docs/accuracy.md is what `python docs/make_accuracy.py` makes of the committed results."""
    assert (DOCS / "accuracy.md").read_text(encoding="utf-8") == _script("make_accuracy").page()
