"""The text form: reading what :mod:`.show` prints. This file reads programs and plans, :mod:`.parse_net` nets.

One statement stands in each line, so the parser goes through the lines once, and through the words of each once. It
builds values and nothing else: no text is evaluated. ``verify`` says whether a net makes sense.
"""

from __future__ import annotations

import re
from typing import Any, Final, cast, get_args

from ...errors import ParseError, nearest
from ..covers import Covers
from ..guard import Guard, parse_guard
from ..net import Net
from ..parts import Parts
from ..plan import KINDS, STREAMS, Event, Instruction, Kind, Plan
from ..program import REDUCTIONS, Gathered, Interface, ParamGroup, Program, Reduction, Scalar, Slot
from ..size import Dims
from .parse_net import NetReader, read_net
from .tokens import Line, Lines

__all__ = ["parse"]

_VALUE_NUMBER: Final = re.compile(r"[0-9a-f]{16}")
_PASS: Final = re.compile(r'((?:"(?:[^"\\]|\\.)*"|[^|"#])*)(?:\||$)')


def parse(text: str) -> Net | Program | Plan:
    """Read a net, a program or a plan from its text; ``parse(str(x)) == x``. Comments (``# …``) are ignored.

    A program's ``state`` and ``module`` are not part of its text; they come back empty.

    Raises:
        ParseError: *text* is none of these; the error says in which line, and what to write.
    """
    if not isinstance(text, str):
        raise ParseError(
            f"text was expected, not {type(text).__name__}", fix="give the text itself; graphir.load reads files"
        )
    reader = Lines(text)
    line = reader.next("a net, a program or a plan")
    word = line.peek()
    if word == "program":
        found: Net | Program | Plan = _program(reader, line)
    elif word == "plan":
        found = _plan(reader, line)
    elif word in ("net", "init"):
        found = read_net(reader, line).net()
    else:
        raise line.error(
            f"expected a net, a program or a plan, found {line.shown()}", "begin with net, init net, program or plan"
        )
    if reader.more():
        raise Line(reader).error("text after the end", "parse one net, program or plan at a time")
    return found


# Programs


def _program(reader: Lines, line: Line) -> Program:
    line.expect("program", "write program NAME {")
    header = _Header(line)
    line.expect("{", "write program NAME {")
    line.end()
    while True:
        line = reader.next(f"}} of program {header.name!r}")
        if line.accept("}"):
            line.end()
            return header.program(line)
        if not header.statement(reader, line):
            raise line.error(
                f"unknown statement {line.shown()}",
                "a program has dims, fixed, caveats, guards, only, recorded, replicas, ahead, reduction, shares, "
                "passes, two nets, interface",
            )


class _Header:
    """What programs and plans have in common."""

    def __init__(self, line: Line) -> None:
        self.name = line.name()
        self.dims: dict[str, int] = {}
        self.fixed = ""
        self.caveats: list[str] = []
        self.guards: list[Guard] = []
        self.only = ""
        self.recorded: list[Dims] = []
        self.replicas: tuple[str, ...] = ("",)
        self.history: tuple[str, ...] = ()
        self.ahead: int | None = None
        self.reduction: Reduction = "mean"
        self.shares: tuple[int, ...] = ()
        self.nets: list[NetReader] = []
        self.interface = Interface()

    def statement(self, reader: Lines, line: Line) -> bool:
        """Read a line of the header; False if *line* is not one."""
        word = line.peek()
        if word in ("net", "init"):
            if len(self.nets) == 2:
                raise line.error("a third net", "a program has two nets, init and step")
            self.nets.append(read_net(reader, line))
            return True
        line.take()
        if word == "dims":
            self.dims = line.assignments(line.take_integer)
        elif word == "fixed":
            self.fixed = line.string(line.take())
        elif word == "caveat":
            self.caveats.append(line.string(line.take()))
        elif word == "guard":
            self.guards.append(_guard(line))
        elif word == "only":
            self.only = line.string(line.take())
        elif word == "recorded":
            self.recorded.append(line.assignments(line.take_integer))
        elif word == "replicas":
            self.replicas = line.names()
        elif word == "passes":
            self.history = _passes(line)
        elif word == "ahead":
            self.ahead = line.take_integer()
        elif word == "reduction":
            self.reduction = cast("Reduction", line.one_of(REDUCTIONS, "reduction"))
        elif word == "shares":
            self.shares = line.several(line.take_integer)
        elif word == "interface":
            self.interface = _interface(reader, line)
            return True
        else:
            line.i -= 1
            return False
        line.end()
        return True

    def program(self, line: Line) -> Program:
        if len(self.nets) != 2:
            raise line.error(f"{self.name!r} has {len(self.nets)} nets", "a program has two nets, init and step")
        init, step = (reader.net() for reader in self.nets)
        return Program(
            self.name,
            init,
            step,
            self.dims,
            Covers(tuple(self.guards), self.fixed, self.only, tuple(self.recorded)),
            self.replicas,
            self.interface,
            self.history,
            self.ahead,
            self.reduction,
            tuple(self.caveats),
            self.shares,
        )


