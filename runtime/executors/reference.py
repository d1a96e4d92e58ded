"""The sequential reference executor: the oracle that every other executor is held against.

It takes the plan's instructions from top to bottom in one thread, calls torch's operators by their schemas, and keeps
every value in a dictionary by (name, version). What a sound plan never does raises: reading a value that was freed,
was never made, or whose storage has been overwritten since; waiting for an event that nobody recorded.

It takes no receive buffers: every value is a tensor of its own here, so that a buffer filled too early elsewhere, as by
:mod:`.adversarial`, shows. What it holds is predicted by :func:`graphir.memory` of the plan without its ``buffers``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from graphir.errors import PlanError
from graphir.ir.calls import arrange, flatten
from graphir.ir.operator import Operator
from graphir.ir.plan import Event
from graphir.ir.size import Dims
from graphir.ir.text import instruction_text

from ..executor import Feedable, Kept, Setting
from ..failures.faults import fault, writes_state
from ..kernels.communication import all_reduce, reduction
from ..kernels.invoke import invoke
from ..machine.surroundings import neutral
from ..observing.probes import Clock, HostClock, Probe

__all__ = ["Interpretation", "Reference"]


class Reference:
    """See :mod:`graphir.runtime.executors.reference`.

    Args:
        setting: what to run.
        threads: how many threads one kernel may use; None: as many as in the thread that makes the executor.
    """

    def __init__(self, setting: Setting, threads: int | None = None) -> None:
        self.setting, self.intraop = setting, threads or torch.get_num_threads()
        self.clock: Clock = HostClock()

    def run(self, dims: Dims, inputs: Sequence[Feedable], step: int) -> Sequence[Tensor]:
        """One step; see :class:`.executor.Executor`."""
        return self.interpret(dims, inputs, step, None)

    def run_observed(self, dims: Dims, inputs: Sequence[Feedable], step: int, probe: Probe) -> Sequence[Tensor]:
        """One step with a probe; see :class:`.observing.probes.Observable`."""
        return self.interpret(dims, inputs, step, probe)

    def interpret(self, dims: Dims, inputs: Sequence[Feedable], step: int, probe: Probe | None) -> Sequence[Tensor]:
        """One step, with a probe where one is given."""
        plan, position = self.setting.plan, -1
        kinds = {place.type for place in self.setting.binding.values()}
        with neutral(self.intraop, kinds), self.setting.mode():
            interpretation = self.interpretation(dims, inputs, step)
            try:
                for position in self.order(step):
                    if probe is None:
                        interpretation.execute(position)
                    else:
                        interpretation.observe(position, probe)
                position = -1
                return interpretation.outputs()
            except PlanError:
                raise
            except Exception as e:
                instruction = plan.instructions[position] if position >= 0 else None
                usable = not interpretation.wrote_state()
                interpretation.values.clear()  # the error's traceback holds this frame
                as_run = plan.with_(buffers=self.kept().buffers)
                raise fault(as_run, instruction, step, e, dims=dims, binding=self.setting.binding, usable=usable) from e

    def kept(self) -> Kept:
        """See :class:`.observing.probes.Observable`."""
        return Kept()

    def interpretation(self, dims: Dims, inputs: Sequence[Feedable], step: int) -> Interpretation:
        """What executes the step's instructions."""
        return Interpretation(self.setting, dims, inputs, step)

    def order(self, step: int) -> Iterable[int]:
        """The positions of the plan's instructions, as they are executed."""
        return range(len(self.setting.plan.instructions))

    def close(self) -> None:
        """Nothing to end."""


