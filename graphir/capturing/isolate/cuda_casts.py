"""The casts of CUDA's autocast on tensors of the host, with a GPU and without.

torch has these casts as kernels of a dispatch key. Every build of torch has the kernels, but only tensors on CUDA
devices reach them. So the thread that records includes another autocast key in its dispatch: the own key, which no
tensor has. The kernels of the own key call CUDA's kernels on stand-ins, and find out which casts these make. The casts
are then made above autograd, as CUDA's are. Composite operators are opened where CUDA's autocast opens them. ::

    linear(x f32, w f32) ──▶ kernel of the own key ──asks──▶ AutocastCUDA: linear(stand-ins on cuda:0, no gradients)
                                │        ▲                        │ casts them, calls linear below itself
                                │        └──── the answer ────────┘ where the own key's kernel is next
                                ▼
              linear(x.to(bf16), w.to(bf16)), with the own key excluded ──▶ autograd ──▶ the recorder
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from functools import cache, partial
from typing import Any, Final, NamedTuple

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from ...errors import CaptureError
from ...ir.meta import fresh_fake_mode
from ...process import Setting, held

__all__ = ["CUDA", "CastWeights", "casts_included", "casts_lent", "has_kernel", "opens_cells"]

_C: Final[Any] = torch._C
_aten: Final = torch.ops.aten
CUDA: Final = "AutocastCUDA"
"""The dispatch key of CUDA's autocast."""
_KEYS: Final = ("AutocastIPU", "AutocastHPU")
"""Autocast keys of a lower priority than CUDA's. Their backends bring kernels in packages of their own."""
_RECURRENT: Final = tuple(
    [
        getattr(getattr(_aten, name), kind)
        for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")
        for kind in ("input", "data")
    ]
)
"""Recurrent operators. CUDA runs each as one operator of cuDNN or as a chain of cells, and casts all floating operands
either way."""
_ONEDNN: Final = Setting("oneDNN", lambda: torch.backends.mkldnn.enabled, _C._set_mkldnn_enabled)
"""With oneDNN the host may compute an LSTM by one kernel, which CUDA does not have."""
_NORMS: Final = ("aten::norm.ScalarOpt_dtype", "aten::norm.ScalarOpt_dim_dtype")
_local: Final = threading.local()
"""``weights``: see :func:`casts_lent`; ``asks``: whether the thread is asking CUDA's kernels; ``opens``: see
:func:`opens_cells`."""


