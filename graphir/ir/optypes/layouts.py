"""How kernels lay out results, where torch's rules for tensors without data say otherwise.

For some operators on permuted operands, torch's rule keeps one operand's order of dimensions, and its kernel another
operand's order, or none. The kernel itself is asked then: on tensors whose dimensions have at most two elements, and
lie in memory as the operands' dimensions do. Answers are kept, so that the layers of a model cost a lookup each.

The types were found by running torch's own samples of all operators on tensors that are contiguous, transposed,
channels-last and permuted at random, forward and backward, with and without data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import unset_fake_temporarily

from ..blob import dense_strides, reach

__all__ = ["as_kernel", "drawn", "in_format"]

Order: TypeAlias = tuple[int, ...]
"""The dimensions of a dense tensor from the innermost in memory to the outermost."""

_orders: Final[dict[tuple[Any, ...], tuple[Order | None, ...]]] = {}


class _Operand(NamedTuple):
    """A tensor of at most two elements a dimension, whose dimensions lie in memory in the order of the operand's."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def tensor(self) -> Tensor:
        return torch.ones(reach(self.shape, self.strides), dtype=self.dtype, device="cpu").as_strided(
            self.shape, self.strides
        )


def _is_ambiguous(tensor: Tensor) -> bool:
    """Whether a tensor is contiguous and channels-last at once, as images of one pixel or of one channel may be."""
    return tensor.dim() > 3 and tensor.is_contiguous() and suggest_memory_format(tensor) is not torch.contiguous_format


def as_kernel(func: Callable[..., Any], *, ambiguous: bool = False) -> Callable[..., Any]:
    """The rule of *func* for tensors without data: torch's, with results in the strides that the CPU's kernel gives.

    The results of *func* must be dense, and its arguments must hold no sums or products of sizes.

    Args:
        func: the operator.
        ambiguous: ask the kernel only if an operand is contiguous and channels-last at once.
    """

    def rule(*args: Any, **kwargs: Any) -> Any:
        returned = func(*args, **kwargs)
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        if not tensors or tensors[0].numel() == 0:
            return returned
        if (ambiguous or all(t.is_contiguous() for t in tensors)) and not any(map(_is_ambiguous, tensors)):
            return returned
        small = tuple([_small(arg) for arg in args]), tuple(kwargs.items())
        key = (func, *small)
        orders = _orders.get(key)
        if orders is None:
            orders = _orders[key] = _asked(func, *small)
        if isinstance(returned, Tensor):
            return _in_order(returned, orders[0])
        return tuple([_in_order(result, order) for result, order in zip(returned, orders, strict=True)])

    return rule


def _small(arg: Any) -> Any:
    if isinstance(arg, Tensor):
        return _Operand(*_small_geometry(tuple(arg.shape), arg.stride()), arg.dtype)
    return tuple([min(size, 2) for size in arg]) if isinstance(arg, (list, tuple)) else arg


def _small_geometry(shape: Sequence[int], strides: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes of at most 2, and strides that keep the order of the dimensions, gaps between them, and repetition."""
    small = tuple([min(size, 2) for size in shape])
    found = dict.fromkeys(strides, 0)
    step, dense = 1, 1
    for stride in sorted(set(strides) - {0}):
        dims = [d for d, s in enumerate(strides) if s == stride]
        step += stride > dense
        found[stride] = step
        step, dense = step * prod(small[d] for d in dims), stride * prod(shape[d] for d in dims)
    return small, tuple([found[stride] for stride in strides])


def _asked(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Sequence[tuple[str, Any]]
) -> tuple[Order | None, ...]:
    """The order of the dimensions of each result."""
    with unset_fake_temporarily(), torch.no_grad():
        returned = func(*[arg.tensor() if isinstance(arg, _Operand) else arg for arg in args], **dict(kwargs))
    return tuple([_order(result) for result in ([returned] if isinstance(returned, Tensor) else returned)])


def _order(tensor: Tensor | None) -> Order | None:
    if tensor is None:
        return None
    strides, shape = tensor.stride(), tensor.shape
    return tuple(sorted(range(tensor.dim()), key=lambda d: (strides[d], shape[d] != 1)))


def _in_order(tensor: Tensor | None, order: Order | None) -> Tensor | None:
    if tensor is None or order is None:
        return tensor
    strides = dense_strides(tensor.shape, order)
    if strides == tensor.stride():
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)


def in_format(operand: int | None) -> Callable[..., Any]:
    """Makes a rule for tensors without data: torch's, with channels-last results if *operand* is channels-last. None:
    the results are always contiguous."""

    def made(func: Callable[..., Any]) -> Callable[..., Any]:
        def rule(*args: Any, **kwargs: Any) -> Any:
            memory_format = torch.contiguous_format if operand is None else suggest_memory_format(args[operand])
            # Torch's own rules fail on some views of permuted operands.
            dense = [arg.contiguous() if isinstance(arg, Tensor) else arg for arg in args]
            return torch.empty_like(func(*dense, **kwargs), memory_format=memory_format)

        return rule

    return made


def drawn(memory_format: torch.memory_format) -> Callable[..., Any]:
    """Makes the rule of an operator that draws a number for each element of its first operand."""

    def rule(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return torch.empty_like(self, memory_format=memory_format)

    return lambda func: rule
