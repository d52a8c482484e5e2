"""What is captured by value and what is left alone, and what a capture costs."""

from __future__ import annotations

import copy
import io
import itertools
import signal
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

from batchfinder.snapshot import training_state
from batchfinder.snapshot.training_state import TrainingState, restore_on_exit


class Bag:
    """An object of the user's, with whatever attributes."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


@dataclass(unsafe_hash=True)
class Key:
    """Found by its value."""

    value: int


class Hostile:
    """An object none of whose methods may run while it is captured or restored."""

    def __init__(self) -> None:
        object.__setattr__(self, "value", 1)

    def _refuse(self, *args: Any) -> Any:
        raise AssertionError("code of the user's ran")

    __eq__ = __bool__ = __len__ = __iter__ = __getattr__ = __getattribute__ = __setattr__ = __delattr__ = _refuse
    __getstate__ = __reduce__ = __deepcopy__ = __copy__ = _refuse
    __hash__ = object.__hash__


class Rows(Dataset[int]):
    """A dataset that counts, draws, and holds bulk data."""

    def __init__(self) -> None:
        self.rows, self.table, self.array = [[0]], torch.zeros(3), np.zeros(3)
        self.draws = 0
        self.generator = torch.Generator().manual_seed(0)

    def __getitem__(self, index: int) -> int:
        self.draws += 1
        self.rows[0].append(index)
        self.table[0] = 1
        return int(torch.randint(9, (), generator=self.generator))

    def __len__(self) -> int:
        return 3


class Countdown:
    """An iterator that counts."""

    def __init__(self) -> None:
        self.left = 3

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        self.left -= 1
        return self.left


def test_a_body_that_raises_is_undone_and_the_error_is_its_own() -> None:
    """`restore_on_exit` restores after an error too, and lets it through."""
    model, error = nn.Linear(2, 2), RuntimeError("shapes differ")
    before = model.weight.clone()

    def fail() -> None:
        with restore_on_exit(model):
            nn.init.zeros_(model.weight)
            raise error

    with pytest.raises(RuntimeError) as caught:
        fail()
    assert caught.value is error
    assert torch.equal(model.weight, before)


def test_what_a_step_frees_is_free() -> None:
    """The capture holds neither gradients nor swapped weights: they are gone while it lasts, and back afterwards."""
    model = nn.Linear(3, 3)
    model(torch.ones(1, 3)).sum().backward()
    model.bias.data = torch.full((3,), 5.0)
    grad = model.weight.grad
    assert grad is not None
    gradient, weight = weakref.ref(grad.untyped_storage()), model.weight.detach().clone()
    values = grad.clone()
    del grad
    state = TrainingState.capture(model)
    model.zero_grad()
    model.weight.data = torch.zeros(1)
    assert gradient() is None
    for _ in range(2):
        state.restore()
        assert model.weight.grad is not None
        assert torch.equal(model.weight.grad, values)
        assert torch.equal(model.weight, weight)
        model.zero_grad()


def test_weights_are_copied_once() -> None:
    """The cost is the bytes of each storage, once, however many tensors look at it."""
    model = nn.Module()
    model.register_parameter("one", nn.Parameter(torch.zeros(1000)))
    model.register_parameter("two", model.one)
    model.register_buffer("view", model.one.detach()[10:])
    assert TrainingState.capture(model, [model], model.one).nbytes == 4000
    assert TrainingState.capture(np.zeros(5), bytearray(3)).nbytes == 43
    assert TrainingState.capture(nn.Linear(10, 10, device="meta")).nbytes == 0


def test_objects_of_others_are_left_alone() -> None:
    """An object that holds a lock, an iterator and a file stay as they are, and are named."""
    shared = Bag(lock=threading.Lock(), value=1)
    owner = Bag(shared=shared, count=itertools.count(), text=io.StringIO("ab"), rows=Countdown(), value=1)
    state = TrainingState.capture(owner)
    shared.value = owner.value = 2
    next(owner.rows)
    next(owner.count)
    owner.text.read(1)
    state.restore()
    assert (shared.value, owner.value, owner.rows.left, owner.text.tell()) == (2, 1, 2, 1)
    names = (f"{__name__}.Bag", f"{__name__}.Countdown", "_io.StringIO", "itertools.count")
    assert state.left_out == tuple(sorted(names))


def test_what_is_named_is_captured_whatever_it_is() -> None:
    """A lock in an object, or its being an iterator, does not matter if it was asked for by name."""
    shared, rows = Bag(lock=threading.Lock(), value=1), Countdown()
    with restore_on_exit(shared, rows):
        shared.value = 2
        next(rows)
    assert (shared.value, rows.left) == (1, 3)


def test_left_alone_by_object_and_by_class() -> None:
    """What the caller excludes is not touched, nor what is reached through it alone."""
    inner, excluded = Bag(value=1), Countdown()
    owner = Bag(inner=Bag(value=inner), excluded=excluded, model=nn.Linear(1, 1), value=1)
    with restore_on_exit(owner, left_alone=[owner.inner, nn.Module]) as state:
        inner.value = owner.value = owner.inner.extra = 2
        owner.model.training = False
    assert (inner.value, owner.value, owner.inner.extra, owner.model.training) == (2, 1, 2, False)
    assert state.nbytes == 0


def test_a_dataset_is_data() -> None:
    """A dataset's counters and generators come back, its rows, tables and arrays are not even looked at."""
    rows = Rows()
    loader = DataLoader(rows, shuffle=True, generator=torch.Generator().manual_seed(1))
    with restore_on_exit(loader) as state:
        first = [int(row) for row in loader]
    assert (rows.draws, len(rows.rows[0]), float(rows.table[0])) == (0, 4, 1.0)
    assert [int(row) for row in loader] == first
    assert state.nbytes == 0


