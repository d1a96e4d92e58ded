"""Kernels of torch that would read or write beyond their operands, and what is asked of operands before a call.

Torch calls most of these behind functions of its own, which give them no other operands than they take. A plan names
them itself, and a file may hold any plan. So shapes are compared, which takes about a microsecond, and indices that
a kernel follows unseen are held against what they index, by one pass over them. That is done with the tensors of each
step: verification knows shapes at the captured sizes only, and no values. On CUDA no index is looked at, since that
would wait for the device; a kernel there cannot reach the process's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from math import prod
from typing import Any, Final

import torch
from torch import Tensor

from graphir.ir.opset import overload

__all__ = ["CHECKED", "check_attention", "check_dense", "check_lookups", "check_within"]


def _refuse(what: str, *tensors: Tensor | None) -> None:
    shapes = ", ".join("none" if t is None else str(list(t.shape)) for t in tensors)
    raise ValueError(f"{what}: {shapes}" if shapes else what)


def _equal(*tensors: Tensor) -> None:
    first = tensors[0]
    if any(t.shape != first.shape for t in tensors):
        _refuse("the operands have other shapes", *tensors)


def _hold(tensor: Tensor | None, count: int, what: str) -> None:
    """An operand that may be missing has so many elements."""
    if tensor is not None and tensor.numel() != count:
        _refuse(f"{what} has {tensor.numel()} elements, not {count}")


def check_within(indices: Tensor, least: int, end: int, what: str) -> None:
    """Indices are from *least* up to, not including, *end*; on CUDA nobody looks."""
    if indices.is_cpu and indices.numel():
        low, high = (int(bound) for bound in indices.aminmax())
        if low < least or high >= end:
            raise IndexError(f"{what} {low if low < least else high} is out of bounds for {end}")


@lru_cache(maxsize=4096)
def _result(type: str, shape: torch.Size, dtype: torch.dtype, options: tuple[Any, ...]) -> torch.Size:
    """The shape of what a forward type returns, or of the first of what it returns."""
    returned = overload(type)(torch.empty(shape, dtype=dtype, device="meta"), *options)
    found: torch.Size = (returned if isinstance(returned, Tensor) else returned[0]).shape
    return found


def _like_forward(type: str, grad_output: Tensor, self: Tensor, *options: Any) -> None:
    """The gradient has the shape of what *type* returns for the operand."""
    key = tuple([tuple(option) if isinstance(option, list) else option for option in options])
    if grad_output.shape != _result(type, self.shape, self.dtype, key) or grad_output.dtype != self.dtype:
        _refuse(f"the gradient is not one of {type}", grad_output, self)


def _max_pool_backward(type: str, spatial: int, grad_output: Tensor, self: Tensor, *rest: Any) -> None:
    *options, indices = rest
    _like_forward(type, grad_output, self, *options)
    _equal(grad_output, indices)
    check_within(indices, 0, prod(self.shape[-spatial:]), "an index of a maximum")


def _adaptive_max_pool_backward(spatial: int, grad_output: Tensor, self: Tensor, indices: Tensor) -> None:
    _adaptive_backward(spatial, grad_output, self)
    _equal(grad_output, indices)
    if spatial == 3:
        _dense(indices)
    check_within(indices, 0, prod(self.shape[-spatial:]), "an index of a maximum")


def _adaptive_backward(spatial: int, grad_output: Tensor, self: Tensor) -> None:
    same = grad_output.shape[:-spatial] == self.shape[:-spatial] and grad_output.dim() == self.dim() > spatial
    if not same or grad_output.dtype != self.dtype or (grad_output.numel() and not self.numel()):
        _refuse("the gradient is not one of the operand", grad_output, self)


def _elementwise_backward(grad_output: Tensor, self: Tensor, *_: Any, **__: Any) -> None:
    _equal(grad_output, self)


def _softmax_backward(grad_output: Tensor, output: Tensor, dim: int, input_dtype: Any) -> None:
    _equal(grad_output, output)
    if grad_output.dtype != output.dtype:
        _refuse("the gradient has another element type")


def _layer_norm_backward(
    grad_out: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    output_mask: Sequence[bool],
) -> None:
    _equal(grad_out, input)
    columns = prod(normalized_shape)
    if columns <= 0 or list(input.shape[input.dim() - len(normalized_shape) :]) != list(normalized_shape):
        _refuse(f"{list(normalized_shape)} are not the last sizes of the operand", input)
    for statistic in (mean, rstd):
        _hold(statistic, input.numel() // columns, "a statistic")
        _dense(statistic)
    _hold(weight, columns, "the weight")
    _hold(bias, columns, "the bias")


def _dense(tensor: Tensor) -> None:
    if not tensor.is_contiguous():
        _refuse(f"an operand has the strides {list(tensor.stride())}, and the kernel takes it for contiguous", tensor)


def _group_norm_backward(
    grad_out: Tensor,
    input: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    n: int,
    c: int,
    hxw: int,
    group: int,
    output_mask: Sequence[bool],
) -> None:
    _equal(grad_out, input)
    if min(n, c, hxw, group) < 0 or group == 0 or c % group or input.numel() != n * c * hxw:
        _refuse(f"the sizes {n}, {c}, {hxw} and {group} are not those of the operand", input)
    for given in (grad_out, input):
        if not any(given.is_contiguous(memory_format=form) for form in _FORMATS.get(given.dim(), _PLAIN)):
            _dense(given)
    for statistic in (mean, rstd):
        _hold(statistic, n * group, "a statistic")
        _dense(statistic)
    _hold(weight, c, "the weight")


_PLAIN: Final = (torch.contiguous_format,)
_FORMATS: Final = {4: (*_PLAIN, torch.channels_last), 5: (*_PLAIN, torch.channels_last_3d)}


def _batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    *_: Any,
) -> None:
    _of_channels(input, weight, bias, running_mean, running_var)
    if not training and (running_mean is None or running_var is None):
        _refuse("there are no statistics to normalise by", running_mean, running_var)


def _of_channels(input: Tensor, *given: Tensor | None) -> None:
    if input.dim() < 2:
        _refuse("the operand has no channels", input)
    for tensor in given:
        _hold(tensor, input.shape[1], "a parameter or statistic")


def _batch_norm_backward(
    grad_out: Tensor,
    input: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    save_mean: Tensor | None,
    save_invstd: Tensor | None,
    train: bool,
    *_: Any,
) -> None:
    _equal(grad_out, input)
    used = (save_mean, save_invstd) if train else (running_mean, running_var)
    if None in used:
        _refuse("there are no statistics to normalise by", *used)
    _of_channels(input, weight, *used)


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> None:
    if not (v.dim() > 0 < v.numel() and dim in (0, v.dim() - 1)):
        _refuse(f"a weight is normalised along its first or its last dimension, not {dim}", v)
    if g.shape != tuple([size if i == dim else 1 for i, size in enumerate(v.shape)]):
        _refuse(f"g is not one of the weight along {dim}", g, v)
    _dense(g)
    if g.dtype != v.dtype:
        _refuse("g has another element type")


def _weight_norm_backward(grad_w: Tensor, saved_v: Tensor, saved_g: Tensor, saved_norms: Tensor, dim: int) -> None:
    _weight_norm(saved_v, saved_g, dim)
    _equal(grad_w, saved_v)
    _equal(saved_norms, saved_g)
    for given in (grad_w, saved_v, saved_g, saved_norms):
        _dense(given)
    if grad_w.dtype != saved_v.dtype:
        _refuse("the gradient has another element type")


def _nll_loss_backward(
    grad_output: Tensor, self: Tensor, target: Tensor, weight: Any, reduction: int, ignore_index: int, *_: Any
) -> None:
    if not self.dim():
        _refuse("the operand has no classes", self)
    check_within(target[target != ignore_index] if target.is_cpu else target, 0, self.shape[-1], "the class")


def _embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    *_: Any,
) -> None:
    count = indices.numel()
    if weight.dim() != 2 or indices.dim() != 1 or offsets.dim() != 1:
        _refuse("weight, indices and offsets are a matrix and two vectors, not", weight, indices, offsets)
    if count and not offsets.numel():
        _refuse("there are indices, and no bag", indices, offsets)
    check_within(indices, 0, weight.shape[0], "the index")
    check_within(offsets, 0, count + 1, "the offset")
    if offsets.is_cpu and bool((offsets[1:] < offsets[:-1]).any()):
        raise IndexError("an offset is smaller than the one before")
    _hold(per_sample_weights, count, "per_sample_weights")


def _embedding_bag_backward(
    grad: Tensor,
    indices: Tensor,
    offsets: Tensor,
    offset2bag: Tensor,
    bag_size: Tensor,
    maximum_indices: Tensor,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    per_sample_weights: Tensor | None,
    padding_idx: int = -1,
) -> None:
    vectors = (indices, offsets, offset2bag, bag_size)
    if grad.dim() != 2 or any(vector.dim() != 1 for vector in vectors):
        _refuse("the gradient is a matrix, and indices, offsets and sizes are vectors, not", grad, *vectors)
    bags, count = grad.shape[0], indices.numel()
    check_within(indices, 0, num_weights, "the index")
    check_within(offsets, 0, count + 1, "the offset")
    _hold(offset2bag if offset2bag.numel() else None, count, "offset2bag")
    check_within(offset2bag, 0, bags, "the bag")
    _hold(per_sample_weights, count, "per_sample_weights")
    if offsets.numel() not in (bags, bags + 1) or bag_size.numel() < (bags if mode == 1 else 0):
        _refuse("there is an offset and a size for each bag", grad, offsets, bag_size)
    if mode == 2:
        _equal(grad, maximum_indices)
        check_within(maximum_indices, -1, num_weights, "the index")


def _embedding_bag_weights_backward(
    grad: Tensor, weight: Tensor, indices: Tensor, offsets: Tensor, offset2bag: Tensor, mode: int, *_: Any
) -> None:
    vectors = (indices, offsets, offset2bag)
    if grad.dim() != 2 or weight.dim() != 2 or any(vector.dim() != 1 for vector in vectors):
        _refuse("gradient and weight are matrices, indices and offsets vectors, not", grad, weight, *vectors)
    if grad.shape[1] != weight.shape[1]:
        _refuse("the gradient has other columns than the weight", grad, weight)
    bags, count = grad.shape[0], indices.numel()
    check_within(indices, 0, weight.shape[0], "the index")
    check_within(offsets, 0, count + 1, "the offset")
    _hold(offset2bag if offset2bag.numel() else None, count, "offset2bag")
    check_within(offset2bag, 0, bags, "the bag")
    if offsets.numel() not in (bags, bags + 1):
        _refuse("there is an offset for each bag", grad, offsets)


def _transformed(self: Tensor, dim: Sequence[int], *_: Any) -> None:
    if not all(0 <= d < self.dim() for d in dim) or len(set(dim)) != len(dim):
        _refuse(f"the operand cannot be transformed along {list(dim)}", self)


def _transformed_back(self: Tensor, dim: Sequence[int], normalization: int, last_dim_size: int) -> None:
    _transformed(self, dim)
    if not dim or last_dim_size < 1 or self.shape[dim[-1]] != last_dim_size // 2 + 1:
        _refuse(f"the operand is not one of {last_dim_size} real elements along the last of {list(dim)}", self)


def _resized(input: Tensor, output_size: Sequence[int], align: bool, *scales: float | None) -> None:
    _scaled(input.shape[2:], output_size, scales)


def _resized_backward(
    grad_output: Tensor,
    output_size: Sequence[int],
    input_size: Sequence[int],
    align: bool,
    *scales: float | None,
) -> None:
    _scaled(input_size[2:], output_size, scales)


def _scaled(sizes: Sequence[int], output_size: Sequence[int], scales: Sequence[float | None]) -> None:
    for size, wanted, scale in zip(sizes, output_size, scales, strict=False):
        if scale and not wanted <= size * scale < wanted + 1:
            _refuse(f"{size} elements, {scale} times as many, are not {wanted}")


def _sampled_backward(grad_output: Tensor, input: Tensor, grid: Tensor, *_: Any) -> None:
    fits = grad_output.dim() == input.dim() == grid.dim() and grid.shape[0] == input.shape[0]
    if not fits or grad_output.shape != (*input.shape[:2], *grid.shape[1:-1]) or grid.shape[-1] != grid.dim() - 2:
        _refuse("the gradient is not one of these operands", grad_output, input, grid)


def _checked(check: Callable[..., None], kernel: Callable[..., Any], *operands: Any, **named: Any) -> Any:
    check(*operands, **named)
    return kernel(*operands, **named)


_CHECKS: Final[Mapping[str, Callable[..., None]]] = {
    "_adaptive_avg_pool2d_backward": partial(_adaptive_backward, 2),
    "_adaptive_avg_pool3d_backward": partial(_adaptive_backward, 3),
    "_embedding_bag": _embedding_bag,
    "_embedding_bag_backward": _embedding_bag_backward,
    "_embedding_bag_forward_only": _embedding_bag,
    "_embedding_bag_per_sample_weights_backward": _embedding_bag_weights_backward,
    "_fft_c2c": _transformed,
    "_fft_c2r": _transformed_back,
    "_fft_r2c": _transformed,
    "_log_softmax_backward_data": _softmax_backward,
    "_native_batch_norm_legit": _batch_norm,
    "_softmax_backward_data": _softmax_backward,
    "_upsample_bilinear2d_aa": _resized,
    "_upsample_bilinear2d_aa_backward": _resized_backward,
    "_weight_norm_interface": _weight_norm,
    "_weight_norm_interface_backward": _weight_norm_backward,
    "adaptive_max_pool2d_backward": partial(_adaptive_max_pool_backward, 2),
    "adaptive_max_pool3d_backward": partial(_adaptive_max_pool_backward, 3),
    "avg_pool2d_backward": partial(_like_forward, "aten.avg_pool2d.default"),
    "avg_pool3d_backward": partial(_like_forward, "aten.avg_pool3d.default"),
    "gelu_backward": _elementwise_backward,
    "grid_sampler_2d_backward": _sampled_backward,
    "grid_sampler_3d_backward": _sampled_backward,
    "max_pool2d_with_indices_backward": partial(_max_pool_backward, "aten.max_pool2d_with_indices.default", 2),
    "max_pool3d_with_indices_backward": partial(_max_pool_backward, "aten.max_pool3d_with_indices.default", 3),
    "native_batch_norm": _batch_norm,
    "native_batch_norm_backward": _batch_norm_backward,
    "native_group_norm_backward": _group_norm_backward,
    "native_layer_norm_backward": _layer_norm_backward,
    "nll_loss_backward": _nll_loss_backward,
    **{
        f"{kind}_pad{n}d_backward": partial(_like_forward, f"aten.{kind}_pad{n}d.default")
        for kind in ("reflection", "replication")
        for n in (1, 2, 3)
    },
}

CHECKED: Final[Mapping[str, Callable[..., Any]]] = {
    f"aten.{name}.default": partial(_checked, check, overload(f"aten.{name}.default")._op)
    for name, check in _CHECKS.items()
}
"""Torch's types whose operands are checked, and what checks and then calls them."""


