"""Which of the tensors that a step starts from share memory: a recording has each of them apart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

__all__ = ["extent", "overlaps"]


def extent(tensor: torch.Tensor) -> int:
    """Elements from the tensor's first to its last, gaps included."""
    if tensor.numel() == 0:
        return 0
    return sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1


def overlaps(tensors: Iterable[tuple[str, torch.Tensor]]) -> Mapping[int, str]:
    """Of each tensor that another one may share memory with, by its ``id``, the name of such a one.

    What counts is the memory from a tensor's first element to its last, gaps included. One tensor under several names
    shares memory with no other; tensors without data share none.
    """
    spans: dict[int, list[tuple[int, int, str, int]]] = {}
    seen: set[int] = set()
    for name, tensor in tensors:
        if id(tensor) not in seen and tensor.numel() and not tensor.is_meta:
            seen.add(id(tensor))
            first = int(tensor.storage_offset()) * tensor.itemsize
            last = first + extent(tensor) * tensor.itemsize
            spans.setdefault(tensor.untyped_storage()._cdata, []).append((first, last, name, id(tensor)))
    found: dict[int, str] = {}
    for of_storage in spans.values():
        furthest, *others = sorted(of_storage)
        for span in others:
            if span[0] < furthest[1]:
                found.setdefault(span[3], furthest[2])
                found.setdefault(furthest[3], span[2])
            furthest = max(furthest, span, key=lambda span: span[1])
    return found
