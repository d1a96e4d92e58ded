"""Pieces: views that show the same elements of a storage, and so cross as one.

A backward reads the transpose of what the forward read, and two calls may take the same slice::

    part   : f32[6,2] strides [8,1] in x        the piece
    part.t : f32[2,6] strides [1,8] in x        the same elements: made again of a copy of part
    again  : f32[6,2] strides [8,1] in x        made as part is: a copy of part is one of it
"""

from __future__ import annotations

from functools import cached_property

from graphir.analysis.meaning import frozen
from graphir.ir.blob import dense_nbytes
from graphir.ir.net import Net
from graphir.ir.operator import Operator
from graphir.ir.optypes.table import operator_type
from graphir.ir.size import Dims

__all__ = ["Pieces"]


class Pieces:
    """The pieces of a net's storages.

    Args:
        net: captured.
        dims: the sizes at which views are compared.
    """

    def __init__(self, net: Net, dims: Dims) -> None:
        self.net, self.dims = net, dims
        self._first: dict[tuple[object, ...], str] = {}
        self._found: dict[str, str] = {}

    def of(self, name: str) -> str:
        """The view that stands for all views of the same elements: of those nearest to the storage, the one that was
        asked for first. A view of what is overwritten stands for itself."""
        found = self._found.get(name)
        if found is None:
            found = self._found[name] = self.alike(self._nearest(name))
        return found

    def alike(self, name: str) -> str:
        """Of the views that are made in the same way, the one that was asked for first."""
        maker = self._makers.get(name)
        if maker is None or self.net.blobs[name].storage in self._overwritten:
            return name
        sources = tuple(map(self.alike, maker.inputs))
        args = frozenset([(key, frozen(arg)) for key, arg in maker.args.items()])
        made = maker.type, args, sources, maker.outputs.index(name)
        return self._first.setdefault(made, name)

    def _nearest(self, name: str) -> str:
        blobs = self.net.blobs
        if blobs[name].storage in self._overwritten:
            return name
        nbytes = dense_nbytes(blobs[name], self.dims)
        while (maker := self._makers.get(name)) is not None and not operator_type(maker.type).conjugates:
            source = maker.inputs[maker.effects.views[0][1]]
            if not blobs[source].is_view or dense_nbytes(blobs[source], self.dims) != nbytes:
                break
            name = source
        return name

    @cached_property
    def _makers(self) -> dict[str, Operator]:
        """The operator that makes each view."""
        return {name: op for op in self.net.ops if op.effects.shows for name in op.outputs}

    @cached_property
    def _overwritten(self) -> set[str]:
        """The storages that hold more than one value in the net."""
        blobs = self.net.blobs
        return {blobs[op.outputs[output]].storage for op in self.net.ops for output, _ in op.effects.writes}
