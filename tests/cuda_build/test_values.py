"""Values on the stub: small models train as on the CPU, and what is not known is counted and harmless."""

from __future__ import annotations

from typing import Any

import pytest

from batchfinder.testing import CudaStubFixture
from tests.cuda_build import operators, small_models

pytestmark = pytest.mark.cuda_build


def test_small_models_train_as_on_the_cpu(cuda_stub: CudaStubFixture) -> None:
    """Masks, routing, norms, recurrent layers, dropout-free attention and optimizers: the losses of the CPU."""
    seen = cuda_stub(memory="16GiB").run(small_models.all_losses, "cuda")
    expected = small_models.all_losses("cpu")
    assert seen.result.keys() == expected.keys()
    for name, losses in expected.items():
        assert seen.result[name] == pytest.approx(losses, abs=2e-3), name
    assert seen.report.values == {}


def test_operators_give_what_the_cpu_gives(cuda_stub: CudaStubFixture) -> None:
    """A hundred of them, with numbers, masks, shapes that depend on values, and factories; nothing is read unknown."""
    seen = cuda_stub().run(operators.compared)
    assert seen.result == []
    assert seen.report.values == {}


@pytest.mark.exhaustive
def test_values_change_nothing_about_memory(cuda_stub: CudaStubFixture) -> None:
    """Allocation by allocation, on autograd's own threads: what is followed is not seen by the allocator."""

    def train(name: str) -> int:
        import torch

        return len(small_models.losses(name, "adamw", "cuda")) + (0 if torch.cuda.is_initialized() else 1)

    for name in ("convolutions", "lstm"):  # which read no masks, that decide which way is taken
        sides = [cuda_stub(values=values, keep_events=True).run(train, name) for values in (True, False)]
        events = [[(each["action"], each["size"]) for each in side.events[0]] for side in sides]
        assert len(events[0]) > 500
        assert events[0] == events[1], name


def test_a_gradient_scaler(cuda_stub: CudaStubFixture) -> None:
    """Its flag is what the gradients are: a step is skipped for an infinity, and only then."""

    def scale() -> list[Any]:
        import torch

        weight = torch.nn.Parameter(torch.ones(8, device="cuda"))
        optimizer, scaler = torch.optim.SGD([weight], 0.5), torch.amp.GradScaler(init_scale=16.0)
        seen = []
        for factor in (1.0, float("inf"), 1.0):
            scaler.scale((weight * factor).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            seen += [weight[0].item(), scaler.get_scale()]
        return seen

    assert cuda_stub().run(scale).result == [0.5, 16.0, 0.5, 8.0, 0.0, 8.0]


def test_large_values_are_plausible_and_counted(cuda_stub: CudaStubFixture) -> None:
    """A loss of a large model is finite, nothing in it is NaN, a scaler steps; each read is told with its line."""

    def read() -> list[Any]:
        import torch

        big = torch.randn(4096, 1024, device="cuda")
        out = big @ big.T
        loss = out.square().mean()
        assert torch.isfinite(loss), "a guard against NaN"
        assert not torch.isnan(out).any()
        torch.nn.init.trunc_normal_(big)
        chosen = out.topk(2).indices
        return [loss.item(), bool(torch.isinf(out).all()), chosen[:3].tolist(), out.mean().cpu().tolist()]

    seen = cuda_stub().run(read)
    assert seen.result == [1.0, True, [[0, 1], [2, 3], [4, 5]], 1.0]
    assert any(where.startswith("a number at test_values.py:") for where in seen.report.values)
    assert "what is largest (experts, classes): each is chosen equally often" in seen.report.assumed


def test_what_is_written_in_parts_is_known(cuda_stub: CudaStubFixture) -> None:
    """New memory that a permutation fills is known; where a part is left out, what is read is counted."""

    def fill(whole: bool) -> list[float]:
        import torch

        places = torch.arange(6 if whole else 5, device="cuda").flip(0)
        made = torch.empty(6, device="cuda")
        made[places] = torch.arange(len(places), device="cuda").float()
        return [made[0].item(), made.max().item()]

    whole, part = cuda_stub().run(fill, True), cuda_stub().run(fill, False)
    assert (whole.result, whole.report.values) == ([5.0, 5.0], {})
    assert part.result[0] == 4.0
    assert sum(part.report.values.values()) == 2


def test_an_index_out_of_range_kills_the_context(cuda_stub: CudaStubFixture) -> None:
    """As a kernel's assertion does: also where the rows are too large to be computed."""

    def look_up(width: int) -> str:
        import torch

        table = torch.nn.Embedding(100, width, device="cuda")
        table(torch.tensor([[1, 100]], device="cuda").expand(64, 2).contiguous())
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            return str(error)
        return "nothing"

    def gather(width: int) -> str:
        import torch

        rows = torch.tensor([[1], [100]], device="cuda").expand(2, width)  # one number for each row, in no more memory
        torch.gather(torch.empty(100, width, device="cuda"), 0, rows)
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            return str(error)
        return "nothing"

    for width in (8, 1 << 20):
        assert "device-side assert triggered" in cuda_stub().run(look_up, min(width, 4096)).result
        assert "device-side assert triggered" in cuda_stub().run(gather, width).result


def test_random_numbers_follow_the_cards_generator(cuda_stub: CudaStubFixture) -> None:
    """The same state gives the same numbers, dropout in attention too; what is drawn moves it on."""

    def draw() -> list[bool]:
        import torch

        torch.manual_seed(3)
        before = torch.cuda.get_rng_state()
        first, second = torch.rand(4, device="cuda"), torch.rand(4, device="cuda")
        torch.cuda.set_rng_state(before)
        again = torch.rand(4, device="cuda")
        query = torch.ones(1, 2, 8, 16, device="cuda", requires_grad=True)
        attend = torch.nn.functional.scaled_dot_product_attention
        outs, grads = [], []
        for _ in range(2):
            torch.manual_seed(9)
            outs.append(attend(query, query, query, dropout_p=0.5))
            grads.append(torch.autograd.grad(outs[-1].square().sum(), query)[0])
        return [
            torch.equal(first, again), torch.equal(first, second), torch.equal(*outs), torch.equal(*grads),
            bool((outs[0] == outs[0][0, 0, 0, 0]).all()),
        ]  # fmt: skip

    assert cuda_stub().run(draw).result == [True, False, True, True, False]


def test_values_can_be_left_out(cuda_stub: CudaStubFixture) -> None:
    """Then nothing is written by kernels, and what a copy brought is all there is."""

    def add() -> float:
        import torch

        return (torch.ones(4).cuda() + 1).sum().item()

    assert cuda_stub(values=False).run(add).result != 8.0
    assert cuda_stub().run(add).result == 8.0
