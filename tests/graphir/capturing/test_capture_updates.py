"""Step functions with several updates, and with what comes behind them: other optimizers, averages, further passes."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_capture_step_functions import bits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn, get_swa_multi_avg_fn
from torch.utils import _pytree as pytree

import graphir
from graphir import passes, runtime
from graphir.errors import CaptureError, PassError, SessionError

X, Z = torch.randn(6, 8, generator=torch.Generator().manual_seed(0)), torch.ones(6, 4)


def nets() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    maker = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
    judge = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    return {"G": maker, "D": judge}


Do = Callable[[Optimizer], Any]


def done(optimizer: Optimizer) -> None:
    optimizer.step()


Make = Callable[[dict[str, nn.Module]], Callable[..., Any]]


def is_eager(make: Make, rows: tuple[int, ...] = (6, 6, 3), edit: Any = passes.emit) -> runtime.Session:
    """A session of the step, after steps that had the bits of the step run eagerly, in results and all state."""
    mine = nets()
    eager = copy.deepcopy(mine)
    step, eagerly = make(mine), make(eager)
    program = graphir.capture(step, (X, Z))
    session = runtime.Session(edit(program), program.state, binding="cpu")
    draw = torch.Generator().manual_seed(1)
    for count in rows:
        x, z = torch.randn(count, 8, generator=draw), torch.randn(count, 4, generator=draw)
        assert bits(session.step(x, z)) == bits(eagerly(x, z))
    state = session.state_dict()
    given = {name: tensor for key, module in eager.items() for name, tensor in prefixed(key, module).items()}
    # Of one module, names have no prefix.
    given |= next((net.state_dict() for net in eager.values() if net.state_dict().keys() == state.keys()), {})
    assert state and state.keys() <= given.keys()
    assert [name for name, tensor in state.items() if not torch.equal(tensor, given[name])] == []
    return session


def prefixed(key: str, module: nn.Module) -> dict[str, Tensor]:
    return {f"{key}.{name}": tensor for name, tensor in module.state_dict().items()}


def gan(nets: dict[str, nn.Module]) -> Callable[..., Any]:
    G, D = nets["G"], nets["D"]
    opt_g = torch.optim.Adam(G.parameters(), 0.01, betas=(0.5, 0.9))
    opt_d = torch.optim.SGD(D.parameters(), 0.1, momentum=0.5)

    def step(x: Tensor, z: Tensor, do: Do = done) -> dict[str, Tensor]:
        fake = G(z)
        opt_d.zero_grad()
        real, made = D(x), D(fake.detach())
        loss_d = F.softplus(-real).mean() + F.softplus(made).mean()
        loss_d.backward()
        do(opt_d)
        opt_g.zero_grad()
        loss_g = F.softplus(-D(fake)).mean()
        loss_g.backward()
        do(opt_g)
        return {"d": loss_d, "g": loss_g, "real": real.detach().mean()}

    return step


def two_steps_of_one(nets: dict[str, nn.Module]) -> Callable[..., Any]:
    G, D = nets["G"], nets["D"]
    optimizer = torch.optim.AdamW([*G.parameters(), *D.parameters()], 0.01)

    def step(x: Tensor, z: Tensor, do: Do = done) -> list[Tensor]:
        losses = []
        for _ in range(2):
            optimizer.zero_grad()
            loss = D(G(z) + x).square().mean()
            loss.backward()
            do(optimizer)
            losses.append(loss.detach())
        return losses

    return step


def sharpness_aware(nets: dict[str, nn.Module]) -> Callable[..., Any]:
    """As Foret et al., 2021: the gradient where the loss is the largest nearby, for a step from where the net is."""
    G, D = nets["G"], nets["D"]
    params = [*G.parameters(), *D.parameters()]
    optimizer = torch.optim.SGD(params, 0.1, momentum=0.9)

    def step(x: Tensor, z: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = D(G(z) + x).square().mean()
        loss.backward()
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in params if p.grad is not None]).norm()
            ways = [p.grad * (0.05 / (norm + 1e-12)) for p in params if p.grad is not None]
            for param, way in zip(params, ways, strict=True):
                param.add_(way)
        optimizer.zero_grad()
        D(G(z) + x).square().mean().backward()
        with torch.no_grad():
            for param, way in zip(params, ways, strict=True):
                param.sub_(way)
        optimizer.step()
        return loss

    return step


def averaged_by_hand(nets: dict[str, nn.Module]) -> Callable[..., Any]:
    G, D = nets["G"], nets["D"]
    optimizer = torch.optim.SGD(G.parameters(), 0.1)
    D.load_state_dict(D.state_dict())
    kept = copy.deepcopy(G).requires_grad_(False)
    nets["kept"] = kept

    def step(x: Tensor, z: Tensor, do: Do = done) -> tuple[Tensor, Tensor]:
        optimizer.zero_grad()
        loss = F.mse_loss(G(z), x)
        loss.backward()
        do(optimizer)
        with torch.no_grad():
            for ours, theirs in zip(kept.parameters(), G.parameters(), strict=True):
                ours.mul_(0.9).add_(theirs, alpha=0.1)
            for ours, theirs in zip(kept.buffers(), G.buffers(), strict=True):
                ours.copy_(theirs)
        return loss, sum(p.norm() for p in G.parameters()).detach()  # type: ignore[union-attr]

    return step


def averaged_by(make: Callable[[], dict[str, Any]]) -> Make:
    def steps(nets: dict[str, nn.Module]) -> Callable[..., Any]:
        G = nets["G"]
        ema = nets["ema"] = AveragedModel(G, **make())
        optimizer = torch.optim.SGD(G.parameters(), 0.1)

        def step(x: Tensor, z: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(G(z), x)
            loss.backward()
            optimizer.step()
            ema.update_parameters(G)
            return loss

        return step

    return steps


def in_lists(nets: dict[str, nn.Module]) -> Callable[..., Any]:
    G = nets["G"]
    optimizer = torch.optim.SGD(G.parameters(), 0.1)
    kept = nets["kept"] = copy.deepcopy(G).requires_grad_(False)

    def step(x: Tensor, z: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(G(z), x)
        loss.backward()
        torch._foreach_mul_([p.grad for p in G.parameters() if p.grad is not None], 0.5)
        optimizer.step()
        ours, theirs = list(kept.parameters()), [p.detach() for p in G.parameters()]
        torch._foreach_lerp_(ours, theirs, 0.1)
        torch._foreach_addcmul_(ours, theirs, theirs, value=0.01)
        return loss

    return step


def scaled_for_two(nets: dict[str, nn.Module]) -> Callable[..., Any]:
    G, D = nets["G"], nets["D"]
    opt_g, opt_d = torch.optim.SGD(G.parameters(), 0.1), torch.optim.SGD(D.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, growth_interval=2)  # type: ignore[attr-defined]

    def step(x: Tensor, z: Tensor) -> dict[str, Any]:
        opt_d.zero_grad()
        loss_d = D(x).square().mean()
        scaler.scale(loss_d).backward()
        scaler.step(opt_d)
        opt_g.zero_grad()
        loss_g = G(z).square().mean()
        scaler.scale(loss_g).backward()
        scaler.unscale_(opt_g)
        scaler.step(opt_g)
        scaler.update()
        return {"d": loss_d.detach(), "g": loss_g.detach(), "scale": torch.as_tensor(scaler.get_scale())}

    return step


MAKES: list[Make] = [gan, two_steps_of_one, sharpness_aware, averaged_by_hand, in_lists, scaled_for_two]
AVERAGES: list[Callable[[], dict[str, Any]]] = [
    dict,
    lambda: {"multi_avg_fn": get_ema_multi_avg_fn(0.9)},
    lambda: {"avg_fn": get_ema_avg_fn(0.9), "use_buffers": True},
    lambda: {"multi_avg_fn": get_swa_multi_avg_fn()},
    lambda: {"avg_fn": lambda ours, theirs, count: ours + (theirs - ours) / (count + 1)},
]


@pytest.mark.parametrize("make", [*MAKES, *map(averaged_by, AVERAGES)])
def test_bits_are_those_of_the_function(make: Make) -> None:
    is_eager(make)


EDITS: dict[str, Callable[[graphir.Program], graphir.Program]] = {
    "shifted": lambda program: passes.shift_modules(program, {list(program.module_paths)[-1]: "gpu:1"}),
    "recomputed": lambda program: passes.recompute(program, "**"),
    "parked": lambda program: passes.park(program, "**", "cpu:0"),
}


@pytest.mark.parametrize("make", [gan, two_steps_of_one, sharpness_aware, averaged_by_hand])
@pytest.mark.parametrize("edit", [*EDITS])
def test_placed_steps_have_the_same_bits(make: Make, edit: str) -> None:
    def placed(program: graphir.Program) -> runtime.Plan:
        found = passes.inject_copies(EDITS[edit](program))
        graphir.certify(program, found)
        return passes.emit(found)

    is_eager(make, edit=placed)


class InTurn:
    """Replicas of a step, whose optimizers meet before each step to have the mean of their gradients."""

    def __init__(self, make: Make, count: int) -> None:
        self.nets = [nets() for _ in range(count)]
        self.steps = [make(each) for each in self.nets]
        self.meeting = threading.Barrier(count)
        self.waiting: list[Optimizer | None] = [None] * count

    def step(self, *batch: Tensor) -> list[Any]:
        shares = list(zip(*[tensor.chunk(len(self.steps)) for tensor in batch], strict=True))
        with ThreadPoolExecutor(len(self.steps)) as pool:
            return list(pool.map(self.one, range(len(self.steps)), shares))

    def one(self, number: int, share: tuple[Tensor, ...]) -> Any:
        def step(optimizer: Optimizer) -> None:
            self.waiting[number] = optimizer
            self.meeting.wait(30)
            if number == 0:
                params = [[p for g in o.param_groups for p in g["params"]] for o in self.waiting if o is not None]
                for alike in zip(*params, strict=True):
                    grads = [p.grad for p in alike]
                    total = sum(grads[1:], grads[0]) / len(grads)
                    for p in alike:
                        p.grad = total.clone()
            self.meeting.wait(30)
            optimizer.step()

        return self.steps[number](*share, do=step)


@pytest.mark.parametrize("make", [gan, two_steps_of_one, averaged_by_hand])
def test_replicas_are_eager_ones_that_meet_before_each_update(make: Make) -> None:
    program = graphir.capture(make(nets()), (X, Z))
    replicated = passes.replicate(program, [0, 1])
    session = runtime.Session(passes.emit(replicated), program.state, binding="cpu")
    eager = InTurn(make, 2)
    draw = torch.Generator().manual_seed(1)
    for _ in range(3):
        x, z = torch.randn(6, 8, generator=draw), torch.randn(6, 4, generator=draw)
        pairs = zip(*map(pytree.tree_leaves, eager.step(x, z)), strict=True)
        assert bits(session.step(x, z)) == bits([(a + b) / 2 for a, b in pairs])
    for number, each in enumerate(eager.nets):
        state = session.state_dict(number)
        for key, module in each.items():
            for name, tensor in module.state_dict().items():
                assert torch.equal(state.get(f"{key}.{name}", tensor), tensor), name


def test_optimizers_are_followed_and_told_apart() -> None:
    mine = nets()
    opt_g, opt_d = torch.optim.Adam(mine["G"].parameters(), 0.01), torch.optim.SGD(mine["D"].parameters(), 0.1)
    G, D = mine["G"], mine["D"]

    def step(x: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        losses = []
        for optimizer, net, given in ((opt_d, D, x), (opt_g, G, z)):
            optimizer.zero_grad()
            losses.append(net(given).square().mean())
            losses[-1].backward()
            optimizer.step()
        return losses[0], losses[1]

    program = graphir.capture(step, (X, Z), stateful={"G": G, "D": D, "opt_d": opt_d, "opt_g": opt_g})
    assert program.interface.optimizers == ("SGD", "Adam")
    assert [group.optimizer for group in program.interface.param_groups] == [0, 1]
    assert graphir.parse(str(program)).interface == program.interface
    plan = passes.emit(program)
    session = runtime.Session(plan, program.state, binding="cpu", optimizer=(opt_d, opt_g))
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for optimizer in (opt_d, opt_g)]
    for _ in range(3):
        assert bits(session.step(X, Z)) == bits(step(X, Z))
        for scheduler in schedulers:
            scheduler.step()
    for optimizer in (opt_d, opt_g):
        found, expected = session.optimizer_state_dict(of=optimizer), optimizer.state_dict()
        assert found["param_groups"] == expected["param_groups"] and found["state"].keys() == expected["state"].keys()
        for index, kept in expected["state"].items():
            assert all(torch.equal(found["state"][index][name], tensor) for name, tensor in kept.items())
    assert session.optimizer_state_dict(of=1)["param_groups"] == opt_g.state_dict()["param_groups"]
    with pytest.raises(SessionError, match=r"the program has no optimizer 2\n.*\n.*0 to 1"):
        session.optimizer_state_dict(of=2)
    with pytest.raises(SessionError, match="no such optimizer"):
        session.optimizer_state_dict(of=torch.optim.SGD(D.parameters()))
    with pytest.raises(SessionError, match="has 2 optimizers, SGD, Adam, and 1 would be followed"):
        session.follow(opt_d)
    session.follow(opt_g, opt_d)  # in any order, if they were captured
    others = torch.optim.Adam(G.parameters()), torch.optim.SGD(D.parameters())
    with pytest.raises(SessionError, match="the optimizer is Adam, the program's SGD"):
        session.follow(*others)
    alone = runtime.Session(plan, program.state, binding="cpu")
    with pytest.warns(graphir.TrainingWarning, match=r"of the captured optimizers is .*\*optimizers"):
        alone.step(X, Z)


def test_updates_that_torch_would_not_make_are_refused() -> None:
    mine = nets()
    D = mine["D"]
    optimizer, other = torch.optim.SGD(D.parameters(), 0.1), torch.optim.SGD(D[2].parameters(), 0.1)  # type: ignore[index,union-attr]

    def goes_back_late(x: Tensor, z: Tensor) -> Tensor:
        optimizer.zero_grad()
        first, second = D(x).square().mean(), D(x + 1).square().mean()
        first.backward()
        optimizer.step()
        second.backward()
        return second

    def has_two(x: Tensor, z: Tensor) -> None:
        for each in (optimizer, other):
            each.zero_grad()
        D(x).sum().backward()
        for each in (optimizer, other):
            each.step()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        goes_back_late(X, Z)
    with pytest.raises(CaptureError, match="modified by an inplace operation"):
        graphir.capture(goes_back_late, (X, Z))
    with pytest.raises(CaptureError, match=r"parameter '2.weight' has two optimizers, SGD and SGD"):
        graphir.capture(has_two, (X, Z))


def test_parameters_that_a_list_holds_are_the_modules() -> None:
    def make(nets: dict[str, nn.Module]) -> Callable[..., Any]:
        D = nets["D"]
        params = list(D.parameters())
        optimizer = torch.optim.SGD(params, 0.1)

        def step(x: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
            loss = D(x).square().mean()
            grads = torch.autograd.grad(loss, params)
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad.clone()
            norm = torch.nn.utils.clip_grad_norm_(params, 0.1)
            for param in params:
                param.data.mul_(0.99)
            optimizer.step()
            return loss, norm

        return step

    is_eager(make)


def results_of(program: graphir.Program, state: Any) -> list[Any]:
    """What three steps return, the last of them with a replica that has no rows, and all state behind them."""
    draw, found = torch.Generator().manual_seed(1), []
    with runtime.Session(passes.emit(program), state, binding="cpu") as session:
        for rows in (6, 6, 4):
            batch = torch.randn(rows, 8, generator=draw), torch.randn(rows, 4, generator=draw)
            found.append(bits(session.step(*batch)))
        return [*found, {name: tensor.tolist() for name, tensor in session.state_dict().items()}]


@pytest.mark.parametrize("seed", range(20))
def test_passes_in_random_orders_change_no_bit(seed: int) -> None:
    random = Random(seed)
    make = random.choice([*MAKES, *map(averaged_by, AVERAGES)])
    program = graphir.capture(make(nets()), (X, Z))
    replicated = random.random() < 0.4
    before = passes.replicate(program, [0, 1], shares=random.choice([None, [2, 1]])) if replicated else program
    placed, modules = before, list(before.module_paths)
    for _ in range(random.randint(1, 4)):
        module, there = random.choice([*modules, "**"]), {0: 2, 1: 3} if replicated else {0: 1}
        edits: list[Callable[[graphir.Program], graphir.Program]] = [
            lambda program, module=module, there=there: passes.shift_modules(program, {module: there}),
            lambda program, module=module: passes.recompute(program, module),
            lambda program, module=module: passes.park(program, module, "cpu:0"),
            lambda program: passes.park(program, "**.momentum_buffer", "cpu:0"),
        ]
        with suppress(PassError):
            placed = random.choice(edits)(placed)
    placed = passes.inject_copies(placed)
    if random.random() < 0.5:
        placed = passes.share_storage(placed)
    graphir.certify(before, placed)
    assert results_of(placed, program.state) == results_of(before, program.state)


def on_D(edit: Callable[..., Any]) -> Make:
    """Steps of the judge alone, that do something with its optimizer, its loss, the step's argument, or its rows."""

    def make(nets: dict[str, nn.Module]) -> Callable[..., Any]:
        D = nets["D"]
        optimizer = torch.optim.SGD(D.parameters(), 0.1, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)  # type: ignore[attr-defined]
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

        def step(x: Tensor, z: Tensor) -> Any:
            return edit(D, optimizer, x, z, scaler, scheduler)

        return step

    return make


