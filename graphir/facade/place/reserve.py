"""What stays free of the limits of a placed model, for what is not counted."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from math import ceil
from typing import Final, NamedTuple

from ...errors import GraphirError, PassError
from ...ir.text import nbytes_of

__all__ = ["Reserve", "read_reserve"]

_FIX: Final = "write it as '5%' of each limit, or as bytes such as '512 MiB'; 0 leaves nothing free"


class Reserve(NamedTuple):
    """A part of each limit that stays free.

    Attributes:
        share: of the limit.
        nbytes: beside that.
    """

    share: Decimal
    nbytes: int

    def __str__(self) -> str:
        return f"{(100 * self.share).normalize():f}%" if self.share else f"{self.nbytes} bytes"

    @property
    def where(self) -> str:
        """What errors say of it."""
        return f"place, which leaves {self} of each limit free (reserve)" if self.share or self.nbytes else ""

    def of(self, limit: int) -> int:
        """The bytes of a limit that stay free."""
        return ceil(self.share * limit) + self.nbytes

    def less(self, limits: Mapping[str, int]) -> dict[str, int]:
        """What is left of limits.

        Raises:
            PassError: nothing is.
        """
        found = {device: limit - self.of(limit) for device, limit in limits.items()}
        for device, left in found.items():
            if left < 1:
                raise PassError(f"place: reserve={self} leaves nothing of the limit of {device}", fix=_FIX)
        return found

    def limit_of(self, nbytes: int) -> int:
        """The least limit of which so many bytes are left."""
        limit = ceil((nbytes + self.nbytes) / (1 - self.share))
        return limit if limit - self.of(limit) >= nbytes else limit + 1


def read_reserve(given: object) -> Reserve:
    """What a caller writes as reserve.

    Raises:
        PassError: it is neither a percentage below 100 nor bytes.
    """
    try:
        if type(given) is int and given == 0:
            return Reserve(Decimal(0), 0)
        if isinstance(given, str) and given.strip().endswith("%"):
            share = Decimal(given.strip().removesuffix("%")) / 100
            if 0 <= share < 1:
                return Reserve(share, 0)
        else:
            return Reserve(Decimal(0), nbytes_of(given))
    except (GraphirError, InvalidOperation):
        pass
    raise PassError(f"place: reserve is {given!r}, neither a part of limits nor bytes", fix=_FIX)
