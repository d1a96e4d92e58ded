"""Bytes that a device may hold, as callers say them."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

from pydantic import BeforeValidator, WrapValidator

from graphir.ir.text import NBYTES_UNITS, nbytes_of

from .base import Placed, each_once

__all__ = ["Bytes", "Limits"]


def _nbytes(given: Any) -> int:
    nbytes = nbytes_of(given) if isinstance(given, str) else given
    if type(nbytes) is not int or nbytes < 1:
        units = ", ".join(NBYTES_UNITS)
        raise ValueError(f"{given!r} is no number of bytes; write 24000000 or '24 MiB', in one of the units {units}")
    return nbytes


Bytes: TypeAlias = Annotated[int, BeforeValidator(_nbytes)]
"""An option that is a number of bytes: given as such, or as text like ``24 MiB``."""

Limits: TypeAlias = Annotated[dict[Placed, Bytes], WrapValidator(each_once)]
"""An option that says of devices how many bytes each may hold."""
