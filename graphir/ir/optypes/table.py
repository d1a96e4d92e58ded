"""The table of all operator types, which gives each type's record."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

from .facts import facts_of
from .families.images import IMAGES
from .families.indexing import INDEXING
from .families.linear_algebra import LINEAR_ALGEBRA
from .families.norms import NORMS
from .families.pointwise import POINTWISE
from .families.random import RANDOM
from .families.tensors import TENSORS
from .own import OWN
from .record import OperatorType

__all__ = ["ADMITTED", "LISTED", "add_registered", "operator_type", "registered_types"]

_FACTS: Final = facts_of((*IMAGES, *INDEXING, *LINEAR_ALGEBRA, *NORMS, *POINTWISE, *RANDOM, *TENSORS))

ADMITTED: Final = _FACTS.admitted
"""Torch's types that any file may name."""

LISTED: Final = frozenset(_FACTS.of_types)
"""Torch's types that the families name."""

_UNWRITTEN: Final = ("aten.empty", "aten.new_empty", "prims.empty")
"""The beginnings of types that make memory without writing it."""

_registered: Final[dict[str, OperatorType]] = {}


@lru_cache(maxsize=8192)
def operator_type(type: str) -> OperatorType:
    """What is known of *type*; a record that says nothing special if graphir knows nothing, or *type* is no type."""
    found = OWN.get(type) or _registered.get(type)
    if found is not None:
        return found
    namespace, _, rest = type.partition(".")
    if not rest:
        return OperatorType(type, only_elements=True)  # Caffe2's
    facts: dict[str, Any] = {}
    if namespace == "aten":
        name = rest.partition(".")[0]
        of_names = _FACTS.of_names
        facts = {**of_names.get(name.removesuffix("_"), {}), **of_names.get(name, {}), **_FACTS.of_types.get(type, {})}
    return OperatorType(type, **facts, unwritten=type.startswith(_UNWRITTEN))


def add_registered(record: OperatorType) -> None:
    """Make *record* the record of a user's type, from now on."""
    _registered[record.type] = record
    operator_type.cache_clear()


def registered_types() -> Mapping[str, OperatorType]:
    """The records of the types that users have registered in this process."""
    return _registered
