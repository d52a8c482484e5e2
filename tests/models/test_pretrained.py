"""Tests of batchfinder/models/pretrained.py."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import DataCollatorWithFlattening

from batchfinder.errors import BatchFinderError, InvalidValue, MissingExtra
from batchfinder.models import build_workload, list_models
from batchfinder.models.catalog import find_model
from batchfinder.training.step import Workload, call

# Millions of parameters, of the checkpoint with the head that is trained. Published: the model cards and papers (BERT
# 110M and 340M, GPT-2 124M to 1.5B, T5 60M/220M/770M, Llama 1.23B/3.21B/8.03B, Qwen2.5 0.49B/1.54B/7.61B, Qwen3 8.2B,
# Mistral 7.24B, ViT 86.6M, ResNet-50 25.6M), to the digits that the safetensors headers on the hub give.
PUBLISHED = {
    "bert-base": 109.48, "bert-large": 335.14, "distilbert": 66.96, "roberta-base": 124.65, "roberta-large": 355.36,
    "gpt2": 124.44, "gpt2-medium": 354.82, "gpt2-large": 774.03, "gpt2-xl": 1557.61,
    "t5-small": 60.51, "t5-base": 222.90, "t5-large": 737.67,
    "llama-3.2-1b": 1235.81, "llama-3.2-3b": 3212.75, "llama-3.1-8b": 8030.26,
    "qwen2.5-0.5b": 494.03, "qwen2.5-1.5b": 1543.71, "qwen2.5-7b": 7615.62,
    "qwen3-8b": 8190.74, "mistral-7b": 7241.73,
    "vit-base": 86.57, "resnet50": 25.56,
}  # fmt: skip
POSITIONS = {
    "bert-base": 512, "bert-large": 512, "distilbert": 512, "roberta-base": 512, "roberta-large": 512,
    "gpt2": 1024, "gpt2-medium": 1024, "gpt2-large": 1024, "gpt2-xl": 1024,
    "t5-small": None, "t5-base": None, "t5-large": None,
    "llama-3.2-1b": 131072, "llama-3.2-3b": 131072, "llama-3.1-8b": 131072,
    "qwen2.5-0.5b": 32768, "qwen2.5-1.5b": 131072, "qwen2.5-7b": 131072,
    "qwen3-8b": 40960, "mistral-7b": 32768,
    "vit-base": None, "resnet50": None,
}  # fmt: skip
SMALL: dict[str, dict[str, Any]] = {
    "bert-base": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32},
    "distilbert": {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32},
    "roberta-base": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32},
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2},
    "t5-small": {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2},
    "llama-3.2-1b": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8,
                     "num_key_value_heads": 2, "intermediate_size": 32},
    "qwen2.5-0.5b": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
                     "intermediate_size": 32},
    "vit-base": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32},
    "resnet50": {"embedding_size": 8, "hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1]},
}  # fmt: skip


def write_config(folder: Path, name: str, **changes: Any) -> Path:
    """Write the config.json of a shrunken model, as `save_pretrained` would."""
    import transformers

    row = find_model(name)
    model_type = getattr(transformers, row.architecture).config_class.model_type
    figures = {"architectures": [row.architecture], "model_type": model_type, **row.config, **SMALL[name], **changes}
    if "num_labels" in figures:
        figures["id2label"] = {str(i): f"LABEL_{i}" for i in range(figures.pop("num_labels"))}
    file = folder / "config.json"
    file.write_text(json.dumps({key: value for key, value in figures.items() if value is not ...}))
    return file


@pytest.fixture(scope="module")
def fake_models() -> dict[str, Any]:
    """Every model of the zoo on fake tensors, and the seconds of a core that took."""
    build_workload("resnet50")  # the libraries are imported before the clock starts
    built: dict[str, Any] = {}
    for name in list_models():
        started = time.process_time()
        with FakeTensorMode(allow_non_fake_inputs=True):
            workload = build_workload(name)
        built[name] = workload, time.process_time() - started
    return built


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_counts_are_the_published_ones(fake_models: dict[str, Any], name: str) -> None:
    """Each model has as many parameters as its published checkpoint, in fp32, in seconds and without memory."""
    workload, seconds = fake_models[name]
    parameters = list(workload.model.parameters())
    assert sum(p.numel() for p in parameters) / 1e6 == pytest.approx(PUBLISHED[name], abs=0.006)
    assert all(isinstance(p, FakeTensor) and p.dtype == torch.float32 for p in parameters)
    assert seconds < 3


@pytest.mark.parametrize("name", POSITIONS)
def test_positions_are_the_published_ones(fake_models: dict[str, Any], name: str) -> None:
    """The longest sequence is what the position table allows; relative positions and images have no such limit."""
    workload, _ = fake_models[name]
    assert workload.max_seq_len == POSITIONS[name]
    assert workload.seq_len_unit == ("pixels" if name in ("vit-base", "resnet50") else "tokens")


def test_training_does_not_cache_keys(fake_models: dict[str, Any]) -> None:
    """use_cache is off, since a cache of keys and values would be counted as memory of the step."""
    assert not any(getattr(workload.model.config, "use_cache", False) for workload, _ in fake_models.values())


@pytest.mark.parametrize("name", ["bert-base", "gpt2", "t5-small", "llama-3.2-1b", "vit-base", "resnet50"])
def test_a_fake_step_runs(fake_models: dict[str, Any], name: str) -> None:
    """Forward and backward of a whole model run on fake tensors, one of each kind of batch."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        workload = build_workload(name)
        batch = workload.make_batch(2, None if workload.seq_len_unit == "pixels" else 16)
        workload.model(**batch).loss.backward()
    assert all(p.grad is not None for p in workload.model.parameters() if p.requires_grad)


