"""Lightning as it is used here: its two packages, and every private attribute of it and of DDP.

`pytorch_lightning` and `lightning.pytorch` hold the same classes twice, and a trainer knows those of its own package
alone. batchfinder imports `pytorch_lightning`; what a trainer is given comes from the trainer's package, and what it
hands out is recognised by the names of classes. In annotations `Trainer`, `LightningModule` and the types below stand
for those of either package.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping, MutableMapping
from datetime import timedelta
from functools import partial
from importlib import import_module
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.strategies import Strategy
from pytorch_lightning.utilities.parsing import _lightning_get_all_attr_holders as attribute_holders
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_unflatten

if TYPE_CHECKING:
    from pytorch_lightning.loops.evaluation_loop import _EvaluationLoop
    from pytorch_lightning.loops.fit_loop import _FitLoop as FitLoop
    from pytorch_lightning.loops.optimization.automatic import Closure, ClosureResult
    from pytorch_lightning.loops.optimization.automatic import _AutomaticOptimization as AutomaticOptimization
    from pytorch_lightning.loops.prediction_loop import _PredictionLoop
    from pytorch_lightning.trainer.connectors.data_connector import _DataLoaderSource as LoaderSource
    from pytorch_lightning.trainer.connectors.logger_connector.result import _Metadata as LogMetadata
    from pytorch_lightning.trainer.connectors.logger_connector.result import _ResultCollection as ResultCollection
    from pytorch_lightning.utilities.combined_loader import CombinedLoader

    __all__ = ["AutomaticOptimization", "Closure", "ClosureResult", "FitLoop", "LoaderSource", "LogMetadata"]
    __all__ += ["ResultCollection", "attribute_holders"]

    StageLoop = FitLoop | _EvaluationLoop | _PredictionLoop
    """A trainer's loop that asks for loaders: the one that fits, validates, tests or predicts."""

_PACKAGES = ("pytorch_lightning.", "lightning.pytorch.", "lightning_fabric.", "lightning.fabric.")
_RECORDED_CALLS = "__pl_attrs_record"


def is_a(thing: object, *names: str) -> bool:
    """Whether an object's class is, or is derived from, one of Lightning's by that name, in either package."""
    return any(base.__name__ in names and base.__module__.startswith(_PACKAGES) for base in type(thing).__mro__)


def is_lightnings_own(thing: object) -> bool:
    """Whether the class of an object, or a function, is defined in Lightning."""
    return str(getattr(thing, "__module__", "")).startswith(_PACKAGES)


def package_of(trainer: Trainer) -> str:
    """The package that a trainer's class is from, or is derived from."""
    modules = [base.__module__ for base in type(trainer).__mro__]
    return (
        "lightning.pytorch" if any(name.startswith("lightning.pytorch.") for name in modules) else "pytorch_lightning"
    )


def class_for(trainer: Trainer, module: str, name: str) -> Any:
    """A class of the trainer's own package, from a module below it such as `profilers`."""
    return getattr(import_module(f"{package_of(trainer)}.{module}"), name)


# Attributes that are only read: of the trainer (the first three are public, and its class does not declare them) ...

callbacks_of: Callable[[Trainer], list[Callback]] = attrgetter("callbacks")
datamodule_of: Callable[[Trainer], object | None] = attrgetter("datamodule")
is_fast_dev_run: Callable[[Trainer], bool | int] = attrgetter("fast_dev_run")
running_stage: Callable[[Trainer], str] = attrgetter("state.fn.value")
"""What the trainer was called for: `fit`, `validate`, `test` or `predict`."""
detects_anomaly: Callable[[Trainer], bool] = attrgetter("_detect_anomaly")
logged_results: Callable[[Trainer], ResultCollection] = attrgetter("_results")
"""What the running loop collects of `self.log`."""
needs_distributed_sampler: Callable[[Trainer], Callable[[object], bool]] = attrgetter(
    "_data_connector._requires_distributed_sampler"
)
"""Says of a loader whether Lightning will put a distributed sampler into it."""
signal_connector: Callable[[Trainer], object] = attrgetter("_signal_connector")
"""What holds the process's own signal handlers, through which all of a program can be reached."""

