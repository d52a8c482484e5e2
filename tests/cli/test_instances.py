"""`instances`, and what an instance costs in a sweep."""

from __future__ import annotations

from pathlib import Path

from batchfinder.devices import all_instances, known_prices
from tests.cli.command import Done, Run


def names(done: Done) -> list[str]:
    """Of the instances that were listed, in their order."""
    return [each["name"] for each in done.json]  # type: ignore[index]


def test_the_cheapest_is_first(run: Run) -> None:
    """All are listed by what they cost on demand, and those without a price are last."""
    listed = run("instances", "--json")
    assert sorted(names(listed)) == sorted(instance.name for instance in all_instances())
    paid = [each["usd_per_hour"] for each in listed.json]  # type: ignore[index]
    known = [dollars for dollars in paid if dollars is not None]
    assert known == sorted(known)
    assert paid[len(known) :] == [None] * (len(paid) - len(known))
    assert len(known) >= 100


def test_those_of_a_gpu_and_of_a_size(run: Run) -> None:
    """By a GPU's name as typed, or by the size of each GPU; an unknown GPU is an error."""
    assert set(names(run("instances", "--gpu", "tesla-t4", "--json"))) == {
        instance.name for instance in all_instances() if instance.gpu.name == "T4"
    }
    large = names(run("instances", "--min", "141GB", "--json"))
    assert "p5e.48xlarge" in large
    assert "p5.48xlarge" not in large
    wrong = run("instances", "--gpu", "k8")
    assert (wrong.code, wrong.out) == (1, "")
    assert wrong.err.startswith("batchfinder: unknown GPU 'k8'. Did you mean K80?")


def test_the_table(run: Run) -> None:
    """GPUs, the memory of all of them, the price of all and of each, and where and when it was so."""
    lines = run("instances", "--gpu", "v100").out.splitlines()
    price = known_prices()["p3.16xlarge"]
    (row,) = [line.split() for line in lines if line.startswith("p3.16xlarge")]
    assert row == ["p3.16xlarge", "AWS", "8", "x", "V100", "16GB", "126.25", "GiB", "24.48", "3.06", "-"]
    assert f"AWS in us-east-1 as of {price.as_of}" in lines[-1]
    assert "Google" not in lines[-1]


def test_prices_of_ones_own(run: Run, tmp_path: Path) -> None:
    """They replace those that are known, of the instances that the file has."""
    (tmp_path / "mine.csv").write_text("instance,usd_per_hour\nml.p3.16xlarge,0.25\nm5.large,0.1\n")
    listed = {each["name"]: each for each in run("instances", "--prices", str(tmp_path / "mine.csv"), "--json").json}
    assert next(iter(listed)) == "p3.16xlarge"
    assert listed["p3.16xlarge"]["usd_per_hour"] == 0.25
    assert listed["p3.2xlarge"]["usd_per_hour"] == known_prices()["p3.2xlarge"].usd_per_hour
    wrong = run("instances", "--prices", str(tmp_path / "none.csv"))
    assert (wrong.code, wrong.out) == (1, "")
    assert "--prices: invalid value" in wrong.err


def test_a_sweep_says_what_an_instance_costs(run: Run, tmp_path: Path) -> None:
    """A column where a price is known, with its date below: of all nodes where there are several, and of one's own."""
    asked = ("sweep", "mine:tiny", "--seq-len", "32", "--max-batch-size", "4", "--no-cache")
    told = run(*asked, "--instance", "p3.8xlarge", "--instance", "kaggle", "--gpu", "t4").out
    rows = {line.split()[1]: line.split()[-2] for line in told.splitlines() if line.startswith("mine:tiny")}
    assert rows == {"T4": "-", "p3.8xlarge:": "12.24", "kaggle-t4x2:": "-"}
    assert f"$/h: on demand in us-east-1 as of {known_prices()['p3.8xlarge'].as_of}, for all GPUs of a row" in told
    (tmp_path / "mine.csv").write_text("instance,usd_per_hour\np3.8xlarge,1.5\n")
    prices = ("--prices", str(tmp_path / "mine.csv"))
    row = run(*asked, "--instance", "p3.8xlarge", *prices, "--strategy", "ddp", "--gpus", "8", "--json").row
    assert row["usd_per_hour"] == 3.0
    assert "$/h" not in run(*asked, "--gpu", "t4").out
    alone = run(*asked, "--gpu", "t4", *prices)
    assert (alone.code, alone.out) == (1, "")
    assert alone.err.endswith("expected an --instance with it, whose price it has.\n")
