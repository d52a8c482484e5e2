"""Workloads of transformers models, with random weights: the package's only importer of transformers."""

from __future__ import annotations

import inspect
import json
import logging
import re
import stat
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch._guards import active_fake_mode
from torch.utils import _pytree as pytree
from transformers.modeling_outputs import CausalLMOutput

from batchfinder.errors import BatchFinderError, InvalidValue, MissingExtra
from batchfinder.models.build import allow_fake_weights
from batchfinder.models.catalog import Label, Media, ModelRow, families
from batchfinder.models.hub import DENOISER_CONFIGS, MAX_CONFIG_BYTES
from batchfinder.models.quantization import QUANTIZATIONS, Linear4bit, Linear8bit, needs_stand_ins
from batchfinder.models.synthetic_batches import (
    ImageBatches,
    MediaBatches,
    PackedBatches,
    TextBatches,
    product,
)
from batchfinder.training.step import Workload

# How our names for attention are spelt in transformers, and the attribute of a model class that says it has it. Flash
# attention is reached through PyTorch's scaled_dot_product_attention: transformers' own needs a package that is not on
# every machine, and what is simulated must not depend on the machine.
ATTENTION = {
    "eager": ("eager", ""),
    "sdpa": ("sdpa", "_supports_sdpa"),
    "flash": ("sdpa", "_supports_flash_attn"),
}

PACKED_ATTENTION = "batchfinder_packed"
"""The name that `packed_attention` is registered by in transformers."""

# What configs call a factor of the logits, or a bound that they are pressed under.
_LOGIT_SCALES = ("final_logit_softcapping", "logit_scale", "output_multiplier", "lm_head_multiplier", "logits_scaling")

# A config.json may come from anywhere. The largest that were published have some 200 layers.
_DEPTH = 100
_MOST_ITEMS = 100_000
_MOST = ((re.compile("layers|depth|blocks|experts|stages"), 20_000), (re.compile("num_labels"), 1_000_000))
_IMPLEMENTATION = re.compile("_?implementation(_internal)?$")
_NAMES_OF_CODE = frozenset({"auto_map", "trust_remote_code", "custom_pipelines"})


def workload_from_row(row: ModelRow, attention: str | None) -> Workload:
    """Build a named model.

    Raises:
        InvalidValue: the model does not have this attention.
        MissingExtra: it is of diffusers, which is not installed.
    """
    if row.library == "diffusers":
        return _denoiser({"_class_name": row.architecture, **row.config}, attention, row.name)
    model_class = getattr(transformers, row.architecture)
    return _build(model_class, model_class.config_class.from_dict(dict(row.config)), attention, row.name)


def workload_from_path(path: Path, attention: str | None, what: str | None = None) -> Workload:
    """Build the model that a config.json describes, with the head it names or else the usual one for its type.

    Args:
        path: to the file or its folder, or to that of a pipeline of diffusers, whose denoiser is taken.
        attention: as in `build_workload`.
        what: the model as the user named it; None for the path.

    Raises:
        InvalidValue: no config can be read there, or the model does not have this attention.
    """
    inside = [path / part for part in ("config.json", *DENOISER_CONFIGS)]
    file = next((each for each in inside if each.exists()), inside[0]) if path.is_dir() else path
    named = what or str(file)
    figures = _read_figures(file, named)
    if isinstance(figures, dict) and isinstance(figures.get("_class_name"), str):
        return _denoiser(figures, attention, named)
    model_type = figures.get("model_type") if isinstance(figures, dict) else None
    if not isinstance(model_type, str) or model_type not in transformers.CONFIG_MAPPING:
        version = f"transformers {transformers.__version__}"
        raise InvalidValue("model", named, f"a config.json whose model_type {version} supports, not {model_type!r}")
    with _figures_refused(named):
        # Published configs of models that transformers has by now still name the code that they came with.
        config = transformers.CONFIG_MAPPING[model_type].from_dict(
            {name: value for name, value in figures.items() if name not in _NAMES_OF_CODE}
        )
        return workload_from_config(config, attention, named)


