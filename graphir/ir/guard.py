"""Guards: what the dimensions of a program must satisfy for it to be the step that eager PyTorch takes.

A step recorded at a length of 512 does not show the branch that the model's Python takes from 1,025 on. The program
holds where its guards hold, and a session refuses other sizes.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from ..errors import ParseError
from .size import Dims, Polynomial, bind, parse_size, rename_dims, size_dims

__all__ = ["Guard", "parse_guard"]

_RELATIONS: Final[Mapping[str, Callable[[int, int], bool]]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}

_GUARD: Final = re.compile(r"([^%<>=!]+)(?:%([1-9]\d{0,18}))?(<=|>=|==|!=)(-?\d{1,19})")


class Guard(NamedTuple):
    """A relation of a size, or of its remainder, to a number.

    Attributes:
        size: the polynomial at the left of the relation.
        relation: ``<=``, ``>=``, ``==`` or ``!=``.
        number: the number at the right of the relation.
        modulus: the divisor, if the relation is about the size's remainder; 0 if it is about the size itself.
        reason: what would be different if the guard did not hold.
    """

    size: Polynomial
    relation: str
    number: int
    modulus: int = 0
    reason: str = ""

    def __str__(self) -> str:
        remainder = f"%{self.modulus}" if self.modulus else ""
        return f"{self.size}{remainder}{self.relation}{self.number}"

    def __repr__(self) -> str:
        return f"Guard({self}, reason={self.reason!r})"

    @property
    def dims(self) -> tuple[str, ...]:
        """The dimensions of the guard's size."""
        return size_dims(self.size)

    def holds(self, dims: Dims) -> bool:
        """Whether the guard holds under *dims*.

        Raises:
            GraphirError: a dimension has no value.
        """
        return self.allows(bind(self.size, dims))

    def allows(self, size: int) -> bool:
        """Whether the guard holds if its size has the value *size*."""
        return _RELATIONS[self.relation](size % self.modulus if self.modulus else size, self.number)

    def renamed(self, rename: Callable[[str], str]) -> Guard:
        """This guard with each dimension renamed."""
        size = rename_dims(self.size, rename)
        assert isinstance(size, Polynomial)
        return self._replace(size=size)


def parse_guard(text: str, reason: str) -> Guard:
    """Read what ``str(guard)`` prints.

    Raises:
        ParseError: *text* is no guard.
    """
    match = _GUARD.fullmatch(text)
    if match is None:
        raise ParseError(
            f"{text[:40]!r} is not a guard", fix="write a size, a relation and a number: batch>=2, length%8==0"
        )
    size, modulus, relation, number = match.groups()
    polynomial = parse_size(size)
    if isinstance(polynomial, int):
        raise ParseError(f"{text[:40]!r} depends on no dimension", fix="leave it out")
    return Guard(polynomial, relation, int(number), int(modulus or 0), reason)
