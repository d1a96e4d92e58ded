"""A step as people write it, a function: its program is that of the model, the loss and the optimizer in it."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import graphir
from graphir import passes, runtime
from graphir.errors import CaptureError, PassError, TrainingWarning

X, Y = torch.randn(6, 8, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 4


def net(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(dropout), nn.ReLU(), nn.Linear(16, 4))


def session_of(program: graphir.Program, **options: Any) -> runtime.Session:
    return runtime.Session(passes.emit(program), program.state, binding="cpu", **options)


def bits(found: Any) -> list[Any]:
    leaves = torch.utils._pytree.tree_leaves(found)
    return [(leaf.dtype, leaf.tolist()) if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def is_eager(make: Callable[[nn.Module], Callable[..., Any]], rows: tuple[int, ...] = (6, 6, 3)) -> runtime.Session:
    """A session of the step, after steps that had the bits of the step run eagerly, in results and parameters."""
    model = net()
    eager = copy.deepcopy(model)
    step, eagerly = make(model), make(eager)
    program = graphir.capture(step, (X, Y))
    session = session_of(program)
    draw = torch.Generator().manual_seed(1)
    for count in rows:
        x, y = torch.randn(count, 8, generator=draw), torch.randint(4, (count,), generator=draw)
        assert bits(session.step(x, y)) == bits(eagerly(x, y))
    state = session.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in eager.state_dict().items())
    return session


OPTIMIZERS = [
    lambda params: torch.optim.SGD(params, 0.1, momentum=0.9),
    lambda params: torch.optim.AdamW(params, 0.01),
    lambda params: torch.optim.RMSprop(params, 0.01, centered=True),
    lambda params: torch.optim.Adagrad(params, 0.1),
]


@pytest.mark.parametrize("made", OPTIMIZERS)
def test_bits_are_those_of_the_function(made: Callable[[Any], torch.optim.Optimizer]) -> None:
    def make(model: nn.Module) -> Callable[..., Any]:
        optimizer = made(model.parameters())

        def step(x: Tensor, y: Tensor) -> dict[str, Any]:
            optimizer.zero_grad()
            out = model(x)
            loss = F.cross_entropy(out, y)
            loss.backward()
            norm = clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            right = (out.argmax(1) == y).sum()
            return {"loss": loss.detach(), "norm": norm, "right": right, "out": out, "n": 3, "none": None}

        return step

    is_eager(make)


def test_the_form_with_a_loss_has_the_same_operators() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())

    def step(input: Tensor, target: Tensor) -> Any:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(input), target)
        loss.backward()
        norm = clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss, {"grad_norm": norm}

    found = graphir.capture(step, (X, Y), name="step")
    options: Any = {"loss": F.cross_entropy, "optimizer": optimizer, "clip_grad_norm": 1.0}
    expected = graphir.capture(model, (X,), targets=(Y,), name="step", **options)

    def text(program: graphir.Program) -> str:  # the loss is no module of a function
        return re.sub(r'(, )?module=(loss|"")|loss\.(?=log_softmax)', "", str(program)).replace(" {}", "")

    assert text(found) == text(expected)
    assert found.interface == expected.interface


def test_gradients_clipped_by_value() -> None:
    def make(model: nn.Module) -> Callable[..., Any]:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step(x: Tensor, y: Tensor) -> Tensor:
            model.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            clip_grad_value_(model.parameters(), 0.01)
            optimizer.step()
            return loss

        return step

    is_eager(make)


def test_gradients_are_read_and_written() -> None:
    def make(model: nn.Module) -> Callable[..., Any]:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step(x: Tensor, y: Tensor) -> Any:
            for param in model.parameters():
                param.grad = None
            loss = F.cross_entropy(model(x), y)
            torch.autograd.backward(loss)
            with torch.no_grad():
                for param in model.parameters():
                    assert param.grad is not None
                    param.grad.sub_(param.grad.mean()).mul_(0.5)
            optimizer.step()
            grads = [param.grad for param in model.parameters() if param.grad is not None]
            return loss, [grad.norm() for grad in grads]

        return step

    is_eager(make)


def test_a_scaler_and_autocast() -> None:
    def make(model: nn.Module) -> Callable[..., Any]:
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=2)  # type: ignore[attr-defined]

        def step(x: Tensor, y: Tensor) -> dict[str, Any]:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(x), y)
            scaler.scale(loss * 4).backward()
            scaler.unscale_(optimizer)
            norm = clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            return {"loss": loss, "finite": norm.isfinite(), "scale": torch.as_tensor(scaler.get_scale())}

        return step

    is_eager(make, (6, 6, 3, 6))


def test_without_an_optimizer_gradients_are_outputs() -> None:
    model = net()

    def step(x: Tensor, y: Tensor) -> Tensor:
        model.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    program = graphir.capture(step, (X, Y))
    session = session_of(program)
    expected = step(X, Y)
    assert torch.equal(session.step(X, Y), expected)
    grads = session.gradients()
    assert all(torch.equal(grads[name], param.grad) for name, param in model.named_parameters())  # type: ignore[arg-type]


def test_a_function_without_a_backward() -> None:
    model = net().eval()

    def step(x: Tensor) -> Any:
        with torch.no_grad():
            return model(x).softmax(1), x.sum()

    session = session_of(graphir.capture(step, (X,)))
    assert bits(session.step(X)) == bits(step(X))


class Trainer:
    """Keeps what its step uses."""

    def __init__(self, model: nn.Module) -> None:
        self.parts = {"model": model}
        self.optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(self, x: Tensor, y: Tensor, smoothing: float = 0.0) -> Tensor:
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.parts["model"](x), y, label_smoothing=smoothing)
        loss.backward()
        self.optimizer.step()
        return loss

    __call__ = step


@pytest.mark.parametrize(
    "make",
    [
        lambda model: Trainer(model).step,
        Trainer,
        lambda model: functools.partial(Trainer(model).step, smoothing=0.1),
    ],
)
def test_what_a_step_uses_is_found(make: Callable[[nn.Module], Callable[..., Any]]) -> None:
    assert set(is_eager(make).plan.program.interface.module_state) == set(net().state_dict())


def test_several_modules_have_their_names() -> None:
    first, last = nn.Linear(8, 16), nn.Linear(16, 4)
    optimizer = torch.optim.SGD([*first.parameters(), *last.parameters()], 0.1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(last(first(x).relu()), y)
        loss.backward()
        optimizer.step()
        return loss

    program = graphir.capture(step, (X, Y))
    assert list(program.interface.module_state) == ["first.weight", "first.bias", "last.weight", "last.bias"]
    given = graphir.capture(step, (X, Y), stateful={"a": first, "b": last, "optimizer": optimizer})
    assert list(given.interface.module_state) == ["a.weight", "a.bias", "b.weight", "b.bias"]
    session = session_of(program)
    assert [session.step(X, Y).item() for _ in range(3)] == [step(X, Y).item() for _ in range(3)]


def test_results_of_replicas() -> None:
    model = net()
    model[1] = nn.Identity()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: Tensor, y: Tensor) -> dict[str, Any]:
        optimizer.zero_grad()
        out = model(x)
        loss = F.cross_entropy(out, y)
        loss.backward()
        norm = clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        right = out.argmax(1) == y
        grad = model[0].weight.grad  # type: ignore[union-attr]
        parts = {"right": right.sum(), "part": right.float().mean(), "out": out}
        return {"loss": loss, "norm": norm, **parts, "n": 3, "grad": grad}

    program = graphir.capture(step, (X, Y))
    ways = [(slot.blob, slot.batch_dim, slot.gather) for slot in program.interface.fetches]
    assert ways == [
        ("loss", None, "mean"),
        ("grad_norm", None, "first"),
        ("right", None, "sum"),
        ("part", None, "mean"),
        ("4", 0, "first"),
        (None, None, "first"),
        ("0.weight_grad.clipped", None, "first"),
    ]
    assert graphir.parse(str(program)).interface == program.interface
    for shares in ([1, 1], [2, 1]):
        session = session_of(passes.replicate(program, [0, 1], shares=shares))
        found, expected = session.step(X, Y), copy.deepcopy(step)(X, Y)
        for param in model.parameters():  # the eager step has changed them
            assert param.grad is not None
        assert found["n"] == 3 and torch.equal(found["right"], expected["right"])
        for name in ("loss", "norm", "part", "out", "grad"):
            torch.testing.assert_close(found[name], expected[name])
        model.load_state_dict({name: program.state[name] for name in model.state_dict()})


def test_results_of_replicas_are_what_their_user_says() -> None:
    model = nn.Linear(8, 4)

    def step(x: Tensor) -> dict[str, Any]:
        out = model(x)
        found = out.argmax(1)
        sizes = {"least": found.amin(), "most": found.amax(), "sum": found.amax(), "first": found.amin()}
        return {**sizes, "all": found.amax(), "pair": (out.mean(), out.mean(0)), "each": out, "n": 2}

    program = graphir.capture(step, (X,))
    gather: dict[str, Any] = {"least": "min", "most": "max", "sum": "sum", "first": "first", "all": "cat"}
    gather |= {"pair.0": "max", "pair.1": "cat", "each": "each"}
    replicated = passes.replicate(program, [0, 1], gather=gather)
    assert passes.Pipeline(replicated.history[0])(program) == replicated
    found = session_of(replicated).step(X)
    one, two = step(X[:3]), step(X[3:])
    assert bits(found["each"]) == bits([one["each"], two["each"]])
    assert bits(found["least"]) == bits(torch.minimum(one["least"], two["least"]))
    assert bits(found["most"]) == bits(torch.maximum(one["most"], two["most"]))
    assert bits(found["sum"]) == bits(one["sum"] + two["sum"]) and bits(found["first"]) == bits(one["first"])
    assert bits(found["all"]) == bits(torch.stack([one["all"], two["all"]]))
    assert bits(found["pair"]) == bits(
        (torch.maximum(one["pair"][0], two["pair"][0]), torch.cat([one["pair"][1], two["pair"][1]]))
    )
    compiled = graphir.compile(step, (X,), devices=[0, 1], gather=gather, session={"binding": "cpu"})
    assert bits(compiled(X)) == bits(found)
    with pytest.raises(
        PassError, match="gather names 'lest', which is no result of program 'step'; did you mean 'least'"
    ):
        passes.replicate(program, [0, 1], gather={"lest": "min"})
    with pytest.raises(PassError, match="gather names 'n', which is no tensor"):
        passes.replicate(program, [0, 1], gather={"n": "min"})


def test_a_result_of_replicas_that_nothing_tells() -> None:
    model = net().eval()

    def step(x: Tensor) -> Any:
        return model(x).argmax(1).max()

    program = graphir.capture(step, (X,))
    with pytest.raises(PassError, match=r"nothing tells what result 'max' of 2 replicas of program 'step' is"):
        passes.replicate(program, [0, 1])
    assert passes.replicate(program, [0])


def test_everything_is_as_before() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu")  # type: ignore[attr-defined]
    clip = torch.nn.utils.clip_grad._get_total_norm
    before = [dict(vars(optimizer)), dict(vars(scaler)), copy.deepcopy(model.state_dict())]

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    graphir.capture(step, (X, Y))
    assert vars(optimizer).keys() == before[0].keys() and not optimizer.state
    assert list(optimizer.param_groups[0]["params"]) == list(model.parameters())
    assert dict(vars(scaler)) == before[1] and torch.nn.utils.clip_grad._get_total_norm is clip
    assert all(torch.equal(before[2][name], tensor) for name, tensor in model.state_dict().items())
    assert all(param.grad is None for param in model.parameters())


def chunks(model: nn.Module) -> Callable[..., Any]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def step(x: Tensor, y: Tensor) -> Any:
        optimizer.zero_grad()
        losses = []
        for part, labels in zip(x.tensor_split(2), y.tensor_split(2), strict=True):
            loss = F.cross_entropy(model(part), labels) / 2
            loss.backward()
            losses.append(loss.detach())
        norm = clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return sum(losses), norm

    return step


def several_losses(model: nn.Module) -> Callable[..., Any]:
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)

    def step(x: Tensor, y: Tensor) -> Any:
        optimizer.zero_grad()
        out = model(x)
        first, second = F.cross_entropy(out, y), out.square().mean()
        first.backward(retain_graph=True)
        second.backward()
        third = model[4].weight.square().sum()  # type: ignore[union-attr,index,operator]
        third.backward()
        optimizer.step()
        return {"first": first, "second": second, "third": third, "out": out}

    return step


def clears_at_the_end(model: nn.Module) -> Callable[..., Any]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def writes_parameters(model: nn.Module) -> Callable[..., Any]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: Tensor, y: Tensor) -> Any:
        optimizer.zero_grad()
        out = model(x)
        out.backward(torch.ones_like(out))
        before = model[0].weight.norm()  # type: ignore[union-attr,index,operator]
        for param in model.parameters():
            param.data.add_(0.01)
        after = model[0].weight.norm()  # type: ignore[union-attr,index,operator]
        optimizer.step()
        return before, after, out

    return step


def goes_backward_by_function(model: nn.Module) -> Callable[..., Any]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        out = model(x)
        torch.autograd.backward(out, torch.ones_like(out), retain_graph=True)
        torch.autograd.backward([out.square().sum()], retain_graph=True)
        out.exp().mean().backward(inputs=list(model[4].parameters()))  # type: ignore[union-attr,index]
        optimizer.step()
        return out

    return step


@pytest.mark.parametrize("make", [clears_at_the_end, writes_parameters, goes_backward_by_function])
def test_orders(make: Callable[[nn.Module], Callable[..., Any]]) -> None:
    is_eager(make)


def clips_in_between(model: nn.Module) -> Callable[..., Any]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        for part, of in zip(x.chunk(2), y.chunk(2), strict=True):
            loss = F.cross_entropy(model(part), of)
            loss.backward()
            clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        return loss

    return step


def test_no_more_is_computed_than_is_asked_for() -> None:
    """``torch.autograd.grad`` of one parameter, and a backward into some, go through what these need."""
    model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(8, 8), nn.Tanh())], nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: Tensor, y: Tensor, more: str) -> Any:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        found = None
        if more == "grad":
            (found,) = torch.autograd.grad(loss, model[12].bias, retain_graph=True)
        if more == "inputs":
            loss.backward(retain_graph=True, inputs=[model[12].bias])
        loss.backward()
        optimizer.step()
        return loss, found

    counts = {more: len(graphir.capture(step, (X, Y, more)).step.ops) for more in ("", "grad", "inputs")}
    assert counts["grad"] < counts[""] + 10 and counts["inputs"] < counts[""] + 10


@pytest.mark.parametrize("make", [chunks, several_losses, clips_in_between])
def test_several_backwards(make: Callable[[nn.Module], Callable[..., Any]]) -> None:
    is_eager(make, (6, 12, 6))


def test_chunks_with_a_backward_each_are_micro_batches() -> None:
    """The program is that of ``accumulate``, and devices work on several of them at a time."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        total = torch.zeros(())
        for part, of in zip(x.chunk(3), y.chunk(3), strict=True):
            loss = F.cross_entropy(model(part), of) / 3
            loss.backward()
            total = total + loss.detach()
        optimizer.step()
        return total

    given = {"loss": F.cross_entropy, "optimizer": optimizer, "targets": (Y,), "accumulate": 3}
    program, old = graphir.capture(step, (X, Y)), graphir.capture(model, (X,), **given)
    assert program.dims == old.dims == {"batch": 2}

    def parts(of: graphir.Program) -> list[tuple[str, str, str]]:
        named = [(op, name) for op in of.step.ops for name in op.outputs if op.module not in ("", "loss")]
        return [(op.type, op.phase, name.replace("loss.", "")) for op, name in named]

    assert parts(program) == parts(old)
    placed = passes.inject_copies(passes.shift_modules(program, {"2": {0: 1}}))
    ordered = passes.pipeline(placed)
    assert [op.outputs for op in ordered.step.ops] != [op.outputs for op in placed.step.ops]
    graphir.certify(ordered, program)


