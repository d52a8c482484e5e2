"""Which of transformers' model types can be simulated: each with a head that is trained, from its default config.

A model type is given to batchfinder as a user would give it, as a config.json that names its head in `architectures`;
two steps are recorded on the fake GPU, in a process of its own, in each precision. Depth is cut to two layers where
the config has a number of layers. Nothing is downloaded.

    python benchmarks/coverage.py [--every 8] [--only bert --only llama] [--again]

Types whose result is in the file already are left as they are; `--again` tries those that failed once more.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import re
import sys
import tempfile
import time
import tomllib
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as Late
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # import from the repository

from batchfinder.devices import host_name
from batchfinder.errors import BatchFinderError
from batchfinder.recording.client import RecordingClient
from batchfinder.simulator.trace import Trace
from batchfinder.training.spec import RecordingJob, StepConfig, WorkloadSpec
from batchfinder.versions import installed

CHANGES = Path(__file__).with_name("coverage.toml")  # what default configs need so that they can be trained
RESULTS = Path(__file__).with_name("results")
PRECISIONS = ("bf16-mixed", "bf16-true")
CAPABILITY = (8, 0)
BATCH_SIZE = 2
SECONDS = 300  # for one type's recordings, on a busy machine

# What a type is fine-tuned for, by the Auto class that has it; the first that does counts.
TASKS = (
    ("vision-language", "IMAGE_TEXT_TO_TEXT"),
    ("speech to text", "SPEECH_SEQ_2_SEQ"),
    ("speech, CTC", "CTC"),
    ("audio classification", "AUDIO_CLASSIFICATION"),
    ("seq2seq", "SEQ_TO_SEQ_CAUSAL_LM"),
    ("masked", "MASKED_LM"),
    ("causal", "CAUSAL_LM"),
    ("image classification", "IMAGE_CLASSIFICATION"),
)
# Sequence lengths to try, longest last, since an image or a recording takes many tokens; None for the config's own.
SEQ_LENS: dict[str, tuple[int | None, ...]] = {
    "vision-language": (512, 2048, 4096, 8192, 64),
    "speech to text": (64, 512, 2048),
    "speech, CTC": (None,),
    "audio classification": (None,),
    "image classification": (None, 64),
}
LAYERS = 2
DEPTHS = frozenset({
    "num_hidden_layers", "num_layers", "n_layer", "n_layers", "layers", "depth", "encoder_layers", "decoder_layers",
    "num_encoder_layers", "num_decoder_layers", "encoder_num_hidden_layers", "decoder_num_hidden_layers",
    "speech_encoder_layers", "t2u_encoder_layers", "t2u_decoder_layers", "num_self_attends_per_block", "num_blocks",
})  # fmt: skip


def model_types() -> dict[str, tuple[str, str]]:
    """Each model type with a trainable head: what it is trained for, and its class."""
    from transformers.models.auto import modeling_auto

    found: dict[str, tuple[str, str]] = {}
    for task, mapping in TASKS:
        for model_type, names in getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES").items():
            found.setdefault(model_type, (task, names if isinstance(names, str) else names[0]))
    return dict(sorted(found.items()))


def config_of(model_type: str, architecture: str) -> dict[str, Any]:
    """What stands in the config.json: the default figures, with two layers where that is a valid config."""
    import transformers

    kind = transformers.CONFIG_MAPPING[model_type]
    changes: dict[str, Any] = tomllib.loads(CHANGES.read_text())["figures"].get(model_type, {})
    default = kind(**copy.deepcopy(changes))
    error: Exception | None = None
    for lists in (False, True, None):
        try:
            config = default if lists is None else kind(**_merged(_shallow(default, lists), changes))
            _agree(config)
            figures = json.loads(config.to_json_string(use_diff=True))
            kind.from_dict(json.loads(json.dumps(figures), object_hook=_infinite))
        except Exception as failed:  # a list of the default's that has an entry for each layer, as a rule
            error = failed
            continue
        return {**figures, "model_type": model_type, "architectures": [architecture]}
    assert error is not None
    raise error


def _infinite(mapping: dict[str, Any]) -> Any:
    """How transformers writes numbers that JSON does not have."""
    return float(mapping["__float__"]) if set(mapping) == {"__float__"} else mapping


def _merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Both, those of the other where they differ."""
    merged = copy.deepcopy(one)
    for name, value in other.items():
        inner = merged.get(name)
        merged[name] = _merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return merged


