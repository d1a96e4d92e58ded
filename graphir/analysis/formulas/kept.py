"""The bytes that the memory of results has beyond their elements."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from ...ir.dtype import ITEMSIZE
from ...ir.optypes.sized import SizedOperator

__all__ = ["KEPT"]


def _shrunk(call: SizedOperator) -> dict[int, int]:
    """The bag of each lookup, and with ``include_last_offset`` the sizes of bags: torch makes them one element longer
    and shrinks them."""
    found = {}
    returned = [position for position, given in enumerate(call.op.results or "tttt") if given == "t"]
    for result, position in enumerate(returned):
        shrinks = position == 1 or (position == 2 and bool(call.op.args.get("include_last_offset")))
        if shrinks and (made := call.result(result)).nbytes:
            found[result] = ITEMSIZE[made.dtype]
    return found


def _made_like_operand(call: SizedOperator) -> dict[int, int]:
    """Torch makes a result like the operand, and then changes its size."""
    return {0: max(call.operand(0).nbytes - call.result().nbytes, 0)}


KEPT: Final[Mapping[str, Callable[[SizedOperator], Mapping[int, int]]]] = {
    "aten._embedding_bag.default": _shrunk,
    "aten._embedding_bag_forward_only.default": _shrunk,
    "aten.col2im.default": _made_like_operand,
}
"""By type, and then by the positions of results."""
