"""Files of versions 3 and 4, as this version reads them: fields say now what names of passes said in version 3."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from ...errors import ParseError
from ..history import parse_passes, pass_name
from ..net import Net
from ..operator import Operator
from ..plan import Plan
from ..program import Program

__all__ = ["with_fields", "with_optimizers"]


def with_optimizers(text: str | bytes) -> str | bytes:
    """The JSON of a file up to version 4, in which an interface has the name of one optimizer or none."""
    try:
        document = json.loads(text)
        interface = document["program"]["interface"]
        interface["optimizers"] = [name] if (name := interface.pop("optimizer")) else []
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):  # the text says what it lacks
        return text
    return json.dumps(document)


def with_fields(value: Net | Program | Plan) -> Net | Program | Plan:
    """The value of a file of version 3, with the fields that version 4 has.

    In version 3, the name of the pass that made a copy said how the copy is issued and where it is received. A
    ``pipeline`` in the history said that copies stand where they are due. The options of the pass that made the
    replicas said how gradients are reduced. Plans with synchronised batch norms lose their value numbers: results of
    these batch norms counted as dependent on running statistics, and do not now.
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
    """The operator; a copy that the pass ``park`` made also gets ``issue`` and ``received``."""
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