@pytest.mark.parametrize(
    ("name", "attention", "gradient_checkpointing"),
    [
        (name, attention, gradient_checkpointing)
        for name in SMALL
        for attention in ("eager", "sdpa")
        for gradient_checkpointing in (False, True)
        if name != "resnet50" or (attention == "eager" and not gradient_checkpointing)  # a CNN has neither
    ],
)
def test_a_real_step_runs(tmp_path: Path, name: str, attention: str, gradient_checkpointing: bool) -> None:
    """A shrunken model of each family, read from a config.json, trains for real with every option that it has."""
    file = write_config(tmp_path, name)
    workload = build_workload(str(file), attention=attention, gradient_checkpointing=gradient_checkpointing)
    assert type(workload.model).__name__ == find_model(name).architecture
    assert workload.model.config._attn_implementation == attention
    workload.model.train()
    loss = workload.model(**workload.make_batch(3, 48)).loss
    loss.backward()
    assert torch.isfinite(loss)
    assert any(p.grad is not None and p.grad.any() for p in workload.model.parameters())


@pytest.mark.parametrize("side", [16, 224, 240])
def test_vision_transformers_take_any_multiple_of_the_patch(tmp_path: Path, side: int) -> None:
    """The positions of a ViT are interpolated to the side that is asked for."""
    workload = build_workload(str(write_config(tmp_path, "vit-base")))
    workload.model(**workload.make_batch(1, side)).loss.backward()
    with pytest.raises(InvalidValue, match="a multiple of the patch of 16"):
        workload.make_batch(1, side + 1)


def test_the_smallest_image_of_a_cnn_trains(tmp_path: Path) -> None:
    """A ResNet takes a single image of 33 pixels, and refuses 32, where batch normalisation would."""
    workload = build_workload(str(write_config(tmp_path, "resnet50")))
    workload.model.train()(**workload.make_batch(1, 33)).loss.backward()
    with pytest.raises(InvalidValue, match="at least 33 pixels"):
        workload.make_batch(1, 32)


def test_embeddings_stay_tied(fake_models: dict[str, Any]) -> None:
    """A model on fake tensors shares its embeddings where the published one does, and only there."""
    for name, tied in (("gpt2", True), ("t5-small", True), ("llama-3.2-1b", True), ("llama-3.1-8b", False)):
        model = fake_models[name][0].model
        assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) is tied


@pytest.mark.parametrize("name", ["t5-small", "t5-base"])
def test_flash_is_refused_where_the_model_adds_a_bias(name: str) -> None:
    """T5 adds relative positions to the scores, which flash attention cannot; the message says what it has."""
    with pytest.raises(InvalidValue, match=f"invalid value 'flash'; expected eager or sdpa, which {name} supports"):
        build_workload(name, attention="flash")


def test_attention_of_a_model_without() -> None:
    """A CNN runs as it is under `eager`, and refuses what it cannot have."""
    with pytest.raises(InvalidValue, match="expected eager, which resnet50 supports"):
        build_workload("resnet50", attention="sdpa")


