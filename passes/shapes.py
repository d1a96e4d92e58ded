"""What an operator that a pass puts in returns, at every size of the program's dimensions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from graphir.errors import PassError
from graphir.ir.blob import Blob
from graphir.ir.fitting import Grid
from graphir.ir.geometry import Geometry, geometry
from graphir.ir.infer import infer
from graphir.ir.operator import Operator, leaves
from graphir.ir.size import Dims, Polynomial, Shape, Size, size_dims

__all__ = ["Made", "results_of"]


class Made(NamedTuple):
    """A result: as a blob has it."""

    shape: Shape
    dtype: str
    strides: Shape | None
    offset: Size

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


def results_of(op: Operator, blobs: Mapping[str, Blob], dims: Dims) -> list[Made]:
    """The geometry of each result of an operator, its sizes in the dimensions of its operands and arguments.

    The operator is asked at as many sizes as determine a polynomial, and at others that confirm it.

    Args:
        op: its operands are declared.
        blobs: those.
        dims: the captured value of each dimension.

    Raises:
        PassError: the type does not take such operands or arguments, or its results do not follow the dimensions as
            polynomials, or are not known without computing them.
    """
    grid = Grid({dim: dims[dim] for dim in _dims_of(op, blobs)})
    found = [_at(op, blobs, point) for point in grid.points]
    return [_fitted(op, [results[k] for results in found], grid) for k in range(len(found[0]))]


def _dims_of(op: Operator, blobs: Mapping[str, Blob]) -> dict[str, None]:
    """The dimensions that the operator's sizes follow."""
    sizes: list[Size] = [arg for value in op.args.values() for arg in leaves(value) if isinstance(arg, Polynomial)]
    for name in op.inputs:
        blob = blobs[name]
        sizes += [*(blob.shape or ()), *(blob.strides or ()), blob.offset]
    return dict.fromkeys(dim for size in sizes for dim in size_dims(size))


def _at(op: Operator, blobs: Mapping[str, Blob], point: Dims) -> list[Geometry]:
    known = infer(op, [geometry(blobs[name], point) for name in op.inputs], point)
    if known.complaint:
        raise PassError(known.complaint, fix="see the type's schema, and the shapes of its operands in replica.blobs")
    if known.outputs is None or None in known.outputs:
        raise PassError(
            f"what {op.type} returns is not known without computing it", fix="compute it in the model, and capture that"
        )
    return [made for made in known.outputs if made is not None]


def _fitted(op: Operator, made: Sequence[Geometry], grid: Grid) -> Made:
    def size(numbers: Sequence[int]) -> Size:
        if len(set(numbers)) == 1:
            return numbers[0]
        found = grid.fit(numbers)
        if found is None:
            raise PassError(
                f"the results of {op.type} are no polynomials of the program's dimensions",
                fix="compute it in the model, and capture that",
            )
        return found

    if len({(len(g.shape), g.dtype) for g in made}) > 1:
        raise PassError(
            f"{op.type} returns tensors of other ranks or element types at other sizes",
            fix="compute it in the model, and capture that",
        )
    shape = tuple([size(numbers) for numbers in zip(*[g.shape for g in made], strict=True)])
    strides = None
    if any(g.declared_strides is not None for g in made):
        strides = tuple([size(numbers) for numbers in zip(*[g.strides for g in made], strict=True)])
    return Made(shape, made[0].symbol, strides, size([g.offset for g in made]))
