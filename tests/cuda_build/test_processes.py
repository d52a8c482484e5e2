"""Programs of several processes and of several ranks, and ordinary scripts, on the stub."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from batchfinder.stub_cards import open_session, stub_card
from batchfinder.testing import CudaStubFixture, StubProcessFailed

pytestmark = pytest.mark.cuda_build

ROOT = Path(__file__).parents[2]

DDP = """
import json, os, sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
rank = dist.get_rank()
torch.cuda.set_device(rank)
torch.manual_seed(rank)
model = DistributedDataParallel(torch.nn.Linear(16, 16).cuda(), device_ids=[rank])
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(3):
    model(torch.full((4, 16), float(rank + step), device="cuda")).square().mean().backward()
    optimizer.step(); optimizer.zero_grad()
weights = [None] * dist.get_world_size()
dist.all_gather_object(weights, model.module.weight.detach().cpu().tolist())
objects = [{"from": rank}]
dist.broadcast_object_list(objects, src=1)
free = torch.tensor([torch.cuda.mem_get_info()[0]], device="cuda")
dist.all_reduce(free, op=dist.ReduceOp.MIN)
print("RANK" + json.dumps([rank, weights[0] == weights[1], objects[0]["from"], free.item() >> 30]), flush=True)
dist.destroy_process_group()
"""


def test_two_ranks_under_torchrun(cuda_stub: CudaStubFixture, tmp_path: Path) -> None:
    """DDP with a device for NCCL's group: weights stay equal though the ranks began otherwise, objects come across."""
    script = tmp_path / "train.py"
    script.write_text(DDP)
    cards = [stub_card("A100", 16 << 30), stub_card("A100", 16 << 30, held_bytes=4 << 30)]
    with open_session(cards) as session:
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", str(script)],
            env={**os.environ, **session.variables()}, capture_output=True, text=True, timeout=200,
        )  # fmt: skip
        report = session.report()
    ranks = sorted(json.loads(rank) for rank in re.findall(r"RANK(\[.*?\])", done.stdout))
    assert ranks == [[0, True, 1, 11], [1, True, 1, 11]], done.stderr[-3000:]
    assert report.unwritten == ()


FINDER = """
import json, sys, torch, pytorch_lightning as pl
from batchfinder import BatchFinder
from tests.lightning import nets
module = nets.Transformer(2, rows=4096, seq_len=64, width=128)
module.embed = torch.nn.Embedding(int(sys.argv[1]), 128)  # whose gradients are a good part of the memory
class Watch(pl.Callback):
    seen = []
    def on_fit_start(self, trainer, pl_module):
        self.seen.append(torch.cuda.memory_allocated())
    def on_train_batch_end(self, *_):
        self.peak = torch.cuda.max_memory_allocated()
finder = BatchFinder(cache=False, tolerance=0.05, headroom=0.1)
trainer = nets.trainer(accelerator="gpu", devices=2, strategy="ddp", callbacks=[Watch(), finder, last := Watch()],
                       max_epochs=-1, max_steps=20)
trainer.fit(module)
(outcome,) = finder.results["fit"].values()
tried = max(trial.measurement.peak_allocated_bytes or 0 for trial in outcome.trials)
print("FOUND" + json.dumps([trainer.global_rank, finder.batch_size, trainer.global_step, len(outcome.trials),
                            sum(not trial.fits for trial in outcome.trials), Watch.seen[0] == Watch.seen[1],
                            (last.peak - tried) >> 20, torch.cuda.memory_stats()["num_ooms"]]), flush=True)
"""


def found_on_two_cards(folder: Path, text: str, argument: str, held: int = 0) -> list[list[Any]]:
    """What both ranks of a script print after FOUND, by rank; of the second card so many bytes are in use."""
    script = folder / "train.py"
    script.write_text(text)
    with open_session([stub_card("A100", 2 << 30), stub_card("A100", 2 << 30, held_bytes=held)]) as session:
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", str(script), argument],
            env={**os.environ, **session.variables(), "PYTHONPATH": f"{ROOT}:{session.variables()['PYTHONPATH']}"},
            capture_output=True, text=True, timeout=250,
        )  # fmt: skip
    ranks = sorted(json.loads(rank) for rank in re.findall(r"FOUND(\[.*?\])", done.stdout))
    assert len(ranks) == 2, done.stdout[-2000:] + done.stderr[-3000:]
    return ranks


