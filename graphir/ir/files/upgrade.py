"""Files of earlier versions, as this version reads them.

:func:`upgraded` adds what the records of a file want and an earlier version left out. :func:`with_fields` adds what an
earlier version said in names of passes and this one says in fields of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from pydantic_core import from_json, to_json

from ...errors import ParseError
from ..history import parse_passes, pass_name
from ..net import Net
from ..operator import Operator
from ..plan import Plan
from ..program import Program

__all__ = ["upgraded", "with_fields"]


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


def with_fields(value: Net | Program | Plan) -> Net | Program | Plan:
    """The value of a file of version 1 to 3, with the fields that version 4 has.

    Until version 3, the name of the pass that made a copy said how the copy is issued and where it is received; that
    ``pipeline`` is in the history said that copies stand where they are due; and the options of the pass that made the
    replicas said how gradients are reduced. The value numbers of plans with synchronised batch norms, whose results
    now follow from no running statistics, meant something else and are left out.
    """
    if isinstance(value, Plan):
        synchronised = any(op.type == "graphir.synchronised_batch_norm" for op in value.step.ops)
        return value.with_(program=_program(value.program), values={} if synchronised else value.values)
    return _program(value) if isinstance(value, Program) else _net(value)


def _program(program: Program) -> Program:
    return program.with_(
        step=_net(program.step),
        ahead=0 if "pipeline" in map(pass_name, program.history) else None,
        reduction="sum" if "sum" in _reductions(program.history) else "mean",
    )


def _net(net: Net) -> Net:
    return net.with_(ops=tuple(map(_parked, net.ops)))


def _parked(op: Operator) -> Operator:
    """A copy of the pass ``park`` with how it is issued and where it is received."""
    if op.by != "park" or op.type != "Copy":
        return op
    return op._replace(issue="placed", received="" if op.device.is_host else "fresh")


def _reductions(history: Iterable[str]) -> Iterator[object]:
    """How the passes of a history reduce gradients, as far as their options say."""
    for text in history:
        try:
            (found,) = parse_passes(text)
        except (ParseError, ValueError):  # a history may say anything
            continue
        yield found.options.get("reduction")


def _objects(place: Any, *keys: str) -> Iterator[dict[str, Any]]:
    """The objects at a place of a document that nobody has checked yet; nothing where they are not there."""
    for key in keys:
        place = place.get(key) if isinstance(place, dict) else None
    for found in place if isinstance(place, list) else [place]:
        if isinstance(found, dict):
            yield found