def _denoiser(figures: dict[str, Any], attention: str | None, what: str) -> Workload:
    if attention == "eager":
        raise InvalidValue("attention", attention, f"sdpa, flash or none, which diffusers has for {what}")
    from batchfinder.models.diffusers import workload_from_figures

    return workload_from_figures(figures, what)


def workload_from_config(config: Any, attention: str | None, what: str) -> Workload:
    """Build the model of a transformers config, with the head it names or else the usual one for its type.

    Raises:
        InvalidValue: there is no such head, it takes no such figures, or the model does not have this attention.
    """
    with _figures_refused(what):
        # The head that the figures name, where its batches are known, else the usual one for the type.
        asked = config.architectures or []
        named = (each for each in asked if families().labels(each) is not None)
        architecture = next((each for each in named if hasattr(transformers, each)), None)
        if architecture is None:
            from transformers.models.auto import modeling_auto as auto

            kinds: list[Any] = [auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES]
            if config.model_type in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES:  # an encoder
                kinds.append(auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES)
            kinds += [auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES]
            if getattr(config, "is_encoder_decoder", False):
                kinds = [auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES]
            kinds += [
                auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
                auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
                auto.MODEL_FOR_CTC_MAPPING_NAMES,
                auto.MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES,
            ]
            architecture = next((kind[config.model_type] for kind in kinds if config.model_type in kind), None)
        if architecture is None:
            expected = (
                "a model of text, of images to classify, of images with text, or of speech; for others give a "
                "package.module:factory"
            )
            raise InvalidValue("model", config.model_type, expected)
        workload = _build(getattr(transformers, architecture), config, attention, what)
        if asked and architecture not in asked:
            said = f"{architecture} in place of {', '.join(map(str, asked))}, whose batches and loss are not known"
            workload = replace(workload, assumptions=(*workload.assumptions, said))
        return workload


@contextmanager
def _figures_refused(what: str) -> Iterator[None]:
    """The library validates figures with exceptions of every kind."""
    try:
        yield
    except BatchFinderError:
        raise
    except Exception as error:
        said = " ".join(str(error).split()) or type(error).__name__
        raise InvalidValue("model", what, f"figures that transformers accepts ({said})") from error


def _read_figures(file: Path, what: str) -> Any:
    """Read a config.json, which may come from anywhere, within bounds; messages call it `what`.

    Raises:
        InvalidValue: it is no such file, or holds what would load code or what nothing could build.
    """
    try:
        if not stat.S_ISREG(file.stat().st_mode):  # else a pipe would be waited for, and a device read for ever
            raise InvalidValue("model", what, "a config.json that is a file")
        with file.open("rb") as stream:
            text = stream.read(MAX_CONFIG_BYTES + 1)
        if len(text) > MAX_CONFIG_BYTES:
            raise InvalidValue("model", what, f"a config.json of at most {MAX_CONFIG_BYTES >> 20} MiB")
        figures = json.loads(text.decode(), object_hook=_number)
    except OSError as error:
        raise InvalidValue("model", what, f"a readable config.json ({error.strerror})") from error
    except RecursionError as error:
        raise InvalidValue("model", what, f"a config.json nested at most {_DEPTH} deep") from error
    except ValueError as error:
        raise InvalidValue("model", what, f"a config.json that is valid JSON ({error})") from error

    pending = [("", figures, 0)]
    while pending:
        name, value, depth = pending.pop()
        if depth > _DEPTH:
            raise InvalidValue("model", what, f"a config.json nested at most {_DEPTH} deep")
        if isinstance(value, dict):
            # What `{"_attn_implementation": {"text_config": ...}}` holds belongs to the outer name.
            inner = name if _IMPLEMENTATION.search(name) else ""
            pending += [(inner or key, each, depth + 1) for key, each in value.items()]
        elif isinstance(value, list):
            if len(value) > _MOST_ITEMS:
                expected = f"a config.json whose lists have at most {_MOST_ITEMS:,} items; {name} has {len(value):,}"
                raise InvalidValue("model", what, expected)
            pending += [(name, each, depth + 1) for each in value]
        elif isinstance(value, str) and "/" in value and _IMPLEMENTATION.search(name):
            expected = (
                f"a config.json that loads no code; its {name} is {value!r}, a kernel on the hub. Leave that out, and "
                "choose with --attention"
            )
            raise InvalidValue("model", what, expected)
        elif isinstance(value, int):
            most = next((most for pattern, most in _MOST if pattern.search(name)), None)
            if most is not None and value > most:
                expected = f"figures that can be built; {name} is {value}, and may be at most {most}"
                raise InvalidValue("model", what, expected)
    return figures


