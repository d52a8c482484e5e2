"""The command line's entry: parse, run the command, and turn errors and signals into exit codes."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from types import FrameType
from typing import Any

from batchfinder.cli.parser import build_parser
from batchfinder.errors import BatchFinderError

OK, USER_ERROR, INTERNAL_ERROR, INTERRUPTED = 0, 1, 3, 130
_SIGNALLED = 128


class _Ended(SystemExit):
    """A signal ended this process; its exit code is the one a shell would give."""

    def __init__(self, number: int) -> None:
        self.signal = signal.Signals(number)
        super().__init__(_SIGNALLED + number)


def run_command(module: str, arguments: argparse.Namespace) -> int:
    """Import and run a command, and turn what escapes it into a message and an exit code.

    Args:
        module: has a `main` that takes the parsed arguments and returns an exit code.
        arguments: of the command line.
    """
    if sys.platform == "win32":
        print("batchfinder: Windows is not supported; run it in WSL 2, on Linux or on macOS.", file=sys.stderr)
        return USER_ERROR
    try:
        with _first_signal_raises(), warnings.catch_warnings():
            warnings.showwarning = lambda message, *more, **others: print(
                f"batchfinder: warning: {message}", file=sys.stderr
            )
            code: int = import_module(module).main(arguments)
            sys.stdout.flush()
            return code
    except BatchFinderError as error:
        print(f"batchfinder: {error}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        print("batchfinder: interrupted", file=sys.stderr)
        return INTERRUPTED
    except _Ended as ended:
        with suppress(OSError):  # the terminal may be gone
            print(f"batchfinder: ended by {ended.signal.name}", file=sys.stderr)
        return _SIGNALLED + ended.signal
    except BrokenPipeError:
        # The reader of the output is gone; Python would complain once more when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except Exception as error:
        import tempfile

        settings: dict[str, Any] = {"prefix": "batchfinder-", "suffix": ".log", "encoding": "utf-8", "delete": False}
        with tempfile.NamedTemporaryFile("w", **settings) as log:
            log.write(traceback.format_exc())
        print(
            f"batchfinder: internal error: {type(error).__name__}: {error}\n"
            f"The traceback is in {log.name}; please report it with that file.",
            file=sys.stderr,
        )
        return INTERNAL_ERROR


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
        0 ok, 1 an error of the user's, 2 wrong usage, 3 an internal error (with a log), 130 interrupted; 129 and 143
        ended by SIGHUP and SIGTERM.
    """
    arguments = build_parser().parse_args(argv)
    return run_command(f"batchfinder.cli.{arguments.command}", arguments)
