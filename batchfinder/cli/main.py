"""The command line's entry: parse, run the command, and turn errors and signals into exit codes."""

from __future__ import annotations

import errno
import os
import select
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from types import FrameType
from typing import Any

from batchfinder.cli.parser import build_parser, nearest, options_of
from batchfinder.errors import BatchFinderError
from batchfinder.report.terminal import limit_met, printable, tell, words_of

OK, USER_ERROR, WRONG_USAGE, INTERNAL_ERROR, INTERRUPTED = 0, 1, 2, 3, 130
_SIGNALLED = 128


class _Ended(SystemExit):
    """A signal ended this process; its exit code is the one a shell would give."""

    def __init__(self, number: int) -> None:
        self.signal = signal.Signals(number)
        super().__init__(_SIGNALLED + number)


def stdout_error() -> OSError | None:
    """Why nothing can be printed: stdout is closed, nobody reads it, or its disk is full; None where it can be."""
    if sys.stdout is None:
        return OSError(errno.EBADF, "stdout is closed")
    try:
        sys.stdout.flush()
        number = sys.stdout.fileno()
    except (ValueError, AttributeError):  # not a file
        return None
    except OSError as error:
        return error
    try:
        os.write(number, b"")  # a full device and a file opened to be read refuse even that
    except OSError as error:
        return error
    poll = select.poll()
    poll.register(number, 0)  # a pipe without a reader is an error that need not be asked for
    if any(state & select.POLLERR for _, state in poll.poll(0)):
        return BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
    return None


@contextmanager
def _first_signal_raises() -> Iterator[None]:
    """Let the first Ctrl-C, SIGTERM or SIGHUP raise, so that the command cleans up, and ignore the others."""
    # A process that was started to ignore one, as nohup does, still ignores it.
    defaults = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
        signal.SIGHUP: signal.SIG_DFL,
    }
    handled = {number: default for number, default in defaults.items() if signal.getsignal(number) == default}

    def end(number: int, frame: FrameType | None) -> None:
        for each in handled:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt if number == signal.SIGINT else _Ended(number)

    for number in handled:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number, default in handled.items():
            signal.signal(number, default)


def main(argv: Sequence[str]) -> int:
    """Run a command, given the arguments after the program's name.

    Returns:
        0 ok, 1 an error of the user's or an output that cannot be written, 2 wrong usage, 3 an internal error (with a
        log), 130 interrupted; 129, 141 and 143 ended by SIGHUP, by the end of the output's reader and by SIGTERM.
    """
    parser = build_parser()
    if "_ARGCOMPLETE" in os.environ:  # a shell asks what may come next
        with suppress(ImportError):
            import argcomplete

            argcomplete.autocomplete(parser)
    for word in argv:
        option, _, value = word.partition("=")
        if option.startswith("--") and value == "--":  # argparse takes the value for the end of the options
            parser.error(f"argument {printable(option, 100)}: expected one argument")
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{nearest(unknown[0], options_of(arguments))}")
    if sys.platform == "win32":
        tell("batchfinder: Windows is not supported; run it in WSL 2, on Linux or on macOS.")
        return USER_ERROR
    if getattr(arguments, "offline", False):
        os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        with _first_signal_raises(), warnings.catch_warnings():
            warnings.showwarning = lambda message, *more, **others: tell(f"batchfinder: warning: {message}")
            lost = stdout_error()
            if lost is not None:  # before the work, where that can be seen
                raise lost
            if getattr(arguments, "from_file", None) is not None:
                arguments = import_module("batchfinder.cli.from_file").with_file(argv)
            code: int = import_module(f"batchfinder.cli.{arguments.command.replace('-', '_')}").main(arguments)
            sys.stdout.flush()
            return code
    except BatchFinderError as error:
        tell(f"batchfinder: {words_of(error)}")
        return USER_ERROR
    except KeyboardInterrupt:
        tell("batchfinder: interrupted")
        return INTERRUPTED
    except _Ended as ended:
        tell(f"batchfinder: ended by {ended.signal.name}")
        return _SIGNALLED + ended.signal
    except Exception as error:
        lost = stdout_error() if isinstance(error, OSError) else None
        if lost is not None:
            # What is left in its buffer would fail again when Python closes it.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1 if sys.stdout is None else sys.stdout.fileno())
            if isinstance(lost, BrokenPipeError):  # its reader has what it wanted, as `head` has
                return _SIGNALLED + signal.SIGPIPE
            tell(f"batchfinder: the output could not be printed: {lost.strerror}.")
            return USER_ERROR
        raised = f"{type(error).__name__}: {error}"
        if limit := limit_met(raised):
            tell(f"batchfinder: {raised.rstrip(': ')}. {limit}")
            return USER_ERROR
        import tempfile

        kept, words = "", traceback.format_exc()
        settings: dict[str, Any] = {"prefix": "batchfinder-", "suffix": ".log", "encoding": "utf-8", "delete": False}
        with suppress(OSError), tempfile.NamedTemporaryFile("w", errors="backslashreplace", **settings) as log:
            log.write(words)
            kept = f"The traceback is in {log.name}; please report it with that file."
        tell(f"batchfinder: internal error: {raised}\n{kept or words}")
        return INTERNAL_ERROR