def _number(mapping: dict[str, Any]) -> Any:
    """`{"__float__": "Infinity"}`, which transformers writes since JSON has no infinite numbers."""
    return float(mapping["__float__"]) if set(mapping) == {"__float__"} else mapping


def workload_from_model(model: nn.Module, what: str) -> Workload:
    """Wrap a transformers model that exists already, with the batches its head takes.

    Raises:
        InvalidValue: what its head takes is not known here.
    """
    labels = families().labels(type(model).__name__)
    config: Any = model.config
    inputs = getattr(model, "main_input_name", "")
    arguments = inspect.signature(model.forward).parameters
    make_batch: Callable[[int, int | None], Any]
    media = families().media_of(config.model_type, arguments)
    if media is not None and any(
        getattr(config, f"{word}_config", config) is None for word in ("vision", "audio") if word in media.config
    ):
        media = None  # a model that could have an encoder for images, and has none
    image_only = media is not None and media.arguments == {"pixel_values"} and "input_ids" not in arguments
    if labels is not None and media is not None and not image_only:
        return _media_workload(model, media, labels, arguments)
    if labels is not None and inputs in ("input_ids", "inputs") and "input_ids" in arguments:
        text = _text_batches(config, labels, "input_ids", "attention_mask" in arguments)
        return Workload(model, text, max_seq_len=text.max_seq_len)
    if labels is not None and inputs == "pixel_values":
        num_labels = config.num_labels
        config = _parts(config, ("vision",))[0]
        interpolates = "interpolate_pos_encoding" in arguments
        patch = getattr(config, "patch_size", 1)
        patch = patch if interpolates and isinstance(patch, int) else 1
        side = getattr(config, "image_size", 224)
        make_batch = ImageBatches(
            num_labels=num_labels,
            channels=getattr(config, "num_channels", 3),
            side=side if isinstance(side, int) else max(side),
            smallest_side=max(patch, families().smallest_side.get(config.model_type, 1)),
            multiple=patch,
            # A table of positions is what ties a model to one side; a CNN has an image_size too, but only as a note.
            resizable=interpolates or not (hasattr(config, "image_size") and hasattr(config, "num_attention_heads")),
            interpolate=interpolates,
        )
        return Workload(model, make_batch, seq_len_unit="pixels")
    name = type(model).__name__
    expected = f"a model whose batches are known; for {name} give a factory that returns a Workload with make_batch"
    raise InvalidValue("model", what, expected)


