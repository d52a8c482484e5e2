"""The evaluations of a Trainer as it trains: a few of their batches, and what they keep on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from batchfinder.errors import shortened
from batchfinder.huggingface.step import TrainerBatches
from batchfinder.measure.oom import classify
from batchfinder.training.spec import PEAK_STEPS
from batchfinder.units import format_bytes

if TYPE_CHECKING:
    from transformers import Trainer


class TrainerEvaluation:
    """The evaluations of a training: two batches of each, for a try, and what one keeps on the device until it ends.

    Outputs are kept for `compute_metrics` alone, in whose place nothing is computed. To add those of a batch, all are
    copied, unless `eval_do_concat_batches` is off.

    Source: `Trainer.evaluation_loop` and `EvalLoopContainer` in transformers 5.23.

    Attributes:
        sample_bytes: the outputs of one of the longest samples; None before it was predicted, 0 where none are kept.
        raised: what an evaluation raised that is not about memory, on a line; empty for nothing. It is for the training
            to raise.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._batches: dict[str | None, TrainerBatches] = {}
        self.sample_bytes: int | None = None
        self.raised = ""

    def __call__(self) -> None:
        """Evaluate two of the largest batches of each evaluation, where none has raised anything but about memory."""
        trainer, args, computes = self._trainer, self._trainer.args, self._trainer.compute_metrics
        if self.raised:
            return
        from transformers import Seq2SeqTrainingArguments

        try:
            self._measure()
            if computes is not None:
                trainer.compute_metrics = lambda *_, **__: {}
            if isinstance(args, Seq2SeqTrainingArguments):  # as the trainer's `evaluate` does
                generation = {"max_length": args.generation_max_length, "num_beams": args.generation_num_beams}
                vars(trainer)["_gen_kwargs"] = generation
            for name, samples in _evaluations(trainer).items():
                size = min(args.eval_batch_size, samples or args.eval_batch_size)
                made: Any = [self._of(name)(size, None) for _ in range(PEAK_STEPS)]
                loss_only = True if computes is None else None
                trainer.evaluation_loop(made, "Evaluation", prediction_loss_only=loss_only)
        except Exception as error:
            if classify(error, device=args.device.type) is not None:
                raise
            self.raised = shortened(f"{type(error).__name__}: {error}".splitlines()[0])
        finally:
            trainer.compute_metrics = computes

    def _of(self, name: str | None) -> TrainerBatches:
        if name not in self._batches:
            self._batches[name] = TrainerBatches(self._trainer.get_eval_dataloader(name), None)
        return self._batches[name]

    def _measure(self) -> None:
        """Predict one sample, where outputs are kept and that was not done yet."""
        trainer, args = self._trainer, self._trainer.args
        if self.sample_bytes is not None:
            return
        self.sample_bytes = 0
        moved = args.prediction_loss_only or args.batch_eval_metrics or args.eval_accumulation_steps is not None
        if trainer.compute_metrics is None or moved:
            return
        trainer.model_wrapped.eval()
        sample = self._of(_largest_evaluation(trainer)[0])(1, None)
        _, logits, labels = trainer.prediction_step(trainer.model_wrapped, sample, prediction_loss_only=False)
        if logits is not None and trainer.preprocess_logits_for_metrics is not None:
            logits = trainer.preprocess_logits_for_metrics(logits, labels)  # type: ignore[arg-type]
        kept = [leaf for leaf in pytree.tree_leaves((logits, labels)) if isinstance(leaf, torch.Tensor)]
        self.sample_bytes = sum(tensor.nbytes for tensor in kept if tensor.device == args.device)

    def warning(self, free_bytes: int) -> str:
        """What to say where they take more than is free beside what training holds; else empty."""
        if not self.sample_bytes:
            return ""
        args, samples = self._trainer.args, _largest_evaluation(self._trainer)[1]
        copies = 2 if args.eval_do_concat_batches else 1
        kept = self.sample_bytes * samples
        if copies * kept <= free_bytes:
            return ""
        batch_bytes = copies * self.sample_bytes * args.eval_batch_size * args.world_size
        every = max(1, free_bytes // (2 * batch_bytes))
        return (
            f"An evaluation of {samples} samples keeps up to {format_bytes(kept)} of outputs on the GPU until it ends"
            f"{', and copies them with each batch' if copies == 2 else ''}; {format_bytes(free_bytes)} are free beside "
            f"the model and the optimizer. Pass TrainingArguments(eval_accumulation_steps={every}) to move them to the "
            f"host every {every} batches, or Trainer(preprocess_logits_for_metrics=) to keep less."
        )


def _evaluations(trainer: Trainer) -> dict[str | None, int | None]:
    """How many samples each evaluation has, by its name where there are several; None where nothing tells."""
    from transformers.trainer_utils import has_length

    data: Any = trainer.eval_dataset
    named = data if isinstance(data, dict) else {None: data}
    return {name: len(each) if has_length(each) else None for name, each in named.items()}


def _largest_evaluation(trainer: Trainer) -> tuple[str | None, int]:
    """The evaluation data with the most samples, by their name where there are several, and how many these are."""
    return max(((name, samples or 0) for name, samples in _evaluations(trainer).items()), key=lambda one: one[1])
