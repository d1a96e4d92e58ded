"""Receive buffers: memory that is taken once and kept for what copies bring from other devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import torch
from torch import Tensor

from graphir.ir.device import Device

from .communication import ALIGNMENT, spanned

__all__ = ["Buffer", "Buffers", "Room"]


class Buffer:
    """Memory that copies with one number share, one after the other.

    Args:
        take: allocates so many bytes.

    Attributes:
        nbytes: how many bytes it has by now.
    """

    def __init__(self, take: Callable[[int], Tensor]) -> None:
        self.take, self.nbytes = take, 0
        self.room: Tensor | None = None
        self.geometry: object = None
        self.target: Tensor | None = None

    def receive(self, source: Tensor) -> Tensor:
        """A copy of *source*, with its strides, from offset 0; the stream of the lane that receives is current."""
        geometry = source.size(), source.stride(), source.dtype, source.data_ptr() % _alignment(source)
        if geometry != self.geometry or self.target is None:
            self.target, self.geometry = self.fitted(source), geometry
        # Over its whole span the source is dense, also where it is strided: torch packs nothing beforehand.
        spanned(self.target).copy_(spanned(source), non_blocking=True)
        return self.target

    def fitted(self, source: Tensor) -> Tensor:
        """The buffer's memory in the geometry of *source*."""
        span, shift = spanned(source), source.data_ptr() % _alignment(source)
        nbytes = span.numel() * source.element_size()
        if self.room is None or shift + nbytes > self.nbytes:
            self.nbytes = nbytes + _alignment(source)
            self.room = self.take(self.nbytes)
        storage = self.room.untyped_storage()[shift : shift + nbytes]
        made = torch.empty(0, dtype=source.dtype, device=self.room.device)
        return made.set_(storage, 0, source.size(), source.stride())


class Room:
    """Host memory of one receive buffer for steps of all sizes: as much as the largest takes.

    The tensors of other sizes stay valid when it grows, and hold nothing then.
    """

    def __init__(self) -> None:
        self.storage = torch.UntypedStorage(0, device="cpu")

    def tensor(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The memory in this geometry, from its beginning; between two steps."""
        nbytes = torch.empty_strided(size, stride, dtype=dtype, device="meta").untyped_storage().nbytes()
        if nbytes > self.storage.nbytes():
            self.storage.resize_(0)  # what it holds is of no use, and need not be there twice
            self.storage.resize_(nbytes)
        with torch.inference_mode():
            return torch.empty(0, dtype=dtype, device="cpu").set_(self.storage, 0, size, stride)


def _alignment(source: Tensor) -> int:
    return _CUDA_ALIGNMENT if source.is_cuda else ALIGNMENT


_CUDA_ALIGNMENT: Final = 256
"""What ``ALIGNMENT`` is on CUDA, where cuBLASLt chooses matrix products by alignments of up to so many bytes."""

Buffers: TypeAlias = dict[tuple[Device, object], Buffer]
"""For each device, the buffers by their numbers in the plan, or by the storage that a copy makes."""
