"""Tests of batchfinder/lightning/portable_pickle.py: all of a module but its data."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from batchfinder.lightning.portable_pickle import MOST_BYTES, NotPortable, read, write


def test_no_data_travels(tmp_path: Path) -> None:
    """A large model takes kilobytes in the file, and its data are not looked at."""
    model = nn.Linear(4096, 4096)
    model.data = torch.utils.data.TensorDataset(torch.zeros(1 << 20))  # type: ignore[assignment]
    write(model, tmp_path / "model", torch.device("cpu"))
    assert (tmp_path / "model").stat().st_size < 4096
    with pytest.raises(NotPortable) as caught:
        write([bytes(MOST_BYTES)], tmp_path / "data", torch.device("cpu"))
    assert str(caught.value) == "it holds more than 64.00 MiB of data beside its tensors"


def test_what_is_read_has_the_same_make(tmp_path: Path) -> None:
    """Shapes, strides, types, what trains, and which tensors are one; what trains elsewhere is on the device."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(3, 4))
    model[1].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    half = torch.zeros(4, 6, dtype=torch.float16).T
    host, meta = torch.device("cpu"), torch.device("meta")
    write([model, half, {"again": half}, host], tmp_path / "all", host, moved_later=model.parameters())
    made, tensor, again, device = read(tmp_path / "all", meta)
    assert again["again"] is tensor
    assert (tensor.shape, tensor.stride(), tensor.dtype, tensor.device) == ((6, 4), (1, 6), torch.float16, meta)
    assert made[0].weight is made[1].weight
    assert [parameter.requires_grad for parameter in made.parameters()] == [True, False, True]
    assert [parameter.device for parameter in made.parameters()] == [host] * 3
    assert device == meta
