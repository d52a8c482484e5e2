from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from batchfinder.probing.cpu import MALLOC

pytestmark = pytest.mark.slow

_ROOT = Path(__file__).parents[2]


def _run(code: str) -> object:
    """Run code in a process with a worker's environment; it prints JSON."""
    environment = {**os.environ, **MALLOC, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=_ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_every_failure_under_a_tight_limit_is_recognised():
    """Whatever gives way first at 60 random tight limits (PyTorch, oneDNN, C++, Python), it is an out-of-memory.

    A size that runs never had a peak above its limit. Without the rows for a text that was cut short and for oneDNN,
    and without a second look at a crash, about one failure in five is missed.
    """
    verdicts = _run("""
        import json, random
        from batchfinder.probing.worker import open_workload
        served = open_workload("tests.probing.workloads:convolutions", {}, {}, "cpu", 1, 1)
        rng, seen = random.Random(5), []
        for _ in range(60):
            served.limit_bytes = served.held_bytes + rng.randrange(14_000_000)
            result = served.probe(rng.choice([1, 2, 8]), None)
            measurement = result.get("measurement", {})
            over = (measurement.get("peak_reserved_bytes") or 0) > served.limit_bytes
            seen.append("over the limit" if over else measurement.get("verdict", str(result)))
        print(json.dumps(seen))
    """)
    assert set(verdicts) == {"FITS", "OUT_OF_MEMORY"}


def test_a_crash_that_more_memory_does_not_cure_is_a_crash():
    """A segmentation fault at the limit is run again with an eighth more; only one that is gone then was for memory."""
    results = _run("""
        import json
        from batchfinder.probing.worker import open_workload
        results = []
        for deed in ("SIGSEGV", "exit"):
            arguments = {"deed": deed, "at": 1}
            served = open_workload("tests.probing.workloads:misbehaving", arguments, {}, "cpu", 10**9, 1)
            results.append(served.probe(1, None))
        print(json.dumps(results))
    """)
    assert results == [{"exit": -11}, {"exit": 7}]


def test_a_crash_that_more_memory_cures_is_an_out_of_memory():
    """The message says what happened and what was found."""
    result = _run("""
        import json, os, signal
        from batchfinder.probing import address_space
        from batchfinder.probing.worker import open_workload
        served = open_workload("tests.probing.workloads:encoder", {}, {}, "cpu", 80_000_000, 1)
        forward = served.workload.model.forward
        import resource
        limit = address_space.size_bytes() - served.held_bytes + 80_000_000

        def crash_at_the_limit(ids):
            if resource.getrlimit(resource.RLIMIT_AS)[0] <= limit:
                os.kill(os.getpid(), signal.SIGSEGV)
            return forward(ids)

        served.workload.model.forward = crash_at_the_limit
        print(json.dumps(served.probe(1, 8)["measurement"]))
    """)
    assert result["verdict"] == "OUT_OF_MEMORY"
    assert result["message"] == "it crashed (exit code -11) for want of memory: with 1/8 more it did not"


def test_weights_are_cast_where_the_precision_asks():
    """In bf16-true the model is held in half the bytes, before any probe."""
    held = _run("""
        import json
        from batchfinder.probing.worker import open_workload
        full, half = (
            open_workload("tests.probing.workloads:encoder", {}, {"precision": precision}, "cpu", None, 1)
            for precision in ("fp32", "bf16-true")
        )
        print(json.dumps([full.held_bytes, half.held_bytes, half.probe(1, 8)["measurement"]["verdict"]]))
    """)
    assert held == [held[0], held[0] // 2, "FITS"]


def test_the_model_counts():
    """The budget is for the model too: with plain SGD the peak is weights and gradients and little more."""
    held, peak = _run("""
        import json
        from batchfinder.probing.worker import open_workload
        arguments = {"width": 512}
        served = open_workload("tests.probing.workloads:encoder", arguments, {"optimizer": "sgd"}, "cpu", None, 1)
        print(json.dumps([served.held_bytes, served.probe(1, 1)["measurement"]["peak_reserved_bytes"]]))
    """)
    assert held > 25_000_000
    assert 2 * held <= peak <= 2.3 * held


def test_flash_attention_is_flash_or_an_error():
    """Asked for the flash kernel, a step runs in it; where there is none, the message says what would do."""
    fits, refused = _run("""
        import json
        from torch.profiler import profile
        from batchfinder.errors import InvalidValue
        from batchfinder.probing.worker import open_workload
        served = [
            open_workload("tests.probing.workloads:attending", {"dropout": dropout}, {}, "cpu", None, 1, flash=True)
            for dropout in (0.0, 0.1)
        ]
        with profile() as seen:
            served[0].limited(2, 8, None)
        kernels = {event.key for event in seen.key_averages() if "flash" in event.key}
        answer = served[1].probe(2, 8)
        print(json.dumps([sorted(kernels), answer["error"]["message"]]))
    """)
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in fits
    assert refused == (
        "attention: 'flash' will not do; expected sdpa or eager: PyTorch has no flash kernel for this step here; on a "
        "card it needs compute capability 8.0, half precision, heads of at most 256 and no mask, on a CPU no dropout "
        "in the attention."
    )
