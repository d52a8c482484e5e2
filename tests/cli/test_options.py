"""What the options mean."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchfinder.cli import options as cli_options
from batchfinder.cli.options import asked_card, check_file, step_options, write_file
from batchfinder.cli.parser import build_parser
from batchfinder.devices import PresentGpu
from batchfinder.errors import InvalidValue
from batchfinder.report.terminal import words_of
from batchfinder.training.spec import StepConfig, StepOptions

NONE_HERE, NOT_NAMED = "no GPU was found here, and no --gpu is named", "no --gpu is named"


@pytest.mark.parametrize(
    ("here", "typed", "chosen", "said"),
    [
        ([], "", "T4", NONE_HERE),
        ([], "--context 1GiB", "T4, 1.00 GiB context", NONE_HERE),
        (["NVIDIA GeForce RTX 4090", "Tesla T4"], "", "RTX 4090", NOT_NAMED),
        (["Unheard-of 9"], "", "Unheard-of 9", NOT_NAMED),
        (["Tesla T4"], "--gpu v100", "V100 16GB", ""),
        (["Tesla T4"], "--instance p3.2xlarge", "p3.2xlarge: 1 x V100 16GB", ""),
        (["Tesla T4"], "--budget 4GiB", "4.00 GiB budget", ""),
    ],
)
def test_the_card_where_none_is_named(
    here: list[str], typed: str, chosen: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the first that is here, else a T4, with a note that none was named."""
    present = tuple(PresentGpu(number, name, 16 << 30, (7, 5)) for number, name in enumerate(here))
    monkeypatch.setattr(cli_options, "present_gpus", lambda: present)
    asked, note = asked_card(build_parser().parse_args(["estimate", *typed.split()]), None if typed else 2)
    assert (asked.name, asked.count) == (chosen, 1 if typed else 2)
    assert note == (said and f"{said}: simulating {chosen}{', which is here' if here else ''}")


def test_step() -> None:
    """The step that other processes take has the options, and the flash kernel where it was asked for."""
    assert StepOptions().step() == StepConfig()
    asked = StepOptions("forward", "16-mixed", "sgd", "flash", gradient_checkpointing=True)
    assert asked.step(3) == StepConfig("forward", "16-mixed", "sgd", micro_batches=3, flash=True)
    assert StepOptions(optimizer_in_backward=True).step() == StepConfig(optimizer_in_backward=True)
    with pytest.raises(InvalidValue, match="expected a step of one micro-batch: gradients are gone"):
        StepOptions(optimizer_in_backward=True).step(2)


def parsed(*options: str) -> StepOptions:
    """The options of a sweep with these on its command line."""
    return step_options(build_parser().parse_args(["sweep", *options]))


def test_lora() -> None:
    """Rank, layers and the type of frozen weights go to the builder, with the precision that types depend on."""
    options = "--lora 16 --lora-targets q_proj,v_proj --quantization nf4 --precision bf16-true"
    asked = parsed(*options.split())
    arguments = asked.workload("llama-3.2-1b").arguments
    more = {"lora": 16, "lora_targets": "q_proj,v_proj", "quantization": "nf4"}
    assert arguments == {**StepOptions().workload("llama-3.2-1b").arguments, **more, "precision": "bf16-true"}
    assert asked.words() == ["bf16-true", "adamw", "LoRA of rank 16 on q_proj,v_proj", "nf4 weights"]
    assert asked.newer() == more
    assert StepOptions().newer() == {}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--lora zero", "--lora: invalid value 'zero'; expected a whole number of at least 1."),
        ("--lora-targets q_proj", "--lora-targets: invalid value 'q_proj'; expected a --lora rank for them."),
        (
            "--quantization int4 --lora 8",
            "--quantization: invalid value 'int4'; expected one of nf4, nf4-double, int8. Did you mean int8 or nf4?",
        ),
        (
            "--quantization nf4",
            "--quantization: invalid value 'nf4'; expected a --lora rank with it: quantized weights do not train, and "
            "adapters do.",
        ),
        (
            "--optimizer-in-backward --precision 16-mixed",
            "--optimizer-in-backward: invalid value True; expected another --precision than 16-mixed, whose GradScaler "
            "looks at all gradients before a step.",
        ),
    ],
)
def test_options_that_do_not_go_together(options: str, said: str) -> None:
    """Each is refused with the reason."""
    with pytest.raises(InvalidValue) as caught:
        parsed(*options.split())
    assert words_of(caught.value) == said


@pytest.mark.parametrize(
    ("typed", "asked"),
    [
        (
            "--precision bf16 --optimizer adamw_torch_fused",
            StepOptions(precision="bf16-mixed", optimizer="adamw-fused"),
        ),
        ("--bf16", StepOptions(precision="bf16-mixed")),
        ("--fp16 --attention flash_attention_2", StepOptions(precision="16-mixed", attention="flash")),
        ("--load-in-4bit --lora 8", StepOptions(quantization="nf4", lora=8)),
        ("--load-in-8bit --lora 8", StepOptions(quantization="int8", lora=8)),
        ("--quantization bnb_4bit --lora 8", StepOptions(quantization="nf4", lora=8)),
        ("--gradient-checkpointing no", StepOptions()),
        ("--gradient-checkpointing true", StepOptions(gradient_checkpointing=True)),
        ("--gradient-checkpointing every-2", StepOptions(gradient_checkpointing="every-2")),
    ],
)
def test_the_words_of_other_tools(typed: str, asked: StepOptions) -> None:
    """They are taken for ours, as values and as options."""
    assert parsed(*typed.split()) == asked