class CastWeights:
    """The casts of weights in the present region of autocast, one for each weight, as in autocast's own cache."""

    def __init__(self) -> None:
        self._casts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def clear(self) -> None:
        """Forget the casts: the outermost region has ended."""
        self._casts = {}

    def cast(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """*tensor* as *dtype*; casts of weights are cached.

        The cache goes by the tensor alone, and a cached cast has gradients even if gradients are off when it is made.
        Source: ``cached_cast`` in aten/src/ATen/autocast_mode.cpp.
        """
        cached = (
            dtype == torch.get_autocast_dtype("cuda")
            and torch.is_autocast_cache_enabled()
            and tensor.dtype == torch.float32
            and tensor.requires_grad
            and tensor.is_leaf
            and not tensor._is_view()
        )
        if not cached:
            return _aten.to.dtype(tensor, dtype)  # type: ignore[no-any-return]
        if id(tensor) not in self._casts:
            with torch.enable_grad():
                self._casts[id(tensor)] = tensor, _aten.to.dtype(tensor, dtype)
        return self._casts[id(tensor)][1]


class _Casts(NamedTuple):
    """What CUDA's autocast makes of a call.

    Attributes:
        func: the operator that autocast calls; for a norm, another overload.
        dtypes: the element type that each tensor is cast to, in order; None where the tensor stays as it is.
        added: arguments that autocast adds, such as the element type of a sum.
    """

    func: Any
    dtypes: tuple[torch.dtype | None, ...]
    added: Mapping[str, Any]


class _Answer(Exception):
    """The call that reaches the own key's kernel while CUDA's kernel is asked."""

    def __init__(self, func: Any, given: Mapping[str, Any]) -> None:
        super().__init__()
        self.func, self.given = func, given


@contextlib.contextmanager
def casts_lent(weights: CastWeights) -> Iterator[None]:
    """While this is active, the casts of this thread are kept in *weights*; at the end casts are excluded."""
    before = getattr(_local, "weights", None)
    _local.weights = weights
    try:
        yield
    finally:
        _local.weights = before
        casts_included(False)


def opens_cells() -> bool:
    """Whether a recurrent operator runs as its cells, whatever kernel the host has for it."""
    return getattr(_local, "opens", False)


def casts_included(included: bool) -> None:
    """Cast what this thread calls as CUDA's autocast does, from now on; or stop."""
    if not included and not _own_key.cache_info().currsize:
        return
    key = _own_key()
    _C._dispatch_tls_set_dispatch_key_included(key, included)
    _C._dispatch_tls_set_dispatch_key_excluded(key, not included)


@cache
def _own_key() -> Any:
    """The dispatch key of the kernels that ask CUDA's. They are registered once: other threads do not reach them."""
    free = [name for name in _KEYS if hasattr(_C.DispatchKey, name) and not has_kernel("aten::mm", name)]
    if not free:
        raise CaptureError(
            "capture records autocast for CUDA by a dispatch key that no tensor has, but backends of torch use "
            f"{' and '.join(_KEYS)}",
            fix='capture in a process that does not import these backends, or with target="cpu", which records no '
            "casts for CUDA",
        )
    name = free[0]
    _keep("_").fallback(torch.library.fallthrough_kernel, name)
    library = _keep("aten")
    for func in (*_asked_operators(), *_RECURRENT):
        library.impl(func, partial(_kernel, func), name)
    return getattr(_C.DispatchKey, name)


@cache
def _keep(namespace: str) -> torch.library.Library:
    return torch.library.Library(namespace, "IMPL")  # kernels live as long as their library


def has_kernel(name: str, key: str) -> bool:
    """Whether an operator, such as ``aten::mm``, has a kernel of its own for a dispatch key."""
    return bool(_C._dispatch_has_kernel_for_dispatch_key(name, key))


def _asked_operators() -> Iterator[Any]:
    """The operators that CUDA's autocast has kernels of, and the overloads of norms with which it answers."""
    for name in _C._dispatch_get_all_op_names():
        if name.startswith("aten::") and (has_kernel(name, CUDA) or name in _NORMS):
            packet, _, overload = name.removeprefix("aten::").partition(".")
            yield getattr(getattr(_aten, packet), overload or "default")


def _kernel(func: Any, *args: Any, **kwargs: Any) -> Any:
    given = {p.name: value for p, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    if getattr(_local, "asks", False):
        raise _Answer(func, given)
    casts = _casts_of(func, given)
    weights: CastWeights = getattr(_local, "weights", None) or CastWeights()
    leaves, structure = pytree.tree_flatten(given)
    wanted = iter(casts.dtypes)
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor) and (dtype := next(wanted)) is not None:
            leaves[i] = weights.cast(leaf, dtype)
    cast = {**pytree.tree_unflatten(leaves, structure), **casts.added}
    with _C._ExcludeDispatchKeyGuard(_C.DispatchKeySet(_own_key())):
        if func not in _RECURRENT:
            return casts.func(**cast)
        _local.opens = True
        try:
            with held({_ONEDNN: False}):
                return casts.func(**cast)
        finally:
            _local.opens = False


_known: Final[dict[object, _Casts]] = {}


def _casts_of(func: Any, given: Mapping[str, Any]) -> _Casts:
    """What CUDA's autocast makes of a call, which follows from the element types alone."""
    lower = torch.get_autocast_dtype("cuda")
    kinds = tuple([(name, *map(_kind, pytree.tree_leaves(value))) for name, value in given.items()])
    key = func, lower, kinds
    if key not in _known:
        if not lower.is_floating_point:
            raise CaptureError(
                f"the step is under autocast with dtype={lower}, to which no operator can cast on CUDA",
                fix="pass dtype=torch.bfloat16 or torch.float16 to torch.autocast",
            )
        recurrent = func in _RECURRENT
        _known[key] = _recurrent_casts(func, given, lower) if recurrent else _asked_casts(func, given)
    return _known[key]


def _kind(leaf: Any) -> object:
    """The part of an argument that autocast looks at."""
    if isinstance(leaf, torch.Tensor):
        return torch.Tensor, leaf.dtype
    return leaf if isinstance(leaf, torch.dtype) or leaf is None else type(leaf)


def _recurrent_casts(func: Any, given: Mapping[str, Any], lower: torch.dtype) -> _Casts:
    leaves = [leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, torch.Tensor)]
    cast = [leaf.is_floating_point() and leaf.dtype not in (torch.float64, lower) for leaf in leaves]
    return _Casts(func, tuple([lower if is_cast else None for is_cast in cast]), {})


def _asked_casts(func: Any, given: Mapping[str, Any]) -> _Casts:
    """Ask CUDA's kernel, with stand-ins of the tensors."""
    asked = pytree.tree_map_only(torch.Tensor, lambda tensor: _stand_in(tensor.dtype), dict(given))
    _local.asks = True
    try:
        with _disable_current_modes():
            func(**asked)
    except _Answer as answer:
        before = [leaf for leaf in pytree.tree_leaves(asked) if isinstance(leaf, torch.Tensor)]
        after = [leaf for leaf in pytree.tree_leaves(answer.given) if isinstance(leaf, torch.Tensor)]
        pairs = zip(before, after, strict=True)
        dtypes = tuple([None if one.dtype == other.dtype else other.dtype for one, other in pairs])
        others = {name: value for name, value in answer.given.items() if not _has_tensors(value)}
        added = {name: value for name, value in others.items() if asked.get(name) is None and value is not None}
        return _Casts(answer.func, dtypes, added)
    finally:
        _local.asks = False
    raise AssertionError(f"{CUDA} of {func} calls an operator that was not asked")


def _has_tensors(value: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(value))


@cache
def _stand_in(dtype: torch.dtype) -> torch.Tensor:
    """A fake tensor on a CUDA device, without gradient: with a gradient, a build without CUDA ends the process."""
    with _disable_current_modes(), torch.inference_mode(False), fresh_fake_mode():
        return torch.empty(0, dtype=dtype, device="cuda")
