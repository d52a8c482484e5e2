"""Tests of batchfinder/models/fake_init.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from batchfinder.models.fake_init import pretend_initialisation


def test_truncated_normal_needs_it() -> None:
    """torch's truncated normal looks at its values: the day it does not, this module can go."""
    with FakeTensorMode(), pytest.raises(DataDependentOutputException):
        nn.init.trunc_normal_(torch.empty(3, 3))


def test_fake_weights_are_initialised_without_values() -> None:
    """Inside a FakeTensorMode truncated normal initialisation passes, also where it was imported by name."""
    from torch.nn.init import trunc_normal_

    with FakeTensorMode(), pretend_initialisation():
        assert trunc_normal_(torch.empty(3, 3)).shape == (3, 3)


def test_real_weights_are_initialised_as_ever() -> None:
    """Outside a FakeTensorMode nothing changes, and nothing is left changed afterwards."""
    with pretend_initialisation():
        assert nn.init.trunc_normal_(torch.zeros(8, 8)).any()
    with FakeTensorMode(), pretend_initialisation():
        pass
    assert nn.init.trunc_normal_(torch.zeros(8, 8)).any()
