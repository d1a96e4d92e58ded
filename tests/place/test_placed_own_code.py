"""What a module's own code may do as an operator, what is refused, and what no trial shows."""

from __future__ import annotations

import copy
import gc
import itertools
import random
import threading
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy
import pytest
import torch
from processes import output_of
from runnable import short_searches
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

import graphir
from graphir.errors import CaptureError, EagerWarning
from graphir.facade.place.own_code import operator, trial


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    short_searches(monkeypatch, 100)


X = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))


def same(found: list[Tensor | None], expected: list[Tensor | None]) -> bool:
    return all(
        (a is None) == (b is None) and (a is None or torch.equal(a, b)) for a, b in zip(found, expected, strict=True)
    )


class Within(nn.Module):
    """A module of a kind between two layers, and another one that has most of the parameters."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first, self.last, self.inner = nn.Linear(8, 64), nn.Linear(64, 8), inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.last(self.first(x))).square()  # type: ignore[no-any-return]


class Layer(nn.Module):
    """A layer whose code reads a number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.alpha, self.table, self.aux = nn.Linear(8, 8), 1.0, torch.ones(8), None
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        scale = (2.0 if self.training else 5.0) * self.alpha * (x.sum().item() > -1e9)
        return self.layer(x) * scale * self.table  # type: ignore[no-any-return]


class Rebinds(Layer):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.mean = self.mean * 0.9 + x.mean(0).detach()
        return out + self.mean


class Tallies(Layer):
    def forward(self, x: Tensor) -> Tensor:
        self.alpha += 1
        return super().forward(x)


class Leaves(Layer):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.aux = out.abs().mean()
        return out


class Writes(Layer):
    def forward(self, x: Tensor) -> Tensor:
        self.table.mul_(0.9)
        return super().forward(x)


class Same(Layer):
    def forward(self, x: Tensor) -> Tensor:
        super().forward(x)
        return x.view(-1).view(x.shape)


class SetsData(Layer):
    def forward(self, x: Tensor) -> Tensor:
        self.mean.data.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return super().forward(x) + self.mean


class Local(Layer):
    """Adds to the gradients of its own parameters."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            self.layer(x.detach()).sum().backward()
        return super().forward(x)


class Restores(Layer):
    def forward(self, x: Tensor) -> Tensor:
        state = torch.get_rng_state()
        drawn = torch.rand(8)
        torch.set_rng_state(state)
        return super().forward(x) * drawn


class Draws(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = numpy.random.default_rng(0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.from_numpy(self.numbers.random(8).astype("float32"))


class Warm(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.step = itertools.count()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (0.1 if next(self.step) < 3 else 1.0)


class SetsWeight(Layer):
    def forward(self, x: Tensor) -> Tensor:
        self.layer.weight.data = torch.renorm(self.layer.weight.data, 2, 0, 0.5)
        return super().forward(x)


class Hooks(Layer):
    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda grad: grad * 0.1)
        return super().forward(x)


class Frees(Layer):
    def forward(self, x: Tensor) -> Tensor:
        y = x.detach().requires_grad_()
        with torch.enable_grad():
            (grad,) = torch.autograd.grad(super().forward(y).sum(), y)
        self.layer.bias.requires_grad_(False)
        return super().forward(x) + grad


class Gathers(Layer):
    """What gradients have been, in a buffer."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        out.register_hook(self.gather)
        return out.tanh()

    def gather(self, grad: Tensor) -> None:
        self.mean.add_(grad.sum(0))


class Hands(Layer):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.table


OVERWRITES = "overwrites an argument, a parameter, a buffer, or another tensor of its own"


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Rebinds, "changes 'mean' of the module"),
        (Tallies, "changes 'alpha' of the module"),
        (Leaves, "changes 'aux' of the module"),
        (Writes, OVERWRITES),
        (Same, "returns an argument, a tensor of its own, or one tensor twice, or a view of these"),
        (SetsData, OVERWRITES),
        (Restores, "two calls with the same numbers return other things"),
        (Draws, "has a generator or iterator of its own, 'numbers'"),
        (Warm, "has a generator or iterator of its own, 'step'"),
        (SetsWeight, OVERWRITES),
        (Hooks, "puts a hook on the gradient of an argument"),
        (Frees, "sets requires_grad of a parameter"),
        (Gathers, OVERWRITES),
        (Hands, "returns an argument, a tensor of its own"),
    ],
)
def test_what_changes_more_than_its_outputs_is_refused(kind: type[Layer], why: str) -> None:
    with pytest.raises(CaptureError, match=why):
        graphir.place(Within(kind()), (X,))