# ... and of what it holds.

loader_source: Callable[[StageLoop], LoaderSource] = attrgetter("_data_source")
"""Where a loop's loaders come from: loaders that were passed in, or a module or datamodule with a hook."""
combined_loader: Callable[[StageLoop], CombinedLoader | None] = attrgetter("_combined_loader")
"""The loaders that a loop holds; None until it has asked for them."""
combined_mode: Callable[[CombinedLoader], str] = attrgetter("_mode")
compiler_context: Callable[[LightningModule], object | None] = attrgetter("_compiler_ctx")
"""How the module was compiled with `torch.compile`; None if it was not."""
progress_bar_console: Callable[[object], dict[str, Any]] = attrgetter("_console_kwargs")
"""The options of the console that a RichProgressBar writes to."""
averaging_starts: Callable[[object], int | float] = attrgetter("_swa_epoch_start")
"""The epoch, counted from 1, or the share of them, from which a StochasticWeightAveraging averages."""
collective_timeout: Callable[[Strategy], timedelta | None] = attrgetter("_timeout")
"""How long a collective of a DDPStrategy may take; None for PyTorch's own limit."""
closure_functions: Callable[[Closure], tuple[Callable[[], None] | None, Callable[[torch.Tensor], None] | None]]
closure_functions = attrgetter("_zero_grad_fn", "_backward_fn")
"""What zeroes the gradients, and what runs backward; None where nothing is trained."""


# Loops and their loaders


def set_loader(loop: StageLoop, loader: object) -> None:
    """Let a loop iterate one loader, as if it had been passed in."""
    loop._data_source = type(loop._data_source)(loader, loop._data_source.name)


def drop_loaders(loop: StageLoop) -> None:
    """End the workers of the loaders that a loop holds, and let it ask for loaders again."""
    if loop._combined_loader is not None:
        loop._combined_loader.reset()
        loop._combined_loader = None


def combine_batches(combined: CombinedLoader, batches: list[Any]) -> Any:
    """What a loop gets of one batch from each loader: a batch, or a list or dict of them; the first in turn."""
    if combined._mode == "sequential":
        return batches[0]
    return tree_unflatten(batches, combined._spec)  # type: ignore[arg-type, unused-ignore]


def new_fit_loop(trainer: Trainer) -> FitLoop:
    """Put a fit loop at its beginning in place of the trainer's, and forget what was logged.

    A step that is skipped, because gradients scaled for 16-mixed overflow, leaves Adam's state unmade, which the peak
    would lack: the loss scale is set to 1. It takes no part in the memory.
    """
    if scales_loss(trainer):
        set_loss_scale(trainer, 1.0)
    trainer.fit_loop = loop = type(trainer.fit_loop)(trainer, min_epochs=0, max_epochs=trainer.fit_loop.max_epochs)
    trainer._logger_connector.reset_results()
    trainer._logger_connector.reset_metrics()
    return loop


def set_epoch(loop: FitLoop, epoch: int) -> None:
    """Make an epoch the one that `trainer.current_epoch` tells."""
    progress: Any = loop.epoch_progress.current
    progress.processed = progress.completed = epoch


