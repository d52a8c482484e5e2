"""`find`: the largest batch size of the user's training command on simulated GPUs."""

from __future__ import annotations

import argparse
import json

from batchfinder.cli.dry_run import NO_ANSWER
from batchfinder.cli.main import OK
from batchfinder.cli.options import whole_number
from batchfinder.cli.stub import cards_of, command_of, ranks_of
from batchfinder.cuda_stub import StubCard
from batchfinder.errors import BatchFinderError, InvalidValue
from batchfinder.programs import CommandTemplate, ConfigPlace, find_for_command
from batchfinder.programs.real_gpus import real_gpu
from batchfinder.report.find import found_as_json, found_table, trial_words
from batchfinder.report.terminal import tell, words_of
from batchfinder.results import Trial
from batchfinder.stub_cards import find_cuda_build
from batchfinder.training.synonyms import one_of
from batchfinder.units import parse_share

_SIMULATED_ONLY = ("gpu", "memory", "held", "torch", "num_gpus", "again")


def main(arguments: argparse.Namespace) -> int:
    """Find it for each GPU and length.

    Returns:
        0 with an answer, also where not even one sample fits; 2 if the command failed or an option is wrong.
    """
    try:
        return _find(arguments)
    except BatchFinderError as error:
        tell(f"batchfinder: {words_of(error)}")
        return NO_ANSWER


def _find(arguments: argparse.Namespace) -> int:
    argv = command_of(arguments)
    real = one_of("--device", arguments.device, ("cuda", "simulated")) == "cuda"
    if real and (unused := [f"--{name.replace('_', '-')}" for name in _SIMULATED_ONLY if getattr(arguments, name)]):
        raise InvalidValue(unused[0], None, "nothing beside --device cuda, which runs it on the GPU that is here")
    environment = dict(_variable(each) for each in arguments.env)
    count, nodes = ranks_of(arguments) or (whole_number("--count", arguments.count), None)
    asked = [whole_number("--seq-len", each) for each in (arguments.seq_len or "").split(",") if arguments.seq_len]
    numbers = {
        name: None
        if (value := getattr(arguments, name)) is None
        else whole_number(f"--{name.replace('_', '-')}", value)
        for name in ("target_batch_size", "steps", "epochs", "max_batch_size", "jobs")
    }
    template = CommandTemplate(
        tuple(argv),
        environment,
        tuple(map(ConfigPlace.parse, arguments.config)),
        numbers.pop("target_batch_size"),
        count,
        nodes,
    )
    if ("seq_len" in template.names) != bool(asked):
        raise InvalidValue("--seq-len", arguments.seq_len, "lengths where the command has {seq_len} in it, else none")
    arguments.count = "1"  # of each kind: they are searched for one by one
    cards = [real_gpu()] if real else cards_of(arguments)

    def tell_trial(card: StubCard, trial: Trial) -> None:
        tell(f"batchfinder: {trial_words(card, trial)}")

    where = "in this folder: what it writes stays" if arguments.here else "in temporary copies of this folder"
    tell(f"batchfinder: running {' '.join(argv)} {where}")
    found = find_for_command(
        template,
        cards,
        asked or (None,),
        real=real,
        scratch=not arguments.here,
        tolerance=parse_share(arguments.tolerance, "--tolerance"),
        online=arguments.online,
        again=arguments.again,
        build=None if real else find_cuda_build(arguments.torch),
        on_trial=tell_trial,
        **numbers,
    )
    if arguments.json:
        print(json.dumps(found_as_json(found), indent=1))
    else:
        found_table(found, arguments.explain).show()
    return OK


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise InvalidValue("--env", text, "NAME=VALUE, such as BS={batch_size}")
    return name, value
