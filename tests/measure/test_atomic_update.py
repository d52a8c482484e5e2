"""An optimizer's update that runs out of memory is applied once or not at all, bit for bit, and leaves no trace."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils._python_dispatch import TorchDispatchMode

from batchfinder.errors import HalfUpdated, OutOfMemory
from batchfinder.measure import atomic_update, optimizer_copy
from batchfinder.measure.atomic_update import AtomicUpdate

MESSAGE = "CUDA out of memory. Tried to allocate 20.00 MiB."
RECOVERED = (
    "{} ran out of memory within a step. Parameters, gradients and state are as they were before it, and it runs once"
    f" more. The device said: {MESSAGE}"
)


class Replacing(torch.optim.Optimizer):
    """As optimizers of old do: `.data`, gradients changed in place, numbers and lists in the state and in itself."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "taken": 0})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure=None):
        """One update, and what the closure returns."""
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        self.steps += 1
        self.recent = self.steps
        for group in self.param_groups:
            group["taken"] += 1
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("norms", []).append(float(parameter.grad.norm()))
                parameter.grad.mul_(0.5)
                parameter.data = parameter.data - group["lr"] * parameter.grad
                parameter.data.add_(torch.rand(()), alpha=0.01)
        return loss


KINDS = {
    "adamw, foreach": (torch.optim.AdamW, {"foreach": True, "weight_decay": 0.1}),
    "adam, one by one": (torch.optim.Adam, {"foreach": False, "amsgrad": True}),
    "adamw, fused": (torch.optim.AdamW, {"fused": True}),
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "foreach": True}),
    "adafactor": (torch.optim.Adafactor, {"lr": 0.1}),
    "replacing": (Replacing, {}),
}


class Fails(TorchDispatchMode):
    """Runs out of memory before or after the Nth operator of a step's update, in as many tries as there are numbers."""

    def __init__(self):
        super().__init__()
        self.armed = False
        self.at: list[int] = []
        self.count = 0
        self.after = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not self.armed:
            return func(*args, **(kwargs or {}))
        self.count += 1
        fails = bool(self.at) and self.count == self.at[0]
        if not fails or self.after:
            output = func(*args, **(kwargs or {}))
        if fails:
            self.at.pop(0)
            raise torch.OutOfMemoryError(MESSAGE)
        return output


class Training:
    """A net, its optimizer and the memory it fails for."""

    def __init__(self, kind="adamw, foreach"):
        made, settings = KINDS[kind]
        made([nn.Parameter(torch.ones(1))], **settings)  # from then on the class's own step runs the hooks as well
        self.fails = fails = Fails()

        class Armed(made):
            def step(self, closure=None):
                fails.armed, fails.count = True, 0  # the copy has been made
                try:
                    return super().step(closure)
                finally:
                    fails.armed = False

        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        self.optimizer = Armed(self.model.parameters(), **settings)
        self.messages: list[str] = []

    def protect(self):
        """Make updates atomic."""
        self.atomic = AtomicUpdate(self.optimizer, on_recovery=self.messages.append)
        return self

    def backward(self):
        """The loss of a batch, and its gradients."""
        self.optimizer.zero_grad()
        loss = self.model(torch.rand(5, 3)).square().mean()
        loss.backward()
        return loss

    def step(self, *at, after=False):
        """One step that runs out of memory at these operators, one number per try."""
        self.backward()
        self.fails.at, self.fails.after = list(at), after
        with self.fails:
            return self.optimizer.step()

    def bits(self):
        """All that training has changed, and the random numbers, as bytes."""
        parameters = [(tensor.detach(), tensor.grad) for tensor in self.model.parameters()]
        extra = {name: value for name, value in vars(self.optimizer).items() if name in ("steps", "recent")}
        return pickle.dumps(
            (_plain(parameters), _plain(self.optimizer.state_dict()), extra, torch.get_rng_state().tolist())
        )


def _plain(value):
    if isinstance(value, torch.Tensor):
        return (value.dtype, value.shape, value.flatten().tolist())
    if isinstance(value, dict):
        return {key: _plain(child) for key, child in value.items()}
    return [_plain(child) for child in value] if isinstance(value, list | tuple) else value


