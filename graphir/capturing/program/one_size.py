"""The program of a step recorded at one size, at which the step differs from its captured program.

Forward and backward are the recording's. The update is the captured program's, on the recording's gradients, since the
optimizer may have moved on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from ...errors import CaptureError
from ...ir.covers import Covers
from ...ir.fitting import Grid
from ...ir.operator import Operator
from ...ir.program import Program
from ...ir.size import BATCH, Dims
from ..sizes.fit import Sizes
from ..sizes.follow import Followed
from ..step.comparison import Outline
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
    followed = Followed(step, Sizes([recording], Grid({})), {}, Covers(fixed="recorded at one size"))
    program, names = build_program(
        step,
        followed,
        {},
        name=captured.name,
        optimizers=captured.interface.optimizers,
        like=lambda recording, names: _updates(recording, names, captured, outline),
    )
    for value, tensor in recording.constants:
        if value.kind == "constant" and not holds(names[value.index], tensor):
            raise CaptureError(f"the constant {names[value.index]!r} has other values")
    read = dict.fromkeys(name for op in program.step.ops for name in op.inputs if name not in program.step.blobs)
    blobs = {**{name: captured.step.blobs[name] for name in read}, **program.step.blobs}
    net = program.step.with_(blobs=blobs, external_inputs=(*read, *program.step.external_inputs))
    return program.with_(step=net, dims={BATCH: dims[BATCH]})


def _updates(recording: Recording, names: Sequence[str], captured: Program, outline: Outline) -> Iterator[Operator]:
    """The captured program's updates, of the gradients of a recording.

    Raises:
        CaptureError: the recording updates other parameters, or these in another order.
    """
    ours = [[names[value.index] for value in call.inputs] for call in recording.updates]
    theirs = [[outline.names[index] for index in read] for read in outline.updates.values()]
    if [(read[0], len(read)) for read in ours] != [(read[0], len(read)) for read in theirs]:
        raise CaptureError("other parameters have gradients")
    for position, became, was in zip(outline.updates, ours, theirs, strict=True):
        renamed, op = dict(zip(was, became, strict=True)), captured.step.ops[position]
        yield op._replace(inputs=tuple([renamed.get(name, name) for name in op.inputs]))