def _agree(config: Any) -> None:
    """Make parts of a default config agree: what an encoder gives is as wide as the text, and each token is a token."""
    text = config.get_text_config()
    parts = [config]
    tokens = [0]
    while parts:
        part = parts.pop()
        parts += [inner for inner in vars(part).values() if hasattr(inner, "to_dict")]
        named = {name: value for name, value in vars(part).items() if name.endswith(("token_id", "token_index"))}
        tokens += [value for value in named.values() if isinstance(value, int)]
        if hasattr(part, "out_hidden_size") and hasattr(text, "hidden_size"):
            part.out_hidden_size = text.hidden_size
    if config.sub_configs and isinstance(getattr(text, "vocab_size", None), int):
        text.vocab_size = max(text.vocab_size, max(tokens) + 1)


def _shallow(config: Any, lists: bool) -> dict[str, Any]:
    """The arguments that make a config of this kind with two layers, `lists` with an entry for each layer included."""
    changed: dict[str, Any] = {}
    for name, value in config.to_dict().items():
        inner = getattr(config, str(name), None)
        if hasattr(inner, "to_dict"):
            own = json.loads(json.dumps(inner.to_diff_dict()), object_hook=_infinite)
            changed[name] = {**own, "model_type": inner.model_type, **_shallow(inner, lists)}
        elif name in DEPTHS and type(value) is int and value > LAYERS:
            changed[name] = LAYERS
        elif name == "num_kv_shared_layers" and value:
            changed[name] = 0
    full = {value for name, value in config.to_dict().items() if name in changed and type(value) is int}
    if lists:
        for name, value in config.to_dict().items():
            if type(value) is list and len(value) in full:
                changed[name] = value[:LAYERS]
    return changed


def workload(spec: str, architecture: str) -> Any:
    """In the recording process: the workload of a config.json, which must be of the head that was asked for."""
    from batchfinder.models import build_workload

    made = build_workload(spec)
    built = type(made.model).__name__
    if built != architecture:
        raise TypeError(f"a {built} was built, not the {architecture} of the config")
    return made


class Recorder:
    """A process that records many types, each in a fork; a new one where a type took too long."""

    def __init__(self) -> None:
        self._client: RecordingClient | None = None

    def traces(self, specs: list[tuple[WorkloadSpec, StepConfig, int | None]]) -> list[Trace | str]:
        """For each precision the trace, or the error that its recording ended with."""
        if self._client is None:
            self._client = RecordingClient(WorkloadSpec("batchfinder.models:build_workload", {"spec": "bert-base"}), 2)
        futures: list[Future[Trace]] = [
            self._client.submit(RecordingJob(how, CAPABILITY, BATCH_SIZE, seq_len, spec))
            for spec, how, seq_len in specs
        ]
        wait(futures, SECONDS)
        answers: list[Trace | str] = []
        for future in futures:
            try:
                answers.append(future.result(0))
            except Late:
                answers.append(f"it took longer than {SECONDS} s")
            except BatchFinderError as error:
                answers.append(str(error))
        if not all(future.done() for future in futures):
            self.close()
        return answers

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
        self._client = None


