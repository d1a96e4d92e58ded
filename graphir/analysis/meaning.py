"""What an operator computes, however it is called and wherever it runs: what two programs are compared by.

An in-place form computes what its functional operator does; a batch norm in training computes its results without the
running statistics that it updates. What an operator says beside its arguments, its net's dialect reads.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from ..errors import GraphirError
from ..ir.operator import Arg, map_arg
from ..ir.opset import NAMESPACES, overload, signature
from ..ir.size import Polynomial

__all__ = [
    "canonical_type",
    "frozen",
    "kernel_family",
]


@cache
def canonical_type(type: str) -> str:
    """The functional operator that computes what *type* does: ``aten.relu.default`` for ``aten.relu_.default``."""
    namespace, _, rest = type.partition(".")
    name, _, variant = rest.partition(".")
    if namespace not in NAMESPACES or not name.endswith("_") or name.endswith("__"):
        return type
    functional = f"{namespace}.{name[:-1]}.{variant}"
    try:
        overload(functional)
    except GraphirError:
        return type
    ours, theirs = signature(type).params, signature(functional).params
    same = [(p.name, p.type) for p in ours] == [(p.name, p.type) for p in theirs]
    return functional if same else type


def kernel_family(type: str) -> str:
    """Which of the kernels that compute the same function, in bits of their own, a batch norm's type names."""
    name = type.split(".")[1]
    return name.partition("_")[0] if name.startswith(("cudnn", "miopen")) else "native"


def frozen(arg: Arg) -> Any:
    """An argument as a key that tells apart whatever gives other bits: 1 from 1.0, 0.0 from -0.0."""
    return map_arg(arg, _told_apart)


def _told_apart(scalar: Any) -> Any:
    if isinstance(scalar, Polynomial):
        return ("size", scalar)
    return (type(scalar).__name__, repr(scalar) if isinstance(scalar, float) else scalar)
