"""From what was given for `--model` to something that can be trained."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from batchfinder.errors import InvalidValue, UnknownName
from batchfinder.step.workload import Workload
from batchfinder.zoo.catalogue import find_model
from batchfinder.zoo.factory import is_factory, workload_from_factory

_ATTENTION = ("eager", "sdpa", "flash")


def build_workload(spec: str, *, attention: str | None = None, gradient_checkpointing: bool = False) -> Workload:
    """Build the model that a name, a path or a factory stands for.

    Inside a `FakeTensorMode` the model is made of fake tensors and takes no memory. No generator of random numbers that
    the user owns moves while a named model or a config is built.

    Args:
        spec: a model of the zoo (`list_models`), a path to a config.json or to its folder, or `package.module:factory`.
            A path that exists wins over a name, where it is written with a path separator.
        attention: `eager`, `sdpa`, `flash` (to be taken by the flash kernel of PyTorch's
            scaled_dot_product_attention), or None for the model's default.
        gradient_checkpointing: whether activations inside the model's layers are computed again in the backward.

    Raises:
        UnknownName: no such model.
        InvalidValue: the config, the factory or an option cannot be used with this model.
        UserCodeFailed: the user's code raised.
    """
    if attention is not None and attention not in _ATTENTION:
        raise InvalidValue("attention", attention, f"one of {', '.join(_ATTENTION)}")
    workload = _workload(spec, attention)
    if gradient_checkpointing:
        _checkpoint(workload.model, spec)
    return workload


def _workload(spec: str, attention: str | None) -> Workload:
    if is_factory(spec):
        workload = workload_from_factory(spec)
        if attention is not None:
            _change_attention(workload.model, attention, spec)
        return workload
    path = Path(spec).expanduser()
    like_a_path = os.sep in spec or spec.endswith(".json")
    if like_a_path and path.exists():
        return _from_path(path, attention)
    try:
        row = find_model(spec)
    except UnknownName:
        if path.exists():
            return _from_path(path, attention)
        if spec.endswith(".json") or spec.startswith((".", "~", os.sep)):
            raise InvalidValue("model", spec, "a config.json or a folder that exists") from None
        raise
    from batchfinder.zoo.pretrained import workload_from_row

    return workload_from_row(row, attention)


def _from_path(path: Path, attention: str | None) -> Workload:
    from batchfinder.zoo.pretrained import workload_from_path

    return workload_from_path(path, attention)


def _change_attention(model: Any, attention: str, spec: str) -> None:
    if not hasattr(model, "set_attn_implementation"):
        raise InvalidValue("attention", attention, f"no option: {spec} chooses the attention of its model itself")
    from batchfinder.zoo.pretrained import use_attention

    use_attention(model, attention, spec)


def _checkpoint(model: Any, spec: str) -> None:
    # `gradient_checkpointing_enable` is deprecated in transformers 5.23; older releases have nothing else.
    enable = getattr(model, "activation_checkpointing_enable", None) or getattr(
        model, "gradient_checkpointing_enable", None
    )
    name = type(model).__name__
    if not callable(enable):
        raise InvalidValue("gradient_checkpointing", True, f"no option: {spec} enables it in its model ({name}) itself")
    if not getattr(model, "supports_gradient_checkpointing", True):
        raise InvalidValue("gradient_checkpointing", True, f"a model that supports it, which {spec} ({name}) does not")
    enable()
