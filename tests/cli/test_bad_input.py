"""Whatever is wrong with the input is said in full on stderr, and nothing is said on stdout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from batchfinder.cli.main import main
from batchfinder.devices import all_gpus
from batchfinder.training.spec import ATTENTION_NAMES, MODES, OPTIMIZER_NAMES, PRECISION_NAMES
from tests.cli.command import HERE, Run

NUMBER = "expected a whole number of at least 1."
SIZE = "expected a positive size such as 12GiB, 900MiB or 24GB."
HEADROOM = "expected a share such as 0.1 or 10%, or a size such as 1GiB."
SHARE = "expected a share from 0 to below 1, such as 0.01 or 1%."
DEVICE = "expected auto, simulated, cuda, cuda:1 (or another number) or cpu."
NO_FILE = "expected a file in a folder that exists."
CACHE = "Set BATCHFINDER_CACHE or --cache to a place that can be written, or pass --no-cache."
OTHER_MODELS = (
    "A path to a config.json or its folder, package.module:factory, or owner/name on the Hub will do as well."
)

ANY_CARD = "For any other card of %d GiB: --budget %dGiB. `batchfinder gpus` lists all."
LARGEST = max(gpu.class_gb for gpu in all_gpus())

AT_ONCE = [
    (
        "--gpu v1000",
        "unknown GPU 'v1000'. Did you mean V100 16GB, P100 16GB, H100 80GB, A100 40GB, GTX 1080? "
        f"{ANY_CARD % (16, 16)}",
    ),
    ("--gpu v100-24gb", f"unknown GPU 'v100-24gb'. Did you mean V100 16GB, V100 32GB? {ANY_CARD % (24, 24)}"),
    ("--gpu kaggle", "unknown GPU 'kaggle'. kaggle-t4x2 is an instance, of 2 x T4."),
    ("--gpu t4,m2-max", f"unknown GPU 'm2-max'. {ANY_CARD % (16, 16)}"),
    (
        "--gpu 9000GB+",
        f"--gpu: invalid value '9000GB+'; expected at most {LARGEST}GB+: no GPU of the catalogue is as large.",
    ),
    ("--instance p3.2xlarge,p3.2xlarg", "unknown instance 'p3.2xlarg'. Did you mean p3.2xlarge, "),
    ("--seq-len 64,x", f"--seq-len: invalid value 'x'; {NUMBER}"),
    ("--instance p3.2xlarg", "unknown instance 'p3.2xlarg'. Did you mean p3.2xlarge, "),
    (
        "--model bert-bse",
        f"unknown model 'bert-bse'. Did you mean bert-base, roberta-base, distilbert? {OTHER_MODELS}",
    ),
    ("--mode trian", f"--mode: invalid value 'trian'; expected one of {', '.join(MODES)}. Did you mean train?"),
    (
        "--precision fp99",
        f"--precision: invalid value 'fp99'; expected one of {', '.join(PRECISION_NAMES)}. Did you mean fp32 or "
        "16-mixed?",
    ),
    (
        "--optimizer adamx",
        f"--optimizer: invalid value 'adamx'; expected one of {', '.join(OPTIMIZER_NAMES)}. Did you mean adam or "
        "adamw?",
    ),
    ("--attention none", f"--attention: invalid value 'none'; expected one of {', '.join(ATTENTION_NAMES)}."),
    ("--seq-len abc", f"--seq-len: invalid value 'abc'; {NUMBER}"),
    ("--seq-len 0", f"--seq-len: invalid value '0'; {NUMBER}"),
    ("--seq-len -5", f"--seq-len: invalid value '-5'; {NUMBER}"),
    ("--target-batch-size -1", f"--target-batch-size: invalid value '-1'; {NUMBER}"),
    ("--max-batch-size 0", f"--max-batch-size: invalid value '0'; {NUMBER}"),
    ("--budget 0", f"--budget: invalid value '0'; {SIZE}"),
    ("--budget lots", f"--budget: invalid value 'lots'; {SIZE}"),
    ("--headroom 2", f"--headroom: invalid value '2'; {HEADROOM}"),
    ("--headroom 100%", f"--headroom: invalid value '100%'; {HEADROOM}"),
    ("--headroom -0.1", f"--headroom: invalid value '-0.1'; {HEADROOM}"),
    ("--headroom nan", f"--headroom: invalid value 'nan'; {HEADROOM}"),
    ("--headroom lots", f"--headroom: invalid value 'lots'; {HEADROOM}"),
    (
        "--headroom 13GiB",
        "--headroom: invalid value '13.00 GiB'; expected less than the 11.62 GiB usable on Titan X Pascal.",
    ),
    ("--tolerance 1", f"--tolerance: invalid value '1'; {SHARE}"),
    ("--tolerance -1", f"--tolerance: invalid value '-1'; {SHARE}"),
    ("--tolerance nan", f"--tolerance: invalid value 'nan'; {SHARE}"),
    ("--tolerance exact", f"--tolerance: invalid value 'exact'; {SHARE}"),
    ("--device gpu", f"--device: invalid value 'gpu'; {DEVICE}"),
    ("--device cuda:x", f"--device: invalid value 'cuda:x'; {DEVICE}"),
    ("--markdown no/such/folder/sweep.md", f"--markdown: invalid value 'no/such/folder/sweep.md'; {NO_FILE}"),
    ("--csv .", f"--csv: invalid value '.'; {NO_FILE}"),
    (
        "--batch-sizes sizes.json",
        "--batch-sizes: invalid value 'sizes.json'; expected one --model and one GPU in the sweep.",
    ),
    (
        "--lhotse sizes.json --model gpt2 --gpu t4 --gpu v100",
        "--lhotse: invalid value 'sizes.json'; expected one --model and one GPU in the sweep.",
    ),
    ("--model gpt2 --batch-sizes .", f"--batch-sizes: invalid value '.'; {NO_FILE}"),
    ("--cache nope://there", f"the cache at nope://there cannot be used: Protocol not known: nope. {CACHE}"),
]


@pytest.mark.parametrize(("options", "said"), AT_ONCE, ids=[options for options, _ in AT_ONCE])
def test_wrong_values_are_told_before_anything_is_built(
    options: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong value ends a sweep with 1 and one line that says which, and what would do."""
    words = options.split(" ", 1) if options.count("--") == 1 else options.split()
    code = main(["sweep", *words])
    out, err = capsys.readouterr()
    assert (code, out) == (1, "")
    if said.endswith(", "):  # the nearest one is named first
        assert err.startswith(f"batchfinder: {said}")
        assert err.count("\n") == 1
    else:
        assert err == f"batchfinder: {said}\n"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--batch-size 0", f"--batch-size: invalid value '0'; {NUMBER}"),
        ("--accumulation x", f"--accumulation: invalid value 'x'; {NUMBER}"),
        ("--gpu k8", f"unknown GPU 'k8'. Did you mean K80? {ANY_CARD % (16, 16)}"),
        ("--model gpt-2-xxl", "unknown model 'gpt-2-xxl'. Did you mean "),
        ("--snapshot no/such/step.pickle", f"--snapshot: invalid value 'no/such/step.pickle'; {NO_FILE}"),
        ("--snapshot .", f"--snapshot: invalid value '.'; {NO_FILE}"),
    ],
)
def test_profile_checks_its_options_too(options: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong value ends `profile` in the same way."""
    code = main(["profile", *options.split()])
    out, err = capsys.readouterr()
    assert (code, out) == (1, "")
    assert err.startswith(f"batchfinder: {said}")
    assert err.count("\n") == 1


def test_a_cache_under_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A cache that cannot be written is found out before anything is built."""
    file = tmp_path / "file"
    file.touch()
    assert main(["sweep", "--cache", str(file / "cache")]) == 1
    assert capsys.readouterr() == (
        "",
        f"batchfinder: the cache at {file / 'cache'} cannot be used: Not a directory. {CACHE}\n",
    )


def test_allocator_settings_that_pytorch_refuses(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong value in the environment is named by the variable it was found in."""
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:maybe")
    assert main(["sweep", "--no-cache"]) == 1
    said = "batchfinder: PYTORCH_ALLOC_CONF expandable_segments: invalid value 'maybe'; expected True or False.\n"
    assert capsys.readouterr() == ("", said)


RAISED = f"""mine:raises raised:
Traceback (most recent call last):
  File "{HERE / "mine.py"}", line %d, in raises
    raise ValueError("no model today")
ValueError: no model today"""
WHEN_BUILT = [
    (
        "mine:tiny --seq-len 97",
        "--seq-len: invalid value 97; expected at most 96 tokens, the most that mine:tiny allows.",
    ),
    (
        "nowhere:factory",
        "--model: invalid value 'nowhere:factory'; expected a module that exists; "
        f"there is no nowhere in {HERE} or on the Python path.",
    ),
    ("mine:nothing", "--model: invalid value 'mine:nothing'; expected a factory that exists; mine has no nothing."),
    (
        "mine:number",
        "--model: invalid value 'mine:number'; expected a factory that can be called; it is of type int.",
    ),
    (
        "mine:rubbish",
        "--model: invalid value 'mine:rubbish'; expected a factory that returns a Workload, an nn.Module that takes "
        "input_ids, or a LightningModule with make_batch(batch_size, seq_len); it returned something of type int.",
    ),
    (
        "mine:raises",
        RAISED % (1 + (HERE / "mine.py").read_text().split("\n").index('    raise ValueError("no model today")')),
    ),
    ("resnet50 --seq-len 3", "--seq-len: invalid value 3; expected an image side of at least 33 pixels."),
]


@pytest.mark.parametrize(("options", "said"), WHEN_BUILT, ids=[options for options, _ in WHEN_BUILT])
def test_what_shows_when_the_model_is_built(options: str, said: str, run: Run) -> None:
    """What is wrong with a model or a length is told in full, with the user's traceback and none of ours."""
    done = run("sweep", "--gpu", "t4", "--model", *options.split())
    assert (done.code, done.out) == (1, "")
    assert done.err == f"building {options.split()[0]}\nbatchfinder: {said}\n"


def test_a_forward_that_raises(run: Run) -> None:
    """A model that fails in its forward is the user's failure: the traceback has the user's frames and none of ours."""
    done = run("sweep", "--gpu", "t4", "--model", "mine:fails_in_forward")
    assert (done.code, done.out) == (1, "")
    first, *_ = done.err.splitlines()[1:]
    assert first == "batchfinder: mine:fails_in_forward at batch size 7, sequence length 64 raised:"
    assert done.err.endswith('    raise RuntimeError("no answer today")\nRuntimeError: no answer today\n')
    assert done.err.count("Traceback (most recent call last)") == 1
    assert str(HERE / "mine.py") in done.err
    assert str(HERE.parents[1] / "batchfinder") not in done.err


def test_a_recording_that_dies(run: Run) -> None:
    """A recording whose process dies is told with the operator that ran, how it ended and what it printed."""
    done = run("sweep", "--gpu", "t4", "--model", "mine:aborts", "--seq-len", "16")
    assert (done.code, done.out) == (1, "")
    assert "Traceback" not in done.err
    said = done.err.removeprefix("building mine:aborts\n")
    assert said.startswith(
        "batchfinder: recording mine:aborts at batch size 7, sequence length 16 ended while aten.relu"
    )
    assert "(the recording process exited with -6). It printed last:\ngoodbye\n" in said


@pytest.mark.parametrize("model", ["mine:fails_in_forward", "mine:raises"])
def test_a_model_that_fails_after_another_was_found(model: str, run: Run) -> None:
    """What was found before a failure is printed, and it is said how many cells were found."""
    done = run("sweep", "--model", "mine:shapeless", "--model", model, "--budget", "1GiB")
    assert done.code == 1
    assert "mine:shapeless" in done.out
    assert model not in done.out
    kept = "batchfinder: 1 of 7 cells were found; they are cached, and the same command continues from there\n"
    assert f"batchfinder: {model}" in done.err
    assert done.err.endswith(kept)


def test_one_models_error_does_not_end_the_others(run: Run) -> None:
    """The other models' rows are found and printed, the user's line is named, and the exit code is 1."""
    models = ("mine:raises", "mine:fails_in_forward", "mine:tiny", "mine:shapeless")
    options = [word for model in models for word in ("--model", model)]
    done = run("sweep", *options, "--seq-len", "97", "--seq-len", "16", "--budget", "1GiB", "--json")
    assert done.code == 1
    assert [(row["model"], row["seq_len"]) for row in json.loads(done.out)["rows"]] == [
        ("mine:shapeless", None),
    ]
    assert 'raise ValueError("no model today")' in done.err
    assert 'raise RuntimeError("no answer today")' in done.err
    said = "--seq-len: invalid value 97; expected at most 96 tokens, the most that mine:tiny allows."
    assert said in done.err
    assert done.err.endswith("1 of 7 cells were found; they are cached, and the same command continues from there\n")
