"""A real card beside the CUDA stub: one program that runs on both, and what differs.

    python benchmarks/real_card.py --out card.json.gz
    batchfinder stub run --gpu h100 -- python benchmarks/real_card.py --out stub.json.gz
    python benchmarks/real_card.py --compare card.json.gz stub.json.gz

The first line is for a machine with a card, the others for any. Both need the same versions of PyTorch (`stub run`
has `--torch`) and of what builds models: transformers, timm, peft, bitsandbytes; without one of them its steps fail.
The parts are `properties`, what CUDA says of the card; `contexts`, what the driver holds after each library's first
use; `addresses`, where cudaMalloc puts blocks; `kernels`, which attention takes; and `steps`, training steps
allocation by allocation, many at once.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gzip
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # import from the repository

from batchfinder.training.child_process import build_with  # noqa: E402
from batchfinder.training.spec import StepOptions, WorkloadSpec  # noqa: E402
from batchfinder.units import GIB, MIB  # noqa: E402
from benchmarks.exactness import SIDE, TEXT, Cell, cells, spec_of  # noqa: E402

CARD = "H100"
"""Whose steps of `benchmarks/exactness.py` come first; the names of all are with it, whatever the card is."""
SECONDS = 120
"""After which a fork is ended."""
FIGURES = ("allocated", "reserved", "sizes", "segments")

IMAGE_NETS = (
    "resnet18", "resnet50", "resnext50_32x4d", "wide_resnet50_2", "densenet121", "efficientnet_b0", "efficientnetv2_s",
    "mobilenetv3_large_100", "regnety_016", "convnext_tiny", "convnextv2_nano", "vgg16_bn", "inception_v3",
    "mobilevit_s", "repvgg_a2", "hrnet_w18", "xception41", "dla34", "ghostnet_100", "nfnet_l0", "resnest26d",
    "swin_tiny_patch4_window7_224", "vit_small_patch16_224", "maxvit_tiny_rw_224", "poolformer_s12", "rexnet_100",
)  # fmt: skip
"""Of timm's, by which libraries they use."""


@dataclass(frozen=True)
class Taken:
    """A step that is taken on a card.

    Attributes:
        cell: its model and options.
        operator: that of `tests/builders/one_operator.py` which the model is; empty for a model by its name.
        expandable: whether the allocator's segments are expandable.
    """

    cell: Cell
    operator: str = ""
    expandable: bool = False

    @property
    def name(self) -> str:
        """Unlike any other's."""
        operator = f"{self.operator}: " if self.operator else ""
        return f"{operator}{self.cell.name}{', expandable segments' if self.expandable else ''}"

    @property
    def shares(self) -> int:
        """Of the card's memory, as many as forks at once have one each."""
        return 5 if self.cell.model in TEXT and self.cell.batch_size * self.cell.seq_len >= 8192 else 1

    def workload(self, folder: Path) -> WorkloadSpec:
        """How its model is built."""
        if self.operator:
            return WorkloadSpec("tests.builders.one_operator:build", {"operation": self.operator})
        if self.cell.model.startswith("timm/"):
            return self.cell.options.workload(self.cell.model)
        return spec_of(self.cell, folder)


