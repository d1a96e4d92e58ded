"""What a loss returns beside itself, and the norm by which gradients are clipped, come back from the step."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import graphir
from graphir import passes, runtime
from graphir.errors import CaptureError


def _parts(out: Tensor, y: Tensor) -> dict[str, Any]:
    return {"entropy": F.cross_entropy(out, y), "size": out.square().mean(), "none": 0.0}


def _right(out: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Any]]:
    return F.cross_entropy(out, y), {"right": (out.argmax(1) == y).sum(), "out": out}


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("options", [{}, {"clip_grad_norm": 0.1}, {"accumulate": 2}], ids=str)
@pytest.mark.parametrize("loss", [F.cross_entropy, _parts, _right])
def test_what_a_loss_returns_beside_itself_comes_back(loss: Any, options: dict[str, Any], replicas: int) -> None:
    torch.manual_seed(0)
    model, x, y = nn.Linear(4, 3), torch.randn(8, 4), torch.randint(3, (8,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if loss is _right and "accumulate" in options:
        with pytest.raises(CaptureError, match="the loss has results beside it, and accumulate is given"):
            graphir.capture(model, (x,), targets=(y,), loss=loss, optimizer=optimizer, **options)
        return
    program = graphir.capture(model, (x,), targets=(y,), loss=loss, optimizer=optimizer, **options)
    if replicas > 1:
        program = passes.replicate(program, range(replicas))
    with runtime.Session(passes.emit(program), program.state, binding="cpu") as session:
        found = session.step(x, y)
    returned = loss(model(x), y)
    total, beside = returned if isinstance(returned, tuple) else (returned, None)
    if isinstance(total, dict):
        total, beside = total["entropy"] + total["size"], total
    total.backward()
    if "clip_grad_norm" in options:
        beside = {**(beside or {}), "grad_norm": nn.utils.clip_grad_norm_(model.parameters(), 0.1)}
    expected = total if beside is None else (total, beside)
    torch.testing.assert_close(found, expected)
    if replicas == 1 and not options.get("accumulate"):
        pairs = zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True)
        assert all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)


@pytest.mark.parametrize(
    ("loss", "what"),
    [
        (lambda out: (out.sum(), out), "no dict that 'grad_norm' can be added to"),
        (lambda out: (out.sum(), {"grad_norm": out}), "no dict that 'grad_norm' can be added to"),
        (lambda out: ({"a": out.sum()}, {"a": out}), "no dict that 'a' can be added to"),
        (lambda out: (out.sum(), {"a": object()}), "the step returns a object among its results"),
        (lambda out: (out, out.sum()), r"the loss is a tensor of shape \[3, 4\], not a scalar"),
        (lambda out: (out.sum(), out, out), "the loss is a tuple, not a scalar"),
    ],
)
def test_results_beside_a_loss_that_are_refused(loss: Any, what: str) -> None:
    with pytest.raises(CaptureError, match=what) as error:
        graphir.capture(nn.Linear(4, 4), (torch.randn(3, 4),), loss=loss, clip_grad_norm=1.0)
    assert error.value.where.startswith("the loss function")
