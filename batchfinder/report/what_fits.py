"""What is said of options that train where those asked for do not: a table, or lines below another one."""

from __future__ import annotations

from batchfinder.devices import Card, without_bf16
from batchfinder.recording.what_fits import Fit, WhatFits
from batchfinder.report.table import Columns, Table, assumptions
from batchfinder.training.spec import is_cuda_build, recorder_in_words
from batchfinder.units import format_bytes

_ADAPTERS = "adapters alone"


def what_fits_table(found: WhatFits, card: Card, title: str, explain: bool = False) -> Table:
    """The options asked for, and those that train, from the mildest change on."""
    device = card.device
    has = f"{format_bytes(device.usable_bytes + device.context_bytes)}"
    has += (
        f", of which the CUDA context takes {format_bytes(device.context_bytes)}" if device.context_bytes else " usable"
    )
    recorder = recorder_in_words(found.recorder, found.recorder_version)
    tried = ", on which the micro-batches are tried" if is_cuda_build(found.recorder) else ""
    details = (", ".join(found.asked.words()), has, f"recorder: {recorder}{tried}")
    columns: Columns = {
        "change": [],
        "micro-batch x accumulation": [],
        "peak": [],
        "FLOPs": [],
        "what trains": [],
    }
    if not any(fit.change == "" for fit in found.fits):
        refused = "1 does not fit" if found.min_micro_batch == 1 else f"{found.min_micro_batch} do not fit"
        _add(columns, "as asked for", refused, found.sample_bytes, "", _trained(found.asked.lora is not None))
    for fit in found.fits:
        more = f"{fit.flops / found.flops - 1:+.0%}" if fit.change and found.flops else ""
        trained = _trained(fit.options.lora is not None)
        plan = fit.plan.beside_exact(found.min_micro_batch)
        _add(columns, fit.change or "as asked for", plan, fit.peak_bytes, more, trained, fit.predicted)
    notes = []
    if found.fits:
        least = found.fits[0]
        notes.append(
            f"the least change that trains is {least.change or 'none'}: micro-batch x accumulation {least.plan}"
        )
        notes.append(
            "peak: of such a micro-batch, with the CUDA context; FLOPs: of a sample, beside those as asked for"
        )
        if any(fit.predicted for fit in found.fits):
            notes.append("about: predicted by few of the model's layers, with a tenth of the GPU to spare")
        notes += [
            f"{fit.options.optimizer}: the same training, slower: each step waits for the CPU, and {_on_host(fit)}"
            for fit in found.fits
            if fit.host_bytes
        ][:1]
    else:
        samples = "one sample" if found.min_micro_batch == 1 else f"a micro-batch of {found.min_micro_batch}"
        notes.append(f"nothing that was tried trains {samples} on this GPU")
    notes += _elsewhere(found, card)
    notes.append(_counts(found))
    notes += [f"not tried: {words}" for words in found.missing]
    notes += without_bf16(found.asked.precision, [card.device])
    return Table(title, details, columns, (*notes, *assumptions(found.unmodelled, explain)))


def _add(
    columns: Columns, change: str, plan: str, peak_bytes: int, flops: str, trained: str, predicted: bool = False
) -> None:
    peak = f"{'about ' if predicted else ''}{format_bytes(peak_bytes)}"
    for heading, cell in zip(columns, (change, plan, peak, flops, trained), strict=True):
        columns[heading].append(cell)


def _trained(adapters: bool) -> str:
    return _ADAPTERS if adapters else "the model"


def _on_host(fit: Fit) -> str:
    return f"the optimizer takes {format_bytes(fit.host_bytes)} or more of the host's memory"


def _elsewhere(found: WhatFits, card: Card) -> list[str]:
    """Where else it trains as asked for."""
    words = []
    if found.several_gpus is not None:
        sharded = f"--strategy fsdp2 --gpus {found.several_gpus}"
        words.append(f"as asked for it trains on {found.several_gpus} of {card.name}, sharded: {sharded}")
    if found.larger_gpus:
        words.append(f"GPUs with the memory that it takes as asked for: {', '.join(found.larger_gpus)}")
    elif found.fits and found.fits[0].change == "":
        return words
    else:
        words.append(f"no GPU of the catalogue has the {format_bytes(found.sample_bytes)} that it takes as asked for")
    return words


def _counts(found: WhatFits) -> str:
    tried = f"{found.tried} combinations were tried, those that change least about training first"
    if not found.ruled_out:
        return tried
    return f"{tried}; {found.ruled_out} more do not fit by their weights, gradients and optimizer state alone"


def what_fits_lines(found: WhatFits, card: Card, command: str) -> list[str]:
    """The same in lines below a table: what to change first, where else it trains, and the command that shows more.

    Args:
        command: the options of `batchfinder plan`.
    """
    lines = [_line(fit) for fit in found.fits[:1]]
    return [*lines, *_elsewhere(found, card), f"batchfinder plan {command} shows what else would do"]


def _line(fit: Fit) -> str:
    adapters = ", which trains adapters alone" if fit.trains_adapters else ""
    plan = f": micro-batch x accumulation {fit.plan}" if fit.plan.target_batch_size > 1 else ""
    host = f"; {_on_host(fit)}" if fit.host_bytes else ""
    return f"trains with {fit.change or 'the options as they are'}{adapters}{plan}{host}"
