"""Real steps in processes of their own, under a real RLIMIT_AS."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.loop import limited


@pytest.mark.slow
def test_the_answer_runs_and_a_tenth_more_does_not(tmp_path: Path) -> None:
    """The process that searched trains at its answer; at the next start, which knows it, a tenth more fails."""
    tune = {"tolerance": 0.03, "cache": str(tmp_path)}
    first = limited.run(limit_mib=192, tune=tune)
    assert (first["source"], first["verdict"], first["steps"]) == ("measured", None, limited.STEPS)
    assert first["limit_unchanged"]
    assert any(not fits for _, fits in first["trials"])

    more = int(1.1 * first["largest"]) + 1
    second = limited.run(limit_bytes=first["limit_bytes"], tune=tune, batch_size=more)
    # It looks the answer up and, where this process began with 2 MiB less, tries it first.
    assert second["trials"][:1] in ([], [[first["largest"], True]], [[first["largest"], False]])
    assert second["largest"] >= 0.9 * first["largest"]
    assert (second["verdict"], second["steps"] < limited.STEPS) == ("OUT_OF_MEMORY", True)
