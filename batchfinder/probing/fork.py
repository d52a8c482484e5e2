"""Work in a fork of this process, which may crash there."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

from batchfinder.step.child import answer, describe


def in_fork(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Do something in a fork of this process.

    Returns:
        What it returned, `{"error": ...}` for what it raised, or `{"exit": code}` where it died.
    """
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            result = work()
        except BaseException as error:
            result = {"error": describe(error)}
        answer(writing, result)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        data = stream.read()
    _, status = os.waitpid(process, 0)
    if not data.endswith(b"\n"):
        return {"exit": os.waitstatus_to_exitcode(status)}
    answered: dict[str, Any] = json.loads(data)
    return answered
