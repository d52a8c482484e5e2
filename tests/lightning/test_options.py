"""What cannot be served is refused, in words that say what to do instead."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from lightning_fabric.utilities.exceptions import MisconfigurationException
from pytorch_lightning.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy

from batchfinder.errors import InvalidValue
from batchfinder.lightning.callback import BatchFinder
from batchfinder.lightning.options import check_trainer
from tests.lightning import nets


def trainer(**changes: Any) -> Any:
    """What the checks look at, with some of it changed."""
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    module = SimpleNamespace(automatic_optimization=True)
    state = SimpleNamespace(fn="fit")
    return SimpleNamespace(
        **{
            "strategy": strategy,
            "world_size": 1,
            "callbacks": [],
            "lightning_module": module,
            "state": state,
            **changes,
        }
    )


CASES = {
    "sharded by DeepSpeed": (
        trainer(strategy=DeepSpeedStrategy.__new__(DeepSpeedStrategy), world_size=4),
        None,
        "BatchFinder serves several devices under DDP, FSDP and ModelParallelStrategy, and this trainer has 4 under "
        "DeepSpeedStrategy, whose state could not be put back after a try. Pass Trainer(strategy='ddp') or 'fsdp', or "
        "run it once with Trainer(devices=1), then set the size that it reports by hand and remove the callback.",
    ),
    "several devices": (
        trainer(world_size=4),
        None,
        "BatchFinder serves several devices under DDP, FSDP and ModelParallelStrategy, and this trainer has 4 under "
        "SimpleNamespace, whose state could not be put back after a try. Pass Trainer(strategy='ddp') or 'fsdp', or "
        "run it once with Trainer(devices=1), then set the size that it reports by hand and remove the callback.",
    ),
    "another accelerator": (
        trainer(strategy=SimpleNamespace(root_device=torch.device("mps"))),
        None,
        "BatchFinder can limit and measure the memory of CUDA devices and of the CPU, and this trainer's device is "
        "mps. Pass Trainer(accelerator='cpu') or 'gpu', or remove the callback.",
    ),
    "another finder": (
        trainer(callbacks=[pl.callbacks.BatchSizeFinder()]),
        None,
        "BatchFinder and BatchSizeFinder would both set the batch size. Remove BatchSizeFinder from "
        "Trainer(callbacks=...).",
    ),
    "a schedule of accumulation": (
        trainer(callbacks=[pl.callbacks.GradientAccumulationScheduler({0: 2})]),
        64,
        "BatchFinder(target_batch_size=64) and GradientAccumulationScheduler would both set how many batches are "
        "accumulated. Remove the scheduler, or the target.",
    ),
    "manual optimization": (
        trainer(lightning_module=SimpleNamespace(automatic_optimization=False)),
        64,
        "BatchFinder(target_batch_size=64) cannot accumulate for a model with manual optimization: its training_step "
        "decides when to step. Leave out target_batch_size; batchfinder.plan_accumulation(64, finder.batch_size) says "
        "what to accumulate.",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_refused(case: str) -> None:
    """Each with its whole message."""
    refused, target, message = CASES[case]
    with pytest.raises(MisconfigurationException) as caught:
        check_trainer(refused, BatchFinder(target).options)
    assert str(caught.value) == message


def test_shards_with_split_batches() -> None:
    """Ranks with other lengths would gather in other numbers of micro-batches."""
    with pytest.raises(MisconfigurationException, match="FSDPStrategy all ranks gather their shards in each"):
        check_trainer(trainer(strategy=FSDPStrategy()), BatchFinder(split_batches=True).options)


def test_what_is_served() -> None:
    """One device with anything else, several under DDP and FSDP; a schedule or manual optimization without a target."""
    target, none = BatchFinder(64).options, BatchFinder().options
    check_trainer(trainer(), target)
    check_trainer(trainer(world_size=4, strategy=DDPStrategy(parallel_devices=[torch.device("cpu")])), target)
    check_trainer(trainer(world_size=4, strategy=FSDPStrategy(parallel_devices=[torch.device("cpu")])), target)
    check_trainer(trainer(callbacks=[pl.callbacks.GradientAccumulationScheduler({0: 2})]), none)
    check_trainer(trainer(lightning_module=SimpleNamespace(automatic_optimization=False)), none)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"target_batch_size": 0}, "target_batch_size: invalid value 0; expected a size of at least 1."),
        ({"max_batch_size": 0}, "max_batch_size: invalid value 0; expected a size of at least 1."),
        ({"seq_lens": []}, "seq_lens: invalid value (); expected lengths of at least 1, or None for the data's own."),
        ({"also": ["fit"]}, "also: invalid value 'fit'; expected any of validate, test, predict."),
        (
            {"headroom": 1.0},
            "headroom: invalid value 1.0; expected a share such as 0.1 or 10%, or a size such as 1GiB.",
        ),
        (
            {"headroom": "5"},
            "headroom: invalid value '5'; expected a share such as 0.1 or 10%, or a size such as 1GiB.",
        ),
        ({"also": "valid"}, "also: invalid value 'valid'; expected any of validate, test, predict."),
        ({"certify": "no"}, "certify: invalid value 'no'; expected True or False."),
        ({"predict": 1}, "predict: invalid value 1; expected True or False."),
        ({"recover": 1}, "recover: invalid value 1; expected True, False, or None for with a single process only."),
        ({"goal": "speed"}, "goal: invalid value 'speed'; expected one of memory, throughput."),
        (
            {"goal": "throughput", "split_batches": True},
            "goal: invalid value 'throughput'; expected memory with split_batches=, where lengths and not sizes differ "
            "from one micro-batch to the next.",
        ),
        ({"tolerance": 1}, "tolerance: invalid value 1; expected a share from 0 (exact) to below 1, such as 0.01."),
        ({"budget": "much"}, "budget: invalid value 'much'; expected a positive size such as 12GiB, 900MiB or 24GB."),
    ],
)
def test_invalid_arguments(arguments: dict[str, Any], message: str) -> None:
    """They are refused when the callback is made, not hours later."""
    with pytest.raises(InvalidValue) as caught:
        BatchFinder(**arguments)
    assert str(caught.value) == message


@pytest.mark.parametrize("name", ["also", "target_batch_size", "headroom", "cache"])
def test_an_option_set_after_construction_is_refused(name: str) -> None:
    """It would be ignored; the message says what to do, and the option is what it was."""
    finder = BatchFinder(also="test")
    with pytest.raises(AttributeError) as caught:
        setattr(finder, name, "validate")
    assert str(caught.value) == (
        f"Setting finder.{name} has no effect: options are checked and kept when a BatchFinder is made. Make another "
        f"one with BatchFinder({name}=...)."
    )
    assert finder.options == BatchFinder(also="test").options
    finder.note = "mine"  # an attribute that is no option is anyone's own


def test_texts_are_read_as_elsewhere() -> None:
    """Shares and sizes as on the command line; one stage needs no list."""
    options = BatchFinder(headroom="5%", budget="1GiB", also="validate").options
    assert (options.limits().headroom, options.budget_bytes, options.also) == (0.05, 1 << 30, ("validate",))


def test_fast_dev_run_is_skipped(caplog: pytest.LogCaptureFixture) -> None:
    """With a line that says so; nothing is tried."""
    finder = BatchFinder()
    with caplog.at_level("INFO"):
        nets.trainer(callbacks=[finder], fast_dev_run=True).fit(nets.ConvNet())
    assert "BatchFinder: skipped, since `fast_dev_run` is enabled." in caplog.messages
    assert finder.results == {}
