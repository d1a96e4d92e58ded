"""The text form of nets, programs and plans: printing. :mod:`.parse` reads what this prints.

Canonical text has no line numbers, no alignment and no derived figures, so that two texts diff cleanly. Nothing is
lost: ``parse(str(x)) == x``. Defaults are left out:

* a blob's type, except where the blob first appears: an output without a type is an existing blob that is overwritten;
* an output's role, where it is the usual one of its operator's phase (forward: activation, backward and reduce:
  gradient, init and update, and any copy: temporary), or for a view the role of its storage;
* an operator's device, where it is that of its first output; its phase, where it is ``forward`` (in an ``init net``,
  ``init``); its module, where it is the base name of the first output of a forward torch operator, or else empty;
* effects, where they are those that the names show (see :func:`.printer.default_effects`);
* versions, where all are the first; operand and result patterns, where the brackets and ``_`` show them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from ...errors import GraphirError
from ..net import Net
from ..operator import Arg, Operator
from ..plan import Instruction, Plan
from ..program import Interface, Program, Slot
from .nbytes import nbytes_text
from .printer import (
    Printer,
    Style,
    declarations,
    json_string,
    key_text,
    net_lines,
    net_phase,
    quoted,
    result_lines,
    value_text,
)

__all__ = ["canonical_text", "instruction_text", "nbytes_text", "operator_text", "show"]

_RAW: Final = re.compile(r'(?!["\s])(?:"(?:[^"\\\n]|\\.)*"|[^"#\n])*(?<!\s)')
_RAW_PASS: Final = re.compile(r'(?!["\s])(?:"(?:[^"\\\n]|\\.)*"|[^|"#\n])+(?<!\s)')


def canonical_text(x: Net | Program | Plan) -> str:
    """The text that ``parse`` reads back: of a program without its state, module and notes."""
    return show(x, figures=False)


def operator_text(op: Operator, net: Net) -> str:
    """One operator as it stands in *net*, with the types of all its outputs and its attributes."""
    return Printer(net.blobs, "forward", Style()).operator(op)


def instruction_text(plan: Plan, instruction: Instruction) -> str:
    """One instruction as it stands in *plan*, with its lane and with the whole operator that it executes."""
    printer = Printer(plan.step.blobs, "forward", Style())
    return f"{instruction.lane}: {_instruction(instruction, plan.step, printer, set(), {})}"


def show(
    x: Net | Program | Plan, *, figures: bool = True, attributes: bool = True, types: bool = True, source: bool = False
) -> str:
    """The text of a net, a program or a plan for people.

    Args:
        x: what to print.
        figures: add the bytes of each storage as a comment, at the sizes that *x* was captured or planned for.
        attributes: print the operators' attributes and the program's interface; text without them is read back with
            the defaults in their place.
        types: print the shapes, element types and devices of blobs; text without them is for reading only.
        source: add the line of code that each captured operator came from, as a comment.

    Raises:
        GraphirError: *x* is none of these.
    """
    if not isinstance(x, Net | Program | Plan):
        raise GraphirError(
            f"show takes a Program, Plan or Net, not {type(x).__name__}", fix="str() prints other things"
        )
    if isinstance(x, Net):
        lines = net_lines(x, Style({} if figures else None, attributes, types, source))
    else:
        style = Style(x.dims if figures else None, attributes, types, source)
        lines = _plan(x, style) if isinstance(x, Plan) else _program(x, style)
    return "\n".join(lines)


# Programs


def _program(program: Program, style: Style) -> Iterator[str]:
    yield f"program {quoted(program.name)} {{"
    yield from _header(program)
    for net in (program.init, program.step):
        yield from _indented(net_lines(net, style))
    if style.attributes:
        yield from _indented(_interface(program.interface))
    yield "}"


def _indented(lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        yield f"  {line}"


def _header(program: Program) -> Iterator[str]:
    if program.dims:
        yield f"  dims {_assignments(program.dims)}"
    covers = program.covers
    if covers.fixed:
        yield f"  fixed {json_string(covers.fixed)}"
    for caveat in program.caveats:
        yield f"  caveat {json_string(caveat)}"
    for guard in covers.guards:
        yield f"  guard {json_string(str(guard))} {json_string(guard.reason)}"
    if covers.only:
        yield f"  only {json_string(covers.only)}"
    for point in covers.recorded:
        yield f"  recorded {_assignments(point)}".rstrip()
    if program.replicas != ("",):
        yield f"  replicas {', '.join(map(quoted, program.replicas))}".rstrip()
    if program.ahead is not None:
        yield f"  ahead {program.ahead}"
    if program.reduction != "mean":
        yield f"  reduction {program.reduction}"
    if program.shares:
        yield f"  shares {', '.join(map(str, program.shares))}"
    if program.history:
        texts = (text if _RAW_PASS.fullmatch(text) else json_string(text) for text in program.history)
        yield f"  passes {' | '.join(texts)}"


def _assignments(values: Mapping[str, Arg]) -> str:
    return ", ".join(f"{key_text(name)}={value_text(value)}" for name, value in values.items())


def _interface(interface: Interface) -> Iterator[str]:
    if interface == Interface():
        return
    yield "interface {"
    if interface.arguments:
        yield f"  arguments {_raw(interface.arguments)}"
    for feed in interface.feeds:
        yield f"  feed {_slot(feed)}"
    if interface.loss is not None:
        yield f"  loss {quoted(interface.loss)}"
    for fetch in interface.fetches:
        yield f"  output {_slot(fetch)}"
    if interface.results is not None:
        yield f"  results {_raw(interface.results)}"
    if interface.differentiable:
        yield f"  differentiable {', '.join(map(str, interface.differentiable))}"
    if interface.one_replica:
        yield "  one_replica"
    for param, gradient in interface.gradients.items():
        yield f"  gradient {_renamed(param, gradient, f'{param}_grad')}"
    for name, blob in interface.module_state.items():
        yield f"  module {_renamed(name, blob, name)}"
    for i, optimizer in enumerate(interface.optimizers):
        yield f"  optimizer {quoted(optimizer)}"
        for group in interface.param_groups:
            if group.optimizer == i:
                params = ", ".join(map(quoted, group.params))
                numbers = [f", {_renamed(name, blob, name)}" for name, blob in group.numbers.items()]
                options = _assignments(group.options)
                yield f"  group {quoted(group.lr)}{''.join(numbers)} {{{options}}} = {params}".rstrip()
    for param, states in interface.optimizer_state.items():
        parts = (_renamed(name, blob, f"{param}.{name}") for name, blob in states.items())
        yield f"  state {quoted(param)} : {', '.join(parts)}".rstrip()
    for name, prefixes in interface.placed.items():
        yield f"  placed {quoted(name)} : {', '.join(map(quoted, prefixes))}".rstrip()
    for name, (dim, blobs) in interface.parts.items():
        along = "" if dim is None else f" dim {dim}"
        yield f"  parts {quoted(name)}{along} : {', '.join(map(quoted, blobs))}".rstrip()
    yield "}"


def _slot(slot: Slot) -> str:
    dim = "" if slot.batch_dim is None else f" dim {slot.batch_dim}"
    value = "" if slot.value is None else f" = {value_text(slot.value)}"
    gather = "" if slot.gather == "first" else f" gather {slot.gather or 'untold'}"
    return f"{'_' if slot.blob is None else quoted(slot.blob)}{dim}{gather}{value}"


def _renamed(name: str, blob: str, default: str) -> str:
    return quoted(name) if blob == default else f"{quoted(name)} -> {quoted(blob)}"


def _raw(text: str) -> str:
    """A JSON text as it is where it can stand in a line, else as a string."""
    return text if _RAW.fullmatch(text) else json_string(text)


# Plans


def _plan(plan: Plan, style: Style) -> Iterator[str]:
    program, net = plan.program, plan.step
    devices = ", ".join(plan.devices)
    yield f"plan {quoted(plan.name)}{' on ' if devices else ''}{devices} {{"
    yield from _header(program)
    if dict(plan.dims) != dict(program.dims):
        yield f"  sizes {_assignments(plan.dims)}".rstrip()
    yield from _indented(net_lines(program.init, style))

    phase = net_phase(net)
    printer = Printer(net.blobs, phase, style)
    inline = _first_mentions(plan.instructions) == list(range(len(net.ops)))
    yield f"  {'init ' if phase == 'init' else ''}net {quoted(net.name)} {{"
    yield from _indented(declarations(net, printer))
    if not inline:
        for op in net.ops:
            yield f"    {printer.operator(op)}"
    yield from _indented(result_lines(net))
    yield "  }"
    if style.attributes:
        yield from _indented(_interface(program.interface))
    printed = set() if inline else set(range(len(net.ops)))
    makers: dict[str, int] = {}
    if not inline:
        makers = {label: i for i, op in enumerate(net.ops) if (label := _label(op))}
    for instruction in plan.instructions:
        yield f"  {instruction.lane}: {_instruction(instruction, net, printer, printed, makers)}"
    if style.attributes:
        for name, buffer in plan.buffers.items():
            yield f"  buffer {quoted(name)} = {buffer}"
        for name, number in plan.values.items():
            yield f"  value {quoted(name)} = {number}"
    yield "}"


def _first_mentions(instructions: Iterable[Instruction]) -> list[int]:
    return list(dict.fromkeys(i.op for i in instructions if i.kind in ("run", "copy", "collective")))


def _label(op: Operator) -> str:
    """An operator's first output, by which later instructions refer to it."""
    return _version(*next(op.makes)) if op.outputs else ""


def _version(name: str, version: int) -> str:
    return f"{quoted(name)};{version}" if version else quoted(name)


def _instruction(
    instruction: Instruction, net: Net, printer: Printer, printed: set[int], makers: dict[str, int]
) -> str:
    kind, event = instruction.kind, instruction.event
    if kind == "free":
        return f"free {quoted(instruction.storage)}"
    if event is not None:
        by = "" if kind == "record" and event.lane == instruction.lane else f" by {event.lane}"
        return f"{kind} {_version(event.blob, event.version)}{by}"
    word = f"{kind} {instruction.part}" if kind == "collective" else kind
    position = instruction.op
    op = net.ops[position]
    if position in printed:
        label = _label(op)
        return f"{word} of {label}" if label and makers.get(label) == position else f"{word} of op {position}"
    printed.add(position)
    if op.outputs:
        makers[_label(op)] = position
    if kind == "copy" and op.kind == "copy" and not op.args and op.operands is None and len(op.inputs) == 1:
        return f"copy {printer.operator(op, copy=True)}"
    return f"{word} {printer.operator(op)}"
