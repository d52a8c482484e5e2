"""Tests of batchfinder/models/hub.py, in processes of their own against a server that answers as the Hub does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.models.hub_server import BERT, COMMIT, Hub, Repository, serving

FIND = """
import sys
from batchfinder.errors import BatchFinderError
from batchfinder.models.hub import config_from_hub
try:
    print(config_from_hub(sys.argv[1]))
except BatchFinderError as error:
    print(f"{type(error).__name__}: {error}")
"""
CONFIG = "/resolve/main/config.json"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    """A Hub with one model, and an empty home."""
    with serving(tmp_path / "home") as found:
        found.repositories["some/bert"] = Repository({"config.json": BERT, "model.safetensors": b"weights"})
        yield found


def found(hub: Hub, model: str, **environment: str) -> str:
    """What is found, with nothing on stderr."""
    out, err, _ = hub.run(FIND, model, **environment)
    assert err == ""
    return out


def test_it_is_fetched_once_and_nothing_else_is(hub: Hub) -> None:
    """The first look-up asks for config.json alone; the second asks nothing, and needs no server."""
    path = Path(found(hub, "some/bert"))
    assert path.read_bytes() == BERT
    assert hub.home in path.parents
    assert {(name, token) for _, name, token in hub.asked} == {(f"/some/bert{CONFIG}", "")}
    hub.asked.clear()
    assert found(hub, "some/bert", HF_ENDPOINT="http://127.0.0.1:9") == str(path)
    assert found(hub, "some/bert", HF_HUB_OFFLINE="1") == str(path)
    assert hub.asked == []


def test_the_cache_is_where_the_library_has_it(hub: Hub, tmp_path: Path) -> None:
    """HF_HUB_CACHE names it, and what another program has brought there is used, of a name without an owner too."""
    cache = tmp_path / "elsewhere"
    snapshot = cache / "models--distilgpt2" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_bytes(BERT)
    (cache / "models--distilgpt2/refs").mkdir()
    (cache / "models--distilgpt2/refs/main").write_text(COMMIT)
    assert found(hub, "distilgpt2", HF_HUB_CACHE=str(cache)) == str(snapshot / "config.json")
    assert cache in Path(found(hub, "some/bert", HF_HUB_CACHE=str(cache))).parents


@pytest.mark.parametrize(
    "model", ["distilgpt2", "two/many/parts", "Llama 3.2 9B", "a--b/c", "-x/y", "m:f", "x" * 500, ""]
)
def test_what_is_no_id_of_an_owner_is_not_asked_for(hub: Hub, model: str) -> None:
    """The network is not asked for a bare name, which may be a typing error, nor for what cannot be an id."""
    assert found(hub, model) == "None"
    assert hub.asked == []


def test_a_revision(hub: Hub) -> None:
    """A branch, tag or commit after an @; one that is not there is told."""
    assert Path(found(hub, "some/bert@v2")).read_bytes() == BERT
    assert "/some/bert/resolve/v2/config.json" in {name for _, name, _ in hub.asked}
    assert Path(found(hub, f"some/bert@{COMMIT}")).read_bytes() == BERT
    said = found(hub, "some/bert@v9")
    assert said == (
        "HubFailed: no config.json of 'some/bert@v9': some/bert has no revision v9. "
        "Name a branch, a tag or a commit after the @, or leave it out."
    )


def test_the_users_token_is_sent(hub: Hub) -> None:
    """That of HF_TOKEN, or of `hf auth login`."""
    hub.repositories["gated/model"] = Repository({"config.json": BERT}, needs_token="hf_good")
    said = found(hub, "gated/model")
    assert said == (
        "HubFailed: no config.json of 'gated/model': the repository is gated, and no token was sent. Accept its terms "
        f"on {hub.url}/gated/model and run `hf auth login`, or give a path to a config.json."
    )
    assert "the token that was sent has no access to it" in found(hub, "gated/model", HF_TOKEN="hf_bad")
    hub.home.mkdir(exist_ok=True)
    (hub.home / "token").write_text("hf_good")
    assert Path(found(hub, "gated/model")).read_bytes() == BERT
    assert {token for _, _, token in hub.asked} == {"", "hf_bad", "hf_good"}


@pytest.mark.parametrize("token", ["", "hf_mine"])
def test_a_repository_that_is_not_there(hub: Hub, token: str) -> None:
    """Missing or private: the Hub says 401 to those it does not know, and 404 to others."""
    said = found(hub, "some/brt", **({"HF_TOKEN": token} if token else {}))
    assert said.startswith("UnknownName: unknown model 'some/brt'. There is no such folder here, and http://127.0.0.1:")
    assert "hf auth login" in said


@pytest.mark.parametrize(
    ("files", "card", "words"),
    [
        (
            {"adapter_config.json": json.dumps({"base_model_name_or_path": "some/bert"}).encode()},
            {},
            "but an adapter of some/bert. Name some/bert, with --lora RANK.",
        ),
        ({"adapter_config.json": b"{"}, {}, "but an adapter. Name the model that it adapts, with --lora RANK."),
        ({"m.Q4_K_M.gguf": b""}, {"base_model": "some/bert"}, "but GGUF files of some/bert. Name some/bert."),
        ({"m.gguf": b""}, {"base_model": ["a/b", "c/d"]}, "but GGUF files of a/b. Name a/b."),
        ({"m.gguf": b""}, {}, "but GGUF files. Name the model that they were made of."),
        (
            {"model_index.json": b"{}"},
            {},
            "but a pipeline of diffusers without a denoiser that is known. Give a package.module:factory that makes",
        ),
        ({"weights.bin": b""}, {}, "no config.json. Name another model, give a path to a config.json, or a package"),
    ],
)
def test_repositories_without_a_config(hub: Hub, files: dict[str, bytes], card: dict[str, object], words: str) -> None:
    """What they have is said, and what to ask for; no weights are fetched for that."""
    hub.repositories["some/other"] = Repository(files, card)
    said = found(hub, "some/other")
    assert said.startswith("HubFailed: no config.json of 'some/other': the repository has no config.json")
    assert words in said
    asked = {name.rpartition("/")[2] for _, name, _ in hub.asked}
    assert asked <= {"config.json", "adapter_config.json", "other", "main"}


def test_a_pipeline_of_diffusers(hub: Hub) -> None:
    """The config.json of its denoiser is fetched, and nothing else; from the cache it comes without a question."""
    denoiser = {"_class_name": "FluxTransformer2DModel"}
    files = {"model_index.json": b"{}", "transformer/config.json": json.dumps(denoiser).encode(), "w.bin": b""}
    hub.repositories["some/other"] = Repository(files, {})
    path = found(hub, "some/other")
    assert path.endswith("transformer/config.json")
    assert json.loads(Path(path).read_text()) == denoiser
    hub.asked.clear()
    assert found(hub, "some/other") == path
    assert hub.asked == []


def test_offline(hub: Hub) -> None:
    """Nothing is asked, and both ways out are named."""
    said = found(hub, "some/bert", HF_HUB_OFFLINE="1")
    assert said.startswith("HubFailed: no config.json of 'some/bert': it is not in the local cache (")
    assert "`hf download some/bert config.json`" in said
    assert hub.asked == []


def test_no_server(hub: Hub) -> None:
    """A connection that is refused is told at once, without the library's many tries."""
    out, err, seconds = hub.run(FIND, "some/bert", HF_ENDPOINT="http://127.0.0.1:9")
    assert out.startswith("HubFailed: no config.json of 'some/bert': http://127.0.0.1:9 cannot be reached (Connect")
    assert out.endswith(
        "Check the network (HF_ENDPOINT names a mirror, HTTPS_PROXY a proxy), or give a path to a config.json."
    )
    assert err == ""
    assert seconds < 8