@pytest.mark.parametrize(("rows", "held"), [pytest.param(60000, 512 << 20, marks=pytest.mark.exhaustive), (400000, 0)])
def test_the_callback_with_ddp_on_two_cards(cuda_stub: CudaStubFixture, tmp_path: Path, rows: int, held: int) -> None:
    """Both ranks find one size, that of the fuller card, and train on: tries build DDP's buckets anew as training does.

    What is allocated after the search is what was before, and no more in training than a try took. Predictions know of
    the buckets, so that few sizes are tried.
    """
    first, second = found_on_two_cards(tmp_path, FINDER, str(rows), held)
    size, steps, tries, failed, as_before, more_mib, ooms = first[1:]
    assert first[1:6] == second[1:6]
    assert (steps, as_before) == (20, True)
    copy_mib = 16 + (rows * 128 * 4 >> 20)  # of the gradients, which NCCL may hold or not, and no second
    assert -copy_mib < min(more_mib, second[6]) <= max(more_mib, second[6]) <= 0
    assert tries <= 5
    assert size > 100
    assert ooms <= failed + 1  # a failure that surprises is tried twice


SHARDED_FINDER = """
import json, sys, torch, pytorch_lightning as pl
from pytorch_lightning.strategies import FSDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from batchfinder import BatchFinder

class Block(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512))

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.batch_size, self.layers = 8, None
    def configure_model(self):
        if self.layers is None:
            self.layers = nn.Sequential(*[Block() for _ in range(8)])
            if sys.argv[1] == "fsdp2":
                for each in (*self.layers, self.layers):
                    fully_shard(each, mesh=self.device_mesh["data_parallel"])
    def training_step(self, batch, batch_idx):
        return self.layers(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())
    def train_dataloader(self):
        return DataLoader(torch.zeros(60000, 512), self.batch_size)

class Watch(pl.Callback):
    seen = []
    def on_fit_start(self, trainer, pl_module):
        self.seen.append(torch.cuda.memory_allocated())
    def on_train_start(self, trainer, pl_module):
        torch.cuda.reset_peak_memory_stats()
        self.retries = -torch.cuda.memory_stats()["num_alloc_retries"]
    def on_train_end(self, trainer, pl_module):
        self.peak = torch.cuda.max_memory_allocated()
        self.retries += torch.cuda.memory_stats()["num_alloc_retries"]

finder, last = BatchFinder(cache=False), Watch()
strategy = ModelParallelStrategy() if sys.argv[1] == "fsdp2" else FSDPStrategy(auto_wrap_policy={Block})
trainer = pl.Trainer(accelerator="gpu", devices=2, strategy=strategy, callbacks=[Watch(), finder, last], max_epochs=-1,
                     max_steps=20, logger=False, enable_checkpointing=False, enable_progress_bar=False,
                     enable_model_summary=False, precision="bf16-true" if sys.argv[1] == "fsdp2" else "bf16-mixed")
trainer.fit(Net())
(outcome,) = finder.results["fit"].values()
tried = max(trial.measurement.peak_allocated_bytes or 0 for trial in outcome.trials)
print("FOUND" + json.dumps([trainer.global_rank, finder.batch_size, trainer.global_step, last.retries,
                            Watch.seen[0] == Watch.seen[1], last.peak <= tried]), flush=True)
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_the_callback_with_shards_on_two_cards(cuda_stub: CudaStubFixture, tmp_path: Path, strategy: str) -> None:
    """FSDPStrategy, and FSDP2 in a ModelParallelStrategy: both ranks find what the fuller card trains with."""
    sizes = []
    for held in (0, 512 << 20):
        ranks = found_on_two_cards(tmp_path, SHARDED_FINDER, strategy, held)
        size = ranks[0][1]
        assert ranks == [[rank, size, 20, 0, True, True] for rank in (0, 1)]
        sizes.append(size)
    assert 0.6 * sizes[0] < sizes[1] < 0.8 * sizes[0]


LOOP = """
import json, os, sys, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from batchfinder import tune_batch_size
rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
layers = [nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128), nn.GELU(), nn.Linear(128, 512)]
net = nn.Sequential(nn.Embedding(500000, 128), *layers).cuda()  # whose gradients are an eighth of the memory
model = DistributedDataParallel(net, gradient_as_bucket_view=sys.argv[1] == "views")
optimizer = torch.optim.AdamW(model.parameters())
def train_step(batch):
    model(batch.cuda()).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
