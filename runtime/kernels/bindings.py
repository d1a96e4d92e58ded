"""The fastest Python callable that runs a torch operator.

``torch.ops.aten.mm.default`` spends about as long on finding its kernel as a small kernel takes. Where torch's own
Python functions and methods parse the same arguments to the same operator, they are called instead; the tests hold
every entry of the table against the operator itself. All others go through the overload's inner callable.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

from graphir.ir.opset import overload

from .attention import ATTENTION
from .batch_norm import BATCH_NORM
from .blocks import BLOCKS
from .bounds import CHECKED
from .communication import scale
from .ctc import CTC
from .losses import LOSSES
from .repeatable import REPEATABLE
from .sparse import SPARSE

__all__ = ["FAST", "OWN_KERNELS", "fastest", "view"]

_CALLABLES: Final = {
    torch._C._VariableFunctions: """
        _adaptive_avg_pool2d.default _log_softmax.default  _softmax.default
        add.Tensor addmm.default bmm.default cat.default clone.default
        convolution.default cos.default div.Scalar div.Tensor embedding.default empty_like.default eq.Scalar eq.Tensor
        exp.default full.default full_like.default ge.Scalar gt.Scalar le.Scalar log.default lt.Scalar
        masked_fill.Scalar masked_fill.Tensor maximum.default mean.default mean.dim minimum.default mm.default
        mul.Scalar mul.Tensor native_layer_norm.default ne.Scalar neg.default
        ones_like.default pow.Tensor_Scalar reciprocal.default rsqrt.default sigmoid.default sin.default split.Tensor
        sqrt.default stack.default sub.Tensor sum.default sum.dim_IntList tanh.default where.self zeros_like.default
    """,
    torch._C._nn: "avg_pool2d.default gelu.default max_pool2d_with_indices.default silu.default",
    torch.Tensor: """
        add_.Tensor expand.default mul_.Tensor permute.default relu.default relu_.default select.int squeeze.dim
        sub_.Tensor t.default transpose.int unsqueeze.default
    """,
}


def _table() -> dict[str, Callable[..., Any]]:
    found = {}
    for holder, names in _CALLABLES.items():
        for name in names.split():
            function = getattr(holder, name.partition(".")[0], None)
            if function is not None:
                found[f"aten.{name}"] = function
    return found


def view(tensor: Tensor, size: Sequence[int]) -> Tensor:
    """``tensor.view(size)``, or a copy in that shape where its strides do not allow one.

    A convolution's backend chooses its layout, so that of another machine or torch may be other than the captured one.
    Where that makes a recorded view impossible, eager PyTorch, whose ``reshape`` asks the real tensor, makes a copy.
    """
    try:
        return tensor.view(size)
    except RuntimeError:
        return tensor.reshape(size)


FAST: Final[dict[str, Callable[..., Any]]] = {**_table(), "aten.view.default": view}
"""For each of these types, a callable that takes the schema's arguments in the schema's order and is faster."""


OWN_KERNELS: Final[Mapping[str, Callable[..., Any]]] = {
    **ATTENTION,
    **BATCH_NORM,
    **BLOCKS,
    **CHECKED,
    **CTC,
    **LOSSES,
    **SPARSE,
    **REPEATABLE,
    "graphir.scale": scale,
}
"""Kernels of graphir's own types that compute values from values, and of torch's that are not called as they are."""


@cache
def fastest(type: str) -> Callable[..., Any]:
    """The callable for an operator type of torch's, or one of :data:`OWN_KERNELS`.

    Raises:
        GraphirError: the type is not of an allowed namespace, or this torch does not have it.
    """
    found = OWN_KERNELS.get(type) or FAST.get(type)
    return overload(type)._op if found is None else found
