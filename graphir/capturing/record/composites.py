"""Operators that torch runs as other ones where a gradient may be needed.

Singular values and eigenvalues are then computed together with their vectors, else alone, and the two round
differently. While a dispatch mode is active, torch takes every tensor for one that may need a gradient. So where one of
graphir's is, torch's functions say whether eager PyTorch computes values alone. Where another one asked, and nothing
reads its vectors, nobody knows: a capture refuses that.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch.autograd import forward_ad

from ...errors import CaptureError
from ..isolate.patches import replaced
from ..words.places import where
from .seeds import active_ids
from .values import Call

__all__ = [
    "VALUES_AND_VECTORS",
    "ValuesAlone",
    "is_ambiguous",
    "refuse_unread_vectors",
    "values_alone_asked",
    "values_alone_of",
]

_aten: Final = torch.ops.aten


class ValuesAlone(NamedTuple):
    """What computes the values of a matrix alone, in the place of what computes vectors too.

    Attributes:
        func: the operator.
        taken: how many of the other one's arguments it takes.
        position: that of the values among the other one's results.
        results: how many these are.
    """

    func: Any
    taken: int
    position: int
    results: int


VALUES_AND_VECTORS: Final[Mapping[Any, ValuesAlone]] = {
    _aten._linalg_svd.default: ValuesAlone(_aten.linalg_svdvals.default, 1, 1, 3),
    _aten._linalg_eigh.default: ValuesAlone(_aten.linalg_eigvalsh.default, 2, 0, 2),
    _aten.linalg_eig.default: ValuesAlone(_aten.linalg_eigvals.default, 1, 0, 2),
}
"""Operators that compute vectors too."""

_ALONE: Final[Mapping[Any, Sequence[str]]] = {
    torch.linalg: ("svdvals", "eigvalsh", "eigvals", "norm", "matrix_norm", "cond", "matrix_rank"),
    torch: ("norm", "nuclear_norm"),
    torch.Tensor: ("norm",),
}
_TOGETHER: Final[Mapping[Any, Sequence[str]]] = {torch.linalg: ("svd", "eigh", "eig", "pinv")}
_asked: Final = threading.local()
"""``alone``: see :func:`_asked_alone`."""


@contextlib.contextmanager
def values_alone_asked(applies: Callable[[object], bool] | None = None) -> Iterator[None]:
    """While this is active, torch's functions say whether they want values alone, where one of graphir's modes is.

    Args:
        applies: says whether one is, as :func:`replaced` takes it; by default, whether a mode has seed ids.
    """

    def has_ids(instance: object) -> bool:
        return active_ids() is not None

    applies = applies or has_ids
    with contextlib.ExitStack() as stack:
        for table, alone in ((_ALONE, True), (_TOGETHER, False)):
            for owner, names in table.items():
                asking = {name: _asking(getattr(owner, name), alone) for name in names}
                stack.enter_context(replaced(owner, asking, applies))
        stack.enter_context(replaced(torch, {"svd": _svd(torch.svd)}, applies))
        stack.enter_context(replaced(torch.Tensor, {"svd": _svd(torch.Tensor.svd)}, applies))
        yield


def _asking(function: Callable[..., Any], alone: bool) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        before = _asked_alone()
        _asked.alone = alone and not any(map(_may_need_gradient, (*args, *kwargs.values())))
        try:
            return function(*args, **kwargs)
        finally:
            _asked.alone = before

    return call


def _svd(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(input: torch.Tensor, some: bool = True, compute_uv: bool = True, **kwargs: Any) -> Any:
        return _asking(function, not compute_uv)(input, some, compute_uv, **kwargs)

    return call


def _asked_alone() -> bool | None:
    """Whether the function of torch that runs computes values alone; None where it is not known."""
    return getattr(_asked, "alone", None)


def values_alone_of(func: Any) -> ValuesAlone | None:
    """What to run in the place of *func*, if eager PyTorch would."""
    return VALUES_AND_VECTORS.get(func) if _asked_alone() else None


def is_ambiguous(func: Any, args: Sequence[Any]) -> bool:
    """Whether *func* may have been asked for values alone."""
    if func not in VALUES_AND_VECTORS or _asked_alone() is not None:
        return False
    if torch.is_grad_enabled() and args[0].requires_grad:
        return False
    return not (func is _aten._linalg_svd.default and len(args) > 1 and args[1])  # svdvals asks for no full matrices


def refuse_unread_vectors(asked: Sequence[Call], read: frozenset[int]) -> None:
    """Raise where vectors that an ambiguous call makes are not read.

    Args:
        asked: the calls.
        read: the ``id`` of each value that something reads.

    Raises:
        CaptureError: names the line.
    """
    for call in asked:
        position = 1 if len(call.outputs) == 3 else 0
        if not any(id(value) in read for i, value in enumerate(call.outputs) if i != position):
            raise CaptureError(
                f"{call.type} makes vectors that nothing reads, and eager PyTorch may compute the values alone, which "
                "rounds otherwise",
                where=where(call.scope, call.line),
                fix="call it as torch.linalg.svdvals, eigvalsh, eigvals, svd, eigh or eig, not by a name of its own",
            )


def _may_need_gradient(tensor: object) -> bool:
    """What torch asks, but for modes; within a transform of ``torch.func`` every tensor may.

    Source: ``_may_require_fw_or_bw_grad`` in aten/src/ATen/native/LinearAlgebraUtils.h.
    """
    return isinstance(tensor, torch.Tensor) and (
        (torch.is_grad_enabled() and tensor.requires_grad)
        or forward_ad.unpack_dual(tensor).tangent is not None
        or torch._C._functorch.peek_interpreter_stack() is not None
    )
