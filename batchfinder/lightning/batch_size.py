"""Setting a batch size where the user's loaders get it, before the loop asks for them, and putting the old one back.

Then what depends on it has to start again: schedulers, and an evaluation that is under way; or the user is told, of
what the module has computed from the old one.
"""

from __future__ import annotations

import dis
import inspect
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, partial
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

from lightning_utilities.core.rank_zero import rank_zero_debug, rank_zero_warn
from pytorch_lightning import LightningModule, Trainer

from batchfinder.errors import InvalidValue
from batchfinder.lightning.compat import (
    attribute_holders,
    combined_loader,
    datamodule_of,
    drop_loaders,
    is_lightnings_own,
    loader_source,
)
from batchfinder.lightning.dataloaders import batch_size_of, check_resizable, flattened, resize
from batchfinder.snapshot.training_state import TrainingState

if TYPE_CHECKING:
    from batchfinder.lightning.compat import LoaderSource, StageLoop


_MISSING = object()

STAGES = ("fit", "validate", "test", "predict")


class Applied(list[str]):
    """What was set, one line each, and the way back: `undoing`, newest last, which grows while loaders are made."""

    def __init__(self, lines: Iterable[str] = (), undoing: Iterable[Callable[[], None]] = ()) -> None:
        super().__init__(lines)
        self.undoing = list(undoing)

    def undo(self) -> None:
        """Put everything back as it was. A second call does nothing."""
        while self.undoing:
            self.undoing.pop()()


def apply_batch_size(
    trainer: Trainer, pl_module: LightningModule, stage: str, batch_size: int, attribute: str = "batch_size"
) -> Applied:
    """Make each loader of a stage have a batch size, in samples on one device; `undo()` puts the old ones back.

    To fit, the attribute is set wherever the module, its hparams, the datamodule or its hparams have it as an integer
    (or None), because a hook may compute more from it than its loader's size; validation hooks that read it see it too,
    as they would had the user written it there. For the other stages the loaders alone are changed. In every stage each
    loader that comes up, passed in or made by a hook, is then given the size if it has another: with several loaders,
    each of them, but where the hook has used the attribute for one, the others keep what it made of it (7 times that).

    Loaders that the loop already holds (`trainer.estimated_stepping_batches` in `configure_optimizers` asks for them)
    are dropped, and asked for again.

    Raises:
        InvalidValue: no such stage, or a size below 1.
        MisconfigurationException: a loader that was passed in cannot have another size.
    """
    if batch_size < 1:
        raise InvalidValue("batch_size", batch_size, "a size of at least 1")
    loops: dict[str, list[StageLoop]] = {
        "fit": [trainer.fit_loop],
        "validate": [trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop],
        "test": [trainer.test_loop],
        "predict": [trainer.predict_loop],
    }
    if stage not in loops:
        raise InvalidValue("stage", stage, f"one of {', '.join(STAGES)}")
    applied = Applied()
    try:
        if stage == "fit":
            applied = set_attribute(pl_module, attribute, batch_size)
        trusted = bool(applied)
        for loop in loops[stage]:
            _resize_loaders(loader_source(loop), batch_size, stage, trusted, applied)
            drop_loaders(loop)
    except BaseException:
        applied.undo()
        raise
    return applied


def set_attribute(pl_module: LightningModule, attribute: str, batch_size: int) -> Applied:
    """Set a size wherever the module, its hparams, the datamodule or its hparams have the attribute as a size."""
    applied = Applied()
    for holder, name, before in _sizes(pl_module, attribute):
        keyed = isinstance(holder, Mapping)
        put = partial(operator.setitem if keyed else setattr, holder, name)
        try:
            put(batch_size)
        except AttributeError:  # a property without a setter; the loaders are given the size all the same
            continue

        def undo(holder: Any = holder, name: str = name, put: Any = put, before: Any = before) -> None:
            if _value(holder, name) == batch_size:  # no other size has been set since
                put(before)

        applied.undoing.append(undo)
        where = attribute.rpartition(".")[0] or ("hparams" if keyed else type(holder).__name__)
        applied.append(f"{where}.{name}: {before} -> {batch_size}")
    return applied


