"""What trains where the options that were asked for do not: changes, from the mildest to the largest.

Changes are in the order of what they alter about training, and those alike in that of what they compute again:

    nothing      a fused attention, a chunked loss, checkpointing: the same gradients, but for rounding
    precision    mixed precision
    place        states in the host's memory: the same training, whose steps wait for the CPU
    optimizer    8-bit states
    weights      bf16 weights and states
    LoRA         adapters train, and the model does not
    QLoRA        the same beside weights of 4 bits

All of them accumulate gradients up to the target. What cannot fit by its weights, gradients and optimizer state alone
is not recorded. Of a deep model those with 1 and with 3 of its layers are: each layer adds as much in each stage of a
step, so that the two say about what the whole one takes. The answer was recorded whole, or tried on PyTorch's CUDA
build where that is there, and trains; its runners-up are predicted then, with some room to spare.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby, product
from typing import Any

from batchfinder.accumulation import AccumulationPlan, plan_accumulation
from batchfinder.devices import Card, smallest_gpus
from batchfinder.errors import BatchFinderError, InvalidValue, MissingExtra
from batchfinder.memory_use.breakdown import bytes_over_time
from batchfinder.recording.answers import TriedSizes, search_simulated
from batchfinder.recording.simulation import Simulation
from batchfinder.results import Measurement, Shape, Verdict
from batchfinder.simulator.alloc_conf import AllocatorSettings
from batchfinder.simulator.steady_state import SimulatedProbe
from batchfinder.simulator.trace import Trace
from batchfinder.training.spec import FAKE_DEVICE, OFFLOADED_OPTIMIZER, StepOptions

LORA_RANK = 16
KEEPABLE = ("precision", "optimizer", "loss", "checkpointing")
ADAPTERS = ("lora", "qlora")
COUNT = 3
"""How many are found: the mildest, and two runners-up."""
_CHECKPOINTING: tuple[bool | str, ...] = (False, "selective", True)
"""By what is computed again: no matrix products, and then all of those of the layers' forward."""

_CHANGED = {
    "16-mixed": 1, "bf16-mixed": 1, OFFLOADED_OPTIMIZER: 2, "adamw-8bit": 4, "bf16-true": 8, "lora": 16, "qlora": 32,
}  # fmt: skip
"""How much each choice changes about training: each is more than those before it together."""

_CHANGEABLE = (
    *("precision", "optimizer", "lora", "lora_targets", "quantization", "attention", "gradient_checkpointing", "loss"),
)
"""The options that may be changed, in the order in which they are typed."""

_STATE_BYTES = {"adamw-8bit": 2, OFFLOADED_OPTIMIZER: 0}
"""Of Adam's two states on the GPU, for each parameter that trains."""
_HOST_COPIES = 4
"""Of a parameter with its states in the host's memory: itself, its gradient and the two states."""
_SHARDED_OVER = (2, 4, 8)
_FEW_LAYERS, _DEEP = (1, 3), 20
"""Of which models a deep one is predicted, and from how many layers on a model is deep."""
_PREDICTED_WITHIN = 0.05
"""How far off a prediction by few layers may be, as a share, to be used."""
_SMALLER = 8
"""A micro-batch that does not train is made smaller by this part of it."""
_SPARED = 0.1
"""Of a card: what is left free with a micro-batch that is predicted and not recorded."""


@dataclass(frozen=True)
class Fit:
    """Options under which one sample trains.

    Attributes:
        change: what differs from the options asked for, as typed; empty where nothing does.
        options: with the change.
        plan: micro-batches about as large as fit, accumulated to the target.
        peak_bytes: the process's whole memory with such a micro-batch, the CUDA context included.
        predicted: whether that was predicted, and neither recorded nor tried.
        tried: whether PyTorch's CUDA build took its steps on the stub.
        flops: of a sample, in matrix products, convolutions and attention.
        trains_adapters: whether LoRA's adapters train in place of the model.
        host_bytes: what an optimizer takes of the host's memory at least; 0 for one that is on the GPU.
    """

    change: str
    options: StepOptions
    plan: AccumulationPlan
    peak_bytes: int
    flops: int
    trains_adapters: bool
    predicted: bool = False
    host_bytes: int = 0
    tried: bool = False