@pytest.mark.parametrize("make", [chunks, several_losses])
def test_several_backwards_of_replicas(make: Callable[[nn.Module], Callable[..., Any]]) -> None:
    model = net()
    model[1] = nn.Identity()
    eager = copy.deepcopy(model)
    step, eagerly = make(model), make(eager)
    x, y = torch.randn(8, 8, generator=torch.Generator().manual_seed(2)), torch.arange(8) % 4
    program = graphir.capture(step, (x[:4], y[:4]))
    session = session_of(passes.replicate(program, [0, 1]))
    for _ in range(3):
        found, expected = session.step(x, y), eagerly(x, y)
        for one, other in zip(*map(torch.utils._pytree.tree_leaves, (found, expected)), strict=True):
            torch.testing.assert_close(one, other)
    state = session.state_dict()
    for name, tensor in eager.state_dict().items():
        torch.testing.assert_close(state[name], tensor)


@pytest.mark.parametrize("zero", ["optimizer", "model", "by hand"])
def test_gradients_are_set_to_zero(zero: str) -> None:
    def make(model: nn.Module) -> Callable[..., Any]:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step(x: Tensor, y: Tensor) -> Tensor:
            if zero == "optimizer":
                optimizer.zero_grad(set_to_none=False)
            elif zero == "model":
                model.zero_grad(set_to_none=False)
            else:
                for param in model.parameters():
                    if param.grad is not None:
                        param.grad.zero_()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            return loss

        return step

    is_eager(make)