def scales_loss(trainer: Trainer) -> bool:
    """Whether the precision has a scaler, as 16-mixed has."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return isinstance(scaler, torch.amp.GradScaler) and scaler.is_enabled()


def set_loss_scale(trainer: Trainer, scale: float) -> None:
    """Set the scale of 16-mixed's scaler, which skips the optimizer's step where it is infinite."""
    scaler: Any = trainer.precision_plugin.scaler  # type: ignore[attr-defined]
    scaler._init_scale = scale
    if scaler._scale is not None:
        scaler._scale.fill_(scale)


def restores_optimizers(trainer: Trainer) -> bool:
    """Whether Lightning will put states of a checkpoint into the optimizers, which it does after `on_fit_start`."""
    states = (trainer._checkpoint_connector._loaded_checkpoint or {}).get("optimizer_states")
    # Others have all ranks take part, or put the states back as they set up.
    return bool(states) and is_a(trainer.strategy, "SingleDeviceStrategy", "DDPStrategy")


def restore_optimizers(trainer: Trainer) -> None:
    """Put the checkpoint's states into the optimizers now."""
    trainer._checkpoint_connector.restore_optimizers()


def new_evaluation_loop(trainer: Trainer) -> StageLoop:
    """Put a loop at its beginning in place of the one that validates, tests or predicts, whichever the trainer does."""
    if trainer.predicting:
        trainer.predict_loop = type(trainer.predict_loop)(trainer, trainer.predict_loop.inference_mode)
        trainer.predict_loop.return_predictions = False
        return trainer.predict_loop
    old = trainer.test_loop if trainer.testing else trainer.validate_loop
    loop = type(old)(trainer, old._trainer_fn, old._stage, verbose=False, inference_mode=old.inference_mode)
    if trainer.testing:
        trainer.test_loop = loop
    else:
        trainer.validate_loop = loop
    return loop


def inner_batch_sampler(batch_sampler: object) -> Any:
    """What Lightning's batch sampler for prediction wraps; None for any other."""
    return getattr(batch_sampler, "_batch_sampler", None)


def recorded_calls(loader: object) -> list[tuple[tuple[Any, ...], Callable[..., object]]]:
    """Calls, as arguments and function, that Lightning repeats on a loader that it makes anew of this one."""
    return list(getattr(loader, _RECORDED_CALLS, ()))


def record_call(loader: object, function: Callable[..., object], arguments: tuple[Any, ...] | None) -> None:
    """Let Lightning call a function on a loader that it makes anew of this one, in place of an earlier call of it.

    `arguments` follow the new loader; None leaves the function out. A loader without attributes is left alone.
    """
    if not hasattr(loader, "__dict__"):
        return
    calls = [call for call in recorded_calls(loader) if call[1] is not function]
    if arguments is not None:
        calls.append((arguments, function))
    if calls:
        object.__setattr__(loader, _RECORDED_CALLS, calls)  # Lightning may record a plain assignment as well
    else:
        loader.__dict__.pop(_RECORDED_CALLS, None)


# The trainer and its module


def silence(trainer: Any, callbacks: list[Callback]) -> None:
    """Let a trainer's loops write, show, save and validate nothing, and call these callbacks alone.

    Schedulers do not step: one that is made for a few steps, as OneCycleLR may be, would raise after these.
    """
    trainer.callbacks = callbacks
    for config in trainer.lr_scheduler_configs:
        config.interval = ""
    dummy = class_for(trainer, "loggers.logger", "DummyLogger")
    trainer.loggers = [_dummy_of(logger, dummy) for logger in trainer.loggers]
    trainer.profiler = class_for(trainer, "profilers", "PassThroughProfiler")()
    trainer.log_every_n_steps = 1
    trainer.should_stop = False
    trainer.limit_train_batches = trainer.limit_val_batches = 1.0
    trainer.limit_test_batches = trainer.limit_predict_batches = 1.0
    trainer.val_check_interval, trainer.check_val_every_n_epoch = 1.0, 1
    vars(trainer)["_val_check_time_interval"] = None  # since Lightning 2.6; earlier ones do not look at it
    trainer.reload_dataloaders_every_n_epochs = 0
    trainer.overfit_batches = 0


def _dummy_of(logger: Any, dummy: type[Any]) -> Any:
    """A logger that logs nothing, and names the folders of this one when it is asked for them."""
    folders: dict[str, Any] = {
        name: property(partial(_read, logger, name))
        for name in ("save_dir", "log_dir", "root_dir")
        if hasattr(type(logger), name)
    }
    return type(dummy.__name__, (dummy,), folders)()


