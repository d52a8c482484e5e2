# PYTHON_ARGCOMPLETE_OK
"""`python -m batchfinder` and the `batchfinder` script."""

from __future__ import annotations

import io
import os
import sys


def run() -> int:
    """Run the command line with this process's arguments."""
    # A file that is opened later must not become one of the standard streams, where those were closed.
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest number that is free
    sys.stdin = sys.stdin or os.fdopen(0)
    sys.stderr = sys.stderr or os.fdopen(2, "w")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # the name of a file may be no text
    from batchfinder.cli.main import main, stdout_error

    try:
        return main(sys.argv[1:])
    except SystemExit:  # with the help, or with wrong usage
        lost = stdout_error()
        if lost is None or sys.stdout is None:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python would complain as it closes it
        if isinstance(lost, BrokenPipeError):  # its reader may well have had all of it
            raise
        return 1


if __name__ == "__main__":
    sys.exit(run())
