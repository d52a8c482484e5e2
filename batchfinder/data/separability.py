"""Whether a batch's loss is a weighted sum of its samples' losses, so that the batch may be split."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from batchfinder.data.batch import samples_in
from batchfinder.data.loss_weights import WEIGHTS, Weight, weigh
from batchfinder.data.padding import padded_length, trim
from batchfinder.data.split import split
from batchfinder.errors import NotSplittable

SAMPLES = 4
TOLERANCE = 1e-3  # relative; what kernels round differently at another batch size is less, unless in 16 bits


def not_separable(module: nn.Module) -> list[str]:
    """The modules whose forward mixes the samples of a batch, or that change with every forward.

    Args:
        module: the model, in the mode it trains in.

    Returns:
        `name (class)` of each, such as `layer1.0.bn1 (BatchNorm2d)`.
    """
    return [
        f"{name or 'the model itself'} ({type(part).__name__})"
        for name, part in module.named_modules()
        if _mixes_samples(part)
    ]


def check_separable(
    loss_of: Callable[[Any], Tensor], batch: Any, weight: Weight = "samples", *, tolerance: float = TOLERANCE
) -> str | None:
    """Compare the loss of a few samples with the weighted sum of their parts' losses, and with the loss once trimmed.

    The forward runs without gradients, each time with the same random numbers. Put the model into eval mode before,
    and put back afterwards whatever the forward changes (metrics, logged values): only the random numbers are put back
    here. A loss that draws random numbers in eval mode too cannot be compared, nor can one that is not finite.

    Args:
        batch: any batch; four samples of it are used.
        tolerance: the relative difference that is still rounding.

    Returns:
        What differs, by how much and what to do; None if nothing does, or if the losses cannot be compared.

    Raises:
        NotSplittable: the batch cannot be split, or the weight cannot be read from it.
        InvalidValue: the weight is not a known one.
    """
    samples = samples_in(batch)
    if samples < 2:
        return None
    few = split(batch, [SAMPLES, samples - SAMPLES])[0] if samples > SAMPLES else batch
    with torch.no_grad():
        whole = _loss(loss_of, few)
        if not math.isfinite(whole) or _relative_difference(whole, _loss(loss_of, few, seed=1)) > tolerance / 10:
            return None
        return _check_parts(loss_of, few, whole, weight, tolerance) or _check_trim(loss_of, few, tolerance)


def _check_parts(
    loss_of: Callable[[Any], Tensor], few: Any, whole: float, weight: Weight, tolerance: float
) -> str | None:
    samples = samples_in(few)
    ways = []
    for sizes in ([samples - samples // 2, samples // 2], [1, samples - 1]):
        parts = split(few, sizes)
        ways.append((sizes, parts, [_loss(loss_of, part) for part in parts]))

    def total_of(parts: list[Any], losses: list[float], rule: Weight) -> float:
        factors = weigh(parts, rule)
        return math.fsum(factor * loss for factor, loss in zip(factors, losses, strict=True) if factor)

    def fits(rule: Weight) -> bool:
        try:
            return all(
                _relative_difference(whole, total_of(parts, losses, rule)) <= tolerance for _, parts, losses in ways
            )
        except NotSplittable:
            return False

    totals = [(sizes, total_of(parts, losses, weight)) for sizes, parts, losses in ways]
    sizes, total = max(totals, key=lambda item: _relative_difference(whole, item[1]))
    if _relative_difference(whole, total) <= tolerance:
        return None
    said = f"weight={weight!r}" if isinstance(weight, str) else "your weight="
    text = (
        f"the loss of {samples} samples is {whole:.6g}, and the losses of {sizes[0]} and {sizes[1]} of them, put"
        f" together by {said}, make {total:.6g}, {_percent(whole, total)}"
    )
    fitting = next((rule for rule in WEIGHTS if rule != weight and fits(rule)), None)
    if fitting is not None:
        return f"{text}. With weight={fitting!r} it would be the same: pass that"
    return (
        f"{text}. A loss that compares the samples of a batch with each other (in-batch negatives) cannot be split; one"
        " that is a mean over something else can, with weight= a function that returns how much of that a micro-batch"
        " has"
    )


def _check_trim(loss_of: Callable[[Any], Tensor], few: Any, tolerance: float) -> str | None:
    """Compare the loss of the sample with the most padding with and without it."""
    alone = split(few, [1] * samples_in(few))
    pairs = [(part, cut) for part in alone if (cut := trim(part)) is not part]
    if not pairs:
        return None
    part, cut = min(pairs, key=lambda pair: padded_length(pair[1]) or 0)
    before, after = _loss(loss_of, part), _loss(loss_of, cut)
    if not math.isfinite(before) or _relative_difference(before, after) <= tolerance:
        return None
    return (
        "the padding that all samples of a micro-batch share is cut off, and here that makes a loss of"
        f" {before:.6g} one of {after:.6g}, {_percent(before, after)}: something looks at tokens that attention_mask"
        " leaves out. Pass the mask to every module that needs it; or give it another name in the batch, and nothing"
        " is cut off"
    )


def _relative_difference(whole: float, total: float) -> float:
    return abs(total - whole) / (abs(whole) or abs(total) or 1)


def _percent(whole: float, total: float) -> str:
    percent = 100 * _relative_difference(whole, total)
    return (
        f"{percent:.{0 if percent >= 10 else 2}{'f' if percent >= 10 else 'g'}} % {'more' if total > whole else 'less'}"
    )


def _mixes_samples(part: nn.Module) -> bool:
    if isinstance(part, _BatchNorm):
        return part.training or part.running_mean is None
    name = type(part).__name__
    normalises = "BatchNorm" in name and "Frozen" not in name  # one of a library's own
    iterates = isinstance(part, _SpectralNorm) or any(
        isinstance(hook, SpectralNorm) for hook in part._forward_pre_hooks.values()
    )
    return part.training and (normalises or iterates)


def _loss(loss_of: Callable[[Any], Tensor], batch: Any, seed: int = 0) -> float:
    with _seeded(seed):
        return float(loss_of(batch))


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Give Python, NumPy and torch the same random numbers each time, and put theirs back."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()):
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