def _resize_loaders(source: LoaderSource, batch_size: int, stage: str, trusted: bool, applied: Applied) -> None:
    """Give the loaders that were passed in the size, and those that a hook makes, as often as it makes new ones.

    Where the attribute was set, a hook is `trusted` to use it for a loader whose size cannot be seen.
    """
    make, replaced, undone = source.dataloader, vars(source).get("dataloader"), False

    def give_size(loaders: Any) -> list[str]:
        lines: list[str] = []
        several = flattened(loaders)
        if trusted and source.is_module() and len(several) > 1 and batch_size in map(batch_size_of, several):
            return lines
        for loader in several:
            before = batch_size_of(loader)
            if before == batch_size or (before is None and trusted and source.is_module()):
                continue
            named = _named(loader, source, stage)
            check_resizable(loader, named, source.name)
            applied.undoing.append(resize(loader, batch_size, stage))
            lines.append(f"batch size of {named}: {before} -> {batch_size}")
        return lines

    def dataloader() -> Any:
        loaders = make()
        for line in [] if undone else give_size(loaders):
            rank_zero_debug(f"BatchFinder: {line}.")
        return loaders

    def undo() -> None:
        nonlocal undone
        undone = True
        if vars(source).get("dataloader") is not dataloader:  # another size has been set since
            return
        if replaced is None:
            del vars(source)["dataloader"]
        else:
            vars(source)["dataloader"] = replaced

    if not source.is_module() and source.instance is not None:
        applied.extend(give_size(source.instance))
    vars(source)["dataloader"] = dataloader
    applied.undoing.append(undo)


def sizes_by_hook(
    source: LoaderSource, pl_module: LightningModule, attribute: str, batch_size: int
) -> list[int | None]:
    """The batch sizes of the loaders that a hook makes where the attribute has a size; empty without an attribute.

    The hook is called, which may change the user's objects: the caller puts those back.
    """
    applied = set_attribute(pl_module, attribute, batch_size)
    try:
        return [batch_size_of(loader) for loader in flattened(source.dataloader())] if applied else []
    finally:
        applied.undo()


def check_loaders(source: LoaderSource, loaders: Any, stage: str, pl_module: LightningModule, attribute: str) -> None:
    """Make sure, before a search, that `apply_batch_size` can give its answer to the loaders it is for.

    Raises:
        MisconfigurationException: a loader's size cannot be changed.
    """
    if stage == "fit" and source.is_module() and list(_sizes(pl_module, attribute)):
        return
    for loader in flattened(loaders):
        check_resizable(loader, _named(loader, source, stage), source.name)


def _sizes(pl_module: LightningModule, attribute: str) -> Iterator[tuple[Any, str, int | None]]:
    """Each holder of the attribute where it is a size, the attribute's own name, and the size.

    A name with dots is followed from the module, its hparams, the datamodule or its hparams, through attributes and
    keys: `cfg.data.batch_size`.
    """
    first, *path = attribute.split(".")
    for found in attribute_holders(pl_module, first):
        holder, name = found, first
        for following in path:
            holder, name = _value(holder, name), following
        size = _value(holder, name, _MISSING)
        if size is None or (isinstance(size, int) and not isinstance(size, bool)):
            yield holder, name, size


def own_size(pl_module: LightningModule, attribute: str) -> int | None:
    """The size that the attribute has; None where there is no such attribute, or it has none."""
    return next((size for _, _, size in _sizes(pl_module, attribute) if size is not None), None)


def warn_of_old_size(pl_module: LightningModule, attribute: str, before: int | None, hooks: Iterable[str]) -> None:
    """Warn where hooks that ran while the attribute was another size have it in their code."""
    now, kind = own_size(pl_module, attribute), type(pl_module)
    lines = {hook: _line_with(kind, hook, attribute.rpartition(".")[2]) for hook in hooks}
    found = [f"{kind.__name__}.{hook} ({line})" for hook, line in lines.items() if line]
    if found and before is not None and before != now:
        rank_zero_warn(
            f"BatchFinder: {' and '.join(found)} read{'s' * (len(found) == 1)} {attribute}, which was {before} then "
            f"and is {now} now: what was computed from it, such as a learning rate, is that of {before}. Start with "
            f"{attribute} {now}, or compute it in on_train_start, which comes after the search."
        )


def _line_with(kind: type, hook: str, name: str) -> str | None:
    """Where the code of a hook has an attribute or a key of this name, as `file:line`; None where it has none.

    Methods and properties of the class that the hook names are followed. Nothing runs for it, and nothing is put in the
    way of what runs: so the line may be one that did not.
    """
    waiting, seen = [hook], {hook}
    while waiting:
        for code in _codes(kind, waiting.pop(0)):
            for instruction in dis.get_instructions(code):
                if instruction.opname in ("LOAD_ATTR", "LOAD_CONST") and instruction.argval == name:
                    at = instruction.positions
                    return f"{code.co_filename}:{code.co_firstlineno if at is None else at.lineno}"
            waiting += [other for other in code.co_names if other not in seen]
            seen.update(code.co_names)
    return None


_WRAPPED = {property: "fget", cached_property: "func", staticmethod: "__func__", classmethod: "__func__"}


