"""Receive buffers: memory that is taken once and kept for what copies bring from other devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

import torch
from torch import Tensor

from graphir.ir.device import Device

from .communication import ALIGNMENT, is_marked, marked, spanned

__all__ = ["Buffer", "Buffers", "buffer_on", "bytes_of"]

_KEPT_TARGETS: Final = 64
"""For how many geometries the tensors that show a buffer are kept."""

_CUDA_ALIGNMENT: Final = 256
"""What ``ALIGNMENT`` is on CUDA, where cuBLASLt chooses matrix products by alignments of up to so many bytes."""


class Buffer:
    """Memory that copies with one number share, one after the other: as much as the largest takes.

    Args:
        take: allocates so many bytes.

    Attributes:
        nbytes: how many it holds by now, without those that lie before the first one to align it.
        targets: tensors over its memory that copies have filled, by geometry.
    """

    def __init__(self, take: Callable[[int], Tensor]) -> None:
        self.take, self.nbytes = take, 0
        self.room: Tensor | None = None
        self.targets: dict[object, Tensor] = {}

    def receive(self, source: Tensor) -> Tensor:
        """A copy of *source*, with its strides, from offset 0; the stream of the lane that receives is current.

        It begins at the address of *source* modulo the alignment, by which kernels are chosen.
        """
        if is_marked(source):
            return marked(self.receive(marked(source, source)), source)
        geometry = source.size(), source.stride(), source.dtype, source.data_ptr() % _alignment(source)
        target = self.targets.get(geometry)
        if target is None:
            target = self.targets[geometry] = self.fitted(source)
        # Over its whole span the source is dense, also where it is strided: torch packs nothing beforehand.
        spanned(target).copy_(spanned(source), non_blocking=True)
        return target

    def let_go(self) -> None:
        """Give the memory back."""
        self.nbytes, self.room = 0, None
        self.targets.clear()

    def fitted(self, source: Tensor) -> Tensor:
        """The buffer's memory in the geometry of *source*."""
        span, shift = spanned(source), source.data_ptr() % _alignment(source)
        nbytes = span.numel() * source.element_size()
        self.nbytes = max(self.nbytes, nbytes)
        if len(self.targets) == _KEPT_TARGETS:
            self.targets.clear()
        if self.room is None or shift + nbytes > self.room.numel():
            self.targets.clear()  # what it holds is of no use, and need not be there twice
            self.room = None
            self.room = self.take(self.nbytes + _alignment(source))
        storage = self.room.untyped_storage()[shift : shift + nbytes]
        made = torch.empty(0, dtype=source.dtype, device=self.room.device)
        return made.set_(storage, 0, source.size(), source.stride())


def buffer_on(place: torch.device) -> Buffer:
    """A buffer of a real device's memory."""
    return Buffer(lambda nbytes: torch.empty(nbytes, dtype=torch.uint8, device=place))


def _alignment(source: Tensor) -> int:
    return _CUDA_ALIGNMENT if source.is_cuda else ALIGNMENT


Buffers: TypeAlias = dict[tuple[Device, object], Buffer]
"""For each device, the buffers by their numbers in the plan, or by the storage that a copy makes."""


def bytes_of(buffers: Buffers) -> Mapping[Device, int]:
    """By device, what its buffers hold."""
    found: dict[Device, int] = {}
    for (device, _), buffer in buffers.items():
        found[device] = found.get(device, 0) + buffer.nbytes
    return found
