"""Gradients of one backward in one call and in two: whether they have the same bits, and what both take."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product

import torch
from limits import limited
from torch import Tensor

__all__ = ["rows"]

_ROUNDS = 5
_MASKS = ((True, True, True), (True, False, False), (False, True, True))

_Call = Callable[[Sequence[bool]], Sequence[Tensor | None]]

_CONVOLUTIONS = (
    # batch, channels in and out, kernel, stride, padding, dilation, groups, length of a side
    (1, 3, 8, 3, 1, 1, 1, 1, 9),
    (4, 16, 32, 3, 1, 1, 1, 1, 8),
    (4, 32, 32, 1, 1, 0, 1, 1, 8),
    (4, 32, 64, 1, 2, 0, 1, 1, 9),
    (4, 16, 16, 3, 2, 1, 1, 1, 9),
    (2, 16, 16, 3, 1, 1, 1, 16, 8),
    (2, 16, 32, 3, 1, 1, 1, 4, 8),
    (2, 16, 16, 5, 2, 2, 1, 1, 9),
    (2, 8, 8, 3, 1, 2, 2, 1, 9),
    (2, 16, 32, 3, 2, 1, 1, 4, 9),
    (3, 5, 7, 3, 1, 0, 1, 1, 7),
    (2, 6, 9, 3, 1, 1, 1, 3, 7),
    (4, 64, 64, 3, 1, 1, 1, 1, 8),
    (8, 32, 32, 3, 1, 1, 1, 1, 16),
)
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def _convolutions(dtype: torch.dtype) -> Iterator[tuple[str, _Call]]:
    for transposed, dims, (n, c, k, size, stride, padding, dilation, groups, side), last, biased in product(
        (False, True), (1, 2, 3), _CONVOLUTIONS, (False, True), (False, True)
    ):
        if dims != 2 and (last or (dims == 3 and (n * c > 100 or dtype == torch.float16))):
            continue
        shape = (c, k // groups) if transposed else (k, c // groups)
        x, w = torch.randn(n, c, *[side] * dims, dtype=dtype), torch.randn(*shape, *[size] * dims, dtype=dtype)
        if last:
            x = x.contiguous(memory_format=torch.channels_last)
        how = [stride] * dims, [padding] * dims, [dilation] * dims, transposed, [0] * dims, groups
        grad = torch.randn_like(torch.ops.aten.convolution(x, w, None, *how))

        def call(mask: Sequence[bool], grad=grad, x=x, w=w, how=how, bias=[k] if biased else None):  # type: ignore[no-untyped-def]
            wanted = [*mask[:2], mask[2] and bias is not None]
            return torch.ops.aten.convolution_backward(grad, x, w, bias, *how, wanted)

        yield f"convolution{', transposed' * transposed}", call


def _norms(dtype: torch.dtype) -> Iterator[tuple[str, _Call]]:
    aten = torch.ops.aten
    for n, c, side in ((1, 3, 5), (4, 16, 14), (8, 32, 32), (3, 7, 1), (32, 64, 8), (2, 128, 4)):
        x, w, b = torch.randn(n, c, side, side, dtype=dtype), torch.randn(c, dtype=dtype), torch.randn(c, dtype=dtype)
        grad = torch.randn_like(x)
        for train in (True, False):
            running = torch.zeros(c, dtype=dtype), torch.ones(c, dtype=dtype)
            _, *kept = aten.native_batch_norm(x, w, b, *running, train, 0.1, 1e-5)
            operands = (grad, x, w, *running, *kept, train, 1e-5)
            yield "batch norm", lambda mask, given=operands: aten.native_batch_norm_backward(*given, mask)
        for groups in (1, c):
            _, *kept = aten.native_group_norm(x, w, b, n, c, side * side, groups, 1e-5)
            operands = (grad, x, *kept, w, n, c, side * side, groups)
            yield "group norm", lambda mask, given=operands: aten.native_group_norm_backward(*given, mask)
        rows = x.flatten(1)
        width = rows.shape[1:]
        scale, shift = torch.randn(width, dtype=dtype), torch.randn(width, dtype=dtype)
        _, *kept = aten.native_layer_norm(rows, width, scale, shift, 1e-5)
        operands = (grad.flatten(1), rows, width, *kept, scale, shift)
        yield "layer norm", lambda mask, given=operands: aten.native_layer_norm_backward(*given, mask)


def rows() -> Iterator[str]:
    """The table by type of operator, over sizes, strides, groups, layouts, element types, and one and two threads."""
    yield "| backward | calls | other bits in two | other bits in one again | seconds in two over seconds in one |"
    yield "| --- | ---: | ---: | ---: | ---: |"
    before = torch.get_num_threads()
    found: dict[str, list[tuple[bool, bool, float]]] = {}
    try:
        for threads, dtype in product((1, 2), _DTYPES):
            torch.set_num_threads(threads)
            torch.manual_seed(0)
            for made in (_convolutions, _norms):
                for name, call in made(dtype):
                    found.setdefault(name, []).append(_compared(call))
    finally:
        torch.set_num_threads(before)
    for name, results in found.items():
        other, again, ratios = zip(*results, strict=True)
        differ = f"{sum(other)}" if sum(again) else limited(f"{sum(other)}", at_most=0)
        yield f"| {name} | {len(results)} | {differ} | {sum(again)} | {statistics.median(ratios):.2f} |"


def _compared(call: _Call) -> tuple[bool, bool, float]:
    """Whether two calls give other bits than one, whether another one does, and how much longer the two take."""
    whole, again, of_input, others = [call(mask) for mask in (_MASKS[0], *_MASKS)]
    seconds = [[_seconds(call, mask) for mask in _MASKS] for _ in range(_ROUNDS)]
    one, *two = [statistics.median(column) for column in zip(*seconds, strict=True)]
    return not _same(whole, [of_input[0], *others[1:]]), not _same(whole, again), sum(two) / one


def _seconds(call: _Call, mask: Sequence[bool]) -> float:
    start = time.perf_counter()
    call(mask)
    return time.perf_counter() - start


def _same(ours: Sequence[Tensor | None], theirs: Sequence[Tensor | None]) -> bool:
    """Whether the tensors have the same bits in the same layout."""
    for a, b in zip(ours, theirs, strict=True):
        if a is None or b is None:
            if a is not b:
                return False
        elif a.stride() != b.stride() or not torch.equal(a, b) or not torch.equal(a.signbit(), b.signbit()):
            return False
    return True
