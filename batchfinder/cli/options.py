"""Option text to values, and the files that options name; a value that cannot be used ends with a clear message."""

from __future__ import annotations

import argparse
import errno
import os
import select
import stat
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from batchfinder.devices import Card, Price, find_instance, known_prices, parse_prices, present_gpus
from batchfinder.devices.cards import card, card_here, instance_card
from batchfinder.errors import InvalidValue
from batchfinder.training.spec import StepOptions
from batchfinder.units import format_bytes, parse_count

MAX_READ_BYTES = 64 << 20
"""What is read of a file at most: an exported cache of tens of thousands of results."""
_PIPE_SECONDS = 10.0


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


DEFAULT_GPU = "t4"
"""What is simulated where neither a GPU is named nor one is here: the one that Colab and Kaggle give."""


def step_options(arguments: argparse.Namespace) -> StepOptions:
    """The options of the step, which must go together; with a strategy all of an instance's GPUs take part.

    Raises:
        InvalidValue: one has an invalid value, or one that another rules out.
        UnknownName: no such instance.
    """
    given = {each.name: getattr(arguments, each.name) for each in fields(StepOptions) if each.name != "recorder"}
    if given["gpus"] is None and arguments.strategy is not None:
        instance = only_one("--instance", arguments.instance)
        given["gpus"] = None if instance is None else find_instance(instance).num_gpus
    return StepOptions.checked(**given)


def asked_card(arguments: argparse.Namespace, count: int | None = None) -> tuple[Card, str]:
    """What `--gpu`, `--budget`, `--context` and `--instance` ask for; `count` is of GPUs.

    Where they ask for none it is this machine's first GPU, or else one that many can use.

    Returns:
        The card, and what the user is told of one that was not named; empty for one that was.

    Raises:
        InvalidValue: several GPUs or instances, more GPUs than the instance has, or no size for a budget.
        UnknownName: no such GPU or instance.
    """
    gpu, instance = only_one("--gpu", arguments.gpu), only_one("--instance", arguments.instance)
    if instance is not None:
        if gpu is not None:
            raise InvalidValue("--gpu", gpu, "either a --gpu or an --instance, not both")
        return instance_card(instance, arguments.budget, count, arguments.context), ""
    if gpu is not None or arguments.budget:
        return card(gpu, arguments.budget, count or 1, arguments.context), ""
    if here := present_gpus():
        chosen = card_here(here[0], count or 1, arguments.context)
        return chosen, f"no --gpu is named: simulating {chosen.name}, which is here"
    chosen = card(DEFAULT_GPU, None, count or 1, arguments.context)
    return chosen, f"no GPU was found here, and no --gpu is named: simulating {chosen.name}"


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


def whole_number(option: str, value: str | None) -> Any:
    """The value as an int of at least 1; None for an option that was not given.

    Raises:
        InvalidValue: it is not one, or larger than what any machine could train.
    """
    return None if value is None else parse_count(value, option)
