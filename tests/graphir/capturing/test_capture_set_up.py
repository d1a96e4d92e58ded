"""Modules that set themselves up in their first step are captured where the second step does the same."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from direct import matches_eager
from graphir.runtime import Session
from models import Example
from torch import Tensor, nn
from torch.nn.utils import prune

import graphir
from graphir import passes
from graphir.errors import CaptureError

pytestmark = pytest.mark.usefixtures("few_objects")


class Config:
    """What models of transformers keep their options in, and what they find out about them in the first step."""

    def __init__(self) -> None:
        self.problem: str | None = None
        self.width = 3
        self._kernel = "eager"
        self._cache: dict[str, int] = {}
        self.table = torch.ones(2)


class Names(list[str]):
    """A list of a user's class."""


class SetUp(nn.Module):
    """Runs *first* in each step, and scales by what that returns."""

    def __init__(self, first: Callable[[SetUp], float]) -> None:
        super().__init__()
        self.first = first
        self.inner = nn.Linear(3, 2)
        self._seen: list[int] = []
        self._ready = False
        self.config = Config()
        self.names = Names()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.first(self)


def hang_up_hooks(module: SetUp) -> float:
    """As transformers does where a model is to return its hidden states."""
    if not module._ready:
        module.inner.register_forward_hook(lambda module, args, output: None)
        module._ready = True
    return 1.0


def note_once(module: SetUp) -> float:
    module._seen[:] = [1]
    return 1.0


def choose_in_an_object(module: SetUp) -> float:
    module.config._kernel = "fused"
    module.config._cache["heads"] = 2
    return 1.0


def fill_in_an_object(module: SetUp) -> float:
    """As transformers does where a classifier is not told its kind of labels."""
    if module.config.problem is None:
        module.config.problem = "one label"
    return 1.0


def otherwise_at_first(module: SetUp) -> float:
    before, module._ready = module._ready, True
    return 1.0 if before else 2.0


def count_to_two(module: SetUp) -> float:
    module._seen = [*module._seen, 1][:2]
    return 1.0


def in_public(module: SetUp) -> float:
    module.shown = True
    return 1.0


def in_public_of_an_object(module: SetUp) -> float:
    module.config.width = 4
    return 1.0


def new_in_an_object(module: SetUp) -> float:
    module.config.shown = object()
    return 1.0


def again_in_an_object(module: SetUp) -> float:
    module.config._cache["calls"] = module.config._cache.get("calls", 0) + 1
    return 1.0


def otherwise_by_an_object(module: SetUp) -> float:
    before, module.config.problem = module.config.problem, "one label"
    return 1.0 if before else 2.0


def in_a_list_of_a_users_class(module: SetUp) -> float:
    module.names.append("first")
    return 1.0


def tensor_in_an_object(module: SetUp) -> float:
    module.config._kernel = torch.ones(2)
    return 1.0


def parameter_in_an_object_once(module: SetUp) -> float:
    if module.config._kernel == "eager":
        module.config._kernel = module.inner.weight
    return 1.0


def another_in_an_object(module: SetUp) -> float:
    name = "_second" if hasattr(module.config, "_first") else "_first"
    setattr(module.config, name, 1)
    return 1.0


def example(first: Callable[[SetUp], float]) -> Example:
    return Example(SetUp(first), (torch.randn(4, 3),), (), lambda y: y.pow(2).sum())


@pytest.mark.parametrize("first", [hang_up_hooks, note_once, choose_in_an_object, fill_in_an_object])
def test_what_only_the_first_step_changes_is_put_back(first: Callable[[SetUp], float]) -> None:
    made = example(first)
    program = graphir.capture(made.model, made.inputs, loss=made.loss)
    assert program.covers.fixed == ""
    assert not made.model._ready and made.model._seen == []
    assert not made.model.inner._forward_hooks
    config = made.model.config
    assert (config.problem, config._kernel, config._cache) == (None, "eager", {})
    matches_eager(program, made, batches=(6,))