def _codes(kind: type, name: str) -> Iterator[CodeType]:
    """The code of a method or a property of the user's own classes, and of the functions made in it."""
    for base in kind.__mro__:
        member = None if is_lightnings_own(base) or base.__module__.startswith("torch.") else vars(base).get(name)
        if type(member) in _WRAPPED:
            member = getattr(member, _WRAPPED[type(member)])
        codes: list[Any] = []
        if isinstance(member, FunctionType):
            codes = [getattr(inspect.unwrap(member), "__code__", None)]
        while codes:
            code = codes.pop(0)
            if isinstance(code, CodeType):
                yield code
                codes += code.co_consts


def _value(holder: Any, name: str, default: Any = None) -> Any:
    """The value of a mapping's key or an object's attribute, or the default."""
    return holder.get(name, default) if isinstance(holder, Mapping) else getattr(holder, name, default)


def _named(loader: object, source: LoaderSource, stage: str) -> str:
    """A loader by its class and where it came from."""
    if source.is_module():
        return f"the {type(loader).__name__} that {type(source.instance).__name__}.{source.name}() returned"
    return f"the {type(loader).__name__} passed to {stage}()"


@contextmanager
def _calls_of(trainer: Trainer, hook: str) -> Iterator[list[object]]:
    """The module and the datamodule whose hook is called meanwhile, once for each call."""
    calls: list[object] = []

    def watched(owner: object, own: Callable[[], Any]) -> Callable[[], Any]:
        def call() -> Any:
            calls.append(owner)
            return own()

        return call

    owners = [each for each in (trainer.lightning_module, datamodule_of(trainer)) if each is not None]
    before = [(owner, vars(owner).get(hook)) for owner in owners]
    for owner in owners:
        vars(owner)[hook] = watched(owner, getattr(owner, hook))
    try:
        yield calls
    finally:
        for owner, own in before:
            del vars(owner)[hook]
            if own is not None:
                vars(owner)[hook] = own


class SchedulerSetup:
    """Watches `configure_optimizers`, and repeats it where it asked for the loaders.

    A scheduler made with `trainer.estimated_stepping_batches`, or with `len(self.train_dataloader())`, is as long as an
    epoch of the old batch size. A run that is started with the new size would make another, having drawn the same
    random numbers; so does the repetition.
    """

    _before: TrainingState | None = None
    _asked = False

    def watch(self, trainer: Trainer) -> None:
        """Note the random numbers just before the strategy, not set up yet, makes the optimizers."""
        strategy = trainer.strategy
        make = strategy.setup_optimizers
        self._before, self._asked = None, False

        def setup_optimizers(trainer: Trainer) -> None:
            self.unwatch(trainer)
            self._before = TrainingState.capture()
            with _calls_of(trainer, "train_dataloader") as calls:
                make(trainer)
            # Looked up right away: a LearningRateFinder asks for them later, and must not be taken for a scheduler.
            self._asked = bool(calls) or combined_loader(trainer.fit_loop) is not None

        strategy.setup_optimizers = setup_optimizers  # type: ignore[method-assign]

    def unwatch(self, trainer: Trainer) -> None:
        """Stop watching."""
        vars(trainer.strategy).pop("setup_optimizers", None)

    def repeat_if_asked(self, trainer: Trainer) -> bool:
        """Make the optimizers again, with the new size and accumulation; the random numbers stay where they are.

        Returns:
            Whether they were made again.
        """
        before, self._before = self._before, None
        self.unwatch(trainer)
        if before is None or not self._asked:
            return False
        now = TrainingState.capture()
        before.restore()
        trainer.strategy.setup_optimizers(trainer)
        now.restore()
        return True


class EvaluationRestart:
    """Notes the random numbers as an evaluation starts, and starts it again from there.

    Asking for loaders and iterating them draws random numbers (a seed for the workers, the order of a shuffled
    epoch). So that an evaluation draws what it would had it been started with the size found, the first start's are
    put back.
    """

    _before: TrainingState | None = None

    def watch(self, loop: StageLoop) -> None:
        """Note the random numbers just before a loop that has not started asks for its loaders."""
        vars(loop).pop("setup_data", None)
        self._before = None
        ask = loop.setup_data

        def setup_data() -> None:
            vars(loop).pop("setup_data", None)
            self._before = TrainingState.capture()
            ask()

        vars(loop)["setup_data"] = setup_data

    def restart(self, loop: StageLoop) -> None:
        """Let a loop that has taken no batch yet ask for the loaders again, and start to iterate them."""
        drop_loaders(loop)
        if self._before is not None:
            self._before.restore()
            self._before = None
        loop.setup_data()
        loop.reset()
