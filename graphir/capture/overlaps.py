"""Which of the tensors that a step starts from share memory: a recording has each of them apart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ..ir.blob import reach

__all__ = ["described", "overlaps", "reach_of"]


def described(kind: str, name: str) -> str:
    """What a parameter, buffer or input of a step is called: ``buffer 'mean'``, ``argument 'x'``."""
    return f"{'argument' if kind == 'input' else kind} {name!r}"


def reach_of(tensor: torch.Tensor) -> int:
    """Elements from the tensor's first to its last, gaps included."""
    return reach(tensor.shape, tensor.stride())


def overlaps(tensors: Iterable[tuple[str, torch.Tensor]]) -> Mapping[str, str]:
    """Of each tensor that another one may share memory with, by its name, the name of such a one.

    What counts is the memory from a tensor's first element to its last, gaps included, whoever owns it: numpy's arrays
    have a storage for each tensor made of them. Tensors without elements share none, nor do those on meta.
    """
    spans: dict[object, list[tuple[int, int, str]]] = {}
    for name, tensor in tensors:
        if tensor.numel() and not tensor.is_meta:
            memory, first = _place(tensor)
            spans.setdefault(memory, []).append((first, first + reach_of(tensor) * tensor.itemsize, name))
    found: dict[str, str] = {}
    for of_memory in spans.values():
        furthest, *others = sorted(of_memory)
        for span in others:
            if span[0] < furthest[1]:
                found.setdefault(span[2], furthest[2])
                found.setdefault(furthest[2], span[2])
            furthest = max(furthest, span, key=lambda span: span[1])
    return found


def _place(tensor: torch.Tensor) -> tuple[object, int]:
    """Which memory a tensor is in, and where it begins there, in bytes; a fake tensor has its storage's alone."""
    if isinstance(tensor, FakeTensor):
        return tensor.untyped_storage()._cdata, int(tensor.storage_offset()) * tensor.itemsize
    return tensor.device, tensor.data_ptr()
