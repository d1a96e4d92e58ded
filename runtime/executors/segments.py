"""Runs of operators that are executed without the interpreter's lock, as functions of TorchScript.

Between two instructions that need Python (events, copies, reductions, optimizer updates, graphir's own kernels, random
numbers) a thread's operators are printed as TorchScript's IR, one line an operator, and called as one function::

    graph(%i0 : Tensor, %s0 : Tensor, %s1 : Tensor, %k0 : float):
      %1 : int = prim::Constant[value=1]()
      %v0 : Tensor = aten::addmm(%s1, %i0, %s0, %1, %1)        # run fc1 = aten.addmm(…)
      %v1 : Tensor = aten::mul(%v0, %k0)                       # run scaled = aten.mul(fc1)
      return (%v1)

TorchScript's interpreter calls the same kernels, in the same order, and nothing is optimized, so that bits stay equal.
It resolves an operator's overload from the types of the arguments; where that would be another one than the plan's,
the operator stays in Python. What an operator of a segment frees stays until the segment ends, so a segment is not
longer than :data:`_LONGEST` operators. Only whole numbers are written as literals; everything else is passed as an
argument. No name of the plan is in the text.

The functions used are private to torch, and TorchScript is deprecated: :func:`unavailable` tries them out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from itertools import chain
from typing import Any, Final, NamedTuple

import torch

from graphir.ir.calls import (
    Argument,
    Bound,
    Call,
    Constant,
    Default,
    Operand,
    OperandList,
    arrange,
    depends_on_dims,
    evaluate,
)
from graphir.ir.operator import Operator
from graphir.ir.opset import Param, overload, signature
from graphir.ir.plan import Instruction
from graphir.ir.size import Polynomial

from ..codegen.statements import LARGEST_LITERAL, Statements
from ..failures.faults import writes_state
from ..kernels.bindings import OWN_KERNELS
from .generated import Located
from .threads import Threads

__all__ = ["Segments", "printable", "unavailable"]

_LONGEST: Final = 32


@cache
def unavailable() -> str | None:
    """Why segments cannot be executed with this torch; None where they can."""
    x = torch.tensor([1.0, -2.0], device="cpu")
    try:
        run = _compile(["%v0 : Tensor = aten::relu(%x)", "%v1 : Tensor = aten::neg(%v0)"], {"x": "Tensor"}, ["v1"])
        with _Interpreted():
            result = run(x)
    except Exception as e:
        return f"torch {torch.__version__} does not run TorchScript's IR: {type(e).__name__}: {e}".partition("\n")[0]
    if not torch.equal(result, -x.relu()):
        return f"torch {torch.__version__} runs TorchScript's IR with another result"
    return None


class _Interpreted(AbstractContextManager[None]):
    """Executes functions of TorchScript in this thread as they are printed."""

    def __enter__(self) -> None:
        self.before = torch._C._get_graph_executor_optimize()
        torch._C._set_graph_executor_optimize(False)

    def __exit__(self, *raised: object) -> None:
        torch._C._set_graph_executor_optimize(self.before)


def _compile(lines: Sequence[str], inputs: Mapping[str, str], outputs: Sequence[str]) -> Callable[..., Any]:
    text = _graph(lines, inputs, outputs)
    function: Callable[..., Any] = torch._C._create_function_from_graph("segment", torch._C.parse_ir(text))
    return function


def _graph(lines: Sequence[str], inputs: Mapping[str, str], outputs: Sequence[str]) -> str:
    """A graph that returns one output as it is, none or several as a tuple."""
    head = ", ".join([f"%{name} : {type}" for name, type in inputs.items()])
    names = ", ".join([f"%{name}" for name in outputs])
    returned = f"return ({names})"
    if len(outputs) != 1:
        types = ", ".join(["Tensor"] * len(outputs))
        returned = f"%all : ({types}) = prim::TupleConstruct({names})\n  return (%all)"
    return "\n  ".join([f"graph({head}):", *lines, returned]) + "\n"


class _Term(NamedTuple):
    """An argument in a segment: its variable, its type, and the lines that make it."""

    name: str
    type: str
    lines: tuple[str, ...] = ()


class _Unfit(Exception):
    """The argument or the operator has no form in a segment."""


class _Segment:
    """A run of operators that is being printed.

    Attributes:
        lines: of the graph.
        inputs: the type of each variable that comes from outside.
        given: the Python expression that is passed for each of them.
        constants: the lines that make constants, by variable.
        made: the variables that it makes and that live on after it.
        after: Python statements that follow its call, by the variable that they hand on; those of others under "".
        positions: the instruction of each operator's line.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.inputs: dict[str, str] = {}
        self.given: dict[str, str] = {}
        self.constants: dict[str, str] = {}
        self.made: dict[str, None] = {}
        self.after: list[tuple[str, str]] = []
        self.positions: dict[str, int] = {}
        self.local = 0

    def outside(self, expression: str, type: str) -> _Term:
        """What Python passes in."""
        name = re.sub(r"\W", "_", expression)
        self.inputs[name], self.given[name] = type, expression
        return _Term(name, type)

    def constant(self, key: str, type: str, value: str) -> _Term:
        """A constant, made once; None has no value."""
        self.constants[key] = f"%{key} : {type} = prim::Constant{value}()"
        return _Term(key, type)

    def fresh(self) -> str:
        """A variable of the segment's own."""
        self.local += 1
        return f"t{self.local - 1}"

    def compile(self) -> Callable[..., Any]:
        """The function of the segment."""
        function = _compile([*self.constants.values(), *self.lines], self.inputs, list(self.made))
        positions = self.positions

        def run(*arguments: object) -> Any:
            try:
                return function(*arguments)
            except RuntimeError as e:
                raise _located(e, positions) from None

        return run