@pytest.fixture(autouse=True, scope="module")
def _little_garbage():
    """Clearing memory collects garbage, which takes long where much else is alive."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def operators(kind):
    """How many the first and second update of a kind have."""
    training = Training(kind)
    found = []
    for _ in range(2):
        training.step()
        found.append(training.fails.count)
    return found


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("kind", KINDS)
def test_once(kind, after):
    """Failing anywhere in the first or second update, training goes on as if it had not, down to the last bit."""
    expected = Training(kind)
    for _ in range(3):
        expected.step()
    for step, count in enumerate(operators(kind)):
        for at in sorted({1, max(1, count // 2), count}):
            training = Training(kind).protect()
            for index in range(3):
                training.step(*([at] if index == step else []), after=after)
            assert training.bits() == expected.bits(), (step, at)
            assert training.messages == [RECOVERED.format("Armed")]
            assert training.atomic.recoveries == 1


@pytest.mark.parametrize("kind", KINDS)
def test_not_at_all(kind):
    """Failing twice, everything is as before the update, state made by it gone, and the error says so."""
    for step, count in enumerate(operators(kind)):
        training = Training(kind).protect()
        for _ in range(step):
            training.step()
        training.backward()
        bits = training.bits()
        training.fails.at, training.fails.after = [count, count // 2], True
        with pytest.raises(OutOfMemory) as caught, training.fails:
            training.optimizer.step()
        assert training.bits() == bits
        advice = "Keep more of the memory free"
        if KINDS[kind][1].get("foreach", kind == "adafactor"):
            advice = "Armed(foreach=False) takes less at a time"
        assert str(caught.value) == (
            "does not fit: the step of Armed over 104 B of parameters ran out of memory twice, the second time with all"
            " free memory released. Nothing of it is applied: parameters, gradients and state are as they were before"
            f" it. {advice}. The device said: {MESSAGE}"
        )
        with training.fails:
            training.optimizer.step()  # and it can go on
        assert training.bits() != bits


def test_failing_update_after_update():
    """Where the copy is the only protection there is, as on a CPU, it is made however often updates fail."""
    expected = Training("adamw, foreach")
    for _ in range(5):
        expected.step()
    training = Training("adamw, foreach").protect()
    for _ in range(5):
        training.step(3, after=True)
    assert training.bits() == expected.bits()
    assert (training.atomic.place, training.atomic.recoveries) == ("device", 5)


@pytest.fixture
def _on_a_device(monkeypatch):
    """The tensors are on a device that has memory of its own, as far as an update can tell."""
    monkeypatch.setattr(atomic_update, "_device_of", lambda optimizer: torch.device("xpu"))


@pytest.mark.usefixtures("_on_a_device")
def test_updates_in_a_row_that_fail_on_a_device():
    """The second has the copies made on the host from then on; a single one, now and then, does not."""
    expected = Training()
    for _ in range(5):
        expected.step()
    training, places = Training().protect(), []
    for failing in (True, False, True, True, False):
        training.step(*([3] if failing else []), after=True)
        places.append(training.atomic.place)
    assert places == ["device", "device", "device", "host", "host"]
    assert training.bits() == expected.bits()


@pytest.mark.usefixtures("_on_a_device")
@pytest.mark.parametrize("host", [True, False])
def test_a_device_without_room_for_the_copy(monkeypatch, host):
    """The copy is on the host and takes the changes back from there, unless that is not wanted."""
    copy_of = optimizer_copy._TensorCopy.copy

    def full(self, host):
        if not host:
            raise torch.OutOfMemoryError(MESSAGE)
        copy_of(self, host)

    monkeypatch.setattr(optimizer_copy._TensorCopy, "copy", full)
    expected = Training()
    for _ in range(2):
        expected.step()
    training = Training()
    with AtomicUpdate(training.optimizer, host=host) as atomic:
        training.step()
        training.step(*([3] if host else []), after=True)
        assert atomic.place == ("host" if host else "nowhere")
    assert training.bits() == expected.bits()


def test_without_a_copy(monkeypatch):
    """With no room for a copy, an update that has changed nothing runs again; one that has is an error that says so."""

    def full(self, host):
        raise torch.OutOfMemoryError(MESSAGE)

    monkeypatch.setattr(optimizer_copy._TensorCopy, "copy", full)
    for kind in KINDS:
        expected = Training(kind)
        for _ in range(2):
            expected.step()
        training = Training(kind).protect()
        training.step()
        training.step(1)  # before the first operator
        assert training.bits() == expected.bits(), kind
        assert (training.atomic.place, training.atomic.copied_bytes) == ("nowhere", 0)
        with pytest.raises(HalfUpdated) as caught:
            training.step(training.fails.count, after=True)
        assert str(caught.value) == (
            "Armed ran out of memory within a step, and there was no room for the copy that would take the changes"
            " back: some parameters may be updated and others not. Start again from the last checkpoint, with a smaller"
            f" micro-batch or a larger headroom. The device said: {MESSAGE}"
        )


def test_a_copy_that_has_room_again(monkeypatch):
    """A place that had no room for the copy is left alone for a while, and then tried again."""
    training = Training().protect()
    copy_of = optimizer_copy._TensorCopy.copy
    tried = []

    def full(self, host):
        tried.append(host)
        raise torch.OutOfMemoryError(MESSAGE)

    monkeypatch.setattr(optimizer_copy._TensorCopy, "copy", full)
    for _ in range(3):
        training.step()
    assert (tried, training.atomic.place) == ([False], "nowhere")
    monkeypatch.setattr(optimizer_copy._TensorCopy, "copy", copy_of)
    for _ in range(100):
        training.step()
    assert training.atomic.place == "device"
    parameters = sum(tensor.nbytes for tensor in training.model.parameters())
    steps = 4 * len(list(training.model.parameters()))
    assert training.atomic.copied_bytes == 4 * parameters + steps  # with gradients and two moments


@pytest.mark.parametrize("positional", [False, True])
def test_closures(positional):
    """A closure runs once, with gradients, and its loss is returned, whether the update fails or not."""

    def train(at):
        training, calls, losses = Training("replacing").protect(), [], []

        def closure():
            calls.append(torch.is_grad_enabled())
            loss = training.backward()
            training.fails.count, training.fails.at = 0, [at] if len(calls) == 2 and at else []
            return loss

        for _ in range(3):
            with training.fails:
                loss = training.optimizer.step(closure) if positional else training.optimizer.step(closure=closure)
            losses.append(loss.item())
        assert calls == [True] * 3
        assert training.atomic.place == "device"
        return losses, training.bits(), training.atomic.recoveries

    plain, failing = train(0), train(30)
    assert failing[:2] == plain[:2]
    assert (plain[2], failing[2]) == (0, 1)


def test_what_fails_elsewhere():
    """An error that is not about memory, and one of a closure or of a hook, is raised unchanged."""
    training = Training()
    training.optimizer = torch.optim.AdamW(training.model.parameters())
    training.protect()
    bug = ValueError("a bug")
    full = torch.OutOfMemoryError(MESSAGE)

    def raising(error):
        def hook(*_):
            raise error

        return hook

    for error, register in (
        (bug, training.optimizer.register_step_pre_hook),
        (full, training.optimizer.register_step_pre_hook),
        (bug, training.optimizer.register_step_post_hook),
        (full, training.optimizer.register_step_post_hook),
    ):
        training.backward()
        handle = register(raising(error))
        before = training.bits()
        with pytest.raises(type(error)) as caught:
            training.optimizer.step()
        handle.remove()
        assert caught.value is error
        if register == training.optimizer.register_step_post_hook:
            assert training.bits() != before  # the update was over
        else:
            assert training.bits() == before
    with pytest.raises(torch.OutOfMemoryError) as caught:
        training.optimizer.step(raising(full))
    assert caught.value is full
    assert training.atomic.recoveries == 0
    training.step()


def test_hooks():
    """Hooks before and after a step run once each, though the update runs twice; those within it run with it."""

    def train(at, within):
        training, order = Training(), []
        if not within:
            training.optimizer = torch.optim.AdamW(training.model.parameters())
        if at is not None:
            training.protect()

        def halve(optimizer, args, kwargs):
            order.append("before")
            for parameter in training.model.parameters():
                parameter.grad.mul_(0.5)
            training.fails.armed, training.fails.count = not within, 0

        training.optimizer.register_step_pre_hook(halve)
        training.optimizer.register_step_post_hook(lambda *_: order.append("after"))
        training.step(*(at or ()), after=True)
        hooks = training.optimizer._optimizer_step_pre_hooks, training.optimizer._optimizer_step_post_hooks
        assert list(map(len, hooks)) == [1, 1]
        return training.bits(), order, len(training.messages)

    for within in (False, True):
        without, plain, failing = train(None, within), train([], within), train([3 if within else 28], within)
        assert failing[0] == plain[0] == without[0]
        assert plain[1] == without[1] == (["before"] * 2 + ["after"] * 2 if within else ["before", "after"])
        assert failing[1] == (["before"] if within else []) + plain[1]
        assert (plain[2], failing[2]) == (0, 1)


def test_schedulers_and_undo():
    """Schedulers made before or after work as ever, without a warning; afterwards the step is the class's own again."""
    optimizer = Training().optimizer
    atomic = AtomicUpdate(optimizer)
    assert optimizer.step.__wrapped__ is type(optimizer).step
    atomic.undo()
    assert "step" not in vars(optimizer)

    first = StepLR(optimizer, 1)
    patched = optimizer.step
    atomic = AtomicUpdate(optimizer)
    second = StepLR(optimizer, 1)  # finds the step patched already
    assert vars(optimizer)["step"] is atomic._wrapper
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
        first.step()
        second.step()
    atomic.undo()
    assert vars(optimizer)["step"] is patched

    optimizer = Training().optimizer
    with AtomicUpdate(optimizer) as atomic:
        scheduler = StepLR(optimizer, 1)  # goes on top
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer.step()
            scheduler.step()
        assert atomic.copied_bytes > 0
    atomic.copied_bytes = 0
    optimizer.step()
    assert atomic.copied_bytes == 0  # does nothing from now on


