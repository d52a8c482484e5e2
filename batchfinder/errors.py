"""Every exception batchfinder raises.

    BatchFinderError                what went wrong, the numbers, the next move
    ├── InvalidValue                an option or argument has an invalid value
    ├── UnknownName                 no such GPU, instance or model; the nearest ones are named
    ├── OutOfMemory                 a size did not fit
    │   └── SampleDoesNotFit        a sample of the training does not fit on its own
    ├── RecordingFailed             a training step could not be recorded on the fake device
    │   └── RecordingDied           the recording process ended without an answer
    ├── ProbeDied                   the process that took real steps ended twice, for another reason than memory
    ├── UserCodeFailed              the user's code raised; its traceback is kept
    │   └── ContextDied             the error left the CUDA context unusable, twice
    ├── CommandFailed               a command that was run for its memory failed for another reason
    ├── NotSplittable               a batch, or a loss, cannot be split into micro-batches
    ├── SamplesTooLong              samples are longer than every length with a known batch size
    ├── MissingExtra                a package that is needed is not installed
    ├── HubFailed                   a model's config.json cannot be had from the Hugging Face Hub
    ├── CardNeeded                  a GPU is needed and there is none here, or too little of it is free
    ├── CudaStubUnavailable         PyTorch's CUDA build cannot be run here without a GPU
    ├── RankFailed                  another rank raised an error
    ├── RankLost                    another rank has ended or hangs
    └── CacheFailed                 the cache cannot be read or written

The command line prints the text of any of these and exits with 1. Anything else is an internal error.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence


def shown(value: object) -> str:
    """A value as messages have it: on one line, without control characters, and not longer than a few lines."""
    try:
        return shortened(repr(value))
    except ValueError:  # a number of more digits than Python writes
        return f"a number of {value.bit_length()} bits" if isinstance(value, int) else object.__repr__(value)


def shortened(text: str, most: int = 400) -> str:
    """A text without its middle where it has more letters than this."""
    return text if len(text) <= most else f"{text[: most // 2]}...{text[-most // 2 :]}"


def without_middle(text: str, most: int = 20_000) -> str:
    """A text of many lines, such as a traceback, without its middle where it has more letters than this."""
    left_out = len(text) - most
    if left_out <= 0:
        return text
    return f"{text[: most // 2]}\n[{left_out} of {len(text)} characters left out]\n{text[-most // 2 :]}"


class BatchFinderError(Exception):
    """Base of the tree; its text is the message for the user."""


class InvalidValue(BatchFinderError, ValueError):
    """An option or argument has an invalid value.

    Attributes:
        expected: the valid values, in words.
        matches: the nearest valid values, best first; may be empty.
    """

    def __init__(self, option: str, value: object, expected: str, matches: Sequence[str] = ()) -> None:
        self.option = option
        self.value = value
        self.expected = expected
        self.matches = tuple(matches)
        wrong = "missing" if value is None else f"invalid value {shown(value)}"
        nearest = f" Did you mean {' or '.join(self.matches)}?" if self.matches else ""
        super().__init__(f"{option}: {wrong}; expected {expected}.{nearest}")

    def renamed(self, option: str) -> InvalidValue:
        """The same of an option by another name."""
        return InvalidValue(option, self.value, self.expected, self.matches)


class UnknownName(BatchFinderError, LookupError):
    """A look-up by name found nothing.

    Attributes:
        kind: what was looked up (`GPU`, `instance`, `model`).
        matches: the nearest known names, best first; may be empty.
    """

    def __init__(self, kind: str, name: str, matches: Sequence[str], hint: str = "") -> None:
        self.kind = kind
        self.name = name
        self.matches = tuple(matches)
        nearest = f" Did you mean {', '.join(self.matches)}?" if self.matches else ""
        super().__init__(f"unknown {kind} {shown(name)}.{nearest}{' ' + hint if hint else ''}")


class OutOfMemory(BatchFinderError, MemoryError, RuntimeError):
    """A size did not fit. A RuntimeError as well, as `torch.OutOfMemoryError` and accelerate's are."""

    def __init__(self, batch_size: int | None, detail: str) -> None:
        self.batch_size = batch_size
        self.detail = detail
        at = "" if batch_size is None else f"batch size {batch_size} "
        super().__init__(f"{at}does not fit: {detail}")


