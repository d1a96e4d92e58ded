"""Kernels of attention: on the CPU eager PyTorch's own, bit for bit; on CUDA the one that fits the operands.

All of them compute ``softmax(query @ key.T * scale + mask) @ value`` and hand on one form of its result, whatever the
device: the output, laid out as the query is, and for each query the logarithm of the sum of the exponentials of its
scores (0 where a mask leaves it no key). From these any backward kernel finds the weights again.

::

    host        every type of tensor on the CPU
    flash       f16, bf16 on CUDA without a mask
    efficient   f16, bf16, f32 on CUDA, also with a mask
    math        the rest: f64, odd head sizes, other devices; it keeps all scores in memory at once

A backward on CUDA adds in one order. The efficient kernel is told so by an argument. Flash's asks whether the process
refuses what has no fixed order (``torch.use_deterministic_algorithms(True)``); setting that for its sake would make
operators of other threads raise. So flash's backward is taken where the program itself has set it, and else the
efficient one.

Source: ``scaled_dot_product_attention`` in aten/src/ATen/native/transformers/attention.cpp, which arranges operands for
the same kernels: heads padded to multiples of 8, masks to rows of 16 elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention

from .bounds import check_attention
from .repeatable import refuses_others

__all__ = ["ATTENTION", "KERNELS", "Kernel", "attention", "attention_backward", "choose"]

_aten: Final = torch.ops.aten

Forward: TypeAlias = Callable[[Tensor, Tensor, Tensor, "Tensor | None", bool, float], "tuple[Tensor, Tensor]"]
Backward: TypeAlias = Callable[..., "tuple[Tensor, Tensor, Tensor]"]


class Kernel(NamedTuple):
    """A forward kernel, of query, key, value, mask, is_causal and scale, and its backward, which takes the gradient,
    the same operands, and the forward's results."""

    forward: Forward
    backward: Backward


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The output and the logarithms of the sums of exponentials.

    Args:
        query: ``[batch, heads, queries, size]``.
        key: ``[batch, key heads, keys, size]``; each of its heads serves ``heads / key heads`` of the query's.
        value: as the key.
        attn_mask: added to the scores; broadcast to ``[batch, heads, queries, keys]``.
        is_causal: query i sees keys 0 … i only.
        scale: of the scores; by default ``size ** -0.5``.
    """
    check_attention(query, key, value, attn_mask)
    kernel = KERNELS[choose(query, key, value, attn_mask, is_causal)]
    return kernel.forward(query, key, value, attn_mask, is_causal, _scale(query, scale))


def attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    attn_mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value, in memory in the order batch, sequence, heads, size."""
    check_attention(query, key, value, attn_mask, grad_out, out, logsumexp)
    kernel = KERNELS[choose(query, key, value, attn_mask, is_causal)]
    results = out, logsumexp
    return kernel.backward(grad_out, query, key, value, attn_mask, is_causal, _scale(query, scale), *results)


def _scale(query: Tensor, scale: float | None) -> float:
    return 1 / math.sqrt(query.size(-1)) if scale is None else scale


def choose(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, is_causal: bool) -> str:
    """The name of the kernel for these operands: the same for a forward and its backward."""
    if query.device.type == "cpu":
        return "host"
    if query.device.type == "cuda":
        grouped = query.size(1) != key.size(1)
        # Some GPUs have no flash backward beyond this size of a head.
        if query.size(-1) <= 192 and can_use_flash_attention(
            SDPAParams(query, key, value, attn_mask, 0.0, is_causal, grouped)
        ):
            return "flash"
        key, value = _spread(query, key, value)
        mask = _aligned(attn_mask, query, key)
        if can_use_efficient_attention(SDPAParams(query, key, value, mask, 0.0, is_causal, False)):
            return "efficient"
    return "math"


def _host(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = _aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, attn_mask=mask, scale=scale
    )
    return found


