"""A module that has changed is what runs next, by ``compile`` and on the fast path: any part that a step reads."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import math
import random
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import graphir
from graphir.errors import CaptureError, EagerWarning, SessionError

pytestmark = pytest.mark.usefixtures("few_objects")

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


def made() -> Any:
    """A module of classes and functions of its own, so that a test may change these."""

    class Config:
        gain = 1.0

        def __init__(self) -> None:
            self.rate, self.rates = 1.0, [1.0]

    class Base(nn.Module):
        scale = 2.0
        table = {"a": 1.0}  # noqa: RUF012

        def before(self, x: Tensor) -> Tensor:
            return x

        @property
        def factor(self) -> float:
            return 1.0

    def plain(x: Tensor, k: float = 1.0) -> Tensor:
        return x * k

    class Model(Base):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.config, self.beta, self.names = Config(), 1.0, ["relu"]
            self.mask, self.function, self.flag = torch.ones(4), plain, True
            self.array, self.nested = numpy.ones(4, dtype=numpy.float32), {"a": [1.0]}
            self.unregistered = [nn.Linear(4, 4).requires_grad_(False)]
            self.space = types.SimpleNamespace(mask=torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            made = self.unregistered[0](self.fc(self.before(x))) * self.scale * self.table["a"] * self.factor
            made = made * self.config.gain * self.config.rate * self.config.rates[0] * self.nested["a"][0]
            made = self.function(made) * self.mask * self.space.mask + torch.from_numpy(self.array) * self.beta
            for name in self.names:
                made = getattr(torch, name)(made)
            return made if self.flag is True else -made

    torch.manual_seed(1)
    return Model()


def put(owner: Callable[[Any], Any], name: str, value: Any) -> Callable[[Any], None]:
    return lambda model: setattr(owner(model), name, value)


def itself(model: Any) -> Any:
    return model


def base(model: Any) -> Any:
    return type(model).__mro__[1]


def twice(self: Any, x: Tensor) -> Tensor:
    return x * 2


CHANGES: dict[str, Callable[[Any], None]] = {
    "attribute": put(itself, "beta", 3.0),
    "attribute of another type": put(itself, "flag", 1),
    "negative zero": put(itself, "beta", -0.0),
    "attribute of the class": put(type, "scale", 5.0),
    "attribute of a base class": put(base, "scale", 5.0),
    "dict of a base class": lambda m: base(m).table.update(a=3.0),
    "method": put(type, "before", twice),
    "code of a method": lambda m: setattr(base(m).before, "__code__", twice.__code__),
    "method of the instance": put(itself, "before", lambda x: x * 2),
    "forward": put(type, "forward", lambda self, x: self.fc(x)),
    "property": put(type, "factor", property(lambda self: 3.0)),
    "code of a property": lambda m: setattr(base(m).factor.fget, "__code__", (lambda self: 3.0).__code__),
    "defaults of a function": lambda m: setattr(m.function, "__defaults__", (3.0,)),
    "attribute of an object": put(lambda m: m.config, "rate", 3.0),
    "attribute of an object's class": put(lambda m: type(m.config), "gain", 3.0),
    "list of an object": lambda m: m.config.rates.__setitem__(0, 3.0),
    "list in a dict": lambda m: m.nested["a"].__setitem__(0, 3.0),
    "list": lambda m: m.names.append("tanh"),
    "array": lambda m: m.array.__setitem__(1, 3.0),
    "tensor": lambda m: m.mask.mul_(3),
    "tensor by data": lambda m: m.mask.data.fill_(3),
    "tensor by numpy": lambda m: m.mask.numpy().fill(3),
    "another tensor": put(itself, "mask", torch.full((4,), 3.0)),
    "other memory of a tensor": lambda m: setattr(m.mask, "data", torch.full((4,), 3.0)),
    "tensor of an object": lambda m: m.space.mask.numpy().fill(3),
    "tensor of an unregistered module": lambda m: m.unregistered[0].weight.data.fill_(0.1),
    "unregistered module": lambda m: m.unregistered.__setitem__(0, nn.Identity()),
    "module added": lambda m: m.fc.register_module("late", nn.ReLU()),
    "hook": lambda m: m.fc.register_forward_hook(lambda module, args, made: made * 2),
}
UNTOLD = {"tensor", "tensor by data", "tensor by numpy", "tensor of an object", "tensor of an unregistered module"}
"""Plans read these where they are."""


def compiled(model: nn.Module) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    return graphir.compile(model, (X,)).step, model


def replicated(model: nn.Module) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    replicas = graphir.DataParallel(model, [0, 1], binding="cpu")
    return replicas, lambda x: torch.cat([model(share) for share in x.chunk(2)])


WAYS = pytest.mark.parametrize("way", [compiled, replicated])


@pytest.fixture
def told() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


def in_turn(names: list[str], groups: int) -> list[list[str]]:
    return [names[i::groups] for i in range(groups)]


@pytest.mark.parametrize(
    ("way", "changes"),
    [
        *[(compiled, changes) for changes in in_turn([*CHANGES], 5)],
        (replicated, ["attribute", "method", "tensor", "another tensor", "module added", "hook"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else value.__name__,
)
def test_a_change_is_followed(way: Any, changes: list[str], told: list[warnings.WarningMessage]) -> None:
    model = made()
    run, eager = way(model)
    for change in [None, *changes]:
        if change is not None:
            CHANGES[change](model)
        with torch.no_grad():
            assert torch.equal(run(X), eager(X)), change
        hooked = change == "hook" and way is replicated
        expected = [EagerWarning if hooked else graphir.RecaptureWarning] if {change} - UNTOLD - {None} else []
        assert [warning.category for warning in told] == expected, change
        told.clear()


class Entries(dict[str, float]):
    gain: float


@dataclasses.dataclass
class Tree:
    rate: float = 1.0
    branches: list[Tree] = dataclasses.field(default_factory=list)


class Holding(nn.Module):
    """Numbers in all that an attribute may be; the forward itself fills a dict and a list."""

    def __init__(self) -> None:
        super().__init__()

        class Config:
            rate = 1.0

        def scaled(x: Tensor, by: list[float] = [1.0]) -> Tensor:  # noqa: B006
            return x * by[0]

        self.config, self.namespace, self.scaled = Config, argparse.Namespace(rate=1.0), scaled
        self.entries, self.tree = Entries(), Tree(branches=[Tree()])
        self.entries.gain = 1.0
        self.user_dict, self.chain = collections.UserDict(rate=1.0), collections.ChainMap({"rate": 1.0})
        self.noise = torch.distributions.Normal(0.0, 1.0)
        self._known, self._listed = {"rate": 1.0}, [1.0]

    def forward(self, x: Tensor) -> Tensor:
        self._known["set up"] = True
        if len(self._listed) == 1:
            self._listed.append(0.0)
        made = self.scaled(x) * self.config.rate * self.namespace.rate * self.entries.gain * self.tree.branches[0].rate
        made = made * self.user_dict["rate"] * self.chain["rate"] * self._known["rate"] * self._listed[0]
        return made * self.noise.scale


HELD: dict[str, Callable[[Any], None]] = {
    "config.rate": lambda m: setattr(m.config, "rate", 3.0),
    "namespace.rate": lambda m: setattr(m.namespace, "rate", 3.0),
    "scaled.__defaults__[0][0]": lambda m: m.scaled.__defaults__[0].__setitem__(0, 3.0),
    "entries.gain": lambda m: setattr(m.entries, "gain", 3.0),
    "tree.branches[0].rate": lambda m: setattr(m.tree.branches[0], "rate", 3.0),
    "user_dict.data['rate']": lambda m: m.user_dict.update(rate=3.0),
    "chain.maps[0]['rate']": lambda m: m.chain.update(rate=3.0),
    "_known['rate']": lambda m: m._known.update(rate=3.0),
    "_listed[0]": lambda m: m._listed.__setitem__(0, 3.0),
    "noise.scale": lambda m: setattr(m.noise, "scale", torch.tensor(3.0)),
}


def test_what_attributes_hold_is_seen_as_far_as_it_goes(told: list[warnings.WarningMessage]) -> None:
    model = Holding()
    run, eager = compiled(model)
    run(X)
    for name, change in HELD.items():
        change(model)
        assert torch.equal(run(X), eager(X)), name
        (warning,) = told
        name = name.replace("config.", f"{model.config.__qualname__}.")
        assert repr(name) in str(warning.message)
        told.clear()


def test_kernels_of_attention_are_those_of_the_call(told: list[warnings.WarningMessage]) -> None:
    class Attention(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.scaled_dot_product_attention(x, x, x)

    run, eager = replicated(Attention())
    x = torch.randn(4, 2, 33, 16, generator=torch.Generator().manual_seed(0))
    whole = run(x)
    with sdpa_kernel(SDPBackend.MATH):
        assert torch.equal(run(x), eager(x))
        assert not torch.equal(run(x), whole)
    assert torch.equal(run(x), whole)
    assert not told


def test_the_remedy_names_the_attribute_of_the_module() -> None:
    def train(allowed: tuple[str, ...]) -> None:
        step = graphir.compile(model, (X,), allow_changes=allowed)
        for model.entries.calls in range(10):
            step.step(X)

    model: Any = Holding()
    with (
        pytest.warns(graphir.RecaptureWarning),
        pytest.raises(SessionError, match=r"'entries\.calls' .*8 times") as refused,
    ):
        train(())
    assert "if nothing depends on 'entries', pass allow_changes=('entries',)" in refused.value.fix
    train(("entries",))


@WAYS
def test_equal_values_set_anew_are_no_change(way: Any, told: list[warnings.WarningMessage]) -> None:
    model = made()
    model.beta = math.nan
    run, _ = way(model)
    for _ in range(2):
        run(X)
        model.beta, model.names, model.nested = float("nan"), ["relu"], {"a": [float("1")]}
        type(model).scale = float("2")
        del type(model).scale
        type(model).__doc__ = "More than before."
    assert not told


@WAYS
def test_a_module_that_is_changed_back_finds_its_plans(way: Any, told: list[warnings.WarningMessage]) -> None:
    model = made()
    run, eager = way(model)
    run(X)
    for i in range(20):
        model.beta, base(model).scale = float(i % 2), float(i % 2)
        assert torch.equal(run(X), eager(X))
    assert len(told) == 2


@WAYS
def test_the_warning_names_the_attribute_at_the_users_line(way: Any, told: list[warnings.WarningMessage]) -> None:
    model = made()
    run, _ = way(model)
    run(X)
    for change in (
        put(lambda m: m.config, "rate", 3.0),
        CHANGES["method"],
        lambda m: m.fc.weight.requires_grad_(False),
    ):
        change(model)
        run(X)
    texts = [str(warning.message) for warning in told]
    assert [text.partition("captured anew: ")[2] for text in texts] == [
        "'config.rate' of the module is 3.0 now",
        f"{type(model).__qualname__ + '.before'!r} of the module has changed",
        "'fc.weight.requires_grad' of the module is False now",
    ]
    assert {warning.filename for warning in told} == {__file__}


@WAYS
def test_allowed_changes_are_no_change(way: Any, told: list[warnings.WarningMessage]) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.calls, self.shown = nn.Linear(4, 4), 0, []

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.fc(x)

    model, allowed = Counting(), ("calls", "shown")
    if way is replicated:
        run = graphir.DataParallel(model, [0, 1], binding="cpu", allow_changes=iter(allowed))
    else:
        run = graphir.compile(model, (X,), allow_changes=iter(allowed)).step
    for i in range(12):
        run(X)
        model.calls = i
        model.shown.append(i)
    assert not told


def test_allowed_changes_of_data_parallel_are_attributes() -> None:
    with pytest.raises(CaptureError, match="allow_changes is a str, not a tuple"):
        graphir.DataParallel(made(), [0, 1], binding="cpu", allow_changes="beta")


class SetsItselfUp(nn.Module):
    """What its forward leaves: results, a table made once, a field of an object, and a count on the class."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.config, self._table = nn.Linear(4, 4), types.SimpleNamespace(kind=None, rate=1.0), {}

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        self.config.kind = self.config.kind or "known"
        self._table.setdefault("set", True)
        self.seen = self.fc(x)
        return self.seen * self.config.rate


