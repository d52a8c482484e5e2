"""One row: a peer's search, and what came of it."""

from __future__ import annotations

from typing import Any

from benchmarks.peer.contract import Peer, all_peers
from benchmarks.peer.isolated import Failed, isolated
from benchmarks.peer.judge import trains
from benchmarks.peer.work import Work

SECONDS = 300
"""What a search may take."""


def row(peer: Peer, work: Work, true: int) -> dict[str, Any]:
    """Search, and judge the answer.

    Args:
        peer: who searches.
        work: what is trained; nothing has been counted yet.
        true: the largest size that trains, or the cap where that is less.
    """
    if peer.version is None:
        return {"peer": peer.name, "failed": "not installed"}
    try:
        found = isolated(searched, peer.name, work, seconds=SECONDS, device=work.device)
        size = found["returned"]
        ran = trains(work, peer.driver, size)
    except Failed as failure:
        return {"peer": peer.name, "failed": str(failure)}
    return {"peer": peer.name, **found, "true": true, "share": round(size / true, 4), "trains": ran}


def searched(name: str, work: Work) -> dict[str, Any]:
    """Search in this process, which ends afterwards.

    Args:
        name: the peer's.
        work: what is trained.
    """
    (peer,) = (peer for peer in all_peers() if peer.name == name)
    work.begin()
    found = peer.find(work)
    counts = work.meter.counts
    return {
        "returned": found.batch_size,
        "probes": len(counts.tries),
        "sizes": len(set(counts.tries)),
        "steps": counts.steps,
        "out_of_memory": len(counts.failed),
        "sizes_failed": len(set(counts.failed)),
        "tried": counts.tries,
        "seconds": round(work.seconds, 2),
        "changed": list(found.changed),
    }
