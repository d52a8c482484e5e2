"""Finding and setting the largest micro-batch of a transformers Trainer, with its effective batch as it was."""

from __future__ import annotations

import functools
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
from torch import nn
from torch.distributed._composable_state import _module_state_mapping
from torch.optim.optimizer import register_optimizer_step_pre_hook

from batchfinder.accumulation import AccumulationPlan
from batchfinder.cache import Store
from batchfinder.errors import InvalidValue, MissingExtra
from batchfinder.huggingface.evaluation import TrainerEvaluation
from batchfinder.huggingface.step import (
    MakeBatch,
    TrainerBatches,
    TrainerStep,
    make_key,
    own_loader,
    set_size,
)
from batchfinder.loop.options import LoopConfig, Phases, device_of
from batchfinder.loop.result import TunedBatchSize
from batchfinder.loop.tune import tune_loop
from batchfinder.measure.options import SearchOptions
from batchfinder.measure.trial import clear
from batchfinder.results import Trial
from batchfinder.snapshot.training_state import TrainingState

if TYPE_CHECKING:
    from transformers import Trainer


def check_trainer(trainer: Trainer) -> None:
    """Refuse what is not supported.

    Raises:
        MissingExtra: accelerate is not installed.
        InvalidValue: says what is not supported, and what to do instead.
    """
    try:
        import accelerate  # noqa: F401
    except ImportError:
        raise MissingExtra("accelerate", "huggingface", "tune_trainer") from None
    from transformers import Trainer

    if not isinstance(trainer, Trainer):
        raise InvalidValue("trainer", type(trainer).__name__, "a transformers.Trainer, or a class derived from it")
    if trainer.train_dataset is None:
        raise InvalidValue("train_dataset", None, "the data that trainer.train() will read, to make batches of")
    args = trainer.args
    alone = "find the size on one device, and set per_device_train_batch_size and gradient_accumulation_steps by hand"
    if args.n_gpu > 1:
        raise InvalidValue(
            "GPUs of one process",
            args.n_gpu,
            "one, such as CUDA_VISIBLE_DEVICES=0 leaves; DataParallel is not supported",
        )
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    fsdp1 = trainer.is_fsdp_enabled and getattr(plugin, "fsdp_version", 1) != 2
    sharded = {
        "DeepSpeed": trainer.is_deepspeed_enabled,
        "FSDP of version 1": fsdp1,  # it flattens the parameters in place, which could not be undone before training
        "FSDP of XLA": getattr(trainer, "is_fsdp_xla_enabled", False),
        "a model on several devices": trainer.is_model_parallel,
    }
    for name, enabled in sharded.items():
        if enabled:
            served = "DDP, FSDP of version 2 (fsdp_config={'version': 2}), or a model that is whole on one device"
            raise InvalidValue("the trainer's parallelism", name, f"{served}; {alone}")
    if args.auto_find_batch_size:
        raise InvalidValue(
            "auto_find_batch_size", True, "False, since it would change the size again, and the effective batch with it"
        )
    if str(getattr(args, "train_sampling_strategy", "")).endswith("batch_rebalance"):
        raise InvalidValue(
            "train_sampling_strategy",
            "batch_rebalance",
            "'random', 'sequential' or 'group_by_length', whose micro-batches have the same number of samples each",
        )


