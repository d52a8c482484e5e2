"""Option text to values, and the files that options name; a value that cannot be used ends with a clear message."""

from __future__ import annotations

import argparse
import errno
import os
import re
import select
import stat
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from batchfinder.devices import (
    Card,
    Price,
    all_gpus,
    device_for,
    device_with_budget,
    find_gpu,
    find_instance,
    known_prices,
    parse_prices,
)
from batchfinder.errors import InvalidValue
from batchfinder.training.spec import (
    ATTENTION_NAMES,
    CHECKPOINTING_NAMES,
    COMPILED_PARTS,
    FAKE_DEVICE,
    LOSS_NAMES,
    MODES,
    OPTIMIZER_NAMES,
    PRECISION_NAMES,
    QUANTIZATION_NAMES,
    RECORDERS,
    STRATEGIES,
    StepOptions,
    WorkloadFacts,
)
from batchfinder.training.synonyms import one_of
from batchfinder.units import format_bytes, parse_budget, parse_bytes

MAX_READ_BYTES = 64 << 20
"""What is read of a file at most: an exported cache of tens of thousands of results."""
_PIPE_SECONDS = 10.0
MAX_NUMBER = 1 << 40


def read_file(option: str, path: str) -> str:
    """Read a text file, or a pipe in which something is to be read soon; `-` is stdin.

    Raises:
        InvalidValue: it cannot be read, is too large, or is not text.
    """
    try:
        if path == "-":
            text = sys.stdin.read(MAX_READ_BYTES + 1)
        else:
            with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
                if stat.S_ISFIFO(os.fstat(file.fileno()).st_mode):
                    poll = select.poll()
                    poll.register(file.fileno(), select.POLLIN)
                    if not poll.poll(1000 * _PIPE_SECONDS):
                        raise OSError(errno.ETIMEDOUT, f"nothing came through this pipe in {_PIPE_SECONDS:g} s")
                os.set_blocking(file.fileno(), True)
                text = file.read(MAX_READ_BYTES + 1).decode()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise InvalidValue(option, path, f"a file that can be read ({reason})") from error
    if len(text) > MAX_READ_BYTES:
        raise InvalidValue(option, path, f"a file of at most {format_bytes(MAX_READ_BYTES)}")
    return text


