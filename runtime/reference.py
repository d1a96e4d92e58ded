"""The sequential reference executor: the oracle that every other executor is held against.

It takes the plan's instructions from top to bottom in one thread, calls torch's operators by their schemas, and keeps
every value in a dictionary by (name, version). What a sound plan never does raises: reading a value that was freed,
was never made, or whose storage has been overwritten since; waiting for an event that nobody recorded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from graphir.errors import PlanError, RunError
from graphir.ir.blob import Blob
from graphir.ir.operator import Operator
from graphir.ir.opset import overload
from graphir.ir.program import Program
from graphir.ir.seeds import mix
from graphir.ir.size import Dims
from graphir.plan import Event, Instruction, Plan

from .bindings import OWN_KERNELS, view
from .calls import Argument, Call, arrange, evaluate, given
from .executor import Feedable, Setting
from .faults import fault
from .kernels import all_reduce, copy, reduction
from .optimizers import KERNELS, updater
from .probes import Clock, HostClock, Probe
from .surroundings import neutral

__all__ = ["Reference"]


class Reference:
    """See :mod:`graphir.runtime.reference`.

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
        """One step with a probe; see :class:`.probes.Observable`."""
        return self.interpret(dims, inputs, step, probe)

    def interpret(self, dims: Dims, inputs: Sequence[Feedable], step: int, probe: Probe | None) -> Sequence[Tensor]:
        plan, instruction = self.setting.plan, None
        interpretation = _Interpretation(self.setting, dims, step)
        for name, tensor in zip(self.setting.inputs, inputs, strict=True):
            interpretation.define(name, 0, tensor)
        kinds = {place.type for place in self.setting.binding.values()}
        with neutral(self.intraop, kinds), torch.inference_mode():
            try:
                for position, instruction in enumerate(plan.instructions):
                    if probe is None:
                        interpretation.execute(instruction)
                    else:
                        interpretation.observe(position, instruction, probe)
                instruction = None
                return interpretation.outputs()
            except (PlanError, RunError):
                raise
            except Exception as e:
                raise fault(plan, instruction, step, e) from e

    def close(self) -> None:
        """Nothing to end."""


class _Interpretation:
    """One step in progress.

    Attributes:
        values: every value that was made, by (name, version).
        writes: how often each storage has been written in this step.
        made_at: that count of the value's storage, just after the value was made.
        freed: storages that were freed.
        recorded: events.
    """

    def __init__(self, setting: Setting, dims: Dims, step: int) -> None:
        self.setting, self.dims, self.step = setting, dims, step
        self.net = setting.plan.step
        self.values: dict[tuple[str, int], Feedable] = {}
        self.writes: dict[str, int] = {}
        self.made_at: dict[tuple[str, int], int] = {}
        self.freed: set[str] = set()
        self.recorded: set[Event] = set()
        for name, tensor in setting.state.items():
            self.define(name, 0, tensor)

    def blob(self, name: str) -> Blob:
        return self.net.blob(name)

    def unsound(self, what: str) -> PlanError:
        return PlanError(what, where=f"plan {self.setting.plan.name!r}", fix="emit the plan again")

    def define(self, name: str, version: int, value: Feedable) -> None:
        self.values[name, version] = value
        self.made_at[name, version] = self.writes.get(self.blob(name).storage, 0)

    def read(self, name: str, version: int) -> Feedable:
        storage = self.blob(name).storage
        if storage in self.freed:
            raise self.unsound(f"{name!r} is read after its storage {storage!r} was freed")
        if (name, version) not in self.values:
            raise self.unsound(f"version {version} of {name!r} is read before it is made")
        if self.made_at[name, version] != self.writes.get(storage, 0):
            raise self.unsound(f"version {version} of {name!r} is read after its storage {storage!r} was overwritten")
        return self.values[name, version]

    def observe(self, position: int, instruction: Instruction, probe: Probe) -> None:
        """Execute an instruction between the calls of a probe."""
        reads: list[Feedable] = []
        makes: list[tuple[str, int]] = []
        if instruction.op >= 0:
            op = self.net.ops[instruction.op]
            reads, makes = [self.read(name, version) for name, version in op.reads], list(op.makes)
            if instruction.kind == "collective":
                makes = [makes[instruction.part]]
        probe.begin(position)
        self.execute(instruction)
        made = [self.values[value] for value in makes]
        probe.end(position, reads, [value for value in made if isinstance(value, Tensor)])

    def execute(self, instruction: Instruction) -> None:
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

    def free(self, storage: str) -> None:
        if storage in self.freed:
            raise self.unsound(f"storage {storage!r} is freed twice")
        self.freed.add(storage)
        for name, version in list(self.values):
            if self.blob(name).storage == storage:
                del self.values[name, version]

    def call(self, op: Operator) -> None:
        call = arrange(op)
        inputs = [self.read(name, version) for name, version in op.reads]
        returned = invoke(op, call, inputs, self.setting, self.dims, self.step)
        results = flatten(call, returned)
        overwritten = dict(op.effects.writes)
        for position in overwritten:
            self.written(op.outputs[position])
        for position, (name, version) in enumerate(op.makes):
            if position in overwritten:
                self.define(name, version, inputs[overwritten[position]])
            else:
                self.assign(name, version, results[position], view=position in dict(op.effects.views))

    def reduce(self, op: Operator, part: int) -> None:
        inputs = [self.read(name, version) for name, version in op.reads]
        divisor, weights = reduction(op, self.dims)
        name, version = list(op.makes)[part]
        place = self.setting.binding[self.blob(name).device]
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
        storage = self.blob(name).storage
        self.writes[storage] = self.writes.get(storage, 0) + 1
        self.freed.discard(storage)

    def outputs(self) -> list[Tensor]:
        last: dict[str, int] = {}
        for name, version in self.values:  # in the order in which they were made
            last[name] = version
        found = [self.read(name, last.get(name, 0)) for name in self.net.external_outputs]
        return [value for value in found if isinstance(value, Tensor)]