def trained(D: Any, optimizer: Any, x: Tensor, *_: Any, do: Callable[[], Any] = lambda: None) -> Any:
    optimizer.zero_grad()
    loss = D(x).square().mean()
    loss.backward()
    found = do()
    optimizer.step()
    return loss if found is None else (loss, found)


def holds_a_gradient(D: Any, optimizer: Any, x: Tensor, z: Tensor, scaler: Any, _: Any) -> Any:
    """Whoever holds a gradient sees what a second backward, the scaler and zeros make of it."""
    optimizer.zero_grad()
    out = D(x)
    scaler.scale(out.square().mean()).backward(retain_graph=True)
    held = D[0].weight.grad
    scaler.scale(out.mean()).backward()
    sums = held.norm()
    scaler.unscale_(optimizer)
    unscaled = held.norm()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=False)
    return sums, unscaled, held


def takes_gradients_by_itself(D: Any, optimizer: Any, x: Tensor, *_: Any) -> Any:
    params = list(D.parameters())
    loss = D(x).square().mean()
    grads = torch.autograd.grad(loss, params)
    with torch.no_grad():
        for param, grad in zip(params, grads, strict=True):
            param.sub_(grad, alpha=0.1)
    return loss, torch.stack([grad.norm() for grad in grads]).norm()


