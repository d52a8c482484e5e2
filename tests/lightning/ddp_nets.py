"""Nets for several ranks: they meet in their steps, leave parameters out, or fail on one rank alone."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader

from tests.lightning import nets
from tests.lightning.oom_net import Bounded


class Logged(nets.Transformer):
    """Reduces a metric over the ranks in each step, and gathers, broadcasts and waits in between."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("mean", loss, sync_dist=True, on_step=True, on_epoch=True)
        everyone = self.all_gather(loss.detach())
        assert everyone.shape == (dist.get_world_size(),)
        self.trainer.strategy.barrier()
        assert self.trainer.strategy.broadcast("told") == "told"
        return loss


class Branching(nets.ConvNet):
    """A layer that no rank uses at the first batch, and all use at others."""

    def __init__(self, batch_size: int, always: bool = False) -> None:
        super().__init__(batch_size, rows=64, side=4, width=2)
        self.always = always
        self.extra = torch.nn.Linear(10, 10)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        pictures, labels = batch
        logits = self.net(pictures)
        if batch_idx % 3 or self.always:
            logits = self.extra(logits)
        loss = torch.nn.functional.cross_entropy(logits, labels)
        self.losses.append(loss.item())
        return loss


class Injected(Bounded):
    """Does something on one rank alone, in one stage, with more than a number of samples."""

    def __init__(self, act: Any, stage: str = "forward", rank: int = 1, above: int = 5) -> None:
        super().__init__(batch_size=2)
        self.act, self.stage, self.rank, self.above, self.samples = act, stage, rank, above, 0

    def reach(self, stage: str) -> None:
        if stage == self.stage and self.global_rank == self.rank and self.samples > self.above:
            self.act()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.samples = len(batch[0])
        loss = super().training_step(batch, batch_idx)
        self.reach("forward")
        self.log("mean", loss, sync_dist=True)
        self.all_gather(loss.detach())
        loss.register_hook(lambda gradient: self.reach("backward"))
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        optimizer.register_step_post_hook(lambda *args: self.reach("optimizer"))
        return optimizer


class Sharded(nets.Transformer):
    """Sharded over the ranks that have samples of their own, with feed-forward layers spread over the others."""

    def __init__(self, batch_size: int) -> None:
        super().__init__(batch_size, rows=64)

    def configure_model(self) -> None:
        data, tensor = self.device_mesh["data_parallel"], self.device_mesh["tensor_parallel"]
        for layer in self.encoder.layers:
            if tensor.size() > 1:
                parallelize_module(layer, tensor, {"linear1": ColwiseParallel(), "linear2": RowwiseParallel()})
            fully_shard(layer, mesh=data)
        for part in (self.embed, self.head):
            fully_shard(part, mesh=data)


class Missing(nets.Pictures):
    """One rank cannot read its data."""

    def __getitem__(self, index: int) -> Any:
        if dist.get_rank() == 1:
            raise FileNotFoundError("picture.png")
        return super().__getitem__(index)


class Grouped(Injected):
    """Reduces over a process group of its own, where the other ranks would wait for one that has failed."""

    def setup(self, stage: str) -> None:
        self.group = dist.new_group(backend="gloo")

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        dist.all_reduce(loss.detach().clone(), group=self.group)
        return loss


class Unread(Bounded):
    """Trains on it."""

    def train_dataloader(self) -> Any:
        return DataLoader(Missing(8, 4), batch_size=2)


class Evaluated(Bounded):
    """Validates too, on fewer samples."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.loss(batch), sync_dist=True)

    def val_dataloader(self) -> Any:
        return DataLoader(nets.Pictures(6 * dist.get_world_size(), 4), batch_size=2)
