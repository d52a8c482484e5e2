"""From what was given for `--model`, a name, an id, a config.json or `package.module:factory`, to a workload."""

from __future__ import annotations

import copy
import importlib
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from batchfinder.errors import BatchFinderError, InvalidValue, UnknownName, UserCodeFailed, without_middle
from batchfinder.models.catalog import TIMM, find_model
from batchfinder.models.hub import config_from_hub
from batchfinder.models.lightning_module import TrainingStep, has_training_step, workload_from_training_step
from batchfinder.models.synthetic_batches import TextBatches
from batchfinder.training.child_process import search_working_folder
from batchfinder.training.spec import ATTENTION_NAMES, CHECKPOINTING_NAMES, LOSS_NAMES
from batchfinder.training.step import PRECISIONS, Workload

_FACTORY = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
_FILE = re.compile(r".*\.py:[^\W\d]\w*(\.[^\W\d]\w*)*", re.DOTALL)
_EVERY = re.compile(r"every-([1-9]\d{0,3})")
_aten = torch.ops.aten
_KEPT_BY_SELECTIVE = (
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten.convolution.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
)
_OURS = str(Path(__file__).parents[1]) + os.sep
_EXPECTED = (
    "a factory that returns a Workload, an nn.Module that takes input_ids, "
    "or a LightningModule with make_batch(batch_size, seq_len)"
)


@contextmanager
def allow_fake_weights() -> Iterator[None]:
    """Let code that fills and converts weights run on fake tensors; nothing changes for real ones.

    Of the functions in torch.nn.init truncated normal alone looks at the values it has drawn (torch 2.13,
    `_no_grad_trunc_normal_`: `if not mask.any()`), which fake tensors cannot answer. Vision transformers use it.
    `module.to(memory_format=...)` swaps parameters, which is refused while the fake mode's own memo refers to them.
    A fake tensor cannot become one of another class, as bitsandbytes' parameters are made: it becomes a plain one.
    """
    mode = active_fake_mode()
    if mode is None:
        yield
        return
    memo = mode.fake_tensor_converter.meta_converter.tensor_memo
    drawn, swap = getattr(nn.init, "_no_grad_trunc_normal_", None), torch.utils.swap_tensors
    make_subclass = torch.Tensor._make_subclass

    def forget_and_swap(first: torch.Tensor, second: torch.Tensor) -> None:
        memo.clear()
        swap(first, second)  # type: ignore[no-untyped-call]

    def make_parameter(kind: Any, data: torch.Tensor, require_grad: bool = False, *args: Any, **kwargs: Any) -> Any:
        if isinstance(data, FakeTensor):
            return nn.Parameter(data, require_grad)
        return make_subclass(kind, data, require_grad, *args, **kwargs)

    torch.utils.swap_tensors = forget_and_swap
    torch.Tensor._make_subclass = staticmethod(make_parameter)  # type: ignore[method-assign, assignment]
    if drawn is not None:
        nn.init._no_grad_trunc_normal_ = lambda tensor, *_, **__: tensor
    try:
        yield
    finally:
        torch.utils.swap_tensors = swap
        torch.Tensor._make_subclass = make_subclass  # type: ignore[method-assign]
        if drawn is not None:
            nn.init._no_grad_trunc_normal_ = drawn


