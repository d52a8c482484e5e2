"""Setting a batch size where the user's loaders get it, before the loop asks for them, and putting the old one back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_debug
from pytorch_lightning import LightningModule, Trainer

from batchfinder.errors import InvalidValue
from batchfinder.lightning.compat import (
    LoaderSource,
    StageLoop,
    attribute_holders,
    drop_loaders,
    loader_source,
    set_loader_source,
)
from batchfinder.lightning.dataloaders import batch_size_of, check_resizable, flattened, resize

STAGES = ("fit", "validate", "test", "predict")


class Applied(list[str]):
    """What was set, one line each, and the way back.

    Attributes:
        undoing: what `undo` will call, newest first; grows while loaders are made.
    """

    def __init__(self, lines: Iterable[str] = (), undoing: Iterable[Callable[[], None]] = ()) -> None:
        super().__init__(lines)
        self.undoing = list(undoing)

    def undo(self) -> None:
        """Put everything back as it was. A second call does nothing."""
        while self.undoing:
            self.undoing.pop()()


class SizedSource:
    """Stands in for a loop's source of loaders; each loader that comes out of it has the size.

    So a loader that a hook makes has it too, as often as `reload_dataloaders_every_n_epochs` has one made.

    Args:
        source: the loop's own source.
        batch_size: samples per batch.
        stage: what the loop does, one of `STAGES`.
        trusted: the attribute that was set, which a hook may use for a loader whose size cannot be seen; or empty.
        applied: where a change of a loader is entered, to be undone.
    """

    def __init__(
        self, source: LoaderSource, batch_size: int, stage: str, trusted: str, applied: Applied | None = None
    ) -> None:
        self.source = source
        self.name = source.name
        self.batch_size = batch_size
        self.stage = stage
        self.trusted = trusted
        self.applied = Applied() if applied is None else applied
        self.undone = False

    @property
    def instance(self) -> Any:
        """The module, datamodule or loaders; Lightning puts the next run's here."""
        return self.source.instance

    @instance.setter
    def instance(self, instance: Any) -> None:
        self.source.instance = instance

    def is_defined(self) -> bool:
        """Whether there are loaders to ask for."""
        return self.source.is_defined()

    def is_module(self) -> bool:
        """Whether a hook makes the loaders."""
        return self.source.is_module()

    def dataloader(self) -> Any:
        """Ask for the loaders, and give those the size that do not have it."""
        loaders = self.source.dataloader()
        if self.undone:
            return loaders
        for line in self.give_size(loaders):
            rank_zero_debug(f"BatchFinder: {line}.")
        return loaders

    def give_size(self, loaders: Any) -> list[str]:
        """Give each loader the size, and return what was changed, one line each.

        Raises:
            MisconfigurationException: a loader's size cannot be changed.
        """
        lines = []
        for loader in flattened(loaders):
            before = batch_size_of(loader)
            if before == self.batch_size or (before is None and self.trusted and self.is_module()):
                continue
            check_resizable(loader, self.named(loader), self.name)
            self.applied.undoing.append(resize(loader, self.batch_size, self.stage))
            lines.append(f"batch size of {self.named(loader)}: {before} -> {self.batch_size}")
        return lines

    def named(self, loader: Any) -> str:
        """A loader of the source's by its class and where it came from."""
        return f"the {type(loader).__name__} {_came_from(self, self.stage)}"


