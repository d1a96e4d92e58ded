"""The attributes of objects that a user or a library gave them, in a table or in slots; no code of a class runs."""

from __future__ import annotations

import contextlib
from types import MemberDescriptorType
from typing import Any

from ...capturing.isolate.containers import HOLDERS, is_written_in_python

__all__ = ["fields", "has_fields"]


def has_fields(value: Any) -> bool:
    """Whether *value* may have attributes that a user or a library gave it, whatever else it is."""
    if not (hasattr(value, "__dict__") or _slots(value)):
        return False
    return isinstance(value, HOLDERS) or is_written_in_python(type(value))


def fields(value: Any) -> dict[str, Any]:
    """The attributes of an object."""
    found = dict(vars(value)) if hasattr(value, "__dict__") else {}
    for key, slot in _slots(value).items():
        with contextlib.suppress(AttributeError):  # nothing is in it
            found[key] = slot.__get__(value)
    return found


def _slots(value: Any) -> dict[str, MemberDescriptorType]:
    """What reads the attributes that an object keeps in slots, by their names."""
    found: dict[str, MemberDescriptorType] = {}
    for cls in type(value).__mro__:
        if "__slots__" in cls.__dict__:
            found = {key: slot for key, slot in vars(cls).items() if isinstance(slot, MemberDescriptorType)} | found
    return found