def covered(model_type: str, task: str, architecture: str, recorder: Recorder, folder: Path) -> dict[str, Any]:
    """One type's row."""
    row: dict[str, Any] = {"task": task, "architecture": architecture}
    start = time.perf_counter()
    try:
        figures = config_of(model_type, architecture)
    except Exception as error:
        return {**row, "failed": {"config": reason(str(error))}}
    path = folder / model_type / "config.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(figures))
    spec = WorkloadSpec("benchmarks.coverage:workload", {"spec": str(path), "architecture": architecture})
    answers: list[Trace | str] = []
    seq_lens = SEQ_LENS.get(task, (64, 512, 2048))
    for number, seq_len in enumerate(seq_lens):
        answers = recorder.traces([(spec, StepConfig(precision=precision), seq_len) for precision in PRECISIONS])
        row["seq_len"] = seq_len
        wrong_length = all(isinstance(answer, str) and "seq_len: " in answer for answer in answers)
        if not wrong_length or number == len(seq_lens) - 1:
            break
    row["seconds"] = round(time.perf_counter() - start, 1)
    failed: dict[str, str] = {}
    for precision, answer in zip(PRECISIONS, answers, strict=True):
        if isinstance(answer, str):
            failed[precision] = reason(answer)
        else:
            row[precision] = summary(answer)
    return {**row, "failed": failed} if failed else row


def reason(said: str) -> str:
    """The end of an error: what went wrong, without the way there and without folders of this machine."""
    inner = re.search(r"figures that transformers accepts \((.*)\)\.?$", said, re.DOTALL)
    lines = [line.strip() for line in said.splitlines() if line.strip() and "Give the model fixed shapes" not in line]
    text = " ".join(inner[1].split()) if inner else lines[-1]
    return re.sub(r"FakeTensor\(.*?\)(?=,| )", "a number", re.sub(r"/\S*/", "", text))[:220]


def summary(trace: Trace) -> dict[str, Any]:
    """What a recording came to: blocks, the most bytes alive at once, weights with a gradient, and assumptions."""
    alive = most = 0
    for event in trace.structure.order:
        alive += trace.sizes[event] if event >= 0 else -trace.sizes[~event]
        most = max(most, alive)
    bytes_of = {
        kind: sum(size for size, its in zip(trace.sizes, trace.structure.kinds, strict=True) if its == kind)
        for kind in ("parameter", "gradient")
    }
    return {
        "blocks": len(trace.sizes),
        "most_bytes": most,
        "gradient_bytes": bytes_of["gradient"],
        "parameter_bytes": bytes_of["parameter"],
        "assumptions": [text for text in trace.unmodelled if text.startswith("a ") or ": " in text],
    }


def main() -> None:
    """Record what is not in the file yet, writing it after each type, and print how many work."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1, help="only each N-th type (default: all)")
    parser.add_argument("--only", action="append", default=[], metavar="TYPE", help="only these types")
    parser.add_argument("--again", action="store_true", help="try what failed once more")
    parser.add_argument("--out", type=Path, default=RESULTS / f"coverage-{os.cpu_count()}-cores.json")
    arguments = parser.parse_args()
    versions = installed("torch", "transformers", "timm", "scipy")  # some types need the last two
    types = model_types()
    rows: dict[str, Any] = {}
    if arguments.out.exists():
        before = json.loads(arguments.out.read_text())
        rows = before["types"] if before["versions"] == versions else {}
    chosen = arguments.only or list(types)[:: arguments.every]
    recorder = Recorder()
    with tempfile.TemporaryDirectory() as folder:
        for model_type in chosen:
            done = rows.get(model_type)
            if done is not None and not arguments.only and not (arguments.again and "failed" in done):
                continue
            rows[model_type] = row = covered(model_type, *types[model_type], recorder, Path(folder))
            print(model_type, row["architecture"], row.get("seconds"), row.get("failed", "works"), flush=True)
            result = {
                "benchmark": "coverage",
                "command": "python benchmarks/coverage.py",
                "date": datetime.now(UTC).date().isoformat(),
                "hardware": {"cpu": host_name(), "cores": os.cpu_count(), "gpu": None},
                "versions": versions,
                "python": platform.python_version(),
                "types_with_a_head": len(types),
                "types": dict(sorted(rows.items())),
            }
            arguments.out.parent.mkdir(exist_ok=True)
            arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    recorder.close()
    works = sum("failed" not in rows[model_type] for model_type in chosen)
    print(f"{works} of {len(chosen)} types: {works / len(chosen):.1%}")


if __name__ == "__main__":
    main()
