"""Lightning as it is used here: its two packages, and every private attribute of it and of DDP.

`pytorch_lightning` and `lightning.pytorch` hold the same classes twice, and a trainer knows those of its own package
alone. batchfinder imports `pytorch_lightning`; what a trainer is given comes from the trainer's package, and what it
hands out is recognised by the names of classes. In annotations `Trainer`, `LightningModule` and the types below stand
for those of either package.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.strategies import Strategy
from pytorch_lightning.utilities.parsing import _lightning_get_all_attr_holders
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_unflatten

if TYPE_CHECKING:
    from pytorch_lightning.loops.fit_loop import _FitLoop as FitLoop
    from pytorch_lightning.loops.optimization.automatic import Closure, ClosureResult
    from pytorch_lightning.loops.optimization.automatic import _AutomaticOptimization as AutomaticOptimization
    from pytorch_lightning.trainer.connectors.logger_connector.result import _Metadata as LogMetadata
    from pytorch_lightning.trainer.connectors.logger_connector.result import _ResultCollection as ResultCollection
    from pytorch_lightning.utilities.combined_loader import CombinedLoader

    __all__ = ["AutomaticOptimization", "Closure", "ClosureResult", "FitLoop", "LogMetadata", "ResultCollection"]

_PACKAGES = ("pytorch_lightning.", "lightning.pytorch.", "lightning_fabric.", "lightning.fabric.")
_RECORDED_CALLS = "__pl_attrs_record"


class LoaderSource(Protocol):
    """Where a loop's loaders come from: loaders that were passed in, or a module or datamodule with a hook.

    Attributes:
        instance: the loaders, the module or the datamodule.
        name: the hook's.
    """

    instance: Any
    name: str

    def dataloader(self) -> Any:
        """The loaders."""
        ...

    def is_defined(self) -> bool:
        """Whether there are loaders to ask for."""
        ...

    def is_module(self) -> bool:
        """Whether a hook makes the loaders."""
        ...


class StageLoop(Protocol):
    """A trainer's loop that asks for loaders: the one that fits, validates, tests or predicts."""

    _data_source: Any
    _combined_loader: Any

    def setup_data(self) -> None:
        """Ask for the loaders, where that is due."""
        ...

    def reset(self) -> None:
        """Start to iterate them."""
        ...

    def run(self) -> Any:
        """Run from start to end."""
        ...


def is_a(thing: object, *names: str) -> bool:
    """Whether an object's class is, or is derived from, one of Lightning's by that name, in either package."""
    return any(base.__name__ in names and base.__module__.startswith(_PACKAGES) for base in type(thing).__mro__)


def is_lightnings_own(thing: object) -> bool:
    """Whether an object's class is defined in Lightning."""
    return type(thing).__module__.startswith(_PACKAGES)


def is_overridden(name: str, thing: object) -> bool:
    """Whether a hook of a module or datamodule, of either package, is the user's own."""
    return not str(getattr(getattr(type(thing), name), "__module__", "")).startswith(_PACKAGES)


def package_of(trainer: Trainer) -> str:
    """The package that a trainer's class is from, or is derived from."""
    modules = [base.__module__ for base in type(trainer).__mro__]
    return (
        "lightning.pytorch" if any(name.startswith("lightning.pytorch.") for name in modules) else "pytorch_lightning"
    )


def class_for(trainer: Trainer, module: str, name: str) -> Any:
    """A class of the trainer's own package.

    Args:
        trainer: of either package.
        module: the class's module below the package, such as `profilers`.
        name: the class's name.
    """
    return getattr(import_module(f"{package_of(trainer)}.{module}"), name)


def callbacks_of(trainer: Trainer) -> list[Callback]:
    """The trainer's callbacks; a public attribute that its class does not declare."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return callbacks


def datamodule_of(trainer: Trainer) -> object | None:
    """The trainer's datamodule; a public attribute that its class does not declare."""
    datamodule: object | None = trainer.datamodule  # type: ignore[attr-defined]
    return datamodule


def is_fast_dev_run(trainer: Trainer) -> bool:
    """Whether `Trainer(fast_dev_run=...)` was asked for; a public attribute that its class does not declare."""
    return bool(trainer.fast_dev_run)  # type: ignore[attr-defined]


def set_attributes(trainer: Trainer, **values: object) -> None:
    """Set public attributes of a trainer, most of which its class does not declare."""
    for name, value in values.items():
        setattr(trainer, name, value)


# Loops and their loaders


def loader_source(loop: StageLoop) -> LoaderSource:
    """Where a loop's loaders come from."""
    source: LoaderSource = loop._data_source
    return source


def set_loader_source(loop: StageLoop, source: LoaderSource) -> None:
    """Let a loop take its loaders from another source."""
    loop._data_source = source


def set_loader(loop: StageLoop, loader: object) -> None:
    """Let a loop iterate one loader, as if it had been passed in."""
    loop._data_source = type(loop._data_source)(loader, loop._data_source.name)


def combined_loader(loop: StageLoop) -> CombinedLoader | None:
    """The loaders that a loop holds; None until it has asked for them."""
    combined: CombinedLoader | None = loop._combined_loader
    return combined


def drop_loaders(loop: StageLoop) -> None:
    """End the workers of the loaders that a loop holds, and let it ask for loaders again."""
    if loop._combined_loader is not None:
        loop._combined_loader.reset()
        loop._combined_loader = None


def is_sequential(combined: CombinedLoader) -> bool:
    """Whether loaders take turns, so that a batch comes from one of them."""
    return combined._mode == "sequential"


