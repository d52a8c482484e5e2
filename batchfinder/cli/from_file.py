"""`--from`: a config file of another tool, as if its options had been typed first; and `--write`, sizes put into it."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from batchfinder.accumulation import AccumulationPlan
from batchfinder.cli.options import only_one, read_file, whole_number
from batchfinder.cli.parser import build_parser
from batchfinder.configs import Setting, TrainingConfig, read_config, with_number
from batchfinder.devices import find_instance
from batchfinder.errors import InvalidValue
from batchfinder.report.terminal import tell

_NONE = "none"
"""What takes an option of the file back."""


def with_file(argv: Sequence[str]) -> argparse.Namespace:
    """The options of a command line with `--from`: those typed, else the file's, else the usual ones.

    Of the file's own options, of what is taken for granted and of what is left out is told on stderr.

    Raises:
        InvalidValue: the file cannot be read, or is of no tool that is known; or nothing says which model.
    """
    typed = vars(build_parser(typed_only=True).parse_args(argv))
    path, command = typed["from_file"], typed["command"]
    config = read_config(read_file("--from", path), path, "--from")
    taken_back = {name for name in config.options if typed.get(name) == _NONE}
    if "lora" in taken_back:
        taken_back.add("lora_targets")
    settings = {name: each for name, each in config.options.items() if name not in taken_back}
    typed = {name: value for name, value in typed.items() if name not in taken_back}
    gpus = _gpus(config, typed, settings)
    settings |= _sizes(config, command, typed.get("find"), gpus)
    if "model" not in typed and "model" not in settings:
        named = config.get("model._component_", "model.class_path", "model.flavor")
        which = "names none" if named is None else f"has {named}, which cannot be built here"
        raise InvalidValue("--model", None, f"a model: {path}, a config of {config.tool}, {which}")
    used = {name: each for name, each in settings.items() if name not in typed}
    _tell(config, path, used)
    for name, each in used.items():
        if each.value == "--":  # argparse takes it for the end of the options
            raise InvalidValue(f"--{name.replace('_', '-')}", each.value, f"another value of {each.key} in {path}")
    words = ["=".join(_words(name, each)) for name, each in used.items()]
    merged = {**vars(build_parser().parse_args([command, *words])), **typed}
    return argparse.Namespace(**merged, config=config)


def _words(name: str, setting: Setting) -> list[str]:
    option = f"--{name.replace('_', '-')}"
    return [option] if setting.value is True else [option, str(setting.value)]


def _gpus(config: TrainingConfig, typed: Mapping[str, Any], settings: dict[str, Setting]) -> int:
    """How many GPUs train together, by what was typed or else by the file; settles the strategy they have."""
    count = config.gpus
    if typed.get("gpus") is not None:
        count = whole_number("--gpus", typed["gpus"].partition(",")[0])
    elif (instance := only_one("--instance", typed.get("instance"))) is not None:
        count = find_instance(instance).num_gpus
    strategy = settings.get("strategy")
    if (count or 1) > 1:
        if strategy is None:
            settings["strategy"] = Setting("ddp")
        if typed.get("instance") is None:
            settings["gpus"] = Setting(str(count))
    elif strategy is not None and typed.get("strategy") is None:
        for name in ("strategy", "tensor_parallel", "context_parallel"):
            settings.pop(name, None)
        if count is None:
            key = strategy.key or config.tool
            config.left_out[key] = f"--strategy {strategy.value}: the file does not say on how many GPUs (--gpus N)"
    return count or 1


def _sizes(config: TrainingConfig, command: str, find: str | None, gpus: int) -> dict[str, Setting]:
    """The file's sizes, as the options that the command has for them."""
    micro, accumulation, effective = config.micro_batch, config.accumulation, config.effective
    if command in ("estimate", "profile") or find == "seq-len":
        sizes = {"batch_size": micro} if find == "seq-len" else {"batch_size": micro, "accumulation": accumulation}
        return {
            name: Setting(str(size.value), size.key if size.stated else "")
            for name, size in sizes.items()
            if size.value is not None
        }
    if effective.stated:
        return {"target_batch_size": Setting(str(effective.value), effective.key)}
    if micro.value is None or not (micro.stated or accumulation.stated):
        return {}
    count = config.gpus or gpus
    keys = [size.key for size in (micro, accumulation) if size.stated]
    target = micro.value * (accumulation.value or 1) * count
    return {"target_batch_size": Setting(str(target), " x ".join([*keys, *([f"{count} GPUs"] if count > 1 else [])]))}


