"""A recorded step: the operators that it calls, and the values of its parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.utils import _pytree as pytree

from ...ir.program import Gathered, Scalar
from ..record.extents import Extents
from ..record.sparse import SparseValue
from ..record.values import UPDATE, RecordedCall, Value

__all__ = ["Outcome", "Recording"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Outcome:
    """The values of a step's parts.

    Attributes:
        loss: the scalar loss.
        returned: the leaves of the model's output in a step without loss; then the gradients of inputs, if the step is
            given the gradients of its outputs. Of a step function, the leaves of what it returns, unless that is the
            loss alone.
        results: the structure of these.
        gathered: how each of these, of several replicas, becomes one; empty: the first replica's is taken.
        steps: whether the optimizer makes a step.
        backwards: how many the step has.
        gradients: forward values and the values of their gradients, parameters first.
        parts: parameters, each with the gradient of one micro-batch or the sum of several.
        finished: parameters, each with the gradient that its update reads or the caller gets, unscaled and clipped.
        kept: parameters whose gradients last from step to step, and the first versions of the gradients and of the
            numbers that say whether there is none.
        of_inputs: the inputs whose gradients are in ``returned``.
        given: for each output whose gradient the step is given: its position among ``returned``, the output, and the
            gradient.
    """

    loss: Value | None = None
    returned: Sequence[Value | Scalar] = ()
    results: pytree.TreeSpec | None = None
    gathered: Sequence[Gathered | None] = ()
    steps: bool = True
    backwards: int = 1
    gradients: Sequence[tuple[Value, Value]] = ()
    parts: Sequence[tuple[Value, Value]] = ()
    finished: Sequence[tuple[Value, Value]]
    kept: Sequence[tuple[Value, Value, Value]] = ()
    of_inputs: Sequence[Value] = ()
    given: Sequence[tuple[int, Value, Value]] = ()

    @property
    def outputs(self) -> list[Value]:
        """The tensors that a step without loss returns."""
        return [leaf for leaf in self.returned if isinstance(leaf, Value)]


@dataclass(frozen=True, kw_only=True, eq=False)
class Recording(Outcome):
    """A recorded step: the values of its parts, its calls, and all of its values.

    Attributes:
        calls: in order, without those that nothing reads.
        values: each at its index.
        inputs: the value of each leaf of the arguments; None where it is not a tensor.
        state: the first version of each parameter and buffer, by its blob's name.
        constants: values that the step reads from elsewhere, with the tensors that hold them.
        sparse_gradients: of parameters, by the index of the parameter's value.
        extents: what the step computed with its sizes, and asked about them.
    """

    calls: list[RecordedCall]
    values: list[Value]
    inputs: list[Value | None]
    state: dict[str, Value]
    constants: list[tuple[Value, torch.Tensor]]
    sparse_gradients: Mapping[int, SparseValue]
    extents: Extents

    @property
    def updates(self) -> list[RecordedCall]:
        """The updates of parameters, in order."""
        return [call for call in self.calls if call.type == UPDATE]

    def release(self) -> None:
        """Take the recording apart. Nothing may read it afterwards."""
        for value in self.values:
            value.release()
        self.extents.release()