def pair(inner: Callable[[], nn.Module], cls: type[Within] = Within) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = cls(inner())
    twin = copy.deepcopy(model)
    with pytest.warns(EagerWarning):
        graphir.place(twin, (X,), device_map={"first": 0, "last": 1, "inner": 1})
    return model, twin


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [p.grad for p in model.parameters()]


def test_the_backward_is_in_the_mode_of_its_forward() -> None:
    model, twin = pair(Layer)
    for net in (model, twin):
        out = net(X)
        net.eval()
        out.sum().backward()
        assert not net.inner.training  # type: ignore[union-attr]
    assert same(gradients(twin), gradients(model))


@pytest.mark.parametrize("change", [lambda m: setattr(m.inner, "alpha", 3.0), lambda m: m.inner.table.fill_(9.0)])
def test_a_change_before_the_backward_is_what_it_is_in_the_model(change: Callable[[Any], Any]) -> None:
    model, twin = pair(Layer)
    raised = []
    for net in (model, twin):
        out = net(X)
        change(net)
        try:
            out.sum().backward()
        except RuntimeError as e:
            raised.append(str(e).partition(":")[0])
    assert raised in ([], ["one of the variables needed for gradient computation has been modified"] * 2) or (
        len(raised) == 2 and raised[0] == raised[1]
    )
    assert same(gradients(twin), gradients(model))


