"""The largest batch size for each model, GPU and sequence length."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any, Unpack, overload

from batchfinder.cache import Store
from batchfinder.devices import find_gpu, find_instance, known_prices
from batchfinder.devices.cards import USUAL_GPU, card, instance_card, named_gpus
from batchfinder.errors import BatchFinderError, CacheFailed, InvalidValue
from batchfinder.models.catalog import check_model_name
from batchfinder.recording.simulation import Simulation
from batchfinder.report.made_by import made_by
from batchfinder.report.sweep import SCHEMA, SweepRow, sweep_table
from batchfinder.simulator.alloc_conf import AllocatorSettings
from batchfinder.sizing.cells import ModelCells
from batchfinder.sizing.measured_cells import measure_cells
from batchfinder.sizing.simulated_cells import CARDS_OF_A_POOL, search_pool, simulate_cells
from batchfinder.sizing.sweep_request import DEFAULT_SEQ_LENS, SIMULATED, Place, SweepRequest, check_request
from batchfinder.training.spec import AUTO, StepOptions, StepWords, seq_lens_of
from batchfinder.units import parse_count, parse_headroom, parse_utilisation

_ARGUMENTS = {"gpu": "gpus", "gpus": "num_gpus", "seq_len": "seq_lens"}
"""What `sweep` calls options of other functions."""


class SweepResult(Sequence[SweepRow]):
    """The rows of a sweep in the order asked for: by model, GPU and sequence length.

    Printed it is the table of `batchfinder sweep`, and so it is in a notebook.

    Attributes:
        conditions: what the figures hold under, beyond what each row says, in words.

    Example:
        >>> {(row.gpu, row.seq_len): row.batch_size for row in sweep("bert-base", gpus="T4")}  # doctest: +SKIP
        {('T4', 64): 341, ('T4', 128): 170, ('T4', 256): 85, ('T4', 320): 68, ('T4', 384): 56, ('T4', 512): 42}
    """

    def __init__(self, rows: Sequence[SweepRow], conditions: Sequence[str] = ()) -> None:
        self._rows, self.conditions = tuple(rows), tuple(conditions)

    @overload
    def __getitem__(self, index: int) -> SweepRow: ...

    @overload
    def __getitem__(self, index: slice) -> SweepResult: ...

    def __getitem__(self, index: int | slice) -> SweepRow | SweepResult:
        if isinstance(index, slice):
            return SweepResult(self._rows[index], self.conditions)
        return self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def to_json(self) -> dict[str, Any]:
        """All figures as JSON values, sizes in bytes: what `batchfinder sweep --json` prints."""
        return {"schema": SCHEMA, "made_by": made_by(), "rows": [row.to_json() for row in self._rows]}

    def __repr__(self) -> str:
        return str(sweep_table(self._rows, self.conditions)) if self._rows else "no rows"

    def _repr_html_(self) -> str:
        return sweep_table(self._rows, self.conditions).to_html() if self._rows else "no rows"


def sweep(
    models: str | Sequence[str],
    *,
    gpus: str | Sequence[str] | None = None,
    instances: str | Sequence[str] = (),
    num_gpus: int | Sequence[int] | None = None,
    seq_lens: int | Sequence[int] = (),
    target_batch_size: int | None = None,
    max_batch_size: int | None = None,
    min_batch_size: int = 1,
    multiple_of: int = 1,
    exact: bool = False,
    headroom: float | str = 0,
    mfu: float | str | None = None,
    cache: str | bool = True,
    recorder: str = AUTO,
    status: Callable[[str], object] | None = None,
    **options: Unpack[StepWords],
) -> SweepResult:
    """The largest batch size that trains, for each model, simulated GPU and sequence length: `batchfinder sweep`.

    That not one sample fits is a result: the row's `batch_size` is 0, and its `what_fits` says under which options it
    trains.

    Args:
        models: one or several, as `batchfinder sweep` takes them: names, ids on the Hugging Face Hub, paths to a
            config.json or its folder, or `package.module:factory`.
        gpus: names of `batchfinder.devices`, one or several; `24GB+` for all of at least that size, `all` for all; None
            for an A100 of 80 GB, unless there are instances.
        instances: the GPUs of cloud instances besides, such as `p4d.24xlarge`, with their prices.
        num_gpus: how many train together, one number or several; None for the instance's, or 1.
        seq_lens: tokens per sample, or pixels of an image's side, one or several; those that suit each model by
            default.
        target_batch_size: samples per optimizer step, on all GPUs together; each row then has a `plan`.
        max_batch_size: the largest to try.
        min_batch_size: the smallest to try.
        multiple_of: only multiples of it are tried.
        exact: meet the target exactly, however small the micro-batch that divides it.
        headroom: what stays free of each GPU: a share (0.1, `10%`), or a size (a number of bytes, `1GiB`).
        mfu: the share of the GPUs' peak FLOP/s that the training reaches (0.4, `40%`), as you state it; each row of an
            instance with a price then has a `cost`.
        cache: where results are kept and looked up: a folder or an fsspec URL; True for where the command line keeps
            them, False for nowhere.
        recorder: what takes the steps: `fake-device`, or `cuda-build` for PyTorch's own CUDA code without a GPU
            (`batchfinder stub install` brings it), on which each size reported is tried, and the next
            one; by default that where it is here, for up to four GPUs (another number of one counts as another).
        status: is called with a line on what is being done, such as `print`; None for silence.
        options: of the step, by their names in Python: `mode`, `precision`, `optimizer`, `attention`,
            `gradient_checkpointing`, `compile`, `loss`, `packed`, `optimizer_in_backward`, `lora`, `lora_targets`,
            `quantization`, `strategy`, `tensor_parallel`, `context_parallel`.

    Raises:
        InvalidValue: an argument cannot be used.
        UnknownName: no such GPU, instance or model.
        CacheFailed: results cannot be kept there.
        CudaStubUnavailable: the CUDA build is to record, and cannot be had here.
        BatchFinderError: a model cannot be built or recorded.

    Example:
        >>> rows = sweep(  # doctest: +SKIP
        ...     "bert-base", gpus=["T4", "V100"], seq_lens=512, target_batch_size=256, precision="16-mixed"
        ... )
        >>> [(row.gpu, row.batch_size, str(row.plan)) for row in rows]  # doctest: +SKIP
        [('T4', 64, '64 x 4 = 256'), ('V100 16GB', 69, '64 x 4 = 256')]
    """
    names = tuple(dict.fromkeys([models] if isinstance(models, str) else models))
    if not names:
        raise InvalidValue("models", models, "at least one model")
    for model in names:
        check_model_name(model)
    wanted, sharded = [instances] if isinstance(instances, str) else instances, options.get("strategy") is not None
    if gpus is None:
        gpus = () if wanted else USUAL_GPU
    lengths = [seq_lens] if isinstance(seq_lens, int) else seq_lens
    numbers = [num_gpus] if isinstance(num_gpus, int) else num_gpus or ()
    try:
        chosen = named_gpus([gpus] if isinstance(gpus, str) else gpus)
        counts = [parse_count(count, "gpus") for count in numbers]
        side_by_side = counts[0] if counts and not sharded else None
        cards = [card(find_gpu(gpu).name, count=side_by_side or 1) for gpu in chosen]
        for name in wanted:
            price = known_prices().get(find_instance(name).name)
            cards.append(replace(instance_card(name, count=side_by_side), price=price))
        spread = counts or ([one.count for one in cards] if wanted and sharded else [1])
        steps = [StepOptions.checked(gpus=count, **options) for count in dict.fromkeys(spread)]
        target, most = target_batch_size, max_batch_size
        request = SweepRequest(
            models=names,
            seq_lens=tuple(dict.fromkeys(parse_count(length, "seq_len") for length in lengths)),
            place=Place(SIMULATED, tuple({one.name: one for one in cards}.values())),
            options=steps[0],
            allocator=AllocatorSettings.from_environment(),
            target_batch_size=None if target is None else parse_count(target, "target_batch_size"),
            max_batch_size=None if most is None else parse_count(most, "max_batch_size"),
            headroom=parse_headroom(headroom),
            tolerance=0.0,
            cache=None if cache is False else Store(None if cache is True else cache),
            min_batch_size=parse_count(min_batch_size, "min_batch_size"),
            multiple_of=parse_count(multiple_of, "multiple_of"),
            exact=exact,
            mfu=None if mfu is None else parse_utilisation(mfu, "mfu"),
        )
        request = check_request(request, steps, bool(counts), recorder)
        for one in request.place.cards:
            request.reserve_bytes(one)
        if request.cache is not None:
            request.cache.check_writable()
        rows = []
        say = status or (lambda doing: None)
        with closing(find_rows(request, lambda doing, brief: say(doing))) as found:
            for each in found:
                if isinstance(each, BatchFinderError):
                    raise each
                rows.append(each)
    except InvalidValue as error:
        if error.option not in _ARGUMENTS or error.option in options:
            raise
        raise error.renamed(_ARGUMENTS[error.option]) from error
    return SweepResult(rows, request.conditions)


def find_rows(
    request: SweepRequest,
    status: Callable[[str, bool], object],
    expect: Callable[[list[tuple[str, str, int | None]]], object] = lambda cells: None,
    many_processes: bool = False,
) -> Generator[SweepRow | BatchFinderError, None, None]:
    """Find every cell, model after model: each row, or the error for which a model's others are not found.

    The next model is built while this one is at work; more would only fill the host's memory. A model that cannot be
    built, recorded or trained does not end the sweep.

    Args:
        status: is given a line on what is being done, and whether that is too brief a matter for a log.
        expect: is given (model, GPU, length) of every row to come in the order asked for, as far as it is known, and
            once more when that changes.
        many_processes: whether cells of many GPUs may be searched in processes of their own, which import the main
            module anew.

    Raises:
        CacheFailed: the cache cannot be read.
    """
    lengths: dict[str, tuple[int | None, ...]] = dict.fromkeys(request.models, request.seq_lens or DEFAULT_SEQ_LENS)
    simulations: dict[str, Simulation] = {}

    def tell() -> None:
        cards = [card.name for card in request.place.cards]
        expect([(model, card, length) for model in lengths for card in cards for length in lengths[model]])

    simulated = request.place.device == SIMULATED
    with ExitStack() as stack:
        pool = None
        many = many_processes and simulated and len(request.place.cards) >= CARDS_OF_A_POOL
        if many and (os.cpu_count() or 1) > 1:
            pool = search_pool()
            stack.callback(pool.shutdown, cancel_futures=True)
        for index, model in enumerate(request.models):
            tell()
            new = [each for each in request.models[index : index + 2] if each not in simulations]
            if new:
                status(f"building {' and '.join(new)}", False)
            for each in new:
                simulation = Simulation(request.options.workload(each), request.step, request.options.recorder)
                simulations[each] = stack.enter_context(simulation)
            try:
                facts = simulations[model].facts()
                lengths[model] = seq_lens_of(model, request.seq_lens, facts, DEFAULT_SEQ_LENS)
                tell()
                find = simulate_cells if simulated else measure_cells
                cells = ModelCells(model, simulations[model], lengths[model], request, pool)
                # Real steps take their time: each try is worth a line in a log.
                yield from find(cells, lambda doing: status(doing, simulated))
            except CacheFailed:
                raise
            except BatchFinderError as error:
                yield error
            simulations[model].close()
