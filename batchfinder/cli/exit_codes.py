"""How a verb ends when it does not end well."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from types import FrameType

from batchfinder.errors import BatchFinderError

OK, USER_ERROR, BUG, INTERRUPTED = 0, 1, 3, 130
_SIGNALLED = 128


class _Ended(SystemExit):
    """A signal asked this process to end; its exit code is the one a shell would give."""

    def __init__(self, number: int) -> None:
        self.signal = signal.Signals(number)
        super().__init__(_SIGNALLED + number)


def run_verb(module: str, arguments: argparse.Namespace) -> int:
    """Import and run a verb, and turn what escapes it into a message and an exit code.

    Args:
        module: has a `main` that takes the parsed arguments and returns an exit code.
        arguments: of the command line.
    """
    try:
        with _ended_once(), warnings.catch_warnings():
            warnings.showwarning = _show_warning
            code: int = import_module(module).main(arguments)
            sys.stdout.flush()
            return code
    except BatchFinderError as error:
        print(f"batchfinder: {error}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt as interrupt:
        print("; ".join(["batchfinder: interrupted", *map(str, interrupt.args)]), file=sys.stderr)
        return INTERRUPTED
    except _Ended as ended:
        with suppress(OSError):  # the terminal may have gone
            print(f"batchfinder: ended by {ended.signal.name}", file=sys.stderr)
        return _SIGNALLED + ended.signal
    except BrokenPipeError:
        # Whoever read our output has gone; Python would complain once more when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except Exception as error:
        print(
            f"batchfinder: a bug of batchfinder's: {type(error).__name__}: {error}\n"
            f"The whole story is in {_log(traceback.format_exc())}; please report it with that file.",
            file=sys.stderr,
        )
        return BUG


@contextmanager
def _ended_once() -> Iterator[None]:
    """Let the first Ctrl-C, SIGTERM or SIGHUP end the verb by an exception, so that it cleans up behind itself.

    And no other one: an impatient second would cut the cleaning up short.
    """
    # A process that was started to ignore one, as by nohup, still does.
    defaults = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
        signal.SIGHUP: signal.SIG_DFL,
    }
    ours = {number: default for number, default in defaults.items() if signal.getsignal(number) == default}

    def end(number: int, frame: FrameType | None) -> None:
        for each in ours:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt if number == signal.SIGINT else _Ended(number)

    for number in ours:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number, default in ours.items():
            signal.signal(number, default)


def _log(text: str) -> str:
    import tempfile

    with tempfile.NamedTemporaryFile("w", prefix="batchfinder-", suffix=".log", encoding="utf-8", delete=False) as log:
        log.write(text)
    return log.name


def _show_warning(message: Warning | str, *args: object, **kwargs: object) -> None:
    print(f"batchfinder: warning: {message}", file=sys.stderr)
