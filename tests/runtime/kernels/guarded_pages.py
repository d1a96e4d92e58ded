"""Calls of checked kernels on operands between pages that no process may touch, changed at random; run as a script.

A kernel that reads or writes beyond an operand ends the process.
"""

from __future__ import annotations

import ctypes
import mmap
import random
import resource
import sys
from collections.abc import Callable
from typing import Any

import torch
from graphir.runtime.kernels.bounds import CHECKED
from torch import Tensor

__all__ = ["CALLS"]

_MPROTECT = ctypes.CDLL(None, use_errno=True).mprotect
_PAGE = mmap.PAGESIZE
_MOST_BYTES = 8 << 30
"""Of the process: sizes out of range are to be refused, not to take the machine's memory."""
_NUMBERS = (-(2**62), -(10**9), -2, -1, 0, 1, 2, 3, 7, 64, 10**6, 10**9, 2**31, 2**40, 2**62)
_TYPES = (torch.float32, torch.float64, torch.int64, torch.int32, torch.bfloat16, torch.bool)


def _x(*shape: int) -> Tensor:
    return torch.linspace(-1, 1, max(torch.Size(shape).numel(), 1)).reshape(shape)


def _i(*values: int) -> Tensor:
    return torch.tensor(values)


def _zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


_BAGS = (_i(0, 3, 2, 6, 1), _i(0, 2))
_TO_BAG = (_i(0, 0, 1, 1, 1), _i(2, 3))
_MASK = [True, True, True]

CALLS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "_adaptive_avg_pool2d_backward": lambda: (_x(2, 3, 2, 2), _x(2, 3, 5, 5)),
    "_adaptive_avg_pool3d_backward": lambda: (_x(2, 3, 2, 2, 2), _x(2, 3, 4, 4, 4)),
    "_embedding_bag": lambda: (_x(7, 4), *_BAGS, False, 0, False, _x(5)),
    "_embedding_bag_backward": lambda: (_x(2, 4), *_BAGS, *_TO_BAG, _zeros(2, 4), 7, False, 0, False, _x(5)),
    "_embedding_bag_forward_only": lambda: (_x(7, 4), *_BAGS, False, 1, False, None),
    "_embedding_bag_per_sample_weights_backward": lambda: (_x(2, 4), _x(7, 4), *_BAGS, _TO_BAG[0], 0),
    "_fft_c2c": lambda: (_x(3, 4).to(torch.complex64), [0, 1], 0, True),
    "_fft_c2r": lambda: (_x(3, 3).to(torch.complex64), [0, 1], 0, 4),
    "_fft_r2c": lambda: (_x(3, 4), [1], 0, True),
    "_log_softmax_backward_data": lambda: (_x(4, 5), _x(4, 5), 1, torch.float32),
    "_native_batch_norm_legit": lambda: (_x(2, 3, 4, 4), _x(3), _x(3), _x(3), _x(3), True, 0.1, 1e-5),
    "_softmax_backward_data": lambda: (_x(4, 5), _x(4, 5), 1, torch.float32),
    "_upsample_bilinear2d_aa": lambda: (_x(1, 2, 8, 8), [4, 4], False, 0.5, 0.5),
    "_upsample_bilinear2d_aa_backward": lambda: (_x(1, 2, 4, 4), [4, 4], [1, 2, 8, 8], False, 0.5, 0.5),
    "_weight_norm_interface": lambda: (_x(3, 4), _x(3, 1), 0),
    "_weight_norm_interface_backward": lambda: (_x(3, 4), _x(3, 4), _x(3, 1), _x(3, 1), 0),
    "adaptive_max_pool2d_backward": lambda: (_x(2, 3, 2, 2), _x(2, 3, 5, 5), _zeros(2, 3, 2, 2)),
    "adaptive_max_pool3d_backward": lambda: (_x(2, 3, 2, 2, 2), _x(2, 3, 4, 4, 4), _zeros(2, 3, 2, 2, 2)),
    "avg_pool2d_backward": lambda: (_x(2, 3, 2, 2), _x(2, 3, 4, 4), [2, 2], [2, 2], [0, 0], False, True, None),
    "avg_pool3d_backward": lambda: (_x(1, 2, 2, 2, 2), _x(1, 2, 4, 4, 4), [2] * 3, [2] * 3, [0] * 3, False, True, None),
    "gelu_backward": lambda: (_x(5, 6), _x(5, 6)),
    "grid_sampler_2d_backward": lambda: (_x(1, 2, 3, 3), _x(1, 2, 5, 5), _x(1, 3, 3, 2), 0, 0, False, [True, True]),
    "grid_sampler_3d_backward": lambda: (
        *(_x(1, 2, 3, 3, 3), _x(1, 2, 4, 4, 4), _x(1, 3, 3, 3, 3)), 0, 0, False, [True, True],
    ),
    "max_pool2d_with_indices_backward": lambda: (
        *(_x(2, 3, 2, 2), _x(2, 3, 4, 4)), [2, 2], [2, 2], [0, 0], [1, 1], False, _zeros(2, 3, 2, 2),
    ),
    "max_pool3d_with_indices_backward": lambda: (
        *(_x(1, 2, 2, 2, 2), _x(1, 2, 4, 4, 4)), [2] * 3, [2] * 3, [0] * 3, [1] * 3, False, _zeros(1, 2, 2, 2, 2),
    ),
    "native_batch_norm": lambda: (_x(2, 3, 4, 4), _x(3), _x(3), _x(3), _x(3), True, 0.1, 1e-5),
    "native_batch_norm_backward": lambda: (
        *(_x(2, 3, 4, 4), _x(2, 3, 4, 4), _x(3), _x(3), _x(3), _x(3), _x(3)), True, 1e-5, _MASK,
    ),
    "native_group_norm_backward": lambda: (
        *(_x(2, 6, 4), _x(2, 6, 4), _x(2, 3), _x(2, 3), _x(6)), 2, 6, 4, 3, _MASK,
    ),
    "native_layer_norm_backward": lambda: (
        _x(3, 8), _x(3, 8), [8], _x(3, 1), _x(3, 1), _x(8), _x(8), _MASK,
    ),
    "nll_loss_backward": lambda: (_x(), _x(4, 5), _i(0, 4, 2, -100), None, 1, -100, torch.tensor(3.0)),
    **{
        f"{kind}_pad{n}d_backward": lambda n=n: (_x(2, *[6] * n), _x(2, *[4] * n), [1] * (2 * n))
        for kind in ("reflection", "replication")
        for n in (1, 2, 3)
    },
}  # fmt: skip
"""Operands that each checked type takes."""