def _guard(line: Line) -> Guard:
    text = line.string(line.take())
    try:
        return parse_guard(text, line.string(line.take()))
    except ParseError as e:
        raise line.error(e.what, e.fix) from None


def _passes(line: Line) -> tuple[str, ...]:
    text, position = line.rest(), 0
    found: list[str] = []
    while position < len(text):
        match = _PASS.match(text, position)
        step = match[1].strip() if match else ""
        if not match or not step:
            raise line.error("the passes cannot be read", "separate passes by |, put odd ones in quotes")
        found.append(line.string(step) if step[0] == '"' else step)
        position = match.end()
    return tuple(found)


def _interface(reader: Lines, line: Line) -> Interface:
    line.expect("{", "write interface {")
    line.end()
    feeds: list[Slot] = []
    fetches: list[Slot] = []
    optimizers: list[str] = []
    groups: list[ParamGroup] = []
    gradients: dict[str, str] = {}
    module_state: dict[str, str] = {}
    optimizer_state: dict[str, dict[str, str]] = {}
    placed: dict[str, tuple[str, ...]] = {}
    parts: dict[str, Parts] = {}
    others: dict[str, Any] = {}
    while True:
        line = reader.next("} of the interface")
        word = line.take()
        if word == "}":
            line.end()
            return Interface(
                feeds=tuple(feeds),
                fetches=tuple(fetches),
                gradients=gradients,
                module_state=module_state,
                optimizers=tuple(optimizers),
                optimizer_state=optimizer_state,
                param_groups=tuple(groups),
                placed=placed,
                parts=parts,
                **others,
            )
        if word in ("arguments", "results"):
            others[word] = line.raw()
        elif word == "loss":
            others[word] = line.name()
        elif word == "optimizer":
            optimizers.append(line.name())
        elif word == "one_replica":
            others[word] = True
        elif word == "differentiable":
            others[word] = _positions(line)
        elif word == "feed":
            feeds.append(_slot(line))
        elif word == "output":
            fetches.append(_slot(line))
        elif word == "gradient":
            param, blob = line.renamed(lambda param: f"{param}_grad")
            gradients[param] = blob
        elif word == "module":
            name, blob = line.renamed(str)
            module_state[name] = blob
        elif word == "group":
            if not optimizers:
                raise line.error("a group belongs to no optimizer", "write optimizer CLASS before its groups")
            groups.append(_group(line, len(optimizers) - 1))
        elif word == "state":
            param = line.name()
            optimizer_state[param] = _optimizer_state(line, param)
        elif word == "placed":
            name = line.name()
            line.expect(":", "write placed NAME : PREFIX, …")
            placed[name] = line.names()
        elif word == "parts":
            name = line.name()
            dim = line.take_integer() if line.accept("dim") else None
            line.expect(":", "write parts NAME dim NUMBER : BLOB, …")
            parts[name] = Parts(dim, line.names())
        else:
            raise line.error(
                f"unknown statement {word!r}",
                "an interface has arguments, feed, loss, output, results, differentiable, one_replica, gradient, "
                "module, optimizer, group, state, placed, parts",
            )
        line.end()


def _positions(line: Line) -> tuple[int, ...]:
    names = line.names()
    if not all(name.isascii() and name.isdigit() for name in names):
        raise line.error("a position is no whole number", "write differentiable 0, 2")
    return tuple(map(int, names))


def _slot(line: Line) -> Slot:
    blob = None if line.accept("_") else line.name()
    batch_dim = line.take_integer() if line.accept("dim") else None
    gather: Gathered | None = _gathered(line) if line.accept("gather") else "first"
    return Slot(blob, batch_dim, _scalar(line) if line.accept("=") else None, gather)


def _gathered(line: Line) -> Gathered | None:
    word = line.name()
    if word not in (*get_args(Gathered), "untold"):
        raise line.error(f"results are not gathered by {word!r}", f"write {', '.join(get_args(Gathered))} or untold")
    return None if word == "untold" else cast(Gathered, word)


def _scalar(line: Line) -> Scalar:
    found = line.value()
    if found is None or isinstance(found, (bool, int, float, str)):
        return found
    raise line.error("expected a number, a string, true, false or none", "lists and sizes cannot stand here")


def _group(line: Line, optimizer: int) -> ParamGroup:
    lr, numbers = line.name(), dict[str, str]()
    while line.accept(","):
        name, blob = line.renamed(str)
        numbers[name] = blob
    line.expect("{", "write group LR, NUMBER, … {name=value, …} = PARAM, …")
    options = cast("dict[str, Scalar | tuple[Scalar, ...]]", line.assignments(line.value, "}"))
    line.expect("=", "write group LR, NUMBER, … {name=value, …} = PARAM, …")
    return ParamGroup(lr, line.names(), options, numbers, optimizer)


