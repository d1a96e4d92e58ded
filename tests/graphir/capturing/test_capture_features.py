"""What PyTorch offers inside a step, one feature a model: three steps of training, bit for bit as eager PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from eager import assert_same_bits
from graphir.runtime import Session
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import graphir
from graphir import passes

Body = Callable[[Any, Tensor], Tensor]


class Net(nn.Module):
    """Two linear layers and a buffer, used as its body says."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.a, self.b, self.body = nn.Linear(6, 8), nn.Linear(8, 6), body
        self.register_buffer("mean", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def plain(m: Net, x: Tensor) -> Tensor:
    return m.b(m.a(x).relu())


BODIES: dict[str, Body] = {}
MODELS: dict[str, Callable[[], nn.Module]] = {}


def body(f: Body) -> Body:
    BODIES[f.__name__] = f
    return f


def model(f: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    MODELS[f.__name__] = f
    return f


@body
def autocast(m: Net, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return plain(m, x).float()


@body
def nested_autocast(m: Net, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        h = m.a(x)
        with torch.autocast("cpu", enabled=False):
            h = h.float() @ m.b.weight.t()
        return m.b(m.a(h)).float()


@body
def checkpoint_with_dropout(m: Net, x: Tensor) -> Tensor:
    return checkpoint(lambda y: F.dropout(plain(m, y), 0.3, m.training), x, use_reentrant=False)


@body
def input_overwritten(m: Net, x: Tensor) -> Tensor:
    x.mul_(2)
    return plain(m, x)


@body
def views_of_activations_overwritten(m: Net, x: Tensor) -> Tensor:
    h = m.a(x)
    h[:, 1:3] += 1
    h.t()[0].zero_()
    return m.b(h.relu())


@body
def buffer_updated(m: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        m.mean[1:3] = x.mean(0)[1:3]
    return plain(m, x) * m.mean


@body
def gradient_of_gradient(m: Net, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    (g,) = torch.autograd.grad(plain(m, x).sum(), x, create_graph=True)
    return plain(m, x) + g


@body
def vectorised(m: Net, x: Tensor) -> Tensor:
    return torch.vmap(lambda row: plain(m, row))(x)


@body
def functional_gradient(m: Net, x: Tensor) -> Tensor:
    return plain(m, x) + torch.func.grad(lambda y: plain(m, y).sum())(x)


@body
def without_gradient(m: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        h = m.a(x)
    return m.b(h)


@body
def inference_mode(m: Net, x: Tensor) -> Tensor:
    with torch.inference_mode():
        h = m.a(x)
    return m.b(h.clone())


@body
def told_to_the_profiler(m: Net, x: Tensor) -> Tensor:
    with torch.profiler.record_function("first"):
        h = m.a(x)
    return m.b(h)


@body
def default_dtype_for_a_while(m: Net, x: Tensor) -> Tensor:
    torch.set_default_dtype(torch.float64)
    try:
        scale = torch.full((6,), 0.1)
    finally:
        torch.set_default_dtype(torch.float32)
    return (plain(m, x).double() * scale).float()


@body
def detached(m: Net, x: Tensor) -> Tensor:
    h = m.a(x)
    return m.b(h.relu() + h.detach())


@body
def hook_on_an_activation(m: Net, x: Tensor) -> Tensor:
    h = m.a(x)
    if h.requires_grad:
        h.register_hook(lambda g: g * 2)
    return m.b(h.relu())


@body
def fourier(m: Net, x: Tensor) -> Tensor:
    return torch.fft.irfft(torch.fft.rfft(plain(m, x)), n=6) + torch.fft.ifft(torch.fft.fft(x) * 2).real


@body
def choice_by_data(m: Net, x: Tensor) -> Tensor:
    return torch.where(x[:, :1] > 0, plain(m, x), plain(m, x) * 2)


@body
def sorted_and_gathered(m: Net, x: Tensor) -> Tensor:
    values, indices = plain(m, x).topk(3, dim=1)
    return torch.cat([values, values], 1) + plain(m, x).gather(1, x.argsort(1)) + indices.float().repeat(1, 2)


@body
def scattered(m: Net, x: Tensor) -> Tensor:
    h = torch.zeros_like(x).scatter_add(1, x.argsort(1), plain(m, x))
    rows = torch.arange(h.shape[0])
    h = h.clone()
    h[rows, rows % 6] = 0
    return h


@body
def loop(m: Net, x: Tensor) -> Tensor:
    return torch.stack([plain(m, x * i) for i in range(3)]).sum(0)


@body
def weights_multiplied(m: Net, x: Tensor) -> Tensor:
    return torch.einsum("bi,oi->bo", x, m.b.weight @ m.a.weight)


@body
def weight_tied_by_a_view(m: Net, x: Tensor) -> Tensor:
    return F.linear(m.a(x).relu(), m.a.weight.t(), m.b.bias)


class Square(torch.autograd.Function):
    """A function with a backward of its own, which is not its derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * g + 1


@body
def custom_function(m: Net, x: Tensor) -> Tensor:
    return m.b(Square.apply(m.a(x)))


class Symmetric(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w.triu() + w.triu(1).t()


@model
def parametrized() -> nn.Module:
    layer = nn.Linear(6, 6)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return layer


@model
def normed_weights() -> nn.Module:
    return nn.Sequential(
        parametrizations.weight_norm(nn.Linear(6, 8)),
        parametrizations.spectral_norm(nn.Linear(8, 6)),
        parametrizations.orthogonal(nn.Linear(6, 6)),
    )


@model
def normed_input() -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 6))


@model
def frozen_parameters() -> nn.Module:
    net = Net(plain)
    net.a.weight.requires_grad_(False)
    return net


@model
def unused_parameters() -> nn.Module:
    net = Net(plain)
    net.unused = nn.Linear(3, 3)
    return net


@model
def shared_module() -> nn.Module:
    layer = nn.Linear(6, 6)
    return nn.Sequential(layer, nn.ReLU(), layer)


@model
def parameter_under_two_names() -> nn.Module:
    net = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    net[1].weight = net[0].weight
    return net


MODELS |= {name: (lambda f=f: Net(f)) for name, f in BODIES.items()}


@pytest.mark.parametrize("feature", MODELS)
def test_a_feature_trains_bit_for_bit(feature: str) -> None:
    torch.manual_seed(0)
    eager = MODELS[feature]()
    mine = copy.deepcopy(eager)
    optimizer = torch.optim.SGD([p for p in eager.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    ours = torch.optim.SGD([p for p in mine.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    batch = torch.randn(4, 6), torch.randn(4, 6)
    program = graphir.capture(mine, batch[:1], targets=batch[1:], loss=F.mse_loss, optimizer=ours)
    assert program.covers.fixed == ""
    plan = passes.emit(program)
    with (
        Session(plan, program.state, executor="reference") as reference,
        Session(plan, program.state, executor="threads") as threads,
    ):
        for step, rows in enumerate((4, 4, 7)):
            x, y = torch.randn(rows, 6), torch.randn(rows, 6)
            losses = [session.step(x.clone(), y) for session in (reference, threads)]
            with graphir.seeded(step):
                optimizer.zero_grad()
                expected = F.mse_loss(eager(x.clone()), y)
                expected.backward()
            optimizer.step()
            assert all(torch.equal(loss, expected.detach()) for loss in losses)
        for session in (reference, threads):
            assert_same_bits(session.state_dict(), dict(eager.state_dict()), feature)
