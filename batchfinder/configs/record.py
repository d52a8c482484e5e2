"""What a config file says about the memory of a training, each thing with the key that says it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from batchfinder.errors import InvalidValue
from batchfinder.models.catalog import find_model
from batchfinder.training.spec import ATTENTION_NAMES, OPTIMIZER_NAMES
from batchfinder.training.synonyms import one_of

_SWITCHES = ("packed", "optimizer_in_backward")
"""Options of ours without a value."""


@dataclass(frozen=True)
class Setting:
    """The value of one of our options.

    Attributes:
        value: as it is typed; True for an option without a value.
        key: that says it, dotted; empty where it is the tool's default.
    """

    value: str | bool
    key: str = ""


@dataclass(frozen=True)
class Size:
    """A number that has a place in the file.

    Attributes:
        key: its place, dotted; empty where the format has none.
        value: the file's, or the tool's default; None where neither is known.
        stated: whether it is in the file, as a number.
    """

    key: str = ""
    value: int | None = None
    stated: bool = False


@dataclass
class TrainingConfig:
    """A config file as our options.

    Attributes:
        tool: whose format it is.
        values: the file's, as nested mappings.
        options: by our options' names in Python.
        micro_batch: samples in the forward of one GPU.
        accumulation: micro-batches per optimizer step.
        effective: samples per optimizer step on all GPUs, where the format has a key for them.
        gpus: how many train together; None where the file does not say.
        left_out: by a key of the file: what it would change, and is not simulated.
        notes: what was assumed, in words.
    """

    tool: str
    values: Mapping[str, Any]
    options: dict[str, Setting] = field(default_factory=dict)
    micro_batch: Size = Size()
    accumulation: Size = Size()
    effective: Size = Size()
    gpus: int | None = None
    left_out: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def get(self, *keys: str) -> Any:
        """The first value that one of some dotted keys has; None where none has one."""
        for key in keys:
            value: Any = self.values
            for part in key.split("."):
                value = value.get(part) if isinstance(value, Mapping) else None
            if value is not None:
                return value
        return None

    def key_of(self, *keys: str) -> str:
        """The first of some keys that has a value; else the first."""
        return next((key for key in keys if self.get(key) is not None), keys[0])

    def stated(self, key: str) -> str:
        """The key where it has a value; empty where the tool's default holds."""
        return "" if self.get(key) is None else key

    def set(self, option: str, value: object, key: str = "") -> None:
        """An option's value, said by a key, or the tool's default; None says nothing."""
        if value is not None:
            self.options[option] = Setting(value is True if option in _SWITCHES else str(value), key)

    def size(self, key: str, default: int | None = None) -> Size:
        """The number under a key, or a default."""
        value = self.get(key)
        stated = isinstance(value, int) and not isinstance(value, bool) and value > 0
        return Size(key, value if stated else default, stated)

    def seq_len(self, *keys: str, default: int | None = None) -> None:
        """The sequence length, of the first key that has it."""
        key = self.key_of(*keys)
        size = self.size(key, default)
        if size.value is not None:
            self.set("seq_len", size.value, key if size.stated else "")

    def leave_out(self, reasons: Mapping[str, str]) -> None:
        """Name those of some keys that are switched on, with what each would change."""
        for key, reason in reasons.items():
            value = self.get(key)
            if value not in (None, False, 0, 1, "", "none", "None", [], {}) or value is True:
                self.left_out[key] = reason

    def model(self, *names: tuple[str, str]) -> None:
        """The first model that the catalogue has of some names, each with its key."""
        for key, name in names:
            try:
                self.set("model", find_model(name).name, key)
            except LookupError:
                continue
            return

    def optimizer(self, name: str, key: str = "", ours: Mapping[str, str] | None = None) -> None:
        """The optimizer, by another tool's name for it.

        Args:
            ours: names of ours for those of the tool's that are not the same and take as much memory.
        """
        near = (ours or {}).get(name)
        try:
            self.set("optimizer", near or one_of("optimizer", name, OPTIMIZER_NAMES), key)
        except InvalidValue:
            self.left_out[key] = f"the optimizer {name} is not known here, and adamw is taken: --optimizer"
            return
        if near is not None:
            self.notes.append(f"{name} is taken for {near}, which takes about as much memory")

    def attention(self, name: str, key: str) -> None:
        """How attention is computed, by another tool's name for it."""
        try:
            self.set("attention", one_of("attention", name, ATTENTION_NAMES), key)
        except InvalidValue:
            self.left_out[key] = f"the attention {name} is not known here, and the model's own is taken: --attention"

    def lora(self, rank: object, rank_key: str, targets: object, targets_key: str) -> None:
        """Adapters, and the layers that get one: a list of names, or what stands for them."""
        self.set("lora", rank, rank_key)
        if targets:
            named = ",".join(map(str, targets)) if isinstance(targets, list | tuple) else str(targets)
            self.set("lora_targets", named, targets_key)

    def precision(self, autocast: str | None, half_weights: bool, key: str) -> None:
        """The precision of a Trainer's step, once adapters and quantization are known.

        Args:
            autocast: `bf16`, `fp16` or None.
            half_weights: whether the model is loaded in 16 bits.
            key: that says so.
        """
        if half_weights and "quantization" not in self.options:
            # Frozen or not, the weights are in 16 bits; peft makes adapters in fp32 all the same.
            if autocast == "fp16":
                self.notes.append("fp16 weights take the memory of bf16 ones: bf16-true stands for them")
            self.set("precision", "bf16-true", key)
        else:
            self.set("precision", {"bf16": "bf16-mixed", "fp16": "16-mixed", None: "fp32"}[autocast], key)

    def zero(self, stage: object, key: str) -> None:
        """The strategy that stands for a stage of DeepSpeed's ZeRO."""
        ours = {"1": "zero1", "2": "zero2", "3": "fsdp2"}.get(str(stage))
        if ours is not None:
            self.set("strategy", ours, key)
            if ours != "zero2":
                stands = "FSDP2" if ours == "fsdp2" else "PyTorch's ZeroRedundancyOptimizer"
                self.notes.append(f"ZeRO stage {stage} of DeepSpeed is simulated as {stands}")
