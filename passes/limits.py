"""Bytes that a device may hold, as callers say them."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

from pydantic import BeforeValidator, WrapValidator

from graphir.ir.text import nbytes_of

from .base import Placed, each_once, read_option

__all__ = ["Bytes", "Limits"]


def _nbytes(given: Any) -> int:
    return read_option(nbytes_of, given)


Bytes: TypeAlias = Annotated[int, BeforeValidator(_nbytes)]
"""An option that is a number of bytes: given as such, or as text like ``24 MiB`` or ``24MB``."""

Limits: TypeAlias = Annotated[dict[Placed, Bytes], WrapValidator(each_once)]
"""An option that says of devices how many bytes each may hold."""
