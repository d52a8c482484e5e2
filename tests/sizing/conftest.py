"""The command line beside its functions in Python."""

from tests.cli.conftest import _no_card_here, run

__all__ = ["_no_card_here", "run"]
