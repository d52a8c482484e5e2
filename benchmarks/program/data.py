"""Generated data and models in the formats that public training programs read: tokens, digits, pictures, text.

`python -m benchmarks.program.data FOLDER digits` makes some. Weights are zeros that take no room on the disk.
"""

from __future__ import annotations

import base64
import itertools
import json
import math
import random
import struct
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

WORDS = [f"word{number}" for number in range(2000)]


def tokens(folder: Path) -> None:
    """`data/gen` for nanoGPT: tokens of GPT-2's vocabulary as 16-bit integers."""
    (folder / "data/gen").mkdir(parents=True, exist_ok=True)
    drawn = np.random.default_rng(0)
    for name in ("train", "val"):
        drawn.integers(0, 50257, 200_000, dtype=np.uint16).tofile(folder / f"data/gen/{name}.bin")


def letters(folder: Path) -> None:
    """`input.txt`, for models of characters."""
    draw = random.Random(0)
    text = "O God, O God! " + " ".join(draw.choices(WORDS, k=50_000))  # what a sample begins with must be among them
    (folder / "input.txt").write_text(text)


def digits(folder: Path, train: int = 60_000, test: int = 10_000) -> None:
    """`data/MNIST/raw`, as torchvision's MNIST unpacks it: pictures of 28 x 28 and labels, each with its header."""
    raw = folder / "data/MNIST/raw"
    if raw.exists():
        return
    raw.mkdir(parents=True, exist_ok=True)
    drawn = np.random.default_rng(0)
    for name, count in (("train", train), ("t10k", test)):
        pictures = drawn.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        header = np.array([0x803, count, 28, 28], dtype=">i4").tobytes()
        (raw / f"{name}-images-idx3-ubyte").write_bytes(header + pictures.tobytes())
        header = np.array([0x801, count], dtype=">i4").tobytes()
        labels = drawn.integers(0, 10, count, dtype=np.uint8)
        (raw / f"{name}-labels-idx1-ubyte").write_bytes(header + labels.tobytes())