@dataclass(frozen=True)
class WhatFits:
    """Options under which a target batch trains on one card.

    Attributes:
        asked: the options asked for.
        sample_bytes: what the smallest micro-batch takes with them, in bytes, the CUDA context included.
        flops: of a sample with them.
        fits: from the mildest change on; empty where nothing trains.
        tried: how many combinations of options were recorded.
        ruled_out: how many were not, as their weights, gradients and optimizer state alone are too much.
        larger_gpus: names of the smallest cards with the memory that one sample takes as asked for; empty where it
            trains here.
        several_gpus: how many GPUs of this kind train it as asked for, sharded by FSDP2; None where 2, 4 and 8 do not,
            or were not tried.
        missing: what could not be tried, in words.
        unmodelled: what the figures leave out, in words.
        min_micro_batch: samples in the smallest micro-batch that may be taken.
        recorder: what the answer is by: the CUDA build where that has tried it.
        recorder_version: of the PyTorch that runs there.
    """

    asked: StepOptions
    sample_bytes: int
    flops: int
    fits: tuple[Fit, ...]
    tried: int
    ruled_out: int
    larger_gpus: tuple[str, ...] = ()
    several_gpus: int | None = None
    missing: tuple[str, ...] = ()
    unmodelled: tuple[str, ...] = ()
    min_micro_batch: int = 1
    recorder: str = FAKE_DEVICE
    recorder_version: str = ""

    def to_json(self) -> dict[str, Any]:
        """All of it as JSON values; sizes in bytes."""
        return {
            "sample_bytes": self.sample_bytes,
            "recorder": self.recorder,
            "recorder_version": self.recorder_version,
            "min_micro_batch": self.min_micro_batch,
            "flops": self.flops,
            "fits": [
                {
                    "change": fit.change,
                    **fit.options.to_json(),
                    "micro_batch_size": fit.plan.micro_batch_size,
                    "accumulation": fit.plan.accumulation,
                    "effective_batch_size": fit.plan.effective_batch_size,
                    "peak_bytes": fit.peak_bytes,
                    "flops": fit.flops,
                    "trains_adapters": fit.trains_adapters,
                    "predicted": fit.predicted,
                    "tried": fit.tried,
                    "host_bytes": fit.host_bytes,
                }
                for fit in self.fits
            ],
            "tried": self.tried,
            "ruled_out": self.ruled_out,
            "larger_gpus": list(self.larger_gpus),
            "several_gpus": self.several_gpus,
            "missing": list(self.missing),
            "unmodelled": list(self.unmodelled),
        }


