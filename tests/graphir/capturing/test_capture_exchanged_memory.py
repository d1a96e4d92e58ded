"""A tensor whose memory the step exchanges (``x.data = …``) is refused: no operator tells what it shows then."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphir.capturing.capture import capture
from graphir.errors import CaptureError


class Inner(nn.Module):
    def __init__(self, body: Callable[[Inner, Tensor], Tensor]) -> None:
        super().__init__()
        self.body = body
        self.fc = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def input_exchanged(m: Inner, x: Tensor) -> Tensor:
    x.data = x * 2
    return m.fc(x)


def activation_exchanged(m: Inner, x: Tensor) -> Tensor:
    h = m.fc(x)
    h.data = h.data * 2
    return h.sin()


def exchanged_after_its_last_use(m: Inner, x: Tensor) -> Tensor:
    h = m.fc(x)
    out = h.sin()
    h.data = h.data * 2
    return out


def exchanged_and_put_back(m: Inner, x: Tensor) -> Tensor:
    h = m.fc(x)
    own = h.data
    h.data = h * 2
    out = h.sin()
    h.data = own
    return out


def buffer_exchanged(m: Inner, x: Tensor) -> Tensor:
    m.mean.data = m.mean * 0.9
    return m.fc(x) + m.mean


def parameter_exchanged(m: Inner, x: Tensor) -> Tensor:
    m.fc.weight.data = m.fc.weight.data * 0.9
    return m.fc(x)


def transposed_in_its_own_memory(m: Inner, x: Tensor) -> Tensor:
    h = m.fc(x)
    h.data = h.data.t()
    return h.t()


def square_transposed_in_its_own_memory(m: Inner, x: Tensor) -> Tensor:
    m.fc.weight.data = m.fc.weight.data.t()
    return x + m.fc.bias


EXCHANGES = [
    input_exchanged,
    activation_exchanged,
    exchanged_after_its_last_use,
    exchanged_and_put_back,
    buffer_exchanged,
    parameter_exchanged,
    transposed_in_its_own_memory,
    square_transposed_in_its_own_memory,
]


@pytest.mark.parametrize("with_loss", [True, False])
@pytest.mark.parametrize("body", EXCHANGES, ids=lambda body: body.__name__)
def test_exchanged_memory_is_refused(body: Callable[[Inner, Tensor], Tensor], with_loss: bool) -> None:
    net = nn.Sequential(Inner(body), nn.Linear(4, 2))
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    targets = (torch.zeros(6, dtype=torch.int64),) if with_loss else ()
    with pytest.raises(CaptureError, match=r"the step gives .* other memory \(\.data = …\)") as error:
        capture(net, (torch.ones(6, 4),), targets=targets, loss=F.cross_entropy if with_loss else None)
    lines, first = inspect.getsourcelines(body)
    line = first + next(i for i, found in enumerate(lines) if ".data = " in found)
    assert error.value.where == f"module '0', at {Path(__file__).name}:{line}"
    assert "copy_" in error.value.fix
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