def _text_batches(config: Any, labels: tuple[Label, ...], keyword: str, attention_mask: bool) -> TextBatches:
    """Batches of token ids, or with an empty keyword of labels alone, which the decoder reads."""
    decoder = {} if keyword else {"decoder": True}
    text = config.get_text_config(**decoder)
    positions = next((value for name in families().positions if (value := getattr(text, name, None)) is not None), None)
    longest = None
    if text.model_type not in families().unlimited and isinstance(positions, int) and positions >= 1:
        before_first = text.pad_token_id + 1 if text.model_type in families().after_padding else 0
        longest = positions - int(before_first)

    def bound(label: Label) -> int | str:
        if isinstance(label.below, int) or label.below == "seq_len":
            return label.below
        number: int = getattr(text if hasattr(text, label.below) else config, label.below)
        return number

    return TextBatches(
        vocab_size=getattr(text, "vocab_size", 1),  # a model of recordings may have none
        labels=tuple(replace(label, below=bound(label)) for label in labels),
        attention_mask=attention_mask,
        keyword=keyword,
        max_seq_len=longest,
    )


def _media_workload(model: Any, media: Media, labels: tuple[Label, ...], arguments: Collection[str]) -> Workload:
    """A model that reads an image or a recording with each sample, of the size that its config says."""
    config = model.config
    parts = _parts(config, media.config)

    def size(names: tuple[str, ...], usual: int) -> int:
        for part in parts:
            for name in names:
                found = getattr(part, name, None)
                if isinstance(found, (list, tuple)) and found and isinstance(found[0], int):
                    found = max(found)
                if isinstance(found, int) and found > 0:
                    return found
        return usual

    sizes = {name: size(names, usual) for name, (names, usual) in families().sizes.items()}
    sizes |= {name: value for name, value in media.sizes.items() if isinstance(value, int)}
    sizes["cells"] = sizes["side"] // sizes["patch"] // sizes["merge"]
    sizes["grid"] = sizes["cells"] * sizes["merge"]
    sizes["pooled"] = sizes["positions"] // 2
    sizes["flat"] = 2 + sizes["channels"] * sizes["patch"] ** 2  # a patch behind its row and column
    sizes["streams"] = 1 + sizes["codebooks"]  # of text, and of speech
    sizes |= {name: product(value, sizes) for name, value in media.sizes.items() if isinstance(value, str)}
    keyword = "input_ids" if "input_ids" in arguments and media.text else ""
    text = _text_batches(config, tuple(each for each in labels if each.name in arguments), keyword, bool(keyword))
    kinds = families().token_kinds
    batches = MediaBatches(media.tensors, sizes, frozenset(arguments), text, token_kinds=kinds, length=media.length)
    makers = (getattr(each, media.features or " ", None) for each in (model.base_model, model))
    features = next((maker for maker in makers if maker is not None), None)
    if media.placeholders or callable(features):
        names = (name for name in families().placeholder_tokens if isinstance(getattr(config, name, None), int))
        count = _vectors(features, batches) if callable(features) else product(media.placeholders, sizes)
        token = next((getattr(config, name) for name in names), None)
        batches = replace(batches, placeholder=token, placeholders=count)
    what = media.what.format(**sizes, tokens=batches.placeholders)
    longest = None if media.length else text.max_seq_len
    unit = media.length or "tokens"
    return Workload(model, batches, max_seq_len=longest, seq_len_unit=unit, assumptions=(what,))


def _parts(config: Any, words: tuple[str, ...]) -> list[Any]:
    """The parts of a config whose names hold one of these words, those inside first, and then the whole."""
    inner = [(name, part) for name, part in vars(config).items() if hasattr(part, "to_dict")]
    named = [part for name, part in inner if any(word in name for word in words)]
    return [*(each for part in named for each in _parts(part, words)), *_below(inner, words), config]


def _below(inner: list[tuple[str, Any]], words: tuple[str, ...]) -> list[Any]:
    others = [part for name, part in inner if not any(word in name for word in words)]
    return [each for part in others for each in _parts(part, words)[:-1]]