def steps() -> Iterator[Taken]:
    """Convolutions, the steps of `benchmarks/exactness.py`, other ways to take a step, and operators alone."""
    for name, precision in product(IMAGE_NETS, ("fp32", "bf16-mixed", "16-mixed")):
        yield Taken(Cell(f"timm/{name}", CARD, StepOptions(precision=precision, optimizer="sgd-momentum"), 8, SIDE))
    by_name = {cell.name: cell for cell in (replace(cell, gpu=CARD) for cell in cells())}
    of_card = {cell.name for cell in cells() if cell.gpu == CARD}
    for name in sorted(by_name, key=lambda name: name not in of_card):
        yield Taken(by_name[name])
    lengths = {model: length for model, (length, _) in TEXT.items()}
    for model, precision in product(("bert", "gpt2", "llama", "vit", "resnet50"), ("fp32", "bf16-mixed")):
        cell = Cell(model, CARD, StepOptions(precision=precision), 8, lengths.get(model, SIDE))
        yield Taken(replace(cell, options=replace(cell.options, compile="model")))
        yield Taken(cell, expandable=True)
    for optimizer in ("adamw-8bit", "paged-adamw-8bit", "adafactor", "lion", "muon", "schedule-free", "adam", "sgd"):
        yield Taken(Cell("llama", CARD, StepOptions(precision="bf16-mixed", optimizer=optimizer), 4, 256))
    for model, quantization in product(("llama", "qwen2"), ("nf4", "nf4-double", "int8")):
        adapters = StepOptions(precision="bf16-mixed", lora=16, quantization=quantization)
        yield Taken(Cell(model, CARD, adapters, 4, lengths[model]))
    for model, mode in product(("llama", "bert", "resnet50", "vit"), ("forward", "inference")):
        yield Taken(Cell(model, CARD, StepOptions(mode=mode, precision="bf16-mixed"), 16, lengths.get(model, SIDE)))
    for model in ("llama", "gpt2"):
        in_backward = StepOptions(precision="bf16-true", optimizer_in_backward=True)
        yield Taken(Cell(model, CARD, in_backward, 4, lengths[model]))
        yield Taken(Cell(model, CARD, StepOptions(precision="bf16-true", compile="layers"), 4, lengths[model]))
    from tests.builders.one_operator import OPERATIONS

    for operator, precision in product(OPERATIONS, ("fp32", "bf16-mixed", "16-mixed")):
        options = StepOptions(precision=precision, optimizer="sgd")
        yield Taken(Cell("one operator", CARD, options, 512, 0), operator=operator)


def take_step(one: Taken, folder: Path) -> dict[str, Any]:
    """Peaks in bytes, and what the allocator did: sizes asked for, and the segments it took between which of them."""
    import torch

    from batchfinder.training.step import Step

    torch.set_num_threads(1)
    device, spec = torch.device("cuda", 0), one.workload(folder)
    workload = build_with(spec.builder, spec.arguments)
    torch.cuda.memory._record_memory_history(enabled="all", context=None, max_entries=5_000_000)
    torch.cuda.reset_peak_memory_stats()
    step = Step(workload, one.cell.step, device)
    workload.model.to(device, step.weights_dtype)
    step.run(one.cell.batch_size, one.cell.seq_len or None)
    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    sizes: list[int] = []
    segments: list[list[Any]] = []
    for entry in torch.cuda.memory._snapshot()["device_traces"][0]:
        if entry["action"] == "alloc":
            sizes.append(entry["size"])
        elif entry["action"].startswith("segment"):
            segments.append([entry["action"], entry["size"], len(sizes)])
    return {
        "allocated": stats["allocated_bytes.all.peak"],
        "reserved": stats["reserved_bytes.all.peak"],
        "retries": stats["num_alloc_retries"],
        "sizes": sizes,
        "segments": segments,
    }


def take_steps(listed: list[Taken], jobs: int, seconds: float, add: Callable[[dict[str, Any]], object]) -> None:
    """Each step in a fork of this process, `jobs` at once; those that the time does not suffice for are rows too."""
    import torch
    import transformers

    import batchfinder.models
    import batchfinder.training.optimizers
    import batchfinder.training.step  # noqa: F401

    with contextlib.suppress(ImportError):
        import timm  # noqa: F401
    assert not torch.cuda.is_initialized()  # as importing peft does it: no fork could use the card then
    transformers.logging.set_verbosity_error()
    end = time.monotonic() + seconds
    running: dict[int, tuple[Taken, Path]] = {}
    waiting = listed[::-1]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        while waiting or running:
            used = sum(one.shares for one, _ in running.values())
            if waiting and time.monotonic() < end and (not running or used + waiting[-1].shares <= jobs):
                one = waiting.pop()
                path = folder / str(len(waiting))
                process = os.fork()
                if process == 0:
                    if one.expandable:
                        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
                    _answer(path, lambda one=one: take_step(one, folder))
                running[process] = one, path
                continue
            if not running:
                break
            process, _ = os.waitpid(-1, 0)
            one, path = running.pop(process)
            add({"name": one.name, **_answered(path)})
    for one in reversed(waiting):
        add({"name": one.name, "error": "the time was over"})