def test_no_trace():
    """Checkpoints and pickles are as without; the copy is freed with the step; nothing keeps the optimizer alive."""
    bits = []
    for protected in (False, True):
        training = Training()
        if protected:
            training.protect()
        training.step()
        bits.append(training.bits())
    assert bits[0] == bits[1]
    plain_optimizer = torch.optim.AdamW(training.model.parameters())
    before = pickle.dumps(plain_optimizer)
    atomic = AtomicUpdate(plain_optimizer)
    assert pickle.dumps(plain_optimizer) == before
    assert "step" not in vars(copy.deepcopy(plain_optimizer))
    copies = []
    made = optimizer_copy.OptimizerCopy.__init__

    def noted(self, *args, **kwargs):
        made(self, *args, **kwargs)
        copies.append(weakref.ref(self))

    gc.disable()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(optimizer_copy.OptimizerCopy, "__init__", noted)
            plain_optimizer.step()
            plain_optimizer.step(lambda: training.backward())
            plain_optimizer.step(closure=training.backward)
            alive = weakref.ref(plain_optimizer)
            del plain_optimizer
            assert alive() is None
            training.optimizer.param_groups[0]["betas"] = None
            with pytest.raises(TypeError):  # whose traceback lives on
                training.optimizer.step()
        assert len(copies) == 4
        assert [reference() for reference in copies] == [None] * 4
    finally:
        gc.enable()
    atomic.undo()


