"""Masks that follow from sizes alone select a known number of elements, with the bits of eager PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from direct import matches_eager
from graphir.runtime import Session
from models import Example
from torch import Tensor, nn

import graphir
from graphir import CaptureError, passes

BATCH, WIDTH = 4, 6


class Model(nn.Module):
    def __init__(self, body: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fc, self.body = nn.Linear(WIDTH, WIDTH), body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.fc(x))


def contrastive(y: Tensor) -> Tensor:
    """The off-diagonal similarities of SimCLR's loss."""
    y = F.normalize(torch.cat([y, y.flip(1)]))
    similarities = y @ y.T
    n = len(y)
    negatives = similarities[~torch.eye(n, dtype=torch.bool)].view(n, n - 1)
    return torch.logsumexp(negatives, 1) - similarities.diag(n // 2).repeat(2)


def upper() -> Tensor:
    return torch.ones(WIDTH, WIDTH, dtype=torch.bool).triu()


SELECTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "off the diagonal": contrastive,
    "rows": lambda y: y[torch.arange(BATCH) % 2 == 0],
    "columns": lambda y: y[:, torch.arange(WIDTH) > 2] * 2,
    "with an index": lambda y: y[torch.tensor([0, 2, 2]), torch.arange(WIDTH) < 3],
    "nothing": lambda y: torch.cat([y[torch.zeros(BATCH, dtype=torch.bool)], y]),
    "masked_select": lambda y: y.masked_select(torch.arange(WIDTH) > 3),
    "nonzero": lambda y: y[:, upper().nonzero()[:, 0]] + torch.arange(WIDTH).nonzero().sum(),
    "as a tuple": lambda y: y.T.matmul(y)[upper().nonzero(as_tuple=True)],
    "overwritten": lambda y: torch.zeros(WIDTH, WIDTH).masked_scatter(upper(), y[0].repeat(6)) @ y.T,
    "permuted": lambda y: y.T.unsqueeze(2).expand(WIDTH, BATCH, 2)[torch.arange(WIDTH) != 1].sin(),
}


def example(name: str) -> Example:
    torch.manual_seed(0)
    return Example(Model(SELECTIONS[name]), (torch.randn(BATCH, WIDTH),), (), lambda y: y.square().mean())


@pytest.mark.parametrize("name", SELECTIONS)
def test_a_known_mask_selects(name: str) -> None:
    given = example(name)
    program = graphir.capture(given.model, given.inputs, loss=given.loss)
    matches_eager(program, given)
    graphir.verify(program)
    assert graphir.parse(str(program)) == program


def test_the_sizes_of_a_selection_follow_where_they_can() -> None:
    given = example("columns")
    program = graphir.capture(given.model, given.inputs, loss=given.loss)
    assert program.covers.fixed == "" and program.dims == {"batch": BATCH}
    matches_eager(program, given, batches=(1, 7))
    given = example("off the diagonal")
    assert "is not affine" in graphir.capture(given.model, given.inputs, loss=given.loss).covers.fixed


def test_selections_run_on_two_devices() -> None:
    given = example("off the diagonal")
    program = passes.replicate(graphir.capture(given.model, given.inputs, loss=given.loss), [0])
    found = [name for name in passes.find_activations(program) if name.startswith("gpu_0/")]
    shifted = passes.inject_copies(passes.shift_activations(program, found[len(found) // 2 :], shifts={0: 1}))
    graphir.certify(program, shifted)
    losses = []
    for placed in (program, shifted):
        with Session(passes.emit(placed), program.state) as session:
            losses.append(session.step(*given.inputs))
    assert torch.equal(*losses)


@pytest.mark.parametrize(
    "body", [lambda y: y[y > 0], lambda y: y[(torch.arange(WIDTH) * y[0]) > 0], lambda y: y.nonzero() * y.sum()]
)
def test_a_mask_that_depends_on_data_is_refused(body: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(CaptureError, match=r"the shape of aten\.(index|nonzero).*depends on data"):
        graphir.capture(Model(body), (torch.randn(BATCH, WIDTH),))


def test_a_mask_of_another_shape_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"IndexError: a mask of shape \[5\] selects from \[4\]"):
        graphir.capture(Model(lambda y: y[torch.arange(5) > 2]), (torch.randn(BATCH, WIDTH),))
