"""Operators that overwrite lists of tensors, in a program one tensor after the other, as torch does on the host."""

from __future__ import annotations

from typing import Any, Final

import torch

from ...errors import CaptureError
from ..words.places import where

__all__ = ["overwrite_each", "overwrites_lists"]

_PREFIX: Final = "_foreach_"
_VALUE_BY_NAME: Final = frozenset({"_foreach_addcmul_", "_foreach_addcdiv_"})
"""Operators whose fourth argument is ``value=`` of the operator on one tensor."""


def overwrites_lists(func: object) -> bool:
    """Whether *func* overwrites each tensor of a list, as ``torch._foreach_add_`` does."""
    if not isinstance(func, torch._ops.OpOverload):
        return False
    return func.namespace == "aten" and func._opname.startswith(_PREFIX) and not func._schema.returns


def overwrite_each(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], scope: str) -> None:
    """Overwrite one tensor of the list after the other, by the operator that torch itself takes where it has no kernel
    for lists: ``_foreach_lerp_`` by ``lerp_``.

    Raises:
        CaptureError: the operator reads numbers from a tensor that has one for each tensor of the list.
    """
    one = getattr(torch.ops.aten, func._opname.removeprefix(_PREFIX))
    count = len(args[0])
    for given in (*args[1:], *kwargs.values()):
        if isinstance(given, torch.Tensor) and given.dim():
            raise CaptureError(
                f"{func} reads its numbers from a tensor", where=where(scope), fix="call it for each tensor, in a loop"
            )
    if func._opname in _VALUE_BY_NAME and len(args) > 3:
        args, kwargs = args[:3], {**kwargs, "value": args[3]}
    for i in range(count):

        def of(given: Any, i: int = i) -> Any:
            return given[i] if isinstance(given, (list, tuple)) else given

        one(*map(of, args), **{name: of(given) for name, given in kwargs.items()})
