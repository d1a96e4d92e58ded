"""The program of a step recorded at one size, at which the step differs from its captured program.

Forward and backward are the recording's. The update is the captured program's, on the recording's gradients, since the
optimizer may have moved on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ...errors import CaptureError
from ...ir.covers import Covers
from ...ir.fitting import Grid
from ...ir.operator import Operator
from ...ir.program import Program
from ...ir.size import BATCH, Dims
from ..sizes.fit import Sizes
from ..sizes.follow import Followed
from ..step.comparison import Outline, outcome
from ..step.recorded_step import Recording
from ..step.recording import Step
from .build import build_program

__all__ = ["program_at_one_size"]


def program_at_one_size(
    step: Step,
    recording: Recording,
    dims: Dims,
    captured: Program,
    outline: Outline,
    holds: Callable[[str, torch.Tensor], bool],
) -> Program:
    """The program of a recording.

    Args:
        step: the recorded step.
        recording: of the step.
        dims: the sizes at which it was recorded; ``batch`` is one of them.
        captured: the captured program of the module.
        outline: of the captured program's recording.
        holds: whether the captured program has a constant of this name and these values.

    Raises:
        CaptureError: the recording reads other constants than the captured program, or other parameters have gradients.
    """
    followed = Followed(Sizes([recording], Grid({})), {}, Covers(fixed="recorded at one size"))
    program, names = build_program(step, followed, {}, name=captured.name, optimizer=captured.interface.optimizer)
    for value, tensor in recording.constants:
        if value.kind == "constant" and not holds(names[value.index], tensor):
            raise CaptureError(f"the constant {names[value.index]!r} has other values")
    gradients, theirs = _gradients(outline.names, outline.parts), _gradients(names, outcome(recording))
    if gradients.keys() != theirs.keys():
        raise CaptureError("other parameters have gradients")
    renamed = {old: theirs[param] for param, old in gradients.items()}
    update = [_reading(op, renamed) for op in captured.step.ops[outline.calls :]]
    read = dict.fromkeys(name for op in update for name in op.inputs if name not in program.step.blobs)
    blobs = {**{name: captured.step.blobs[name] for name in read}, **program.step.blobs}
    net = program.step.with_(
        ops=(*program.step.ops, *update), blobs=blobs, external_inputs=(*read, *program.step.external_inputs)
    )
    return program.with_(step=net, dims={BATCH: dims[BATCH]})


def _gradients(names: Any, parts: Mapping[str, Any]) -> dict[tuple[str, int], str]:
    """The blobs that updates read: for each parameter its gradient, or its indices and values; and found_inf."""
    dense, found_inf, sparse = parts["the gradients of parameters"]
    found = {(names[param], 0): names[gradient] for param, gradient in dense}
    for param, pair in sparse.items():
        found |= {(names[param], k): names[value] for k, value in enumerate(pair)}
    return found if found_inf is None else found | {("", 0): names[found_inf]}


def _reading(op: Operator, renamed: Mapping[str, str]) -> Operator:
    return op._replace(inputs=tuple([renamed.get(name, name) for name in op.inputs]))