def test_a_gradient_that_no_optimizer_reads_is_told() -> None:
    model = net()
    optimizer = torch.optim.SGD(model[4].parameters(), 0.1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        model.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    with pytest.warns(graphir.TrainingWarning, match="computes the gradient of '0.weight' and 3 others, which its opt"):
        program = graphir.capture(step, (X, Y))
    session = session_of(program)
    assert [session.step(X, Y).item() for _ in range(2)] == [step(X, Y).item() for _ in range(2)]


MODEL, OTHER = net(), net()
SGD = torch.optim.SGD(MODEL.parameters(), 0.1)
SCHEDULER = torch.optim.lr_scheduler.StepLR(SGD, 1)


def trained(x: Tensor, y: Tensor) -> Tensor:
    SGD.zero_grad()
    loss = F.cross_entropy(MODEL(x), y)
    loss.backward()
    SGD.step()
    return loss


def uses_none(x: Tensor, y: Tensor) -> Tensor:
    return x


def reads_number(x: Tensor, y: Tensor) -> float:
    return trained(x, y).item()


def schedules(x: Tensor, y: Tensor) -> Tensor:
    loss = trained(x, y)
    SCHEDULER.step()
    return loss


def has_a_closure(x: Tensor, y: Tensor) -> Any:
    return SGD.step(lambda: trained(x, y))  # type: ignore[arg-type,return-value]


def returns_an_object(x: Tensor, y: Tensor) -> Any:
    trained(x, y)
    return object()


HISTORY: list[Tensor] = []
COUNT = 0


def keeps_losses(x: Tensor, y: Tensor) -> Tensor:
    HISTORY.append(trained(x, y).detach())
    return HISTORY[-1]


def counts(x: Tensor, y: Tensor) -> Tensor:
    global COUNT
    COUNT += 1
    return trained(x, y)


class Counts(Trainer):
    def step(self, x: Tensor, y: Tensor, smoothing: float = 0.0) -> Tensor:
        self.count = getattr(self, "count", 0) + 1
        return super().step(x, y)


@pytest.mark.parametrize(
    ("step", "why"),
    [
        (uses_none, "uses_none uses no module"),
        (reads_number, "reads a number out of a tensor"),
        (schedules, r"calls StepLR.step, whose numbers .*\n.*\n  fix  step schedulers between steps"),
        (has_a_closure, "SGD.step is called with a closure"),
        (returns_an_object, "returns a object among its results"),
        (keeps_losses, "the step changes 'HISTORY'"),
        (counts, "the step changes 'COUNT'"),
        (Counts(MODEL).step, "the step changes '.*count'"),
    ],
)
def test_refused(step: Callable[..., Any], why: str) -> None:
    before = copy.deepcopy([MODEL.state_dict(), SGD.state_dict(), SCHEDULER.state_dict()])
    with pytest.raises(CaptureError, match=why):
        graphir.capture(step, (X, Y))
    for now, was in zip([SGD.state_dict(), SCHEDULER.state_dict()], before[1:], strict=True):
        assert str(now) == str(was)
    assert all(param.grad is None for param in MODEL.parameters()) and not HISTORY and COUNT == 0


def judged(then: Callable[[list[nn.Parameter], Tensor], Any], steps: bool = True) -> Any:
    """A step whose optimizer has the first layer alone: eager steps go on adding to the gradients of the others."""
    model = net()
    optimizer = torch.optim.SGD(model[0].parameters(), 0.1)

    def step(x: Tensor, y: Tensor) -> Any:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        found = then(list(model.parameters()), loss)
        if steps:
            optimizer.step()
        return found

    return step, model


@pytest.mark.parametrize(
    "then",
    [
        lambda params, loss: loss,
        lambda params, loss: (loss, clip_grad_norm_(params[:2], 0.1)),
        lambda params, loss: params[0].grad,
    ],
)
def test_gradients_that_nobody_reads_are_not_kept(then: Callable[[list[nn.Parameter], Tensor], Any]) -> None:
    (step, _), (eagerly, twin) = judged(then), judged(then)
    with pytest.warns(TrainingWarning, match=r"gradient of '1\.weight' and 3 others, which its optimizer"):
        program = graphir.capture(step, (X, Y))
    session = session_of(program)
    for _ in range(3):
        assert bits(session.step(X, Y)) == bits(eagerly(X, Y))
    assert all(torch.equal(session.state_dict()[name], tensor) for name, tensor in twin.state_dict().items())


@pytest.mark.parametrize(
    "option", [{"loss": F.cross_entropy}, {"accumulate": 2}, {"optimizer": SGD}, {"targets": (Y,)}]
)
def test_what_a_function_does_itself_is_refused(option: dict[str, Any]) -> None:
    with pytest.raises(CaptureError, match=f"{next(iter(option))} is given beside a step function"):
        graphir.capture(trained, (X, Y), **option)


def test_what_has_no_state_is_refused() -> None:
    with pytest.raises(CaptureError, match="stateful has a int, which is no module, optimizer or gradient scaler"):
        graphir.capture(trained, (X, Y), stateful=(MODEL, 3))


def test_a_step_without_an_optimizer_hands_out_its_gradients_as_it_leaves_them() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(4, 2), torch.randn(3, 4)

    def step(x: Tensor) -> Tensor:
        model.zero_grad()
        model(x).square().sum().backward()
        norm = nn.utils.clip_grad_norm_([model.weight], 0.1)
        model.bias.grad = None
        return norm

    program = graphir.capture(step, (x,))
    with runtime.Session(passes.emit(program), program.state, binding="cpu") as session:
        norm, found = session.step(x), session.gradients()
    assert torch.equal(norm, step(x))
    assert model.weight.grad is not None
    assert set(found) == {"weight"} and torch.equal(found["weight"], model.weight.grad)
