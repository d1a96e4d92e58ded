"""Numbers of bytes as text: how they are printed, and how callers may write them."""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import Final

from ...errors import GraphirError

__all__ = ["nbytes_of", "nbytes_text"]

_BINARY: Final = ("B", "KiB", "MiB", "GiB", "TiB")
_DECIMAL: Final = ("B", "KB", "MB", "GB", "TB")
_UNITS: Final = {
    unit.upper(): base**power for base, units in ((1024, _BINARY), (1000, _DECIMAL)) for power, unit in enumerate(units)
}
"""The bytes of each unit: KiB, MiB, … are powers of 1024, KB, MB, … of 1000."""

_TEXT: Final = re.compile(rf"(\d{{1,15}}(?:\.\d{{1,15}})?)\s*({'|'.join(_UNITS)})", re.IGNORECASE)
_FIX: Final = (
    "write a whole number from 1 up, or text such as '24 MiB' or '24 MB': "
    f"{', '.join(_BINARY[1:])} are powers of 1024, {', '.join(_DECIMAL[1:])} of 1000"
)


def nbytes_text(nbytes: int) -> str:
    """``16.0 MiB``."""
    if nbytes < 1024:
        return f"{nbytes} B"
    power = min(int(math.log2(nbytes)) // 10, 4)
    return f"{nbytes / 1024**power:.1f} {_BINARY[power]}"


def nbytes_of(given: object) -> int:
    """The number of bytes that a caller writes: a whole number, or text such as ``16.0 MiB``, ``16MB`` or ``0.5 GiB``.

    Units are Accelerate's: MiB is 1024 * 1024 bytes, MB is 1000 * 1000. A fraction of a byte is left out.

    Raises:
        GraphirError: *given* is not a number of bytes from 1 up. Units in bits (``Mb``, in Accelerate) are refused.
    """
    if type(given) is int and given >= 1:
        return given
    found = _TEXT.fullmatch(given.strip()) if isinstance(given, str) else None
    if found is None:
        raise GraphirError(f"{given!r} is not a number of bytes", fix=_FIX)
    unit = found[2]
    if unit.endswith("b") and unit.upper() in _DECIMAL:
        raise GraphirError(
            f"{given!r} ends in 'b', which stands for bits",
            fix=f"write '{found[1]} {unit.upper()}', with a B, for bytes",
        )
    nbytes = int(Decimal(found[1]) * _UNITS[unit.upper()])
    if nbytes < 1:
        raise GraphirError(f"{given!r} is less than a byte", fix=_FIX)
    return nbytes