def _host_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
    out: Tensor,
    logsumexp: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    found: tuple[Tensor, Tensor, Tensor] = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, query, key, value, out, logsumexp, 0.0, is_causal, attn_mask=mask, scale=scale
    )
    return found


def _flash(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    padded = [_padded(tensor) for tensor in (query, key, value)]
    out, logsumexp, *_ = _aten._scaled_dot_product_flash_attention(*padded, 0.0, is_causal, False, scale=scale)
    return _like(query, out[..., : query.size(-1)]), logsumexp


def _flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
    out: Tensor,
    logsumexp: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    padded = [_padded(tensor) for tensor in (grad_out, query, key, value, out)]
    if refuses_others():
        # What seeds its dropout, of which there is none, has to be there nevertheless.
        seed = torch.empty(2, dtype=torch.uint64, device=query.device)
        offset = torch.empty((), dtype=torch.uint64, device=query.device)
        lengths = None, None, query.size(2), key.size(2)
        grads = _aten._scaled_dot_product_flash_attention_backward(
            *padded, logsumexp.contiguous(), *lengths, 0.0, is_causal, seed, offset, scale=scale
        )
    else:
        grad, query_, key_, value_, out_ = padded
        grads = _efficient_backward(grad, query_, key_, value_, mask, is_causal, scale, out_, logsumexp)
    return _by_sequence(*[grad[..., : query.size(-1)] for grad in grads])


def _padded(tensor: Tensor) -> Tensor:
    """Heads of the next multiple of 8 elements: zeros add nothing to any product."""
    return F.pad(tensor, (0, -tensor.size(-1) % 8)) if tensor.size(-1) % 8 else tensor


_LSE_ROW: Final = 32
"""The efficient kernels keep the sums of exponentials in rows of multiples of this."""


def _efficient(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    keys, values = _spread(query, key, value)
    bias = _aligned(mask, query, keys)
    out, logsumexp, *_ = _aten._scaled_dot_product_efficient_attention(
        query, keys, values, bias, True, 0.0, is_causal, scale=scale
    )
    return _like(query, out), logsumexp[..., : query.size(2)].contiguous()


def _efficient_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
    out: Tensor,
    logsumexp: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    keys, values = _spread(query, key, value)
    bias = _aligned(mask, query, keys)
    # The forward kernel fills the rest of a row with infinity, so that weights there are 0.
    rows = F.pad(logsumexp, (0, -query.size(2) % _LSE_ROW), value=math.inf).contiguous()
    grad_out = grad_out if grad_out.stride(-1) == 1 else grad_out.contiguous()
    given = grad_out, query, keys, values, out, rows, bias
    launches = zip(*[_launches(tensor, query.size(0)) for tensor in given], strict=True)
    found = [_in_one_order(*tensors, is_causal=is_causal, scale=scale) for tensors in launches]
    grads = found[0] if len(found) == 1 else [torch.cat(parts) for parts in zip(*found, strict=True)]
    return _by_sequence(grads[0], _gathered(grads[1], key), _gathered(grads[2], value))


_MOST_BATCH: Final = 2**16 - 1
"""The largest batch of one launch."""


def _launches(tensor: Tensor | None, batch: int) -> Sequence[Any]:
    return [None] * max(1, math.ceil(batch / _MOST_BATCH)) if tensor is None else tensor.split(_MOST_BATCH)


def _in_one_order(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    rows: Tensor,
    bias: Tensor | None,
    *,
    is_causal: bool,
    scale: float,
) -> Sequence[Tensor]:
    """The gradients of query, key and value. Keys are not split into blocks, whose parts would be added in the order in
    which they are done. Torch's operator on top of this one has no argument for that.

    In half precision the kernel reads *out* as if it were dense in the order batch, sequence, heads, size, whatever its
    strides are (``o_strideM`` in aten/src/ATen/native/transformers/cuda/mem_eff_attention/kernel_backward.h).
    """
    grad_out, query, key, value, out = (tensor.transpose(1, 2) for tensor in (grad_out, query, key, value, out))
    out = out.contiguous()
    seed = torch.empty((), dtype=torch.int64, device=query.device)
    lengths = None, None, query.size(1), key.size(1)
    *grads, _ = _aten._efficient_attention_backward(
        *(grad_out, query, key, value, bias, out, *lengths, rows, 0.0, seed, seed, int(is_causal), False),
        scale=scale,
        num_splits_key=1,
    )
    return [grad.transpose(1, 2) for grad in grads]


def _spread(query: Tensor, *tensors: Tensor) -> list[Tensor]:
    """Keys and values with a head for each of the query's."""
    return [
        tensor if tensor.size(1) == query.size(1) else tensor.repeat_interleave(query.size(1) // tensor.size(1), 1)
        for tensor in tensors
    ]


def _gathered(grad: Tensor, like: Tensor) -> Tensor:
    """The gradient of what :func:`_spread` has spread."""
    return grad if grad.size(1) == like.size(1) else grad.unflatten(1, (like.size(1), -1)).sum(2)


def _aligned(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """The mask for each query and key, in rows of multiples of 16 elements."""
    if mask is None:
        return None
    keys = key.size(2)
    rows = F.pad(mask.to(query.dtype).expand(*mask.shape[:-1], keys), (0, -keys % 16))[..., :keys]
    return rows.expand(*query.shape[:3], keys)


def _math(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    query_, keys, values = _wide(query, key, value)
    scores = _scores(query_, keys, mask, is_causal, scale)
    logsumexp = scores.logsumexp(-1)
    logsumexp = logsumexp.masked_fill_(logsumexp == -math.inf, 0.0)
    weights = scores.sub_(logsumexp.unsqueeze(-1)).exp_()
    return _like(query, (weights @ values).to(query.dtype)), logsumexp


def _math_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
    out: Tensor,
    logsumexp: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    grad, out_ = grad_out.to(logsumexp.dtype), out.to(logsumexp.dtype)
    query_, keys, values = _wide(query, key, value)
    weights = _scores(query_, keys, mask, is_causal, scale).sub_(logsumexp.unsqueeze(-1)).exp_()
    grad_weights = grad @ values.mT
    grad_scores = grad_weights.sub_((grad * out_).sum(-1, keepdim=True)).mul_(weights).mul_(scale)
    grads = (
        (grad_scores @ keys).to(query.dtype),
        _gathered(grad_scores.mT @ query_, key).to(key.dtype),
        _gathered(weights.mT @ grad, value).to(value.dtype),
    )
    return _by_sequence(*grads)


def _wide(query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """Operands with a key and a value for each head, f16 and bf16 as f32."""
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    return [tensor.to(dtype) for tensor in (query, *_spread(query, key, value))]


def _scores(query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    scores = (query @ key.mT).mul_(scale)
    if mask is not None:
        scores.add_(mask)
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(1)
        scores.masked_fill_(hidden, -math.inf)
    return scores


def _like(model: Tensor, tensor: Tensor) -> Tensor:
    """*tensor* in the layout that ``empty_like(model)`` has."""
    wanted = torch.empty_like(model)
    return tensor if tensor.stride() == wanted.stride() else wanted.copy_(tensor)


def _by_sequence(*grads: Tensor) -> tuple[Any, ...]:
    """Gradients of ``[batch, heads, sequence, size]`` in memory in the order batch, sequence, heads, size."""
    return tuple([grad.transpose(1, 2).contiguous().transpose(1, 2) for grad in grads])


KERNELS: Final[Mapping[str, Kernel]] = {
    "host": Kernel(_host, _host_backward),
    "flash": Kernel(_flash, _flash_backward),
    "efficient": Kernel(_efficient, _efficient_backward),
    "math": Kernel(_math, _math_backward),
}
"""By the names that :func:`choose` gives."""

ATTENTION: Final[Mapping[str, Callable[..., Any]]] = {
    "graphir.attention": attention,
    "graphir.attention_backward": attention_backward,
}
"""The types, and what runs them on any device."""
