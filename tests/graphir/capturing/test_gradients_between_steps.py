"""Gradients that one step function leaves and another one adds to, reads, or updates by."""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

import graphir
from graphir import passes, runtime
from graphir.errors import CaptureError, RecaptureWarning, SessionError, TrainingWarning

DRAW = torch.Generator().manual_seed(0)
BATCHES = [(torch.randn(6, 8, generator=DRAW), torch.randint(4, (6,), generator=DRAW)) for _ in range(8)]


class Trainer:
    """A net, and steps of which some leave gradients."""

    def __init__(self, made: Any = None, scale: bool = False, norm: bool = True) -> None:
        torch.manual_seed(0)
        second = nn.BatchNorm1d(16) if norm else nn.Identity()
        self.model = nn.Sequential(nn.Linear(8, 16), second, nn.Tanh(), nn.Linear(16, 4))
        self.optimizer = (made or adamw)(self.model.parameters())
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1) if scale else None

    def micro(self, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(self.model(x), y) / 3
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        return loss

    def first(self, x: Tensor, y: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        return self.micro(x, y)

    def last(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.micro(x, y), self.update()

    def update(self) -> Tensor:
        norm = self.stepped()
        self.optimizer.zero_grad()
        return norm

    def stepped(self) -> Tensor:
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        norm = clip_grad_norm_(self.model.parameters(), 0.1)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        return norm

    def any(
        self, x: Tensor, y: Tensor, zero: str, early: bool, backwards: int, by: str, clip: str, update: bool, end: str
    ) -> Any:
        """A step of any kind."""
        if zero:
            self.optimizer.zero_grad(set_to_none=zero == "none")
        if early:
            self.optimizer.step()
        losses, norms = [], []
        for _ in range(backwards):
            losses.append(F.cross_entropy(self.model(x), y))
            if by == "assigned":
                params = list(self.model.parameters())
                for param, made in zip(params, torch.autograd.grad(losses[-1], params), strict=True):
                    param.grad = made if param.grad is None else param.grad + made
            else:
                losses[-1].backward()
            if clip == "each":
                norms.append(clip_grad_norm_(self.model.parameters(), 0.1))
        if clip == "once":
            norms.append(clip_grad_norm_(self.model.parameters(), 0.1))
        if update:
            self.optimizer.step()
        left = [param.grad for param in self.model.parameters()] if backwards else []
        if end:
            self.optimizer.zero_grad(set_to_none=end == "none")
        return losses, norms, [gradient.clone() for gradient in left if gradient is not None]


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, 0.01)


def momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, 0.1, momentum=0.9, weight_decay=0.01)


def of_the_head(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(params)[-2:], 0.1)


def bits(found: Any) -> list[Any]:
    leaves = torch.utils._pytree.tree_leaves(found)
    return [(leaf.dtype, leaf.tolist()) if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def same_state(found: dict[str, Tensor], model: nn.Module) -> bool:
    return all(torch.equal(found[name], tensor) for name, tensor in model.state_dict().items())


def gradients(model: nn.Module) -> dict[str, list[Any]]:
    return {name: bits(param.grad) for name, param in model.named_parameters() if param.grad is not None}


def session_of(program: graphir.Program, **options: Any) -> runtime.Session:
    return runtime.Session(passes.emit(program), program.state, binding="cpu", **options)


@pytest.mark.parametrize(
    ("made", "scale", "order"),
    [
        (adamw, False, "micro micro last"),
        (momentum, True, "micro micro last"),
        (momentum, False, "first micro stepped"),
        (adamw, True, "first micro stepped"),
        (adamw, False, "micro micro update update"),  # the second has nothing to update by
        (momentum, False, "micro update update"),
    ],
)
def test_steps_beside_each_other(made: Any, scale: bool, order: str) -> None:
    mine, eager = Trainer(made, scale), Trainer(made, scale)
    names = order.split()
    programs: dict[str, graphir.Program] = {}
    for name in dict.fromkeys(names):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            inputs = () if name in ("update", "stepped") else BATCHES[0]
            beside = programs[names[0]] if programs else None
            programs[name] = graphir.capture(getattr(mine, name), inputs, beside=beside)
    sessions = {names[0]: session_of(programs[names[0]])}
    for name in dict.fromkeys(names[1:]):
        sessions.setdefault(name, session_of(programs[name], beside=sessions[names[0]]))
    for name, batch in zip(names * 2, itertools.cycle(BATCHES)):
        given = () if name in ("update", "stepped") else batch
        assert bits(sessions[name].step(*given)) == bits(getattr(eager, name)(*given))
        assert {n: bits(g) for n, g in sessions[name].gradients().items()} == gradients(eager.model)
        assert same_state(sessions[names[0]].state_dict(), eager.model)


def test_the_state_is_saved_with_gradients(tmp_path: Any) -> None:
    mine, eager = Trainer(), Trainer()
    micro = graphir.capture(mine.micro, BATCHES[0])
    last = graphir.capture(mine.last, BATCHES[0], beside=micro)
    session = session_of(micro)
    session.step(*BATCHES[0]), eager.micro(*BATCHES[0])
    last.with_(state=session.state()).save(tmp_path / "last.json", state=True)
    loaded = graphir.load(tmp_path / "last.json")
    again = session_of(loaded)
    assert bits(again.step(*BATCHES[1])) == bits(eager.last(*BATCHES[1]))
    assert same_state(again.state_dict(), eager.model) and again.gradients() == {}


def test_gradients_that_are_there_are_taken_over() -> None:
    mine, eager = Trainer(), Trainer()
    for trainer in (mine, eager):
        trainer.micro(*BATCHES[0])
    session = session_of(graphir.capture(mine.micro, BATCHES[0]))
    assert bits(session.step(*BATCHES[1])) == bits(eager.micro(*BATCHES[1]))
    assert {n: bits(g) for n, g in session.gradients().items()} == gradients(eager.model)


@pytest.mark.parametrize("shares", [None, [2, 1]])
def test_replicas_have_the_whole_batchs_gradients(shares: Any) -> None:
    mine, eager = Trainer(momentum, norm=False), Trainer(momentum, norm=False)
    micro = graphir.capture(mine.micro, BATCHES[0])
    last = graphir.capture(mine.last, BATCHES[0], beside=micro)
    two = [passes.replicate(program, [0, 1], shares=shares) for program in (micro, last)]
    session = session_of(two[0])
    sessions = [session, session, session_of(two[1], beside=session)]
    rows = [3, 3] if shares is None else [4, 2]
    params = list(eager.model.parameters())
    for i, (x, y) in enumerate(BATCHES[:6]):
        found = sessions[i % 3].step(x, y)
        parts = [F.cross_entropy(eager.model(a), b) / 3 for a, b in zip(x.split(rows), y.split(rows), strict=True)]
        for param, *own in zip(params, *(torch.autograd.grad(part, params) for part in parts), strict=True):
            whole = (own[0] + own[1]) / 2 if shares is None else own[0] * (2 / 3) + own[1] * (1 / 3)
            param.grad = whole if param.grad is None else param.grad.add_(whole)
        if i % 3 == 2:
            eager.update()
        if shares is None:
            assert bits(found)[0] == bits((parts[0] + parts[1]) / 2)[0]
            assert same_state(session.state_dict(0), eager.model) and same_state(session.state_dict(1), eager.model)
    for name, tensor in eager.model.state_dict().items():
        torch.testing.assert_close(session.state_dict(1)[name], tensor)


@pytest.mark.parametrize("seed", range(16))
def test_any_steps_in_any_order(seed: int) -> None:
    """A step is equal, or refused: what its user does with gradients is followed from plan to plan."""
    rnd = random.Random(seed)
    made = (adamw, momentum)[seed % 2]
    mine, eager = Trainer(made), Trainer(made)
    kinds = [
        (
            rnd.choice(["", "", "none", "zeros"]),
            rnd.random() < 0.2,
            rnd.choice([0, 1, 1, 2]),
            rnd.choice(["backward", "backward", "assigned"]),
            rnd.choice(["", "once", "each"]),
            rnd.random() < 0.5,
            rnd.choice(["", "none", "zeros"]),
        )
        for _ in range(3)
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = graphir.compile(mine.any, session={"binding": "cpu"})
        for x, y in BATCHES[:7]:
            kind = rnd.choice(kinds)
            try:
                found = compiled(x, y, *kind)
            except CaptureError as e:
                assert "by a gradient that it does not compute" in e.what or "leaves and does not keep" in e.what
                return
            assert bits(found) == bits(eager.any(x, y, *kind)), kind
            assert same_state(compiled.state_dict(), eager.model), kind


def test_one_function_for_all() -> None:
    mine, eager = Trainer(), Trainer()

    def of(trainer: Trainer) -> Callable[..., Any]:
        return lambda x, y, last: trainer.last(x, y) if last else trainer.micro(x, y)

    compiled, eagerly = graphir.compile(of(mine), session={"binding": "cpu"}), of(eager)
    with pytest.warns(RecaptureWarning, match="argument 2 was False"):
        for i, batch in enumerate(BATCHES[:6]):
            assert bits(compiled(*batch, i % 3 == 2)) == bits(eagerly(*batch, i % 3 == 2))
    assert len(compiled.plans) == 2 and compiled.steps_done == 6
    compiled(*BATCHES[6], False), eagerly(*BATCHES[6], False)
    compiled.write_back()
    assert gradients(mine.model) == gradients(eager.model) and same_state(mine.model.state_dict(), eager.model)


def test_the_update_may_come_first() -> None:
    """A plan that began without gradients is made anew once a step beside leaves some."""
    mine, eager = Trainer(norm=False), Trainer(norm=False)
    last = graphir.compile(mine.last, BATCHES[0], session={"binding": "cpu"})
    micro = graphir.compile(mine.micro, BATCHES[0], beside=last)
    evaluated = graphir.compile(lambda x: mine.model(x), (BATCHES[0][0],), beside=last)
    module = graphir.compile(mine.model, (BATCHES[0][0],), beside=last)
    with pytest.warns(RecaptureWarning) as told:
        for i, batch in enumerate(BATCHES[:6]):
            mine_, its = (last, eager.last) if i % 3 == 2 else (micro, eager.micro)
            assert bits(mine_(*batch)) == bits(its(*batch))
            assert bits(evaluated(batch[0])) == bits(module(batch[0])) == bits(eager.model(batch[0]))
    assert len(told) == 1 and "a step beside leaves gradients now" in str(told[0].message)
    assert same_state(last.state_dict(), eager.model) and micro.steps_done == 6


def test_the_optimizer_is_followed_beside() -> None:
    mine, eager = Trainer(), Trainer()
    micro = graphir.compile(mine.micro, BATCHES[0], session={"binding": "cpu"})
    update = graphir.compile(lambda: mine.update(), (), beside=micro)
    for i, batch in enumerate(BATCHES[:4]):
        assert bits(micro(*batch)) == bits(eager.micro(*batch))
        if i % 2:
            assert bits(update()) == bits(eager.update())
            for trainer in (mine, eager):
                trainer.optimizer.param_groups[0]["lr"] *= 0.5
    update()  # nothing is there to update by: as in torch, nothing happens
    assert same_state(update.state_dict(), eager.model)
    assert micro.param_groups[0]["lr"] == eager.optimizer.param_groups[0]["lr"]


def test_placed_within_limits() -> None:
    """State of a parameter goes with it, also in a step that does not update the parameter."""
    mine, eager = Trainer(), Trainer()
    program = graphir.capture(mine.last, BATCHES[0], beside=graphir.capture(mine.micro, BATCHES[0]))
    limit = int(graphir.memory(passes.emit(program)).peak["gpu:0"] * 0.75)
    micro = graphir.compile(mine.micro, BATCHES[0], limits={"gpu:0": limit, "gpu:1": limit}, session={"binding": "cpu"})
    last = graphir.compile(mine.last, BATCHES[0], beside=micro)
    homes = [{b.name: b.device for b in compiled.plan.program.init.blobs.values()} for compiled in (micro, last)]
    assert homes[0] == homes[1] and len({homes[0][f"gpu_0/{n}.weight.grad"] for n in (0, 3)}) == 2
    for i, batch in enumerate(BATCHES[:6]):
        compiled, its = (last, eager.last) if i % 3 == 2 else (micro, eager.micro)
        assert bits(compiled(*batch)) == bits(its(*batch))


def test_an_update_by_itself_goes_where_the_state_is() -> None:
    """Within limits, and with the scaler of micro-batches that name no optimizer."""
    mine, eager = Trainer(), Trainer()
    micro = graphir.compile(
        mine.micro, BATCHES[0], limits={"gpu:0": 10_000, "gpu:1": 10_000}, session={"binding": "cpu"}
    )
    update = graphir.compile(mine.update, (), beside=micro)
    homes = [{b.name: b.device for b in compiled.plan.program.init.blobs.values()} for compiled in (micro, update)]
    assert all(homes[0][name] == device for name, device in homes[1].items() if name in homes[0])
    for i, batch in enumerate(BATCHES[:6]):
        assert bits(micro(*batch)) == bits(eager.micro(*batch))
        if i % 3 == 2:
            assert bits(update()) == bits(eager.update())
    mine, eager = Trainer(scale=True), Trainer(scale=True)
    model, scaler = mine.model, mine.scaler
    assert scaler is not None

    def scaled(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y) / 3
        scaler.scale(loss).backward()
        return loss

    micro = graphir.compile(scaled, BATCHES[0], session={"binding": "cpu"})
    update = graphir.compile(mine.update, (), beside=micro)
    for batch in BATCHES[:3]:
        assert bits(micro(*batch)) == bits(eager.micro(*batch))
    assert bits(update()) == bits(eager.update()) and same_state(update.state_dict(), eager.model)


def test_the_steps_of_a_gan_beside_each_other() -> None:
    """Each adds to the gradients of the other's module, which that sets to zero before it reads them."""

    def made() -> tuple[dict[str, Any], Callable[..., Tensor], Callable[..., Tensor]]:
        torch.manual_seed(0)
        generator, judge = nn.Linear(4, 8), nn.Linear(8, 1)
        of = {"g": torch.optim.Adam(generator.parameters(), 0.01), "d": torch.optim.Adam(judge.parameters(), 0.01)}

        def judged(x: Tensor, z: Tensor) -> Tensor:
            of["d"].zero_grad()
            loss = F.softplus(-judge(x)).mean() + F.softplus(judge(generator(z).detach())).mean()
            loss.backward()
            of["d"].step()
            return loss

        def generated(x: Tensor, z: Tensor) -> Tensor:
            of["g"].zero_grad()
            loss = F.softplus(-judge(generator(z))).mean()
            loss.backward()
            of["g"].step()
            return loss

        return {"generator": generator, "judge": judge, **of}, judged, generated

    x, z = BATCHES[0][0], torch.randn(6, 4)
    (stateful, *mine), (_, *eager) = made(), made()
    first = graphir.compile(mine[0], (x, z), stateful=stateful, session={"binding": "cpu"})
    with pytest.warns(TrainingWarning, match="gradient of 'judge.weight' and 1 other, which its optimizer does not"):
        second = graphir.compile(mine[1], (x, z), stateful=stateful, beside=first)
    for _ in range(3):
        assert bits([first(x, z), second(x, z)]) == bits([step(x, z) for step in eager])


def test_one_call_has_one_form() -> None:
    mine, eager = Trainer(), Trainer()

    def of(trainer: Trainer) -> Callable[..., Any]:
        def step(x: Tensor, y: Tensor, last: bool = True) -> Any:
            return trainer.last(x, y) if last else trainer.micro(x, y)

        return step

    compiled, eagerly = graphir.compile(of(mine), session={"binding": "cpu"}), of(eager)
    with pytest.warns(RecaptureWarning) as told:
        for given in ({}, {"last": False}, {"last": True}, {"y": BATCHES[0][1]}, {}):
            x, y = BATCHES[0]
            args = (x,) if "y" in given else (x, y)
            assert bits(compiled(*args, **given)) == bits(eagerly(*args, **given))
        assert bits(compiled(x, y, False)) == bits(eagerly(x, y, False))
    assert len(compiled.plans) == 2 and len(told) <= 3


def test_what_grows_from_update_to_update_is_told() -> None:
    mine, eager = Trainer(), Trainer()

    def of(trainer: Trainer) -> Callable[..., Any]:
        return lambda x, y: (trainer.micro(x, y), trainer.stepped())

    with pytest.warns(TrainingWarning, match=r"gradient of '0.weight' and 5 others, updates by the sum and leaves it"):
        program = graphir.capture(of(mine), BATCHES[0])
    session = session_of(program)
    for batch in BATCHES[:3]:
        assert bits(session.step(*batch)) == bits(of(eager)(*batch))


def test_gradients_of_parameters_that_no_optimizer_has() -> None:
    """Read sums last; what nobody reads is left behind, and told; a step beside that would read it is refused."""
    mine, eager = Trainer(of_the_head), Trainer(of_the_head)

    def of(trainer: Trainer) -> Callable[..., Any]:
        def step(x: Tensor, y: Tensor, reads: bool) -> Any:
            trainer.optimizer.zero_grad()
            loss = trainer.micro(x, y)
            norm = clip_grad_norm_(trainer.model.parameters(), 0.1) if reads else None
            trainer.optimizer.step()
            return loss, norm

        return step

    session = session_of(graphir.capture(of(mine), (*BATCHES[0], True)))
    eagerly = of(eager)
    for batch in BATCHES[:3]:
        assert bits(session.step(*batch, True)) == bits(eagerly(*batch, True))
    with pytest.warns(TrainingWarning, match="which its optimizer does not read"):
        left = graphir.capture(of(mine), (*BATCHES[0], False))
    with pytest.raises(
        CaptureError, match=r"reads the gradient of '0.weight', which a step beside leaves and does not"
    ):
        graphir.capture(mine.last, BATCHES[0], beside=left)


def test_a_sparse_gradient_does_not_last() -> None:
    table = nn.Embedding(5, 3, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), 0.1)

    def micro(x: Tensor) -> Tensor:
        loss = table(x).sum()
        loss.backward()
        return loss

    def step(x: Tensor) -> Tensor:
        loss = micro(x)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    x = torch.tensor([1, 3, 3])
    graphir.capture(step, (x,))
    for function in (micro, lambda x: (micro(x), optimizer.step())[0]):
        with pytest.raises(CaptureError, match="'weight' has a sparse gradient, which would last from step to step"):
            graphir.capture(function, (x,))


def test_refused() -> None:
    trainer = Trainer()
    with pytest.raises(CaptureError, match=r"updates '0.weight' by a gradient that it does not compute\n.*\n.*beside="):
        graphir.capture(trainer.update, ())
    with pytest.raises(CaptureError, match="beside is a int, not a program"):
        graphir.capture(trainer.micro, BATCHES[0], beside=3)  # type: ignore[arg-type]
    program = graphir.capture(trainer.micro, BATCHES[0])
    with pytest.raises(CaptureError, match="beside is for a step that is a function"):
        graphir.capture(trainer.model, BATCHES[0][:1], beside=program)
    compiled = graphir.compile(trainer.micro, BATCHES[0], session={"binding": "cpu"})
    with pytest.raises(SessionError, match="limits is given beside a compiled step, which has it"):
        graphir.compile(trainer.last, BATCHES[0], beside=compiled, limits={"gpu:0": "1 GiB"})
    with pytest.raises(SessionError, match="beside is a Program"):
        graphir.compile(trainer.last, BATCHES[0], beside=program)  # type: ignore[arg-type]
    with pytest.raises(SessionError, match="nothing is captured before the first step"):
        graphir.compile(trainer.last, beside=graphir.compile(trainer.micro))
    with pytest.raises(SessionError, match="is of another model"):
        graphir.compile(Trainer().model[0], BATCHES[0][:1], beside=compiled)