def test_flash_goes_through_sdpa() -> None:
    """Flash is asked for through PyTorch's scaled_dot_product_attention."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert build_workload("bert-base", attention="flash").model.config._attn_implementation == "sdpa"


def test_checkpointing_of_a_model_without() -> None:
    """A model that cannot checkpoint is named."""
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(InvalidValue, match=r"resnet50 .*does not"):
        build_workload("resnet50", gradient_checkpointing=True)


def test_which_layers_checkpoint(tmp_path: Path) -> None:
    """All, each second one, or all but what matrix products return: the gradients are the same, fewer forwards are
    taken again.
    """
    file = tmp_path / "config.json"
    config = {"architectures": ["BertForMaskedLM"], "model_type": "bert", "num_hidden_layers": 4, "hidden_size": 16}
    file.write_text(json.dumps({**config, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 50}))
    taken, gradients = {}, {}
    for how in (False, True, "every-2", "every-3", "selective"):
        torch.manual_seed(0)
        workload = build_workload(str(file), attention="eager", gradient_checkpointing=how)
        for name, parameter in workload.model.named_parameters():
            nn.init.normal_(parameter, generator=torch.Generator().manual_seed(len(name)))
        for module in workload.model.modules():
            module.p = 0.0  # no dropout
        batch = workload.make_batch(2, 8)
        with FlopCounterMode(display=False) as products:
            workload.model.train()(**{name: torch.ones_like(ids) for name, ids in batch.items()}).loss.backward()
        taken[how] = products.get_total_flops()
        gradients[how] = [parameter.grad for parameter in workload.model.parameters() if parameter.grad is not None]
    again = taken[True] - taken[False]
    assert again > 0
    assert taken["every-2"] - taken[False] == again / 2
    assert taken["every-3"] - taken[False] == again / 2  # the first and the fourth of four
    assert taken["selective"] == taken[False]
    for how in gradients:
        for one, other in zip(gradients[how], gradients[False], strict=True):
            torch.testing.assert_close(one, other)
    with pytest.raises(InvalidValue, match="one of full, every-2, every-4, selective"):
        build_workload(str(file), gradient_checkpointing="every-0")


def test_generators_do_not_move(tmp_path: Path) -> None:
    """Building a model for real leaves the user's random numbers as they were."""
    before = torch.get_rng_state()
    build_workload(str(write_config(tmp_path, "bert-base")))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("name", "architectures", "expected"),
    [
        ("bert-base", ["BertForMaskedLM"], "BertForMaskedLM"),
        ("bert-base", ["BertForPreTraining"], "BertForPreTraining"),
        ("bert-base", ["BertForQuestionAnswering"], "BertForQuestionAnswering"),
        ("bert-base", ["BertForTokenClassification"], "BertForTokenClassification"),
        ("bert-base", ["BertModel"], "BertForSequenceClassification"),
        ("bert-base", ..., "BertForSequenceClassification"),
        ("gpt2", ..., "GPT2LMHeadModel"),
        ("gpt2", ["GPT2ForSequenceClassification"], "GPT2ForSequenceClassification"),
        ("t5-small", ..., "T5ForConditionalGeneration"),
        ("vit-base", ..., "ViTForImageClassification"),
        ("llama-3.2-1b", None, "LlamaForCausalLM"),
    ],
)
def test_the_head_is_the_configs_or_the_usual(tmp_path: Path, name: str, architectures: Any, expected: str) -> None:
    """`architectures` names the head; without it, or with a bare body there, the type has a usual one; all train."""
    write_config(tmp_path, name, architectures=architectures)
    workload = build_workload(str(tmp_path))
    assert type(workload.model).__name__ == expected
    replaced = bool(architectures) and architectures is not ... and expected not in architectures
    assert any(f"{expected} in place of" in said for said in workload.assumptions) == replaced
    workload.model(**workload.make_batch(2, 32)).loss.backward()


def test_half_precision_of_a_checkpoint_is_not_the_models(tmp_path: Path) -> None:
    """Weights are fp32 whatever the checkpoint was saved in: precision is the step's business."""
    workload = build_workload(str(write_config(tmp_path, "llama-3.2-1b", torch_dtype="bfloat16")))
    assert next(workload.model.parameters()).dtype == torch.float32


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "valid JSON"),
        ("[]", "supports, not None"),
        ('{"model_type": "unheard-of"}', "transformers 5[.0-9]* supports, not 'unheard-of'"),
        ('{"model_type": ["bert"]}', "supports, not"),
        ('{"model_type": "bert", "hidden_size": 10, "num_attention_heads": 3}', "figures that transformers accepts"),
        ('{"model_type": "bert", "hidden_size": "ten"}', "figures that transformers accepts"),
        ('{"model_type": "detr"}', "invalid value 'detr'; expected a model of text"),
    ],
)
def test_bad_configs_are_explained(tmp_path: Path, text: str, said: str) -> None:
    """A config.json that cannot be used is an error that names the file or model, and says what is wrong."""
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(BatchFinderError, match=said):
        build_workload(str(tmp_path / "config.json"))


