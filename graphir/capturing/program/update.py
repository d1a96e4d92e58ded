"""Updates: one operator per parameter each time, the optimizer's state, and its numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import torch

from ...ir.blob import Blob, contiguous_strides
from ...ir.device import CPU, gpu
from ...ir.moved import NOW
from ...ir.names import Names
from ...ir.operator import Operator, stored_versions
from ...ir.opset import effects_of, signature
from ...ir.program import ParamGroup
from ...ir.symbols import to_symbol
from ..intake.optimizers import Group, ParamUpdate, with_layout
from ..record.values import RecordedCall
from ..step.recorded_step import Recording

__all__ = ["Update", "build_update"]

_HERE: Final = gpu(0)


class _Part(NamedTuple):
    """A parameter that is updated.

    Attributes:
        update: of the parameter.
        state: the names of the blobs of the parameter's state.
        rate: the name of the learning rate's blob.
        numbers: the names of the blobs of the group's other numbers, by the numbers' names.
    """

    update: ParamUpdate
    state: Mapping[str, str]
    rate: str
    numbers: Mapping[str, str]


class Update(NamedTuple):
    """The updates of a step, and the state and numbers that they read.

    Attributes:
        param_groups: of the program's interface.
        optimizer_state: of the program's interface.
        number_blobs: of each group the learning rate, and the other numbers that move.
        state_blobs, state_tensors, state_modules: the optimizer's state: its blobs, and by their names the first values
            and the modules whose parameters they belong to.
        parts: each parameter that is updated, by the index of its value.
    """

    param_groups: tuple[ParamGroup, ...]
    optimizer_state: dict[str, dict[str, str]]
    number_blobs: tuple[Blob, ...]
    state_blobs: tuple[Blob, ...]
    state_tensors: dict[str, torch.Tensor]
    state_modules: dict[str, str]
    parts: dict[int, _Part]

    def operators(self, calls: Sequence[RecordedCall], named: Sequence[str]) -> Iterator[Operator]:
        """The operator in the place of each of these calls, which are all of a step's updates, in order.

        Args:
            calls: see :data:`.values.UPDATE`.
            named: the blob of each value.
        """
        done = Counter[int]()
        for call in calls:
            param = call.inputs[0].root.index
            yield _operator(self.parts[param], call, named, done[param])
            done[param] += 1


def build_update(groups: Sequence[Group], recording: Recording, names: Names) -> Update:
    """The update of the parameters that the step updates, those that have a gradient; the others are skipped, as in
    torch. Parameters whose gradients last have state, too: another step updates these.

    Args:
        groups: of the optimizer.
        recording: of the step.
        names: hands out the names of numbers and state.
    """
    updated = {call.inputs[0].root.index for call in recording.updates}
    by_others = {param.index for param, _, _ in recording.kept} - updated
    rates = [names.take("lr") for _ in groups]
    numbers = [{name: names.take(name) for name in group.numbers} for group in groups]
    blobs: list[Blob] = []
    tensors: dict[str, torch.Tensor] = {}
    modules: dict[str, str] = {}
    state: dict[str, dict[str, str]] = {}
    parts: dict[int, _Part] = {}
    for group, rate, others in zip(groups, rates, numbers, strict=True):
        values = {update.param: recording.state[update.param] for update in group.updates}
        # If one gradient of a list is sparse, torch's Adagrad makes all updates of the list one by one, and its SGD
        # only the updates by sparse gradients.
        looped = {
            values[update.param].dtype
            for update in group.updates
            if update.type == "graphir.adagrad" and values[update.param].index in recording.sparse_gradients
        }
        for update in group.updates:
            index = values[update.param].index
            if index in updated | by_others:
                sparse = index in recording.sparse_gradients
                update = with_layout(update, sparse, alone=sparse or values[update.param].dtype in looped)
            elif not update.started:
                continue
            mine = state[update.param] = {}
            module = update.param.rpartition(".")[0]
            for entry in update.state:
                name = mine[entry.key] = names.take(f"{update.param}.{entry.key}")
                shape, strides = tuple(entry.tensor.shape), entry.strides
                device = CPU if entry.on_host else _HERE
                dtype = str(to_symbol(entry.tensor.dtype))
                dense = strides == contiguous_strides(shape)
                blobs.append(Blob(name, shape, dtype, device, "state", name, None if dense else strides))
                tensors[name], modules[name] = entry.tensor, module
            if index in updated:
                parts[index] = _Part(update, mine, rate, others)
    described = [
        ParamGroup(rate, group.params, group.options, others, group.optimizer)
        for group, rate, others in zip(groups, rates, numbers, strict=True)
    ]
    return Update(
        tuple(described),
        {param: mine for param, mine in state.items() if mine},
        tuple([Blob(name, (), "f64", CPU, "input", name) for group in described for name in group.blobs]),
        tuple(blobs),
        tensors,
        modules,
        parts,
    )


def _operator(part: _Part, call: RecordedCall, named: Sequence[str], done: int) -> Operator:
    """The operator that updates a parameter, whose state was *done* so often before."""
    update, state = part.update, part.state
    tensors = signature(update.type).tensors
    keys = [p.name for p in tensors if p.written and p.name != "param"]
    present = [state[key] for key in keys if key in state]
    of_number = {number + NOW: part.numbers[number] for number in update.numbers}
    numbers = [of_number.get(p.name) for p in tensors if p.name.endswith(NOW)]
    read = [named[value.index] for value in call.inputs]
    sparse = 2 + (tensors[1].name == "indices")
    gradient, skip = read[1:sparse], read[sparse:]
    states, skips = [state.get(key) for key in keys], [*skip] if skip else [None]
    given: list[str | None] = [update.param, *gradient, *states, part.rate, *skips, *numbers]
    while given[-1] is None:
        given.pop()
    inputs = tuple([name for name in given if name is not None])
    operands = "".join(["_" if name is None else "t" for name in given]) if None in given else None
    versions = {named[value.index]: value.version for value in call.inputs} | dict.fromkeys(state.values(), done)
    return Operator(
        update.type,
        inputs,
        (update.param, *present),
        update.args,
        _HERE,
        "update",
        update.param.rpartition(".")[0],
        operands=operands,
        effects=effects_of(update.type, update.args, operands, len(inputs), None),
        input_versions=stored_versions([versions.get(name, 0) for name in inputs]),
        output_versions=(call.outputs[0].version, *[done + 1] * len(present)),
        source=call.line,
    )
