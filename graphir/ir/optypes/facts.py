"""The notation in which families of torch's types state facts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

__all__ = ["ADDS", "FLOATS", "HALF", "INDEX", "Facts", "Known", "admitted", "facts_of", "known"]

ADDS: Final = "adds in no fixed order on CUDA"
HALF: Final = ("bf16", "f16")
FLOATS: Final = (*HALF, "f32")
INDEX: Final = ("i64", "i32", "u8", "bool")

_OF_NAMES: Final = frozenset(
    {
        *("alike", "bounded", "checks", "composite", "index_types", "label"),
        *("normalised", "onednn", "only_elements", "own_type", "rebinds"),
    }
)
"""The fields of :class:`.record.OperatorType` that hold for every variant of a name, in place or not."""


class Known(NamedTuple):
    """What is known of several types of ``aten``, and whether a file may name them."""

    types: tuple[str, ...]
    admitted: bool
    facts: Mapping[str, Any]


def known(types: str, **facts: Any) -> Known:
    """What is known of these types, as fields of :class:`.record.OperatorType`. No file may name them.

    Args:
        types: such as ``add.Tensor``; ``relu`` is ``relu.default``.
        facts: those of :data:`_OF_NAMES` hold for every variant of a type's name, in place or not, the others for the
            type alone. ``in_place=True`` stands for the type that is called as this one with an underscore.
    """
    return Known(tuple(types.split()), False, facts)


def admitted(types: str, **facts: Any) -> Known:
    """What is known of types that a file may name (:mod:`graphir.ir.admitted`), see :func:`known`."""
    return Known(tuple(types.split()), True, facts)


class Facts(NamedTuple):
    """What families know: by name, by type, and which types a file may name."""

    of_names: Mapping[str, Mapping[str, Any]]
    of_types: Mapping[str, Mapping[str, Any]]
    admitted: frozenset[str]


def facts_of(families: Iterable[Known]) -> Facts:
    """The facts of all families together.

    Raises:
        ValueError: a type is listed twice, or two types of one name state different facts of the name.
    """
    of_names: dict[str, Mapping[str, Any]] = {}
    of_types: dict[str, dict[str, Any]] = {}
    free: set[str] = set()
    for types, is_admitted, facts in families:
        shared = {field: fact for field, fact in facts.items() if field in _OF_NAMES}
        own = {field: fact for field, fact in facts.items() if field not in _OF_NAMES}
        for written in types:
            name, _, variant = written.partition(".")
            type = f"aten.{name}.{variant or 'default'}"
            if type in of_types or of_names.setdefault(name, shared) != shared:
                raise ValueError(f"{written} is known twice")
            of_types[type] = own | {"in_place": f"aten.{name}_.{variant or 'default'}"} if "in_place" in own else own
            if is_admitted:
                free.add(type)
    return Facts(of_names, of_types, frozenset(free))