def invoke(op: Operator, call: Call, inputs: Sequence[Any], setting: Setting, dims: Dims, step: int) -> Any:
    """What the operator's type returns for these inputs."""

    def generator() -> torch.Generator:
        assert op.seed is not None
        return setting.generators[op.device].manual_seed(mix(step, setting.replica(op), op.seed))

    def value(argument: Argument) -> Any:
        return given(argument, inputs, lambda arg: evaluate(arg, dims), setting.binding[op.device], generator)

    positional = [value(argument) for argument in call.positional]
    keyword = {name: value(argument) for name, argument in call.keyword}
    return perform(op.type, positional, keyword, setting.binding[op.device])


def perform(type: str, positional: Sequence[Any], keyword: Mapping[str, Any], device: torch.device) -> Any:
    """What a type returns for these arguments."""
    if type == "Copy":
        return copy(positional[0], device)
    if type == "aten.view.default":
        return view(*positional)
    if type in KERNELS:
        *tensors, rate, found_inf = positional
        skipped = found_inf is not None and found_inf.item()
        return None if skipped else updater(type, keyword)(*[[tensor] for tensor in tensors], rate)
    return (OWN_KERNELS.get(type) or overload(type))(*positional, **keyword)


def flatten(call: Call, returned: Any) -> dict[int, Tensor]:
    """The returned tensors by the operator's output positions."""
    found: dict[int, Tensor] = {}
    for group, item in zip(call.returned, [returned] if call.single else returned or (), strict=True):
        for position, tensor in zip(group, item, strict=True) if isinstance(group, list) else [(group, item)]:
            if position is not None:
                found[position] = tensor
    return found


def fill(op: Operator, values: Mapping[str, Tensor], program: Program) -> dict[str, Tensor]:
    """Execute an operator of a program's ``init`` on the values made so far; its outputs by name."""
    binding = dict.fromkeys(program.devices, torch.device("cpu"))
    generators = {device: torch.Generator("cpu") for device in program.devices}
    setting = Setting(Plan(program, program.dims, ()), {}, (), binding, generators)
    call, inputs = arrange(op), [values[name] for name in op.inputs]
    results = flatten(call, invoke(op, call, inputs, setting, program.dims, 0))
    overwritten = dict(op.effects.writes)
    return {name: inputs[overwritten[i]] if i in overwritten else results[i] for i, name in enumerate(op.outputs)}
