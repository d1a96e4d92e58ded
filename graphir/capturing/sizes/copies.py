"""Sizes at which torch takes a view of a tensor that it copies at the recorded sizes.

``reshape``, ``contiguous`` and ``nn.Linear`` copy a tensor only if its dimensions cannot be merged. Two neighbouring
dimensions are merged if the second one fills the stride of the first::

    x[:, :5]     shape [batch, 5]   strides [length, 1]     merged where length == 5: torch copies nothing there
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from ...ir.guard import Guard
from ...ir.size import Polynomial, Size, add, bind, multiply
from ..words.places import where
from .fit import Sizes, SymbolicGeometry
from .guards import equality

__all__ = ["copies_kept"]

_COPY = "aten.clone.default"


def copies_kept(sizes: Sizes) -> Iterator[Guard]:
    """Conditions on the dimensions under which torch copies what it copied in the recordings."""
    copied = {
        value.index: call for call in sizes.recording.calls if call.type == _COPY for value in call.inputs if value
    }
    for index, call in copied.items():
        for gap in _gaps(sizes.geometries[index]):
            if isinstance(gap, Polynomial) and _closes(gap, sizes):
                place = where(call.scope, call.line)
                reason = f"torch copies a slice of a tensor, but takes a view of the whole tensor, in {place}"
                yield from equality(False, gap, 0, reason)


def _gaps(geometry: SymbolicGeometry) -> Iterator[Size]:
    """The elements between the end of each dimension but the first and the stride of the dimension before it."""
    shape, strides, _ = geometry
    if strides is not None:
        for (_, stride), (size, inner) in pairwise([pair for pair in zip(shape, strides, strict=True) if pair[0] != 1]):
            yield add(stride, multiply(-1, multiply(size, inner)))


def _closes(gap: Polynomial, sizes: Sizes) -> bool:
    """Whether a gap may be 0 at sizes beside 1, and is not 0 at a recorded point, where torch copies too."""
    signs = {coefficient > 0 for _, coefficient in gap.terms}
    of_dims = {coefficient > 0 for monomial, coefficient in gap.terms if monomial}
    at_ones_alone = len(of_dims) == 1 and sum(coefficient for _, coefficient in gap.terms) == 0
    return len(signs) > 1 and not at_ones_alone and all(bind(gap, point) for point in sizes.grid.points)