def check_dense(lists: Sequence[Sequence[Tensor]]) -> None:
    """What torch's fused optimizers take for granted: the tensors of a parameter, one of each list, have its elements'
    number and type, and lie in memory without gaps.

    Raises:
        ValueError: they do not.
    """
    for tensors in zip(*lists, strict=False):
        count, dtype = tensors[0].numel(), tensors[0].dtype
        for tensor in tensors:
            if tensor.numel() != count or tensor.dtype != dtype:
                _refuse("a parameter, its gradient and its state have other elements", *tensors)
            if not tensor.is_contiguous() and not torch.ops.aten.is_non_overlapping_and_dense(tensor):
                _refuse(f"a tensor with the strides {list(tensor.stride())} has gaps, or shows an element twice")


def check_lookups(indices: Tensor, least: int, end: int | None) -> None:
    """Indices are from *least* up to, not including, *end*, where that is known; on CUDA nobody looks.

    Raises:
        IndexError: one is not.
    """
    check_within(indices, least, torch.iinfo(indices.dtype).max if end is None else end, "the index")


def check_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *results: Tensor) -> None:
    """Attention's operands fit each other; of the backward's *results*, the last is the logsumexp, and the others have
    the shape of the query.

    Raises:
        ValueError: they do not.
    """
    fits = query.dim() == key.dim() == 4 and key.shape == value.shape
    fits = fits and (query.shape[0], query.shape[3]) == (key.shape[0], key.shape[3])
    if not fits or not key.shape[1] or query.shape[1] % key.shape[1] or not query.dtype == key.dtype == value.dtype:
        _refuse("query, key and value are [batch, heads, sequence, size], not", query, key, value)
    scores = (*query.shape[:3], key.shape[2])
    if mask is not None:
        ours = mask.shape
        if len(ours) > 4 or any(m not in (1, s) for m, s in zip(ours[::-1], scores[::-1], strict=False)):
            _refuse(f"the mask is not one of {list(scores)}", mask)
    for result in results[:-1]:
        _equal(result, query)
    if results and results[-1].shape != query.shape[:3]:
        _refuse("the logsumexp is not one of the query", results[-1], query)
