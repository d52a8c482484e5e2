"""The options of `cache`. Nothing heavy is imported here, so that `--help` is quick.

Every verb's options. Nothing heavy is imported here, so that `--help` is quick.

Values are taken as text and checked in `options.py`: argparse would end with 2 and its own words for a wrong value, and
these are values, not usage.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from batchfinder.reproductions import REPRODUCTIONS


def cache_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `cache` and of what it does."""
    deeds = parser.add_subparsers(dest="deed", required=True, metavar="DEED")

    lists = _deed(deeds, "list", "print what is known, a line for each answer")
    lists.add_argument("--json", action="store_true", help="print JSON instead of a table")

    show = _deed(deeds, "show", "print one answer with all that it depends on and every size tried")
    show.add_argument("record", metavar="RECORD", help="the first digits of its name in the list")
    show.add_argument("--json", action="store_true", help="print JSON instead of tables")

    clear = _deed(deeds, "clear", "forget everything, or only the answers named")
    clear.add_argument("record", nargs="*", metavar="RECORD", help="the first digits of a name in the list")

    export = _deed(deeds, "export", "write every answer to one file, for another machine")
    export.add_argument("file", metavar="FILE", help="the file to write; - for stdout")

    imports = _deed(deeds, "import", "take the answers of an exported file; of two for one question the newer stays")
    imports.add_argument("file", metavar="FILE", help="the file to read; - for stdin")


def _deed(deeds: argparse._SubParsersAction[argparse.ArgumentParser], name: str, says: str) -> argparse.ArgumentParser:
    deed = deeds.add_parser(name, help=says, description=f"{says[0].upper()}{says[1:]}.")
    deed.add_argument("--cache", metavar="URL", help="which cache (default: BATCHFINDER_CACHE or the user's)")
    return deed


MODES = ("train", "forward", "inference")
PRECISIONS = ("fp32", "bf16-mixed", "16-mixed", "bf16-true")
OPTIMIZERS = ("adamw", "adamw-fused", "adam", "sgd", "sgd-momentum", "adafactor")
ATTENTIONS = ("eager", "sdpa", "flash")
TABLE_FORMATS = ("json", "lhotse")

_MODEL = "NAME|PATH|MODULE:FACTORY"


def sweep_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `sweep`."""
    what = parser.add_argument_group("what is swept")
    what.add_argument(
        "--model",
        action="append",
        metavar=_MODEL,
        help="a named model, a config.json or its folder, or your own factory; repeatable (default: two BERTs)",
    )
    what.add_argument("--seq-len", action="append", metavar="N", help="tokens, or pixels for images; repeatable")
    what.add_argument(
        "--device",
        default="auto",
        metavar="NAME",
        help="cuda, cuda:1 or cpu: real training steps on it; simulated: none; auto (default): real steps on the card "
        "here, unless there is none or --gpu or --instance names another",
    )
    what.add_argument(
        "--gpu", action="append", metavar="NAME", help="to simulate; repeatable (default: the card here, or a Titan X)"
    )
    what.add_argument("--instance", metavar="NAME", help="to simulate: a cloud instance's GPUs, such as p4d.24xlarge")
    what.add_argument(
        "--budget", metavar="SIZE", help="the most that may be used of a card, or of the RAM, such as 12GiB"
    )
    _step_arguments(parser)
    how = parser.add_argument_group("the search")
    how.add_argument("--target-batch-size", metavar="N", help="add micro-batch x accumulation for this effective batch")
    how.add_argument("--max-batch-size", metavar="N", help="look no further than this")
    how.add_argument(
        "--tolerance",
        metavar="SHARE",
        default="0.01",
        help="how far a measured answer may be under the largest; 0 for exact, as simulated ones are (default: 0.01)",
    )
    how.add_argument("--headroom", metavar="SHARE|SIZE", default="0", help="leave this much free: 0.1, 10%% or 1GiB")
    how.add_argument("--cache", metavar="URL", help="where results are kept (default: BATCHFINDER_CACHE or the user's)")
    how.add_argument("--no-cache", action="store_true", help="neither look results up nor keep them")
    out = parser.add_argument_group("the output")
    _json_argument(out)
    out.add_argument("--markdown", metavar="FILE", help="write the table as Markdown, too")
    out.add_argument("--csv", metavar="FILE", help="write all figures as CSV, too")
    _plot_argument(out)


def profile_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `profile`."""
    what = parser.add_argument_group("what is profiled")
    what.add_argument("--model", default="bert-base", metavar=_MODEL, help="default: bert-base")
    what.add_argument("--batch-size", default="8", metavar="N", help="samples in a micro-batch (default: 8)")
    what.add_argument("--seq-len", metavar="N", help="tokens, or pixels for images (default: 128 or 224)")
    what.add_argument("--gpu", metavar="NAME", help="default: Titan X, unless a budget is given")
    what.add_argument("--budget", metavar="SIZE", help="the most that may be used of the card, such as 12GiB")
    what.add_argument("--accumulation", default="1", metavar="N", help="micro-batches per optimizer step (default: 1)")
    _step_arguments(parser)
    out = parser.add_argument_group("the output")
    _json_argument(out)
    _plot_argument(out)
    out.add_argument("--snapshot", metavar="FILE", help="write all events, too: a .pickle for pytorch.org/memory_viz")