def make_batch(batch_size, seq_len=None):
    return torch.zeros(batch_size, 64, dtype=torch.long)
before = torch.cuda.memory_allocated()
found = tune_batch_size(train_step, make_batch, [model, optimizer], max_batch_size=100000, cache=False)
as_before = torch.cuda.memory_allocated() == before
torch.cuda.reset_peak_memory_stats()
retries = -torch.cuda.memory_stats()["num_alloc_retries"]
for _ in range(20):
    train_step(make_batch(found.batch_size))
retries += torch.cuda.memory_stats()["num_alloc_retries"]
tried = max(trial.measurement.peak_allocated_bytes or 0 for trial in found.result.trials)
print("FOUND" + json.dumps([rank, found.batch_size, retries, as_before, torch.cuda.max_memory_allocated() <= tried,
                            len(found.result.trials) <= 4]), flush=True)
dist.destroy_process_group()
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("buckets", ["copies", "views"])
def test_a_loop_with_ddp_on_two_cards(cuda_stub: CudaStubFixture, tmp_path: Path, buckets: str) -> None:
    """The size found trains beside DDP's buckets, those of the first step, which NCCL may still hold, among them."""
    ranks = found_on_two_cards(tmp_path, LOOP, buckets)
    size = ranks[0][1]
    assert ranks == [[rank, size, 0, True, True, True] for rank in (0, 1)]
    assert size > 100


TUNED_TRAINER = """
import json, os, sys, tempfile, torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from batchfinder import tune_trainer

class Texts(Dataset):
    def __init__(self, number): self.number = number
    def __len__(self): return self.number
    def __getitem__(self, at):
        return {"input_ids": torch.zeros(64, dtype=torch.long), "labels": torch.zeros(64, dtype=torch.long)}

class Evaluations(TrainerCallback):
    count = 0
    def on_evaluate(self, *_, **__): self.count += 1

torch.manual_seed(0)
config = GPT2Config(n_layer=2, n_embd=256, n_head=4, vocab_size=int(sys.argv[1]), n_positions=64)
arguments = TrainingArguments(tempfile.mkdtemp(), max_steps=20, eval_strategy="steps", eval_steps=10, save_strategy="no",
    per_device_eval_batch_size=4, prediction_loss_only=True, logging_strategy="no", report_to=[], disable_tqdm=True,
    per_device_train_batch_size=10000)
trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=Texts(10 ** 6), eval_dataset=Texts(40),
                  callbacks=[evaluations := Evaluations()])
before = torch.cuda.memory_allocated()
found = tune_trainer(trainer, cache=False, target_batch_size=20000)
as_before = torch.cuda.memory_allocated() == before
arguments.gradient_accumulation_steps = 1
torch.cuda.reset_peak_memory_stats()
retries = -torch.cuda.memory_stats()["num_alloc_retries"]
trainer.train()
retries += torch.cuda.memory_stats()["num_alloc_retries"]
tried = max(trial.measurement.peak_allocated_bytes or 0 for trial in found.result.trials)
print("FOUND" + json.dumps([int(os.environ["RANK"]), found.batch_size, trainer.state.global_step, evaluations.count, retries,
    as_before, torch.cuda.max_memory_allocated() <= tried]), flush=True)
"""


def test_a_trainer_with_ddp_on_two_cards(cuda_stub: CudaStubFixture, tmp_path: Path) -> None:
    """What transformers' Trainer is tuned to trains on both cards, evaluations in between, though one is fuller."""
    ranks = found_on_two_cards(tmp_path, TUNED_TRAINER, "60000", held=256 << 20)
    size = ranks[0][1]
    assert ranks == [[rank, size, 20, 2, 0, True, True] for rank in (0, 1)]
    assert size > 10


