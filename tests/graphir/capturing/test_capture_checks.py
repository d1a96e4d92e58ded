"""Checks of data in torch's own Python code are part of a program; shapes that follow data are refused usefully."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from eager import assert_same_bits
from graphir.passes import emit
from graphir.runtime import Session
from torch import Tensor, nn

from graphir.capturing.capture import capture
from graphir.errors import CaptureError, RunError
from graphir.ir.text import parse


@pytest.mark.parametrize("executor", ["reference", "threads"])
def test_the_variance_of_a_gaussian_loss_is_checked_in_each_step(executor: str) -> None:
    model, loss = nn.Linear(3, 2), nn.GaussianNLLLoss()
    x, target, variance = torch.randn(6, 3), torch.randn(6, 2), torch.rand(6, 2)
    program = capture(model, (x,), targets=(target, variance), loss=loss)
    assert program.covers.fixed == "" and parse(str(program)) == program
    with Session(emit(program), program.state, executor=executor) as session:
        expected = loss(model(x[:4]), target[:4], variance[:4])
        expected.backward()
        assert torch.equal(session.step(x[:4], target[:4], variance[:4]), expected.detach())
        assert_same_bits(session.gradients(), {n: p.grad for n, p in model.named_parameters()}, "gradients")
        with pytest.raises(RunError, match="var has negative entry/entries"):
            session.step(x, target, -variance)


class LogDensity(nn.Module):
    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return torch.distributions.Normal(0.0, scale).log_prob(x)


def test_distributions_check_their_parameters_and_values_in_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    # Torch's compiler switches them off for good, where it is first used.
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    x, scale = torch.randn(4), torch.rand(4)
    program = capture(LogDensity(), (x, scale))
    for arguments, message in (((x, -scale), "a parameter of a dist"), ((x * torch.nan, scale), "outside of the supp")):
        with Session(emit(program), program.state) as session:
            assert torch.equal(session.step(x, scale), LogDensity()(x, scale))
            with pytest.raises(RunError, match=message):
                session.step(*arguments)


class Correlated(nn.Module):
    """Torch looks into the covariance before it looks whether that is one."""

    def forward(self, x: Tensor, covariance: Tensor) -> Tensor:
        return torch.distributions.MultivariateNormal(torch.zeros(3), covariance, validate_args=True).log_prob(x)


class Tries(nn.Module):
    def forward(self, x: Tensor, probabilities: Tensor) -> Tensor:
        return torch.distributions.Geometric(probabilities, validate_args=True).log_prob(x.round().abs())


@pytest.mark.parametrize(
    ("model", "right", "wrong"),
    [
        (Correlated(), torch.eye(3) + 0.5, torch.eye(3).cumsum(0)),
        (Correlated(), torch.eye(3) + 0.5, torch.eye(3) - 0.5),
        (Tries(), torch.full((3,), 0.5), torch.zeros(3)),
    ],
)
def test_what_distributions_look_into_on_their_way_to_a_check_is_one(
    model: nn.Module, right: Tensor, wrong: Tensor
) -> None:
    x = torch.randn(4, 3)
    program = capture(model, (x, right), batch_dims=((0, None), {}, ()))
    assert program.covers.fixed == ""
    with Session(emit(program), program.state) as session:
        assert torch.equal(session.step(x[:2], right), model(x[:2], right))
        with pytest.raises(RunError, match="a parameter of a distribution violates its constraint"):
            session.step(x, wrong)


def ctc(out: Tensor) -> Tensor:
    return torch._ctc_loss(out[:, None].log_softmax(-1), torch.ones(1, 2, dtype=torch.int64), (6,), (2,))[0].sum()


def least_squares(out: Tensor) -> Tensor:
    return torch.linalg.lstsq(out, out).solution.sum()


@pytest.mark.parametrize(
    ("loss", "remedy"), [(ctc, "torch.nn.functional.ctc_loss"), (least_squares, "normal equations")]
)
def test_shapes_that_follow_the_data_are_refused_with_a_remedy(loss: Callable[[Tensor], Tensor], remedy: str) -> None:
    with pytest.raises(CaptureError, match="result depends on data") as error:
        capture(nn.Linear(4, 4), (torch.randn(6, 4),), loss=loss)
    assert remedy in error.value.fix