def _tell(config: TrainingConfig, path: str, used: Mapping[str, Setting]) -> None:
    """What was understood, what is the tool's own default, and what is left out."""
    said = {name: each for name, each in used.items() if each.key}
    words = shlex.join(word for name, each in said.items() for word in _words(name, each))
    tell(f"batchfinder: {path} is a config of {config.tool}, which says {words or 'nothing that is asked for here'}")
    usual = shlex.join(word for name, each in used.items() if not each.key for word in _words(name, each))
    if usual:
        tell(f"batchfinder: by what {config.tool} does where it is not told: {usual}")
    for note in config.notes:
        tell(f"batchfinder: {note}")
    for key, reason in config.left_out.items():
        tell(f"batchfinder: left out: {key} ({reason})")


def check_write(arguments: argparse.Namespace, cells: int = 1) -> None:
    """Check before the work that sizes can be written into the file.

    Args:
        cells: how many answers there will be.

    Raises:
        InvalidValue: there is no file, no place in it, more than one answer, or it cannot be written.
    """
    if arguments.from_file is None:
        raise InvalidValue("--write", True, "--from FILE with it: the file that the sizes are written into")
    config: TrainingConfig = arguments.config
    if not config.micro_batch.key:
        expected = f"a file with a micro-batch size, which a config of {config.tool} has not"
        raise InvalidValue("--write", arguments.from_file, expected)
    if cells != 1:
        raise InvalidValue("--write", arguments.from_file, f"one model, GPU and sequence length, not {cells}")
    number = config.micro_batch.value or 1
    _with_sizes(config, arguments.from_file, {config.micro_batch.key: number})
    path = os.path.realpath(arguments.from_file)
    if not os.access(path, os.W_OK) or not os.access(os.path.dirname(path), os.W_OK):
        raise InvalidValue("--write", arguments.from_file, "a file that can be written, in a folder that can be")


def write_sizes(arguments: argparse.Namespace, plan: AccumulationPlan | None, most: int) -> None:
    """Put what was found into the file, and tell what was changed.

    Args:
        plan: of the effective batch; None without a target.
        most: the largest micro-batch; 0 where nothing fits.

    Raises:
        InvalidValue: the file cannot be written.
    """
    config, path = arguments.config, arguments.from_file
    if not most:
        tell(f"batchfinder: {path} is left as it is: not one sample fits")
        return
    micro, accumulation, effective = config.micro_batch, config.accumulation, config.effective
    numbers = {micro.key: most if plan is None else plan.micro_batch_size}
    if plan is not None:
        if accumulation.key and (accumulation.stated or plan.accumulation > 1):
            numbers[accumulation.key] = plan.accumulation
        if effective.key and (effective.stated or (not accumulation.key and plan.accumulation > 1)):
            numbers[effective.key] = plan.effective_batch_size
    text = _with_sizes(config, path, numbers)
    if text == read_file("--from", path):
        tell(f"batchfinder: {path} has these sizes already, and is left as it is")
        return
    real = os.path.realpath(path)
    beside = f"{real}.batchfinder"
    try:
        Path(beside).write_bytes(text.encode())
        shutil.copymode(real, beside)
        os.replace(beside, real)
    except OSError as error:
        with suppress(OSError):
            os.unlink(beside)
        raise InvalidValue("--write", path, f"a file that can be written ({error.strerror})") from error
    old = {key: config.get(key) for key in numbers}
    changes = [f"{key} {'none' if old[key] is None else old[key]} -> {new}" for key, new in numbers.items()]
    made = "" if plan is None else f" ({plan})"
    tell(f"batchfinder: written into {path}: {', '.join(changes)}{made}")


def _with_sizes(config: TrainingConfig, path: str, numbers: Mapping[str, int]) -> str:
    """The file's text with other numbers.

    Raises:
        InvalidValue: one has no place in it.
    """
    text = read_file("--from", path)
    sizes = (config.micro_batch, config.accumulation)
    for key, number in numbers.items():
        beside = next((size.key for size in sizes if size.stated and size.key != key), "")
        try:
            text = with_number(text, path, key, number, beside)
        except KeyError as error:
            value = config.get(key)
            has = "has no such key" if value is None else f"has {value!r} there"
            raise InvalidValue("--write", f"{path}: {key}", f"the key of a whole number; the file {has}") from error
        except ValueError as error:
            raise InvalidValue("--write", f"{path}: {key}", f"a number that is written as such ({error})") from error
    return text
