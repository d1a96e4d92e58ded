"""Arguments whose elements share memory."""

import pytest
import torch
from graphir.runtime import Session

import graphir
from graphir import passes
from graphir.errors import CoverageError

ROWS = torch.arange(12.0).view(6, 2)


def test_an_argument_captured_with_rows_in_one_place_takes_no_other_rows():
    program = graphir.capture(torch.nn.ReLU(), inputs=(ROWS[:1].expand(6, 2),))
    with Session(passes.emit(program), program.state) as session:
        expanded = ROWS[3:4].expand(4, 2)
        assert torch.equal(session.step(expanded), expanded)
        with pytest.raises(
            CoverageError, match=r"argument 0 \('input'\) has strides \[2, 1\], the program takes \[0, 1\]"
        ):
            session.step(ROWS)


def test_rows_in_one_place_are_brought_elsewhere_as_they_lie():
    """An as_strided operator counts from the start of the storage, so that what lies further on is copied."""

    class Strided(torch.nn.Module):
        def forward(self, x):
            return x.as_strided((3,), (1,)) * x[0, 0]

    memory = torch.arange(20.0)
    program = graphir.capture(Strided(), inputs=(memory[:3].expand(6, 3),))
    with Session(passes.emit(program), program.state) as session:
        assert session.step(memory[5:8].expand(6, 3)).tolist() == [25.0, 30.0, 35.0]
