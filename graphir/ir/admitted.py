"""Which of torch's operators a file may name.

A file may be a stranger's, and torch's kernels do not check every index and shape. The admitted types are those that
the models of tests/zoo and torch's own samples of its operators dispatch to. The types of the samples were called with
hostile operands (indices and sizes out of range, other shapes, element types and strides) between pages that no process
may touch. A type that crashed is not admitted, or :mod:`graphir.runtime.kernels.bounds` checks its operands. The list
does not limit what a capture in this process records. :func:`allow_operators` admits more types.
"""

from __future__ import annotations

from typing import Final

from ..errors import GraphirError, nearest
from .opset import NAMESPACES, overload
from .optypes.table import ADMITTED
from .size import LONGEST_TEXT

__all__ = ["admitted", "allow_operators"]

_allowed: Final[set[str]] = set()


def allow_operators(*types: str) -> None:
    """Let files that are read from now on name these types of torch's operators, in this process.

    Nobody has seen the kernels of other types refuse every operand with which they would read or write out of bounds.
    Trust a file that names such types as you would trust code.

    Args:
        types: such as ``aten.binomial.default``, with the overload's name.

    Raises:
        GraphirError: torch has no such operator, or no program may have it; no type was added.
    """
    for type in types:
        overload(type)
    _allowed.update(types)


def admitted(type: str) -> str:
    """*type* itself, if a file may name it.

    Raises:
        GraphirError: *type* is a type of torch's that files may not name, or is too long for a text.
    """
    if len(type) > LONGEST_TEXT:
        raise GraphirError(
            f"the operator type {type[:20]}… has {len(type)} characters", fix=f"write at most {LONGEST_TEXT}"
        )
    if type in ADMITTED or type.partition(".")[0] not in NAMESPACES or type in _allowed:
        return type
    raise GraphirError(
        f"a file may not name the operator {type!r}{nearest(type, ADMITTED)}",
        fix=f"if you trust the file: graphir.allow_operators({type!r}) before it is read",
    )
