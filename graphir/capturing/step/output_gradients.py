"""A backward without a loss: it starts from gradients of the model's outputs, which the step is given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
from torch.utils import _pytree as pytree

from ...errors import CaptureError
from ..record.recorder import Recorder
from ..record.values import Value
from .backward import backward

__all__ = ["Joint", "joint_backward"]

_aten: Final = torch.ops.aten


class Joint(NamedTuple):
    """The values of the backward of a model's outputs.

    Attributes:
        found: forward values and their gradients, parameters first.
        given: for each output that needs a gradient: its position among the leaves of the outputs, its value, and the
            value of the gradient that the step is given for it.
        of_inputs: each input that requires a gradient and has one, with its gradient.
    """

    found: list[tuple[Value, Value]]
    given: list[tuple[int, Value, Value]]
    of_inputs: list[tuple[Value, Value]]


def joint_backward(output: Any, positions: Sequence[int] | None, recorder: Recorder) -> Joint:
    """Record the backward of the outputs that need a gradient: of all, or of those at *positions* among the leaves.

    The gradient of an output is laid out in memory as the output is. If the output has gaps, or elements that share
    memory, its gradient has no gaps.

    Raises:
        CaptureError: no output needs a gradient, or one of *positions* needs none.
    """
    leaves = pytree.tree_leaves(output)
    starts = [(i, leaf) for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if positions is not None:
        needing = [i for i, _ in starts]
        for i in positions:
            if i not in needing:
                raise CaptureError(
                    f"backward names output {i}, which needs no gradient",
                    fix=f"outputs that need a gradient: {', '.join(map(str, needing)) or 'none'}",
                )
        starts = [(i, leaf) for i, leaf in starts if i in positions]
    if not starts:
        raise CaptureError(
            "no output of the model needs a gradient, so there is no backward",
            fix="leave backward out, or capture the model with parameters or inputs that require a gradient",
        )
    given: list[tuple[int, Value, Value]] = []

    def gradients() -> list[torch.Tensor]:
        made = []
        with recorder.unseen():
            for i, leaf in starts:
                value = recorder.read(leaf)
                like = torch.empty_like(torch.empty_strided(value.shape, value.strides, device="meta"))
                fake = recorder.fake(value.shape, like.stride(), value.dtype)
                given.append((i, value, recorder.external(fake, f"{value.label}_grad", "input")))
                made.append(fake)
        return made

    found = backward([leaf for _, leaf in starts], recorder, fresh=lambda _: True, given=gradients)
    return Joint(found, given, _of_inputs(found, recorder))


def _of_inputs(found: Sequence[tuple[Value, Value]], recorder: Recorder) -> list[tuple[Value, Value]]:
    """Inputs and their gradients, in memory apart from gradients of parameters, which are reduced over replicas."""
    taken = {gradient.root.index for value, gradient in found if value.kind == "param"}
    made = []
    with recorder.unseen():
        for value, gradient in found:
            if value.kind != "input":
                continue
            if gradient.root.index in taken or gradient.root.kind:
                gradient = recorder.apply(_aten.clone.default, gradient, memory_format=torch.preserve_format)
            made.append((value, gradient))
    return made
