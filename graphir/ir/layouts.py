"""How kernels lay out results, where torch's rules for tensors without data say otherwise.

For some operators on permuted operands, torch's rule keeps the order of dimensions of one operand, and its kernel that
of another, or none. The kernel itself is asked then: on tensors whose dimensions have at most two elements, and lie in
memory as those of the operands do. Answers are kept, so that the layers of a model cost a lookup each.

The types were found by running torch's own samples of all operators on tensors that are contiguous, transposed,
channels-last and permuted at random, forward and backward, with and without data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import unset_fake_temporarily

from .blob import dense_strides, reach
from .opset import overload

__all__ = ["LAYOUTS", "as_kernel", "is_asked_if_ambiguous"]

_ASKED: Final = """
    _log_softmax_backward_data.default copysign.Tensor div.Tensor_mode elu_backward.default floor_divide.default
    hardsigmoid_backward.default hardswish_backward.default hardtanh_backward.default huber_loss_backward.default
    log_sigmoid_forward.default logit_backward.default mse_loss_backward.default native_batch_norm.default
    native_batch_norm_backward.default native_dropout_backward.default native_layer_norm_backward.default pow.Scalar
    smooth_l1_loss_backward.default softplus_backward.default special_xlog1py.default xlogy.Tensor
"""
"""Types whose kernels are asked. Their results are dense, and their arguments hold no sums or products of sizes."""

_ASKED_IF_AMBIGUOUS: Final = """
    _log_softmax.default _prelu_kernel_backward.default _upsample_nearest_exact2d.default
    binary_cross_entropy_with_logits.default glu.default hardswish.default leaky_relu_backward.default
    mish_backward.default mse_loss.default smooth_l1_loss.default upsample_bicubic2d.default
    upsample_bilinear2d.default upsample_nearest2d.default
"""
"""Types whose kernels are asked only where :func:`_is_ambiguous` says so of an operand, beside pointwise ones."""

_FORMAT_OF: Final[Mapping[str, int | None]] = {
    "aten.channel_shuffle.default": 0,
    "aten.glu_backward.default": None,
    "aten.max_unpool2d.default": 0,
    "aten.normal.Tensor_Tensor": None,
    "aten.reflection_pad2d_backward.default": 1,
    "aten.replication_pad2d.default": 0,
    "aten.replication_pad2d_backward.default": 1,
}
"""Types whose kernels keep the channels where one operand has them, and the position of that operand; None where the
result is contiguous whatever the operands are."""

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
    """Whether a contiguous tensor has its channels last, too, as pictures of one pixel or of one channel may."""
    return tensor.dim() > 3 and tensor.is_contiguous() and suggest_memory_format(tensor) is not torch.contiguous_format


def is_asked_if_ambiguous(type: str) -> bool:
    """Whether an operand that is contiguous and also has its channels last counts as the one for the kernels of *type*,
    and as the other for torch's rule. A convolution after it chooses its layout by the strides of the result."""
    func = overload(type)
    pointwise = torch.Tag.pointwise in func.tags and not func._schema.is_mutable
    return pointwise or type.removeprefix("aten.") in _ASKED_IF_AMBIGUOUS.split()


def as_kernel(type: str, *, ambiguous: bool = False) -> Callable[..., Any]:
    """The rule of *type* for tensors without data: torch's, with results in the strides that the CPU's kernel gives.

    Args:
        type: of the operator.
        ambiguous: ask the kernel where an operand is contiguous and has its channels last, and nowhere else.
    """
    func = overload(type)

    def rule(*args: Any, **kwargs: Any) -> Any:
        returned = func(*args, **kwargs)
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        if not tensors or tensors[0].numel() == 0:
            return returned
        if (ambiguous or all(t.is_contiguous() for t in tensors)) and not any(map(_is_ambiguous, tensors)):
            return returned
        small = tuple([_small(arg) for arg in args]), tuple(kwargs.items())
        key = (type, *small)
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


def _in_format(type: str, operand: int | None) -> Callable[..., Any]:
    """The rule of *type* for tensors without data: torch's, with the channels last where they are so in *operand*."""
    func = overload(type)

    def rule(*args: Any, **kwargs: Any) -> Any:
        memory_format = torch.contiguous_format if operand is None else suggest_memory_format(args[operand])
        # Torch's own rules fail on some views of permuted operands.
        dense = [arg.contiguous() if isinstance(arg, Tensor) else arg for arg in args]
        return torch.empty_like(func(*dense, **kwargs), memory_format=memory_format)

    return rule


def _drawn(memory_format: torch.memory_format) -> Callable[..., Any]:
    """The rule of an operator that draws a number for each element of its first operand."""

    def rule(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return torch.empty_like(self, memory_format=memory_format)

    return rule


LAYOUTS: Final[Mapping[str, Callable[..., Any]]] = {
    **{type: as_kernel(type) for type in (f"aten.{name}" for name in _ASKED.split())},
    **{type: _in_format(type, operand) for type, operand in _FORMAT_OF.items()},
    "aten._standard_gamma.default": _drawn(torch.contiguous_format),
    "aten.poisson.default": _drawn(torch.contiguous_format),
    "aten.uniform.default": _drawn(torch.preserve_format),
}
"""The rules, by operator type."""