def check_file(option: str, path: str) -> None:
    """Check before the work that a file can be written. It is not changed; one that is not there is made and removed.

    Raises:
        InvalidValue: there is no such folder, the path is one, or the system does not let it be written.
    """
    try:
        real = os.path.realpath(path)
        folder = os.path.dirname(real)
        if os.path.isdir(real) or not os.path.isdir(folder):
            raise InvalidValue(option, path, "a file in a folder that exists")
        try:
            # Not waiting for a pipe's reader; and a full device refuses even nothing.
            number = os.open(real, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            # Root may write to every folder, but for those of systems that do not take files.
            os.close(os.open(real, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
            os.unlink(real)
        else:
            with open(number, "wb", buffering=0) as file:
                file.write(b"")
    except OSError as error:
        raise InvalidValue(option, path, f"a file that can be written ({error.strerror})") from error


def write_file(option: str, path: str, content: str | bytes) -> None:
    """Write a file; text as UTF-8, with what is no text (names of files) escaped.

    Raises:
        InvalidValue: it cannot be written.
    """
    try:
        with open(path, "wb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK, 0o666)) as file:
            os.set_blocking(file.fileno(), True)
            file.write(content.encode(errors="backslashreplace") if isinstance(content, str) else content)
    except OSError as error:
        raise InvalidValue(option, path, f"a file that can be written ({error.strerror})") from error


DEFAULT_GPU = "titan x"
DEFAULT_IMAGE_SIDE = 224


def step_options(arguments: argparse.Namespace) -> StepOptions:
    """The options of the step, which must go together; with a strategy all of an instance's GPUs take part.

    Raises:
        InvalidValue: one has an invalid value, or one that another rules out.
        UnknownName: no such instance.
    """
    rank = whole_number("--lora", arguments.lora)
    gpus = whole_number("--gpus", arguments.gpus)
    if gpus is None and arguments.strategy is not None:
        instance = only_one("--instance", arguments.instance)
        gpus = None if instance is None else find_instance(instance).num_gpus
    how = arguments.gradient_checkpointing
    if isinstance(how, str) and not how.removeprefix("every-").isdecimal():
        how = one_of("--gradient-checkpointing", how, (*CHECKPOINTING_NAMES, "none"))
        how = {"full": True, "none": False}.get(how, how)

    def if_given(option: str, value: str | None, allowed: Sequence[str]) -> str | None:
        return None if value is None else one_of(option, value, allowed)

    options = StepOptions(
        mode=one_of("--mode", arguments.mode, MODES),
        precision=one_of("--precision", arguments.precision, PRECISION_NAMES),
        optimizer=one_of("--optimizer", arguments.optimizer, OPTIMIZER_NAMES),
        attention=if_given("--attention", arguments.attention, ATTENTION_NAMES),
        gradient_checkpointing=how,
        compile=if_given("--compile", arguments.compile, COMPILED_PARTS),
        loss=one_of("--loss", arguments.loss, LOSS_NAMES),
        packed=arguments.packed,
        optimizer_in_backward=arguments.optimizer_in_backward,
        lora=rank,
        lora_targets=arguments.lora_targets,
        quantization=if_given("--quantization", arguments.quantization, QUANTIZATION_NAMES),
        gpus=gpus or 1,
        strategy=if_given("--strategy", arguments.strategy, tuple(STRATEGIES)),
        tensor_parallel=whole_number("--tensor-parallel", arguments.tensor_parallel),
        context_parallel=whole_number("--context-parallel", arguments.context_parallel),
        recorder=one_of("--recorder", getattr(arguments, "recorder", FAKE_DEVICE), RECORDERS),
    )
    if options.lora_targets is not None and rank is None:
        raise InvalidValue("--lora-targets", options.lora_targets, "a --lora rank for them")
    if options.quantization is not None and rank is None and options.mode != "inference":
        expected = "a --lora rank with it: quantized weights do not train, and adapters do"
        raise InvalidValue("--quantization", options.quantization, expected)
    if options.optimizer_in_backward and options.precision == "16-mixed":
        expected = "another --precision than 16-mixed, whose GradScaler looks at all gradients before a step"
        raise InvalidValue("--optimizer-in-backward", True, expected)
    refused = options.refused_together()
    if refused is not None:
        raise InvalidValue(f"--{refused.option.replace('_', '-')}", refused.value, refused.expected)
    return options


def card(gpu: str | None, budget: str | None, count: int = 1, context: str | None = None) -> Card:
    """A GPU by name, a budget alone, or a budget on a GPU; `context` is what the CUDA context takes of a named one.

    Raises:
        UnknownName: no such GPU.
        InvalidValue: the budget or the context is not a size, the context leaves nothing, or there is no GPU for it.
    """
    found = None if gpu is None else find_gpu(gpu, "--budget")
    context_bytes = None if context is None else parse_bytes(context, "--context")
    if context_bytes is not None and (found is None or context_bytes >= found.memory_bytes):
        named = "a --gpu or an --instance with it, of whose memory it is taken"
        expected = named if found is None else f"less than the {format_bytes(found.memory_bytes)} of {found.name}"
        raise InvalidValue("--context", context, expected)
    if budget is not None:
        device = device_with_budget(parse_budget(budget, "--budget"), found, context_bytes)
    elif found is not None:
        device = device_for(found, context_bytes)
    else:
        raise InvalidValue("--gpu", None, "a GPU's name or a --budget")
    return Card(device, device.name, count)


def instance_card(name: str, budget: str | None, count: int | None = None, context: str | None = None) -> Card:
    """The GPUs of a cloud instance, all of them or `count`.

    Raises:
        InvalidValue: the instance has fewer, or the budget or the context is not a size.
        UnknownName: no such instance.
    """
    instance = find_instance(name)
    if count is not None and count > instance.num_gpus:
        raise InvalidValue("--gpus", count, f"at most {instance.num_gpus}, the GPUs of {instance.name}")
    one = card(instance.gpu.name, budget, count or instance.num_gpus, context)
    return replace(one, name=f"{instance.name}: {one.count} x {one.name}")


def asked_card(arguments: argparse.Namespace, count: int | None = None) -> Card:
    """What `--gpu`, `--budget`, `--context` and `--instance` ask for, of a Titan X by default; `count` is of GPUs.

    Raises:
        InvalidValue: several GPUs or instances, more GPUs than the instance has, or no size for a budget.
        UnknownName: no such GPU or instance.
    """
    gpu, instance = only_one("--gpu", arguments.gpu), only_one("--instance", arguments.instance)
    if instance is None:
        gpu = gpu or (None if arguments.budget else DEFAULT_GPU)
        return card(gpu, arguments.budget, count or 1, arguments.context)
    if gpu is not None:
        raise InvalidValue("--gpu", gpu, "either a --gpu or an --instance, not both")
    return instance_card(instance, arguments.budget, count, arguments.context)


def read_prices(path: str | None) -> Mapping[str, Price]:
    """What instances cost, by their names: those that are known, and those of a file instead where it has them.

    Raises:
        InvalidValue: the file cannot be read, or is no list of prices.
    """
    known = known_prices()
    return known if path is None else {**known, **parse_prices("--prices", path, read_file("--prices", path))}


def only_one(option: str, values: Sequence[str] | None) -> str | None:
    """The value of an option that was given once, or each time with the same; None where it was not given.

    Raises:
        InvalidValue: it names several.
    """
    several = list(dict.fromkeys(each for value in values or () for each in value.split(",")))
    if len(several) > 1 or several == ["all"] or (several and several[0].endswith("+")):
        raise InvalidValue(option, ",".join(several), "a single one: `batchfinder sweep` takes several")
    return several[0] if several else None


_AT_LEAST = re.compile(r"(\d{1,6})\s*(?:gib|gb|g)?\+", re.IGNORECASE)


def named_gpus(values: Sequence[str]) -> list[str]:
    """The GPUs that values of `--gpu` name in a sweep: `t4,v100`, `all`, or `24GB+` for all of at least that size.

    Raises:
        InvalidValue: no GPU of the catalogue is as large.
    """
    named: list[str] = []
    for value in (part.strip() for each in values for part in each.split(",")):
        if value.lower() == "all":
            named += [gpu.name for gpu in all_gpus()]
        elif found := _AT_LEAST.fullmatch(value):
            large = [gpu.name for gpu in all_gpus() if gpu.class_gb >= int(found[1])]
            if not large:
                largest = max(gpu.class_gb for gpu in all_gpus())
                raise InvalidValue("--gpu", value, f"at most {largest}GB+: no GPU of the catalogue is as large")
            named += large
        else:
            named.append(value)
    return named


def whole_number(option: str, value: str | None) -> Any:
    """The value as an int of at least 1; None for an option that was not given.

    Raises:
        InvalidValue: it is not one, or larger than what any machine could train.
    """
    if value is None:
        return None
    digits = value.lstrip("0") if value.isdecimal() else ""
    if not digits:
        raise InvalidValue(option, value, "a whole number of at least 1")
    if len(digits) > len(str(MAX_NUMBER)) or not 0 < int(digits) <= MAX_NUMBER:
        raise InvalidValue(option, value, f"a whole number from 1 to {MAX_NUMBER}")
    return int(digits)


def seq_lens_of(
    model: str, asked: Sequence[int], facts: WorkloadFacts, usual: Sequence[int] = (128,)
) -> tuple[int | None, ...]:
    """The lengths asked for, which the model must allow; without any, those of the usual ones that it allows.

    Raises:
        InvalidValue: a length asked for is beyond the model's positions.
    """
    most = facts.max_seq_len
    for seq_len in asked:
        if most is not None and seq_len > most:
            raise InvalidValue(
                "--seq-len", seq_len, f"at most {most} {facts.seq_len_unit}, the most that {model} allows"
            )
    if asked:
        return tuple(asked)
    if facts.seq_len_unit == "pixels":
        return (DEFAULT_IMAGE_SIDE,)
    if facts.seq_len_unit == "none":
        return (None,)
    return tuple(seq_len for seq_len in usual if most is None or seq_len <= most) or (most,)