class Guarded:
    """Memory that ends, to 64 bytes, where a page begins that no process may touch, and so in front of it."""

    def __init__(self) -> None:
        self.kept: list[mmap.mmap] = []

    def copy(self, tensor: Tensor) -> Tensor:
        """The tensor in such memory, with its strides if it shows no element twice."""
        if not tensor.numel():
            return tensor
        dense = tensor.contiguous()
        nbytes = dense.numel() * dense.element_size()
        pages = -(-nbytes // _PAGE)
        memory = mmap.mmap(-1, (pages + 2) * _PAGE)
        self.kept.append(memory)
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        for page in (0, pages + 1):
            assert not _MPROTECT(ctypes.c_void_p(start + page * _PAGE), _PAGE, 0)
        offset = (pages + 1) * _PAGE - (-(-nbytes // 64) * 64)
        found = torch.frombuffer(memory, dtype=dense.dtype, count=dense.numel(), offset=offset).view(dense.shape)
        found.copy_(dense)
        return found


def changed(draw: random.Random, given: Any) -> Any:
    """Another argument in the place of one."""
    if isinstance(given, Tensor):
        return _changed_tensor(draw, given)
    if isinstance(given, bool):
        return not given
    if isinstance(given, int):
        return draw.choice(_NUMBERS)
    if isinstance(given, float):
        return draw.choice((0.0, -1.0, 1e30, float("nan")))
    if isinstance(given, list) and given:
        return [changed(draw, item) if draw.random() < 0.5 else item for item in given]
    return given


def _changed_tensor(draw: random.Random, given: Tensor) -> Tensor:
    shape = list(given.shape)
    match draw.randrange(6):
        case 0 | 1 if given.dtype == torch.int64:
            found = given.clone()
            found.view(-1)[-1:] = draw.choice(_NUMBERS)
            return found
        case 2:
            return given.to(draw.choice(_TYPES))
        case 3:
            return given.flatten()[:1].view([1] * len(shape)).expand(shape)
        case 4:
            shape = [*shape, draw.choice((0, 1, 2))] if draw.random() < 0.5 else shape[:-1]
        case _ if shape:
            shape[draw.randrange(len(shape))] = draw.choice((0, 1, 2, 3, 16, 64))
    return given.flatten()[:1].repeat(torch.Size(shape).numel()).view(shape)


def main(calls: int) -> None:
    """Make so many calls of each checked type."""
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES))
    taken = refused = 0
    for type, make in CALLS.items():
        draw = random.Random(type)
        kernel = CHECKED[f"aten.{type}.default"]
        for _ in range(calls):
            arguments = list(make())
            for i in draw.sample(range(len(arguments)), draw.choice((1, 1, 2))):
                arguments[i] = changed(draw, arguments[i])
            guarded = Guarded()
            arguments = [guarded.copy(a) if isinstance(a, Tensor) and 0 not in a.stride() else a for a in arguments]
            print(type, file=sys.stderr)
            try:
                kernel(*arguments)
                taken += 1
            except (RuntimeError, IndexError, ValueError, TypeError, MemoryError):
                refused += 1
    print(taken, refused)


if __name__ == "__main__":
    main(int(sys.argv[1]))