class SampleDoesNotFit(OutOfMemory):
    """A sample of the training does not fit on its own, so that no micro-batch is small enough.

    Attributes:
        index: its place in its batch, from 0.
        batch_idx: the batch's number in the epoch, from 0.
        seq_len: its padded length in tokens; None where it is not clear.
    """

    def __init__(self, index: int, batch_idx: int, seq_len: int | None, detail: str) -> None:
        super().__init__(1, detail)
        self.index = index
        self.batch_idx = batch_idx
        self.seq_len = seq_len
        length = "" if seq_len is None else f", {seq_len} tokens long,"
        shorter = "" if seq_len is None else "Leave out or cut samples as long as this one, or try "
        self.args = (
            f"sample {index} of batch {batch_idx}{length} ran out of memory on its own, and again with memory released:"
            f" {detail.rstrip('.')}. {shorter or 'Try '}a smaller model, a lower precision, activation checkpointing or"
            " an optimizer with less state.",
        )


class RecordingFailed(BatchFinderError):
    """A training step could not be recorded on the fake device."""


class RecordingDied(RecordingFailed):
    """The recording process ended without an answer.

    Attributes:
        operator: the operator that was running, empty when none was.
        exit_code: the process's exit code, negative for a signal.
        last_words: the end of the process's output.
        line: where in the user's code it was, in words; empty where that is not known.
    """

    def __init__(self, what: str, operator: str, exit_code: int | None, last_words: str = "", line: str = "") -> None:
        self.operator = operator
        self.exit_code = exit_code
        self.last_words = last_words
        self.line = line
        ran = f" while {operator} was running" if operator else ""
        ran += f" {line}" if line else ""
        printed = f" It printed last:\n{last_words}" if last_words else ""
        super().__init__(f"recording {what} ended{ran} (the recording process exited with {exit_code}).{printed}")


class ProbeDied(BatchFinderError):
    """The process that took real steps ended, twice, for another reason than memory.

    Attributes:
        exit_code: the process's exit code, negative for a signal.
        last_words: the end of the process's output.
    """

    def __init__(self, what: str, exit_code: int, last_words: str = "") -> None:
        self.exit_code = exit_code
        self.last_words = last_words
        printed = f" It printed last:\n{last_words}" if last_words else " It printed nothing."
        how = f"exit code {exit_code}"
        if exit_code < 0:
            known = {each.value: each.name for each in signal.Signals}
            how = f"signal {known.get(-exit_code, -exit_code)}"
        super().__init__(
            f"the process that trained {what} ended twice without an answer, with {how}.{printed}\n"
            "Run one training step at this size in a process of your own to see why."
        )


class UserCodeFailed(BatchFinderError):
    """The user's code raised; the traceback shows nothing of ours.

    Attributes:
        what: which code ran (`my.module:factory`).
        traceback: the traceback as text, beginning in the user's code.
    """

    def __init__(self, what: str, traceback: str) -> None:
        self.what = what
        self.traceback = traceback
        super().__init__(f"{what} raised:\n{traceback.rstrip()}")


class ContextDied(UserCodeFailed):
    """The user's code raised an error that left the CUDA context of its process unusable, twice.

    A device-side assertion (an index out of range in an embedding) or an illegal access of a kernel does this.
    """

    def __init__(self, what: str, traceback: str) -> None:
        super().__init__(what, traceback)
        self.args = (
            f"{what} left the CUDA context unusable, twice. It raised:\n{traceback.rstrip()}\n"
            "Run one training step at this size on the CPU, or with CUDA_LAUNCH_BLOCKING=1, to see where.",
        )


class CommandFailed(BatchFinderError):
    """A command that was run for its memory failed for another reason, or did not train on a GPU.

    Attributes:
        command: it.
        batch_size: it was given.
        exit_code: of it.
        output: the last lines that it printed.
    """

    def __init__(self, command: str, batch_size: int, exit_code: int, outcome: str, output: str) -> None:
        self.command, self.batch_size, self.exit_code, self.output = command, batch_size, exit_code, output
        why = f"exit code {exit_code}" if exit_code else outcome
        printed = f" Its last lines:\n{output}" if output else " It printed nothing."
        super().__init__(
            f"the command failed by itself at batch size {batch_size} ({why}): {shortened(command)}. A dry run of it "
            f"says more: batchfinder dry-run -- COMMAND.{printed}"
        )