class Jitter:
    """A transform that draws."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(1)


class Transformed(Dataset[Any]):
    """Transforms in containers, and rows in one that is not looked at."""

    def __init__(self) -> None:
        self.listed, self.named = [Jitter()], {"first": (Jitter(),)}
        self.rows = [Jitter() for _ in range(1000)]

    def __len__(self) -> int:
        return len(self.rows)


def test_what_a_dataset_has_in_short_containers_is_put_back() -> None:
    """Transforms in lists, mappings and tuples, and datasets in datasets; a long list is its samples."""
    inner = Transformed()
    holders = [inner.listed[0], inner.named["first"][0]]
    before = [copy.deepcopy(each.rng).normal() for each in holders]
    rows = inner.rows
    with restore_on_exit(DataLoader(Subset(ConcatDataset([inner]), [0]))) as state:
        assert [each.rng.normal() for each in holders] == before
        drawn = rows[0].rng.normal()
    assert [each.rng.normal() for each in holders] == before
    assert rows[0].rng.normal() != drawn
    assert state.nbytes == 0


def test_ctrl_c_waits_until_all_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes as the restoration begins, and is raised when that has ended."""
    model = nn.Linear(2, 2)
    before = model.weight.detach().clone()
    state = TrainingState.capture(model)
    nn.init.zeros_(model.weight)
    monkeypatch.setattr(training_state, "_synchronize_all", lambda: signal.raise_signal(signal.SIGINT))
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        state.restore()
    assert torch.equal(model.weight, before)
    assert signal.getsignal(signal.SIGINT) is handler


def test_what_is_reached_through_what_cannot_change() -> None:
    """Partials, bound methods, closures, tuples and arrays of objects lead to what they hold."""
    bags = [Bag(value=1) for _ in range(6)]
    elements = np.array([bags[0], None], dtype=object)

    def closing_over(bag: Bag) -> Callable[[], Bag]:
        return lambda: bag

    reached = Bag(
        array=elements,
        partial=partial(print, bags[1], file=bags[2]),
        method=MethodType(repr, bags[3]),
        closure=closing_over(bags[4]),
        tuple=(frozenset([bags[5]]),),
    )
    with restore_on_exit(reached):
        for bag in bags:
            bag.value = 2
        elements[1] = 3
    assert [bag.value for bag in bags] == [1] * 6
    assert elements[1] is None


def test_keys_that_are_found_by_their_value() -> None:
    """A set is refilled when its elements have their hashes again."""
    key = Key(1)
    owner = Bag(keys={key}, values={key: 1})
    with restore_on_exit(owner):
        owner.keys.clear()
        owner.values.clear()
        key.value = 2
    assert Key(1) in owner.keys
    assert owner.values[Key(1)] == 1


def test_parameters_that_were_let_go_of() -> None:
    """A parameter that nobody holds any more is made anew, tied, with its attributes and its gradient."""
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    model[1].weight = model[0].weight
    model[0].weight.note = "tied"
    model[0].weight.grad = torch.ones(2, 2)
    before = model[0].weight.detach().clone()
    with restore_on_exit(model):
        for linear in model:
            linear.weight = nn.Parameter(torch.zeros(1))
    assert model[0].weight is model[1].weight
    assert type(model[0].weight) is nn.Parameter
    assert model[0].weight.note == "tied"
    assert torch.equal(model[0].weight, before)
    assert torch.equal(model[0].weight.grad, torch.ones(2, 2))


def test_storage_that_was_let_go_of_is_shared_again() -> None:
    """Two tensors that looked at one storage look at one storage, though the step freed both."""
    owner = Bag(one=torch.arange(4.0))
    owner.two = owner.one.data
    assert not owner.two._is_view()
    with restore_on_exit(owner):
        del owner.one, owner.two
    owner.two[0] = 7
    assert owner.one.tolist() == [7, 1, 2, 3]


def test_no_code_of_the_users_runs() -> None:
    """Attributes are read and written past every method that a class may define."""
    hostile = Hostile()
    owner = Bag(list=[hostile], dict={"key": hostile}, hostile=hostile)
    attributes = object.__getattribute__(hostile, "__dict__")
    with restore_on_exit(owner):
        attributes["value"] = 2
        attributes["more"] = 3
        owner.list.append(0)
        owner.dict.clear()
    assert attributes == {"value": 1}
    assert owner.list[0] is hostile
    assert owner.dict["key"] is hostile


