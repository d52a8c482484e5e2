"""The process on the stub: calls the function, or runs the script, and writes down what the allocator counted."""

from __future__ import annotations

import contextlib
import os
import pickle
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any


def main(root: str, folder: Path, keep_events: bool, script: list[str]) -> int:
    """Do the work that lies in the folder, or run the script; the result lies there afterwards."""
    import cloudpickle
    import torch

    if keep_events:
        torch.cuda.memory._record_memory_history(max_entries=sys.maxsize, stacks="python", context=None)
    seen: dict[str, Any] = {}
    code = 0
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
    (folder / "partial").write_bytes(cloudpickle.dumps(seen))
    (folder / "partial").rename(folder / "result")
    return code


if __name__ == "__main__":
    sys.path.append(sys.argv[1])
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3] == "1", sys.argv[4:]))
