"""A worker that hangs, dies, fails or answers, as each request says."""

from __future__ import annotations

import os
import sys
import time

from batchfinder.training.child_process import answer, end_with_parent, requests_from


def main(argv: list[str]) -> int:
    """Serve requests; the arguments are the request pipe, the answer pipe and the device."""
    requests, answers, device = int(argv[0]), int(argv[1]), argv[2]
    end_with_parent(requests)
    for request in requests_from(requests):
        if "wait" in request:
            time.sleep(600)
        if "die" in request:
            print("about to die", flush=True)
            os._exit(7)
        answer(answers, {"error": "it failed", "dead": True} if "fail" in request else {"device": device})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