def check_micro_batch(option: str, least: int, target: int, num_devices: int) -> None:
    """Check the smallest micro-batch that may be taken.

    Raises:
        InvalidValue: it is less than 1, or more than each device's share of the target.
    """
    share = -(-target // num_devices)
    if not 1 <= least <= share:
        raise InvalidValue(option, least, f"from 1 to {share}, a GPU's share of the target of {target}")


class FitSearch:
    """Looks for options under which a model trains on a card, by recordings of one sample.

    Args:
        model: as a user names it.
        asked: the options asked for.
        target: samples per optimizer step, on all GPUs together.
        simulation: of the options asked for, which need not be recorded yet.
        say: is given a line on what is being done.
        min_micro_batch: plans with smaller micro-batches are not taken.
        exact: whether plans have to meet the target, however small their micro-batches.
        tries: the same on PyTorch's CUDA build, which tries the micro-batches of what is found; None where it is not
            there.
    """

    def __init__(
        self,
        model: str,
        asked: StepOptions,
        card: Card,
        target: int,
        shape: Shape,
        simulation: Simulation,
        say: Callable[[str], object],
        *,
        min_micro_batch: int = 1,
        exact: bool = False,
        tries: Simulation | None = None,
    ) -> None:
        self.model, self.asked, self.card, self.target, self.shape = model, asked, card, target, shape
        self._simulation, self._say = simulation, say
        self.min_micro_batch, self.exact = min_micro_batch, exact
        self._tries = tries if asked.compile is None else None  # else each size would compile for as long as on a card
        self._tried: dict[StepOptions, TriedSizes] = {}
        self._allocator = AllocatorSettings.from_environment()
        layers = simulation.facts().layers
        self._layers = layers if layers >= _DEEP else 0  # of a deep model; 0 for one that is not
        self._refused: set[tuple[str, Any]] = set()
        self._failed: set[StepOptions] = set()
        self._simulations: dict[tuple[StepOptions, int | None], Simulation] = {}
        self._predicted: dict[tuple[StepOptions, int], int] = {}
        self._missing: dict[str, None] = {}
        self._held: dict[str, int] = {}  # at most by kind, with the options asked for

    def find(self, keep: Collection[str] = (), allow: Collection[str] = (), count: int = COUNT) -> WhatFits:
        """Of each kind of training that fits, the mildest change and the one that saves most, up to so many.

        Args:
            keep: of `KEEPABLE`: what is left as it was asked for.
            allow: of `ADAPTERS`: what may be among the runners-up; both are tried where nothing else trains.

        Raises:
            BatchFinderError: the options asked for cannot be recorded.
        """
        if self._simulation.facts().brings_optimizer:
            keep = {*keep, "optimizer"}
        asked = self.probe(self.asked)
        self._say("recording the options that were asked for")
        for probe in (asked, *self._few(self.asked)):
            probe.traces.ask(1, self.shape.seq_len)
        least = self.min_micro_batch
        trains = asked.steady_state(least, self.shape, exact=True).fits
        sample_bytes = asked.needed_bytes(least, self.shape) + self.card.device.context_bytes
        over_time = bytes_over_time(asked.trace(1, self.shape, exact=True))
        self._held = {kind: max(sizes) for kind, sizes in over_time.by_kind.items()}
        self._check_prediction(over_time.peak_bytes)
        candidates = self.candidates(keep)
        ruled_out = [options for options in candidates if not self._may_fit(options)]
        fits: list[Fit] = []
        sharded = None if trains else self._sharded()
        for _, group in groupby((one for one in candidates if one not in ruled_out), key=self._altered):
            members = list(group)
            adapters = self._adapters(members[0])
            if fits and (len(fits) >= count or fits[-1].plan.accumulation == 1 or (adapters and adapters not in allow)):
                continue  # there are enough, there is nothing to gain, or what trains is to stay
            for fit in self._of_group(members, count - len(fits), runners_up=bool(fits)):
                alike = [other for other in fits if self._adapters(other.options) == adapters]
                # What alters more has to be worth it.
                if all(fit.plan.micro_batch_size > other.plan.micro_batch_size for other in alike):
                    fits.append(fit)
        several = None
        if sharded is not None and all(fit.trains_adapters for fit in fits):
            self._say(f"recording {sharded.gpus} GPUs with --strategy fsdp2")
            usable = self.card.device.among_others(sharded.communicators).usable_bytes
            several = sharded.gpus if self.probe(sharded).needed_bytes(least, self.shape) <= usable else None
        answered = self._tries if self._tries is not None and any(fit.tried for fit in fits) else self._simulation
        return WhatFits(
            asked=self.asked,
            sample_bytes=sample_bytes,
            flops=self._flops(self.asked),
            fits=tuple(fits),
            tried=len({options for options, _ in self._simulations}),
            ruled_out=len(ruled_out),
            larger_gpus=() if trains else self._larger_gpus(sample_bytes),
            several_gpus=several,
            missing=tuple(self._missing),
            unmodelled=self._unmodelled(fits[0] if fits else None),
            min_micro_batch=least,
            recorder=answered.recorder,
            recorder_version=answered.facts().versions["torch"],
        )

    def _check_prediction(self, allocated: int) -> None:
        """Predict no more by few layers where that fails for the options asked for, or is wrong."""
        if self._layers:
            predicted = None
            with suppress(BatchFinderError, ValueError):  # code that counts on its layers, or has other stages then
                predicted = self._allocated(self.asked)
            if predicted is None or abs(predicted - allocated) > _PREDICTED_WITHIN * allocated:
                self._layers = 0
                self._predicted.clear()

    def candidates(self, keep: Collection[str] = ()) -> list[StepOptions]:
        """The options that may be used, the least change first, and of those the ones that compute least again."""
        asked, how = self.asked, self.asked.gradient_checkpointing
        bf16 = self.card.device.has_bf16
        precisions, optimizers, losses = [asked.precision], [asked.optimizer], [asked.loss]
        schemes: tuple[bool | str, ...] = (how,)
        attentions = ["eager", "sdpa"] if asked.attention == "eager" else [asked.attention]
        trained: list[dict[str, Any]] = [{}]
        if "precision" not in keep:
            precisions += ["bf16-mixed" if bf16 else "16-mixed"] if asked.precision == "fp32" else []
            precisions += ["bf16-true"] if bf16 and asked.precision != "bf16-true" else []
        if "optimizer" not in keep and asked.optimizer in ("adam", "adamw", "adamw-fused"):
            optimizers += [OFFLOADED_OPTIMIZER, "adamw-8bit"]
        if "loss" not in keep and asked.loss == "default":
            losses += ["chunked"]
        if "checkpointing" not in keep and how in _CHECKPOINTING:
            schemes = _CHECKPOINTING[_CHECKPOINTING.index(how) :]
        if asked.lora is None:
            trained += [{"lora": LORA_RANK, "lora_targets": "all-linear"}]
        if asked.quantization is None:
            trained += [{"lora": LORA_RANK, "lora_targets": "all-linear", "quantization": "nf4"}]
            trained[-1].update({} if asked.lora is None else {"lora": asked.lora, "lora_targets": asked.lora_targets})
        found = []
        for kind, precision, optimizer, scheme, loss, attention in product(
            trained, precisions, optimizers, schemes, losses, attentions
        ):
            if kind and (optimizer != asked.optimizer or (precision == "fp32" and len(precisions) > 1)):
                continue  # adapters have next to no optimizer state, and their frozen model is held in 16 bits
            quantized = asked.quantization or kind.get("quantization")
            if quantized and precision == "bf16-true" != asked.precision:
                continue  # the rest is in fp32 anyway, by peft's `prepare_model_for_kbit_training`
            one = replace(
                asked, precision=precision, optimizer=optimizer, gradient_checkpointing=scheme, loss=loss,
                attention=attention, **kind,
            )  # fmt: skip
            if one.refused_together() is None:
                found.append(one)
        return sorted(found, key=self._altered)  # stable: of those alike by checkpointing, then by loss

    def probe(self, options: StepOptions, layers: int | None = None) -> SimulatedProbe:
        """A probe of these options, with accumulation where the target is more than one sample on each GPU.

        Args:
            layers: how many the model has left; None for all.
        """
        if (options, layers) not in self._simulations:
            spec = options.workload(self.model)
            if layers is not None:
                spec = replace(spec, arguments={**spec.arguments, "layers": layers})
            how = options.step(self._micro_batches)
            self._simulations[options, layers] = self._simulation.with_spec(spec, how)
        device = self.card.device
        return self._simulations[options, layers].probe(device, [self.shape.seq_len], self._allocator)

    @property
    def _micro_batches(self) -> int:
        return 2 if self.target > self.card.count else 1

    def _unmodelled(self, fit: Fit | None) -> tuple[str, ...]:
        """What the answer leaves out, in words."""
        if fit is not None and fit.tried:
            return self._tried[fit.options].unmodelled
        return self.probe(self.asked if fit is None else fit.options).unmodelled

    def _altered(self, one: StepOptions) -> int:
        """How much options alter about the training that was asked for."""
        asked, adapters = self.asked, self._adapters(one)
        precision = _CHANGED[one.precision] if one.precision != asked.precision else 0
        optimizer = _CHANGED[one.optimizer] if one.optimizer != asked.optimizer else 0
        return precision + optimizer + (_CHANGED[adapters] if adapters else 0)

    def _adapters(self, one: StepOptions) -> str:
        """Which of `ADAPTERS` options add to what was asked for; empty for none."""
        if one.quantization != self.asked.quantization:
            return "qlora"
        return "lora" if one.lora != self.asked.lora else ""

    def _of_group(self, members: list[StepOptions], room: int, runners_up: bool) -> list[Fit]:
        """Of combinations that alter as much: the mildest that trains, and as a runner-up the one that saves most.

        The last, of all and of those with one kind of checkpointing, is taken to save most: where it does not fit, the
        others are not recorded.
        """
        saving = self._least(members)
        if saving is None or not self._may_train(saving):
            return []
        if self.min_micro_batch > 1 and self._planned(saving) is None:
            return []
        schemes = groupby(
            (one for one in members if not self._is_refused(one)), key=lambda one: one.gradient_checkpointing
        )
        alike = [list(each) for _, each in schemes]
        for probe in (probe for same in alike for probe in self._few(same[-1])):
            probe.traces.ask(1, self.shape.seq_len)
        for same in alike:
            least = self._least(same)
            if least is None or not self._may_train(least):
                continue
            for options in filter(self._may_train, same):
                change = changes_as_typed(self.asked, options)
                self._say(f"finding a micro-batch {f'with {change}' if change else 'as asked for'}")
                plan = self._planned(options, spared=_SPARED if runners_up else 0)
                if plan is None:
                    continue
                if not runners_up and self._tries is None:
                    self.probe(options).traces.ask(plan.micro_batch_size, self.shape.seq_len)
                second: Fit | None = None  # predicted while the first is recorded
                if options != saving and plan.accumulation > 1 and room > 1:
                    saved = self._planned(saving, spared=_SPARED)
                    second = None if saved is None else self._fit(saving, saved, whole=not self._layers)
                first = self._fit(options, plan, whole=not (runners_up and self._layers))
                if first is not None:
                    return [first] if second is None else [first, second]
        return []

    def _least(self, members: list[StepOptions]) -> StepOptions | None:
        """The last that the model does not refuse; None where it refuses all."""
        return next((one for one in reversed(members) if self._may_train(one) or not self._is_refused(one)), None)

    def _is_refused(self, options: StepOptions) -> bool:
        """Whether the model is known to refuse one of the options, or to fail with them."""
        return options in self._failed or any((name, getattr(options, name)) in self._refused for name in _CHANGEABLE)

    def _may_train(self, options: StepOptions) -> bool:
        """Whether what tensors hold with one sample leaves room for it; not where the model refuses the options.

        Raises:
            BatchFinderError: it cannot be recorded, or the options that were asked for are refused.
        """
        if self._is_refused(options):
            return False
        try:
            return self._allocated(options) <= self.card.device.usable_bytes
        except MissingExtra as error:
            self._missing[str(error)] = None
            name = "quantization" if options.quantization != self.asked.quantization else "lora"
        except InvalidValue as error:
            if error.option not in _CHANGEABLE or getattr(options, error.option) == getattr(self.asked, error.option):
                raise
            name = error.option
        except BatchFinderError:
            if options == self.asked:
                raise
            self._failed.add(options)
            return False
        self._refused.add((name, getattr(options, name)))
        return False

    def _allocated(self, options: StepOptions, batch_size: int = 1) -> int:
        """What tensors hold at most, in bytes; of a deep model about."""
        if (options, batch_size) not in self._predicted:
            self._say(f"trying {changes_as_typed(self.asked, options) or 'the options that were asked for'}")
            few, more = self._with_few_layers(options, batch_size)
            pairs = zip(few.most_held(), more.most_held(), strict=True)
            most = max(round(self._beyond(*pair)) for pair in pairs) if self._layers else max(more.most_held())
            self._predicted[options, batch_size] = most
        return self._predicted[options, batch_size]

    def _few(self, options: StepOptions) -> list[SimulatedProbe]:
        """Of a deep model the two that it is predicted by; the whole of another."""
        return [self.probe(options, count) for count in (_FEW_LAYERS if self._layers else (None,))]

    def _with_few_layers(self, options: StepOptions, batch_size: int) -> tuple[Trace, Trace]:
        """Of a deep model the two that it is predicted by; twice the whole of another."""
        for probe in self._few(options):
            probe.traces.ask(batch_size, self.shape.seq_len)
        traces = [probe.trace(batch_size, self.shape, exact=True) for probe in self._few(options)]
        return traces[0], traces[-1]

    def _beyond(self, few: int, more: int) -> float:
        """A figure of the whole model, of which each layer has as much, by those with few layers."""
        low, high = _FEW_LAYERS
        return few + (more - few) * (self._layers - low) / (high - low)

    def _accumulated(self, most: int) -> AccumulationPlan | None:
        """Micro-batches of at most so many samples; None where none that are large enough make the target up."""
        with suppress(InvalidValue):
            return plan_accumulation(
                self.target, most, self.card.count, min_batch_size=self.min_micro_batch, exact=self.exact
            )
        return None

    def _planned(self, options: StepOptions, spared: float = 0) -> AccumulationPlan | None:
        """As `_accumulated`, of those that fit; of a deep model about, with such a share of the card to spare."""
        share = -(-self.target // self.card.count)
        if not self._layers:
            most = search_simulated(self.probe(options), self.shape, share).max_batch_size
            return self._accumulated(max(1, most))
        first, second = self._allocated(options), self._allocated(options, 2)
        left = (1 - spared) * self.card.device.usable_bytes - first - self._beside_tensors(options)
        most = min(share, 1 + int(max(0, left) // max(1, second - first)))
        return self._accumulated(most)

    def _beside_tensors(self, options: StepOptions) -> int:
        """What the allocator reserves beside what tensors hold: it grows little with layers and samples."""
        few = self.probe(options, _FEW_LAYERS[-1])
        return few.needed_bytes(1, self.shape) - max(few.trace(1, self.shape, exact=True).most_held())

    def _fit(self, options: StepOptions, plan: AccumulationPlan, whole: bool) -> Fit | None:
        """A plan, with micro-batches that train: as large as it has, or smaller; None where not one sample does.

        Args:
            whole: whether to record the whole model with them; else they are taken to train.
        """
        context, tried = self.card.device.context_bytes, False
        if whole:
            while not (seen := self._taken(options, plan.micro_batch_size)).fits:
                size = plan.micro_batch_size
                smaller = None if size == 1 else self._accumulated(size - max(1, size // _SMALLER))
                if smaller is None:
                    return None
                plan = smaller
            peak, tried = seen.peak_reserved_bytes or 0, options in self._tried
        else:
            first, second = self._allocated(options), self._allocated(options, 2)
            peak = first + (plan.micro_batch_size - 1) * (second - first) + self._beside_tensors(options)
            if peak > (1 - _SPARED) * self.card.device.usable_bytes:
                return None
        return Fit(
            change=changes_as_typed(self.asked, options),
            options=options,
            plan=plan,
            peak_bytes=peak + context,
            flops=self._flops(options),
            trains_adapters=bool(self._adapters(options)),
            predicted=not whole,
            host_bytes=_HOST_COPIES * self._gradients(options) if options.optimizer == OFFLOADED_OPTIMIZER else 0,
            tried=tried,
        )

    def _taken(self, options: StepOptions, size: int) -> Measurement:
        """What such a micro-batch takes: tried where the CUDA build is there and takes the step, else recorded."""
        if self._tries is not None:
            if options not in self._tried:
                spec, how = options.workload(self.model), options.step(self._micro_batches)
                simulation = self._tries.with_spec(spec, how)
                self._tried[options] = simulation.tried_sizes(self.card.device, self._allocator)
            try:
                return self._tried[options](size, self.shape)
            except BatchFinderError:  # as offloaded states, which would compute on this machine's CPU
                del self._tried[options]
        steady = self.probe(options).steady_state(size, self.shape, exact=True)
        timeline = steady.timeline
        verdict = Verdict.FITS if steady.fits else Verdict.OUT_OF_MEMORY
        return Measurement(verdict, timeline.max_allocated_bytes, timeline.max_reserved_bytes)

    def _may_fit(self, options: StepOptions) -> bool:
        """Whether weights, gradients and optimizer state alone leave room, by those of the options asked for.

        Adam's states are of the weights' type, and of 8 bits each in `adamw-8bit`. All three are there as it steps.
        """
        asked = self.asked
        if options == asked or asked.quantization is not None or options.quantization is not None:
            return True
        narrower = _width(options) / _width(asked)
        held = self._held.get("parameters", 0) * narrower
        if options.lora == asked.lora and asked.mode == "train" and not asked.optimizer_in_backward:
            held += self._gradients(options)
            if options.optimizer == asked.optimizer:
                held += self._held.get("optimizer", 0) * min(1, narrower)
            else:
                held += self._held.get("gradients", 0) / _width(asked) * _STATE_BYTES[options.optimizer]
        return held <= self.card.device.usable_bytes

    def _gradients(self, options: StepOptions) -> int:
        """Of the model whole, in bytes, by those of the options asked for."""
        return self._held.get("gradients", 0) * _width(options) // _width(self.asked)

    def _flops(self, options: StepOptions) -> int:
        """Of a sample. PyTorch's chunked loss multiplies as often as one in one piece, which is what counts them."""
        few, more = self._with_few_layers(replace(options, loss="default"), 1)
        return round(self._beyond(few.flops, more.flops)) if self._layers else more.flops

    def _larger_gpus(self, sample_bytes: int) -> tuple[str, ...]:
        device, bf16 = self.card.device, self.asked.precision.startswith("bf16")
        found = smallest_gpus(
            sample_bytes - device.context_bytes,
            bf16=bf16,
            oldest=device.compute_capability,  # on an older one other kernels run
            communicators=self.asked.communicators,
        )
        return tuple(gpu.name for gpu in found)

    def _sharded(self) -> StepOptions | None:
        """The options asked for on the fewest GPUs of this kind that may train one sample each, sharded by FSDP2."""
        if self.asked.strategy is not None or self.card.count > 1:
            return None
        states = sum(self._held.get(kind, 0) for kind in ("parameters", "gradients", "optimizer"))
        for gpus in _SHARDED_OVER:
            options = replace(self.asked, gpus=gpus, strategy="fsdp2")
            usable = self.card.device.among_others(options.communicators).usable_bytes
            if options.refused_together() is not None or states / gpus > usable:
                continue
            with suppress(BatchFinderError):  # not every model can be sharded here
                if self._allocated(options) <= usable:
                    self.probe(options).traces.ask(1, self.shape.seq_len)
                    return options
        return None


def _width(options: StepOptions) -> int:
    """Of a parameter that trains, in bytes."""
    return 2 if options.precision == "bf16-true" else 4


def changes_as_typed(asked: StepOptions, options: StepOptions) -> str:
    """The options that differ from those asked for, as they are typed."""
    changed = {name: getattr(options, name) for name in _CHANGEABLE if getattr(asked, name) != getattr(options, name)}
    return " ".join(
        f"--{name.replace('_', '-')} {'full' if value is True else value}" for name, value in changed.items()
    )
