"""What a card says of itself, asked in a process of its own. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from batchfinder.errors import InvalidValue
from batchfinder.step.child import Child, ChildDied, revive

WORKER = "batchfinder.probing.worker"


@dataclass(frozen=True)
class CardFacts:
    """A card as CUDA sees it.

    Attributes:
        name: as the driver prints it.
        total_bytes: what it has.
        free_bytes: what is free of it for the allocator of a process that has its context already.
        compute_capability: major and minor.
        versions: of PyTorch and of CUDA or HIP.
    """

    name: str
    total_bytes: int
    free_bytes: int
    compute_capability: tuple[int, int]
    versions: dict[str, str] = field(default_factory=dict)


def look_at(device: str) -> CardFacts:
    """Ask a card, in a process that ends then.

    Args:
        device: as `torch.device` takes it.

    Raises:
        InvalidValue: there is no such card, or PyTorch cannot use it.
    """
    with Child(WORKER) as child:
        return look_through(child, device)


def look_through(child: Child, device: str) -> CardFacts:
    """Ask a card, in a process that is there already.

    Args:
        child: runs `WORKER`, and has opened nothing yet.
        device: as `torch.device` takes it.

    Raises:
        InvalidValue: there is no such card, or PyTorch cannot use it.
        UserCodeFailed: PyTorch raised, as it does where another process has the card for itself.
    """
    try:
        answer = child.ask({"look": {"device": device}})
    except ChildDied as death:
        expected = f"a card that PyTorch can use; the process that looked at it ended with {death.exit_code}"
        raise InvalidValue("device", device, f"{expected}: {death.last_words or 'it printed nothing'}") from death
    if "error" in answer:
        raise revive(answer["error"], f"looking at {device}")
    card = answer["card"]
    return CardFacts(**{**card, "compute_capability": tuple(card["compute_capability"])})
