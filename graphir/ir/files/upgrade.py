"""Files of earlier versions, as this version reads them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic_core import from_json, to_json

__all__ = ["upgraded"]


def upgraded(text: bytes, version: int) -> bytes:
    """The JSON of a file of version 1 or 2, with what it left out and version 3 does not.

    These were defaults that the classes don't have: the version 0 of an event, and its lane where it was the
    instruction's own; that a leaf is no tensor; a group without parameters or options. The value numbers of version 1
    meant something else and are left out.
    """
    document = from_json(text)
    if version == 1:
        document.pop("values", None)
    for interface in _objects(document, "program", "interface"):
        for slot in (*_objects(interface, "feeds"), *_objects(interface, "fetches")):
            slot.setdefault("blob", None)
        for group in _objects(interface, "param_groups"):
            group.setdefault("params", [])
            group.setdefault("options", {})
    for instruction in _objects(document, "instructions"):
        for event in _objects(instruction, "event"):
            event.setdefault("version", 0)
            event.setdefault("lane", instruction.get("lane"))
    return to_json(document)


def _objects(place: Any, *keys: str) -> Iterator[dict[str, Any]]:
    """The objects at a place of a document that nobody has checked yet; nothing where they are not there."""
    for key in keys:
        place = place.get(key) if isinstance(place, dict) else None
    for found in place if isinstance(place, list) else [place]:
        if isinstance(found, dict):
            yield found
