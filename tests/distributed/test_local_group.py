"""Collectives that are answered in this process: as if every rank held what this one holds."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.testing._internal.distributed.fake_pg import FakeStore

from batchfinder.distributed.local_group import local_collectives

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # the new names are not in all PyTorch that we serve

RANK, SIZE = 1, 4


@pytest.fixture(scope="module", autouse=True)
def one_of_four() -> Iterator[None]:
    """This process is rank 1 of 4, in a group that does nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.init_process_group("fake", rank=RANK, world_size=SIZE, store=FakeStore())
        yield
        dist.destroy_process_group()


@pytest.fixture
def echo() -> Iterator[None]:
    """The default group is replaced."""
    with local_collectives():
        yield


def numbers() -> torch.Tensor:
    """Something to send."""
    return torch.tensor([1.0, 2.0])


@pytest.mark.usefixtures("echo")
@pytest.mark.parametrize(
    ("operation", "factor"),
    [(dist.ReduceOp.SUM, 4), (dist.ReduceOp.AVG, 1), (dist.ReduceOp.MIN, 1), (dist.ReduceOp.MAX, 1)],
)
def test_reductions(operation: dist.ReduceOp.RedOpType, factor: int) -> None:
    """A sum is four times the tensor; a mean or an extreme is the tensor. Later ones wait for nobody either."""
    for later in (False, True):
        tensor = numbers()
        work = dist.all_reduce(tensor, operation, async_op=later)
        if later:
            assert work is not None
            work.wait()
        assert tensor.tolist() == [factor, 2 * factor]
    tensor = numbers()
    dist.reduce(tensor, 0, operation)
    assert tensor.tolist() == [factor, 2 * factor]


@pytest.mark.usefixtures("echo")
def test_a_product() -> None:
    """It is the fourth power."""
    tensor = numbers()
    dist.all_reduce(tensor, dist.ReduceOp.PRODUCT)
    assert tensor.tolist() == [1, 16]


@pytest.mark.usefixtures("echo")
def test_gathering_takes_the_memory_that_it_takes_among_four() -> None:
    """Each rank's part is this one's, in tensors of its own."""
    parts = [torch.zeros(2) for _ in range(SIZE)]
    dist.all_gather(parts, numbers())
    assert [part.tolist() for part in parts] == [[1, 2]] * SIZE
    whole = torch.zeros(SIZE * 2)
    dist.all_gather_into_tensor(whole, numbers())
    assert whole.tolist() == [1, 2] * SIZE
    things: list[object] = [None] * SIZE
    dist.all_gather_object(things, {"rank": dist.get_rank()})
    assert things == [{"rank": RANK}] * SIZE
    dist.gather(numbers(), dst=0)


@pytest.mark.usefixtures("echo")
def test_handing_out() -> None:
    """This rank's part of what it would hand out itself."""
    part = torch.zeros(2)
    dist.reduce_scatter(part, [torch.full((2,), float(rank)) for rank in range(SIZE)])
    assert part.tolist() == [RANK * SIZE] * 2
    dist.reduce_scatter_tensor(part, torch.arange(8.0))
    assert part.tolist() == [2 * SIZE, 3 * SIZE]
    exchanged = [torch.ones(2) for _ in range(SIZE)]
    dist.all_to_all(exchanged, [torch.full((2,), float(rank)) for rank in range(SIZE)])
    assert [tensor.tolist() for tensor in exchanged] == [[RANK, RANK]] * SIZE
    mine = torch.zeros(2)
    dist.scatter(mine, [torch.full((2,), float(rank)) for rank in range(SIZE)], src=RANK)
    assert mine.tolist() == [RANK, RANK]
    single = torch.ones(8)
    dist.all_to_all_single(single, torch.arange(8.0))
    assert single.tolist() == [0] * 8


@pytest.mark.usefixtures("echo")
def test_broadcasts() -> None:
    """What this rank sends stays; of what it would be sent, a floating tensor is taken to be here already."""
    for source, kept in ((RANK, True), (0, False)):
        weights, count = numbers(), torch.tensor([7])
        dist.broadcast(weights, source)
        dist.broadcast(count, source)
        assert weights.tolist() == [1, 2]
        assert count.tolist() == [7 if kept else 0]
    received = torch.ones(2)
    dist.recv(received, 0)
    dist.send(received, 0)
    assert received.tolist() == [0, 0]
    dist.barrier()


@pytest.mark.usefixtures("echo")
def test_gradients_go_through_what_is_gathered() -> None:
    """By functional collectives, which know a group by its name."""
    assert functional.all_reduce(numbers(), "sum", dist.group.WORLD).tolist() == [4, 8]
    leaf = numbers().requires_grad_()
    gathered = functional.all_gather_tensor_autograd(leaf, 0, dist.group.WORLD)
    assert gathered.shape == (SIZE * 2,)
    gathered.sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [4, 4]


def test_who_asks_is_told_what_it_was_told_before() -> None:
    """The rank, the size and the backend; afterwards the group is the one it was, after an error too."""
    before = (dist.group.WORLD, dist.get_rank(), dist.get_world_size(), dist.get_backend())
    tables = [len(getattr(dist.distributed_c10d._world, name)) for name in ("pg_map", "pg_names", "pg_group_ranks")]

    def fails() -> None:
        with local_collectives():
            assert dist.group.WORLD is not before[0]
            assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == before[1:]
            raise ValueError("the labels are wrong")

    with pytest.raises(ValueError, match="the labels"):
        fails()
    assert (dist.group.WORLD, dist.get_rank(), dist.get_world_size(), dist.get_backend()) == before
    assert tables == [
        len(getattr(dist.distributed_c10d._world, name)) for name in ("pg_map", "pg_names", "pg_group_ranks")
    ]
    with local_collectives():
        pass  # a second time