def _located(error: RuntimeError, positions: Mapping[str, int]) -> Exception:
    """The operator's instruction and own message, from a text that shows its line and, after that, the message."""
    text = str(error)
    shown, _, rest = text.partition("~~~~ <--- HERE")
    position = positions.get(shown.rstrip().rpartition("\n")[2].strip())
    message = re.search(r"^RuntimeError: (.*)", rest, re.MULTILINE | re.DOTALL)
    if position is None or message is None:
        return error
    return Located(position, RuntimeError(message[1].strip()))


def printable(op: Operator) -> bool:
    """Whether operators of this type may be part of a segment, if their arguments allow it."""
    return op.type.startswith("aten.") and op.type not in OWN_KERNELS and op.seed is None


class _SegmentStatements(Statements):
    """The statements of one thread's instructions, runs of operators as one call each."""

    segment: _Segment | None = None

    def add(self, position: int, instruction: Instruction) -> None:
        """Take the instruction into the segment, or end it and write the instruction's own line."""
        op = self.net.ops[instruction.op] if instruction.kind == "run" else None
        if op is not None and printable(op):
            if self.updates or self.reductions:
                self.flush()
            if self.take(position, op):
                return
        elif self.segment is not None and instruction.kind == "free":
            self.let_go(instruction.storage)
            return
        elif instruction.kind in ("record", "wait") and not self.event(position):
            return
        self.end()
        super().add(position, instruction)

    def flush(self) -> None:
        """Write what is held back."""
        self.end()
        super().flush()

    def take(self, position: int, op: Operator) -> bool:
        """Print an operator as a line of the segment; whether it has that form."""
        call = arrange(op)
        if self.needs_no_call(op) or self.taken_once(op, call):
            return True
        overwritten = dict(op.effects.writes)
        makes = list(op.makes)
        if any(name in self.setting.state for i, (name, _) in enumerate(makes) if i not in overwritten):
            return False
        if self.segment is not None and len(self.segment.positions) >= _LONGEST:
            self.end()
        segment = self.segment or _Segment()
        inputs = [self.read(name, version) for name, version in op.reads]
        try:
            terms = self.terms(segment, op, call, inputs)
        except _Unfit:
            return False
        if not _resolves(op.type, tuple([term.type for term in terms])):
            return False
        self.segment = segment
        self.overwrite(op)
        results, unpacked = self.results(segment, call, {i: m for i, m in enumerate(makes) if i not in overwritten})
        line = f"{results} = {_function(op.type)}({', '.join([f'%{term.name}' for term in terms])})"
        segment.lines += [*chain.from_iterable(term.lines for term in terms), line, *unpacked]
        segment.positions[line] = position
        return True

    def results(self, segment: _Segment, call: Call, makes: Mapping[int, tuple[str, int]]) -> tuple[str, list[str]]:
        """The left side of a line, and the lines that unpack lists."""
        unpacked: list[str] = []

        def variable(position: int | None) -> str:
            if position is None or position not in makes:
                return f"%{segment.fresh()} : Tensor"
            name, version = makes[position]
            made = self.values.fresh()
            segment.made[made] = None
            segment.after += [(made, statement) for statement in self.define(name, version, made)]
            return f"%{made} : Tensor"

        def target(group: int | list[int | None] | None) -> str:
            if not isinstance(group, list):
                return variable(group)
            items, name = [variable(item) for item in group], segment.fresh()
            if items:
                unpacked.append(f"{', '.join(items)} = prim::ListUnpack(%{name})")
            return f"%{name} : Tensor[]"

        return ", ".join([target(group) for group in call.returned]), unpacked

    def terms(self, segment: _Segment, op: Operator, call: Call, inputs: Sequence[str]) -> list[_Term]:
        """The operator's arguments, one for each parameter."""
        params = signature(op.type).params
        given = dict(zip([param.name for param in params if not param.keyword], call.positional, strict=False))
        given.update(call.keyword)
        return [self.term(segment, op, param, given.get(param.name), inputs) for param in params]

    def term(
        self, segment: _Segment, op: Operator, param: Param, argument: Argument | None, inputs: Sequence[str]
    ) -> _Term:
        if isinstance(argument, Operand):
            return self.tensor(segment, inputs[argument.position])
        if isinstance(argument, OperandList):
            items = [None if i is None else self.tensor(segment, inputs[i]) for i in argument.positions]
            return self.listed(segment, items, param)
        if isinstance(argument, Constant) and depends_on_dims(argument.arg):
            return segment.outside(
                self.constant(argument.arg), "int" if isinstance(argument.arg, Polynomial) else "int[]"
            )
        if isinstance(argument, Constant):
            return self.value(segment, evaluate(argument.arg, {}), param)
        if argument is Bound.DEVICE:
            return segment.outside(self.bound_device(op.device), "Device")
        return self.value(segment, argument.value if isinstance(argument, Default) else param.default, param)

    def tensor(self, segment: _Segment, expression: str) -> _Term:
        return _Term(expression, "Tensor") if expression in segment.made else segment.outside(expression, "Tensor")

    def listed(self, segment: _Segment, items: Sequence[_Term | None], param: Param) -> _Term:
        type = "Tensor?[]" if "Optional" in param.type else "Tensor[]"
        present = [segment.constant("none", "NoneType", "") if item is None else item for item in items]
        name = segment.fresh()
        made = f"%{name} : {type} = prim::ListConstruct({', '.join([f'%{item.name}' for item in present])})"
        return _Term(name, type, (made,))

    def value(self, segment: _Segment, value: Any, param: Param) -> _Term:
        """A constant of an operator: whole numbers as literals, all else passed in."""
        if value is None:
            return segment.constant("none", "NoneType", "")
        if "float" in param.type and type(value) is int:
            value = float(value)
        if isinstance(value, bool):
            return segment.constant(f"b{int(value)}", "bool", f"[value={int(value)}]")
        if type(value) is int and abs(value) < LARGEST_LITERAL:
            return segment.constant(f"n{value}".replace("-", "_"), "int", f"[value={value}]")
        for kind, type_ in _PASSED.items():
            if isinstance(value, kind):
                return segment.outside(self.bound(value), type_)
        if isinstance(value, (list, tuple)):
            for kind, type_ in ((bool, "bool"), (int, "int"), (float, "float")):
                if (value and all(type(item) is kind for item in value)) or (not value and type_ in param.type):
                    return segment.outside(self.bound(list(value)), f"{type_}[]")
        raise _Unfit

    def bound(self, value: object) -> str:
        return self.writer.bind(value, key=repr(("segment", value)))

    def let_go(self, storage: str) -> None:
        """Drop a storage's variables: those that the segment makes are not returned, others are deleted after it."""
        segment = self.segment
        assert segment is not None
        for variable in self.values.dropped(storage, self.thread):
            if variable in segment.made:
                del segment.made[variable]
                segment.after = [(made, statement) for made, statement in segment.after if made != variable]
                continue
            if variable in self.values.slots:
                segment.after.append(("", f"{self.exchange()}[{self.values.slots[variable]}] = None"))
            segment.after.append(("", f"del {variable}"))

    def end(self) -> None:
        """Write the call of the segment."""
        segment, self.segment = self.segment, None
        if segment is None:
            return
        function = self.writer.bind(segment.compile(), "c")
        call = f"{function}({', '.join(segment.given.values())})"
        statements = [f"{', '.join(segment.made)} = {call}" if segment.made else call]
        statements += [statement for _, statement in segment.after]
        plan = self.setting.plan
        # The line stands for all its instructions: for one that writes state, where there is one.
        positions = list(segment.positions.values())
        writing = [position for position in positions if writes_state(plan, plan.instructions[position])]
        self.writer.line((writing or positions)[0], statements)


