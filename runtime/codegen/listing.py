"""The generated code of a plan, for people to read."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from graphir.errors import PlanError, nearest
from graphir.ir.blob import STATE_ROLES, bound_layout
from graphir.ir.plan import Instruction, Plan, lane_device
from graphir.ir.symbols import to_torch
from graphir.ir.text.printer import quoted

from ..executor import Setting
from ..proof.admission import admit
from .handoffs import Handover, handoffs
from .statements import generate
from .writer import ThreadCode

__all__ = ["python"]


def python(plan: Plan, lane: str) -> str:
    """The Python that the threads executor runs for the device of a lane, all of whose lanes are merged in it.

    Each line is followed by the instruction that it executes; comments at the top say what the names stand for. What a
    session binds to the code is described, not shown.

    Args:
        plan: a sound plan.
        lane: such as ``gpu:0.compute``.

    Raises:
        PlanError: the plan has no such lane, or no executor can run it.
        VerifyError: the plan is not sound.
    """
    admit(plan)
    if not isinstance(lane, str) or lane not in plan.lanes:
        raise PlanError(
            f"plan {plan.name!r} has no lane {lane!r}{nearest(lane, plan.lanes)}",
            fix=f"its lanes: {', '.join(plan.lanes) or 'none'}",
        )
    devices = {device: i for i, device in enumerate(dict.fromkeys(map(lane_device, plan.lanes)))}
    thread = {name: devices[lane_device(name)] for name in plan.lanes}
    found, setting = handoffs(plan, thread), _setting(plan)
    unused = [lambda: None] * found.total  # what gives and takes hand-offs is not called
    code = generate(setting, thread, Handover(found, unused, unused, []))[thread[lane]]
    head, *body = code.source.splitlines()
    lines = [f"# {lane_device(lane)} of plan {quoted(plan.name)}", *_names(code, setting), head]
    for line, position in zip(body, code.instructions[2:], strict=True):
        lines.append(line if position < 0 else f"{line}  # {_said(plan, plan.instructions[position])}")
    return "\n".join(lines) + "\n"


def _setting(plan: Plan) -> Setting:
    """What code is generated for, with state that has no memory."""
    state, inputs = {}, []
    for name in plan.step.external_inputs:
        blob = plan.step.blobs[name]
        if blob.role not in STATE_ROLES:
            inputs.append(name)
            continue
        state[name] = torch.empty_strided(
            *bound_layout(blob, plan.dims), dtype=to_torch(str(blob.dtype)), device="meta"
        )
    generators = {device: torch.Generator() for device in plan.devices}
    return Setting(plan, state, tuple(inputs), dict.fromkeys(plan.devices, torch.device("cpu")), generators)


def _names(code: ThreadCode, setting: Setting) -> Iterator[str]:
    """A comment for each parameter of a thread's function."""
    names = code.source[code.source.index("(") + 1 : code.source.index(")")].split(", ")
    held = list(setting.state)
    first = len(names) - len(code.constants)
    yield "# n: the number of steps done"
    for name, i in zip(names[1:first], code.inputs, strict=True):
        yield f"# {name}: input {quoted(setting.inputs[i])}"
    for name, value, meaning in zip(names[first:], code.constants, code.meanings, strict=True):
        if name[0] == "s":
            at = int(name[1:])
            what = f"state {quoted(held[at])}" if at < len(held) else "a view of state, taken once"
        else:
            what = meaning or getattr(value, "__qualname__", None) or repr(value)
        yield f"# {name}: {what}"


def _said(plan: Plan, instruction: Instruction) -> str:
    """What an instruction does, in a few words of its text."""
    event = instruction.event
    if event is not None:
        return f"{instruction.kind} {quoted(event.blob)} by {event.lane}"
    if instruction.op < 0:
        return f"{instruction.kind} {quoted(instruction.storage)}"
    op = plan.step.ops[instruction.op]
    return f"{instruction.kind} {', '.join(map(quoted, instruction.makes(op.outputs)))} = {quoted(op.type)}"