def _answer(path: Path, work: Callable[[], Any]) -> None:
    """In a fork: write what a function returns, or what it raises, and end."""
    signal.alarm(SECONDS)
    try:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            result = work()
    except BaseException as error:
        said = f"{type(error).__name__}: {error}"
        result = {"error": said[:400], "traceback": traceback.format_exc()[-1500:]}
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(result))
    partial.rename(path)
    os._exit(0)


def _answered(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else {"error": "the process died"}


def in_fork(work: Callable[[], Any]) -> Any:
    """What a function returns in a process of its own, which may use the card."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "result"
        process = os.fork()
        if process == 0:
            _answer(path, work)
        os.waitpid(process, 0)
        return _answered(path)


def _cudart() -> Any:
    """The CUDA runtime that PyTorch has loaded."""
    import torch

    torch.cuda.init()
    return ctypes.CDLL(f"libcudart.so.{(torch.version.cuda or '').partition('.')[0]}")


def properties() -> dict[str, Any]:
    """What CUDA says of the card by the numbers of `cudaDeviceAttr`, what PyTorch says, and the versions."""
    import torch

    cudart, value = _cudart(), ctypes.c_int()
    attributes = {}
    for number in range(1, 160):
        if cudart.cudaDeviceGetAttribute(ctypes.byref(value), number, 0) == 0:
            attributes[str(number)] = value.value
    said = torch.cuda.get_device_properties(0)
    return {
        "attributes": attributes,
        "properties": {name: str(getattr(said, name)) for name in dir(said) if not name.startswith("_")},
        "free and total": torch.cuda.mem_get_info(),
        "versions": [torch.__version__, torch.backends.cudnn.version(), torch.cuda.nccl.version()],
    }


def contexts() -> dict[str, Any]:
    """Bytes that the driver counts as used beside what PyTorch has reserved, after one first use and the next."""
    import torch
    import torch.nn.functional as F
    from torch import nn
    from torch.nn.attention import SDPBackend, sdpa_kernel

    said: dict[str, Any] = {}

    def note(what: str, work: Callable[[], Any]) -> None:
        try:
            result = work()
            torch.cuda.synchronize()
            del result
        except Exception as error:
            said[what] = f"{type(error).__name__}: {error}"[:200]
            return
        free, total = torch.cuda.mem_get_info()
        said[what] = total - free - torch.cuda.memory_reserved()

    def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.ones(shape, dtype=dtype, device="cuda")

    def attention(kernel: SDPBackend, dtype: torch.dtype) -> None:
        query = ones(2, 4, 256, 64, dtype=dtype).requires_grad_()
        with sdpa_kernel(kernel):
            F.scaled_dot_product_attention(query, query, query).sum().backward()

    def adam(**how: bool) -> None:
        weight = nn.Parameter(ones(1024, 1024))
        weight.grad = ones(1024, 1024)
        torch.optim.AdamW([weight], **how).step()

    def group() -> None:
        import torch.distributed as dist

        with tempfile.TemporaryDirectory() as folder:
            dist.init_process_group("nccl", init_method=f"file://{folder}/group", rank=0, world_size=1)
            dist.all_reduce(ones(1024))

    def graph() -> None:
        x, captured = ones(1024, 1024), torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            x.relu()
        captured.replay()

    half = torch.bfloat16
    note("init", torch.cuda.init)
    note("empty tensor", lambda: torch.empty(1, device="cuda"))
    note("first kernel", lambda: ones(1024))
    note("sum", lambda: ones(1024, 1024).sum())
    note("product, fp32", lambda: ones(512, 512) @ ones(512, 512))
    note("product, bf16", lambda: ones(512, 512, dtype=half) @ ones(512, 512, dtype=half))
    note("linear with bias", lambda: nn.Linear(512, 512, device="cuda", dtype=half)(ones(512, 512, dtype=half)))
    note("attention, memory-efficient", lambda: attention(SDPBackend.EFFICIENT_ATTENTION, torch.float32))
    note("attention, flash", lambda: attention(SDPBackend.FLASH_ATTENTION, half))
    note("attention, cuDNN", lambda: attention(SDPBackend.CUDNN_ATTENTION, half))
    for dtype in (torch.float32, half):
        images, layer = ones(8, 64, 56, 56, dtype=dtype), nn.Conv2d(64, 64, 3, device="cuda", dtype=dtype)
        note(f"convolution, {dtype}", lambda layer=layer, images=images: layer(images).sum().backward())
    note("batch norm", lambda: nn.BatchNorm2d(64, device="cuda")(ones(8, 64, 56, 56)).sum().backward())
    note("LSTM", lambda: nn.LSTM(64, 64, device="cuda")(ones(16, 8, 64))[0].sum().backward())
    note("AdamW, foreach", lambda: adam(foreach=True))
    note("AdamW, fused", lambda: adam(fused=True))
    note("sort", lambda: ones(100_000).sort())
    note("FFT", lambda: torch.fft.rfft(ones(64, 4096)))
    note("NCCL, one rank", group)
    note("compiled", lambda: torch.compile(lambda x: (x * 2).relu().sum(-1))(ones(256, 256)))
    note("graph", graph)
    return said


def addresses() -> dict[str, Any]:
    """Where cudaMalloc puts blocks as others come and go: [bytes, address], or [-1 - which one goes, its address]."""
    cudart = _cudart()

    def as_pytorch_asks(r: random.Random) -> int:
        return r.choice((2 * MIB, 20 * MIB, 2 * MIB * r.randint(6, 400)))

    def sequence(seed: int, count: int, size: Callable[[random.Random], int], keep: float) -> list[list[int]]:
        r, held = random.Random(seed), 0
        events: list[list[int]] = []
        live: dict[int, tuple[int, int]] = {}
        for _ in range(count):
            nbytes = size(r)
            if live and (held + nbytes > 40 * GIB or r.random() > keep):
                index = r.choice(list(live))
                address, freed = live.pop(index)
                held -= freed
                assert cudart.cudaFree(ctypes.c_void_p(address)) == 0
                events.append([-1 - index, address])
                continue
            pointer = ctypes.c_void_p()
            assert cudart.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(nbytes)) == 0
            live[len(events)] = pointer.value or 0, nbytes
            held += nbytes
            events.append([nbytes, pointer.value or 0])
        for address, _ in live.values():
            cudart.cudaFree(ctypes.c_void_p(address))
        return events

    return {
        "2 MiB, none goes": sequence(1, 300, lambda r: 2 * MIB, 1.1),
        "20 MiB, none goes": sequence(2, 300, lambda r: 20 * MIB, 1.1),
        "512 MiB, none goes": sequence(3, 40, lambda r: 512 * MIB, 1.1),
        "less than 2 MiB": sequence(4, 300, lambda r: r.choice((512, 4096, 65536, MIB)), 0.7),
        "as PyTorch asks, few go": sequence(5, 400, as_pytorch_asks, 0.8),
        "as PyTorch asks, half go": sequence(6, 1500, as_pytorch_asks, 0.55),
        "large": sequence(7, 400, lambda r: 2 * MIB * r.randint(100, 2000), 0.7),
        "up to 64 MiB": sequence(8, 1500, lambda r: 2 * MIB * r.randint(1, 32), 0.6),
    }


def kernels() -> list[str]:
    """Which kernel PyTorch takes for each of some hundred attentions."""
    from tests.cuda_build.test_fake_device import chosen

    return chosen()


ALONE: dict[str, Callable[[], Any]] = {
    "properties": properties,
    "contexts": contexts,
    "addresses": addresses,
    "kernels": kernels,
}
"""Parts that have the card for themselves, one after the other."""


def compare(card: dict[str, Any], stub: dict[str, Any]) -> dict[str, Any]:
    """What differs between two results: for each part what the card says and what the stub says.

    Of addresses, the distances between blocks count, and not where the first one is.
    """
    found: dict[str, Any] = {}
    for part in ("attributes", "properties"):
        one, other = (each.get("properties", {}).get(part, {}) for each in (card, stub))
        found[part] = {name: [one[name], other.get(name)] for name in one if one[name] != other.get(name)}
    one, other = (each.get("contexts", {}) for each in (card, stub))
    found["contexts"] = {name: [one[name], other.get(name)] for name in one}
    found["addresses"] = {}
    for name, events in card.get("addresses", {}).items():
        both = zip(_distances(events), _distances(stub.get("addresses", {}).get(name, [])), strict=False)
        found["addresses"][name] = {"blocks": len(events), "alike": sum(a == b for a, b in both)}
    kernels_of = zip(card.get("kernels", ()), stub.get("kernels", ()), strict=False)
    found["kernels"] = sum(one != other for one, other in kernels_of)
    by_name = {row["name"]: row for row in stub["steps"]}
    equal = dict.fromkeys(FIGURES, 0)
    compared, different, left_out = 0, [], {}
    for row in card["steps"]:
        beside = by_name.get(row["name"], {"error": "not taken on the stub"})
        if "error" in row or "error" in beside:
            left_out[row["name"]] = row.get("error") or beside["error"]
            continue
        compared += 1
        same = {figure: row[figure] == beside[figure] for figure in FIGURES}
        for figure, is_same in same.items():
            equal[figure] += is_same
        if not all(same.values()):
            peaks = {figure: [row[figure], beside[figure]] for figure in ("allocated", "reserved")}
            different.append({"name": row["name"], **peaks, "first": _first_difference(row, beside)})
    return {**found, "steps": {"compared": compared, "equal": equal, "different": different, "left out": left_out}}


def _distances(events: list[list[int]]) -> list[list[int]]:
    first = next((address for _, address in events), 0)
    return [[nbytes, address - first] for nbytes, address in events]


def _first_difference(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any] | None:
    """Of the sizes asked for: the number of the first that differs, and some around it; None where all are equal."""
    sizes = one["sizes"], other["sizes"]
    if sizes[0] == sizes[1]:
        return None
    pairs = zip(*sizes, strict=False)
    first = next((n for n, (a, b) in enumerate(pairs) if a != b), min(map(len, sizes)))
    around = [each[max(0, first - 3) : first + 5] for each in sizes]
    return {"request": first, "of": [len(each) for each in sizes], "card": around[0], "stub": around[1]}


def main() -> None:
    """Take the parts, each complete in the file before the next begins; or compare two files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the file to write, .json.gz; of a comparison .json")
    parser.add_argument(
        "--parts", default=f"{','.join(ALONE)},steps", help="separated by commas (default: %(default)s)"
    )
    parser.add_argument("--only", default="", metavar="WORD", help="steps whose name has it")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="steps at once (default: the cores)")
    parser.add_argument("--seconds", type=float, default=1e9, help="for the steps")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("CARD", "STUB"), help="two files")
    asked = parser.parse_args()
    if asked.compare:
        card, stub = (json.loads(gzip.decompress(path.read_bytes())) for path in asked.compare)
        text = json.dumps(compare(card, stub), indent=1)
        if asked.out:
            asked.out.write_text(f"{text}\n")
        print(text)
        return
    if asked.out is None:
        parser.error("--out is needed: where the result goes")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    result: dict[str, Any] = {"steps": []}

    def write() -> None:
        partial = asked.out.with_name(f"{asked.out.name}.partial")
        partial.write_bytes(gzip.compress(json.dumps(result).encode()))
        partial.rename(asked.out)

    parts = asked.parts.split(",")
    for part in (part for part in ALONE if part in parts):
        started = time.monotonic()
        result[part] = in_fork(ALONE[part])
        said = result[part].get("traceback", "") if isinstance(result[part], dict) else ""
        print(f"{part}: {time.monotonic() - started:.1f} s {said}", flush=True)
        write()
    if "steps" in parts:
        started = time.monotonic()

        def add(row: dict[str, Any]) -> None:
            result["steps"].append(row)
            if "error" in row:
                print(f"{row['name']}: {row['error']}", flush=True)
            if len(result["steps"]) % 100 == 0:
                write()

        take_steps([one for one in steps() if asked.only in one.name], asked.jobs, asked.seconds, add)
        write()
        failed = sum("error" in row for row in result["steps"])
        print(f"steps: {len(result['steps'])}, {failed} failed, {time.monotonic() - started:.1f} s", flush=True)


if __name__ == "__main__":
    main()