def test_a_folder_without_a_config(tmp_path: Path) -> None:
    """A folder that holds no config.json is said to be so."""
    with pytest.raises(InvalidValue, match=r"a readable config.json \(No such file or directory\)"):
        build_workload(str(tmp_path))


MEDIA: dict[str, dict[str, Any]] = {
    "qwen2_vl": {
        "architectures": ["Qwen2VLForConditionalGeneration"], "vocab_size": 151700,
        "text_config": {"model_type": "qwen2_vl_text", "hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 151700,
                        "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 32,
                        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}},
        "vision_config": {"model_type": "qwen2_vl_vision", "embed_dim": 16, "hidden_size": 32, "depth": 2,
                          "num_heads": 2, "image_size": 56},
    },
    "whisper": {
        "architectures": ["WhisperForConditionalGeneration"], "vocab_size": 99, "d_model": 16, "encoder_layers": 2,
        "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32,
        "decoder_ffn_dim": 32, "max_source_positions": 40, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        "decoder_start_token_id": 3,
    },
    "wav2vec2": {
        "architectures": ["Wav2Vec2ForCTC"], "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2,
        "num_attention_heads": 2, "intermediate_size": 32, "conv_dim": [8] * 7, "num_conv_pos_embeddings": 16,
        "num_conv_pos_embedding_groups": 2,
    },
    "dia": {
        "architectures": ["DiaForConditionalGeneration"], "delay_pattern": [0, 8, 9],
        "encoder_config": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "head_dim": 8,
                           "num_attention_heads": 2, "num_key_value_heads": 2},
        "decoder_config": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "head_dim": 8,
                           "num_attention_heads": 2, "num_key_value_heads": 2, "cross_head_dim": 8,
                           "cross_hidden_size": 16, "cross_num_attention_heads": 2, "cross_num_key_value_heads": 2,
                           "num_channels": 3, "vocab_size": 99, "bos_token_id": 1, "eos_token_id": 2,
                           "pad_token_id": 0},
    },
    "kyutai_speech_to_text": {
        "architectures": ["KyutaiSpeechToTextForConditionalGeneration"], "vocab_size": 99, "codebook_vocab_size": 9,
        "num_codebooks": 4, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 32,
        "num_key_value_heads": 2, "head_dim": 8, "audio_pad_token_id": 8, "pad_token_id": 0, "bos_token_id": 1,
    },
}  # fmt: skip


@pytest.mark.slow
def test_layers_with_windows_of_their_own(tmp_path: Path) -> None:
    """Where a config has a window for each layer, reading a common one fails in transformers; nothing here needs it."""
    figures = {"vocab_size": 99, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    sizes = {"num_hidden_layers": 2, "intermediate_size": 32, "embedding_rank": 4}
    config = {"model_type": "neomme", "architectures": ["NeoMMEForMaskedLM"], **figures, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert type(build_workload(str(tmp_path)).model).__name__ == "NeoMMEForMaskedLM"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "seq_len", "unit", "said"),
    [
        ("qwen2_vl", 24, "tokens", "each sample has one image of 4 x 4 patches, for which 4 of its tokens stand"),
        ("whisper", 12, "tokens", "each sample has 30 seconds of speech in 80 frames"),
        ("wav2vec2", 20_000, "samples", "the labels of a recording are 40 tokens"),
        ("dia", 24, "tokens", "each sample has 10 seconds of speech in 860 frames of 3 codebooks"),
        ("kyutai_speech_to_text", 24, "tokens", "each of a sample's tokens has 4 of its speech beside it"),
    ],
)
def test_images_and_recordings_train_for_real(
    tmp_path: Path, model_type: str, seq_len: int, unit: str, said: str
) -> None:
    """A step runs with what is read besides text, and all of the encoder gets gradients; what it reads is said."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, **MEDIA[model_type]}))
    workload = build_workload(str(tmp_path))
    assert type(workload.model).__name__ == MEDIA[model_type]["architectures"][0]
    assert (workload.seq_len_unit, workload.assumptions[0]) == (unit, said)
    loss = workload.model.train()(**workload.make_batch(2, seq_len)).loss
    loss.backward()
    assert torch.isfinite(loss)
    read = ("visual", "encoder.layers", "embed_tokens")
    encoder = [p for name, p in workload.model.named_parameters() if any(part in name for part in read)]
    assert encoder
    assert all(parameter.grad is not None for parameter in encoder)


def test_no_layer_is_dropped_at_random(tmp_path: Path) -> None:
    """A config's layerdrop does not decide what a step needs: all layers run, and that is said."""
    config = MEDIA["wav2vec2"] | {"layerdrop": 0.99, "num_hidden_layers": 6}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "wav2vec2", **config}))
    workload = build_workload(str(tmp_path))
    assert "layerdrop leaves some out" in workload.assumptions[-1]
    workload.model.train()(**workload.make_batch(1, 20_000)).loss.backward()
    layers = [p for name, p in workload.model.named_parameters() if "encoder.layers" in name]
    assert layers
    assert all(parameter.grad is not None for parameter in layers)