class Interpretation:
    """One step in progress. Instructions are given by position in the plan.

    Attributes:
        values: every value that is there, by (name, version).
        stored: those of each storage.
        writes: the instructions that have written to each storage in this step.
        made_at: for each value, how many writes its storage had just after the value was made.
        freed: for each storage that was freed, the instruction that did it.
        recorded: events.
        position: of the instruction that is executed.
    """

    def __init__(self, setting: Setting, dims: Dims, inputs: Sequence[Feedable], step: int) -> None:
        self.setting, self.dims, self.step, self.position = setting, dims, step, -1
        self.net = setting.plan.step
        self.values: dict[tuple[str, int], Feedable] = {}
        self.stored: dict[str, dict[tuple[str, int], None]] = {}
        self.writes: dict[str, list[int]] = {}
        self.made_at: dict[tuple[str, int], int] = {}
        self.freed: dict[str, int] = {}
        self.recorded: set[Event] = set()
        for name, tensor in setting.state.items():
            self.define(name, 0, tensor)
        for name, value in zip(setting.inputs, inputs, strict=True):
            self.define(name, 0, value)

    def unsound(self, what: str, cause: int = -1) -> PlanError:
        """The error for the instruction that is executed, where an earlier one is the *cause*."""
        plan = self.setting.plan
        at = [f"{i} {instruction_text(plan, plan.instructions[i])}" for i in (self.position, cause) if i >= 0]
        return PlanError(
            what, at=", after ".join(at), where=f"plan {plan.name!r}, step {self.step}", fix="emit the plan again"
        )

    def define(self, name: str, version: int, value: Feedable) -> None:
        """Give a name its value, which is there from now on."""
        storage = self.net.blob(name).storage
        self.values[name, version] = value
        self.stored.setdefault(storage, {})[name, version] = None
        self.made_at[name, version] = len(self.writes.get(storage, ()))

    def read(self, name: str, version: int) -> Feedable:
        """The value of a name.

        Raises:
            PlanError: it was not made yet, or is no longer there.
        """
        storage = self.net.blob(name).storage
        if storage in self.freed:
            raise self.unsound(f"{name!r} is read after its storage {storage!r} was freed", self.freed[storage])
        if (name, version) not in self.values:
            raise self.unsound(f"version {version} of {name!r} is read before it is made")
        writes = self.writes.get(storage, ())
        if self.made_at[name, version] != len(writes):
            what = f"version {version} of {name!r} is read after its storage {storage!r} was overwritten"
            raise self.unsound(what, writes[self.made_at[name, version]])
        return self.values[name, version]

    def observe(self, position: int, probe: Probe) -> None:
        """Execute the instruction at a position between the calls of a probe."""
        self.position = position
        instruction = self.setting.plan.instructions[position]
        reads: list[Feedable] = []
        makes: tuple[tuple[str, int], ...] = ()
        if instruction.op >= 0:
            op = self.net.ops[instruction.op]
            reads, makes = [self.read(name, version) for name, version in op.reads], instruction.makes(tuple(op.makes))
        probe.begin(position)
        self.execute(position)
        made = [self.values[value] for value in makes]
        probe.end(position, reads, [value for value in made if isinstance(value, Tensor)])

    def execute(self, position: int) -> None:
        """Execute the instruction at a position.

        Raises:
            PlanError: it needs what is not there.
        """
        self.position = position
        instruction = self.setting.plan.instructions[position]
        if instruction.kind == "free":
            self.free(instruction.storage)
        elif instruction.kind == "record":
            assert instruction.event is not None
            self.recorded.add(instruction.event)
        elif instruction.kind == "wait":
            if instruction.event not in self.recorded:
                raise self.unsound(f"{instruction.lane} waits for {instruction.event}, which nobody recorded before")
        elif instruction.kind == "collective":
            self.reduce(self.net.ops[instruction.op], instruction.part)
        else:
            self.call(self.net.ops[instruction.op])

    def wrote_state(self) -> bool:
        """Whether any instruction wrote what lasts from step to step, or may have: the one that is executed, if it
        failed."""
        plan = self.setting.plan
        executed = [position for positions in self.writes.values() for position in positions]
        return any(writes_state(plan, plan.instructions[position]) for position in (*executed, self.position))

    def free(self, storage: str) -> list[Feedable]:
        """Drop the values of a storage, and give them back."""
        if storage in self.freed:
            raise self.unsound(f"storage {storage!r} is freed twice", self.freed[storage])
        self.freed[storage] = self.position
        return [self.values.pop(key) for key in self.stored.pop(storage, {})]

    def call(self, op: Operator) -> None:
        """Execute an operator."""
        call = arrange(op)
        inputs = [self.read(name, version) for name, version in op.reads]
        returned = invoke(op, call, inputs, self.setting, self.dims, self.step)
        results = flatten(call, returned)
        overwritten = dict(op.effects.writes)
        self.check_fresh(op, inputs, results)
        for position in overwritten:
            self.written(op.outputs[position])
        for position, (name, version) in enumerate(op.makes):
            if position in overwritten:
                self.define(name, version, inputs[overwritten[position]])
            else:
                self.assign(name, version, results[position], view=position in dict(op.effects.views))

    def check_fresh(self, op: Operator, inputs: Sequence[Feedable], results: Mapping[int, Tensor]) -> None:
        """Raise where a result that is no view lies in the memory of an operand: the operand may be freed before the
        result."""
        shown = {position for position, _ in (*op.effects.views, *op.effects.writes)}
        taken = {t.untyped_storage()._cdata for t in inputs if isinstance(t, Tensor)}
        for position, result in results.items():
            if position not in shown and result.untyped_storage()._cdata in taken:
                raise self.unsound(f"{op.type} returns {op.outputs[position]!r} in the memory of what it reads")

    def reduce(self, op: Operator, part: int) -> None:
        """Execute one participant's part of a collective."""
        inputs = [self.read(name, version) for name, version in op.reads]
        divisor, weights = reduction(op, self.dims)
        name, version = list(op.makes)[part]
        place = self.setting.binding[self.net.blob(name).device]
        parts = [t.to(place) for t in inputs if isinstance(t, Tensor)]
        self.assign(name, version, all_reduce(parts, divisor, weights))

    def assign(self, name: str, version: int, value: Tensor, view: bool = False) -> None:
        """A fresh value for a name; state keeps its tensor and takes the value."""
        if not view:
            self.written(name)
        if name in self.setting.state:
            value = self.setting.state[name].copy_(value)
        self.define(name, version, value)

    def written(self, name: str) -> None:
        """Note that the instruction has written to the storage of a name."""
        storage = self.net.blob(name).storage
        if storage in self.freed:
            raise self.unsound(f"{name!r} is written after its storage {storage!r} was freed", self.freed[storage])
        self.writes.setdefault(storage, []).append(self.position)

    def outputs(self) -> list[Tensor]:
        """The external outputs, once every instruction was executed."""
        self.position = -1
        last: dict[str, int] = {}
        for name, version in self.values:
            last[name] = max(version, last.get(name, 0))
        found = [self.read(name, last.get(name, 0)) for name in self.net.external_outputs]
        return [value for value in found if isinstance(value, Tensor)]