def estimate_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `estimate`."""
    what = parser.add_argument_group("what is estimated")
    what.add_argument("--model", default="bert-base", metavar=_MODEL, help="default: bert-base")
    what.add_argument("--batch-size", default="8", metavar="N", help="samples in a GPU's micro-batch (default: 8)")
    what.add_argument("--seq-len", metavar="N", help="tokens, or pixels for images (default: 128 or 224)")
    what.add_argument("--gpu", metavar="NAME", help="default: Titan X, unless an instance or a budget is given")
    what.add_argument("--instance", metavar="NAME", help="a cloud instance's GPUs, such as p4d.24xlarge")
    what.add_argument("--num-gpus", metavar="N", help="how many train side by side (default: the instance's, or 1)")
    what.add_argument("--budget", metavar="SIZE", help="the most that may be used of a card, such as 12GiB")
    what.add_argument("--accumulation", default="1", metavar="N", help="micro-batches per optimizer step (default: 1)")
    _step_arguments(parser)
    out = parser.add_argument_group("the output")
    out.add_argument("--by", metavar="WHAT", help="module: add what each module of the model holds")
    out.add_argument("--advice", action="store_true", help="add what each change would buy, also where it fits")
    _json_argument(out)
    out.add_argument("--markdown", metavar="FILE", help="write the tables as Markdown, too")
    _plot_argument(out)


def reproduce_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `reproduce`."""
    names = ", ".join(REPRODUCTIONS)
    parser.add_argument("table", nargs="?", default="all", metavar="TABLE", help=f"{names} or all (default: all)")
    parser.add_argument(
        "--measured", action="store_true", help="run the cells for real as well, on a GPU here with the memory for it"
    )
    out = parser.add_argument_group("the output")
    _json_argument(out)
    out.add_argument("--markdown", metavar="FILE", help="write the tables as Markdown, too")


def table_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `table`."""
    parser.add_argument("file", metavar="FILE", help="what `batchfinder sweep --json` printed; - for stdin")
    parser.add_argument("--format", default="json", metavar="NAME", help=f"{', '.join(TABLE_FORMATS)} (default: json)")
    parser.add_argument("--model", metavar="NAME", help="which, where the file has several")
    parser.add_argument("--gpu", metavar="NAME", help="which, where the file has several")


def _step_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the step")
    _choice(group, "--mode", MODES, "train")
    _choice(group, "--precision", PRECISIONS, "fp32")
    _choice(group, "--optimizer", OPTIMIZERS, "adamw")
    _choice(group, "--attention", ATTENTIONS, None)
    group.add_argument("--gradient-checkpointing", action="store_true", help="recompute activations in the backward")


def _choice(group: argparse._ArgumentGroup, option: str, names: Sequence[str], default: str | None) -> None:
    said = f"{', '.join(names)} (default: {default or 'the model chooses'})"
    group.add_argument(option, default=default, metavar="NAME", help=said)


def _json_argument(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--json", action="store_true", help="print JSON instead of a table")


def _plot_argument(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--plot", metavar="FILE", help="draw the results, too: a .png or .svg (needs matplotlib)")
