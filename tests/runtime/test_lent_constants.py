"""Constants that a session reads where they are; and what it says of those of which it has copies."""

from __future__ import annotations

import pytest
import torch
from graphir.runtime import Session
from torch import Tensor, nn

import graphir
from graphir import passes
from graphir.errors import CoverageError


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mask = torch.arange(8.0)[2:6]  # has an offset in its storage

    def forward(self, x: Tensor) -> Tensor:
        return x * self.mask + self.mask[1:2]


X = torch.randn(6, 4)


@pytest.mark.parametrize("executor", ["reference", "serial", "threads"])
def test_what_is_written_into_a_lent_tensor_holds_from_the_next_step(executor: str) -> None:
    model = Masked()
    program = passes.replicate(graphir.capture(model, (X[:3],)), [0, 1])
    with Session(passes.emit(program), program.state, executor=executor, lent={"mask": model.mask}) as session:
        for value in (1.0, 2.0):
            model.mask.data[0] = value
            assert torch.equal(session.step(X), model(X))


def test_a_session_that_is_lent_nothing_stays_as_captured() -> None:
    model = Masked()
    program, expected = graphir.capture(model, (X,)), model(X)
    with Session(passes.emit(program), program.state) as session:
        model.mask.zero_()
        assert torch.equal(session.step(X), expected)


def test_a_copy_of_a_lent_tensor_that_was_written_is_refused() -> None:
    model = Masked()
    program = graphir.capture(model, (X,))
    lent = torch.stack([model.mask, model.mask], 1)[:, 0]  # laid out otherwise
    with Session(passes.emit(program), program.state, lent={"mask": lent}) as session:
        assert torch.equal(session.step(X), model(X))
        lent.mul_(2)
        with pytest.raises(CoverageError, match="'mask' was written since the session copied it to its device"):
            session.step(X)