def _optimizer_state(line: Line, param: str) -> dict[str, str]:
    line.expect(":", "write state PARAM : NAME, …")
    found: dict[str, str] = {}
    while line.i < line.n:
        if found:
            line.expect(",", "separate names by commas")
        name, blob = line.renamed(lambda name: f"{param}.{name}")
        found[name] = blob
    return found


# Plans


def _plan(reader: Lines, line: Line) -> Plan:
    line.expect("plan", "write plan NAME on gpu:0 {")
    header = _Header(line)
    if line.accept("on"):
        line.device()
        while line.accept(","):
            line.device()
    line.expect("{", "write plan NAME on gpu:0 {")
    line.end()
    sizes: dict[str, int] | None = None
    instructions: list[Instruction] = []
    values: dict[str, str] = {}
    buffers: dict[str, int] = {}
    reading: _InstructionReader | None = None
    while True:
        line = reader.next(f"}} of plan {header.name!r}")
        if line.tokens[0][:4] in ("gpu:", "cpu:"):
            if len(header.nets) < 2:
                raise line.error("an instruction before the plan's nets", "write both nets, then the instructions")
            reading = reading or _InstructionReader(header.nets[1])
            instructions.append(reading.instruction(line))
            line.end()
        elif line.accept("}"):
            line.end()
            program = header.program(line)
            return Plan(program, program.dims if sizes is None else sizes, tuple(instructions), values, buffers)
        elif line.accept("sizes"):
            sizes = line.assignments(line.take_integer)
        elif line.accept("value"):
            name = line.name()
            values[name] = _value_number(line)
            line.end()
        elif line.accept("buffer"):
            name = line.name()
            line.expect("=", "write buffer BLOB = NUMBER")
            buffers[name] = line.take_integer()
            line.end()
        elif not header.statement(reader, line):
            raise line.error(f"unknown statement {line.shown()}", "write instructions as gpu:0.compute: run …")


def _value_number(line: Line) -> str:
    line.expect("=", "write value BLOB = DIGITS")
    if not _VALUE_NUMBER.fullmatch(line.peek()):
        raise line.error(f"{line.shown()} is not a value number", "a value number has 16 hexadecimal digits")
    return line.take()


class _InstructionReader:
    """Reads the instructions of a plan. The first instruction that shows an operator adds it to the step."""

    def __init__(self, step: NetReader) -> None:
        self.step = step
        self.makers = {next(op.makes): i for i, op in enumerate(step.ops) if op.outputs}

    def instruction(self, line: Line) -> Instruction:
        lane = self.lane(line)
        line.expect(":", "write LANE: INSTRUCTION, such as gpu:0.compute: run …")
        word = line.take()
        if word not in KINDS:
            raise line.error(
                f"{word!r} is not an instruction{nearest(word, KINDS)}", f"instructions: {', '.join(KINDS)}"
            )
        kind = cast("Kind", word)
        if kind == "free":
            return Instruction(kind, lane, storage=line.name())
        if kind in ("record", "wait"):
            return Instruction(kind, lane, event=self.event(line, kind, lane))
        part = line.take_integer() if kind == "collective" else 0
        return Instruction(kind, lane, self.position(line), part)

    def event(self, line: Line, kind: str, lane: str) -> Event:
        name, version = line.versioned()
        if line.accept("by"):
            lane = self.lane(line)
        elif kind == "wait":
            raise line.error(f"expected 'by', found {line.shown()}", "write wait BLOB by LANE")
        return Event(name, version or 0, lane)

    def lane(self, line: Line) -> str:
        token = line.take()
        device, _, stream = token.partition(".")
        if device[:4] not in ("gpu:", "cpu:") or stream not in STREAMS:
            raise line.error(f"{token!r} is not a lane", f"write DEVICE.STREAM; streams: {', '.join(STREAMS)}")
        return token

    def position(self, line: Line) -> int:
        """Where the instruction's operator stands in the step."""
        ops = self.step.ops
        if not line.accept("of"):
            op = self.step.operator(line)
            ops.append(op)
            if op.outputs:
                self.makers[next(op.makes)] = len(ops) - 1
            return len(ops) - 1
        if line.accept("op"):
            position = line.take_integer()
            if not 0 <= position < len(ops):
                raise line.error(f"there is no operator {position}", f"the step has {len(ops)} operators so far")
            return position
        name, version = line.versioned()
        if (name, version or 0) not in self.makers:
            raise line.error(f"no operator makes {name!r} so far", "refer to the first output of an operator above")
        return self.makers[name, version or 0]