class NotSplittable(BatchFinderError, ValueError):
    """A batch, or a loss, cannot be split into micro-batches."""

    def __init__(self, reason: str, move: str = "") -> None:
        self.reason = reason
        move = move or (
            "Return a batch from collate_fn whose tensors have the samples along their first dimension, or split it"
            " yourself."
        )
        super().__init__(f"the batch cannot be split: {reason}. {move}")


class SamplesTooLong(BatchFinderError, ValueError):
    """Samples are longer than every length with a known batch size."""

    def __init__(self, count: int, total: int, longest: int, limit: int, what: str, remedy: str) -> None:
        self.count = count
        self.total = total
        self.longest = longest
        self.limit = limit
        super().__init__(
            f"{count} of {total} samples are longer than {limit}, {what}; the longest has {longest}. "
            f"Truncate them or {remedy}; or leave them out with overlong='drop', or train each by itself with "
            "overlong='own', which may run out of memory."
        )


class MissingExtra(BatchFinderError):
    """A package that is needed is not installed, or cannot be imported for a reason."""

    def __init__(self, package: str, extra: str, what: str, reason: str = "") -> None:
        self.package = package
        self.extra = extra
        self.what = what
        super().__init__(
            f"{what} needs {package}, which {f'cannot be imported: {reason}' if reason else 'is not installed'}. "
            f"Install it with: pip install {package} (or batchfinder with its extra: torch-batchfinder[{extra}])"
        )


class HubFailed(BatchFinderError):
    """The config.json of a model cannot be had from the Hugging Face Hub.

    Attributes:
        model: its id.
        reason: why.
    """

    def __init__(self, model: str, reason: str, move: str) -> None:
        self.model = model
        self.reason = reason
        super().__init__(f"no config.json of {shown(model)}: {shortened(reason)}. {move}.")


class CardNeeded(BatchFinderError):
    """A GPU is needed, and there is none here with enough free memory.

    Attributes:
        needed_bytes: what PyTorch's allocator must be able to take of the GPU.
        detail: what needs it, and what there is, in words.
    """

    def __init__(self, needed_bytes: int, detail: str) -> None:
        self.needed_bytes = needed_bytes
        self.detail = detail
        super().__init__(f"{detail}. Run it on such a machine, or leave --measured out: the simulation needs no GPU.")


class CudaStubUnavailable(BatchFinderError):
    """PyTorch's CUDA build cannot be run here without a GPU.

    Attributes:
        reason: why, and what to do about it.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(f"{reason}.")


class RankFailed(BatchFinderError):
    """Another rank raised an error, so that this one cannot go on either."""

    def __init__(self, rank: int, size: int, what: str, raised: str) -> None:
        self.rank = rank
        self.size = size
        self.what = what
        self.raised = raised
        super().__init__(
            f"rank {rank} of {size} raised this when it {what}, so that all ranks end: {raised}\n"
            f"Rank {rank} prints its own traceback."
        )


class RankLost(BatchFinderError):
    """Another rank has ended, or did not answer within the time limit."""

    def __init__(
        self, rank: int, size: int, seconds: float, detail: str, what: str = "", missing: Sequence[int] = ()
    ) -> None:
        self.rank = rank
        self.size = size
        self.seconds = seconds
        self.detail = detail
        self.what = what
        self.missing = missing
        others = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}" if missing else "another rank"
        when = f" when it {what}" if what else ""
        super().__init__(
            f"rank {rank} of {size} waited for {others}, which ended or did not answer within {seconds:g} s{when}: "
            f"{detail}\nThe output of the other ranks says what happened there. If one of them was only slow, allow "
            "more time: timeout= of init_process_group, of a Lightning trainer's strategy, or ddp_timeout of "
            "TrainingArguments."
        )


class CacheFailed(BatchFinderError):
    """The cache cannot be read or written."""

    def __init__(self, url: str, reason: str) -> None:
        self.url = url
        self.reason = reason
        super().__init__(
            f"the cache at {url} cannot be used: {reason}. "
            "Set BATCHFINDER_CACHE or --cache to a place that can be written, or pass --no-cache."
        )