SHARDED = """
import json, os, sys, torch, torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="64", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
sys.modules["torch.distributed.rendezvous"]._create_c10d_store = lambda *a, **k: dist.HashStore()
c10d._store_based_barrier = lambda *a, **k: None
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM
dist.init_process_group("nccl")
config = LlamaConfig(hidden_size=8192, intermediate_size=28672, num_hidden_layers=4, num_attention_heads=64,
                     num_key_value_heads=8, vocab_size=128256, use_cache=False)
with torch.device("meta"):
    model = LlamaForCausalLM(config)
policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
for layer in model.model.layers:
    fully_shard(layer, mp_policy=policy)
fully_shard(model, mp_policy=policy)
model.to_empty(device="cuda")
optimizer = torch.optim.AdamW(model.parameters())
ids = torch.zeros(1, 4096, dtype=torch.long, device="cuda")
for step in range(2):
    model(input_ids=ids, labels=ids).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step(); optimizer.zero_grad()
print("PEAKS" + json.dumps([torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]))
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("values", ["none", "small"])
def test_one_rank_of_sixty_four_alone(cuda_stub: CudaStubFixture, tmp_path: Path, values: str) -> None:
    """FSDP2 of four layers of a 70B model on an H100: a shard of the weights, and what is gathered; DTensors are followed."""
    script = tmp_path / "rank.py"
    script.write_text(SHARDED)
    with open_session([stub_card("H100")], ranks=False, values=values) as session:
        done = subprocess.run(
            [sys.executable, str(script)],
            env={**os.environ, **session.variables()},
            capture_output=True,
            text=True,
            timeout=200,
        )
    allocated, reserved = json.loads(done.stdout.partition("PEAKS")[2] or "[0, 0]")
    assert 15 << 30 < allocated <= reserved < 40 << 30, done.stderr[-3000:]


TRAINER = """
import random, sys, torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

class Texts(Dataset):
    def __init__(self, number):
        rng = random.Random(number)
        self.lengths = [rng.randint(10, 60) for _ in range(number)]
    def __len__(self): return len(self.lengths)
    def __getitem__(self, at):
        return {"input_ids": [1 + at % 98] * self.lengths[at], "labels": at % 2}

def collate(rows):
    longest = max(len(row["input_ids"]) for row in rows)
    ids = torch.tensor([row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in rows])
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": torch.tensor([row["labels"] for row in rows])}

config = BertConfig(vocab_size=99, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128)
arguments = TrainingArguments(sys.argv[1], per_device_train_batch_size=16, num_train_epochs=2, fp16=True, logging_steps=1,
    eval_strategy="epoch", save_strategy="epoch", report_to=[], dataloader_num_workers=2, dataloader_pin_memory=True)
trainer = Trainer(BertForSequenceClassification(config), arguments, train_dataset=Texts(64), eval_dataset=Texts(16), data_collator=collate)
trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
assert len(losses) == 8 and all(0.1 < float(loss) < 5 for loss in losses), losses
assert all(entry["grad_norm"] == entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry)
"""


def test_an_ordinary_script(cuda_stub: CudaStubFixture, tmp_path: Path) -> None:
    """transformers' Trainer with a scaler, padding, workers, pinned memory, evaluation and checkpoints, as it is."""
    script = tmp_path / "train.py"
    script.write_text(TRAINER)
    seen = cuda_stub(gpu="T4").run_script(script, str(tmp_path / "out"))
    assert seen.exit_code == 0, seen.output[-3000:]
    assert len(list((tmp_path / "out").glob("checkpoint-*"))) == 2
    assert seen.peak_allocated_bytes > 1 << 20
    assert (seen.num_ooms, seen.report.unwritten) == (0, ())


QLORA = """
import sys, torch, bitsandbytes, peft
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig
config = LlamaConfig(hidden_size=1024, intermediate_size=2048, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4, vocab_size=8000)
AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(sys.argv[1])
quantized = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16, bnb_4bit_quant_type="nf4")
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], quantization_config=quantized, device_map={"": 0})
assert model.model.layers[0].mlp.up_proj.weight.dtype == torch.uint8
model = peft.get_peft_model(peft.prepare_model_for_kbit_training(model), peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
optimizer = bitsandbytes.optim.PagedAdamW8bit(model.parameters())
ids = torch.randint(0, 8000, (2, 256)).cuda()
for step in range(2):
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward(); optimizer.step(); optimizer.zero_grad()
"""


