"""Complex tensors, and torch's bits that say that a tensor's memory shows its conjugate or its negative."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from graphir.passes import emit
from graphir.runtime import Session
from torch import Tensor, nn

from graphir.capturing.capture import capture
from graphir.errors import CaptureError
from graphir.ir.infer import forget

Body = Callable[[Tensor], Tensor]


def z(x: Tensor) -> Tensor:
    return torch.complex(x, x.flip(-1) * 0.5)


def written(write: Callable[[Tensor], object]) -> Body:
    """What *write* leaves of a complex tensor."""

    def body(x: Tensor) -> Tensor:
        made = z(x).clone()
        write(made)
        return made

    return body


def conjugate_read_after_the_write(x: Tensor) -> Tensor:
    made = z(x).clone()
    before = made.conj().imag
    made.mul_(2)
    return before


def rotary(x: Tensor) -> Tensor:
    angles = torch.polar(torch.ones(3), torch.arange(3.0))
    return torch.view_as_real(torch.view_as_complex(x.reshape(-1, 3, 2)) * angles.conj()).flatten(-2)


BODIES: dict[str, Body] = {
    "fft": torch.fft.fft,
    "hfft": torch.fft.hfft,
    "ihfft": torch.fft.ihfft,
    "hfftn": torch.fft.hfftn,
    "conj": lambda x: z(x).conj(),
    "conj twice": lambda x: torch.view_as_real(z(x).conj()[1:].conj()),
    "imag of conj": lambda x: z(x).conj().imag,
    "real of conj": lambda x: z(x).conj().real,
    "negative times": lambda x: z(x).conj().imag @ x.T,
    "negative overwritten": lambda x: z(x).conj().imag.div_(2),
    "resolved": lambda x: torch.view_as_real(z(x).conj().resolve_conj()),
    "adjoint": lambda x: z(x).mH @ z(x),
    "einsum": lambda x: torch.einsum("ij,kj->ik", z(x), z(x).conj()),
    "solve": lambda x: torch.linalg.solve(z(x[:3, :3]) + 5 * torch.eye(3), z(x[:3, :3]).conj()),
    "qr": lambda x: torch.linalg.qr(z(x).conj())[1].abs(),
    "rotary": rotary,
    "write to imag": written(lambda c: c.imag.mul_(2)),
    "write to a part of imag": written(lambda c: c[1:, 2:].imag.copy_(c[1:, 2:].real)),
    "write to parts": written(lambda c: torch.view_as_real(c.T)[..., 1].mul_(3)),
    "write to conj": written(lambda c: c.conj().mul_(torch.tensor(2j))),
    "write to imag of conj": written(lambda c: c.conj().imag.mul_(2).add_(1)),
    "read after a write": conjugate_read_after_the_write,
}


class Net(nn.Module):
    def __init__(self, body: Body, grad: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.w = body, nn.Parameter(torch.randn(6), requires_grad=grad)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x * self.w)


def loss_of(y: Tensor) -> Tensor:
    return (y * y.conj()).real.mean() if y.is_complex() else (y * y).mean()


def same(a: Tensor, b: Tensor) -> bool:
    a, b = (torch.view_as_real(t.resolve_conj()) if t.is_complex() else t.resolve_neg() for t in (a, b))
    return torch.equal(a.detach().view(torch.int32), b.detach().view(torch.int32))


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_complex_results_are_eagers(body: Body) -> None:
    model = Net(body, grad=False)
    program = capture(model, inputs=(torch.randn(4, 6),))
    with Session(emit(program), program.state, executor="reference") as session:
        for batch in (4, 4 if program.covers.fixed else 5):
            x = torch.randn(batch, 6)
            assert same(session.step(x), model(x))


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_complex_gradients_are_eagers(body: Body) -> None:
    model = Net(body)
    program = capture(
        model, inputs=(torch.randn(4, 6),), loss=loss_of, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Session(emit(program), program.state, executor="serial") as session:
        for _ in range(2):
            x = torch.randn(4, 6)
            optimizer.zero_grad()
            loss = loss_of(model(x))
            loss.backward()
            optimizer.step()
            assert same(session.step(x), loss)
            assert same(session.state_dict()["w"], model.w)


def test_what_one_capture_learns_of_views_is_not_taken_for_conjugates_in_the_next() -> None:
    forget()
    for body in (BODIES["conj twice"], BODIES["imag of conj"], BODIES["resolved"]):
        model, x = Net(body, grad=False), torch.randn(4, 6)
        program = capture(model, inputs=(x,))
        with Session(emit(program), program.state) as session:
            assert same(session.step(x), model(x))


@pytest.mark.parametrize(
    ("body", "what", "fix"),
    [
        (lambda x: z(x) * 2j, "an argument of type complex is not supported", "torch.tensor(1j)"),
        (lambda x: torch.polar(x.abs(), x).real, "an argument of type complex is not supported", "torch.complex("),
        (
            lambda x: torch.view_as_complex(x.view(-1, 3, 2).clone()).mul_(2),
            "the step overwrites a view with dtype complex64 of a tensor with dtype float32",
            "view the new tensor with the other dtype",
        ),
        (
            lambda x: x.clone().view(torch.int32).add_(1).float() * x,
            "the step overwrites a view with dtype int32 of a tensor with dtype float32",
            "view the new tensor with the other dtype",
        ),
    ],
)
def test_what_no_program_tells_of_complex_tensors_is_refused(body: Body, what: str, fix: str) -> None:
    model = Net(body)
    with pytest.raises(CaptureError, match=what) as refusal:
        capture(model, inputs=(torch.randn(4, 6),), loss=loss_of)
    assert fix in refusal.value.fix and f", at {Path(__file__).name}:" in refusal.value.where