@pytest.mark.parametrize(
    ("first", "attribute"),
    [
        (otherwise_at_first, "'_ready'"),
        (count_to_two, "'_seen'"),
        (in_public, "'shown'"),
        (in_public_of_an_object, "'config'"),
        (new_in_an_object, "'config'"),
        (again_in_an_object, "'config'"),
        (otherwise_by_an_object, "'config'"),
        (in_a_list_of_a_users_class, "'names'"),
        (tensor_in_an_object, "'config'"),
        (parameter_in_an_object_once, "'config'"),
        (another_in_an_object, "'config'"),
    ],
)
def test_a_second_step_that_differs_is_refused(first: Callable[[SetUp], float], attribute: str) -> None:
    made = example(first)
    with pytest.raises(
        CaptureError, match=f"the step changes .*{attribute}.*\n.*the model\n.*fix +keep the value in a buffer"
    ):
        graphir.capture(made.model, made.inputs, loss=made.loss)
    assert not made.model._ready and made.model._seen == []


def weight_normed() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch wants its parametrizations used; many models still have the hooks
        return nn.utils.weight_norm(nn.Linear(3, 2))


def spectral_normed() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.utils.spectral_norm(nn.Linear(3, 2))


def pruned() -> nn.Module:
    return prune.random_unstructured(nn.Linear(3, 2), "weight", 0.5)