def build_workload(
    spec: Any,
    *,
    attention: str | None = None,
    gradient_checkpointing: bool | str = False,
    compile: str | None = None,
    loss: str = "default",
    packed: bool = False,
    lora: int | None = None,
    lora_targets: str | None = None,
    quantization: str | None = None,
    precision: str = "fp32",
    layers: int | None = None,
) -> Workload:
    """Build the model that a name, a path or a factory stands for.

    Inside a `FakeTensorMode` the model is made of fake tensors and takes no memory. No random generator of the user's
    moves while a named model or a config is built.

    Args:
        spec: a name that `find_model` knows, `timm/NAME` of timm's models, an `owner/name` or `owner/name@revision` of
            the Hugging Face Hub, a path to a config.json or to its folder, or `package.module:factory`. A path that
            exists wins over a name, where it is written with a path separator. Of the Hub the config.json alone is
            read: from the local cache, else it is downloaded. Or a config of transformers itself, which is copied.
        attention: `eager`, `sdpa`, `flash` (to be taken by the flash kernel of PyTorch's
            scaled_dot_product_attention), or None for the model's default.
        gradient_checkpointing: whether activations inside the model's layers are computed again in the backward, and
            which; see `enable_checkpointing`.
        compile: `model` for `torch.compile` of the model (of a LightningModule's training step), `layers` for each of
            its layers; None to leave it as it is.
        loss: how a causal model computes its loss, one of `LOSS_NAMES`.
        packed: whether samples stand one after the other in one row, without padding.
        lora: the rank of peft's adapters, which then are all that trains; None without them.
        lora_targets: the layers that get one, separated by commas, or `all-linear`; None for peft's own choice.
        quantization: one of `QUANTIZATION_NAMES`, for weights that do not train; None to leave them.
        precision: one of `PRECISION_NAMES`, which decides on the types of the frozen weights.
        layers: how many are left of the model's longest stack of layers; None for all.

    Raises:
        MissingExtra: an option needs a package that is not installed.
        UnknownName: no such model.
        HubFailed: the config.json of a model on the Hub cannot be had.
        InvalidValue: the config, the factory or an option cannot be used with this model.
        UserCodeFailed: the user's code raised.
    """
    if attention is not None and attention not in ATTENTION_NAMES:
        raise InvalidValue("attention", attention, f"one of {', '.join(ATTENTION_NAMES)}")
    if loss not in LOSS_NAMES:
        raise InvalidValue("loss", loss, f"one of {', '.join(LOSS_NAMES)}")
    from_factory = isinstance(spec, str) and is_factory(spec)
    if from_factory:
        workload = workload_from_factory(spec)
    elif not isinstance(spec, str):
        from batchfinder.models.pretrained import workload_from_config

        config, spec = copy.deepcopy(spec), type(spec).__name__
        workload = workload_from_config(config, attention, spec)
    else:
        from batchfinder.models.pretrained import workload_from_path, workload_from_row

        # Unlike Path's, these take a name that is too long, a loop of links, a zero byte and the home of nobody.
        path = Path(os.path.expanduser(spec))
        exists = os.path.exists(path)
        if spec.endswith(".py"):
            raise InvalidValue("model", spec, f"{spec}:NAME, with the name of what makes the model in that file")
        is_file = spec.endswith(".json")
        from_timm = spec.startswith(TIMM) and not exists
        try:
            row = None if from_timm or ((os.sep in spec or is_file) and exists) else find_model(spec)
        except UnknownName:
            if not exists and (is_file or spec.startswith((".", "~", os.sep))):
                raise InvalidValue("model", spec, "a config.json or a folder that exists") from None
            if not exists:
                fetched = config_from_hub(spec)
                if fetched is None:
                    raise
                path = fetched
            row = None
        if from_timm:
            from batchfinder.models.timm import workload_from_timm

            workload = workload_from_timm(spec, attention)
        elif row is not None:
            workload = workload_from_row(row, attention)
        else:
            workload = workload_from_path(path, attention, None if exists else spec)
    model: Any = workload.model
    if layers is not None and (stack := longest_stack(model)) is not None:
        del stack[layers:]
    if from_factory and attention is not None:
        if not hasattr(model, "set_attn_implementation"):
            expected = f"no --attention: {spec} chooses the attention of its model itself"
            raise InvalidValue("attention", attention, expected)
        from batchfinder.models.pretrained import attention_of

        model.set_attn_implementation(attention_of(type(model), attention, spec))
    if packed:
        from batchfinder.models.pretrained import pack

        workload = pack(workload, attention, spec)
    if loss != "default":
        from batchfinder.models.pretrained import replace_loss

        replace_loss(model, loss, spec)
    if gradient_checkpointing:
        enable_checkpointing(model, gradient_checkpointing, spec)
    if lora is not None or quantization is not None:
        if from_factory:
            option, value = ("lora", lora) if lora is not None else ("quantization", quantization)
            expected = f"no --{option}: {spec} makes its model, with adapters or quantized weights, itself"
            raise InvalidValue(option, value, expected)
        from batchfinder.models.pretrained import add_lora

        chosen = PRECISIONS[precision]
        compute = chosen.weights or chosen.autocast or torch.float32
        with allow_fake_weights():
            workload = add_lora(workload, spec, lora or 0, lora_targets, quantization, chosen.weights, compute)
    if compile is not None:
        workload = compile_workload(workload, compile, spec)
    return workload


