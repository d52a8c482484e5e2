"""The options under which a target batch trains on a GPU that change least: `plan`, and the same in Python."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Unpack

from batchfinder.devices import Card, device_for, find_gpu
from batchfinder.models.catalog import check_model_name
from batchfinder.recording.simulation import Simulation
from batchfinder.recording.what_fits import ADAPTERS, KEEPABLE, FitSearch, WhatFits, check_micro_batch
from batchfinder.results import Shape
from batchfinder.sizing.recorder import take_with_recorder
from batchfinder.training.spec import AUTO, StepOptions, StepWords, is_cuda_build, seq_lens_of
from batchfinder.training.synonyms import one_of


def what_fits(
    model: str,
    *,
    gpu: str = "A100 80GB",
    seq_len: int | None = None,
    target_batch_size: int = 8,
    keep: Collection[str] = (),
    allow: Collection[str] = (),
    num_devices: int = 1,
    min_micro_batch: int = 1,
    exact: bool = False,
    recorder: str = AUTO,
    **options: Unpack[StepWords],
) -> WhatFits:
    """Options under which a model trains on a GPU, from the mildest change on: `batchfinder plan` in Python.

    Args:
        model: the name of one, as `batchfinder plan` takes it.
        gpu: a name of `batchfinder.devices`.
        seq_len: tokens per sample, or pixels of an image's side; None for the model's usual one.
        target_batch_size: samples per optimizer step, on all devices together.
        keep: what is left as it was asked for: `precision`, `optimizer`, `loss`, `checkpointing`.
        allow: `lora`, `qlora`: adapters that may be runners-up; they are tried in any case where nothing else trains.
        num_devices: how many train side by side, each with a copy of the model.
        min_micro_batch: samples; plans with smaller micro-batches are not taken.
        exact: whether plans have to meet the target, however small their micro-batches.
        recorder: what says that the answer trains: `cuda-build` for PyTorch's own CUDA code without a GPU, which tries
            it (`batchfinder stub install` brings it), or `fake-device`; by default the first where it is here.
        options: those of the step to start from, by their names in Python, as for `estimate`.

    Raises:
        InvalidValue: an argument cannot be used.
        UnknownName: no such GPU or model.
        CudaStubUnavailable: the CUDA build is asked for, and cannot be had here.
        BatchFinderError: the options asked for cannot be recorded.

    Example:
        >>> found = what_fits("llama-3.1-8b", gpu="RTX 4090", seq_len=2048, target_batch_size=16)  # doctest: +SKIP
        >>> [str(fit.plan) for fit in found.fits]  # doctest: +SKIP
        ['1 x 16 = 16', '2 x 8 = 16']
    """
    check_model_name(model)
    for name, values, known in (("keep", keep, KEEPABLE), ("allow", allow, ADAPTERS)):
        for value in values:
            one_of(name, value, known)
    check_micro_batch("min_micro_batch", min_micro_batch, target_batch_size, num_devices)
    asked = StepOptions.checked(**options)
    device = device_for(find_gpu(gpu)).among_others(asked.communicators)
    one = Card(device, device.name, num_devices)
    search = PlanSearch(model, asked, one, target_batch_size, seq_len, min_micro_batch, exact, keep, allow, recorder)
    return search.find(lambda doing: None)[1]


@dataclass(frozen=True)
class PlanSearch:
    """What a plan is asked for.

    Attributes:
        model: as a user names it.
        asked: the options to start from.
        card: and how many of it train side by side.
        target: samples per optimizer step, on all of them together.
        seq_len: of a sample; None for the model's usual one.
        min_micro_batch: plans with smaller micro-batches are not taken.
        exact: whether plans have to meet the target, however small their micro-batches.
        keep: of `KEEPABLE`: what is left as it was asked for.
        allow: of `ADAPTERS`: what may be among the runners-up.
        recorder: one of `RECORDERS`, or `auto`.
    """

    model: str
    asked: StepOptions
    card: Card
    target: int
    seq_len: int | None = None
    min_micro_batch: int = 1
    exact: bool = False
    keep: Collection[str] = ()
    allow: Collection[str] = ()
    recorder: str = AUTO

    def find(self, say: Callable[[str], object]) -> tuple[int | None, WhatFits]:
        """Look for it; `say` is given a line on what is being done.

        Returns:
            The length of a sample, and what fits.

        Raises:
            BatchFinderError: the options asked for cannot be recorded.
        """
        cards = [self.card]
        (length, found), instead = take_with_recorder(self.recorder, self.asked, cards, lambda by: self._find(say, by))
        return length, replace(found, unmodelled=(*found.unmodelled, instead)) if instead else found

    def _find(self, say: Callable[[str], object], recorder: str) -> tuple[int | None, WhatFits]:
        with Simulation(self.asked.workload(self.model), self.asked.step(), recorder) as opened:
            say(f"building {self.model}")
            (length,) = seq_lens_of(self.model, () if self.seq_len is None else (self.seq_len,), opened.facts())
            tries = opened if is_cuda_build(recorder) else None
            search = FitSearch(
                self.model, self.asked, self.card, self.target, Shape(length), opened.on_fake_device(), say,
                min_micro_batch=self.min_micro_batch, exact=self.exact, tries=tries,
            )  # fmt: skip
            return length, search.find(self.keep, self.allow)
