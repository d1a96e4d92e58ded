"""Where every type's record is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Final

from ..elements import reads_only_elements
from .own import OWN
from .record import OperatorType
from .torch_types import TORCH, UNWRITTEN

__all__ = ["add_registered", "operator_type", "registered_types"]

_registered: Final[dict[str, OperatorType]] = {}


@lru_cache(maxsize=8192)
def operator_type(type: str) -> OperatorType:
    """What is known of *type*; a record that says nothing special where graphir has none of it, or it is no type."""
    found = OWN.get(type) or _registered.get(type)
    if found is not None:
        return found
    known = TORCH.get(type) or OperatorType(type)
    return known._replace(unwritten=type.startswith(UNWRITTEN), only_elements=reads_only_elements(type))


def add_registered(record: OperatorType) -> None:
    """Let *record* be what is known of a user's type, from now on."""
    _registered[record.type] = record
    operator_type.cache_clear()


def registered_types() -> Mapping[str, OperatorType]:
    """The records of the types that users have registered in this process."""
    return _registered
