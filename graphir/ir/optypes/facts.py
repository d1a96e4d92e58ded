"""How families of torch's types say what is known of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

__all__ = ["Known", "admitted_types", "by_call", "by_name", "known"]

_OF_NAMES: Final = frozenset(
    {
        *("alike", "bounded", "checks", "composite", "index_types", "label", "normalised", "onednn"),
        *("only_elements", "own_type", "rebinds"),
    }
)
"""The fields of :class:`.record.OperatorType` that hold for every variant of a name, in place or not."""


class Known(NamedTuple):
    """What is known of several names."""

    names: tuple[str, ...]
    admitted: tuple[str, ...]
    of_names: Mapping[str, Any]
    of_calls: Mapping[str, Mapping[str, Any]]


def known(names: str, *, admitted: str = "", of: Mapping[str, Mapping[str, Any]] | None = None, **facts: Any) -> Known:
    """What is known of these names of ``aten``, as fields of :class:`.record.OperatorType`.

    Args:
        names: of operators, without a variant and without the underscore of what is in place.
        admitted: the endings of the types that a file may name: ``.default _.default`` is ``abs.default`` and
            ``abs_.default`` of the name ``abs``.
        of: facts by endings, for types that are not the variant ``default``.
        facts: of all variants, where :data:`_OF_NAMES` has the field; all others are of the variant ``default``.
    """
    of_names = {field: fact for field, fact in facts.items() if field in _OF_NAMES}
    of_calls = {ending: given for endings, given in (of or {}).items() for ending in endings.split()}
    rest = {field: fact for field, fact in facts.items() if field not in _OF_NAMES}
    if rest:
        of_calls[".default"] = {**of_calls.get(".default", {}), **rest}
    return Known(tuple(names.split()), tuple(admitted.split()), of_names, of_calls)


def admitted_types(families: Iterable[Known]) -> Iterator[str]:
    """The types that a file may name."""
    for family in families:
        for name in family.names:
            yield from (f"aten.{name}{ending}" for ending in family.admitted)


def by_name(families: Iterable[Known]) -> dict[str, Mapping[str, Any]]:
    """The facts that hold for every variant of a name, by the name.

    Raises:
        ValueError: two families know a name.
    """
    found: dict[str, Mapping[str, Any]] = {}
    for family in families:
        for name in family.names:
            if name in found:
                raise ValueError(f"{name} is known twice")
            found[name] = family.of_names
    return found


def by_call(families: Iterable[Known]) -> dict[str, dict[str, Any]]:
    """The facts that hold for one type, by the type."""
    found: dict[str, dict[str, Any]] = {}
    for family in families:
        for name in family.names:
            for ending, facts in family.of_calls.items():
                type = f"aten.{name}{ending}"
                found[type] = dict(facts)
                if facts.get("in_place"):
                    found[type]["in_place"] = f"aten.{name}_{ending}"
    return found
