"""The config.json of a model by its id on the Hugging Face Hub, from the local cache or fetched; nothing else of it is.

The library huggingface_hub does it: it finds the cache (HF_HOME, HF_HUB_CACHE), the Hub (HF_ENDPOINT), whether to ask
it at all (HF_HUB_OFFLINE), and the user's token.
"""

from __future__ import annotations

import json
import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from batchfinder.errors import HubFailed, UnknownName
from batchfinder.units import format_bytes

MAX_CONFIG_BYTES = 16 << 20
"""A config.json may come from anywhere. The largest that were published have some 100 KiB."""

_ID = re.compile(r"(?P<repo>[\w.-]+(?:/[\w.-]+)?)(?:@(?P<revision>[\w./-]{1,200}))?", re.ASCII)
_CONFIG, _ADAPTER, _PIPELINE = "config.json", "adapter_config.json", "model_index.json"
DENOISER_CONFIGS = ("unet/config.json", "transformer/config.json")
"""Of the part of a pipeline of diffusers that trains."""
_SECONDS = 5
_A_PATH = "give a path to a config.json"


def config_from_hub(model: str) -> Path | None:
    """Find the config.json of `owner/name` or `owner/name@revision`, in the local cache or on the Hub.

    Of a pipeline of diffusers it is that of its denoiser. A name without an owner is looked for in the cache alone.
    What is in the cache is not asked for again.

    Returns:
        The file in the cache; None for what is no id, and for a name without an owner that is not in the cache.

    Raises:
        UnknownName: the Hub has no such repository, or does not show it.
        HubFailed: it cannot be had; the text says why.
    """
    asked = _ID.fullmatch(model)
    if asked is None:
        return None
    from huggingface_hub import constants, errors, try_to_load_from_cache

    repo, revision = asked["repo"], asked["revision"]
    try:
        for file in (_CONFIG, *DENOISER_CONFIGS):
            cached = try_to_load_from_cache(repo, file, revision=revision)
            if isinstance(cached, str):
                return Path(cached)
    except errors.HFValidationError:
        return None
    if "/" not in repo:
        return None
    if constants.HF_HUB_OFFLINE:
        reason = f"it is not in the local cache ({constants.HF_HUB_CACHE}), and the Hub is not asked when offline"
        move = f"Leave out --offline and HF_HUB_OFFLINE, bring it by `hf download {repo} {_CONFIG}`, or {_A_PATH}"
        raise HubFailed(model, reason, move)
    with _quietly():
        return Path(_fetch(model, repo, revision, _CONFIG))


def _fetch(model: str, repo: str, revision: str | None, file: str) -> str:
    """Download a small file into the cache.

    `hf_hub_download` tries for minutes where nothing answers. So the file is asked for once, with little patience, and
    downloaded where there is an answer.
    """
    import huggingface_hub
    from huggingface_hub import constants, errors

    chosen = constants.HF_HUB_ETAG_TIMEOUT
    seconds = _SECONDS if chosen == constants.DEFAULT_ETAG_TIMEOUT else chosen
    page = f"{constants.ENDPOINT}/{repo}"
    try:
        url = huggingface_hub.hf_hub_url(repo, file, revision=revision)
        size = huggingface_hub.get_hf_file_metadata(url, timeout=seconds).size
        if size is not None and size > MAX_CONFIG_BYTES:
            reason = f"{file} has {format_bytes(size)}, where at most {format_bytes(MAX_CONFIG_BYTES)} are read"
            raise HubFailed(model, reason, f"Name another model, or {_A_PATH}")
        return huggingface_hub.hf_hub_download(repo, file, revision=revision, etag_timeout=seconds)
    except errors.GatedRepoError as error:
        who = "the token that was sent has no access to it" if huggingface_hub.get_token() else "no token was sent"
        move = f"Accept its terms on {page} and run `hf auth login`, or {_A_PATH}"
        raise HubFailed(model, f"the repository is gated, and {who}", move) from error
    except errors.RepositoryNotFoundError as error:
        hint = (
            f"There is no such folder here, and {constants.ENDPOINT} has no such repository, or has it private. Check "
            f"the name, run `hf auth login` for a private one, or {_A_PATH}, or package.module:factory."
        )
        raise UnknownName("model", model, (), hint) from error
    except errors.RevisionNotFoundError as error:
        move = "Name a branch, a tag or a commit after the @, or leave it out"
        raise HubFailed(model, f"{repo} has no revision {revision}", move) from error
    except errors.EntryNotFoundError as error:
        if isinstance(error, errors.LocalEntryNotFoundError):
            raise _unreachable(model, error.__cause__ or error) from error
        if file == _CONFIG:
            return _in_place_of_config(model, repo, revision, seconds)
        raise HubFailed(model, f"the repository has no {file}", f"Name another model, or {_A_PATH}") from error
    except errors.HfHubHTTPError as error:
        code = error.response.status_code
        if code in (401, 403):
            move = f"Run `hf auth login` with one that can read {repo}, or {_A_PATH}"
            raise HubFailed(model, f"{constants.ENDPOINT} refuses the token that was sent ({code})", move) from error
        move = f"Try again later, or {_A_PATH}"
        raise HubFailed(model, f"{constants.ENDPOINT} answers with {code}", move) from error
    except HubFailed:
        raise
    except Exception as error:  # of the HTTP client, which differs from one release to the next
        if isinstance(error, OSError) and error.filename:
            reason = f"the local cache cannot be written ({error.filename}: {error.strerror})"
            raise HubFailed(model, reason, f"Set HF_HOME to a folder that can be written, or {_A_PATH}") from error
        raise _unreachable(model, error) from error