def test_qlora(cuda_stub: CudaStubFixture, tmp_path: Path) -> None:
    """bitsandbytes' own CUDA library, whose symbols the stub has read too."""
    pytest.importorskip("bitsandbytes")
    script = tmp_path / "train.py"
    script.write_text(QLORA)
    seen = cuda_stub(gpu="RTX 4090").run_script(script, str(tmp_path / "model"))
    assert seen.exit_code == 0, seen.output[-3000:]
    assert 30 << 20 < seen.peak_allocated_bytes < 2 << 30


LONGFORMER = """
from transformers import LongformerConfig, LongformerForSequenceClassification  # before torch, which it asks for
import torch
from transformers.models.longformer.modeling_longformer import LongformerSelfAttention
found, indices_of = [], LongformerSelfAttention._get_global_attn_indices
def seen(mask):
    found.append(indices_of(mask))
    return found[-1]
LongformerSelfAttention._get_global_attn_indices = staticmethod(seen)
config = LongformerConfig(vocab_size=99, attention_window=[16] * 2, num_hidden_layers=2, hidden_size=32,
                          num_attention_heads=2, intermediate_size=32, max_position_embeddings=130, pad_token_id=1)
model = LongformerForSequenceClassification(config).cuda()
batch = {name: torch.ones(3, 64, dtype=torch.long).cuda() for name in ("input_ids", "attention_mask")}
model(**batch, labels=torch.zeros(3, dtype=torch.long).cuda()).loss.backward()
print("GLOBAL", [(int(most), *map(len, local)) for most, local, *_ in found])
"""


