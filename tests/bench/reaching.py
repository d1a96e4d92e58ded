"""Which operators read only the elements of their operands: torch's samples, and the models of the zoo."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from eager import total_loss
from gapped import Gaps, observe, torch_samples
from test_zoo import ROWS, batch_of, model_of
from zoo_rows import Row

from graphir.ir.optypes.table import operator_type


def rows() -> Iterator[str]:
    """Types that were run on operands with gaps, and what the list says of them."""
    torch.set_num_threads(1)
    yield "| samples | types run | listed, and read no gaps | not listed, and read gaps | **listed, and read gaps** |"
    yield "| --- | --- | --- | --- | --- |"
    for name, calls, most in (
        ("torch's, of all operators", torch_samples(), 6),
        ("the training steps of tests/zoo", (_step(row) for row in ROWS.values()), 6),
    ):
        gaps = Gaps(most)
        observe(calls, gaps)
        wrong = sorted(type for type in gaps.reaching if operator_type(type).only_elements)
        free = [type for type in gaps.free if gaps.free[type] and type not in gaps.reaching]
        listed = sum(operator_type(type).only_elements for type in free)
        others = len(gaps.reaching) - len(wrong)
        shown = f"{len(wrong)} {' '.join(wrong)}".strip()
        yield f"| {name} | {len({*free, *gaps.reaching})} | {listed} | {others} | {shown} |"


def _step(row: Row) -> Callable[[], Any]:
    def step() -> None:
        model, batch = model_of(row), batch_of(row, row.size, 0)
        output = model(*batch.inputs, **batch.kwargs)
        total_loss(row.loss(output, *batch.targets) if row.loss else output).backward()

    return step