def _unreachable(model: str, error: BaseException) -> HubFailed:
    from huggingface_hub import constants

    said = " ".join(str(error).split()).rstrip(".")
    kind = type(error).__name__
    reason = f"{constants.ENDPOINT} cannot be reached ({kind}{f': {said}' if said else ''})"
    move = f"Check the network (HF_ENDPOINT names a mirror, HTTPS_PROXY a proxy), or {_A_PATH}"
    return HubFailed(model, reason, move)


def _in_place_of_config(model: str, repo: str, revision: str | None, seconds: float) -> str:
    """Of a repository without a config.json, that of a pipeline's denoiser.

    Raises:
        HubFailed: it is no such pipeline; the text says what it has, and what to ask for in its place.
    """
    import huggingface_hub

    reason, factory = f"the repository has no {_CONFIG}", "a package.module:factory that makes the model"
    try:
        about: Any = huggingface_hub.model_info(repo, revision=revision, timeout=seconds)
        files = {each.rfilename for each in about.siblings or []}
    except Exception:  # that it has none is said all the same
        raise HubFailed(model, reason, f"Name another model, give a path to a config.json, or {factory}") from None
    if _ADAPTER in files:
        base = ""
        try:
            figures = json.loads(Path(_fetch(model, repo, revision, _ADAPTER)).read_text(encoding="utf-8"))
            base = str(figures.get("base_model_name_or_path") or "")
        except Exception:
            logging.getLogger(__name__).debug("no base model in %s of %s", _ADAPTER, repo, exc_info=True)
        what, instead = (f"an adapter of {base}", base) if base else ("an adapter", "the model that it adapts")
        raise HubFailed(model, f"{reason}, but {what}", f"Name {instead}, with --lora RANK")
    if _PIPELINE in files:
        part = next((file for file in DENOISER_CONFIGS if file in files), None)
        if part is not None:
            return _fetch(model, repo, revision, part)
        move = "Give a package.module:factory that makes the part that trains"
        raise HubFailed(model, f"{reason}, but a pipeline of diffusers without a denoiser that is known", move)
    if any(name.lower().endswith(".gguf") for name in files):
        named: Any = getattr(about.card_data, "base_model", None)
        base = str((named[0] if isinstance(named, list) and named else named) or "")
        made = f" of {base}" if base else ""
        move = f"Name {base or 'the model that they were made of'}"
        raise HubFailed(model, f"{reason}, but GGUF files{made}", move)
    raise HubFailed(model, reason, f"Name another model, give a path to a config.json, or {factory}")


@contextmanager
def _quietly() -> Iterator[None]:
    """Without a word of huggingface_hub's, its progress bars, its telemetry, and its long patience with downloads."""
    from huggingface_hub import constants
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    logger = logging.getLogger("huggingface_hub")
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.CRITICAL)
        if not are_progress_bars_disabled():
            stack.callback(enable_progress_bars)
            disable_progress_bars()
        for name, value in (("HF_HUB_DISABLE_TELEMETRY", True), ("HF_HUB_DOWNLOAD_TIMEOUT", _SECONDS)):
            stack.callback(setattr, constants, name, getattr(constants, name))
            setattr(constants, name, value)
        yield