@pytest.mark.parametrize("command", ["estimate", "profile", "check"])
def test_the_trainers_words_for_sizes(command: str) -> None:
    """`TrainingArguments`' own options are other spellings."""
    typed = "--per-device-train-batch-size 3 --gradient-accumulation-steps 5"
    arguments = build_parser().parse_args([command, *typed.split()])
    assert (arguments.batch_size, arguments.accumulation) == ("3", "5")


def test_quantized_weights_without_adapters() -> None:
    """Inference needs none."""
    assert parsed("--quantization", "nf4", "--mode", "inference").quantization == "nf4"


@pytest.mark.parametrize(
    ("typed", "compiled", "word"),
    [("", None, "adamw"), ("--compile", "model", "compiled"), ("--compile layers", "layers", "layers compiled")],
)
def test_compile(typed: str, compiled: str | None, word: str) -> None:
    """What is compiled reaches the process that builds the model, stands above the table and in JSON."""
    options = step_options(build_parser().parse_args(["sweep", *typed.split()]))
    assert options.workload("bert-base").arguments.get("compile") == options.to_json().get("compile") == compiled
    assert options.words()[-1] == word


def test_a_part_that_is_not_compiled() -> None:
    """Only the model and its layers can be named."""
    with pytest.raises(InvalidValue, match=r"^compile: invalid value 'loss'; expected one of model, layers"):
        step_options(build_parser().parse_args(["sweep", "--compile", "loss"]))


@pytest.mark.parametrize("content", ["zwölf\n", b"\x80\x04."])
def test_written_as_it_is(content: str | bytes, tmp_path: Path) -> None:
    """Bytes are written unchanged, text as UTF-8, over what was there."""
    path = tmp_path / "file"
    path.write_text("something longer than that")
    write_file("--snapshot", str(path), content)
    assert path.read_bytes() == (content if isinstance(content, bytes) else content.encode("utf-8"))


def test_no_room(tmp_path: Path) -> None:
    """What goes wrong in the writing is said with the path and the system's reason."""
    link = tmp_path / "step.pickle"
    link.symlink_to("/dev/full")
    with pytest.raises(InvalidValue) as caught:
        write_file("--snapshot", str(link), b"\x80\x04.")
    assert str(caught.value) == (
        f"--snapshot: invalid value '{link}'; expected a file that can be written (No space left on device)."
    )


def test_a_folder_that_takes_no_files(tmp_path: Path) -> None:
    """Refused before the work, though root may write there by its permissions; where it can be, nothing is left."""
    with pytest.raises(InvalidValue, match=r"^--html: invalid value '/proc/page\.html'; expected a file that can be"):
        check_file("--html", "/proc/page.html")
    check_file("--html", str(tmp_path / "page.html"))
    assert list(tmp_path.iterdir()) == []


def test_several_gpus() -> None:
    """`--gpus`, which was `--num-gpus`; with a strategy an instance has all its GPUs take part, without one a GPU."""
    assert parsed("--gpus", "8", "--strategy", "fsdp2").step() == StepConfig(gpus=8, strategy="fsdp2", steps=3)
    assert parsed("--num-gpus", "8", "--strategy", "ddp").step() == StepConfig(gpus=8, strategy="ddp")
    assert parsed("--instance", "p4d.24xlarge", "--strategy", "fsdp2").gpus == 8
    assert parsed("--instance", "p4d.24xlarge", "--strategy", "fsdp2", "--gpus", "4").gpus == 4
    assert parsed("--instance", "p4d.24xlarge") == StepOptions()
    split = parsed("--gpus", "16", "--strategy", "fsdp2-tp", "--tensor-parallel", "4")
    assert split.newer() == {"gpus": 16, "strategy": "fsdp2-tp", "tensor_parallel": 4}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            "--strategy zero3 --gpus 8",
            "--strategy: invalid value 'zero3'; expected one of ddp, ddp-bucket-view, fsdp2,",
        ),
        ("--strategy fsdp2", "--gpus: invalid value 1; expected at least 2 with fsdp2."),
        ("--strategy hsdp --gpus 12", "--gpus: invalid value 12; expected nodes of 8 GPUs with hsdp, 2 or more"),
        ("--strategy fsdp2 --gpus 8 --optimizer lion", "--optimizer: invalid value 'lion'; expected one of adamw,"),
    ],
)
def test_strategies_that_cannot_be(options: str, said: str) -> None:
    """Each is one error, with the option as it is typed."""
    with pytest.raises(InvalidValue) as error:
        parsed(*options.split())
    assert words_of(error.value).startswith(said)
