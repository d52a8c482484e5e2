"""How a verb ends when it does not end well."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable

from batchfinder.errors import BatchFinderError

OK, USER_ERROR, BUG, INTERRUPTED = 0, 1, 3, 130


def run_verb(verb: Callable[[argparse.Namespace], int], arguments: argparse.Namespace) -> int:
    """Run a verb and turn what escapes it into a message and an exit code.

    Args:
        verb: takes the parsed arguments and returns an exit code.
        arguments: of the command line.
    """
    warnings.showwarning = _show_warning
    try:
        code = verb(arguments)
        sys.stdout.flush()
        return code
    except BatchFinderError as error:
        print(f"batchfinder: {error}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        print("batchfinder: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has gone; Python would complain once more when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except Exception as error:
        with tempfile.NamedTemporaryFile("w", prefix="batchfinder-", suffix=".log", delete=False) as log:
            log.write(traceback.format_exc())
        print(
            f"batchfinder: a bug of batchfinder's: {type(error).__name__}: {error}\n"
            f"The whole story is in {log.name}; please report it with that file.",
            file=sys.stderr,
        )
        return BUG


def _show_warning(message: Warning | str, *args: object, **kwargs: object) -> None:
    print(f"batchfinder: warning: {message}", file=sys.stderr)