def test_a_slow_server(hub: Hub) -> None:
    """It is waited for as long as HF_HUB_ETAG_TIMEOUT says, and not again."""
    hub.repositories["some/bert"].seconds = 20
    out, err, seconds = hub.run(FIND, "some/bert", HF_HUB_ETAG_TIMEOUT="1")
    assert "cannot be reached (ReadTimeout" in out
    assert err == ""
    assert seconds < 8
    assert len(hub.asked) == 1


@pytest.mark.parametrize(
    ("repository", "words"),
    [
        (Repository(refused=(503, "")), "answers with 503. Try again later, or give a path to a config.json."),
        (Repository(refused=(403, "")), "refuses the token that was sent (403). Run `hf auth login` with one that"),
        (Repository({"config.json": b"{}"}, size=17 << 20), "config.json has 17.00 MiB, where at most 16.00 MiB are"),
    ],
)
def test_other_answers(hub: Hub, repository: Repository, words: str) -> None:
    """Each is told in words; a file that is too large is not downloaded."""
    hub.repositories["some/other"] = repository
    said = found(hub, "some/other")
    assert said.startswith("HubFailed: no config.json of 'some/other': ")
    assert words in said
    assert {method for method, _, _ in hub.asked} == {"HEAD"}


def test_a_cache_that_cannot_be_written(hub: Hub) -> None:
    """The place is named, and what to set."""
    hub.home.write_text("no folder")
    said = found(hub, "some/bert")
    assert f"the local cache cannot be written ({hub.home}" in said
    assert "Set HF_HOME to a folder that can be written" in said


def test_what_answers_is_no_hub(hub: Hub) -> None:
    """As the page of a network that wants a login first."""
    hub.repositories["some/bert"].is_hub = False
    assert f"{hub.url} cannot be reached (" in found(hub, "some/bert")


def test_models_are_built_of_it(hub: Hub) -> None:
    """By `build_workload`, within the bounds for a config.json from anywhere; what is wrong is told by the id."""
    hub.repositories["some/new"] = Repository({"config.json": b'{"model_type": "newer"}'})
    hub.repositories["some/code"] = Repository(
        {"config.json": BERT.replace(b"}", b', "_attn_implementation": "evil/kernel"}')}
    )
    code = """
import sys
from batchfinder.errors import BatchFinderError
from batchfinder.models import build_workload
for model in sys.argv[1:]:
    try:
        print(type(build_workload(model).model).__name__)
    except BatchFinderError as error:
        print(error)
"""
    out, _, _ = hub.run(code, "some/bert", "some/new", "some/code")
    built, new, code_of = out.splitlines()
    assert built == "BertForSequenceClassification"
    assert new.startswith("model: invalid value 'some/new'; expected a config.json whose model_type transformers ")
    assert code_of.startswith("model: invalid value 'some/code'; expected a config.json that loads no code")
    assert {name.partition("/resolve/main/")[2] for _, name, _ in hub.asked} == {"config.json"}