def layer_stacks(model: nn.Module) -> list[nn.ModuleList]:
    """Each `nn.ModuleList` of modules of one class, also one inside of another."""
    lists = (module for module in model.modules() if isinstance(module, nn.ModuleList))
    return [stack for stack in lists if len({type(layer) for layer in stack}) == 1]


def longest_stack(model: nn.Module) -> nn.ModuleList | None:
    """The longest `nn.ModuleList` of layers that is not inside another one; None for a model without."""
    stacks = layer_stacks(model)
    inner = {id(part) for stack in stacks for layer in stack for part in layer.modules()}
    return max((stack for stack in stacks if id(stack) not in inner), key=len, default=None)


def compile_workload(workload: Workload, what: str, spec: str) -> Workload:
    """Have torch.compile compile a model, or its layers, when they are first called; returns the workload to use.

    Layers are the modules of each `nn.ModuleList` of modules of one class, as in `compile_regions` of
    https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/utils/other.py.

    Raises:
        InvalidValue: there are no such layers.
    """

    def compiled(module: nn.Module) -> nn.Module:
        # Of PyTorch's own modules `compile()` compiles nothing: Dynamo skips the frames of torch.nn (torch 2.13).
        if type(module).__module__.startswith("torch.nn."):
            wrapped: Any = torch.compile(module)
            return wrapped  # type: ignore[no-any-return]
        module.compile()
        return module

    if what == "model":
        if not isinstance(workload.model, TrainingStep):
            return replace(workload, model=compiled(workload.model))
        step: Any = workload.model.module  # Lightning compiles a module's steps, not the module
        step.training_step = torch.compile(step.training_step)
        return workload
    lists = layer_stacks(workload.model)
    inner = {part for layers in lists for layer in layers for part in layer.modules() if part is not layer}
    for layers in lists:
        for index, layer in enumerate(layers):
            if layer not in inner:
                layers[index] = compiled(layer)
    if not lists:
        expected = f"model; {spec} has no list of layers of one class"
        raise InvalidValue("compile", what, expected)
    return workload


def enable_checkpointing(model: Any, how: bool | str, spec: str) -> None:
    """Let a model compute activations again in the backward.

    Args:
        how: True or `full` for every layer of a transformers model, `every-K` for each K-th, `selective` for all of
            them but what matrix products and attention return, which is kept.
        spec: what the user calls the model.

    Raises:
        InvalidValue: the model, or the release of the library that it is from, cannot.
    """
    # `gradient_checkpointing_enable` is deprecated in transformers 5.23; older releases have nothing else.
    enable = getattr(model, "activation_checkpointing_enable", None) or getattr(
        model, "gradient_checkpointing_enable", None
    )
    name = type(model).__name__
    if not callable(enable):
        expected = f"no --gradient-checkpointing: {spec} enables it in its model ({name}) itself"
        raise InvalidValue("gradient_checkpointing", how, expected)
    if not getattr(model, "supports_gradient_checkpointing", True):
        expected = f"a model that supports it, which {spec} ({name}) does not"
        raise InvalidValue("gradient_checkpointing", how, expected)
    if how is True or how == "full":
        enable()
    elif not inspect.signature(enable).parameters:
        raise InvalidValue("gradient_checkpointing", how, f"full: {spec} has no other")
    elif how == "selective":
        contexts = partial(create_selective_checkpoint_contexts, list(_KEPT_BY_SELECTIVE))
        enable({"use_reentrant": False, "context_fn": contexts})
    elif (every := _EVERY.fullmatch(str(how))) is not None:
        if "every_n_layers" not in inspect.signature(enable).parameters:
            raise InvalidValue("gradient_checkpointing", how, f"full or selective, with this transformers and {name}")
        enable(every_n_layers=int(every[1]))
    else:
        raise InvalidValue("gradient_checkpointing", how, f"one of {', '.join(CHECKPOINTING_NAMES)}")


def is_factory(spec: str) -> bool:
    """Whether this is written `package.module:factory`, or `folder/file.py:factory`."""
    return _FACTORY.fullmatch(spec) is not None or _FILE.fullmatch(spec) is not None


