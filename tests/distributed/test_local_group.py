"""Tests of batchfinder/distributed/agreement.py: collectives of one rank that wait for no other."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from batchfinder.distributed.agreement import local_collectives

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # the new names are not in all PyTorch that we serve

RANK, SIZE = 1, 4
MESHES: dict[str, DeviceMesh] = {}


@pytest.fixture(scope="module", autouse=True)
def one_of_four() -> Iterator[None]:
    """This process is rank 1 of 4, in a group that fails at each collective."""
    options = FakeProcessGroup.Options()
    options.error_on_collective = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.init_process_group("fake", rank=RANK, world_size=SIZE, store=FakeStore(), pg_options=options)
        mesh = torch.arange(SIZE, dtype=torch.int).view(2, 2)
        MESHES["mesh"] = DeviceMesh("cpu", mesh, backend_override=(("fake", options), ("fake", options)))
        yield
        dist.destroy_process_group()


@pytest.fixture
def local() -> Iterator[None]:
    """The default group is replaced."""
    with local_collectives():
        yield


def numbers() -> torch.Tensor:
    """Something to send."""
    return torch.tensor([1.0, 2.0])


def test_the_groups_own_collectives_fail() -> None:
    """So that what does not fail in this module has not reached it."""
    with pytest.raises(RuntimeError):
        dist.all_reduce(numbers())


@pytest.mark.usefixtures("local")
def test_reductions_and_broadcasts() -> None:
    """Leave a tensor as it is. Later ones wait for nobody either."""
    tensor = numbers()
    dist.all_reduce(tensor)
    dist.reduce(tensor, 0)
    dist.broadcast(tensor, 0)
    work = dist.all_reduce(tensor, dist.ReduceOp.MAX, async_op=True)
    assert work is not None
    work.wait()
    dist.send(tensor, 0)
    dist.recv(tensor, 0)
    dist.barrier()
    assert tensor.tolist() == [1, 2]


@pytest.mark.usefixtures("local")
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


@pytest.mark.usefixtures("local")
def test_scattering() -> None:
    """Returns at once."""
    part = torch.zeros(2)
    dist.reduce_scatter_tensor(part, torch.arange(8.0))
    dist.all_to_all_single(torch.ones(8), torch.arange(8.0))
    dist.scatter(part, [torch.full((2,), float(rank)) for rank in range(SIZE)], src=RANK)


@pytest.mark.usefixtures("local")
def test_gradients_go_through_what_is_gathered() -> None:
    """By functional collectives, which know a group by its name."""
    assert functional.all_reduce(numbers(), "sum", dist.group.WORLD).tolist() == [1, 2]
    leaf = numbers().requires_grad_()
    gathered = functional.all_gather_tensor_autograd(leaf, 0, dist.group.WORLD)
    assert gathered.shape == (SIZE * 2,)
    gathered.sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [1, 1]


@pytest.mark.usefixtures("local")
def test_groups_of_device_meshes() -> None:
    """Theirs are local as well, whichever of their dimensions a collective is over; a mesh may be older than that."""
    sharded = DTensor.from_local(numbers(), MESHES["mesh"], [Replicate(), Shard(0)])
    assert sharded.full_tensor().tolist() == [1, 2, 1, 2]
    assert sharded.sum().full_tensor().item() == 3


def test_backends_are_put_back() -> None:
    """The groups stay; afterwards each has the backend it had, after an error and a second time too."""
    groups = [dist.group.WORLD, *MESHES["mesh"].get_all_groups()]

    def fails() -> None:
        with local_collectives():
            dist.all_reduce(numbers())
            assert (dist.get_rank(), dist.get_world_size(), dist.group.WORLD) == (RANK, SIZE, groups[0])
            raise ValueError("the labels are wrong")

    for _ in range(2):
        with pytest.raises(ValueError, match="the labels"):
            fails()
        for group in groups:
            with pytest.raises(RuntimeError):
                dist.all_reduce(numbers(), group=group)
