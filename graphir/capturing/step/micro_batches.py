"""Micro-batches: one step's batch in equal parts, one after the other, their gradients added up.

::

    x ──▶ micro_0/x ──▶ micro_0/fc ──▶ micro_0/loss ──▶ micro_0/fc.weight_grad ──────────────┐
    └───▶ micro_1/x ──▶ micro_1/fc ──▶ micro_1/loss ──▶ micro_1/fc.weight_grad ──▶ (+) ──▶ fc.weight_grad

A part's activations are dead once its backward is done. Gradients are added where the backward makes them, as autograd
adds to ``param.grad``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from ...errors import CaptureError
from ...ir.names import micro_batch_prefix
from ...ir.size import BATCH
from ..intake.arguments import Arguments, Leaf
from ..isolate.functions import Handlers
from ..record.recorder import Recorder
from ..record.values import RecordedCall

__all__ = ["MicroBatches", "early", "micro_batch", "per_micro_batch", "prefix_of_micro_batch"]

_aten: Final = torch.ops.aten


def per_micro_batch(arguments: Arguments, accumulate: int) -> Arguments:
    """The arguments with the size of one micro-batch as the dimension ``batch``.

    Raises:
        CaptureError: the batch can't be cut into *accumulate* equal parts.
    """
    if accumulate == 1:
        return arguments
    batch = arguments.dims.get(BATCH)
    if batch is None:
        raise CaptureError(
            f"accumulate={accumulate}, but no argument has a batch dimension to cut",
            fix="say with batch_dims which dimension of each tensor is the batch, or leave accumulate out",
        )
    size, rest = divmod(batch, accumulate)
    if rest:
        raise CaptureError(
            f"accumulate={accumulate} does not divide the batch of {batch}",
            fix=f"capture with a batch of {(size + 1) * accumulate}, or another multiple of {accumulate}",
        )
    return arguments._replace(dims={**arguments.dims, BATCH: size})


def prefix_of_micro_batch(i: int, accumulate: int) -> str:
    """The prefix of the names of a micro-batch's blobs; empty if there is only one micro-batch."""
    return micro_batch_prefix(i) if accumulate > 1 else ""


def micro_batch(
    leaves: Sequence[Leaf], values: Sequence[Any], i: int, accumulate: int, recorder: Recorder
) -> list[Any]:
    """The leaves that micro-batch *i* is given.

    Args:
        leaves: of the step's arguments.
        values: the fake or the scalar of each leaf.
        i: position of the micro-batch.
        accumulate: the number of micro-batches.
        recorder: records the cuts.
    """
    if accumulate == 1:
        return list(values)
    parts: dict[int, torch.Tensor] = {}
    found: list[Any] = []
    for leaf, value in zip(leaves, values, strict=True):
        if leaf.batch_dim is None or not isinstance(value, torch.Tensor):
            found.append(value)
            continue
        if id(value) not in parts:
            length = value.shape[leaf.batch_dim] // accumulate
            parts[id(value)] = value.narrow(leaf.batch_dim, i * length, length)
            recorder.claim(parts[id(value)], leaf.name, 0)
        found.append(parts[id(value)])
    return found


class MicroBatches:
    """The micro-batches of a step function that has a backward for each of several equal parts of its batch.

    Args:
        recorder: records the step.
        parts: how many there are.
    """

    def __init__(self, recorder: Recorder, parts: int) -> None:
        self._recorder, self._parts, self._done = recorder, parts, 0
        recorder.name_micro_batch(micro_batch_prefix(0))

    def next(self) -> None:
        """Begin the next one, behind a backward."""
        self._done += 1
        self._recorder.name_micro_batch(micro_batch_prefix(self._done) if self._done < self._parts else "")

    def handlers(self) -> Handlers:
        """What cuts an argument of the step into as many parts in the place of torch's functions."""
        return {torch.Tensor.chunk: self._chunk, torch.chunk: self._chunk}

    def _chunk(
        self, function: Callable[..., tuple[torch.Tensor, ...]], tensor: torch.Tensor, chunks: int, dim: int = 0
    ) -> tuple[torch.Tensor, ...]:
        with self._recorder.unseen():
            value = self._recorder.read(tensor)
        size = tensor.shape[dim]
        if value.kind != "input" or chunks != self._parts or size % chunks:
            return function(tensor, chunks, dim)
        parts = []
        for i in range(chunks):
            self._recorder.name_micro_batch(micro_batch_prefix(i))
            parts.append(tensor.narrow(dim, i * (size // chunks), size // chunks))
            self._recorder.claim(parts[-1], value.label, 0)
        self._recorder.name_micro_batch(micro_batch_prefix(self._done))
        return tuple(parts)


def early(calls: Sequence[RecordedCall], additions: Sequence[RecordedCall]) -> list[RecordedCall]:
    """The calls, with each addition right after the call that makes its second operand, which is dead then."""
    after: dict[int, list[RecordedCall]] = {}
    made = {id(call) for call in calls}
    for addition in additions:
        maker = addition.inputs[1].call
        after.setdefault(id(maker) if id(maker) in made else 0, []).append(addition)
    return [*[c for call in calls for c in (call, *after.get(id(call), ()))], *after.get(0, ())]