def workload_from_factory(spec: str) -> Workload:
    """Import and call a factory.

    The current directory, or that of the file, is put on the module search path and stays there, since the user's code
    may import from it later.

    Args:
        spec: `package.module:factory`, or `folder/file.py:factory`.

    Raises:
        InvalidValue: there is no such module or attribute, or what it returned cannot be trained.
        UserCodeFailed: importing or calling it raised.
    """
    module_name, _, attribute = spec.rpartition(":")
    search_working_folder()
    if _FILE.fullmatch(spec):
        file = os.path.expanduser(module_name)
        if not os.path.isfile(file):
            raise InvalidValue("model", spec, f"a Python file that exists; there is no {module_name}")
        folder, name = os.path.split(os.path.realpath(file))
        sys.path.insert(0, folder)
        module_name = name.removesuffix(".py")

    def load() -> Any:
        try:
            return importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            # Only the module itself, or a package it is in: a dependency that is missing is the user's error.
            if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
                raise
            where = f"in {os.getcwd()} or on the Python path"
            raise InvalidValue("model", spec, f"a module that exists; there is no {error.name} {where}") from None

    factory = run_user_code(f"importing {module_name}", load)
    for part in attribute.split("."):
        if not hasattr(factory, part):
            raise InvalidValue("model", spec, f"a factory that exists; {module_name} has no {attribute}")
        factory = getattr(factory, part)
    if not callable(factory):
        raise InvalidValue("model", spec, f"a factory that can be called; it is of type {type(factory).__name__}")
    with allow_fake_weights():
        return workload_from_object(run_user_code(spec, factory), spec)


def workload_from_object(made: Any, spec: str) -> Workload:
    """Make a workload of what a factory returned.

    Raises:
        InvalidValue: it is no Workload, transformers model, module with a training step or module that takes token ids.
        UserCodeFailed: its `configure_optimizers` raised.
    """
    if isinstance(made, Workload):
        return made
    if not isinstance(made, nn.Module):
        returned = f"something of type {type(made).__module__}.{type(made).__qualname__}".replace("builtins.", "")
        if made is None:
            returned = "None (is its return statement missing?)"
        elif isinstance(made, type):
            returned = f"the class {made.__name__} itself"
        raise InvalidValue("model", spec, f"{_EXPECTED}; it returned {returned}")
    make_batch = getattr(made, "make_batch", None)
    if has_training_step(made):
        if not callable(make_batch):
            raise InvalidValue("model", spec, f"{_EXPECTED}; its {type(made).__name__} has no make_batch")
        return workload_from_training_step(made, spec, run_user_code)
    if callable(make_batch):
        return Workload(made, make_batch)
    # A transformers model cannot exist unless the user's code has imported the library already.
    transformers: Any = sys.modules.get("transformers.modeling_utils")
    if transformers is not None and isinstance(made, transformers.PreTrainedModel):
        from batchfinder.models.pretrained import workload_from_model

        return workload_from_model(made, spec)
    config = getattr(made, "config", None)
    vocab_size = config.get("vocab_size") if isinstance(config, dict) else getattr(config, "vocab_size", None)
    if not isinstance(vocab_size, int):
        vocab_size = next((m.num_embeddings for m in made.modules() if isinstance(m, nn.Embedding)), None)
    if vocab_size is None:
        expected = "a module with config.vocab_size or an nn.Embedding, to draw input_ids from, or a Workload"
        raise InvalidValue("model", spec, f"{expected}; {type(made).__name__} has neither")
    named = "input_ids" in inspect.signature(made.forward).parameters
    return Workload(made, TextBatches(vocab_size, keyword="input_ids" if named else None))


def run_user_code(what: str, function: Callable[..., Any], *args: Any) -> Any:
    """Call code of the user's.

    Raises:
        UserCodeFailed: it raised, with the traceback from its first frame on; an error of ours passes unchanged.
    """
    try:
        return function(*args)
    except BatchFinderError:
        raise
    except (Exception, SystemExit) as error:
        # A SystemExit here would end the command without a word. The traceback starts in the user's code.
        frame = error.__traceback__
        while frame is not None:
            file = frame.tb_frame.f_code.co_filename
            if not file.startswith((_OURS, "<frozen importlib")) and file != importlib.__file__:
                break
            frame = frame.tb_next
        text = "".join(traceback.TracebackException(type(error), error, frame).format())
        raise UserCodeFailed(what, without_middle(text)) from None
