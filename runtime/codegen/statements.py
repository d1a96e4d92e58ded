"""The Python that executes each instruction of a plan, written thread by thread."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from graphir.analysis.joint import Held, are_alike, joins
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
    flatten,
)
from graphir.ir.device import Device
from graphir.ir.operator import Arg, Operator
from graphir.ir.plan import Instruction
from graphir.ir.seeds import mix
from graphir.ir.text.printer import value_text

from ..executor import Setting
from ..kernels.bindings import fastest
from ..kernels.buffers import Buffer, Buffers, buffer_on
from ..kernels.communication import all_reduce_each, copy, reduction
from ..kernels.invoke import invoke
from ..kernels.optimizers import UPDATES, Operands, operands_of, updater
from .handoffs import Handover
from .values import Values
from .writer import ThreadCode, Writer

__all__ = ["Statements", "generate"]

_LARGEST_LITERAL: Final = 2**63
"""Whole numbers of this magnitude and above are no literals: they are no numbers of 64 bits."""


def generate(
    setting: Setting,
    thread: Mapping[str, int],
    handover: Handover | None = None,
    observed: bool = False,
    buffers: Buffers | None = None,
) -> list[ThreadCode]:
    """The functions of threads ``0, 1, …``.

    Args:
        setting: what they run.
        thread: which thread each lane of the plan belongs to.
        handover: needed where there are several threads.
        observed: whether they take the methods ``begin`` and ``end`` of a probe, and call them.
        buffers: what copies receive into; those that are missing are added.

    Raises:
        PlanError: an instruction reads what nobody made, or an operator does not fit its type.
    """
    values = Values(setting, thread, observed)
    consumed = values.consumed.values()
    writers = [Writer(values.kept, observed, consumed) for _ in range(max(thread.values(), default=0) + 1)]
    buffers = {} if buffers is None else buffers
    printers = [Statements(setting, writer, values, handover, i, buffers) for i, writer in enumerate(writers)]
    for position, instruction in enumerate(setting.plan.instructions):
        here = thread[instruction.lane]
        printers[here].add(position, instruction)
    for printer in printers:
        printer.flush()
    for index, name in enumerate(setting.plan.step.external_outputs):
        owner, variable = values.last(name)
        writers[owner].returns(index, variable)
    return [writer.finish() for writer in writers]


class Statements:
    """The statements of each of one thread's instructions.

    Attributes:
        updates: those held back, to be made in one call, and their positions.
        updated: the storages that they write.
        freed: the frees held back until after them, and their positions.
        reductions: those held back, as their positions, operators and parts.
        reduced: what they make.
    """

    def __init__(
        self,
        setting: Setting,
        writer: Writer,
        values: Values,
        handover: Handover | None,
        thread: int,
        buffers: Buffers,
    ) -> None:
        self.setting, self.writer, self.values, self.thread = setting, writer, values, thread
        self.handover, self.buffers = handover, buffers
        self.net = setting.plan.step
        self.updates: list[tuple[int, Operator]] = []
        self.updated: set[str] = set()
        self.freed: list[tuple[int, Instruction]] = []
        self.reductions: list[Held] = []
        self.reduced: set[str] = set()

    def add(self, position: int, instruction: Instruction) -> None:
        """Write the line of an instruction, or hold it back: reductions that stand side by side become one call, and so
        do updates that follow each other.

        Frees that stand between updates come after them; nothing takes the memory meanwhile. Waits that stand between
        updates come before them. This delays no lane: a lane that waits for the updates waits for a later record.
        """
        op = self.net.ops[instruction.op] if instruction.kind == "run" else None
        if instruction.kind == "collective":
            self.hold(position, self.net.ops[instruction.op], instruction.part)
            return
        if self.reductions:
            self.flush()
        if op is not None and op.type in UPDATES:
            if self.updates and not joins(op, self.updates[0][1], self.net, self.updated):
                self.flush()
            self.updates.append((position, op))
            self.updated.update([self.net.blobs[name].storage for name in op.outputs])
        elif instruction.kind == "free" and self.updates:
            self.freed.append((position, instruction))
        elif instruction.kind in ("record", "wait"):
            statements = self.event(position)
            if instruction.kind == "record" and statements:
                self.flush()
            self.writer.line(position, self.observed(statements, position))
        else:
            self.flush()
            self.writer.line(position, self.observed(self.of(position, instruction), position))

    def hold(self, position: int, op: Operator, part: int) -> None:
        """Hold a reduction back, with others of its kind."""
        unlike = self.reductions and not are_alike(op, self.reductions[0][1], self.setting.state)
        if self.updates or unlike or not self.reduced.isdisjoint(op.inputs):
            self.flush()
        self.reductions.append((position, op, part))
        self.reduced.update(op.outputs)

    def flush(self) -> None:
        """Write what is held back."""
        reductions, self.reductions = self.reductions, []
        self.reduced.clear()
        if reductions:
            statements = self.reduce_each([(op, part) for _, op, part in reductions])
            self.writer.line(reductions[0][0], self.observed(statements, *[position for position, _, _ in reductions]))
        updates, freed, self.updates, self.freed = self.updates, self.freed, [], []
        self.updated.clear()
        if updates:
            statements = self.update([op for _, op in updates])
            self.writer.line(updates[0][0], self.observed(statements, *[position for position, _ in updates]))
        for position, instruction in freed:
            self.writer.line(position, self.observed(self.of(position, instruction), position))

    def observed(self, statements: list[str], *positions: int) -> list[str]:
        """The statements of some instructions, between the calls of a probe."""
        if not self.writer.observed or not statements:
            return statements
        found: list[str] = []
        for position in positions:
            found += [f"begin({position})", *(statements if position == positions[0] else [])]
            found.append(f"end({position}, {', '.join(self.touched(position))})")
        return found

    def touched(self, position: int) -> list[str]:
        """Two tuples: what an instruction has read, and what it has made."""
        instruction = self.setting.plan.instructions[position]
        if instruction.op < 0:
            return ["()", "()"]
        op = self.net.ops[instruction.op]
        touched = op.reads, instruction.makes(tuple(op.makes))
        return [f"({''.join([self.read(*value) + ', ' for value in values])})" for values in touched]

    def update(self, ops: Sequence[Operator]) -> list[str]:
        """One call of an optimizer's kernel for updates with the same options and numbers."""
        given: list[Operands[str]] = []
        for op in ops:
            inputs = [self.read(name, version) for name, version in op.reads]
            arguments = [self.argument(op, argument, inputs) for argument in arrange(op).positional]
            given.append(operands_of(op.type, arguments))
            self.overwrite(op)
        options: dict[str, Any] = {name: evaluate(arg, {}) for name, arg in ops[0].args.items()}
        meaning = f"{ops[0].type}({', '.join([f'{name}={option!r}' for name, option in sorted(options.items())])})"
        kernel = self.writer.bind(updater(ops[0].type, options), "c", meaning, meaning)
        rate, found_inf, numbers = given[0].rate, given[0].found_inf, given[0].numbers
        lists = [f"[{', '.join(items)}]" for items in zip(*[each.tensors for each in given], strict=True)]
        named = [f"{name}={number}" for name, number in numbers.items() if number != "None"]
        skipped = "" if found_inf == "None" else f"{found_inf}.item() or "
        return [f"{skipped}{kernel}({', '.join([*lists, rate, *named])})"]

    def overwrite(self, op: Operator) -> None:
        """What an operator overwrites keeps its variable."""
        makes, reads = list(op.makes), list(op.reads)
        for position, source in op.effects.writes:
            variable = self.values.variable(*reads[source])
            self.values.define(*makes[position], variable, self.values.owners[variable])

    def of(self, position: int, instruction: Instruction) -> list[str]:
        """The statements of an instruction that is neither event nor collective."""
        if instruction.kind == "free":
            return self.free(instruction.storage)
        return self.call(self.net.ops[instruction.op])

    def event(self, position: int) -> list[str]:
        if self.handover is None:
            return []
        taken = self.handover.handoffs.taken.get(position)
        called = [("gives", i, self.handover.give[i]) for i in self.handover.handoffs.given.get(position, ())]
        called += [] if taken is None else [("takes", taken, self.handover.take[taken])]
        return [f"{self.writer.bind(does, 'e', (verb, i), f'{verb} hand-off {i}')}()" for verb, i, does in called]

    def free(self, storage: str) -> list[str]:
        dropped = self.values.dropped(storage, self.thread)
        slots = [self.values.slots[v] for v in dropped if v in self.values.slots]
        statements = [f"{self.exchange()}[{slot}] = None" for slot in slots]
        if storage in self.values.consumed:
            statements.append(f"{self.writer.use(self.values.consumed[storage])} = None")
        return [*statements, f"del {', '.join(dropped)}"] if dropped else statements

    def exchange(self) -> str:
        assert self.handover is not None
        return self.writer.bind(self.handover.values, "x", meaning="the values that threads hand to each other")

    def read(self, name: str, version: int) -> str:
        variable = self.values.variable(name, version)
        if self.values.owners[variable] in (None, self.thread):
            return self.writer.use(variable)
        return f"{self.exchange()}[{self.values.slots[variable]}]"

    def reduce_each(self, reductions: Sequence[tuple[Operator, int]]) -> list[str]:
        """One call for one participant's parts of reductions that are alike."""
        first = reductions[0][0]
        read = [[self.read(name, version) for name, version in op.reads] for op, _ in reductions]
        inputs = ", ".join([f"({''.join([f'{item}, ' for item in items])})" for items in zip(*read, strict=True)])
        text = f"{self.writer.bind(all_reduce_each, 'c', meaning=first.type)}(({inputs},), *{self.scaling(first)})"
        makes = [list(op.makes)[part] for op, part in reductions]
        if makes[0][0] in self.setting.state:
            return [self.store(*makes[0], f"{text}[0]")]
        variables = [self.values.fresh() for _ in makes]
        statements = [f"{', '.join(variables)}, = {text}"]
        for made, variable in zip(makes, variables, strict=True):
            statements += self.define(*made, variable)
        return statements

    def scaling(self, op: Operator) -> str:
        """The divisor and the weights of a reduction."""
        key = repr(("reduction", len(op.inputs), sorted(op.args.items())))
        return self.writer.bind_sized(lambda dims: reduction(op, dims), key, "divisor and weights")

    def call(self, op: Operator) -> list[str]:
        call = arrange(op)
        if self.needs_no_call(op) or self.taken_once(op, call):
            return []
        overwritten = dict(op.effects.writes)
        inputs = [self.read(name, version) for name, version in op.reads]
        makes = list(op.makes)
        if op.kind == "copy" and makes[0][0] in self.setting.state:
            return [self.store(*makes[0], inputs[0])]
        statements = self.seed(op) if op.seed is not None else []
        returned = [i for group in call.returned for i in (group if isinstance(group, list) else [group])]
        fresh = [i for i in returned if i is not None and i not in overwritten]
        text = self.text(op, call, inputs)
        self.overwrite(op)
        if not fresh:
            return [*statements, text]
        if len(fresh) == 1 and call.single and not isinstance(call.returned[0], list):
            return [*statements, *self.assign(*makes[fresh[0]], text)]
        return [*statements, *self.unpack(call, {i: makes[i] for i in fresh}, text)]

    def needs_no_call(self, op: Operator) -> bool:
        """Whether an operator makes nothing but views that :mod:`.views` leaves out; names them."""
        same, unread, _ = self.values.uncalled
        again = [made for made in op.makes if made not in unread]
        if not op.outputs or any(made not in same for made in again):
            return False
        for made in again:
            self.values.define(*made, self.values.variable(*same[made]), None)
        return True

    def taken_once(self, op: Operator, call: Call) -> bool:
        """Take views of state now, where they are the same in every step; whether they were."""
        if not op.effects.views or op.effects.writes or any(map(depends_on_dims, op.args.values())):
            return False
        if len(op.effects.views) != len(op.outputs) or any(name in self.setting.state for name in op.outputs):
            return False
        inputs = [self.values.kept_tensor(name, version) for name, version in op.reads]
        if not inputs or not all(isinstance(tensor, Tensor) for tensor in inputs):
            return False
        with torch.inference_mode():
            try:
                views = flatten(call, invoke(op, call, inputs, self.setting, {}, 0))
            except (RuntimeError, TypeError):  # it shall fail where it can be named: in the step
                return False
        for position, (name, version) in enumerate(op.makes):
            self.values.keep(name, version, views[position])
        return True

    def store(self, name: str, version: int, text: str) -> str:
        """Write the value of an expression into state, which keeps its tensor."""
        state = self.values.variable(name, 0)
        self.values.define(name, version, state, None)
        return f"{self.writer.bind(Tensor.copy_, 'c')}({self.writer.use(state)}, {text})"

    def assign(self, name: str, version: int, text: str) -> list[str]:
        """Give a name, which may be state, the value of an expression."""
        if name in self.setting.state:
            return [self.store(name, version, text)]
        variable = self.values.fresh()
        return [f"{variable} = {text}", *self.define(name, version, variable)]

    def unpack(self, call: Call, makes: Mapping[int, tuple[str, int]], text: str) -> list[str]:
        """Assign several results, or the items of a list."""
        kept: list[str] = []
        dropped: list[str] = []

        def single(group: int | None) -> str:
            if group is None or group not in makes:
                dropped.append(self.values.fresh())
                return dropped[-1]
            name, version = makes[group]
            variable = self.values.fresh()
            if name in self.setting.state:
                kept.append(self.store(name, version, variable))
                dropped.append(variable)
            else:
                kept.extend(self.define(name, version, variable))
            return variable

        def target(group: int | list[int | None] | None) -> str:
            if isinstance(group, list):
                return f"({''.join([single(item) + ', ' for item in group])})" if group else "[]"
            return single(group)

        targets = [target(group) for group in call.returned]
        left = targets[0] if call.single else "".join([t + ", " for t in targets])
        return [f"{left} = {text}", *kept, *([f"del {', '.join(dropped)}"] if dropped else [])]

    def define(self, name: str, version: int, variable: str) -> list[str]:
        """Note that *variable* holds a value; what hands it to other threads."""
        self.values.define(name, version, variable, self.thread)
        if (name, version) not in self.values.shared:
            return []
        assert self.handover is not None
        self.values.slots[variable] = len(self.handover.values)
        self.handover.values.append(None)
        return [f"{self.exchange()}[{self.values.slots[variable]}] = {variable}"]

    def seed(self, op: Operator) -> list[str]:
        generator = self.setting.generators[op.device]
        meaning = f"seeds the generator of {op.device}"
        manual_seed = self.writer.bind(generator.manual_seed, "g", ("seed", op.device), meaning)
        mixed = self.writer.bind(mix, "c", meaning="the seed for a step, a replica and a seed id")
        return [f"{manual_seed}({mixed}(n, {self.setting.replica(op)}, {self.literal(op.seed)}))"]

    def text(self, op: Operator, call: Call, inputs: Sequence[str]) -> str:
        """The expression that calls the operator."""
        if any(made in self.values.uncalled.flat for made in op.makes):
            op = op._replace(args={**op.args, "keepdim": False})
            call = arrange(op)
        given = [self.argument(op, argument, inputs) for argument in call.positional]
        given += [f"{name}={self.argument(op, argument, inputs)}" for name, argument in call.keyword]
        function: Callable[..., object]
        key: object
        if op.kind == "copy" and (buffer := self.buffer_of(op.outputs[0])) is not None:
            function, key = buffer.receive, ("receive", id(buffer))
        elif op.kind == "copy":
            function, key = copy, "Copy"
            given.append(self.bound_device(op.device))
        else:
            function, key = fastest(op.type), op.type
        return f"{self.writer.bind(function, 'c', key, op.type)}({', '.join(given)})"

    def buffer_of(self, storage: str) -> Buffer | None:
        """The receive buffer that a copy fills, if the plan gives it one."""
        number = self.setting.plan.buffers.get(storage)
        if number is None:
            return None
        device = self.net.blobs[storage].device
        return self.buffers.setdefault((device, number), buffer_on(self.setting.binding[device]))

    def argument(self, op: Operator, argument: Argument, inputs: Sequence[str]) -> str:
        if isinstance(argument, Operand):
            return inputs[argument.position]
        if isinstance(argument, OperandList):
            items = ["None" if i is None else inputs[i] for i in argument.positions]
            return f"[{', '.join(items)}]"
        if isinstance(argument, Constant):
            return self.constant(argument.arg)
        if isinstance(argument, Default):
            return "None" if argument.value is None else self.writer.bind(argument.value, key=repr(argument.value))
        if argument is Bound.DEVICE:
            return self.bound_device(op.device)
        generator = self.setting.generators[op.device]
        return self.writer.bind(generator, "g", ("generator", op.device), f"the generator of {op.device}")

    def bound_device(self, device: Device) -> str:
        return self.writer.bind(self.setting.binding[device], key=("device", device), meaning=f"the real {device}")

    def constant(self, arg: Arg) -> str:
        if depends_on_dims(arg):
            return self.writer.bind_sized(lambda dims: evaluate(arg, dims), repr(arg), value_text(arg))
        value = evaluate(arg, {})
        literal = self.literal(value)
        return literal if literal is not None else self.writer.bind(value, key=repr(("constant", value)))

    def literal(self, value: object) -> str | None:
        """The Python literal of a number, a boolean, None, or a tuple of them; None for everything else."""
        match value:
            case None | bool():
                return repr(value)
            case int():
                return repr(int(value)) if abs(value) < _LARGEST_LITERAL else None
            case float():
                return repr(float(value)) if math.isfinite(value) else None
            case tuple():
                items = [self.literal(item) for item in value]
                return f"({''.join([f'{item}, ' for item in items])})" if None not in items else None
        return None
