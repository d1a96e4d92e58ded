"""Sparse gradients of embeddings, each recorded as two dense values: indices and values.

The backward of an embedding makes a sparse gradient by one operator, the backward of an embedding bag by another.
Autograd adds the sparse gradients of a parameter that is used more than once. Any other use is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import torch

from ...errors import CaptureError
from ...ir.blob import contiguous_strides
from ...ir.operator import Arg
from ..words.places import DENSE, where
from .tape import Tape
from .values import Value

__all__ = ["SparseTensors", "SparseValue"]

_aten: Final = torch.ops.aten
_MAKE: Final = _aten._sparse_coo_tensor_with_dims_and_tensors.default
_BAG: Final = _aten._embedding_bag_backward.default


class SparseValue(NamedTuple):
    """A sparse gradient of a matrix: ``values[k]`` belongs to the matrix's row ``indices[0, k]``."""

    indices: Value
    values: Value


class SparseTensors:
    """The sparse tensors of a step, and the two values of each.

    Attributes:
        gradients: the gradients of parameters, by the index of the parameter's value.
        finished: likewise the tensors.
    """

    def __init__(self) -> None:
        self._shown: dict[int, tuple[torch.Tensor, SparseValue]] = {}
        self.gradients: dict[int, SparseValue] = {}
        self.finished: dict[int, torch.Tensor] = {}

    def finish(self, tape: Tape, param: Value, tensor: torch.Tensor) -> None:
        """Note the gradient of a parameter, in values that belong to no other gradient.

        If the indices are a view of an input of the step, the gradient gets a copy, which can live elsewhere.
        Values with gaps are copied without gaps, as autograd leaves them in ``param.grad``: torch would add values with
        gaps in another order.
        """
        indices, values = self._read(tensor)
        if indices.root.phase == "forward":
            indices = tape.apply(_aten.clone.default, indices)
        if values.strides not in (contiguous_strides(values.shape), (1, values.shape[0])):
            values = tape.apply(_aten.clone.default, values, memory_format=torch.contiguous_format)
        elif values.phase == "forward" or any(values is known.values for known in self.gradients.values()):
            values = tape.apply(_aten.alias.default, values)
        self.gradients[param.index], self.finished[param.index] = SparseValue(indices, values), tensor

    def _read(self, tensor: torch.Tensor) -> SparseValue:
        return self._shown[id(tensor)][1]

    def concern(self, func: object, args: tuple[Any, ...]) -> bool:
        """Whether a call makes a sparse tensor or takes one."""
        if func is _MAKE:
            return True
        if func is _BAG:
            return bool(args[9])
        return bool(self._shown) and any(id(arg) in self._shown for arg in args)

    def call(self, tape: Tape, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], scope: str) -> Any:
        """Record a call that makes or takes a sparse tensor; returns its fake result.

        Raises:
            CaptureError: the call neither makes nor adds sparse tensors.
        """
        if func is _MAKE:
            _, _, size, indices, values = args
            return self._show(size, SparseValue(tape.read(indices), tape.read(values)))
        if func is _BAG:
            return self._show((args[6], args[0].shape[1]), _embedding_bag_backward(tape, *args))
        if func is _aten.add.Tensor and not kwargs and all(id(arg) in self._shown for arg in args):
            return self._show(args[0].shape, _sum(tape, args[0].shape[0], [self._read(arg) for arg in args]))
        raise CaptureError(f"{func} takes a sparse tensor, which is not supported", where=where(scope), fix=DENSE)

    def _show(self, size: Any, shown: SparseValue) -> torch.Tensor:
        pair = shown.indices.tensor, shown.values.tensor
        tensor: torch.Tensor = _aten._sparse_coo_tensor_unsafe.default(*pair, tuple(size))
        self._shown[id(tensor)] = tensor, shown
        return tensor


def _embedding_bag_backward(
    tape: Tape,
    grad: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    offset2bag: torch.Tensor,
    bag_size: torch.Tensor,
    maximum_indices: torch.Tensor,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    per_sample_weights: torch.Tensor | None,
    padding_idx: int = -1,
) -> SparseValue:
    tensors = [grad, indices, offsets, offset2bag, bag_size, maximum_indices]
    tensors += [] if per_sample_weights is None else [per_sample_weights]
    args: dict[str, Arg] = {"num_weights": num_weights}
    if mode:
        args["mode"] = mode
    if padding_idx != -1:
        args["padding_idx"] = padding_idx
    made = [indices.new_empty((1, len(indices))), grad.new_empty((len(indices), grad.shape[1]))]
    inputs = tuple([tape.read(tensor) for tensor in tensors])
    return SparseValue(*tape.emit_own("graphir.embedding_bag_backward", inputs, None, args, made))


def _sum(tape: Tape, rows: int, summands: list[SparseValue]) -> SparseValue:
    indices, values = [s.indices for s in summands], [s.values for s in summands]
    count = sum(value.shape[0] for value in values)
    made = [
        indices[0].tensor.new_empty((1, count)),
        values[0].tensor.new_empty((count, values[0].shape[1])),
    ]
    return SparseValue(*tape.emit_own("graphir.sparse_sum", (*values, *indices), "[tt][tt]", {"rows": rows}, made))
