"""Operators on small tensors, each on the CPU and on the card, for a process on the stub."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

x = torch.tensor([3, 1, 2, 3, 0, 5])
f = torch.randn(6, generator=torch.Generator().manual_seed(1))
r = torch.randn(4, 6, generator=torch.Generator().manual_seed(2))
m = f > 0


def on(device: Any, *values: float) -> torch.Tensor:
    """A tensor of these numbers."""
    return torch.tensor(values, device=device)


def assigned(index: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """A copy into which something is written at an index."""

    def run(a: torch.Tensor) -> torch.Tensor:
        a = a.clone()
        a[index.to(a.device)] = 7.0
        return a

    return run


CASES: list[tuple[Callable[[torch.Tensor], Any], torch.Tensor]] = [
    # Shapes that depend on values, and what the host reads.
    *(
        (case, x)
        for case in (
            torch.bincount,
            torch.unique,
            torch.unique_consecutive,
            torch.nonzero,
            lambda a: torch.unique(a, return_counts=True),
            lambda a: torch.repeat_interleave(a, a),
            lambda a: F.one_hot(a),
            lambda a: torch.masked_select(a, a > 1),
            lambda a: a[a > 1],
            lambda a: torch.equal(a, a.clone()),
            lambda a: torch.equal(a, a + 1),
            lambda a: a.tolist(),
            lambda a: int(a.max()),
            lambda a: torch.nonzero(a > 1, as_tuple=True),
            lambda a: a.cumsum(0),
            torch.mode,
            lambda a: torch.isin(a, 3),
            lambda a: torch.isin(a, on(a.device, 3, 1)),
            lambda a: torch.isin(3, a),
        )
    ),
    *(
        (case, f)
        for case in (
            lambda a: float(a.max()),
            lambda a: a.argmax(),
            lambda a: torch.topk(a, 3),
            torch.sort,
            lambda a: torch.histc(a, 4),
            lambda a: bool(torch.isfinite(a).all()),
            lambda a: torch.allclose(a, a),
            assigned(m),
            assigned(x.argsort()[:2]),
            lambda a: torch.searchsorted(a.sort()[0], 0.2),
            lambda a: torch.searchsorted(a.sort()[0], a),
            lambda a: torch.bucketize(a, on(a.device, -1.0, 0.0, 1.0)),
            # Numbers in place of tensors.
            lambda a: 2**a,
            lambda a: a.to(torch.float16) * 0.1,
            lambda a: 1 / a.half(),
            lambda a: torch.where(a > 0, a, 0.0),
            lambda a: torch.where(a > 0, 1.0, a),
            lambda a: torch.where(a > 0, 1.0, 0.0),
            lambda a: (3 - a) / 2 % 3 // 1,
            lambda a: torch.clamp(a, 0, 1) + a.clamp_min(0.1),
            lambda a: torch.fmod(a, 2),
            lambda a: torch.lerp(a, a * 2, 0.5),
            lambda a: torch.pow(a.abs(), a) + torch.pow(3, a),
            lambda a: torch.xlogy(2.0, a.abs()),
            lambda a: torch.float_power(2.0, a),
            lambda a: torch.threshold(a, 0.1, 20),
            lambda a: torch.addcmul(a, a, a, value=2),
            lambda a: torch.copysign(a, -1.0),
            # Masks, as models make them.
            lambda a: a.masked_fill(a > 0, float("-inf")).softmax(-1),
            lambda a: (1.0 - (a > 0).float()) * torch.finfo(a.dtype).min,
            lambda a: torch.full((3, 3), float("-inf"), device=a.device).triu(1),
            lambda a: torch.tril_indices(3, 3, device=a.device),
            lambda a: torch.triu_indices(3, 3, device=a.device),
            lambda a: torch.eye(3, device=a.device),
            lambda a: torch.arange(3, 10, 2, device=a.device),
            lambda a: torch.linspace(0, 1, 5, device=a.device),
            lambda a: torch.hann_window(5, device=a.device),
            lambda a: torch.nn.utils.rnn.pad_sequence([a, a[:2]]),
            lambda a: a.index_add(0, on(a.device, 0, 0), a[:2]),
            lambda a: a.std(),
            lambda a: a.quantile(0.5),
            torch.median,
            lambda a: torch.fft.fft(a).abs(),
            lambda a: a.scatter_reduce(0, on(a.device, *[0] * 6), a, "amax"),
            lambda a: torch.stack([a, a]).mean(0),
            lambda a: torch.special.zeta(2.0, a.abs() + 2),
            lambda a: a.diff(),
        )
    ),
    *(
        (case, r)
        for case in (
            lambda a: torch.linalg.norm(a),
            lambda a: torch.cdist(a, a),
            lambda a: torch.einsum("ij,kj->ik", a, a),
            lambda a: a[:, 1:3],
            lambda a: F.layer_norm(a, (6,)),
            lambda a: F.rms_norm(a, (6,)),
            lambda a: F.group_norm(a[None], 2),
            lambda a: a.unfold(1, 2, 2),
            lambda a: F.gelu(a) + F.silu(a) + F.mish(a) + F.elu(a),
            lambda a: F.cross_entropy(a, on(a.device, 0, 1, 2, -100)),
            lambda a: F.embedding(on(a.device, 1, 3), a),
            lambda a: F.binary_cross_entropy_with_logits(a, (a > 0).float()),
            lambda a: F.kl_div(a.log_softmax(-1), a.softmax(-1)),
            lambda a: F.smooth_l1_loss(a, a * 2),
            lambda a: F.pad(a, (1, 1)),
            lambda a: F.conv2d(a[None, None], torch.ones(2, 1, 3, 3, device=a.device)),
            lambda a: F.max_pool2d(a[None, None], 2),
            lambda a: F.conv_transpose2d(a[None, None], torch.ones(1, 1, 3, 3, device=a.device)),
            lambda a: F.avg_pool2d(a[None, None], 2),
            lambda a: F.interpolate(a[None, None], scale_factor=2.0),
            lambda a: a.half().log_softmax(-1, dtype=torch.float32),
            lambda a: torch.nn.functional.scaled_dot_product_attention(
                a[None, None], a[None, None], a[None, None], is_causal=True
            ),
        )
    ),
]


def same(one: Any, other: Any) -> bool:
    """Of the same shape and nearly the same numbers."""
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(same, one, other))
    if not isinstance(one, torch.Tensor):
        return bool(one == other)
    close = torch.allclose(one.double(), other.cpu().double(), atol=1e-3, equal_nan=True)
    return one.shape == other.shape and one.dtype == other.dtype and close


def compared() -> list[str]:
    """What the card does otherwise than the CPU."""
    wrong = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, (case, given) in enumerate(CASES):
            try:
                expected, seen = case(given), case(given.cuda())
                if not same(expected, seen):
                    wrong.append(f"{number}: {expected} and {seen}")
            except Exception as error:
                wrong.append(f"{number}: {type(error).__name__}: {error}"[:200])
        for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.uint8):
            if (x.cuda().to(dtype) + 1).sum().item() != 20:
                wrong.append(f"a sum of {dtype}")
    assert len(CASES) > 80
    return wrong