@WAYS
def test_what_the_step_itself_changes_is_no_change(way: Any, told: list[warnings.WarningMessage]) -> None:
    model = SetsItselfUp()
    run, eager = way(model)
    for rows in (6, 6, 4, 5):
        assert torch.equal(run(X[:rows]), eager(X[:rows]))
    assert not told
    model.config.rate = 3.0
    assert torch.equal(run(X), eager(X))
    assert len(told) == 1


@WAYS
def test_plain_tensors_are_followed_at_sizes_that_are_new(way: Any, told: list[warnings.WarningMessage]) -> None:
    model = made()
    run, eager = way(model)
    for rows in (6, 4, 5, 2):
        model.mask.data.fill_(rows)
        assert torch.equal(run(X[:rows]), eager(X[:rows]))
    assert not told


@WAYS
def test_random_changes(way: Any) -> None:
    """Seeded: any part, in any order, there and back."""
    chosen = random.Random(3)
    model = made()
    run, eager = way(model)
    flips: list[Callable[[float], object]] = [
        lambda v: setattr(model, "beta", v),
        lambda v: setattr(type(model), "scale", v),
        lambda v: setattr(model.config, "rate", v),
        lambda v: setattr(model.function, "__defaults__", (v,)),
        lambda v: model.config.rates.__setitem__(0, v),
        lambda v: base(model).table.update(a=v),
        lambda v: model.names.append("tanh") if v > 1 else model.names.clear(),
        lambda v: model.fc.weight.requires_grad_(v > 1),
        lambda v: model.mask.numpy().fill(v),
        lambda v: setattr(model, "mask", model.mask * v),
        lambda v: model.array.fill(v),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(8):
            for flip in chosen.sample(flips, chosen.choice([0, 1, 1, 2])):
                flip(chosen.choice([1.0, 2.0]))
            rows = chosen.choice([6, 6, 4])
            with torch.no_grad():
                assert torch.equal(run(X[:rows]), eager(X[:rows]))


# Steps that train.


class Annealed(nn.Module):
    """The halves of a batch are set apart, so that each size has a plan of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.beta = nn.Linear(4, 4), nn.Linear(4, 4), 0.0

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.second(self.first(x)).chunk(2)
        return (a - b).square().mean() + self.beta * self.first(x).abs().mean()


class Weighted:
    """A loss that keeps its weight."""

    def __init__(self) -> None:
        self.weight = 1.0

    def __call__(self, loss: Tensor) -> Tensor:
        return loss * self.weight


def test_all_sizes_of_an_epoch_train_with_one_value() -> None:
    torch.manual_seed(0)
    model, eager, loss = Annealed(), Annealed(), Weighted()
    eager.load_state_dict(model.state_dict())
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, eager))
    with graphir.compile(model, (X,), loss=loss, optimizer=ours) as step, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for epoch in range(4):
            for each in (model, eager):
                each.beta = epoch / 4
                each.first.requires_grad_(epoch % 2 == 0)
            loss.weight = 1.0 + epoch // 2
            for rows in (6, 4, 6):
                theirs.zero_grad()
                expected = loss(eager(X[:rows]))
                expected.backward()
                theirs.step()
                assert torch.equal(step.step(X[:rows]), expected)
        for name, tensor in step.state_dict().items():
            assert torch.equal(tensor, eager.state_dict()[name])


def test_weights_of_a_loss_are_followed() -> None:
    model, loss, y = nn.Linear(4, 3), nn.CrossEntropyLoss(weight=torch.ones(3)), torch.tensor([0, 1, 2, 0, 1, 2])
    with graphir.compile(model, (X,), targets=(y,), loss=loss) as step:
        step.step(X, y)
        loss.weight.mul_(torch.tensor([1.0, 2.0, 3.0]))
        assert torch.equal(step.step(X, y), loss(model(X), y))
        loss.weight.data = torch.tensor([3.0, 2.0, 1.0])
        with pytest.warns(graphir.RecaptureWarning, match=r"'loss function\.weight\.data' has changed"):
            assert torch.equal(step.step(X, y), loss(model(X), y))


def test_an_attribute_that_changes_in_each_step_is_refused() -> None:
    model = made()
    run, eager = compiled(model)
    with pytest.warns(graphir.RecaptureWarning) as told:
        for i in range(8):
            model.beta = float(i)
            model.config.rate = 1.0 + i % 2
            assert torch.equal(run(X), eager(X))
    assert len(told) == 8
    model.beta = 9.0
    for _ in range(2):
        with pytest.raises(SessionError) as refused:
            run(X)
        assert refused.value.what == "'beta' of the module is 9.0 now, and was captured anew 8 times already"
        assert refused.value.fix == (
            "make it a 0-dim tensor argument of the step, or a 0-dim tensor on the module that is written in place; if "
            "nothing depends on 'beta', pass allow_changes=('beta',)"
        )
    model.beta = 7.0
    assert torch.equal(run(X), eager(X))


def test_other_parameters_are_refused() -> None:
    model = made()
    run, _ = compiled(model)
    before, model.fc = model.fc, nn.Linear(4, 4)
    with pytest.raises(
        SessionError, match=r"'fc\.weight' of the model is another tensor than the one that was compile"
    ):
        run(X)
    model.fc = before
    run(X)
    model.double()
    with pytest.raises(
        SessionError, match=r"'fc\.weight' of the model is another tensor than the one that was compile"
    ):
        run(X)


def test_a_hook_of_a_parameter_that_comes_later_is_refused() -> None:
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with graphir.compile(model, (X,), loss=lambda out: out.sum(), optimizer=optimizer) as step:
        step.step(X)
        handle = model.fc.weight.register_hook(lambda gradient: gradient * 2)
        with pytest.raises(CaptureError, match=r"param 'fc\.weight' has a hook on its gradient"):
            step.step(X)
        handle.remove()
        step.step(X)
        assert len(step.plans) == 1


@pytest.mark.parametrize("hook", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_parameters_see_the_sum_also_where_they_come_first(hook: str) -> None:
    model, seen = nn.Linear(4, 3), []
    getattr(model.weight, hook)(lambda tensor: seen.append(tensor.shape))
    replicas = graphir.DataParallel(model, [0, 1], binding="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for rows in (6, 4):
            output = replicas(X[:rows])
            assert output.grad_fn is not None and output.grad_fn.name() == "DifferentiatedBackward"
            output.sum().backward()
        with torch.no_grad():
            assert torch.equal(replicas(X), torch.cat([model(share) for share in X.chunk(2)]))
    assert seen == [model.weight.shape] * 2


def test_a_plain_tensor_that_was_overwritten_before_the_backward_is_refused_as_torch_does() -> None:
    model = made()
    output = graphir.DataParallel(model, [0, 1], binding="cpu")(X)
    model.mask.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()
