"""Which operator touches which blob, as arrays: sweeps over large nets look up numbers, not names.

::

    touch      0      1         2        3      4      …
    op         0      0         0        1      1           of each operand of each operator, in order
    blob       x      conv.w    conv     conv   relu        as a number, its position among the net's blobs
    makes      -      -         yes      -      yes
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import chain, count
from operator import attrgetter
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from .blob import Blob
from .operator import Operator

__all__ = ["Flags", "Numbers", "Touches"]

Numbers: TypeAlias = NDArray[np.int64]
Flags: TypeAlias = NDArray[np.bool_]


class Touches:
    """What a net's operators touch.

    Attributes:
        names: of the blobs, by number.
        number: by name of a blob, its number.
        storage: by blob, the number of the blob that owns its bytes.
        op, blob, makes: by touch, the operator, the blob, and whether the operator makes or overwrites it.
        stored: by touch, the storage.
        inputs, begin, end: by operator, how many of its touches are inputs; its first touch, and the touch after its
            last one.
    """

    def __init__(self, ops: Sequence[Operator], blobs: Mapping[str, Blob]) -> None:
        self.blobs, self.names = blobs, list(blobs)
        self.number = {name: i for i, name in enumerate(self.names)}
        self.storage = self.numbered(map(attrgetter("storage"), blobs.values()), len(self.names))
        self.inputs = np.array([len(op.inputs) for op in ops], np.int64)
        widths = self.inputs + np.array([len(op.outputs) for op in ops], np.int64)
        self.end = widths.cumsum()
        self.begin = self.end - widths
        self.op = np.repeat(np.arange(len(ops)), widths)
        self.blob = self.numbered(chain.from_iterable([op.inputs + op.outputs for op in ops]), len(self.op))
        self.stored = self.storage[self.blob]
        self.makes: Flags = np.arange(len(self.op)) - self.begin[self.op] >= self.inputs[self.op]

    def numbered(self, names: Iterable[str], count: int) -> Numbers:
        """The numbers of *count* blobs, given their names."""
        return np.fromiter(map(self.number.__getitem__, names), np.int64, count)

    @cached_property
    def geometry(self) -> Numbers:
        """By blob, the number of its geometry. Blobs of equal shape, element type and strides have the same number."""
        numbers: dict[Hashable, int] = defaultdict(count().__next__)
        geometries = map(attrgetter("shape", "dtype", "strides"), self.blobs.values())
        return np.fromiter(map(numbers.__getitem__, geometries), np.int64, len(self.names))
