"""What two calls of a kernel have in common, so that what was measured of one holds for the other.

A signature is text: an operator's type, and shape, strides and element type of each of its operands and its arguments,
all sizes bound. Names, devices, modules and values are not in it::

    aten.addmm.default(f32[64], f32[8,32], f32[32,64]@1,32; beta=1)

What a kernel allocates, and how long it takes, also depends on the machine and on how many threads it uses; a
:class:`~.profiles.Profile` is of one machine, and its keys say the threads.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..ir.blob import Blob, contiguous_strides, same_strides
from ..ir.operator import Operator, bind_arg
from ..ir.size import Dims, bind_shape
from ..ir.text.printer import value_text

__all__ = ["signature"]


def signature(op: Operator, blobs: Mapping[str, Blob], dims: Dims) -> str | None:
    """The signature of *op* at these sizes; None where the shape or the element type of an operand is not known.

    Args:
        op: of a net.
        blobs: of that net.
        dims: the value of each dimension.

    Raises:
        GraphirError: a dimension has no value.
    """
    operands = []
    for name in op.inputs:
        blob = blobs[name]
        if blob.shape is None or blob.dtype is None:
            return None
        operands.append(_operand(blob, dims))
    given = [f"{name}={value_text(bind_arg(arg, dims))}" for name, arg in sorted(op.args.items())]
    # Which optional operands there are, and which results are wanted, is part of the call.
    given += [f"{mark}{pattern}" for mark, pattern in (("<", op.operands), (">", op.results)) if pattern is not None]
    return f"{op.type}({', '.join(operands)}{'; ' if given else ''}{', '.join(given)})"


def _operand(blob: Blob, dims: Dims) -> str:
    shape = bind_shape(blob.shape or (), dims)
    text = f"{blob.dtype}[{','.join(map(str, shape))}]"
    if blob.strides is None:
        return text
    strides = bind_shape(blob.strides, dims)
    if same_strides(shape, strides, contiguous_strides(shape)):
        return text
    return f"{text}@{','.join(map(str, strides))}"
