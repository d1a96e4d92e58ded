"""Step functions with several updates, and with what comes behind them: other optimizers, averages, further passes."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from random import Random
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
    given |= eager["D"].state_dict()  # of one module, names have no prefix
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