@pytest.mark.exhaustive
def test_a_mask_in_floating_point_is_followed(tmp_path: Path) -> None:
    """Longformer attends globally to one token of each row, and says so in floats; transformers looks for torch first."""
    script = tmp_path / "longformer.py"
    script.write_text(LONGFORMER)
    with open_session([stub_card("A100", 16 << 30)]) as session:
        environment = {**os.environ, **session.variables()}
        done = subprocess.run(
            [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=200
        )
        report = session.report()
    assert "GLOBAL [(1, 3, 3), (1, 3, 3)]" in done.stdout, done.stderr[-3000:]
    assert report.words() == ()


PREFETCH = """
import torch
side = torch.cuda.Stream()
for _ in range(8):
    batch = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    batch.record_stream(side)
    del batch
"""


@pytest.mark.exhaustive
@pytest.mark.exhaustive
def test_both_ends_of_what_other_streams_hold(cuda_stub: CudaStubFixture, tmp_path: Path) -> None:
    """A batch that another stream uses is free at once, or not before the host waits: the range is told."""
    script = tmp_path / "prefetch.py"
    script.write_text(PREFETCH)
    command = [sys.executable, "-m", "batchfinder", "stub", "run", "--gpu", "a100", "--count", "2", "--events"]
    told = {
        end: subprocess.run(
            [*command, end, "--", sys.executable, str(script)], capture_output=True, text=True, timeout=200
        ).stderr
        for end in ("both", "late")
    }
    tail = " MiB reserved at most, in one process"
    assert told == {
        "both": f"batchfinder: cuda:0 had 64 to 512{tail}, by when work on other streams is done\n",
        "late": f"batchfinder: cuda:0 had 512{tail}\n",
    }


def test_two_processes_on_one_card(cuda_stub: CudaStubFixture) -> None:
    """Those of one job share what the card has."""

    def share() -> list[int]:
        import multiprocessing

        import torch

        torch.empty(3 << 30, dtype=torch.uint8, device="cuda")
        held = torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
        pool = multiprocessing.get_context("spawn").Pool(1)
        free = pool.apply(torch.cuda.mem_get_info)[0]
        pool.terminate()
        return [free >> 20, torch.cuda.mem_get_info()[0] >> 20, held.numel() >> 30]

    seen = cuda_stub(gpu="A100", memory="8GiB").run(share)
    assert seen.result == [5 << 10, 5 << 10, 2]


def test_ends_of_processes(cuda_stub: CudaStubFixture, tmp_path: Path) -> None:
    """A process that dies, one that hangs, a script that fails, and an error that is the function's own."""

    def die() -> None:
        import os

        print("last words", flush=True)
        os.abort()

    def hang() -> None:
        import time

        time.sleep(60)

    def fail() -> None:
        raise KeyError("mine")

    with pytest.raises(StubProcessFailed, match=r"die ended with -6:\nlast words") as caught:
        cuda_stub().run(die)
    assert caught.value.exit_code == -6
    with pytest.raises(StubProcessFailed, match="hang, after 8 s, ended with -9"):
        cuda_stub(timeout=8).run(hang)
    with pytest.raises(KeyError, match="mine") as own:
        cuda_stub().run(fail)
    assert "in a process on the CUDA stub:" in own.value.__notes__[0]
    script = tmp_path / "exits.py"
    script.write_text("import sys\nprint('so long')\nsys.exit(5)\n")
    ended = cuda_stub().run_script(script)
    assert (ended.exit_code, ended.output) == (5, "so long\n")


def sweep(*arguments: str, **more: Any) -> dict[str, Any]:
    """The command line's answer."""
    command = [sys.executable, "-m", "batchfinder", *arguments, "--json"]
    done = subprocess.run(command, env={**os.environ, **more}, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@pytest.mark.exhaustive
def test_a_sweep_by_real_tries(cuda_stub: CudaStubFixture, tmp_path: Path) -> None:
    """Sizes that run and sizes that do not, on a card that is named: PyTorch's own word; and the next start asks the cache."""
    options = ("sweep", "--device", "cuda", "--gpu", "t4", "--model", "bert-base", "--seq-len", "512")
    (first,) = sweep(*options, BATCHFINDER_CACHE=str(tmp_path))["rows"]
    assert (first["gpu"], first["source"], first["stopped_by"]) == ("T4", "stub", "out_of_memory")
    assert first["max_batch_size"] == 42
    assert first["peak_reserved_bytes"] <= first["budget_bytes"]
    (again,) = sweep(*options, BATCHFINDER_CACHE=str(tmp_path))["rows"]
    assert (again["max_batch_size"], again["source"], again["trials"]) == (42, "cache", 1)


def test_a_card_of_the_stub_is_found_like_a_real_one(cuda_stub: CudaStubFixture, tmp_path: Path) -> None:
    """A sweep within `stub run` asks nvidia-smi and PyTorch for the card, and measures on it."""
    command = ["stub", "run", "--gpu", "t4", "--", sys.executable, "-m", "batchfinder", "sweep", "--model", "bert-base"]
    (row,) = sweep(*command, "--seq-len", "512", "--max-batch-size", "2", BATCHFINDER_CACHE=str(tmp_path))["rows"]
    assert (row["gpu"], row["source"], row["max_batch_size"], row["stop"]) == ("T4", "measured", 2, "cap")


def test_runs_share_imports_and_nothing_else(cuda_stub: CudaStubFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has cards, settings of the allocator, environment, folder and modules' attributes of its own."""

    def seen(attribute: str) -> dict[str, Any]:
        import json  # which is there

        import torch

        before = vars(json).get(attribute)
        setattr(json, attribute, True)
        torch.empty(1, device="cuda")
        (segment,) = torch.cuda.memory_snapshot()
        return {
            "attribute": before,
            "cards": torch.cuda.device_count(),
            "name": torch.cuda.get_device_name(0),
            "expandable": segment["is_expandable"],
            "mine": os.environ.get("MINE"),
            "folder": os.getcwd(),
            "process": os.getpid(),
            "parent": os.getppid(),
        }

    first = cuda_stub(gpu="T4").run(seen, "found").result
    monkeypatch.setenv("MINE", "yes")
    monkeypatch.chdir("/")
    second = cuda_stub(gpu="H100", count=2, allocator="expandable_segments:True").run(seen, "found").result
    assert first | {"process": 0, "parent": 0} == {
        "attribute": None,
        "cards": 1,
        "name": "NVIDIA T4",
        "expandable": False,
        "mine": None,
        "folder": first["folder"],
        "process": 0,
        "parent": 0,
    }
    assert (second["attribute"], second["cards"], second["expandable"]) == (None, 2, True)
    assert "H100" in second["name"]
    assert (second["mine"], second["folder"]) == ("yes", "/")
    assert first["parent"] == second["parent"] != os.getpid()
    assert first["process"] != second["process"]