def apply_batch_size(
    trainer: Trainer, pl_module: LightningModule, stage: str, batch_size: int, attribute: str = "batch_size"
) -> Applied:
    """Make each loader of a stage have a batch size.

    To fit, the attribute is set wherever the module, its hparams, the datamodule or its hparams have it as an integer
    (or None), because a hook may compute more from it than its loader's size; validation hooks that read it see it too,
    as they would had the user written it there. For the other stages the loaders alone are changed. In every stage each
    loader that comes up, passed in or made by a hook, is then given the size if it has another: with several loaders,
    each of them.

    Loaders that the loop already holds (`trainer.estimated_stepping_batches` in `configure_optimizers` asks for them)
    are dropped, and asked for again.

    Args:
        trainer: before its loop has run.
        pl_module: its module.
        stage: one of `STAGES`.
        batch_size: samples per batch on one device.
        attribute: what the module or datamodule calls its batch size.

    Returns:
        What was set, one line each; `undo()` puts the old sizes back.

    Raises:
        InvalidValue: no such stage, or a size below 1.
        MisconfigurationException: a loader that was passed in cannot have another size.
    """
    if batch_size < 1:
        raise InvalidValue("batch_size", batch_size, "a size of at least 1")
    loops = _loops(trainer, stage)
    applied = Applied()
    try:
        if stage == "fit":
            _set_attribute(pl_module, attribute, batch_size, applied)
        trusted = attribute if applied else ""
        for loop in loops:
            source = SizedSource(loader_source(loop), batch_size, stage, trusted, applied)
            if not source.is_module() and source.instance is not None:
                applied.extend(source.give_size(source.instance))
            _replace_source(loop, source, applied)
    except BaseException:
        applied.undo()
        raise
    return applied


def check_loaders(source: LoaderSource, loaders: Any, stage: str, has_attribute: bool) -> None:
    """Make sure, before a search, that its answer can be given to the loaders it is for.

    Args:
        source: where the loaders come from.
        loaders: what it gave.
        stage: one of `STAGES`.
        has_attribute: whether the module or datamodule has the attribute, which a hook is then trusted to use.

    Raises:
        MisconfigurationException: a loader's size cannot be changed.
    """
    if has_attribute and stage == "fit" and source.is_module():
        return
    for loader in flattened(loaders):
        check_resizable(loader, f"the {type(loader).__name__} {_came_from(source, stage)}", source.name)


def has_size(pl_module: LightningModule, attribute: str) -> bool:
    """Whether the module, its hparams, the datamodule or its hparams have the attribute as a size."""
    return any(True for _ in _sizes(pl_module, attribute))


def _loops(trainer: Trainer, stage: str) -> list[StageLoop]:
    loops: dict[str, list[StageLoop]] = {
        "fit": [trainer.fit_loop],
        "validate": [trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop],
        "test": [trainer.test_loop],
        "predict": [trainer.predict_loop],
    }
    if stage not in loops:
        raise InvalidValue("stage", stage, f"one of {', '.join(STAGES)}")
    return loops[stage]


def _set_attribute(pl_module: LightningModule, attribute: str, batch_size: int, applied: Applied) -> None:
    """Set the attribute on all its holders, as Lightning's `lightning_setattr` does, where it is a size."""
    for holder, before in _sizes(pl_module, attribute):
        keyed = isinstance(holder, dict)
        put = holder.__setitem__ if keyed else holder.__setattr__
        try:
            put(attribute, batch_size)
        except AttributeError:  # a property without a setter; the loaders are given the size all the same
            continue

        def undo(holder: Any = holder, put: Any = put, before: Any = before) -> None:
            now = holder.get(attribute) if isinstance(holder, dict) else getattr(holder, attribute, None)
            if now == batch_size:  # no other size has been set since
                put(attribute, before)

        applied.undoing.append(undo)
        name = "hparams" if keyed else type(holder).__name__
        applied.append(f"{name}.{attribute}: {before} -> {batch_size}")


def _sizes(pl_module: LightningModule, attribute: str) -> Iterator[tuple[Any, int | None]]:
    """Each holder of the attribute where it is a size, and the size."""
    for holder in attribute_holders(pl_module, attribute):
        size = holder[attribute] if isinstance(holder, dict) else getattr(holder, attribute)
        if size is None or (isinstance(size, int) and not isinstance(size, bool)):
            yield holder, size


def _replace_source(loop: StageLoop, source: SizedSource, applied: Applied) -> None:
    drop_loaders(loop)
    set_loader_source(loop, source)

    def undo() -> None:
        source.undone = True
        if loader_source(loop) is source:
            set_loader_source(loop, source.source)

    applied.undoing.append(undo)


def _came_from(source: LoaderSource, stage: str) -> str:
    if source.is_module():
        return f"that {type(source.instance).__name__}.{source.name}() returned"
    return f"passed to {stage}()"