def combine_batches(combined: CombinedLoader, batches: list[Any]) -> Any:
    """What training gets of one batch from each loader: a batch, or a list or dict of them."""
    return tree_unflatten(batches, combined._spec)  # type: ignore[arg-type, unused-ignore]


def new_fit_loop(trainer: Trainer) -> FitLoop:
    """Put a fit loop at its beginning, of one epoch, in place of the trainer's; and forget what was logged."""
    trainer.fit_loop = loop = type(trainer.fit_loop)(trainer, min_epochs=0, max_epochs=1)
    trainer._logger_connector.reset_results()
    trainer._logger_connector.reset_metrics()
    return loop


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


def needs_distributed_sampler(trainer: Trainer, loader: object) -> bool:
    """Whether Lightning will put a distributed sampler into a loader."""
    return bool(trainer._data_connector._requires_distributed_sampler(loader))  # type: ignore[arg-type]


def inner_batch_sampler(batch_sampler: object) -> Any:
    """What Lightning's batch sampler for prediction wraps; None for any other."""
    return getattr(batch_sampler, "_batch_sampler", None)


def recorded_calls(loader: object) -> list[tuple[tuple[Any, ...], Callable[..., object]]]:
    """Calls, as arguments and function, that Lightning repeats on a loader that it makes anew of this one."""
    return list(getattr(loader, _RECORDED_CALLS, ()))


def set_recorded_calls(loader: object, calls: list[tuple[tuple[Any, ...], Callable[..., object]]]) -> None:
    """Replace the calls that Lightning repeats; a loader without attributes is left alone."""
    if not hasattr(loader, "__dict__"):
        return
    if calls:
        object.__setattr__(loader, _RECORDED_CALLS, calls)  # Lightning may record a plain assignment as well
    else:
        loader.__dict__.pop(_RECORDED_CALLS, None)


# The trainer and its module


def detects_anomaly(trainer: Trainer) -> bool:
    """Whether `Trainer(detect_anomaly=True)` was asked for."""
    return trainer._detect_anomaly


def never_validate_by_time(trainer: Trainer) -> None:
    """Drop an interval in time between validations."""
    vars(trainer)["_val_check_time_interval"] = None  # since Lightning 2.6; earlier ones do not look at it


def signal_connector(trainer: Trainer) -> object:
    """What holds the process's own signal handlers, through which all of a program can be reached."""
    return trainer._signal_connector


def is_compiled(module: LightningModule) -> bool:
    """Whether the module was compiled with `torch.compile`."""
    return module._compiler_ctx is not None


def attribute_holders(module: LightningModule, name: str) -> list[Any]:
    """Those of the module, its hparams, the datamodule and its hparams that have an attribute or key by a name."""
    return _lightning_get_all_attr_holders(module, name)


def transfer_batch(trainer: Trainer, batch: Any) -> Any:
    """A batch of the training loader on the device, through the module's hooks."""
    batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
    return trainer.strategy.batch_to_device(batch)


def training_step_arguments(trainer: Trainer, batch: Any) -> list[Any]:
    """What `training_step` is called with for a batch, as the first of an epoch."""
    return list(trainer.fit_loop.epoch_loop._build_kwargs(OrderedDict(), batch, 0).values())


def progress_bar_console(bar: object) -> dict[str, Any]:
    """The options of the console that a RichProgressBar writes to."""
    options: dict[str, Any] = getattr(bar, "_console_kwargs", {})
    return options


def set_loss_scale(plugin: object, scale: float) -> None:
    """Set the loss scale of a precision plugin; nothing happens where it does not scale."""
    scaler = getattr(plugin, "scaler", None)
    if isinstance(scaler, torch.amp.GradScaler) and scaler.is_enabled():
        scaler._init_scale = scale
        if scaler._scale is not None:
            scaler._scale.fill_(scale)


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


def closure_functions(closure: Closure) -> tuple[Callable[[], None] | None, Callable[[torch.Tensor], None] | None]:
    """What zeroes the gradients, and what runs backward; None where nothing is trained."""
    return closure._zero_grad_fn, closure._backward_fn


def replace_closure_step(closure: Closure, step: Callable[[], ClosureResult]) -> None:
    """Let a closure do nothing but call `step`, which zeroes gradients and runs backward itself."""
    closure._step_fn, closure._zero_grad_fn, closure._backward_fn = step, None, None


def run_training_step(loop: AutomaticOptimization, kwargs: OrderedDict[str, Any]) -> ClosureResult:
    """Run `training_step` through the strategy, as the loop's own closure does."""
    return loop._make_step_fn(kwargs)()


def logged_results(trainer: Trainer) -> ResultCollection:
    """What the running loop collects of `self.log`."""
    results = trainer._results
    assert results is not None
    return results


# Strategies and DDP


def collective_timeout(strategy: Strategy) -> timedelta | None:
    """How long a collective of the strategy may take; None for PyTorch's own limit."""
    timeout: timedelta | None = getattr(strategy, "_timeout", None)
    return timeout


def rewrap_in_ddp(strategy: Strategy, module: LightningModule) -> None:
    """Wrap the module in a new DistributedDataParallel by a DDPStrategy's options, and broadcast no weights."""
    ddp: Any = strategy
    options = ddp._ddp_kwargs
    ddp.model = module
    ddp._ddp_kwargs = {**options, "init_sync": False}
    try:
        ddp.configure_ddp()
    finally:
        ddp._ddp_kwargs = options


def synchronize_before_forward(model: DistributedDataParallel) -> None:
    """Do what a forward of DDP does together with the other ranks: rebuild its buckets, broadcast buffers."""
    if model.reducer._rebuild_buckets():
        model._has_rebuilt_buckets = True
    if model._check_sync_bufs_pre_fwd():
        model._sync_buffers()
