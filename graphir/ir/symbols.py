"""Torch's constants, and the symbols that stand for them in arguments."""

from __future__ import annotations

from typing import Any, Final

import torch

from ..errors import GraphirError
from .dtype import TORCH_NAME
from .operator import Symbol

__all__ = ["has_symbol", "to_symbol", "to_torch"]

_TO_TORCH: Final[dict[str, Any]] = {short: getattr(torch, name) for short, name in TORCH_NAME.items()} | {
    name: getattr(torch, name)
    for name in ("contiguous_format", "preserve_format", "channels_last", "channels_last_3d", "strided")
}
_TO_SYMBOL: Final[dict[Any, Symbol]] = {value: Symbol(name) for name, value in _TO_TORCH.items()}


def to_torch(symbol: str) -> Any:
    """The torch constant that a symbol names."""
    return _TO_TORCH[symbol]


def has_symbol(constant: torch.dtype) -> bool:
    """Whether graphir has a name for an element type."""
    return constant in _TO_SYMBOL


def to_symbol(constant: torch.dtype | torch.layout | torch.memory_format) -> Symbol:
    """The symbol of a torch constant.

    Raises:
        GraphirError: graphir has no name for it.
    """
    try:
        return _TO_SYMBOL[constant]
    except KeyError:
        raise GraphirError(f"{constant} is not supported", fix=f"supported: {', '.join(sorted(_TO_TORCH))}") from None