def _vectors(features: Callable[..., Any], batches: MediaBatches) -> int:
    """How many vectors a model makes of one sample's image or recording."""
    takes = inspect.signature(features).parameters
    one = batches.media(1, 1)
    given = one if "args" in takes else {name: one[name] for name in takes if name in one}
    with torch.no_grad():
        made = features(**given)
    # Where layers of the text get vectors of their own, each of them gets as many.
    deep = getattr(made, "deepstack_features", None)
    outputs = (getattr(made, "pooler_output", None), getattr(made, "last_hidden_state", made), deep and deep[0])
    vectors = pytree.tree_leaves(next((each for each in outputs if each is not None), made))
    return sum(vector.numel() // vector.size(-1) for vector in vectors if isinstance(vector, torch.Tensor))


_CAUSAL = ("ForCausalLM", "LMHeadModel")
"""How the class of a causal language model is named in transformers; GPT-2's and some as old have the latter."""


def pack(workload: Workload, attention: str | None, what: str) -> Workload:
    """The workload with its samples packed into one row without padding, and attention that knows where they end.

    Raises:
        InvalidValue: the model is none that this can be done to.
    """
    model: Any = workload.model
    name, batches = type(model).__name__, workload.make_batch
    takes = getattr(model, "_supports_flash_attn", False) and getattr(model.config, "num_attention_heads", 0)
    if not name.endswith(_CAUSAL) or not takes or not isinstance(batches, TextBatches):
        expected = f"no --packed: {what} ({name}) is no causal language model that takes packed samples"
        raise InvalidValue("packed", True, expected)
    if attention not in (None, "flash"):
        raise InvalidValue("attention", attention, "flash, or none, with --packed: other kernels would see all samples")
    transformers.AttentionInterface.register(PACKED_ATTENTION, packed_attention)
    model.set_attn_implementation(PACKED_ATTENTION)
    return replace(workload, make_batch=PackedBatches(batches.vocab_size, batches.max_seq_len))


def packed_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **told: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each sample of a packed row, by PyTorch's variable-length flash kernel.

    It allocates what the flash-attn package's kernel does, which transformers would call: the output and, for each
    token and head, one number in fp32.

    Args:
        query: (1, heads, tokens, head size); of keys and values alike, whose heads may be fewer.
        told: `cu_seq_lens_q` and `max_length_q`: where samples end, (samples + 1,), and the longest sample's length.

    Returns:
        (1, tokens, heads, head size), and None for the weights.
    """
    from torch.nn.attention.varlen import varlen_attn

    # As `_flash_attention_forward` of transformers: norms and rotations may have left fp32 under autocast.
    dtype = query.dtype
    if dtype is torch.float32 and torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
    query, key, value = (tensor.transpose(1, 2).flatten(0, 1).to(dtype) for tensor in (query, key, value))
    ends, longest = told["cu_seq_lens_q"], told["max_length_q"]
    window = (-1 if sliding_window is None or sliding_window > longest else sliding_window - 1, 0)
    attended = varlen_attn(
        query, key, value, ends, ends, longest, longest, scale=scaling, window_size=window, enable_gqa=True
    )
    return attended.unsqueeze(0), None  # type: ignore[union-attr]


def attention_of(model_class: Any, attention: str, what: str) -> str:
    """What transformers calls an attention of ours, for a model of one of its classes.

    Raises:
        InvalidValue: the model does not have this attention.
    """
    has = [ours for ours, (_, flag) in ATTENTION.items() if not flag or getattr(model_class, flag, False)]
    if attention not in has:
        raise InvalidValue("attention", attention, f"{' or '.join(has)}, which {what} supports")
    return ATTENTION[attention][0]


def replace_loss(model: nn.Module, loss: str, what: str) -> None:
    """Let a causal model of transformers compute its loss without all of its logits at one time, in place.

    `chunked`: PyTorch's own `linear_cross_entropy` with its default options, which computes the gradients of the head
    in the forward, chunk by chunk (https://github.com/pytorch/pytorch/blob/v2.13.0/torch/nn/functional.py).
    `liger`: all of Liger's kernels for the model, as `TrainingArguments(use_liger_kernel=True)` applies them.
    `trl`: what TRL's SFTTrainer has done since 1.16 without being asked: the head in tiles, computed again in the
    backward (https://github.com/huggingface/trl/blob/v1.16.0/trl/kernels/chunked_logprob.py).

    Raises:
        InvalidValue: the model is none that this can be done to.
        MissingExtra: a package is missing.
    """
    name, head = type(model).__name__, getattr(model, "get_output_embeddings", lambda: None)()
    if not isinstance(model, transformers.PreTrainedModel) or not name.endswith(_CAUSAL) or head is None:
        raise InvalidValue("loss", loss, f"default: {what} ({name}) is no causal language model of transformers")
    config: Any = model.config.get_text_config()
    if loss == "liger":
        try:
            from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN as SUPPORTED
        except ImportError as error:
            missing = "triton" if (error.name or "").startswith("triton") else "liger-kernel"
            raise MissingExtra(missing, "liger", "the loss liger") from error
        if model.config.model_type not in SUPPORTED:
            raise InvalidValue("loss", loss, f"default: Liger has no kernels for {what} ({model.config.model_type})")
        from transformers.integrations.liger import apply_liger_kernel

        apply_liger_kernel(model, None)  # type: ignore[no-untyped-call]
        return
    if loss == "trl":
        try:
            from trl.trainer.utils import add_fused_lm_head
        except ImportError as error:
            raise MissingExtra("trl", "trl", "the loss trl", "" if error.name == "trl" else str(error)) from error
        # What SFTTrainer asks for besides the loss.
        add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
        model.forward = partial(model.forward, fused_lm_head=True)
        return
    if not hasattr(nn, "LinearCrossEntropyOptions"):
        raise InvalidValue(
            "loss", loss, f"default or liger: chunked needs PyTorch 2.13, and this is {torch.__version__}"
        )
    scaled = [name for name in _LOGIT_SCALES if getattr(config, name, None) not in (None, 1, 1.0)]
    if scaled:
        expected = f"default, liger or trl: the logits of {what} are not those of its head alone ({', '.join(scaled)})"
        raise InvalidValue("loss", loss, expected)

    def forward(labels: torch.Tensor, **inputs: Any) -> CausalLMOutput:
        hidden = model.base_model(**inputs).last_hidden_state.flatten(0, -2)
        weight, bias = head.weight, getattr(head, "bias", None)
        # The operator has no rule for autocast: the head's product is in the type that a Linear's would be.
        if torch.is_autocast_enabled(hidden.device.type):
            dtype = torch.get_autocast_dtype(hidden.device.type)
            hidden, weight, bias = (each if each is None else each.to(dtype) for each in (hidden, weight, bias))
        following = nn.functional.pad(labels, (0, 1), value=-100)[..., 1:].flatten()
        options = nn.LinearCrossEntropyOptions()
        return CausalLMOutput(
            loss=nn.functional.linear_cross_entropy(hidden, weight, following, linear_bias=bias, options=options)
        )

    model.forward = forward


def _build(model_class: Any, config: Any, attention: str | None, what: str) -> Workload:
    pending, drops_layers = [config], False
    while pending:  # text models inside others have one of their own
        each = pending.pop()
        pending += [part for part in vars(each).values() if hasattr(part, "to_dict")]
        if hasattr(each, "use_cache"):
            each.use_cache = False
        for name in [name for name, value in vars(each).items() if "layerdrop" in name and value]:
            # Each step would leave out other layers, and the answer be that of a lucky one.
            setattr(each, name, 0.0)
            drops_layers = True
    if attention is not None:
        config._attn_implementation = attention_of(model_class, attention, what)
    window = vars(config).get("sliding_window")  # reading the attribute fails where each layer has one of its own
    if attention == "flash" and isinstance(window, int):
        # At a length of exactly the window, which hides nothing yet, transformers 5.23 makes a mask
        # (`_ignore_causal_mask_sdpa`: `kv_length >= local_attention_size`), with which there is no flash kernel.
        config.sliding_window = window + 1
    if model_class.__name__.endswith("ForSequenceClassification") and config.pad_token_id is None:
        config.pad_token_id = 0  # decoders find the last token by it, and refuse more than one sample without
    # Without log lines, without moving the random generators, and without code or files of the hub, which transformers
    # falls back to where a package is missing.
    from huggingface_hub import constants
    from transformers.initialization import no_init_weights
    from transformers.integrations import hub_kernels

    def refuse(kernel: str, *_: Any, **__: Any) -> Any:
        raise ImportError(f"the kernel {kernel} is on the hub, which is not asked for code")

    with ExitStack() as stack:
        stack.callback(transformers.logging.set_verbosity, transformers.logging.get_verbosity())
        transformers.logging.set_verbosity(logging.ERROR)
        for module, name, value in ((constants, "HF_HUB_OFFLINE", True), (hub_kernels, "get_kernel", refuse)):
            stack.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, value)
        if active_fake_mode() is not None:
            # Fake tensors have no values to initialise; ViT's initialisation even reads one back, which they cannot.
            stack.enter_context(no_init_weights())
        else:
            stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(allow_fake_weights())
        model = model_class(config)
        # Where initialisation was skipped, so was the tying of embeddings that is done with it.
        model.tie_weights()
    if getattr(model, "loss_type", "") is None:
        model.loss_type = "ForCausalLM"  # the library's own fallback, which it takes with a warning
    workload = workload_from_model(model, what)
    if drops_layers:
        said = "all layers run in every step, which needs the most: layerdrop leaves some out at random"
        workload = replace(workload, assumptions=(*workload.assumptions, said))
    return workload


ALL_LINEAR = "all-linear"
"""peft's word for every linear layer but the output head."""

_TASKS = (
    ("ForCausalLM|LMHeadModel", "CAUSAL_LM"),
    ("ForSequenceClassification", "SEQ_CLS"),
    ("ForTokenClassification", "TOKEN_CLS"),
    ("ForQuestionAnswering", "QUESTION_ANS"),
    ("^(T5|MT5|UMT5|Bart|MBart|Pegasus).*ForConditionalGeneration", "SEQ_2_SEQ_LM"),
)
"""peft's tasks by the class of the model; a classifier's new head trains beside the adapters."""


def add_lora(
    workload: Workload,
    what: str,
    rank: int,
    targets: str | None,
    quantization: str | None,
    weights: torch.dtype | None,
    compute: torch.dtype,
) -> Workload:
    """Freeze a transformers model, put peft's LoRA adapters into it, and hold the frozen weights in fewer bits.

    The order is that of a training script: load in `weights`, quantize, `prepare_model_for_kbit_training`,
    `get_peft_model`. So adapters are fp32 on a model in half precision, and what stays of a quantized model (norms,
    embeddings, the head) is fp32.

    Args:
        workload: of a model without adapters, which is changed; with its activation checkpointing chosen already.
        what: the model as the user named it.
        rank: of each adapter; 0 for none, which leaves all weights as they are.
        targets: names of the layers that get one, separated by commas, or `ALL_LINEAR`; None for the usual choice.
        quantization: one of `spec.QUANTIZATION_NAMES`, or None.
        weights: the type that the model's weights are loaded in; None leaves them.
        compute: the type that 4-bit weights are computed in.

    Raises:
        MissingExtra: peft is not installed, or bitsandbytes, which a real device needs for quantized weights.
        InvalidValue: peft does not know this model's layers, or it has none of these names.
    """
    model: Any = workload.model
    if weights is not None:
        model.to(weights)
    if quantization is not None:
        _quantize(model, quantization, compute, what)
    if not rank:
        return replace(workload, casts_weights=False)
    try:
        import peft
    except ImportError as error:
        reason = "" if isinstance(error, ModuleNotFoundError) and error.name == "peft" else str(error)
        raise MissingExtra("peft", "lora", "--lora", reason) from error
    if quantization is not None:
        model.is_loaded_in_8bit, model.is_loaded_in_4bit = quantization == "int8", quantization != "int8"
        model = peft.prepare_model_for_kbit_training(
            model,
            use_gradient_checkpointing=bool(getattr(model, "is_activation_checkpointing", False)),
            gradient_checkpointing_kwargs={"use_reentrant": False},
        )
    name = type(model).__name__
    usual = getattr(model, "lora_targets", None)  # of what peft knows nothing of
    config = peft.LoraConfig(
        r=rank,
        target_modules=usual if targets is None else targets if targets == ALL_LINEAR else targets.split(","),
        task_type=next((task for pattern, task in _TASKS if re.search(pattern, name)), None),
    )
    if quantization is not None and needs_stand_ins():
        # peft 0.21 calls this experimental; its own layers for quantized weights take bitsandbytes' classes only.
        config._register_custom_module(_lora_layers())
    try:
        adapted = peft.get_peft_model(model, config)
    except ValueError as error:
        if targets is None:
            expected = f"--lora-targets with it, such as all-linear: peft has no usual ones for {what}"
            raise InvalidValue("lora", rank, expected) from error
        said = " ".join(str(error).split())
        raise InvalidValue("lora_targets", targets, f"names of layers of {what} ({said})") from error
    except RuntimeError as error:
        if quantization is None:
            raise
        # As with bitsandbytes: transformers quantizes a head that has a bias, and peft trains it whole.
        expected = f"none: {what} has a head that trains beside adapters, which it quantizes too ({error})"
        raise InvalidValue("quantization", quantization, expected) from error
    return replace(workload, model=adapted, casts_weights=False)


def _quantize(model: Any, name: str, compute: torch.dtype, what: str) -> None:
    from transformers.quantizers.base import get_keys_to_not_convert
    from transformers.quantizers.quantizers_utils import should_convert_module

    kind, kept = QUANTIZATIONS[name], None
    if isinstance(model, transformers.PreTrainedModel):
        kept = get_keys_to_not_convert(model)
    elif not hasattr(model, "lora_targets"):  # diffusers converts all, and timm has nothing of the kind
        raise InvalidValue("quantization", name, f"none: {what} is no model of transformers or diffusers")
    make = kind.stand_in if needs_stand_ins() else kind.of_bitsandbytes
    for path, module in list(model.named_modules()):
        if not should_convert_module(path, kept):
            continue
        if type(module) is nn.Linear:
            model.set_submodule(path, make(module, (module.in_features, module.out_features), compute))
        elif isinstance(module, transformers.pytorch_utils.Conv1D):
            rows, columns = module.weight.shape
            model.set_submodule(path, make(module, (rows, columns), compute))


def _lora_layers() -> dict[Any, Any]:
    """peft's layers for bitsandbytes' classes, by our stand-ins for these.

    Source: `Linear8bitLt.forward` and `Linear4bit.forward` in
    https://github.com/huggingface/peft/blob/v0.21.2/src/peft/tuners/lora/bnb.py.
    """
    from peft.tuners.lora import Linear

    class Lora8bit(Linear):  # type: ignore[misc]
        copies = False

        def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            result = self.base_layer(x, *args, **kwargs)
            if self.copies:
                result = result.clone()
            for name in self.active_adapters:
                lora_a, lora_b = self.lora_A[name], self.lora_B[name]
                convert = not torch.is_autocast_enabled()
                if convert:
                    x = self._cast_input_dtype(x, lora_a.weight.dtype)
                output = lora_b(lora_a(self.lora_dropout[name](x))) * self.scaling[name]
                result = result + (output.to(result.dtype) if convert else output)
            adapted: torch.Tensor = result
            return adapted

    class Lora4bit(Lora8bit):
        copies = True

    return {Linear4bit: Lora4bit, Linear8bit: Lora8bit}