def pictures(folder: Path, each: int = 400) -> None:
    """`pictures/train` and `pictures/validation` with JPEGs of 256 x 256 in a folder for each of two classes."""
    from PIL import Image

    if (folder / "pictures").exists():
        return
    drawn = np.random.default_rng(0)
    for split, count in (("train", each), ("validation", each // 8)):
        for name in ("cat", "dog"):
            where = folder / "pictures" / split / name
            where.mkdir(parents=True, exist_ok=True)
            for number in range(count):
                coarse = Image.fromarray(drawn.integers(0, 256, (8, 8, 3), dtype=np.uint8))
                coarse.resize((256, 256)).save(where / f"{number}.jpg")


def word_tokenizer(folder: Path) -> None:
    """Hugging Face's files of a tokenizer that has a token for each word."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate(["<unk>", "<pad>", "<eos>", *WORDS])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>", eos_token="<eos>", model_max_length=32768
    )
    fast.save_pretrained(folder)


def language_model(folder: Path) -> None:
    """`model`, of the shape of Qwen2.5-0.5B with random weights in bf16 and a tokenizer; `text` with its samples."""
    import torch
    from tokenizers import ByteLevelBPETokenizer
    from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    pairs = ByteLevelBPETokenizer()  # what transformers takes any tokenizer beside such a config to be
    pairs.train_from_iterator([" ".join(WORDS)], vocab_size=300, special_tokens=["<unk>", "<pad>", "<eos>"])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=pairs._tokenizer, pad_token="<pad>", eos_token="<eos>", model_max_length=32768
    )
    fast.save_pretrained(folder / "model")
    shape = Qwen2Config(
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        pad_token_id=1,
        eos_token_id=2,
    )
    if not (folder / "model/config.json").exists():
        torch.manual_seed(0)
        Qwen2ForCausalLM(shape).to(torch.bfloat16).save_pretrained(folder / "model")
    tokens = AutoTokenizer.from_pretrained(folder / "model")("word1515 word84")["input_ids"]
    assert len(tokens) == 8, tokens  # `word`, four figures, `word` and two
    text(folder)


def text(folder: Path) -> None:
    """`text/train.jsonl` and `text/test.jsonl` with samples of 10 to 120 words."""
    draw = random.Random(0)
    (folder / "text").mkdir(exist_ok=True)
    for split, count in (("train", 2000), ("test", 100)):
        _write_rows(
            folder / f"text/{split}.jsonl",
            ({"text": " ".join(draw.choices(WORDS, k=draw.randint(10, 120)))} for _ in range(count)),
        )


def llama_tokenizer(folder: Path) -> None:
    """`tokenizer.model` of as many ranks as Llama 3's, 128,000: all bytes, all pairs of them, and some triples."""
    words = itertools.chain.from_iterable(itertools.product(range(256), repeat=length) for length in (1, 2, 3))
    with (folder / "tokenizer.model").open("w") as file:
        for rank, word in enumerate(itertools.islice(words, 128_000)):
            file.write(f"{base64.b64encode(bytes(word)).decode()} {rank}\n")


def instructions(folder: Path, repository: str) -> None:
    """A folder with a dataset's name, which `load_dataset` takes for it: Alpaca's columns, every sample a long one."""
    draw = random.Random(0)
    (folder / repository).mkdir(parents=True, exist_ok=True)
    said = (" ".join(draw.choices(WORDS, k=600)) for _ in range(2000))
    _write_rows(
        folder / repository / "train.jsonl", ({"instruction": "Say it.", "input": "", "output": each} for each in said)
    )


def _write_rows(path: Path, rows: Iterable[Mapping[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def sparse_safetensors(path: Path, shapes: Mapping[str, Sequence[int]]) -> None:
    """Weights in bf16 of which the file has the header alone, and a hole for the zeros."""
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def llama32_3b(folder: Path, name: str) -> None:
    """A folder with Hugging Face's files of Llama 3.2 3B, weights in two of them."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    where = folder / name
    word_tokenizer(where)
    shape = LlamaConfig(
        vocab_size=128256,
        hidden_size=3072,
        intermediate_size=8192,
        num_hidden_layers=28,
        num_attention_heads=24,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        tie_word_embeddings=True,
        dtype="bfloat16",
        pad_token_id=1,
        eos_token_id=2,
    )
    shape.save_pretrained(where)
    with torch.device("meta"):
        weights = LlamaForCausalLM(shape).state_dict()
    files: dict[str, dict[str, Sequence[int]]] = {f"model-0000{number}-of-00002.safetensors": {} for number in (1, 2)}
    for place, (tensor, each) in enumerate(weights.items()):
        if tensor != "lm_head.weight":  # which is the embedding's
            files[list(files)[2 * place // len(weights)]][tensor] = each.shape
    for file, shapes in files.items():
        sparse_safetensors(where / file, shapes)
    places = {tensor: file for file, shapes in files.items() for tensor in shapes}
    (where / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def metamath(folder: Path) -> None:
    """What peft's comparison on MetaMathQA loads, in folders of these names.

    Of each 80 samples, which it sorts by length, four have about the 705 tokens that `benchmarks/measured/peft` has
    found for the longest, the others 350 and fewer: some 208 on average, as its results say.
    """
    llama32_3b(folder, "meta-llama/Llama-3.2-3B")
    template = 10  # tokens of `Question: x Think step by step.` and `Answer:`
    lengths = [*range(705, 701, -1), *(350 - 9 * each // 2 for each in range(76))]
    sums = [
        {"type": "GSM_SV", "query": "x", "original_question": "x", "response": ("a." * 705)[: length - template]}
        for length in lengths
    ]
    questions = [{"question": "x", "answer": "a"}] * 100
    for name, rows in (
        ("meta-math/MetaMathQA/train", sums * 25),
        ("openai/gsm8k/train", questions),
        ("openai/gsm8k/test", questions),
        ("HuggingFaceFW/finewiki/train", [{"text": "x " * 600}] * 100),
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        _write_rows(folder / f"{name}.jsonl", rows)
    splits = "".join(f"\n  - split: {each}\n    path: {each}.jsonl" for each in ("train", "test"))
    (folder / "openai/gsm8k/README.md").write_text(f"---\nconfigs:\n- config_name: main\n  data_files:{splits}\n---\n")


def litgpt(folder: Path, model: str) -> None:
    """`checkpoints/MODEL` for the LitGPT that lies in a folder: its own model of that name, of one zero's weights."""
    import torch

    sys.path.insert(0, str(folder))
    from litgpt import GPT, Config
    from litgpt.utils import save_config

    where = folder / "checkpoints" / model
    word_tokenizer(where)
    config = Config.from_name(where.name)
    save_config(config, where)
    with torch.device("meta"):
        weights = GPT(config).state_dict()
    zero = torch.zeros((), dtype=torch.bfloat16)
    torch.save({name: zero.expand(each.shape) for name, each in weights.items()}, where / "lit_model.pth")


def preferences(folder: Path) -> None:
    """The model, and `preferences` with prompts and two answers to each, of which one is chosen."""
    language_model(folder)
    draw = random.Random(0)
    (folder / "preferences").mkdir(exist_ok=True)
    for split, count in (("train", 400), ("test", 20)):
        rows = (
            {name: " ".join(draw.choices(WORDS, k=draw.randint(10, 60))) for name in ("prompt", "chosen", "rejected")}
            for _ in range(count)
        )
        _write_rows(folder / f"preferences/{split}.jsonl", rows)


if __name__ == "__main__":
    globals()[sys.argv[2]](Path(sys.argv[1]), *sys.argv[3:])