def test_any_depth() -> None:
    """A chain of 20,000 objects needs no recursion."""
    last = chain = Bag(value=1)
    for _ in range(20_000):
        chain = Bag(inner=chain)
    with restore_on_exit(chain):
        last.value = 2
    assert last.value == 1


def test_a_container_that_is_being_iterated_over() -> None:
    """Restoring what has not changed writes nothing: the loop that runs over it goes on."""
    owner = Bag(callbacks=OrderedDict(a=1, b=2), hooks=[1, 2], names={1, 2})
    state = TrainingState.capture(owner)
    visited = []
    for name, hook, number in zip(owner.callbacks, owner.hooks, owner.names, strict=True):
        state.restore()
        visited.append((name, hook, number))
    assert visited == [("a", 1, 1), ("b", 2, 2)]


def test_a_graph_from_before_can_still_be_walked_backward() -> None:
    """Version counters come back: what a graph saved before the probe is not taken for modified."""
    weight = nn.Parameter(torch.tensor([3.0]))
    loss = weight.square().sum()
    with restore_on_exit(weight), torch.no_grad():
        weight.add_(1)
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.item() == 6


def test_sparse_gradients() -> None:
    """A gradient without a storage comes back as well."""
    table = nn.Embedding(5, 2, sparse=True)
    table(torch.tensor([1, 1])).sum().backward()
    assert table.weight.grad is not None
    then = table.weight.grad.to_dense()
    with restore_on_exit(table) as state:
        table(torch.tensor([2])).sum().backward()
    assert torch.equal(table.weight.grad.to_dense(), then)
    assert state.nbytes == 5 * 2 * 4 + 2 * 8 + 4 * 4


def test_memory_that_cannot_be_written() -> None:
    """A frozen table mapped read-only is compared and not written."""
    program = """
import mmap, tempfile, torch
from torch import nn
from batchfinder.snapshot.training_state import TrainingState
with tempfile.TemporaryFile() as file:
    file.write(bytes(4096))
    file.flush()
    mapped = mmap.mmap(file.fileno(), 4096, prot=mmap.PROT_READ)
    model = nn.Linear(2, 2)
    model.register_buffer("table", torch.frombuffer(mapped, dtype=torch.uint8))
    TrainingState.capture(model).restore()
    print("unharmed", torch.cuda.is_initialized())
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()) == (0, ["unharmed", "False"]), done.stderr


def test_in_inference_mode() -> None:
    """Restoring under `torch.inference_mode` gives ordinary tensors back."""
    model = nn.Linear(2, 2)
    model.weight.grad = torch.ones(2, 2)
    state = TrainingState.capture(model)
    with torch.inference_mode():
        model.weight.data = torch.zeros(2, 2)
        model.weight.grad = None
        state.restore()
    assert model.weight.grad is not None
    assert not model.weight.grad.is_inference()
    assert not model.weight.is_inference()
    model(torch.ones(1, 2)).sum().backward()
    assert torch.equal(model.weight.grad, torch.full((2, 2), 2.0))


@pytest.mark.gpu
def test_the_device_holds_no_copies() -> None:
    """A capture of CUDA weights takes no device memory, and neither does the step it undoes leave any."""
    model = nn.Linear(128, 128, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 128, device="cuda")).sum().backward()
    optimizer.zero_grad()
    before, weight = torch.cuda.memory_allocated(), model.weight.detach().cpu()
    with restore_on_exit(model, optimizer) as state:
        assert torch.cuda.memory_allocated() == before
        torch.nn.functional.dropout(model(torch.ones(1, 128, device="cuda"))).sum().backward()
        optimizer.step()
    assert torch.cuda.memory_allocated() == before
    assert state.nbytes == 4 * (128 * 128 + 128)
    assert torch.equal(model.weight.detach().cpu(), weight)


@pytest.mark.gpu
def test_random_numbers_of_each_card() -> None:
    """Every card's generator comes back; in a card first used by the probe it begins at its seed."""
    program = """
import torch
from batchfinder.snapshot.training_state import restore_on_exit
torch.manual_seed(5)
with restore_on_exit():
    first = torch.rand(3, device="cuda")
assert torch.equal(torch.rand(3, device="cuda"), first)
with restore_on_exit():
    second = torch.rand(3, device="cuda")
assert torch.equal(torch.rand(3, device="cuda"), second) and not torch.equal(first, second)
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_storage_that_was_freed_is_freed_again() -> None:
    """As FSDP frees gathered weights, which a step that fails leaves gathered."""
    bag = Bag(weights=torch.ones(4))
    bag.weights.untyped_storage().resize_(0)
    state = TrainingState.capture(bag)
    bag.weights.untyped_storage().resize_(16)
    bag.weights.fill_(2)
    state.restore()
    assert (bag.weights.untyped_storage().nbytes(), bag.weights.shape) == (0, (4,))
