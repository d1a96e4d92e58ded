"""Values as their callers give and get them: the tensors of one blob, or of the parts that make it up, as one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from graphir.ir.parts import starts, whole_shape

__all__ = ["Joined", "overwrite", "where_once"]


class Joined:
    """The tensors that hold one value.

    Args:
        dim: the dimension along which they make it up; None: each has all of it.
        tensors: at least one, in order.
    """

    def __init__(self, dim: int | None, tensors: Sequence[Tensor]) -> None:
        self.dim, self.tensors = dim, tensors

    @property
    def shape(self) -> tuple[int, ...]:
        return whole_shape(self.dim, [tuple(tensor.shape) for tensor in self.tensors])

    @property
    def dtype(self) -> torch.dtype:
        return self.tensors[0].dtype

    def clone(self) -> Tensor:
        """The value as a tensor of its own: on the host where parts are on several devices, which may all be needed to
        hold it."""
        if self.dim is None or len(self.tensors) == 1:
            return self.tensors[0].clone()
        devices = {tensor.device for tensor in self.tensors}
        here = devices.pop() if len(devices) == 1 else torch.device("cpu")
        made = torch.empty(self.shape, dtype=self.dtype, device=here)
        for tensor, place in zip(self.tensors, self.places(made), strict=True):
            place.copy_(tensor)
        return made

    def overwrite(self, source: Tensor) -> None:
        """Give every tensor its place in *source*."""
        for tensor, place in zip(self.tensors, self.places(source), strict=True):
            overwrite(tensor, place)

    def places(self, whole: Tensor) -> list[Tensor]:
        """For each tensor, its place in a whole value."""
        if self.dim is None:
            return [whole] * len(self.tensors)
        shapes = [tuple(tensor.shape) for tensor in self.tensors]
        return [
            whole.narrow(self.dim, start, shape[self.dim])
            for start, shape in zip(starts(self.dim, shapes), shapes, strict=True)
        ]


def overwrite(target: Tensor, source: Tensor) -> None:
    """Give *target*, which may be expanded, the values of *source*."""
    once = where_once(target)
    target[once].copy_(source[once])


def where_once(tensor: Tensor) -> tuple[slice, ...]:
    """Where each element of the tensor's memory is once: torch does not write to dimensions that are expanded."""
    return tuple([slice(1) if stride == 0 else slice(None) for stride in tensor.stride()])
