"""What a peer is, and all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

from benchmarks.peer.work import Work

MODULES = (
    "lightning_finder",
    "accelerate_decorator",
    "toma_batch",
    "torch_max_mem_decorator",
    "batch_finder_search",
    "batchfinder_callback",
    "batchfinder_loop",
)


@dataclass(frozen=True)
class Found:
    """What came of a search.

    Attributes:
        batch_size: what it returned; 0 for none.
        changed: what of the training state is not what it would be without the search.
    """

    batch_size: int
    changed: tuple[str, ...]


@dataclass(frozen=True)
class Peer:
    """A way to find a batch size.

    Attributes:
        name: in the table.
        package: the distribution it comes from.
        driver: what it trains with: `loop` or `trainer`.
        find: searches; the work has begun.
        note: what it does not do, or does by design.
    """

    name: str
    package: str
    driver: str
    find: Callable[[Work], Found]
    note: str = ""

    @property
    def version(self) -> str | None:
        """What is installed; None for nothing."""
        try:
            return version(self.package)
        except PackageNotFoundError:
            return None


def all_peers() -> list[Peer]:
    """Every peer, installed or not; only those that search are imported."""
    return [peer for name in MODULES for peer in import_module(f"benchmarks.peer.{name}").PEERS]
