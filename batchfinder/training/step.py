"""One training step in its stages, on whatever device it is given; and the precisions known by name."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from batchfinder.training.optimizers import OptimizerFactory, make_optimizer
from batchfinder.training.spec import StepConfig
from batchfinder.training.strategies import own_tokens, spread_optimizer, sum_gradients


@dataclass(frozen=True)
class Workload:
    """A model and all that is needed to take a training step with it.

    Attributes:
        model: the module, on the CPU (or made of fake tensors); it is moved to the device by the step.
        make_batch: `make_batch(batch_size, seq_len)` returns one micro-batch of CPU tensors: a mapping is passed to the
            model as keywords, a tuple or list as positional arguments, anything else as the one argument. `seq_len` is
            None for data of one fixed shape. It is called for each micro-batch in turn, so that steps can be of
            different lengths; `profile --seq-len 96,128` asks for them.
        loss: `loss(output, batch)` returns a scalar; by default the output's `.loss`, `["loss"]`, its first element, or
            the output itself where that is a scalar, else the mean of its floating-point elements.
        optimizer: `optimizer(parameters)` returns an optimizer; None leaves the choice to the caller's options.
        max_seq_len: the longest sequence the model's positions allow; None where there is no such limit.
        seq_len_unit: what a sequence length counts: `tokens`, `pixels`, `samples` or `frames` of a recording, or `none`
            for data of one fixed shape.
        casts_weights: whether a precision such as bf16-true changes the types of its weights; False where each was
            chosen, as fp32 adapters on a bf16 model.
        zero_grad_after_loss: whether the old gradients go between the loss and the backward, as in a Lightning Trainer,
            rather than before the forward: they are there, then, while the forward fills the memory.
        assumptions: what was taken to be so as it was built, in words, for `Trace.unmodelled`.
        sums_in_place: whether autograd sums the gradients of a tensor in the first one's memory, as on a CPU. On CUDA
            PyTorch 2.0 to 2.9 did (https://github.com/pytorch/pytorch/pull/88339), which this stands for then.
        parallelize: `parallelize(model, mesh)` spreads the model over several GPUs in place, by `fully_shard` and other
            calls of PyTorch; `mesh` is a one-dimensional `DeviceMesh` of them. It is run as it is, and the optimizer is
            made of the parameters that there are after it. A module that it returns is trained in the model's place, as
            `FullyShardedDataParallel(model, ...)`. None to leave it to a strategy by name.
    """

    model: nn.Module
    make_batch: Callable[[int, int | None], Any]
    loss: Callable[[Any, Any], torch.Tensor] | None = None
    optimizer: OptimizerFactory | None = None
    max_seq_len: int | None = None
    seq_len_unit: str = "tokens"
    zero_grad_after_loss: bool = False
    casts_weights: bool = True
    assumptions: tuple[str, ...] = ()
    sums_in_place: bool = False
    parallelize: Callable[[nn.Module, Any], Any] | None = None


_COMPARED_LENGTH, _SHORTER = 512, 8
"""At which length a batch is compared with one of an eighth of it: far enough to tell padding to multiples of 64."""


def has_one_shape(workload: Workload) -> bool:
    """Whether its batches are alike, whatever length they are asked for at, and without one.

    False where they hold what cannot be compared. What raises without a length, raises.
    """
    most = min(_COMPARED_LENGTH, workload.max_seq_len or _COMPARED_LENGTH)
    looks = []
    for seq_len in (None, max(1, most // _SHORTER), most):
        leaves, structure = pytree.tree_flatten(workload.make_batch(1, seq_len))
        if not all(isinstance(leaf, torch.Tensor | str | int | float | None) for leaf in leaves):
            return False
        shapes = [(leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        looks.append((shapes, structure))
    return all(look == looks[0] for look in looks)


OnStage = Callable[[int, str, int], None]
Loading = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Precision:
    """How numbers are held and computed."""

    autocast: torch.dtype | None = None  # the type that autocast casts to
    weights: torch.dtype | None = None  # the type of weights, and of floating-point inputs; None leaves them
    scaled: bool = False  # whether a GradScaler is used

    def context(self, device: torch.device) -> AbstractContextManager[Any]:
        """What the forward and the loss run in."""
        return nullcontext() if self.autocast is None else torch.autocast(device.type, self.autocast)

    def input_type(self, tensor: torch.Tensor) -> torch.dtype:
        """The type an input tensor should have on the device."""
        return self.weights if self.weights is not None and tensor.is_floating_point() else tensor.dtype

    def scaler(self, device: torch.device) -> torch.amp.GradScaler | None:
        """A new GradScaler where the precision uses one, at a scale that does not overflow.

        At the usual 65536 the first steps often do, and are skipped: Adam's state would be missing at the peak. The
        scale itself changes nothing about the memory.
        """
        return torch.amp.GradScaler(device.type, init_scale=1.0) if self.scaled else None


PRECISIONS = {
    "fp32": Precision(),
    "bf16-mixed": Precision(autocast=torch.bfloat16),
    "16-mixed": Precision(autocast=torch.float16, scaled=True),
    "bf16-true": Precision(weights=torch.bfloat16),
}
"""By the names in `spec.PRECISION_NAMES`."""


class Step:
    """Takes the steps of one workload whose model is on the device already.

    Args:
        workload: what is trained.
        config: how.
        device: where; batches are moved there.
        move: moves one tensor of a batch, given the type it should have there; `tensor.to` by default.
    """

    def __init__(
        self,
        workload: Workload,
        config: StepConfig,
        device: torch.device,
        move: Callable[[torch.Tensor, torch.dtype], torch.Tensor] | None = None,
    ) -> None:
        self.workload = workload
        self.config = config
        self.device = device
        # DeepSpeed's engine casts the whole model to bf16, without autocast; its optimizer keeps what is in fp32.
        cast = config.strategy == "zero2" and config.precision == "bf16-mixed"
        self.precision = PRECISIONS["bf16-true" if cast else config.precision]
        self.weights_dtype = self.precision.weights if workload.casts_weights or cast else None
        self.optimizer: torch.optim.Optimizer | None = None
        self._move = move or (lambda tensor, dtype: tensor.to(device, dtype))

    def batch(self, batch_size: int, seq_len: int | None, loading: Loading = nullcontext) -> Any:
        """One micro-batch on the device, made within the context `loading()`."""
        with loading():
            batch = self.workload.make_batch(batch_size, seq_len)
        if self.config.strategy == "fsdp2-cp":
            batch = own_tokens(batch, seq_len, self.config.context_parallel)

        def move(leaf: Any) -> Any:
            return self._move(leaf, self.precision.input_type(leaf)) if isinstance(leaf, torch.Tensor) else leaf

        return pytree.tree_map(move, batch)

    def run(
        self,
        batch_size: int,
        seq_len: int | None,
        on_stage: OnStage = lambda step, stage, micro_batch: None,
        more: Callable[[], bool] = lambda: False,
        loading: Loading = nullcontext,
    ) -> None:
        """Take the steps.

        Args:
            batch_size: samples in a micro-batch.
            seq_len: tokens per sample, or None.
            on_stage: called with (step, stage, micro-batch) as each stage begins.
            more: asked after the config's optimizer steps, and after each further one, for another.
            loading: returns a context for the making of each batch.
        """
        model, config = self.workload.model, self.config
        if config.mode != "train":
            model.eval()
            with torch.set_grad_enabled(config.mode == "forward"):
                on_stage(0, "batch", 0)
                batch = self.batch(batch_size, seq_len, loading)
                with self.precision.context(self.device):
                    on_stage(0, "forward", 0)
                    output = call(model, batch)
                    on_stage(0, "end", 0)
                del output
            return

        model.train()
        chosen = self.workload.optimizer or config.optimizer
        optimizer = make_optimizer(chosen, model, config.optimizer_in_backward, spread_optimizer(config))
        self.optimizer = optimizer
        scaler = self.precision.scaler(self.device)
        late = self.workload.zero_grad_after_loss
        step = 0
        while step < config.steps or more():
            if config.lengths:
                seq_len = config.lengths[min(step, len(config.lengths) - 1)]
            if not late:
                on_stage(step, "zero_grad", 0)
                optimizer.zero_grad()
            for micro_batch in range(config.micro_batches):
                on_stage(step, "batch", micro_batch)
                batch = self.batch(batch_size, seq_len, loading)
                if config.strategy is not None and config.micro_batches > 1:
                    sum_gradients(model, now=micro_batch == config.micro_batches - 1)
                with self.precision.context(self.device):
                    on_stage(step, "forward", micro_batch)
                    output = call(model, batch)
                    on_stage(step, "loss", micro_batch)
                    loss = (self.workload.loss or default_loss)(output, batch)
                if config.micro_batches > 1:
                    loss = loss / config.micro_batches
                # As in Lightning and in transformers' Trainer, only the loss outlives the function that computed it.
                del output
                if late and micro_batch == 0:
                    on_stage(step, "zero_grad", 0)
                    optimizer.zero_grad()
                on_stage(step, "backward", micro_batch)
                (loss if scaler is None else scaler.scale(loss)).backward()
                del loss
            on_stage(step, "optimizer", 0)
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            step += 1
        on_stage(step - 1, "end", 0)


def call(model: nn.Module, batch: Any) -> Any:
    """`model` of a batch: a mapping gives keywords, a tuple or list positional arguments, else it is the argument."""
    if isinstance(batch, dict) or hasattr(batch, "keys"):
        return model(**batch)
    if isinstance(batch, (tuple, list)):
        return model(*batch)
    return model(batch)


def default_loss(output: Any, batch: Any) -> torch.Tensor:
    """The loss of a model that computes its own, else the mean of its first output.

    Args:
        output: an object with `.loss`, a mapping with "loss", a tuple, or a tensor of any shape.
        batch: not used.

    Returns:
        A scalar.
    """
    loss = getattr(output, "loss", None)
    if loss is None and isinstance(output, dict):
        loss = output.get("loss")
    if loss is None:
        loss = next(
            leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
        )
    tensor: torch.Tensor = loss
    return tensor if tensor.dim() == 0 else tensor.mean()