class Leaves(nn.Module):
    """Leaves results on itself, as models do that show their attention."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.fc(x)
        self.pyramid = [self.last, self.last.relu(), 1e3 * len(x)]
        return self.pyramid[1] * 2


@pytest.mark.parametrize("make", [weight_normed, spectral_normed, pruned, Leaves])
def test_results_that_nothing_reads_in_the_next_step_may_stay_on_modules(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = make()
    before = {name: value for name, value in vars(model).items() if isinstance(value, Tensor)}
    made = Example(model, (torch.randn(4, 3),), (), lambda y: y.pow(2).sum())
    program = graphir.capture(model, made.inputs, loss=made.loss)
    assert program.covers.fixed == ""
    assert all(vars(model)[name] is value for name, value in before.items()) and "pyramid" not in vars(model)
    with Session(passes.emit(program), program.state) as session:
        for batch in (4, 6):
            x = torch.randn(batch, 3)
            loss = made.loss(model(x))
            assert torch.equal(session.step(x), loss.detach())
            loss.backward()
            for name, gradient in session.gradients().items():
                param = model.get_parameter(name)
                assert torch.equal(gradient, param.grad), name
            model.zero_grad()


class Remembers(nn.Module):
    """Reads in some way what the last step left."""

    def __init__(self, body: Callable[[Remembers, Tensor], Tensor]) -> None:
        super().__init__()
        self.fc, self.body = nn.Linear(3, 3), body
        self.last: Tensor | None = torch.zeros(4, 3)
        self.all: list[Tensor] = []
        self._first: deque[Tensor] = deque()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def read_it(m: Remembers, x: Tensor) -> Tensor:
    y = m.fc(x) + m.last
    m.last = y
    return y


def ask_whether_it_is_there(m: Remembers, x: Tensor) -> Tensor:
    y = m.fc(x) * (1 if hasattr(m, "other") else 2)
    m.other = y
    return y


def add_to_a_list(m: Remembers, x: Tensor) -> Tensor:
    m.all = [*m.all, m.fc(x)]
    return m.all[-1]


def add_to_a_deque_once(m: Remembers, x: Tensor) -> Tensor:
    y = m.fc(x)
    if not m._first:
        m._first.append(y)
    return y


def note_another_type(m: Remembers, x: Tensor) -> Tensor:
    m.last = m.fc(x), 1 if isinstance(m.last, Tensor) else 1.0
    return m.last[0]


def note_an_object(m: Remembers, x: Tensor) -> Tensor:
    m.last = m.fc(x), Fraction(1, 2)
    return m.last[0]


def grow(m: Remembers, x: Tensor) -> Tensor:
    m.last = m.fc(torch.cat([x, torch.zeros(1 if m.last is None else len(m.last), 3)]))
    return m.last


@pytest.mark.parametrize(
    "body",
    [
        read_it,
        ask_whether_it_is_there,
        add_to_a_list,
        add_to_a_deque_once,
        note_another_type,
        note_an_object,
        grow,
    ],
)
def test_results_that_the_next_step_reads_are_refused(body: Callable[[Remembers, Tensor], Tensor]) -> None:
    model = Remembers(body)
    with pytest.raises(CaptureError, match=r"the step changes .*'(last|other|all|_first)'"):
        graphir.capture(model, (torch.randn(4, 3),), loss=lambda y: y.pow(2).sum())
    assert model.all == [] and not model._first and not hasattr(model, "other")
    assert torch.equal(model.last, torch.zeros(4, 3))


class Positions(nn.Module):
    """Makes its table of positions for the length that the first step has, as timm's ConViT does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)
        self.register_buffer("positions", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if len(self.positions) != x.shape[1]:
            self.positions = torch.arange(x.shape[1], dtype=x.dtype)
        return self.inner(x * self.positions)


def test_a_buffer_that_the_first_step_makes_is_refused_before_that_step_alone() -> None:
    made = Example(Positions(), (torch.randn(4, 3),), (), lambda y: y.pow(2).sum())
    with pytest.raises(CaptureError, match="rebinds buffer 'positions'") as error:
        graphir.capture(made.model, made.inputs, loss=made.loss)
    assert error.value.fix.endswith("if only the first step sets up the buffer, run one step before the capture")
    made.model(*made.inputs)
    matches_eager(graphir.capture(made.model, made.inputs, loss=made.loss), made, batches=(6,))


class Chooses(nn.Module):
    """Chooses a mode for good by what the first step is given."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.mode = nn.Linear(3, 2), "sparse"

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] < 10:
            self.mode = "full"
        return self.inner(x) * (1.0 if self.mode == "full" else 0.5)


def test_a_mode_that_the_first_step_chooses_is_captured_after_it() -> None:
    model, x = Chooses(), torch.randn(4, 3)
    with pytest.raises(CaptureError, match="the step changes the attribute 'mode'") as error:
        graphir.capture(model, (x,))
    assert "run one step before the capture" in error.value.fix
    model(x)
    assert not graphir.capture(model, (x,)).covers.fixed


class Lazy(nn.Module):
    """Makes its layer in the first step, when it knows its width."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList()

    def forward(self, x: Tensor) -> Tensor:
        if not self.layers:
            self.layers.append(nn.Linear(x.shape[1], 2))
        y: Tensor = self.layers[0](x)
        return y


def test_modules_that_the_first_step_makes_are_captured_after_it() -> None:
    lazy = Example(nn.Sequential(Lazy()), (torch.randn(4, 3),), (), lambda y: y.pow(2).sum())
    with pytest.raises(CaptureError, match=r"the step makes the module '0\.layers\.0'\n  in   module '0\.layers'"):
        graphir.capture(lazy.model, lazy.inputs)
    assert not list(lazy.model.parameters())
    lazy.model(*lazy.inputs)
    matches_eager(graphir.capture(lazy.model, lazy.inputs, loss=lazy.loss), lazy, batches=(6,))


class FailsAlone(nn.Module):
    """Notes that it had one row, and fails."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self._alone = nn.Linear(3, 2), False

    def forward(self, x: Tensor) -> Tensor:
        if len(x) == 1:
            self._alone = True
            raise ValueError("one row")
        y: Tensor = self.inner(x)
        return y * 2 if self._alone else y


def test_a_recording_that_fails_leaves_nothing_for_those_at_other_sizes() -> None:
    made = Example(FailsAlone(), (torch.randn(4, 3),), (), lambda y: y.pow(2).sum())
    program = graphir.capture(made.model, made.inputs, loss=made.loss)
    assert not program.covers.fixed and [str(guard) for guard in program.covers.guards] == ["batch>=2"]
    matches_eager(program, made, batches=(6,))
