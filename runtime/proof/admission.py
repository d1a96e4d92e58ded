"""What a plan must be, beyond sound, before a session takes it: everything that would otherwise end a step raw.

A file may hold any plan, also one that no pass emitted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Final

from graphir.errors import GraphirError, PlanError, SessionError
from graphir.ir.moved import NOW, moved
from graphir.ir.operator import Operator
from graphir.ir.opset import signature
from graphir.ir.plan import STREAMS, Plan, lane
from graphir.ir.program import Program
from graphir.ir.text import operator_text
from graphir.ir.verify import verify

from ..kernels.communication import reduction
from ..kernels.optimizers import FORMS, UPDATES
from .check import require_sound

__all__ = ["admit"]

_TYPES: Final[Mapping[str, tuple[type, ...]]] = {"float": (float, int), "bool": (bool,), "str": (str,)}


def admit(plan: Plan) -> None:
    """Refuse a plan that cannot be run.

    Raises:
        VerifyError: it is not sound.
        PlanError: a lane, an argument or an entry of the interface is one that no executor can work with, or
            :func:`.check.check` finds something.
        SessionError: it is no plan, or has an operator of a type without a kernel.
    """
    _is_plan(plan)
    for wrong in _lanes(plan):
        raise PlanError(wrong, where=f"plan {plan.name!r}", fix="emit the plan again")
    verify(plan)
    _operators(plan)
    for wrong in _interface(plan.program):
        raise PlanError(wrong, where=f"program {plan.program.name!r}", fix="capture the program again")
    require_sound(plan)


def _is_plan(given: object) -> None:
    if isinstance(given, Program):
        raise SessionError(f"{given.name!r} is a program, not a plan", fix="passes.emit(program) makes a plan")
    if not isinstance(given, Plan):
        raise SessionError(
            f"a session takes a plan, not a {type(given).__name__}", fix="passes.emit(program) makes one"
        )


def _lanes(plan: Plan) -> Iterator[str]:
    known = {lane(device, stream) for device in plan.devices for stream in STREAMS}
    for position, instruction in enumerate(plan.instructions):
        event = instruction.event
        if (event is None) is (instruction.kind in ("record", "wait")):
            yield f"instruction {position}, a {instruction.kind}, has {'no' if event is None else 'an'} event"
        for name in (instruction.lane, event.lane if event is not None else instruction.lane):
            if name not in known:
                yield f"instruction {position}, a {instruction.kind}, names lane {name!r} of a device without operators"


def _operators(plan: Plan) -> None:
    for net in (plan.init, plan.step):
        for op in net.ops:
            at, where = operator_text(op, net), f"plan {plan.name!r}"
            try:
                signature(op.type)
            except GraphirError as e:
                raise SessionError(
                    f"operators of type {op.type!r} cannot be run: {e.what}",
                    at=at,
                    where=where,
                    fix="the runtime has kernels for aten, prims and graphir's own types"
                    + f"; {net.dialect.translation or 'graphir.register_operator registers others'}",
                ) from e
            wrong = _update(op) if op.type in UPDATES else None
            if op.kind == "reduce":
                try:
                    reduction(op, plan.program.dims)
                except GraphirError as e:
                    wrong = e.what
            if wrong:
                raise PlanError(wrong, at=at, where=where, fix="capture and emit the program again")


def _update(op: Operator) -> str | None:
    """What is wrong with an optimizer's options."""
    for param in signature(op.type).params:
        if param.kind != "value" or param.name not in op.args:
            continue
        value, types = op.args[param.name], _TYPES.get(param.type, (object,))
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            return f"{op.type} takes a {param.type} for {param.name}, not {value!r}"
    for name in signature(op.type).names(op.operands, len(op.inputs)):
        if name.endswith(NOW) and name.removesuffix(NOW) in op.args:
            return f"{op.type} is given {name.removesuffix(NOW)} twice: as an operand and as an argument"
    if (form := op.args.get("form", FORMS[0])) not in FORMS:
        return f"{op.type} has the form {form!r}; forms: {', '.join(FORMS)}"
    return None


def _interface(program: Program) -> Iterator[str]:
    interface, blobs = program.interface, program.step.blobs
    cuts = [("input", feed.blob, feed.batch_dim) for feed in interface.feeds]
    cuts += [("output", fetch.blob, fetch.batch_dim) for fetch in interface.fetches]
    for kind, name, dim in cuts:
        blob = None if name is None else blobs.get(program.blob_of(name))
        if dim is None or blob is None or blob.shape is None:
            continue
        if not 0 <= dim < len(blob.shape):
            yield f"{kind} {name!r} has {len(blob.shape)} dimensions; its batch dimension cannot be {dim}"
    for feed in interface.feeds:
        if feed.blob is None or feed.batch_dim is None or feed.blob in interface.placed:
            continue
        for prefix in program.replicas[len(program.sharing) :]:
            if prefix + feed.blob in program.step.external_inputs:
                yield f"input {prefix + feed.blob!r} has rows, but its replica has no batch dimension"
    for i, group in enumerate(interface.param_groups):
        now = moved(group.options)
        given = {"learning rate": group.options.get("lr"), **{name: now.get(name) for name in group.numbers}}
        for name, number in given.items():
            if isinstance(number, bool) or not isinstance(number, (int, float)) or math.isnan(number):
                yield f"parameter group {i} has the {name} {number!r}, which is not a number"