class Routes(nn.Module):
    """Which of its layers computes, and whether anything needs a gradient, depends on data."""

    def __init__(self, stops: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.stops = nn.Linear(8, 8), nn.Linear(8, 8), stops

    def forward(self, x: Tensor) -> Tensor:
        if x.sum().item() > 0:
            return self.a(x)  # type: ignore[no-any-return]
        return self.a(x).detach() if self.stops else self.b(x)


class Beside(Within):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.last(self.first(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("stops", [False, True])
def test_gradients_that_depend_on_data_are_those_of_the_model(stops: bool) -> None:
    model, twin = pair(lambda: Routes(stops), Beside)
    told = []
    for x in (X.abs(), -X.abs(), X.abs()):
        for net in (model, twin):
            net.zero_grad()
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                net(x).sum().backward()
            told += [str(w.message) for w in found]
        assert same(gradients(twin), gradients(model))
    assert len([text for text in told if "gradients of it go to other operands" in text]) == 1


def test_arguments_that_are_alike_as_text_are_told_apart() -> None:
    class Table:
        def __init__(self, factor: float) -> None:
            self.factor = factor

        def __repr__(self) -> str:
            return "a table"

    class Scales(nn.Module):
        def forward(self, x: Tensor, table: Table) -> Tensor:
            return x * table.factor * (x.sum().item() > -1e9)

    class Holds(Within):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__(inner)
            self.table = Table(1.0)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(self.last(self.first(x)), self.table)  # type: ignore[no-any-return]

    model, twin = pair(Scales, Holds)
    assert torch.equal(twin(X), model(X))
    model.table = twin.table = Table(5.0)
    with pytest.warns(graphir.RecaptureWarning):
        assert torch.equal(twin(X), model(X))


def test_a_model_with_such_modules_is_let_go() -> None:
    model = pair(Layer)[1]
    model(X).sum().backward()
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_a_forward_that_was_set_on_the_module_is_refused() -> None:
    model = Within(Layer())
    model.inner.forward = model.inner.forward  # type: ignore[method-assign]
    with pytest.raises(CaptureError, match="its forward was set on the module itself"):
        graphir.place(model, (X,))


def test_an_error_of_the_backward_is_the_module_s_own() -> None:
    class Stops(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            if grad.abs().max().item() > 100:
                raise ValueError("the gradient is too large")
            return grad * 2

    class Careful(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return Stops.apply(super().forward(x))  # type: ignore[no-any-return]

    twin = pair(Careful)[1]
    twin(X).sum().backward()
    with pytest.raises(ValueError, match="the gradient is too large"):
        (twin(X).sum() * 1e9).backward()


def test_an_output_that_nobody_uses_has_no_gradient() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Any:
            x.sum().item()
            return self.a(x), self.b(x)

    class First(Within):
        def forward(self, x: Tensor) -> Any:
            return self.inner(self.last(self.first(x)))[0]

    model, twin = pair(Two, First)
    for net in (model, twin):
        net(X).sum().backward()
    assert same(gradients(twin), gradients(model))
    assert [p.grad is None for p in twin.inner.parameters()] == [False, False, True, True]  # type: ignore[union-attr]


def test_a_gradient_of_another_module_is_refused() -> None:
    class Borrows(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.lender[0].weight[0, 0]  # type: ignore[no-any-return,operator,index]

    model = Within(Borrows())
    model.inner.lender = [model.first]  # type: ignore[assignment]
    with pytest.raises(CaptureError, match="goes to a tensor that is neither an argument nor its own"):
        graphir.place(model, (X,))


def test_a_list_that_the_code_fills_is_refused() -> None:
    class Collects(Layer):
        def forward(self, x: Tensor, losses: list[Tensor]) -> Tensor:  # type: ignore[override]
            out = super().forward(x)
            losses.append(out.mean())
            return out

    class Adds(Within):
        def forward(self, x: Tensor) -> Tensor:
            losses: list[Tensor] = []
            return self.inner(self.last(self.first(x)), losses) + sum(losses)  # type: ignore[no-any-return]

    with pytest.raises(CaptureError, match="changes a list or dict that it is given"):
        graphir.place(Adds(Collects()), (X,))


class Rare(Layer):
    """What it does to numbers beyond 20 no trial shows."""

    def __init__(self, does: Callable[[Rare, Tensor], object]) -> None:
        super().__init__()
        self.does = does

    def forward(self, x: Tensor) -> Tensor:
        if x.abs().max().item() > 20:
            self.does(self, x)
        return super().forward(x)


def halve(tensor: Tensor) -> None:
    with torch.no_grad():
        tensor.mul_(0.5)


@pytest.mark.parametrize(
    "does",
    [
        lambda m, x: m.layer.weight.data.mul_(0.5),
        lambda m, x: halve(m.layer.weight),
        lambda m, x: x.data.mul_(0.5),
        lambda m, x: m.table.mul_(0.5),
        lambda m, x: setattr(m, "alpha", m.alpha + 1),
        lambda m, x: setattr(m.layer.weight, "data", m.layer.weight.data * 0.5),
        lambda m, x: m.register_buffer("mean", m.mean + 1),
    ],
)
def test_what_no_trial_shows_is_done_once(does: Callable[[Rare, Tensor], object]) -> None:
    model, twin = pair(lambda: Rare(does))
    for x in (X, X * 1000, X):
        for net in (model, twin):
            net.zero_grad()
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                out = net(x.clone())
                out.sum().backward()
            net.out, net.told = out.detach(), [str(w.message) for w in told]  # type: ignore[assignment]
        assert torch.equal(twin.out, model.out) and same(gradients(twin), gradients(model))  # type: ignore[arg-type]
        assert not any("a plan has failed" in text for text in (*model.told, *twin.told))  # type: ignore[misc]
    assert all(map(torch.equal, twin.state_dict().values(), model.state_dict().values()))
    assert twin.inner.alpha == model.inner.alpha and torch.equal(twin.inner.table, model.inner.table)  # type: ignore


def test_own_code_that_overwrites_its_argument_runs_in_the_model() -> None:
    model, twin = pair(lambda: Rare(lambda _, x: x.mul_(0.5)))
    for x in (X, X * 1000, X):
        for net in (model, twin):
            net.zero_grad()
        with pytest.warns(EagerWarning, match="a plan has failed") if x.max() > 100 else warnings.catch_warnings():
            found = twin(x.clone())
        assert torch.equal(found, model(x.clone()))
        found.sum().backward()
        model(x.clone()).sum().backward()
        assert same(gradients(twin), gradients(model))


def test_the_first_capture_of_own_code_is_as_the_second() -> None:
    assert output_of(
        """
import graphir, warnings
from torch import nn
warnings.simplefilter("ignore")
class Layer(nn.Linear):
    def forward(self, x):
        return super().forward(x) * (x.sum().item() > -1e9)
for _ in range(2):
    net = graphir.place(nn.Sequential(nn.Linear(2, 64), nn.Linear(64, 2), Layer(2, 2)), (X[None],))
    net(X[None]).sum().backward()
    print(len(net.placement.plans))
"""
    ) == ["2", "2"]


def test_a_backward_that_runs_the_model_once_more_has_the_forward_s_mask() -> None:
    class Drops(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(x, 0.5, self.training) * (x.sum().item() > -1e9)

    class Two(Within):
        def forward(self, x: Tensor) -> Any:
            h = self.first(x)
            return self.inner(self.last(h)), h.mean(1)

    _, twin = pair(Drops, Two)
    for create in (False, True):
        y, z = twin(X)
        start = y.sum() + z.sum() if create else y.sum()
        (grad,) = torch.autograd.grad(start, twin.last.bias, create_graph=create)  # type: ignore[union-attr,arg-type]
        assert torch.equal(grad, (y != 0).sum(0) * 2.0)


def test_parameters_are_parameters_with_their_attributes() -> None:
    class Gains(Layer):
        def forward(self, x: Tensor) -> Tensor:
            gain = getattr(self.layer.weight, "gain", 1.0) * (2 if isinstance(self.layer.weight, nn.Parameter) else 1)
            return super().forward(x) * gain

    model, twin = pair(Gains)
    for net in (model, twin):
        net.inner.layer.weight.gain = 3.0  # type: ignore[union-attr]
    assert torch.equal(twin(X), model(X))


class Packed(nn.Module):
    """The recurrent module of sequences that come with their lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        found = pad_packed_sequence(self.recurrent(packed)[0], batch_first=True, total_length=x.shape[1])
        return found[0]  # type: ignore[no-any-return]


def test_recurrent_modules_run_their_own_code() -> None:
    class Reads(Within):
        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:  # type: ignore[override]
            return self.inner(self.last(self.first(x)), lengths)  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model = Reads(Packed())
    twin, given = copy.deepcopy(model), (torch.randn(3, 5, 8), torch.tensor([5, 2, 4]))
    with pytest.warns(EagerWarning, match="'inner' of Reads runs its own code inside of the plans"):
        graphir.place(twin, given, device_map={"first": 0, "last": 1, "inner": 1})
    for net in (model, twin):
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            net(*given).square().sum().backward()
            optimizer.step()
    assert len(twin.placement.plans) == 2
    assert same(gradients(twin), gradients(model))
    assert all(map(torch.equal, twin.parameters(), model.parameters()))


def test_one_such_module_may_be_within_another() -> None:
    class Holds(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.within = Layer()

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.within(x))

    model, twin = pair(Holds)
    for net in (model, twin):
        net(X).sum().backward()
    assert same(gradients(twin), gradients(model))


def test_a_checkpoint_may_be_around_such_a_module() -> None:
    class Checkpointed(Within):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, self.last(self.first(x)), use_reentrant=False)  # type: ignore[no-any-return]

    model, twin = pair(Layer, Checkpointed)
    for net in (model, twin):
        net(X).sum().backward()
    assert same(gradients(twin), gradients(model))


def test_an_argument_that_is_made_in_each_call_is_refused() -> None:
    class Options:
        pass

    class Takes(Layer):
        def forward(self, x: Tensor, options: Options) -> Tensor:  # type: ignore[override]
            return super().forward(x)

    class Makes(Within):
        def forward(self, x: Tensor) -> Tensor:
            return self.inner(self.last(self.first(x)), Options())  # type: ignore[no-any-return]

    with pytest.raises(CaptureError, match="it is given another object in each call, among arguments"):
        graphir.place(Makes(Takes()), (X,))


def test_a_trial_that_waits_for_this_thread_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_LONGEST", 0.5)
    lock = threading.RLock()

    class Locks(Layer):
        def forward(self, x: Tensor) -> Tensor:
            with lock:
                return super().forward(x)

    with lock, pytest.raises(CaptureError, match=r"has not ended after 0.5 s: does it wait for a lock"):
        graphir.place(Within(Locks()), (X,))


def test_a_backward_of_its_own_adds_to_its_gradients() -> None:
    model, twin = pair(Local)
    for net in (model, twin):
        net(X).sum().backward()
    assert same(gradients(twin), gradients(model))


def test_two_threads_may_call_it() -> None:
    model, twin = pair(Layer)
    expected = torch.autograd.grad(model(X).sum(), list(model.parameters()))
    found: list[bool] = []

    def call() -> None:
        for _ in range(5):
            grads = torch.autograd.grad(twin(X).sum(), list(twin.parameters()))
            found.append(all(map(torch.equal, grads, expected)))

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 15


def test_compiled_functions_stay_compiled() -> None:
    calls = []

    def backend(graph: Any, example: Any) -> Callable[..., Any]:
        return lambda *args: (calls.append(1), graph.forward(*args))[1]

    compiled = torch.compile(lambda x, scale: torch.tanh(x * scale), backend=backend)

    class Compiles(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return compiled(super().forward(x), self.table)  # type: ignore[no-any-return]

    model, twin = pair(Compiles)
    for net in (model, twin, twin, model):
        calls.clear()
        net(X).sum().backward()
        assert calls == [1]
    assert same([twin(X).detach()], [model(X).detach()])


def test_graphs_go_with_their_calls() -> None:
    _, twin = pair(Layer)
    others = set(operator._graphs)

    def kept() -> int:
        gc.collect()
        return len(set(operator._graphs) - others)

    out = twin(X)
    assert kept() == 1
    del out
    assert kept() == 0
    out = twin(X).sum()
    out.backward(retain_graph=True)
    assert kept() == 1
    out.backward()
    assert kept() == 0
    with torch.no_grad():
        twin(X)
    assert kept() == 0


class Book(Layer):
    """Resets itself at large numbers, which the code says in words."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("resets", torch.zeros(()))
        self.scale = 1.0

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        large = x.abs().max().item() > 20
        if large:
            self.layer.weight.data.mul_(0.5)
            self.resets += 1
            self.scale *= 2
        return self.layer(x) * self.scale, ("reset" if large else "kept")


class Raises(Layer):
    """Ends training where numbers are too large, after it has drawn one."""

    def forward(self, x: Tensor) -> Tensor:
        self.layer.bias.data.add_(float(x.abs().max().item() > 20))
        if x.abs().max().item() > 20:
            raise ValueError(f"too large, {random.random()}")
        return self.layer(x)  # type: ignore[no-any-return]


def test_own_code_runs_once_where_a_plan_fails_behind_it() -> None:
    class Reads(Within):
        def forward(self, x: Tensor) -> Tensor:
            return self.inner(F.dropout(self.last(self.first(x)), 0.5))[0]  # type: ignore[no-any-return]

    model, twin = pair(Book, Reads)
    given = torch.randn(6, 8) * 1000
    for net in (model, twin):
        torch.manual_seed(1)
        number = int(torch.randint(2**62, ()))
        torch.manual_seed(1)
        with graphir.seeded(number) if net is model else pytest.warns(EagerWarning, match="other things that are no"):
            found = net(given)
        found.square().sum().backward()
        assert net.inner.scale == 2.0 and net.inner.resets == 1  # type: ignore[union-attr]
    assert same(gradients(twin), gradients(model))
    assert all(map(torch.equal, twin.parameters(), model.parameters()))


def test_an_exception_of_own_code_is_raised_once() -> None:
    model, twin = pair(Raises)
    for net in (model, twin):
        random.seed(0)
        with pytest.raises(ValueError, match=r"too large, 0\.844421851525048"):
            net(X * 1000)
        assert random.random() == 0.7579544029403025
    assert all(map(torch.equal, twin.parameters(), model.parameters()))


AUX: list[Tensor] = []


class HandsOn(Layer):
    def forward(self, x: Tensor) -> Tensor:
        found = self.layer(x)
        if x.sum().item() > -1e9:
            AUX.append(found.square().mean())
        return found  # type: ignore[no-any-return]


class Marks(Layer):
    def forward(self, x: Tensor) -> Tensor:
        found = self.layer(x) * (x.sum().item() > -1e9)
        found.mark = 2
        return found  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (HandsOn, "something beside its outputs keeps its graph: a global.*let the module return what it changes"),
        (Marks, "it sets an attribute of a tensor that it returns"),
    ],
)
def test_what_is_handed_on_beside_the_outputs_is_refused(kind: type[nn.Module], why: str) -> None:
    with pytest.raises(CaptureError, match=f"(?s){why}"):
        graphir.place(Within(kind()), (X,), device_map={"first": 0, "last": 1, "inner": 1})
    AUX.clear()


def test_arguments_that_are_one_tensor_stay_one() -> None:
    class Compares(Layer):
        def forward(self, q: Tensor, k: Tensor, weight: Tensor) -> Tensor:  # type: ignore[override]
            factor = (1 if q is k else 3) * (1 if weight is self.layer.weight else 5) * (q.sum().item() > -1e9)
            return self.layer(q) * factor + k * weight.sum()

    class Twice(Within):
        def forward(self, x: Tensor) -> Tensor:
            h = self.last(self.first(x))
            return self.inner(h, h, self.inner.layer.weight)  # type: ignore[no-any-return,union-attr]

    model, twin = pair(Compares, Twice)
    for net in (model, twin):
        net(X).square().sum().backward()
    assert torch.equal(twin(X), model(X))
    assert torch.equal(twin.inner.layer.weight.grad, model.inner.layer.weight.grad)  # type: ignore[union-attr,arg-type]


def test_a_net_is_frozen_between_its_forward_and_its_backward() -> None:
    _, twin = pair(Layer)
    x = X.clone().requires_grad_()
    loss = twin(x).sum()
    twin.requires_grad_(False)
    loss.backward()
    assert x.grad is not None and all(param.grad is None for param in twin.inner.parameters())


def test_hooks_of_parameters_are_called_in_every_thread() -> None:
    _, twin = pair(Layer)
    called: list[int] = []
    twin.inner.layer.weight.register_hook(lambda _: called.append(1))  # type: ignore[union-attr,operator]

    def run(_: int) -> None:
        for _ in range(50):
            torch.autograd.grad(twin(X).sum(), list(twin.parameters()))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run, range(4)))
    assert len(called) == 200


class Appends(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        AUX.append(grad)
        return grad


def test_what_a_forward_changes_around_the_model_is_told() -> None:
    class Counts(Within):
        def forward(self, x: Tensor) -> Tensor:
            AUX.append(x.shape[0])  # type: ignore[arg-type]
            return self.last(self.first(x))  # type: ignore[no-any-return]

    class Hooks(Within):
        def forward(self, x: Tensor) -> Tensor:
            found = self.last(self.first(x))
            if found.requires_grad:
                found.register_hook(AUX.append)
            return found  # type: ignore[no-any-return]

    class Applies(Within):
        def forward(self, x: Tensor) -> Tensor:
            return Appends.apply(self.last(self.first(x)))  # type: ignore[no-any-return,no-untyped-call]

    for kind in (Counts, Hooks, Applies):
        with pytest.warns(EagerWarning, match=f"a forward in {kind.__name__} changes 'AUX', which a plan does not do"):
            graphir.place(kind(Layer()), (X,))
        assert AUX == []


class Interrupted(nn.Module):
    """Own code that Ctrl-C strikes once, between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x) * (x.sum().item() > -1e9)
        if STRIKES and STRIKES.pop():
            raise KeyboardInterrupt
        return out


STRIKES: list[bool] = []


class Gathers(nn.Module):
    """Own code whose shapes follow the data, so that plans fail where these are others."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x[(x.mean(1) > 0).nonzero().flatten()], x[:2]])


def test_a_call_that_was_interrupted_leaves_nothing() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Interrupted(), Gathers(), nn.Linear(8, 4))
    plain, x = copy.deepcopy(model), torch.randn(6, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graphir.place(model, (x,), device_map={"0": 0, "1": 1, "2": 1, "3": 0}, binding="cpu")
        STRIKES.append(True)
        with pytest.raises(KeyboardInterrupt):
            model(x)
        for seed in range(4):
            x = torch.randn(6, 8, generator=torch.Generator().manual_seed(seed))
            assert torch.equal(model(x), plain(x))


class Around(Within):
    """Reads the argument of the module inside before that module has it, and after."""

    def forward(self, x: Tensor) -> Tensor:
        before = self.last(self.first(x)).detach()
        return self.inner(x) + before + self.last(self.first(x)) + x  # type: ignore[no-any-return]


class AroundActivation(Around):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * 1.5)


@pytest.mark.parametrize("cls", [Around, AroundActivation])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_an_overwritten_argument_is_what_it_is_in_the_model(cls: type[Within], mode: Callable[[], Any]) -> None:
    model, twin = pair(lambda: Rare(lambda _, x: x.clamp_(-10, 10)), cls)
    for x in (X, X * 1000, X):
        given, other = x.clone(), x.clone()
        with mode(), warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            found, expected = twin(given), model(other)
        assert torch.equal(found, expected) and torch.equal(given, other)
        assert any("overwrites an argument" in str(w.message) for w in told) == (x.max() > 100)
        if mode is torch.enable_grad:
            for net, out in ((model, expected), (twin, found)):
                net.zero_grad()
                with torch.enable_grad():
                    out.square().sum().backward()
            assert same(gradients(twin), gradients(model))


def test_a_buffer_that_other_parts_read_is_not_overwritten_unheard() -> None:
    class Reads(Within):
        def forward(self, x: Tensor) -> Tensor:
            return self.inner(self.last(self.first(x))) @ self.inner.mean.diag()  # type: ignore[no-any-return,operator,union-attr]

    _, twin = pair(lambda: Rare(lambda m, _: m.mean.add_(1)), Reads)  # type: ignore[operator]
    with pytest.raises(
        RuntimeError, match=r"the own code of 'Rare' .* overwrites a parameter or buffer that other parts"
    ):
        twin(X * 1000)


def test_a_graph_that_own_code_leaves_elsewhere_is_told_in_its_backward() -> None:
    found: list[Tensor] = []
    model, twin = pair(lambda: Rare(lambda m, x: found.append(m.layer(x).square().mean())))
    for net in (model, twin):
        out = net(X * 1000).sum() + found[-1]
        if net is model:
            out.backward()
            continue
        with pytest.raises(RuntimeError, match=r"the own code of 'Rare' .* has left a tensor with a graph elsewhere"):
            out.backward()


def test_what_own_code_reads_beyond_its_own_has_its_gradient() -> None:
    class Borrows(Layer):
        lent: list[nn.Module]

        def forward(self, x: Tensor) -> Tensor:
            found = super().forward(x)
            return found + self.lent[0](x) if x.abs().max().item() > 20 else found

    class Lends(Within):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__(inner)
            self.extra = nn.Linear(8, 8)
            inner.lent = [self.extra]  # type: ignore[assignment]

    torch.manual_seed(0)
    model = Lends(Borrows())
    twin = copy.deepcopy(model)
    with pytest.warns(EagerWarning):
        graphir.place(twin, (X,), device_map={"first": 0, "last": 1, "inner": 1, "extra": 0})
    for x in (X, X * 1000, X * 1000, X):
        for net in (model, twin):
            net.zero_grad()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                net(x).sum().backward()
        assert same(gradients(twin), gradients(model))


def test_an_argument_with_an_attribute_runs_the_model_s_own_code() -> None:
    class Weighs(Within):
        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x)) * getattr(x, "weight", 1.0)  # type: ignore[no-any-return]

    model, x = Weighs(nn.Identity()), X.clone()
    twin = copy.deepcopy(model)
    graphir.place(twin, (X,), device_map={"first": 0, "last": 1})
    x.weight = 3.0  # type: ignore[attr-defined]
    with pytest.warns(EagerWarning, match="an argument has an attribute, 'weight', that is set on the tensor"):
        assert torch.equal(twin(x), model(x))


class Centred(Layer):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        out = self.layer(x) - self.mean
        return out * 2 if mask.any() else out


class Masked(Within):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        return self.inner(self.last(self.first(x)), mask)  # type: ignore[no-any-return]


@pytest.mark.parametrize("change", ["mean", "bias", "mask"])
def test_what_an_own_backward_does_not_read_may_change_before_it(change: str) -> None:
    torch.manual_seed(0)
    model, mask = Masked(Centred()), torch.ones(6, dtype=torch.bool)
    twin = copy.deepcopy(model)
    with pytest.warns(EagerWarning):
        graphir.place(twin, (X, mask), device_map={"first": 0, "last": 0, "inner": 1})
    for net in (model, twin):
        mask.fill_(True)
        out = net(X, mask)
        with torch.no_grad():
            changed = {"mean": net.inner.mean, "bias": net.inner.layer.bias, "mask": mask}[change]  # type: ignore[union-attr]
            changed.zero_()  # type: ignore[operator]
        out.square().mean().backward()
    assert same(gradients(twin), gradients(model))


def test_what_an_own_backward_reads_may_not_change_before_it() -> None:
    _, twin = pair(Layer)
    out = twin(X)
    with torch.no_grad():
        twin.inner.layer.weight.mul_(0)  # type: ignore[union-attr,operator]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