def gradients_of_its_own_tensors(D: Any, optimizer: Any, x: Tensor, *_: Any) -> Any:
    delta = torch.zeros_like(x, requires_grad=True)
    D(x + delta).square().mean().backward()
    assert delta.grad is not None
    optimizer.zero_grad()
    loss = D(x + 0.1 * delta.grad.sign()).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def adds_lists_of_parameters(D: Any, optimizer: Any, x: Tensor, *_: Any) -> Any:
    held = [*D.parameters()]
    optimizer.zero_grad(set_to_none=False)
    loss = D(x).square().mean() + 0.01 * sum(param.square().sum() for param in held)
    loss.backward()
    D[0].weight.grad[:4] = 0  # a part of a gradient
    total = torch.zeros(())
    for param in held:
        total = total + param.grad.norm() ** 2
    optimizer.step()
    return loss, total


READ = [holds_a_gradient, takes_gradients_by_itself, gradients_of_its_own_tensors, adds_lists_of_parameters]


@pytest.mark.parametrize("edit", READ)
def test_gradients_are_what_their_holder_sees(edit: Callable[..., Any]) -> None:
    is_eager(on_D(edit))


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        (
            lambda D, o, x, *_: trained(D, o, x, do=lambda: o.param_groups[0]["lr"]),
            "reads 'lr' of a parameter group",
        ),
        (lambda D, o, x, z, s, c: trained(D, o, x, do=c.get_last_lr), "calls a scheduler's get_last_lr, which moves"),
        (
            lambda D, o, x, *_: trained(D, o, x, do=lambda: o.param_groups[0].update(lr=1)),
            "sets 'all' of a parameter",
        ),
        (lambda D, o, x, *_: trained(D, o, x, do=lambda: o.state[D[0].weight]), "reads or sets the state of SGD"),
        (lambda D, o, x, *_: trained(D, o, x, do=o.state.clear), "reads or sets the state of SGD"),
        (lambda D, o, x, *_: trained(D, o, x, do=o.state_dict), "calls SGD.state_dict, which moves from step to step"),
    ],
)
def test_what_moves_between_steps_is_not_read(edit: Callable[..., Any], why: str) -> None:
    mine = nets()
    step = on_D(edit)(mine)
    before = copy.deepcopy(mine["D"].state_dict())
    with pytest.raises(CaptureError, match=why):
        graphir.capture(step, (X, Z))
    assert bits(mine["D"].state_dict()) == bits(before)
    with suppress(TypeError):
        step(X, Z)  # nothing is left that keeps it from running


