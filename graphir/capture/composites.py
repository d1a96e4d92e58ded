"""Operators that torch runs as other ones where a gradient may be needed.

Singular values and eigenvalues are then computed together with their vectors, else alone, and the two round
differently. While a dispatch mode is active, torch takes every tensor for one that may need a gradient.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch.autograd import forward_ad

__all__ = ["composed_as_unwatched"]

_aten: Final = torch.ops.aten
_VALUES: Final = (_aten.linalg_svdvals.default, _aten.linalg_eigvalsh.default, _aten.linalg_eigvals.default)
"""Norms, ranks and condition numbers call them."""
_KEYS: Final = ("AutogradCPU", "AutogradCUDA")

_lock = threading.Lock()
_users: list[torch.library.Library] = []


@contextlib.contextmanager
def composed_as_unwatched() -> Iterator[None]:
    """While this is active, dispatch modes see such operators whole where the tensor itself needs no gradient.

    So their bits are those of eager PyTorch without a mode. Contexts within each other, or in several threads, share
    what is registered with torch.
    """
    with _lock:
        _users.append(_registered() if not _users else _users[0])
    try:
        yield
    finally:
        with _lock:
            library = _users.pop()
            if not _users:
                library._destroy()


def _registered() -> torch.library.Library:
    library = torch.library.Library("aten", "IMPL")
    for func in _VALUES:
        for key in _KEYS:
            library.impl(func, _kernel(func), key)
    return library


def _kernel(func: torch._ops.OpOverload) -> Callable[..., torch.Tensor]:
    def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if _may_need_gradient(tensor):
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