def tune_trainer(
    trainer: Trainer,
    *,
    goal: str = "memory",
    target_batch_size: int | None = None,
    exact: bool = False,
    seq_len: int | None = None,
    make_batch: MakeBatch | None = None,
    resume_from_checkpoint: str | os.PathLike[str] | bool | None = None,
    state: Sequence[Any] = (),
    probe_callbacks: Sequence[Any] = (),
    headroom: float | int | str = 0.0,
    min_batch_size: int = 1,
    max_batch_size: int | None = None,
    multiple_of: int = 1,
    tolerance: float = 0.01,
    budget: int | str | None = None,
    cache: str | os.PathLike[str] | Store | bool | None = None,
    certify: bool = True,
    on_trial: Callable[[Trial], object] | None = None,
) -> TunedBatchSize:
    """Find the largest micro-batch that a Trainer of transformers trains with, and set it before `trainer.train()`.

    Sizes are tried with the trainer's own `training_step`, at least two optimizer steps each: its model, loss,
    collator, optimizer, precision, checkpointing and clipping, on batches of its own samples. Then everything is put
    back, down to the random numbers, and `per_device_train_batch_size` and `gradient_accumulation_steps` are set.
    Training is bit for bit what it would have been with these two given to TrainingArguments by hand. The effective
    batch stays what the arguments say, unless a `target_batch_size` is given. A later start of the same program takes
    the answer from the cache and tries it once. In several processes (DDP, FSDP of version 2) all ranks call this, and
    get the size that fits on each.

    Args:
        trainer: a `transformers.Trainer` or one of a derived class, not in training.
        goal: `memory` for the largest micro-batch that fits, or `throughput` for the smallest of those up to it with
            which a step of the effective batch is at full speed, within 3 % of the best samples per second. The loader
            and communication are not timed.
        target_batch_size: samples per optimizer step, of all processes together; None for
            `per_device_train_batch_size` times `gradient_accumulation_steps` times the world size, which is met
            exactly.
        exact: meet a `target_batch_size` exactly, however small the micro-batch that divides it; see
            `plan_accumulation`.
        seq_len: sequence length to try with; None for the longest in the data.
        make_batch: `make_batch(batch_size, seq_len)` returns a batch as the loader would, for data of which none can be
            made by the collator.
        resume_from_checkpoint: what `trainer.train()` will be given; its optimizer's state is in memory from the first
            step on.
        state: what else a step changes that cannot be reached from the trainer.
        probe_callbacks: callbacks of the trainer's, or their classes, that take part in the tries. The others sit out.
        headroom: memory to leave free: a share of what training could take (0.05 or `5%`), or bytes (an int or `1GiB`).
        min_batch_size: no smaller size is tried; 2 for a model that fails with a single sample, as BatchNorm may.
        max_batch_size: no larger size is tried.
        multiple_of: every size tried is a multiple of this.
        tolerance: share of the answer that may be left on the table for fewer tries; 0 for the exact maximum.
        budget: the most memory that may be used, in bytes or as `12GiB`; on a CPU, resident memory of the process.
        cache: where results are cached (a path, an fsspec URL, a `Store`); None or True for the default place, False
            for no cache.
        certify: whether a cached answer is tried once before it is set. With False it is set at once where as much
            memory is free as when it was found, or far more than it takes.
        on_trial: called after each trial with it, for a line of progress.

    Returns:
        What was found and set; its text is one line that says it all, and `watch()` is a context for `trainer.train()`
        that lowers the cached result should training run out of memory all the same.

    Raises:
        InvalidValue: an argument has an invalid value, or the trainer is not supported; the text says what to do.
        MissingExtra: accelerate is not installed.
        OutOfMemory: not even the smallest size fits; the text says what to do.
        Exception: whatever the user's code raised that is not about the size, unchanged, with all put back.
        RankFailed: it was raised on another rank.
        RankLost: another rank has ended, or does not answer within `ddp_timeout`.
    """
    check_trainer(trainer)
    from transformers.trainer_utils import has_length

    args = trainer.args
    if seq_len is not None and seq_len < 1:
        raise InvalidValue("seq_len", seq_len, "a length of at least 1, or None for the longest in the data")
    target = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    if args.dataloader_drop_last and has_length(trainer.train_dataset):
        # A larger batch would be dropped, and none be left.
        most = max(min_batch_size, len(trainer.train_dataset) // args.world_size)
        max_batch_size = most if max_batch_size is None else min(max_batch_size, most)
    options = SearchOptions(
        target_batch_size=target if target_batch_size is None else target_batch_size,
        goal=goal,
        exact=exact or target_batch_size is None,
        headroom=headroom,
        min_batch_size=min_batch_size,
        max_batch_size=max_batch_size,
        multiple_of=multiple_of,
        tolerance=tolerance,
        budget=budget,
        cache=cache,
        certify=certify,
    )
    limits = options.limits(num_devices=args.world_size)
    device = device_of(args.device, ())
    evaluation = TrainerEvaluation(trainer)
    checkpoint = _checkpoint_of(trainer, resume_from_checkpoint)

    def restore() -> None:
        trainer._load_optimizer_and_scheduler(checkpoint)
        trainer._load_scaler(checkpoint)

    def search(loader: Any) -> TunedBatchSize:
        batches = TrainerBatches(loader, make_batch)
        step = TrainerStep(trainer)
        # Accelerate wraps the optimizer; hooks see the one inside.
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        named = (trainer.model_wrapped, optimizer, trainer, *state)
        # Batches keep the samples they have read from one trial to the next, and an evaluation is measured once.
        alone = (batches, evaluation, *bulk_data(trainer))
        phases = Phases()
        if device.type == "cuda":  # where what is allocated lies in a cache of the allocator's
            phases = Phases(
                None if checkpoint is None else restore,
                batches.others if seq_len is None and batches.varies() else None,
                None if args.eval_strategy == "no" else evaluation,
                _samples_of_epoch(trainer, loader, limits.target_batch_size or 1),
            )
        config = LoopConfig(step, batches, named, device, caller="tune_trainer", left_alone=alone, phases=phases)
        batches(limits.bounds.first, seq_len)
        key = functools.partial(make_key, trainer)
        return tune_loop(config, limits, options.budget_bytes, [seq_len], options.store, on_trial, key).smallest

    found = where_training_begins(trainer, own_loader, probe_callbacks, search)
    clear(device)  # of what was prepared, such as DDP's buckets
    set_size(trainer, found.batch_size)
    args.gradient_accumulation_steps = found.accumulation
    if trainer.is_world_process_zero():
        if found.plan is not None and has_length(trainer.train_dataset):
            _warn_of_short_epoch(trainer, found.plan)
        seen = found.result.measurement
        if seen is not None and seen.resting_bytes is not None:
            kept = evaluation.warning(found.tuning.limit_bytes - seen.resting_bytes)
            if kept:
                warnings.warn(kept, stacklevel=2)
        if evaluation.raised:
            said = f"sizes were tried without the evaluation, which raised {evaluation.raised}"
            warnings.warn(f"{said}. Leave room for it with headroom=.", stacklevel=2)
    if device.type == "cuda":
        from batchfinder.huggingface.empty_cache import EmptyCacheCallback

        trainer.remove_callback(EmptyCacheCallback)  # of an earlier call
        trainer.add_callback(EmptyCacheCallback())
    return found


def _checkpoint_of(trainer: Trainer, resume_from_checkpoint: str | os.PathLike[str] | bool | None) -> str | None:
    """The folder of the checkpoint that training goes on from; None where it starts anew.

    Raises:
        InvalidValue: the folder does not exist, or `output_dir` has no checkpoint.
    """
    if not resume_from_checkpoint:
        return None
    from transformers.trainer_utils import get_last_checkpoint

    folder: str | None = os.fspath(resume_from_checkpoint) if resume_from_checkpoint is not True else None
    if folder is None and os.path.isdir(str(trainer.args.output_dir)):
        folder = get_last_checkpoint(str(trainer.args.output_dir))  # type: ignore[no-untyped-call]
    if folder is None or not os.path.isdir(folder):
        expected = f"a folder that a Trainer has saved, or True where {trainer.args.output_dir} has one"
        raise InvalidValue("resume_from_checkpoint", resume_from_checkpoint, expected)
    return folder


def _samples_of_epoch(trainer: Trainer, loader: Any, target_batch_size: int) -> int | None:
    """How many samples an epoch has; None where no smaller batch ends it, or training ends before, or nothing tells.

    Several processes have full batches alone: accelerate fills the last one with samples of the epoch's beginning.
    """
    from transformers.trainer_utils import has_length

    args, sampler = trainer.args, getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    if args.world_size > 1 or args.dataloader_drop_last or sampler is None or not has_length(sampler):
        return None
    samples = len(sampler)
    return None if 0 < args.max_steps * target_batch_size <= samples else samples


def _warn_of_short_epoch(trainer: Trainer, plan: AccumulationPlan) -> None:
    """Warn where an epoch has fewer micro-batches than the plan has in a step."""
    args, size = trainer.args, plan.micro_batch_size
    samples = -(-len(trainer.train_dataset) // args.world_size)  # type: ignore[arg-type]
    if args.dataloader_drop_last:
        samples = len(trainer.train_dataset) // args.world_size // size * size  # type: ignore[arg-type]
    short = plan.in_short_epoch(samples)
    if short:
        most = samples * args.world_size
        warnings.warn(
            f"{short}. The Trainer steps at the end of each epoch, so that every optimizer step sees at most {most} "
            f"samples. For steps of one size pass tune_trainer a target_batch_size of at most {most}.",
            stacklevel=3,
        )


T = TypeVar("T")


def where_training_begins(
    trainer: Trainer, make_loader: Callable[[Any], Any], callbacks: Sequence[Any], body: Callable[[Any], T]
) -> T:
    """Let the trainer prepare its training, call a function in place of the first step, and undo the preparations.

    `trainer.train()` itself runs, up to where it asks for the first batch: the model is wrapped, the optimizer and the
    scheduler are made, hooks are in place, whatever the version of transformers and whatever a derived class overrides.
    Only the callbacks that are named take part; nothing is evaluated.

    Args:
        trainer: not in training.
        make_loader: takes the trainer, and returns what training would read.
        callbacks: those of the trainer's, or their classes, that take part.
        body: takes the loader. Tensors that it changes it has to put back itself.

    Returns:
        What the body returned.

    Raises:
        InvalidValue: the trainer steps without asking for batches.
        Exception: whatever the preparations or the body raised, unchanged.
    """
    from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback

    # Tensors are left alone: the preparations write to none that training would not write to, and a copy takes memory.
    before = TrainingState.capture(trainer, left_alone=[torch.Tensor, *bulk_data(trainer)])
    sharded_before = set(_module_state_mapping)
    try:
        with ExitStack() as entered:
            if trainer.is_fsdp_enabled and trainer.model is not None:
                _keep_whole_weights(trainer.model)
            refusing = register_optimizer_step_pre_hook(_refuse)
            entered.callback(refusing.remove)
            log = logging.getLogger("transformers.trainer")  # announces a training that does not take place
            entered.callback(log.setLevel, log.level)
            log.setLevel(max(log.level, logging.WARNING))

            def begin() -> T:
                refusing.remove()
                del vars(trainer)["get_train_dataloader"]
                return body(loader)

            loader = make_loader(trainer)
            sentinel = _LoaderSentinel(loader, begin)
            vars(trainer)["get_train_dataloader"] = lambda: sentinel
            trainer.args.eval_on_start = False
            kinds = tuple(callback for callback in callbacks if isinstance(callback, type))
            named = [
                callback
                for callback in trainer.callback_handler.callbacks
                if isinstance(callback, kinds) or any(callback is one for one in callbacks)
            ]
            handler: Any = CallbackHandler
            trainer.callback_handler = handler(
                [DefaultFlowCallback(), *named],
                trainer.model,
                trainer.processing_class,
                trainer.optimizer,
                trainer.lr_scheduler,
            )
            try:
                trainer.train()
            except _TrainingInterrupted as returned:
                result: T = returned.args[0]
                return result
        _refuse(trainer, does="ends")
    finally:
        before.restore()
        # `fully_shard` refuses a module that it finds here (torch/distributed/_composable_state.py, PyTorch 2.13).
        for module in set(_module_state_mapping) - sharded_before:
            del _module_state_mapping[module]


def _keep_whole_weights(model: nn.Module) -> None:
    """Put parameters that share the weights in place of a model's own, for FSDP to move to the device and let go of.

    The model's own stay where they are, on the host, until they are put back.
    """
    made: dict[int, nn.Parameter] = {}
    for part in model.modules():
        for name, parameter in part._parameters.items():
            if type(parameter) is nn.Parameter:
                if id(parameter) not in made:
                    made[id(parameter)] = nn.Parameter(parameter.detach(), parameter.requires_grad)
                    vars(made[id(parameter)]).update(vars(parameter))
                part._parameters[name] = made[id(parameter)]


def bulk_data(trainer: Trainer) -> list[Any]:
    """The trainer's data where they are plain lists, which need not be copied to put them back."""
    found = [trainer.train_dataset, trainer.eval_dataset]
    if isinstance(trainer.eval_dataset, dict):
        found += trainer.eval_dataset.values()
    return [data for data in found if isinstance(data, list | tuple)]


class _TrainingInterrupted(BaseException):
    """Carries what the body returned out of `train()`, past handlers of exceptions."""


class _LoaderSentinel:
    """Stands for the loader until training asks for its first batch."""

    def __init__(self, loader: Any, body: Callable[[], Any]) -> None:
        self.dataset = getattr(loader, "dataset", None)
        self._loader = loader
        self._body = [body]

    def __len__(self) -> int:
        return max(1, len(self._loader))

    def __iter__(self) -> Iterator[Any]:
        # Taken out, so that nothing that the trainer can reach leads to the search.
        body, self._loader = self._body.pop(), ()
        raise _TrainingInterrupted(body())


def _refuse(item: Any, *hooked: Any, does: str = "steps") -> NoReturn:
    """As it is, a hook before any optimizer's step."""
    raise InvalidValue(
        "trainer",
        f"{type(item).__name__} {does} without a batch",
        "a trainer whose train() iterates over get_train_dataloader(); for a loop of its own there is tune_batch_size",
    )
