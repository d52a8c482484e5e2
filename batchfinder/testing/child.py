"""The process on the stub: calls the function, or runs the script, and writes down what the allocator counted.

Functions are called in forks of one such process, which has imported torch and what earlier functions have imported:
that takes longer than most of them do.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import pickle
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn


def main(root: str, folder: Path, keep_events: bool, script: list[str]) -> int:
    """Do the work that lies in the folder, or run the script; the result lies there afterwards."""
    import cloudpickle
    import torch

    if keep_events:
        torch.cuda.memory._record_memory_history(max_entries=sys.maxsize, stacks="python", context=None)
    seen: dict[str, Any] = {}
    code, before = 0, set(sys.modules)
    try:
        if script:
            sys.argv = script
            sys.path[0] = os.path.dirname(os.path.abspath(script[0]))
            runpy.run_path(script[0], run_name="__main__")
        else:
            function, args, kwargs = pickle.loads((folder / "work").read_bytes())
            seen["result"] = function(*args, **kwargs)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        words = traceback.format_exc()
        code = 1
        if script:
            print(words, file=sys.stderr, end="")
        else:
            seen |= {"words": f"{type(error).__name__}: {error}", "traceback": words, "raised": b""}
            with contextlib.suppress(Exception):  # it may hold what cannot be pickled
                seen["raised"] = cloudpickle.dumps(error.with_traceback(None))
    used = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else range(0)
    seen["stats"] = [dict(torch.cuda.memory_stats(card)) for card in used]
    seen["events"] = []
    if keep_events and torch.cuda.is_initialized():
        traces = torch.cuda.memory._snapshot()["device_traces"]
        seen["events"] = [[{k: v for k, v in event.items() if k != "frames"} for event in trace] for trace in traces]
    seen["imported"] = [each for each in sys.modules if each not in before and each.partition(".")[0] in _KEPT]
    (folder / "partial").write_bytes(cloudpickle.dumps(seen))
    (folder / "partial").rename(folder / "result")
    return code


_KEPT = ("torch", "pytorch_lightning", "lightning", "transformers")
"""Packages that take long to import and have no threads of their own."""


def serve(root: str) -> None:
    """Fork for each request, a line of JSON on stdin; tell the fork's id on stdout, and in the end its exit code."""
    import cloudpickle  # noqa: F401
    import torch

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what is printed as something is imported
    for line in sys.stdin:
        request = json.loads(line)
        for name in request["imported"]:
            if name not in sys.modules:
                with contextlib.suppress(Exception):  # a function's own import says why
                    importlib.import_module(name)
        if torch.cuda.is_initialized():
            return  # a fork could not use it
        child = os.fork()
        if child == 0:
            _answer(root, request)
        print(child, file=answers, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=answers, flush=True)


def _answer(root: str, request: dict[str, Any]) -> NoReturn:
    """Be the process that was asked for."""
    import torch

    code = 1
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        output = os.open(Path(request["folder"]) / "output", os.O_WRONLY | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["directory"])
        torch.cuda._cached_device_count = None  # asked for as something was imported
        if (events := sys.modules.get("batchfinder.recording.cuda_build.events")) is not None:
            events.tell_as_well()
        code = main(root, Path(request["folder"]), request["keep_events"], [])
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    sys.path.append(sys.argv[1])
    if sys.argv[2:] == ["serve"]:
        serve(sys.argv[1])
        sys.exit()
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3] == "1", sys.argv[4:]))