def test_optimizers_and_scalers_that_are_not_found_are_refused() -> None:
    D = nets()["D"]
    optimizer = torch.optim.SGD(D.parameters(), 0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu")  # type: ignore[attr-defined]
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def step(x: Tensor) -> Tensor:
        return trained(D, optimizer, x)  # type: ignore[no-any-return]

    def scaled(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = D(x).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    with pytest.raises(CaptureError, match=r"uses an optimizer, SGD, that was not found\n.*\n.*stateful=\(model"):
        graphir.capture(step, (X,), stateful=D)
    with pytest.raises(CaptureError, match="uses a gradient scaler, GradScaler, that was not found"):
        graphir.capture(scaled, (X,), stateful=(D, optimizer))
    assert not optimizer.state


@pytest.mark.parametrize(
    ("write", "why"),
    [
        (
            lambda D, x: D[0].weight.grad.mul_(x.std()),
            "updates '0.weight' by '0.weight_grad.mul', which it computes",
        ),
        (lambda D, x: D[0].weight.add_(torch.randn_like(D[0].weight)), "each updates '0.weight' by 'randn_like'"),
    ],
)
def test_replicas_that_would_come_to_differ_are_refused(write: Callable[..., Any], why: str) -> None:
    def edited(D: Any, o: Any, x: Tensor, *_: Any) -> Any:
        def do() -> None:
            with torch.no_grad():
                write(D, x)

        return trained(D, o, x, do=do)

    program = graphir.capture(on_D(edited)(nets()), (X, Z))
    with pytest.raises(PassError, match=why):
        passes.replicate(program, [0, 1])


def test_values_that_an_update_reads_are_each_replicas_own() -> None:
    def edit(D: Any, o: Any, x: Tensor, *_: Any) -> Any:
        h = D[0](x)
        h.retain_grad()
        o.zero_grad()
        loss = D[2](D[1](h)).square().mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(D.parameters(), 100.0)
        o.step()
        return {"loss": loss / norm, "rows": h.detach() / norm, "own": h.grad.norm()}

    program = graphir.capture(on_D(edit)(nets()), (X, Z))
    session = runtime.Session(passes.emit(passes.replicate(program, [0, 1])), program.state, binding="cpu")
    found, whole = session.step(X, Z), on_D(edit)(nets())(X, Z)
    torch.testing.assert_close(found["rows"], whole["rows"])
    shares = [on_D(edit)(nets())(*share) for share in zip(X.chunk(2), Z.chunk(2), strict=True)]
    torch.testing.assert_close(found["own"], (shares[0]["own"] + shares[1]["own"]) / 2)
    torch.testing.assert_close(found["loss"], whole["loss"])


def test_what_replicas_draw_is_their_own() -> None:
    D = nets()["D"]

    def step(x: Tensor) -> dict[str, Tensor]:
        share = torch.rand(())
        return {"share": share, "twice": share * 2, "mixed": D(x) * share}

    program = graphir.capture(step, (X,))
    assert [slot.gather for slot in program.interface.fetches] == ["mean", "mean", "first"]
    assert [slot.batch_dim for slot in program.interface.fetches] == [None, None, 0]


def test_sparse_gradients_are_added_by_no_second_backward() -> None:
    table = nn.EmbeddingBag(6, 4, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), 1.0)
    bags = torch.tensor([[0, 1], [2, 3], [4, 5]])

    def twice(bags: Tensor) -> None:
        optimizer.zero_grad()
        for _ in range(2):
            table(bags).sum().backward()
        optimizer.step()

    def lets_go(bags: Tensor) -> int:
        optimizer.zero_grad()
        table(bags).sum().backward()
        count = sum(param.grad is not None for param in table.parameters())
        table.weight.grad = None
        optimizer.step()
        return count

    with pytest.raises(CaptureError, match="adds to the sparse gradient of 'weight' by a second backward"):
        graphir.capture(twice, (bags,))
    program = graphir.capture(lets_go, (bags,))
    session = runtime.Session(passes.emit(program), program.state, binding="cpu")
    assert session.step(bags) == 1 and torch.equal(session.state_dict()["weight"], table.weight)


def test_globals_are_those_that_the_code_names() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.MODEL = nets()["D"]
            self.optimizer = torch.optim.SGD(self.MODEL.parameters(), 0.1)

        def step(self, x: Tensor) -> Tensor:
            self.optimizer.zero_grad()
            loss: Tensor = self.MODEL(x).square().mean()
            loss.backward()
            self.optimizer.step()
            return loss

    assert "0.weight" in graphir.capture(Trainer().step, (X,)).interface.module_state


MODEL = nn.Linear(2, 2)
"""A global whose name is also that of an attribute."""


def test_a_buffer_among_the_results() -> None:
    def make(nets: dict[str, nn.Module]) -> Callable[..., Any]:
        G = nets["G"]
        optimizer = torch.optim.SGD(G.parameters(), 0.1)

        def step(x: Tensor, z: Tensor) -> Any:
            optimizer.zero_grad()
            loss = F.mse_loss(G(z), x)
            loss.backward()
            optimizer.step()
            return {"loss": loss, "mean": G[1].running_mean, "count": G[1].num_batches_tracked}  # type: ignore[index]

        return step

    is_eager(make)


class Kept:
    """A counter that belongs to a class."""

    n = 0


def test_counters_of_namespaces_and_classes_are_refused() -> None:
    D, kept = nets()["D"], SimpleNamespace(n=0)

    def step(x: Tensor) -> Tensor:
        kept.n += 1
        return D(x)  # type: ignore[no-any-return]

    def counts(x: Tensor) -> Tensor:
        Kept.n += 1
        return D(x)  # type: ignore[no-any-return]

    with pytest.raises(CaptureError, match=r"the step changes 'kept\.n'"):
        graphir.capture(step, (X,))
    with pytest.raises(CaptureError, match="the step changes 'n'"):
        graphir.capture(counts, (X,))
    assert kept.n == Kept.n == 0