_PASSED: Final[Mapping[type, str]] = {
    float: "float",
    str: "str",
    torch.dtype: "int",
    torch.layout: "int",
    torch.memory_format: "int",
    torch.device: "Device",
}


def _function(type: str) -> str:
    """The function of TorchScript for a type. A view is taken as :func:`.kernels.bindings.view` takes it."""
    if type == "aten.view.default":
        return "aten::reshape"
    return f"aten::{type.split('.')[1]}"


@cache
def _resolves(type: str, arguments: tuple[str, ...]) -> bool:
    """Whether TorchScript takes arguments of these types to the overload that is meant."""
    name = _function(type)
    meant = (torch.ops.aten.reshape.default if type == "aten.view.default" else overload(type))._schema
    results = [f"%r{i} : {'Tensor[]' if 'List' in str(r.real_type) else 'Tensor'}" for i, r in enumerate(meant.returns)]
    given = {f"a{i}": "Tensor" if kind == "NoneType" else kind for i, kind in enumerate(arguments)}
    operands = ["%none" if kind == "NoneType" else f"%a{i}" for i, kind in enumerate(arguments)]
    lines = ["%none : NoneType = prim::Constant()", f"{', '.join(results)} = {name}({', '.join(operands)})"]
    try:
        graph = torch._C.parse_ir(_graph(lines, given, []))
        return bool(results) and any(node.schema() == str(meant) for node in graph.nodes())
    except RuntimeError:
        return False


class Segments(Threads):
    """The CPU executor with a thread for each logical device, whose operators run in segments."""

    statements = _SegmentStatements
    surroundings = _Interpreted
