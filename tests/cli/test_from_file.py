"""Tests of batchfinder/cli/from_file.py."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from contextlib import suppress
from pathlib import Path

import pytest

from batchfinder.accumulation import plan_accumulation
from batchfinder.cli.from_file import check_write, with_file, write_sizes
from batchfinder.cli.main import main
from batchfinder.cli.options import step_options
from batchfinder.errors import InvalidValue
from batchfinder.training.spec import StepOptions
from tests.cli.command import Run
from tests.configs.examples import EXAMPLES

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "max_position_embeddings": 2048,
    "vocab_size": 2000,
}


@pytest.fixture
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """An example in a file; axolotl's where none is asked for."""
    name = getattr(request, "param", "axolotl.yml")
    path: Path = tmp_path / name
    path.write_bytes(EXAMPLES[name].encode())
    return path


def of(name: str) -> pytest.MarkDecorator:
    """Let a test have another example."""
    return pytest.mark.parametrize("file", [name], indirect=True)


def asked(file: Path, *words: str, command: str = "sweep") -> Namespace:
    """The options of a command with the file."""
    return with_file([command, "--from", str(file), *words])


def test_the_options_of_a_file(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They hold as if they had been typed, and what was understood is told as they would be typed."""
    found = asked(file)
    assert step_options(found) == StepOptions(
        precision="bf16-mixed",
        optimizer="adamw-8bit",
        attention="flash",
        gradient_checkpointing=True,
        packed=True,
        lora=32,
        lora_targets="all-linear",
        quantization="nf4-double",
    )
    assert (found.model, found.seq_len, found.target_batch_size) == (["llama-3.1-8b"], ["8192"], "8")
    assert capsys.readouterr().err == (
        f"batchfinder: {file} is a config of axolotl, which says --model llama-3.1-8b --seq-len 8192 --lora 32 "
        "--lora-targets all-linear --quantization nf4-double --precision bf16-mixed --optimizer adamw-8bit "
        "--gradient-checkpointing full --attention flash --packed --target-batch-size 8\n"
        "batchfinder: left out: activation_offloading (activations in the CPU's memory; here on the GPU)\n"
    )


@of("llama_factory.yaml")
def test_the_tools_defaults_are_told_apart(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the file does not say is not said to be in it."""
    asked(file)
    _, usual, left_out = capsys.readouterr().err.splitlines()
    assert usual == (
        "batchfinder: by what LLaMA-Factory does where it is not told: --optimizer adamw-fused "
        "--gradient-checkpointing full"
    )
    assert left_out.startswith("batchfinder: left out: use_unsloth_gc (")


def test_typed_options_win(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where they are the usual ones; of options that can be given twice the file's go. Those are not told."""
    found = asked(file, "--precision", "fp32", "--optimizer", "adamw", "--seq-len", "64", "--seq-len", "128", "gpt2")
    assert (found.precision, found.optimizer, found.seq_len, found.model) == ("fp32", "adamw", ["64", "128"], ["gpt2"])
    assert (found.lora, found.attention) == ("32", "flash")
    told = capsys.readouterr().err
    assert "--lora 32" in told
    assert not any(word in told for word in ("--precision", "--optimizer", "--seq-len", "--model"))
    assert asked(file, "--target-batch-size", "64").target_batch_size == "64"
    assert asked(file, "--bf16").precision == "bf16-mixed"


@pytest.mark.parametrize(
    ("words", "left"),
    [
        ("--lora none --quantization none", {"lora": None, "lora_targets": None, "quantization": None}),
        ("--attention none", {"attention": None, "lora": "32"}),
        ("--gradient-checkpointing none", {"gradient_checkpointing": False}),
    ],
)
def test_none_takes_an_option_back(file: Path, words: str, left: dict[str, object]) -> None:
    """As if the file did not have it; an adapter's layers go with it."""
    found = asked(file, *words.split())
    assert {name: getattr(found, name) for name in left} == left


def test_sizes_are_each_commands_own(file: Path) -> None:
    """One size is estimated as the file has it; what is searched keeps the file's effective batch."""
    for command in ("estimate", "profile"):
        found = asked(file, command=command)
        assert (found.batch_size, found.accumulation) == ("2", "4")
        assert asked(file, "--gradient-accumulation-steps", "1", command=command).accumulation == "1"
    assert asked(file, command="plan").target_batch_size == "8"
    lengths = asked(file, "--find", "seq-len")
    assert (lengths.batch_size, lengths.target_batch_size) == (["2"], None)


@of("torchtitan.toml")
def test_a_file_with_an_effective_batch(file: Path) -> None:
    """It is the target, and the GPUs train together as the file says."""
    found = asked(file)
    assert (found.target_batch_size, found.gpus, found.strategy) == ("16", "8", "fsdp2")
    assert asked(file, "--gpus", "4").target_batch_size == "16"


@of("accelerate.yaml")
def test_gpus(file: Path) -> None:
    """The strategy is that of the GPUs there are: none on one, unless it is asked for."""
    model = ("--model", "gpt2")
    several = asked(file, *model)
    assert (several.gpus, several.strategy) == ("2", "fsdp-shard-grad-op")
    one = asked(file, *model, "--gpus", "1")
    assert (one.gpus, one.strategy) == ("1", None)
    assert asked(file, *model, "--strategy", "ddp").strategy == "ddp"
    instance = asked(file, *model, "--instance", "p3.8xlarge")
    assert (instance.gpus, instance.strategy) == (None, "fsdp-shard-grad-op")
    assert step_options(instance).gpus == 4


def test_a_strategy_on_gpus_that_nothing_counts(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is left out with the option that would say how many; with that, the target is that of all of them."""
    file.write_text(f"{file.read_text()}fsdp_version: 2\nfsdp_config:\n  reshard_after_forward: true\n")
    assert asked(file).strategy is None
    expected = "left out: fsdp_config (--strategy fsdp2: the file does not say on how many GPUs (--gpus N))"
    assert expected in capsys.readouterr().err
    found = asked(file, "--gpus", "4")
    assert (found.strategy, found.gpus, found.target_batch_size) == ("fsdp2", "4", "32")
    assert asked(file, "--gpus", "4,8").gpus == "4,8"


def test_a_deepspeed_config_beside_the_file(tmp_path: Path) -> None:
    """The stage and what it offloads are read there, from the file's own folder."""
    (tmp_path / "zero2.json").write_text(EXAMPLES["deepspeed.json"])
    config = tmp_path / "train.yaml"
    config.write_text(f"{EXAMPLES['llama_factory.yaml']}deepspeed: zero2.json\n")
    found = asked(config, "--gpus", "2")
    assert found.strategy == "zero2"
    assert "zero2.json: zero_optimization.offload_optimizer" in found.config.left_out


@pytest.mark.parametrize("odd", ["-1", "true", "'--'", "[1]", "none"])
@pytest.mark.parametrize("key", ["base_model", "sequence_len", "lora_r", "lora_target_modules", "optimizer"])
def test_odd_values(key: str, odd: str, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A value that is none is refused as a typed one is, and never taken for an option."""
    lines = [line for line in file.read_text().splitlines() if not line.startswith((key, "lora_target"))]
    file.write_text("\n".join([*lines, f"{key}: {odd}", ""]))
    with suppress(InvalidValue):
        step_options(asked(file))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("accelerate.yaml", "a model: {}, a config of accelerate, names none."),
        ("lightning.yaml", "a model: {}, a config of LightningCLI, has my_package.models.Classifier, which cannot be "),
        ("torchtune.yaml", "a model: {}, a config of torchtune, has torchtune.models.phi4.lora_phi4_14b, which cannot"),
    ],
)
def test_no_model(name: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No other is taken in its place."""
    path = tmp_path / name
    text = EXAMPLES[name].replace("llama3_1.lora_llama3_1_8b", "phi4.lora_phi4_14b")
    path.write_text(text.replace("models.Classifier", "models.Classifier\n  init_args: {width: 8}"))
    assert main(["sweep", "--from", str(path)]) == 1
    assert f"--model: missing; expected {said.format(path)}" in capsys.readouterr().err


WRITTEN = {
    "axolotl.yml": (("micro_batch_size: 2 ", "micro_batch_size: 6 "), ("steps: 4\n", "steps: 2\n")),
    "llama_factory.yaml": (("batch_size: 1\n", "batch_size: 6\n"), ("steps: 8\n", "steps: 2\n")),
    "trl.yaml": (("batch_size: 4\n", "batch_size: 6\n"),),
    "training_arguments.json": (
        ('    "per_device', '    "gradient_accumulation_steps": 2,\n    "per_device'),
        ('batch_size": 4', 'batch_size": 6'),
    ),
    "torchtune.yaml": (("batch_size: 2\n", "batch_size: 6\n"), ("steps: 8  # for", "steps: 2  # for")),
    "torchtitan.toml": (("local_batch_size = 1  ", "local_batch_size = 6  "), ("batch_size = 16", "batch_size = 12")),
    "lightning.yaml": (("batch_size: 32 ", "batch_size: 6 "),),
    "deepspeed.json": (('gpu": 4', 'gpu": 6'), ('batch_size": 64', 'batch_size": 12')),
}  # fmt: skip


@pytest.mark.parametrize("file", WRITTEN, indirect=True)
def test_sizes_are_written_back(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Under the tool's own keys, and nothing else of the file changes; its mode neither."""
    os.chmod(file, 0o640)
    found = asked(file, "--write", "--model", "gpt2")
    check_write(found)
    capsys.readouterr()
    write_sizes(found, plan_accumulation(12, 6), 6)
    expected = EXAMPLES[file.name]
    for old, new in WRITTEN[file.name]:
        assert expected.count(old) == 1
        expected = expected.replace(old, new)
    assert file.read_bytes().decode() == expected
    assert file.stat().st_mode & 0o777 == 0o640
    assert os.listdir(file.parent) == [file.name]
    assert capsys.readouterr().err.startswith(f"batchfinder: written into {file}: {found.config.micro_batch.key} ")


def test_what_was_changed_is_told(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From what to what; the same sizes are not written."""
    found = asked(file, "--write")
    capsys.readouterr()
    write_sizes(found, plan_accumulation(8, 2), 2)
    assert capsys.readouterr().err == f"batchfinder: {file} has these sizes already, and is left as it is\n"
    write_sizes(found, plan_accumulation(8, 5), 5)
    assert capsys.readouterr().err == (
        f"batchfinder: written into {file}: micro_batch_size 2 -> 4, gradient_accumulation_steps 4 -> 2 (4 x 2 = 8)\n"
    )


def test_without_a_target_the_largest_is_written(file: Path) -> None:
    """The accumulation stays."""
    write_sizes(asked(file, "--write"), None, 3)
    assert file.read_text() == EXAMPLES[file.name].replace("micro_batch_size: 2", "micro_batch_size: 3")


@of("training_arguments.json")
def test_no_accumulation_is_added_where_there_is_none(file: Path) -> None:
    """One micro-batch is what the tool takes anyway."""
    write_sizes(asked(file, "--write"), plan_accumulation(3, 3), 3)
    assert file.read_text() == EXAMPLES[file.name].replace('batch_size": 4', 'batch_size": 3')


def test_nothing_that_fits(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file stays as it is, and that is said."""
    write_sizes(asked(file, "--write"), None, 0)
    assert capsys.readouterr().err.endswith(f"batchfinder: {file} is left as it is: not one sample fits\n")
    assert file.read_text() == EXAMPLES[file.name]


def test_a_link_stays_one(file: Path) -> None:
    """What it leads to is written."""
    link = file.parent / "link.yml"
    link.symlink_to(file)
    write_sizes(asked(link, "--write"), None, 3)
    assert link.is_symlink()
    assert "micro_batch_size: 3" in file.read_text()


@pytest.mark.parametrize(
    ("name", "words", "said"),
    [
        ("accelerate.yaml", ("--model", "gpt2"), "a micro-batch size, which a config of accelerate has not"),
        ("axolotl.yml", ("--gpu", "t4", "--gpu", "v100"), "one model, GPU and sequence length, not 2."),
        ("axolotl.yml", ("--seq-len", "1", "--seq-len", "2"), "one model, GPU and sequence length, not 2."),
        ("axolotl.yml", ("--find", "seq-len"), "--find batch-size with it: no length is written into a file."),
        ("deepspeed.json", ("--model", "gpt2"), "the key of a whole number; the file has 'auto' there."),
        ("lightning.yaml", ("--model", "gpt2"), "the key of a whole number; the file has no such key."),
    ],
)  # fmt: skip
def test_what_cannot_be_written_is_told_before_the_work(
    name: str, words: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The sweep does not begin."""
    path = tmp_path / name
    text = EXAMPLES[name].replace('gpu": 4', 'gpu": "auto"').replace("    batch_size: 32  # on each GPU\n", "")
    path.write_text(text)
    alone = () if "--gpu" in words else ("--gpu", "a100 80gb")
    assert main(["sweep", "--from", str(path), *words, *alone, "--gpus", "1", "--write", "--no-cache"]) == 1
    err = capsys.readouterr().err
    assert "--write" in err
    assert said in err
    assert path.read_text() == text


def test_a_file_that_is_not_ours_to_write(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told before the work, and what goes wrong in the writing leaves nothing behind."""
    found = asked(file, "--write")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(InvalidValue, match="a file that can be written, in a folder that can be"):
        check_write(found)
    (file.parent / f"{file.name}.batchfinder").mkdir()
    with pytest.raises(InvalidValue, match="a file that can be written"):
        write_sizes(found, None, 3)
    assert file.read_text() == EXAMPLES[file.name]


def test_write_without_a_file() -> None:
    """There is nothing to write into."""
    with pytest.raises(InvalidValue, match="--from FILE with it"):
        check_write(Namespace(write=True, from_file=None))


def test_no_such_file(capsys: pytest.CaptureFixture[str]) -> None:
    """It is told by its option."""
    assert main(["estimate", "--from", "no/such.yaml"]) == 1
    expected = "--from: invalid value 'no/such.yaml'; expected a file that can be read (No such file or directory)."
    assert capsys.readouterr().err == f"batchfinder: {expected}\n"


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A config of axolotl for a small model in the same folder."""
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    text = EXAMPLES["axolotl.yml"].replace("llama-3.1-8b", str(tmp_path / "config.json")).replace("8192", "512")
    path = tmp_path / "train.yml"
    path.write_text(text.replace("steps: 4", "steps: 64"))
    return path


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_sweep_writes_what_it_found(run: Run, tiny: Path) -> None:
    """The table's plan is in the file, which then says so to the next sweep."""
    before = tiny.read_text()
    words = ("sweep", "--from", str(tiny), "--gpu", "a100 40gb", "--budget", "300MiB", "--write", "--json")
    row = run(*words).row
    micro, accumulation = row["micro_batch_size"], row["accumulation"]
    assert micro > 2
    assert micro * accumulation == 128
    changed = before.replace("batch_size: 2 ", f"batch_size: {micro} ").replace("steps: 64", f"steps: {accumulation}")
    assert tiny.read_text() == changed
    again = run(*words)
    assert (again.row["micro_batch_size"], again.row["accumulation"]) == (micro, accumulation)
    assert "has these sizes already" in again.err


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_plan_writes_its_sizes_and_names_its_options(run: Run, tiny: Path) -> None:
    """Options that it adds are left to the reader."""
    tiny.write_text(tiny.read_text().replace("gradient_checkpointing: true", "gradient_checkpointing: false"))
    found = run("plan", "--from", str(tiny), "--gpu", "a100 40gb", "--budget", "60MiB", "--write", "--json")
    assert found.json["trains"]
    assert f"micro_batch_size: {found.json['micro_batch_size']} " in tiny.read_text()
    assert ("which is left to you to set there" in found.err) == bool(found.json["fits"][0]["change"])
    nothing = run("plan", "--from", str(tiny), "--gpu", "a100 40gb", "--budget", "2MiB", "--write", "--json")
    assert not nothing.json["trains"]
    assert "is left as it is: not one sample fits" in nothing.err


def test_an_estimate_of_what_a_file_says(run: Run, tiny: Path) -> None:
    """Its micro-batch on a GPU, and its options."""
    found = run("estimate", "--from", str(tiny), "--accumulation", "2", "--gpu", "a100 40gb", "--json").json
    assert (found["batch_size"], found["accumulation"], found["lora"]) == (2, 2, 32)
