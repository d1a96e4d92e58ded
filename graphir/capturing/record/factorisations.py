"""Singular values and eigenvalues: torch computes vectors too if a gradient may be needed, else the values alone.

The two computations round differently. While a dispatch mode is active, torch treats every tensor as one that may need
a gradient. So the recorder always sees vectors. A step for which eager PyTorch would compute no vectors is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch.autograd import forward_ad

from ...errors import CaptureError
from ..isolate.functions import Handlers
from ..words.places import where

__all__ = ["ALONE", "Factorisations"]

_aten: Final = torch.ops.aten
_VALUES: Final[Mapping[Any, tuple[str, str]]] = {
    _aten._linalg_svd.default: ("singular values", "torch.linalg.svd(x)[1]"),
    _aten._linalg_eigh.default: ("eigenvalues", "torch.linalg.eigh(x)[0]"),
    _aten.linalg_eig.default: ("eigenvalues", "torch.linalg.eig(x)[0]"),
}
"""By an operator that computes vectors too: the name of its values, and a call that always computes vectors."""
_SVD: Final = ((torch, ("svd",)), (torch.Tensor, ("svd",)))
ALONE: Final[Sequence[tuple[Any, Sequence[str]]]] = (
    (torch.linalg, ("svdvals", "eigvalsh", "eigvals", "norm", "matrix_norm", "cond", "matrix_rank")),
    (torch, ("norm", "nuclear_norm")),
    (torch.Tensor, ("norm",)),
    *_SVD,
)
"""Torch's functions that compute values alone if no gradient is needed, by the class or module that has them."""
_TOGETHER: Final = ((torch.linalg, ("svd", "eigh", "eig")), (torch, ("svd_lowrank", "pca_lowrank")))


class Factorisations:
    """Knows whether the function of torch's that runs computes vectors in eager PyTorch."""

    def __init__(self) -> None:
        self._with_vectors = False

    def functions(self) -> Handlers:
        """Handlers of the functions that ask for values or vectors."""

        def alone(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return self._call(any(map(_may_need_gradient, (*args, *kwargs.values()))), function, args, kwargs)

        def together(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return self._call(True, function, args, kwargs)

        def svd(
            function: Callable[..., Any], input: torch.Tensor, some: bool = True, compute_uv: bool = True, **out: Any
        ) -> Any:
            return (together if compute_uv else alone)(function, input, some, compute_uv, **out)

        return {
            **dict.fromkeys(_functions(ALONE), alone),
            **dict.fromkeys(_functions(_TOGETHER), together),
            **dict.fromkeys(_functions(_SVD), svd),
        }

    def _call(self, with_vectors: bool, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        before, self._with_vectors = self._with_vectors, with_vectors
        try:
            return function(*args, **kwargs)
        finally:
            self._with_vectors = before

    def refuse_alone(self, func: Any, args: Sequence[Any], scope: str) -> None:
        """Refuse an operator that computes vectors where eager PyTorch may compute the values alone.

        Raises:
            CaptureError: names a call that computes vectors too.
        """
        if func not in _VALUES or self._with_vectors or (torch.is_grad_enabled() and args[0].requires_grad):
            return
        values, call = _VALUES[func]
        raise CaptureError(
            f"the step computes {values} of a matrix that needs no gradient: eager PyTorch computes no vectors there, "
            "and rounds differently without vectors",
            where=where(scope),
            fix=f"take the {values} from {call}, which always computes vectors; compute norms, ranks and condition "
            f"numbers from these {values}",
        )


def _functions(owners: Sequence[tuple[Any, Sequence[str]]]) -> Iterator[Any]:
    for owner, names in owners:
        yield from [getattr(owner, name) for name in names]


def _may_need_gradient(tensor: object) -> bool:
    """Whether torch would compute vectors for *tensor* if no mode were active.

    Within a transform of ``torch.func`` it would for every tensor.

    Source: ``_may_require_fw_or_bw_grad`` in aten/src/ATen/native/LinearAlgebraUtils.h.
    """
    return isinstance(tensor, torch.Tensor) and (
        (torch.is_grad_enabled() and tensor.requires_grad)
        or forward_ad.unpack_dual(tensor).tangent is not None
        or torch._C._functorch.peek_interpreter_stack() is not None
    )
