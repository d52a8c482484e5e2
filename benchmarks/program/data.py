"""Generated data and models in the formats that public training programs read: tokens, digits, pictures, text.

`python -m benchmarks.program.data digits FOLDER` makes some.
"""

from __future__ import annotations

import json
import random
import sys
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
    draw = random.Random(0)
    (folder / "text").mkdir(exist_ok=True)
    for split, count in (("train", 2000), ("test", 100)):
        rows = [{"text": " ".join(draw.choices(WORDS, k=draw.randint(10, 120)))} for _ in range(count)]
        (folder / f"text/{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def preferences(folder: Path) -> None:
    """The model, and `preferences` with prompts and two answers to each, of which one is chosen."""
    language_model(folder)
    draw = random.Random(0)
    (folder / "preferences").mkdir(exist_ok=True)
    for split, count in (("train", 400), ("test", 20)):
        rows = [
            {name: " ".join(draw.choices(WORDS, k=draw.randint(10, 60))) for name in ("prompt", "chosen", "rejected")}
            for _ in range(count)
        ]
        (folder / f"preferences/{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]))
