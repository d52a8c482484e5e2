"""Random fits: what is trained, on which data, with which trainer and on which card, all of it from one seed."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from typing import Any

from batchfinder.units import GIB

TEXT = ("bert", "gpt2")
NETS = (*TEXT, "conv", "vit", "lstm", "gan")
CARDS = ("A100", "H100", "T4", "RTX 4090", "V100 16GB")


@dataclass(frozen=True)
class Fit:
    """One fit, apart from its batch size.

    Attributes:
        seed: it was drawn with.
        net: a name in `NETS`.
        width: of the hidden states, or channels of the first convolution.
        layers: how many.
        vocabulary: of a text model.
        longest: tokens of the longest sample, or pixels of an image's side.
        lengths: `fixed` or `free`.
        mask: whether a text model is given its attention mask.
        samples: in the data set.
        shuffle: whether they are shuffled.
        drop_last: whether the epoch's smaller last batch is left out.
        optimizer: `adamw`, `fused`, `sgd`, `adafactor` or `adamw8bit`.
        precision: of the trainer.
        clip: whether gradients are clipped.
        accumulation: micro-batches of a step.
        checkpointing: of activations, in a text model.
        compiled: whether the network is compiled.
        adapter: `lora`, `qlora` or none.
        average: whether a callback keeps an average of the weights on the card.
        validation: `none`, `sanity check`, `epoch` or `middle`: when there is one.
        validation_batch_size: of it.
        resumed: whether the fit goes on from a checkpoint.
        expandable: whether segments are expandable.
        card: a GPU of the catalogue, for its kernels.
        memory_bytes: of the card.
        elsewhere_bytes: what another process holds of it.
        held_bytes: what this process holds of it before the fit.
    """

    seed: int
    net: str
    width: int
    layers: int
    vocabulary: int
    longest: int
    lengths: str
    mask: bool
    samples: int
    shuffle: bool
    drop_last: bool
    optimizer: str
    precision: str
    clip: bool
    accumulation: int
    checkpointing: bool
    compiled: bool
    adapter: str
    average: bool
    validation: str
    validation_batch_size: int
    resumed: bool
    expandable: bool
    card: str
    memory_bytes: int
    elsewhere_bytes: int
    held_bytes: int

    def __str__(self) -> str:
        """What is out of the ordinary, in a line."""
        plain = {"lengths": "fixed", "accumulation": 1, "adapter": "", "validation": "none", "precision": "32-true"}
        shown = [self.net, f"{self.memory_bytes / GIB:.0f} GiB", self.card, f"{self.layers} x {self.width}"]
        for name, value in asdict(self).items():
            if value is True:
                shown.append(name.replace("_", " "))
            elif name in plain and value != plain[name]:
                shown.append(f"{name} {value}")
        return ", ".join([*shown, self.optimizer, *(["held"] if self.held_bytes else [])])


def draw(seed: int) -> Fit:
    """The fit of a seed. Nets are wide enough for their card that some tens to thousands of samples fill it."""
    r = random.Random(seed)
    net = r.choices(NETS, (6, 5, 3, 3, 2, 1))[0]
    text = net in TEXT
    memory_bytes = int(GIB * r.choice((2, 2, 3, 4, 6, 8, 11, 16, 24)))
    scale = (memory_bytes / GIB / 2) ** 0.75
    precision = r.choice(("32-true", "bf16-mixed", "16-mixed"))
    card = r.choice(CARDS)
    if card == "V100 16GB" and net == "lstm":
        card = "A100"  # cuDNN has no more recurrent kernels for it
    if card in ("T4", "V100 16GB") and precision == "bf16-mixed":
        precision = "16-mixed"
    sizes: dict[str, Any] = {"vocabulary": r.choice((1000, 10_000, 30_000))}
    if text or net == "lstm":
        width = 64 * max(1, round(r.choice((2, 3, 4, 6)) * scale))
        sizes |= {"width": width, "layers": r.randint(2, 4), "longest": r.choice((64, 96, 128, 200, 256))}
    elif net == "conv":
        sizes |= {
            "width": 8 * round(r.choice((2, 4, 6)) * scale),
            "layers": r.randint(3, 4),
            "longest": r.choice((48, 64)),
        }
    elif net == "vit":
        sizes |= {
            "width": 64 * round(r.choice((3, 4, 6)) * scale),
            "layers": r.randint(2, 4),
            "longest": r.choice((96, 128)),
        }
    else:
        sizes |= {"width": 1024 * round(2 * scale), "layers": 3, "longest": 0}
    rare = r.random
    adapter = r.choices(("", "lora", "qlora"), (8, 1, 1))[0] if text else ""
    optimizer = r.choices(("adamw", "fused", "sgd", "adafactor", "adamw8bit"), (4, 2, 1, 1, 1))[0]
    return Fit(
        seed=seed,
        net=net,
        lengths=r.choice(("fixed", "free")) if text or net == "lstm" else "fixed",
        mask=net == "bert" and rare() < 0.8,
        samples=r.randint(2000, 9000),
        shuffle=rare() < 0.7,
        drop_last=rare() < 0.3,
        optimizer=optimizer,
        precision=precision,
        clip=rare() < 0.3 and net != "gan" and optimizer != "fused",
        accumulation=1 if net == "gan" else r.choice((1, 1, 1, 2, 4)),
        checkpointing=text and not adapter and rare() < 0.15,
        compiled=rare() < 0.02 and net in ("bert", "vit"),
        adapter=adapter,
        average=rare() < 0.1 and not adapter,
        validation=r.choice(("none", "sanity check", "epoch", "middle")),
        validation_batch_size=r.choice((8, 16, 32)),
        resumed=rare() < 0.15 and adapter != "qlora",
        expandable=rare() < 0.25,
        card=card,
        memory_bytes=memory_bytes,
        elsewhere_bytes=r.choice((0, 0, 0, memory_bytes // 10)),
        held_bytes=r.choice((0, 0, 0, memory_bytes // 20)),
        **sizes,
    )
