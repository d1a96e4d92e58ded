"""`graphir.compile` of a step that is a function."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphir
from graphir.errors import CaptureError, RecaptureWarning, SessionError, TrainingWarning

X, Y = torch.randn(6, 8, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 4
SCALE, WEIGHTS = 1.0, [1.0, 0.5]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))


def scaled(loss: Tensor) -> Tensor:
    return loss * SCALE * sum(WEIGHTS)


class Trainer:
    """A step and what it needs."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.smoothing = model, 0.0
        self.optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)

    def step(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        self.optimizer.zero_grad()
        out = self.model(x)
        loss = scaled(F.cross_entropy(out, y, label_smoothing=self.smoothing))
        loss.backward()
        self.optimizer.step()
        return {"loss": loss, "right": (out.argmax(1) == y).sum()}


def equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_compiled_step_is_the_function() -> None:
    eager, mine = Trainer(net()), Trainer(net())
    step = graphir.compile(mine.step, session={"binding": "cpu"})
    assert "nothing is captured so far" in repr(step)
    with pytest.raises(SessionError, match="nothing is captured before the first step"):
        step.state_dict()
    for rows in (6, 6, 3):
        assert equal(step(X[:rows], Y[:rows]), eager.step(X[:rows], Y[:rows]))
        for trainer in (eager, mine):
            trainer.scheduler.step()
    assert step.steps_done == 3 and len(step.plans) == 1
    assert equal(step.state_dict(), eager.model.state_dict())
    assert not torch.equal(mine.model.state_dict()["0.weight"], eager.model.state_dict()["0.weight"])
    step.write_back()
    assert equal(mine.model.state_dict(), eager.model.state_dict())
    kept = mine.optimizer.state_dict()["state"]
    for index, own in eager.optimizer.state_dict()["state"].items():
        assert torch.equal(kept[index]["momentum_buffer"], own["momentum_buffer"])
    assert equal(step(X, Y), eager.step(X, Y))
    step.close()


def test_what_a_step_finds_around_itself_is_followed() -> None:
    global SCALE
    eager, mine = Trainer(net()), Trainer(net())
    step = graphir.compile(mine.step, (X, Y), session={"binding": "cpu"})
    step(X, Y), eager.step(X, Y)
    try:
        SCALE = 2.0
        with pytest.warns(RecaptureWarning, match="captured anew: 'SCALE' is 2.0 now"):
            assert equal(step(X, Y), eager.step(X, Y))
        WEIGHTS[1] = 0.25
        with pytest.warns(RecaptureWarning, match=r"captured anew: 'WEIGHTS\[1\]' is 0.25 now"):
            assert equal(step(X, Y), eager.step(X, Y))
    finally:
        SCALE, WEIGHTS[1] = 1.0, 0.5
    eager.smoothing = mine.smoothing = 0.1
    with pytest.warns(RecaptureWarning, match="captured anew: 'step.__self__.smoothing' is 0.1 now"):
        assert equal(step(X, Y), eager.step(X, Y))
    assert equal(step.state_dict(), eager.model.state_dict()) and step.steps_done == 4


def test_a_compiled_step_within_limits() -> None:
    mine = Trainer(net())
    limits = {"gpu:0": "20 KiB", "gpu:1": "20 KiB"}
    step = graphir.compile(mine.step, (X, Y), limits=limits, topology="h200x8", session={"binding": "cpu"})
    eager = Trainer(net())
    assert equal(step(X, Y), eager.step(X, Y))
    assert step.balanced is not None and set(step.plan.devices) >= {"gpu:0"}


def test_replicas_of_a_compiled_step() -> None:
    mine = Trainer(nn.Sequential(nn.Linear(8, 4)))
    eager = copy.deepcopy(mine)
    step = graphir.compile(mine.step, (X, Y), devices=[0, 1], session={"binding": "cpu"})
    shares = [copy.deepcopy(eager) for _ in range(2)]
    found = step(X, Y)
    losses = [scaled(F.cross_entropy(t.model(x), y)) for t, x, y in zip(shares, X.chunk(2), Y.chunk(2), strict=True)]
    assert torch.equal(found["loss"], (losses[0] + losses[1]) / 2)
    assert found["right"] == eager.step(X, Y)["right"]


def test_what_cannot_be_compiled() -> None:
    mine = Trainer(net())
    with pytest.raises(CaptureError, match="optimizer is given beside a step function"):
        graphir.compile(mine.step, (X, Y), optimizer=mine.optimizer)
    with pytest.raises(CaptureError, match="uses no module"):
        graphir.compile(scaled, (X,))
    with pytest.raises(CaptureError, match=r"compile takes an nn\.Module, not a int"):
        graphir.compile(3, (X,))  # type: ignore[arg-type]


def test_a_model_that_is_behind_its_steps_is_told() -> None:
    """Once, and not where it is lent the state or has been given the state; a copy is nobody's model."""
    eager, mine = Trainer(net()), Trainer(net())
    for trainer in (eager, mine):
        trainer.model.eval()
    step = graphir.compile(mine.step, (X, Y), session={"binding": "cpu"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mine.model(X)
        for _ in range(2):
            step(X, Y), eager.step(X, Y)
        with step.lent():
            assert torch.equal(mine.model(X), eager.model(X))
        copy.deepcopy(mine.model)(X)
    with pytest.warns(TrainingWarning, match=r"parameters that it had before the compiled steps.*write_back\(\)"):
        assert not torch.equal(mine.model(X), eager.model(X))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mine.model(X)
        step.write_back()
        assert torch.equal(mine.model(X), eager.model(X))
    assert mine.model._forward_pre_hooks
    step.close()
    assert not mine.model._forward_pre_hooks


def test_steps_are_counted_from_a_number() -> None:
    dropped = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 4))
    eager, mine = Trainer(dropped), Trainer(copy.deepcopy(dropped))
    program = graphir.capture(mine.step, (X, Y))
    step = graphir.compile(mine.step, session={"binding": "cpu", "steps_done": 3})
    for done, rows in ((3, 6), (4, 4)):
        with graphir.seeded(done):
            expected = eager.step(X[:rows], Y[:rows])
        assert equal(step(X[:rows], Y[:rows]), expected)
    assert step.steps_done == 5
    with pytest.raises(SessionError, match="steps_done=-1 is no number of steps"):
        graphir.runtime.Session(graphir.passes.emit(program), program.state, steps_done=-1)


def test_lbfgs_takes_the_gradients_of_a_step() -> None:
    """A step that makes no update, in the closure of an optimizer that no program has."""
    mine, eager = net(), net()
    mine[1], eager[1] = nn.Identity(), nn.Identity()  # type: ignore[operator]

    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        model.zero_grad()
        loss = F.cross_entropy(model(x), Y)
        loss.backward()
        return loss

    compiled = graphir.compile(lambda x: loss_of(mine, x), (X,), session={"binding": "cpu"})

    def closure() -> Tensor:
        compiled.load_state_dict(mine.state_dict())
        loss: Tensor = compiled(X)
        for name, gradient in compiled.gradients().items():
            mine.get_parameter(name).grad = gradient
        return loss

    ours, its = (torch.optim.LBFGS(model.parameters(), history_size=2) for model in (mine, eager))
    for _ in range(3):
        assert torch.equal(ours.step(closure), its.step(lambda: loss_of(eager, X)))  # type: ignore[arg-type,return-value]
    assert equal(mine.state_dict(), eager.state_dict())
    compiled.close()
