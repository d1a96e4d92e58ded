"""Operators that torch runs as other ones where a gradient may be needed.

Singular values and eigenvalues are then computed together with their vectors, else alone, and the two round
differently. While a dispatch mode is active, torch takes every tensor for one that may need a gradient. So graphir's
modes are shown such operators whole where the tensor itself needs none, by kernels that do what torch's do for
everybody else.

They are registered once, when graphir is imported, and stay. Torch's dispatcher reads an operator's kernels without a
lock: a thread that computes singular values while kernels come or go may call one that is no more, which ends the
process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch.autograd import forward_ad

from .randomness import active_ids

__all__ = ["register"]

_aten: Final = torch.ops.aten
_VALUES: Final = (_aten.linalg_svdvals.default, _aten.linalg_eigvalsh.default, _aten.linalg_eigvals.default)
"""Norms, ranks and condition numbers call them."""
_KEYS: Final = ("AutogradCPU", "AutogradCUDA")


def register() -> torch.library.Library:
    """Register the kernels with torch, for as long as what is returned lives."""
    library = torch.library.Library("aten", "IMPL")
    for func in _VALUES:
        for key in _KEYS:
            library.impl(func, _kernel(func), key)
    return library


def _kernel(func: torch._ops.OpOverload) -> Callable[..., torch.Tensor]:
    def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if active_ids() is None or _may_need_gradient(tensor):  # graphir's modes have seed ids
            return func.decompose(tensor, *args, **kwargs)  # type: ignore[no-any-return]
        with torch._C._AutoDispatchBelowAutograd():
            return func(tensor, *args, **kwargs)  # type: ignore[no-any-return]

    return call


def _may_need_gradient(tensor: torch.Tensor) -> bool:
    """What torch asks, but for modes.

    Source: ``_may_require_fw_or_bw_grad`` in aten/src/ATen/native/LinearAlgebraUtils.h.
    """
    return (
        (torch.is_grad_enabled() and tensor.requires_grad)
        or forward_ad.unpack_dual(tensor).tangent is not None
        or torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )
