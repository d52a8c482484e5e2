"""Whether a batch's loss is a weighted sum of its samples' losses, so that the batch may be split."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from contextlib import suppress
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from batchfinder.data.batch import samples_in
from batchfinder.data.padding import padded_length, trim
from batchfinder.data.split import WEIGHTS, Weight, split, weigh
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
    found = []
    for name, part in module.named_modules():
        kind = type(part).__name__
        if isinstance(part, _BatchNorm):
            mixes = part.training or part.running_mean is None
        else:
            normalises = "BatchNorm" in kind and "Frozen" not in kind  # one of a library's own
            iterates = isinstance(part, _SpectralNorm) or any(
                isinstance(hook, SpectralNorm) for hook in part._forward_pre_hooks.values()
            )
            mixes = part.training and (normalises or iterates)
        if mixes:
            found.append(f"{name or 'the model itself'} ({kind})")
    return found


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
        # In halves, and with one sample alone.
        samples = samples_in(few)
        ways = []
        for sizes in ([samples - samples // 2, samples // 2], [1, samples - 1]):
            parts = split(few, sizes)
            ways.append((sizes, parts, [_loss(loss_of, part) for part in parts]))

        def differences(rule: Weight) -> list[tuple[float, list[int], float]]:
            """Of each way the relative difference, the sizes, and their losses put together."""
            found = []
            for sizes, parts, losses in ways:
                factors = weigh(parts, rule)
                total = math.fsum(factor * loss for factor, loss in zip(factors, losses, strict=True) if factor)
                found.append((_relative_difference(whole, total), sizes, total))
            return found

        difference, sizes, total = max(differences(weight), key=itemgetter(0))
        if not difference <= tolerance:  # NaN as well
            said = f"weight={weight!r}" if isinstance(weight, str) else "your weight="
            text = (
                f"the loss of {samples} samples is {whole:.6g}, and the losses of {sizes[0]} and {sizes[1]} of them,"
                f" put together by {said}, make {total:.6g}, {_percent(whole, total)}"
            )
            for rule in WEIGHTS:
                with suppress(NotSplittable):  # there are no labels to count
                    if rule != weight and all(difference <= tolerance for difference, _, _ in differences(rule)):
                        return f"{text}. With weight={rule!r} it would be the same: pass that"
            return (
                f"{text}. A loss that compares the samples of a batch with each other (in-batch negatives) cannot be"
                " split; one that is a mean over something else can, with weight= a function that returns how much of"
                " that a micro-batch has"
            )
        # The sample with the most padding, with it and without.
        alone = split(few, [1] * samples)
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


def _loss(loss_of: Callable[[Any], Tensor], batch: Any, seed: int = 0) -> float:
    """A loss with the same random numbers of Python, NumPy and torch each time; theirs are put back."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()):
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        try:
            return float(loss_of(batch))
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
