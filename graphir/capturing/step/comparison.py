"""Whether two recordings are of one step: the same calls, the same constants, and the same values of its parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from ...ir.tensor import same_bits
from ..record.values import Value
from .recorded_step import Recording

__all__ = ["Outline", "differing_part", "outcome", "same_step"]


class Outline(NamedTuple):
    """The facts about a program's recording that the program does not have.

    Attributes:
        names: the blob of each value, at its index.
        parts: the values of the step's parts; see :func:`outcome`.
        updates: the values that each update reads, by the update's position among the operators of the step.
        constants: the tensors that the program has copies of, by their blobs.
    """

    names: Sequence[str]
    parts: Mapping[str, object]
    updates: Mapping[int, Sequence[int]]
    constants: Mapping[str, torch.Tensor]


def outcome(recording: Recording) -> Mapping[str, object]:
    """The values of the parts of a step, as indices, by the names of the parts in errors."""
    return {
        "the constants": [value.index for value, _ in recording.constants],
        "the arguments": (
            [None if value is None else value.index for value in recording.inputs],
            [(position, output.index, gradient.index) for position, output, gradient in recording.given],
        ),
        "the results of the model": (
            [leaf.index if isinstance(leaf, Value) else repr(leaf) for leaf in recording.returned],
            recording.results,
            [value.index for value in recording.of_inputs],
        ),
        "the loss": recording.loss and recording.loss.index,
        "the gradients of activations": [
            (value.index, gradient.index) for value, gradient in [*recording.gradients, *recording.parts]
        ],
        "the gradients of parameters": (
            [(param.index, gradient.index) for param, gradient in recording.finished],
            {param: (pair.indices.index, pair.values.index) for param, pair in recording.sparse_gradients.items()},
        ),
    }


def differing_part(a: Recording, b: Recording) -> str:
    """The first part of a step whose values differ between two recordings; empty if there is none."""
    theirs = outcome(b)
    return next((part for part, became in outcome(a).items() if became != theirs[part]), "")


def same_step(a: Recording, b: Recording) -> bool:
    """Whether two recordings at the same sizes are of the same step."""
    return (
        not differing_part(a, b)
        and _described(a) == _described(b)
        and all(same_bits(x, y) for (_, x), (_, y) in zip(a.constants, b.constants, strict=True))
    )


def _described(recording: Recording) -> list[object]:
    """The calls with all of their sizes."""
    calls: list[object] = []
    for call in recording.calls:
        made = [(v.shape, v.strides, v.offset) for v in call.outputs]
        calls.append((*call.pattern, repr(call.args), made))
    return calls