def test_grad_scaler():
    """GradScaler unscales, steps and skips as ever, and its step may fail and run again."""

    def train(at):
        training = Training("adamw, fused" if at is None else "adamw, foreach").protect()
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
        for index in range(4):
            training.optimizer.zero_grad()
            loss = training.model(torch.rand(5, 3)).square().mean() * (float("inf") if index == 2 else 1)
            scaler.scale(loss).backward()
            training.fails.at = [at] if at and index == 1 else []
            with training.fails:
                scaler.step(training.optimizer)
            scaler.update()
        return training.bits(), scaler.state_dict(), training.atomic.recoveries

    plain, failing = train(0), train(7)
    assert failing[:2] == plain[:2]
    assert (plain[2], failing[2]) == (0, 1)
    assert train(None)[2] == 0


def test_sparse_gradients():
    """Sparse gradients come back too."""

    def train(at):
        torch.manual_seed(0)
        model, fails = nn.Embedding(6, 3, sparse=True), Fails()
        optimizer = torch.optim.SparseAdam(model.parameters())
        atomic = AtomicUpdate(optimizer)
        for index in range(2):
            optimizer.zero_grad()
            model(torch.tensor([index, 3])).sum().backward()
            optimizer.register_step_pre_hook(lambda *_: None)
            fails.at, fails.after = [at] if index else [], True
            with fails:
                fails.armed, fails.count = bool(index), 0
                optimizer.step()
                fails.armed = False
        return _plain(optimizer.state_dict()), model.weight.tolist(), atomic.recoveries

    plain, failing = train(0), train(40)
    assert failing[:2] == plain[:2]
    assert failing[2] == 1


def test_optimizers_that_are_left_alone():
    """LBFGS, and any other that calls its closure again, is named and not touched."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    atomic = AtomicUpdate(optimizer)
    assert atomic.left_alone == (
        "LBFGS runs the forward and backward several times within a step. Its updates are not protected: one that runs"
        " out of memory may be left half done."
    )

    class Twice(torch.optim.SGD):
        """Sharpness-aware, roughly: the gradient that counts is that of the second forward."""

        def step(self, closure):
            with torch.enable_grad():
                closure()
                loss = closure()
            super().step()
            return loss

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(3, 2)).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    optimizer = Twice(model.parameters(), lr=0.1)
    atomic = AtomicUpdate(optimizer)
    assert atomic.left_alone is None
    before = closure().item()
    assert optimizer.step(closure).item() == before
    assert closure().item() < before
    assert atomic.left_alone is not None
    assert atomic.left_alone.startswith("Twice runs the forward and backward several times within a step. ")
    optimizer.step(closure)


def test_optimizers_within_optimizers():
    """What an optimizer that another one holds has changed is put back with it."""

    class Outer(torch.optim.Optimizer):
        def __init__(self, inner):
            super().__init__(inner.param_groups, {})
            self.inner = inner

        def step(self, closure=None):
            self.inner.step()
            if full and full.pop():
                raise torch.OutOfMemoryError(MESSAGE)

    full = []

    def train(fails):
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        inner = torch.optim.AdamW(model.parameters())
        outer = Outer(inner)
        AtomicUpdate(outer)
        for step in range(3):
            model(torch.ones(3, 2)).sum().backward()
            full.append(fails and step != 1)
            outer.step()
            full.clear()
        return _plain(inner.state_dict()), model.weight.tolist()

    assert train(True) == train(False)
