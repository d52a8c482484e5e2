"""Tests of batchfinder/models/catalog.py."""

from __future__ import annotations

import pytest

from batchfinder.errors import UnknownName
from batchfinder.models.catalog import denoisers, families, find_model, list_models, models

NAMES = """bert-base bert-large distilbert roberta-base roberta-large gpt2 gpt2-medium gpt2-large gpt2-xl t5-small
t5-base t5-large llama-3.2-1b llama-3.2-3b llama-3.1-8b qwen2.5-0.5b qwen2.5-1.5b qwen2.5-7b qwen3-8b
mistral-7b vit-base resnet50"""


def test_all_named_models_are_listed() -> None:
    """The zoo has the 22 models it promises."""
    assert list(list_models()) == NAMES.split()


def test_every_row_has_its_source() -> None:
    """Each row names the published config.json that its figures repeat, and a head whose batch is known."""
    for row in models():
        assert row.source == f"https://huggingface.co/{row.published}/blob/main/config.json"
        assert families().labels(row.architecture)


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("BERT-base", "bert-base"),
        ("bert_base_uncased", "bert-base"),
        ("google-bert/bert-base-uncased", "bert-base"),
        ("meta-llama/Llama-3.2-1B", "llama-3.2-1b"),
        ("Llama 3.2 3B", "llama-3.2-3b"),
        ("meta-llama/Meta-Llama-3.1-8B", "llama-3.1-8b"),
        ("t5_small", "t5-small"),
        ("ResNet-50", "resnet50"),
        ("Qwen/Qwen2.5-0.5B", "qwen2.5-0.5b"),
        ("llama3_1_8b", "llama-3.1-8b"),
        ("qwen2_5_0_5b", "qwen2.5-0.5b"),
        ("black-forest-labs/FLUX.1-dev", "flux.1-dev"),
        ("SD-1.5", "stable-diffusion-1.5"),
    ],
)
def test_look_up_is_forgiving(written: str, name: str) -> None:
    """Case, separators, aliases, hub repositories and torchtune's builders all lead to the model."""
    assert find_model(written).name == name


def test_no_two_models_share_a_name() -> None:
    """Every way of writing a name leads to one model only."""
    assert all(find_model(key) is row for row in (*models(), *denoisers()) for key in row.keys)


def test_a_different_model_is_not_taken_for_a_known_one() -> None:
    """bert-base-cased has another vocabulary, and a fork another owner: neither is what the zoo has."""
    for other in ("bert-base-cased", "someone/gpt2"):
        with pytest.raises(UnknownName):
            find_model(other)


def test_a_miss_names_the_nearest() -> None:
    """A typing error is answered with the name that was meant, and the other ways to give a model."""
    with pytest.raises(UnknownName) as caught:
        find_model("bert-bse")
    assert caught.value.matches[0] == "bert-base"
    assert str(caught.value) == (
        f"unknown model 'bert-bse'. Did you mean {', '.join(caught.value.matches)}? "
        "A path to a config.json or its folder, package.module:factory, or owner/name on the Hub will do as well."
    )


def test_a_far_miss_lists_all() -> None:
    """Where nothing is near, every model is named."""
    with pytest.raises(UnknownName, match=r"Known models: bert-base, .*resnet50"):
        find_model("zzzzzz")


def test_the_longest_suffix_names_the_head() -> None:
    """BertForPreTraining has a second label; a class without a known head has none."""
    labels = families().labels("BertForPreTraining")
    assert labels is not None
    assert [label.name for label in labels] == ["labels", "next_sentence_label"]
    assert families().labels("BertModel") is None
