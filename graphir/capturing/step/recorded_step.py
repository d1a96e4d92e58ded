"""A recorded step: which operators it calls, and which values its parts became."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.utils import _pytree as pytree

from ...ir.program import Scalar
from ..record.extents import Extents
from ..record.sparse import SparseValue
from ..record.values import RecordedCall, Value
from .gradients import Finished

__all__ = ["Outcome", "Recording"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Outcome:
    """What the parts of a step became.

    Attributes:
        loss: the scalar loss.
        returned: the leaves of what the model of a step without loss returns, and ``results``, their structure; behind
            them the gradients of inputs, if the step is given those of its outputs.
        of_inputs: the inputs that have these.
        gradients: forward values and the values of their gradients, parameters first.
        parts: parameters, and gradients and sums of some micro-batches.
        finished: what the updates read, or the caller gets.
        given: of a step that is given its outputs' gradients: for each of these the position among ``returned`` of its
            output, the output, and the gradient.
    """

    loss: Value | None = None
    returned: Sequence[Value | Scalar] = ()
    results: pytree.TreeSpec | None = None
    gradients: Sequence[tuple[Value, Value]] = ()
    parts: Sequence[tuple[Value, Value]] = ()
    finished: Finished
    of_inputs: Sequence[Value] = ()
    given: Sequence[tuple[int, Value, Value]] = ()

    @property
    def outputs(self) -> list[Value]:
        """The tensors that a step without loss returns."""
        return [leaf for leaf in self.returned if isinstance(leaf, Value)]


@dataclass(frozen=True, kw_only=True, eq=False)
class Recording(Outcome):
    """A recorded step: what its parts became, and what it is made of.

    Attributes:
        calls: in order, without those that nothing reads.
        values: at their indices.
        inputs: the value of each leaf of the arguments; None where it is not a tensor.
        state: the first version of each parameter and buffer, by its blob's name.
        constants: values that the step reads from elsewhere, with the tensors that hold them.
        sparse_gradients: those of parameters, by the index of the parameter's value.
        extents: what the step made of its sizes, and asked about them.
    """

    calls: list[RecordedCall]
    values: list[Value]
    inputs: list[Value | None]
    state: dict[str, Value]
    constants: list[tuple[Value, torch.Tensor]]
    sparse_gradients: Mapping[int, SparseValue]
    extents: Extents

    def release(self) -> None:
        """Take it apart, which nothing is to read any more."""
        for value in self.values:
            value.release()
        self.extents.release()