def _read(owner: Any, name: str, asked: Any) -> Any:
    return getattr(owner, name)


def transfer_batch(trainer: Trainer, batch: Any) -> Any:
    """A batch of the training loader on the device, through the module's hooks."""
    batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
    return trainer.strategy.batch_to_device(batch)


def training_step_arguments(trainer: Trainer, batch: Any) -> list[Any]:
    """What `training_step` is called with for a batch, as the first of an epoch."""
    return list(trainer.fit_loop.epoch_loop._build_kwargs(OrderedDict(), batch, 0).values())


def add_hyperparameters(trainer: Trainer, values: dict[str, Any]) -> Callable[[], None]:
    """Let the loggers have values among the hyperparameters of a run, which Lightning logs after `on_fit_start`.

    Where the module or the datamodule has its own logged, the values join them, since loggers such as MLflow's refuse a
    second value for a name. A name with dots is looked for in nested mappings and attributes first.

    Returns:
        What takes the values out again, from the module's and the datamodule's `hparams_initial`.
    """
    if not trainer.loggers or not getattr(trainer, "enable_autolog_hparams", True):
        return lambda: None
    both: list[Any] = [trainer.lightning_module, datamodule_of(trainer)]
    holders = [holder for holder in both if holder is not None and holder._log_hyperparams]
    before = [(holder, holder._hparams_initial) for holder in holders]
    for holder, initial in before:
        holder._hparams_initial = logged = copy.deepcopy(initial)
        for name, value in values.items():
            *path, last = name.split(".")
            inside: Any = logged
            for part in path:
                inside = inside.get(part) if isinstance(inside, Mapping) else getattr(inside, part, None)
            if isinstance(inside, MutableMapping):
                inside[last] = value
            elif hasattr(inside, last):
                setattr(inside, last, value)
            else:
                logged[name] = value
    if not holders:
        for logger in trainer.loggers:
            logger.log_hyperparams(values)

    def undo() -> None:
        for holder, initial in before:
            holder._hparams_initial = initial

    return undo


# Automatic optimization and logging

MakeClosure = Callable[["OrderedDict[str, Any]", torch.optim.Optimizer, int], "Closure"]


def replace_make_closure(loop: AutomaticOptimization, make: MakeClosure) -> MakeClosure:
    """Let a loop make its closures by another function; returns its own."""
    before: MakeClosure = loop._make_closure
    vars(loop)["_make_closure"] = make
    return before


def restore_make_closure(loop: AutomaticOptimization) -> None:
    """Let a loop make its own closures again. A second call does nothing."""
    vars(loop).pop("_make_closure", None)


def replace_closure_step(closure: Closure, step: Callable[[], ClosureResult]) -> None:
    """Let a closure do nothing but call `step`, which zeroes gradients and runs backward itself."""
    closure._step_fn, closure._zero_grad_fn, closure._backward_fn = step, None, None


def run_training_step(loop: AutomaticOptimization, kwargs: OrderedDict[str, Any]) -> ClosureResult:
    """Run `training_step` through the strategy, as the loop's own closure does."""
    return loop._make_step_fn(kwargs)()


# Strategies and DDP


def has_other_processes(trainer: Trainer) -> bool:
    """Whether a fit runs in processes that the caller's does not take part in: ddp_spawn, ddp_fork, ddp_notebook."""
    return is_a(trainer.strategy.launcher, "_MultiProcessingLauncher")


def synchronize_before_forward(model: DistributedDataParallel) -> None:
    """Do what a forward of DDP does together with the other ranks: rebuild its buckets, broadcast buffers."""
    if model.reducer._rebuild_buckets():
        model._has_rebuilt_buckets = True
    if model._check_sync_bufs_pre_fwd():
        model._sync_buffers()
