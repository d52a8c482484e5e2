"""What of a Trainer can be served, and what to do instead of what cannot."""

from __future__ import annotations

from typing import Any

from batchfinder.errors import InvalidValue, MissingExtra


def check_trainer(trainer: Any) -> None:
    """Refuse what cannot be served.

    Args:
        trainer: what was given for one.

    Raises:
        MissingExtra: accelerate is not there.
        InvalidValue: says what is in the way and what would do.
    """
    try:
        import accelerate  # noqa: F401
    except ImportError:
        raise MissingExtra("accelerate", "huggingface", "tune_trainer") from None
    from transformers import Trainer

    if not isinstance(trainer, Trainer):
        raise InvalidValue("trainer", type(trainer).__name__, "a transformers.Trainer, or a class derived from it")
    if trainer.train_dataset is None:
        raise InvalidValue("train_dataset", None, "the data that trainer.train() will read, to make batches of")
    _check_alone(trainer)
    args = trainer.args
    if args.auto_find_batch_size:
        raise InvalidValue(
            "auto_find_batch_size", True, "False, since it would change the size again, and the effective batch with it"
        )
    if str(getattr(args, "train_sampling_strategy", "")).endswith("batch_rebalance"):
        raise InvalidValue(
            "train_sampling_strategy",
            "batch_rebalance",
            "'random', 'sequential' or 'group_by_length', whose micro-batches have the same number of samples each",
        )


def _check_alone(trainer: Any) -> None:
    args = trainer.args
    alone = "find the size on one device, and set per_device_train_batch_size and gradient_accumulation_steps by hand"
    if args.world_size > 1:
        raise InvalidValue(
            "processes that train together",
            args.world_size,
            f"one, since the others wait for ever when it runs out of memory; {alone}",
        )
    if args.n_gpu > 1:
        raise InvalidValue(
            "GPUs of one process", args.n_gpu, "one, such as CUDA_VISIBLE_DEVICES=0 leaves; DataParallel is not served"
        )
    sharded = {
        "DeepSpeed": trainer.is_deepspeed_enabled,
        "FSDP": trainer.is_fsdp_enabled or getattr(trainer, "is_fsdp_xla_enabled", False),
        "a model on several devices": trainer.is_model_parallel,
    }
    for name, enabled in sharded.items():
        if enabled:
            raise InvalidValue("the trainer's parallelism", name, f"a model that is whole on one device; {alone}")
