"""Tests of batchfinder/models/synthetic_batches.py."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from batchfinder.errors import InvalidValue
from batchfinder.models.catalog import Label, MediaTensor
from batchfinder.models.synthetic_batches import ImageBatches, MediaBatches, TextBatches

TEXT = TextBatches(
    vocab_size=11,
    labels=(Label("labels", "token", 11), Label("kind", "sample", 2), Label("start", "sample", "seq_len")),
    attention_mask=True,
    max_seq_len=32,
)


def test_text_has_the_shapes_and_bounds_of_training() -> None:
    """Ids and token labels are (batch, sequence), sample labels (batch,), all int64 and within their bounds."""
    batch = TEXT(7, 5)
    assert isinstance(batch, dict)
    assert {name: tuple(t.shape) for name, t in batch.items()} == {
        "input_ids": (7, 5), "attention_mask": (7, 5), "labels": (7, 5), "kind": (7,), "start": (7,),
    }  # fmt: skip
    assert all(t.dtype == torch.int64 for t in batch.values())
    assert batch["attention_mask"].all()
    assert batch["input_ids"].max() < 11
    assert batch["kind"].max() < 2
    assert batch["start"].max() < 5


def test_ids_alone_are_one_tensor() -> None:
    """Without a keyword the batch is the tensor of ids itself."""
    ids = TextBatches(vocab_size=3, keyword=None)(2, 4)
    assert isinstance(ids, torch.Tensor)
    assert ids.shape == (2, 4)


@pytest.mark.parametrize("seq_len", [None, 0, 33])
def test_lengths_outside_the_positions_are_refused(seq_len: int | None) -> None:
    """A sequence that the model has no positions for is an error of the caller's that names the limit."""
    wrong = "missing" if seq_len is None else f"invalid value {seq_len}"
    with pytest.raises(InvalidValue, match=f"seq_len: {wrong}.* up to the 32 positions"):
        TEXT(2, seq_len)


def test_images_have_a_default_side() -> None:
    """Pixels are float32, 224 to the side unless another is asked for."""
    images = ImageBatches(num_labels=10)
    assert images(2, None)["pixel_values"].shape == (2, 3, 224, 224)
    batch = images(3, 50)
    assert batch["pixel_values"].shape == (3, 3, 50, 50)
    assert batch["pixel_values"].dtype == torch.float32
    assert batch["labels"].shape == (3,)


@pytest.mark.parametrize(
    ("images", "side", "expected"),
    [
        (ImageBatches(10, smallest_side=16, multiple=16), 100, "at least 16 pixels, a multiple of the patch of 16"),
        (ImageBatches(10, smallest_side=33), 32, "at least 33 pixels"),
        (ImageBatches(10, resizable=False), 192, "224 pixels, the only one"),
    ],
)
def test_sides_a_model_cannot_take_are_refused(images: ImageBatches, side: int, expected: str) -> None:
    """A side that is no multiple of the patch, too small, or fixed by the model is an error that says which will do."""
    with pytest.raises(InvalidValue, match=expected):
        images(2, side)


def test_generators_do_not_move() -> None:
    """Making batches leaves the user's random numbers as they were, and gives the same batch each time."""
    before = torch.get_rng_state()
    first, second = TEXT(2, 8), TEXT(2, 8)
    ImageBatches(10)(1, 8)
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(first["input_ids"], second["input_ids"])


def test_batches_can_be_fake() -> None:
    """Inside a FakeTensorMode batches have no memory, so any size can be made."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        text, images = TEXT(1 << 30, 32), ImageBatches(10)(1 << 20, None)
    assert all(isinstance(t, FakeTensor) for t in (*text.values(), *images.values()))


SEEN = MediaBatches(
    tensors=(
        MediaTensor("pixel_values", ("batch*grid*grid", "channels*patch*patch")),
        MediaTensor("image_grid_thw", ("batch", 3), rows=(1, "grid", "grid"), kind="int"),
        MediaTensor("pixel_attention_mask", ("batch", "seq_len"), fill=1, kind="bool"),
    ),
    sizes={"grid": 4, "channels": 3, "patch": 2},
    arguments=frozenset({"input_ids", "labels", "token_type_ids"}),
    text=TEXT,
    placeholder=7,
    placeholders=16,
    token_kinds=("token_type_ids", "mm_token_type_ids"),
)


def test_an_image_stands_among_the_tokens() -> None:
    """Its placeholders are the only ones, whatever is drawn; what says which they are is passed, and no more."""
    batch = SEEN(5, 24)
    assert {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in batch.items()} == {
        "input_ids": ((5, 24), torch.int64),
        "labels": ((5, 24), torch.int64),
        "token_type_ids": ((5, 24), torch.int64),
        "pixel_values": ((80, 12), torch.float32),
        "image_grid_thw": ((5, 3), torch.int64),
        "pixel_attention_mask": ((5, 24), torch.bool),
    }
    assert torch.equal(batch["input_ids"] == 7, batch["token_type_ids"].bool())
    assert batch["token_type_ids"].sum(1).tolist() == [16] * 5
    assert batch["image_grid_thw"].tolist() == [[1, 4, 4]] * 5
    assert batch["pixel_attention_mask"].all()


@pytest.mark.parametrize("seq_len", [1, 16])
def test_an_image_needs_room(seq_len: int) -> None:
    """A sequence that its image alone fills is refused, with the tokens of the image."""
    with pytest.raises(InvalidValue, match=f"seq_len: invalid value {seq_len}; expected more than 16 tokens"):
        SEEN(2, seq_len)


def test_a_recording_is_as_long_as_asked() -> None:
    """Where a model reads no text, the sequence length is the recording's; its transcript has 40 tokens."""
    text = TextBatches(11, (Label("labels", "token", 11),), keyword="")
    wave = MediaTensor("input_values", ("batch", "samples"))
    speech = MediaBatches((wave,), {"samples": 900}, frozenset({"labels"}), text, length="samples")
    for asked, samples in ((None, 900), (400, 400)):
        batch = speech(3, asked)
        assert {name: tuple(tensor.shape) for name, tensor in batch.items()} == {
            "input_values": (3, samples),
            "labels": (3, 40),
        }