def tiny_llama(tmp_path: Path, **options: Any) -> Workload:
    """A Llama of two small layers, with the same weights every time."""
    row = find_model("llama-3.2-1b")
    (tmp_path / "config.json").write_text(
        json.dumps({**row.config, **SMALL["llama-3.2-1b"], "vocab_size": 512, "model_type": "llama",
                    "architectures": [row.architecture]})
    )  # fmt: skip
    torch.manual_seed(0)
    workload = build_workload(str(tmp_path), **options)
    generator = torch.Generator().manual_seed(0)
    for parameter in workload.model.parameters():
        torch.nn.init.normal_(parameter, std=0.1, generator=generator)
    return workload


def loss_and_gradients(workload: Workload, batch: dict[str, Any]) -> list[torch.Tensor]:
    """Of one forward and backward."""
    loss = call(workload.model, batch).loss
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in workload.model.parameters() if parameter.grad is not None)]


@pytest.mark.parametrize("loss", ["chunked", "trl"])
def test_another_loss_is_the_same_loss(tmp_path: Path, loss: str) -> None:
    """It is computed otherwise, and what comes out for training is what the model's own gives."""
    if loss == "trl":
        pytest.importorskip("trl.trainer.utils")
    own, other = tiny_llama(tmp_path), tiny_llama(tmp_path, loss=loss)
    batch = own.make_batch(2, 16)
    pairs = zip(loss_and_gradients(own, dict(batch)), loss_and_gradients(other, dict(batch)), strict=True)
    assert all(torch.allclose(first, second, rtol=1e-4, atol=1e-6) for first, second in pairs)


@pytest.mark.parametrize(
    ("model", "options", "said"),
    [
        ("bert-base", {"loss": "chunked"}, "expected default: bert-base (BertForSequenceClassification) is no causal"),
        ("gpt2", {"loss": "mine"}, "expected one of default, chunked, liger, trl"),
        ("bert-base", {"packed": True}, "expected no --packed: bert-base (BertForSequenceClassification) is no causal"),
        ("llama-3.2-1b", {"packed": True, "attention": "eager"}, "expected flash, or none, with --packed"),
        ("gpt2", {"packed": True, "attention": "eager"}, "expected flash, or none, with --packed"),
    ],
)
def test_what_a_model_cannot_do(model: str, options: dict[str, Any], said: str) -> None:
    """A loss or packing that does not go with a model is refused in words."""
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(InvalidValue) as caught:
        build_workload(model, **options)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("loss", "absent", "named"),
    [("liger", "liger_kernel", "liger-kernel"), ("liger", "triton", "triton"), ("trl", "trl", "trl")],
)
def test_a_missing_package_is_named(loss: str, absent: str, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss that another package computes says which one is missing."""
    if absent == "triton":
        pytest.importorskip("liger_kernel")
    for name in [name for name in sys.modules if name.partition(".")[0] in ("liger_kernel", absent)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, absent, None)
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(MissingExtra) as caught:
        build_workload("llama-3.2-1b", loss=loss)
    assert caught.value.package == named


def test_packed_samples_stand_in_one_row(tmp_path: Path) -> None:
    """The batch is the one that transformers' own collator makes of the same samples."""
    workload = tiny_llama(tmp_path, packed=True)
    packed = workload.make_batch(3, 8)
    assert packed["input_ids"].shape == (1, 24)
    samples = [{"input_ids": row, "labels": row} for row in packed["input_ids"].view(3, 8)]
    theirs = DataCollatorWithFlattening(return_flash_attn_kwargs=True)(samples)
    ignored = packed["labels"] == -100
    assert torch.equal(ignored, theirs["labels"] == -100)
    assert set(packed) == set(theirs)
    for name in ("position_ids", "cu_seq_lens_q", "cu_seq_lens_k"):
        assert torch.equal(packed[name], theirs[name]), name
        assert packed[name].dtype == theirs[name].dtype, name
    assert packed["max_length_q"] == theirs["max_length_q"] == 8
