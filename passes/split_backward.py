"""Two programs of one: the forward, and the backward of the values that it saves.

::

    joint     x, gradients of the outputs ──▶ outputs, gradients
    forward   x ──▶ outputs, saved values
    backward  saved values, gradients of the outputs ──▶ gradients

What crosses is what an operator of the backward reads and an operator of the forward made, or the step was given. It
crosses as the storage that holds it, once, on the device where it lives, and its views are made again behind it: they
move no bytes. Parameters and other state do not cross, both programs have them. Nothing is computed twice.

Source: the default partitioning of AOTAutograd (``torch._functorch.partitioners.default_partition``), which this is
for nets with named storages and several devices.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Literal, NamedTuple

from graphir.errors import PassError
from graphir.ir.blob import STATE_ROLES
from graphir.ir.names import base_name
from graphir.ir.net import Net
from graphir.ir.operator import Operator, stored_versions
from graphir.ir.program import Program, Slot
from graphir.ir.text import operator_text
from graphir.ir.verify import verify

from .base import require_program
from .standing import Order, require_order

__all__ = ["Halves", "split_backward"]

_NAME: Final = "split_backward"
_NEVER_BEHIND: Final[Order] = {"shared": "a value that the backward reads would be overwritten in the forward"}


class Halves(NamedTuple):
    """What :func:`split_backward` makes of a program.

    Attributes:
        forward: takes the inputs; its external outputs are the model's outputs and the *saved* values.
        backward: takes the *saved* values and the gradients of the outputs; its external outputs are the gradients of
            inputs, and of parameters, each of which one replica has alone.
        saved: the blobs that cross, prefixes included, in the order in which they are made. They have the same names in
            both programs; an input of the step is one of the backward, too.
        outputs: positions, among the leaves that the forward returns, of those whose gradients the backward takes, in
            the order of its arguments.
    """

    forward: Program
    backward: Program
    saved: tuple[str, ...]
    outputs: tuple[int, ...]


def split_backward(program: Program, sums: Literal["first", "spread"] = "first") -> Halves:
    """Split a program that was captured with ``backward=True``, replicated or not, between forward and backward.

    Each call of the forward has saved values of its own, so that backwards may follow in any order, and not at all.

    Args:
        program: with copies between devices or without; before ``share_storage``, by which values lose their memory.
        sums: where the replicas' gradients of a parameter are added up: on the ``first`` replica's device; or
            ``spread``, on each device some, so that all add about as many bytes.

    Raises:
        PassError: the program has no such backward; or the backward reads what the forward overwrites, as a later
            forward would overwrite it once more.
    """
    require_program(program, _NAME)
    require_order(program, _NAME, _NEVER_BEHIND, {})
    _require_joint(program)
    parts = _parts_of_interface(program)
    forward, later = _halved(program, parts.fetches)
    crossing = _Crossing(program.step, forward)
    wanted = [p + slot.blob for slot in parts.of_inputs if slot.blob is not None for p in program.replicas]
    homes = _homes(program, sums)
    wanted += [prefix + gradient for gradient, prefix in homes.items()]
    later = _without_unread_sums(later, wanted)
    for op in later:
        crossing.read_by(op)
    for name in wanted:
        crossing.need(name, 0)
    gradients = [p + slot.blob for slot in parts.gradients if slot.blob is not None for p in program.replicas]
    saved = tuple([name for name in crossing.saved if name not in gradients])
    halves = Halves(
        _forward(program, forward, parts, saved, gradients),
        _backward(
            program, [*crossing.views, *map(crossing.rebased, later)], parts, (*saved, *gradients), wanted, homes
        ),
        saved,
        parts.outputs,
    )
    verify(halves.forward, placed=False)
    verify(halves.backward, placed=False)
    return halves


class _Interface(NamedTuple):
    """The interface of a joint program, taken apart; structures are JSON.

    Attributes:
        feeds: what the model is given.
        gradients: the given gradients.
        fetches: what the model returns.
        of_inputs: the gradients of inputs.
        outputs: see :class:`Halves`.
        arguments, taken, results, returned: the structures of these four.
    """

    feeds: tuple[Slot, ...]
    gradients: tuple[Slot, ...]
    fetches: tuple[Slot, ...]
    of_inputs: tuple[Slot, ...]
    outputs: tuple[int, ...]
    arguments: str
    taken: str
    results: str
    returned: str


def _parts_of_interface(program: Program) -> _Interface:
    interface = program.interface
    protocol, arguments = json.loads(interface.arguments)
    args, kwargs = arguments["children_spec"]
    *inputs, given = args["children_spec"]
    count, end = _leaves(given), _leaves(args)
    results = json.loads(str(interface.results))[1]
    output, of_inputs = results["children_spec"]
    returned = _leaves(output)
    gradients, fetches = interface.feeds[end - count : end], interface.fetches[:returned]

    def structure(args_: list[Any], kwargs_: Any) -> str:
        given = {**args, "children_spec": args_}
        return json.dumps([protocol, {**arguments, "children_spec": [given, kwargs_]}])

    nothing = {**kwargs, "context": json.dumps([]), "children_spec": []}
    return _Interface(
        feeds=(*interface.feeds[: end - count], *interface.feeds[end:]),
        gradients=gradients,
        fetches=fetches,
        of_inputs=interface.fetches[returned:],
        outputs=interface.differentiable,
        arguments=structure(inputs, kwargs),
        taken=structure([given], nothing),
        results=json.dumps([protocol, output]),
        returned=json.dumps([protocol, of_inputs]),
    )


def _leaves(structure: Mapping[str, Any]) -> int:
    """How many leaves a structure has."""
    if structure["type"] is None:
        return 1
    return sum(map(_leaves, structure["children_spec"]))


def _require_joint(program: Program) -> None:
    phases = {op.phase for op in program.step.ops}
    if not program.interface.differentiable or not phases <= {"forward", "backward", "reduce"}:
        raise PassError(
            f"program {program.name!r} has no backward that starts from its outputs' gradients",
            fix="capture the model with backward=True, and without a loss",
        )


def _halved(program: Program, fetches: Sequence[Slot]) -> tuple[list[Operator], list[Operator]]:
    """The operators of the forward, and all others. A copy that brings back what is parked may begin before the forward
    ends; it belongs to the backward unless the forward reads what it brings."""
    ops = program.step.ops
    forward = [op for op in ops if op.phase == "forward"]
    copied = {op.outputs[0] for op in forward if op.kind == "copy"}
    read = {name for op in forward for name in op.inputs}
    read.update([p + slot.blob for slot in fetches if slot.blob is not None for p in program.replicas])
    back = {op.outputs for op in forward if op.kind == "copy" and op.inputs[0] in copied and op.outputs[0] not in read}
    early = [op._replace(phase="backward") for op in forward if op.outputs in back]
    later = [op for op in ops if op.phase != "forward"]
    return [op for op in forward if op.outputs not in back], [*early, *later]


class _Crossing:
    """What the backward reads of the forward.

    Attributes:
        saved: the storages that cross, in the order in which they are first read; values of the dict mean nothing.
        views: operators that make views of them, and of state, once more.
    """

    def __init__(self, net: Net, forward: Sequence[Operator]) -> None:
        self.net = net
        self.makers = {made: op for op in forward for made in op.makes}
        self.last = {name: version for op in forward for name, version in op.makes if version}
        self.made: set[tuple[str, int]] = set()
        self.saved: dict[str, None] = {}
        self.views: list[Operator] = []

    def read_by(self, op: Operator) -> None:
        """An operator of the backward, in their order."""
        overwritten = {name for name, _ in op.makes}  # a checkpoint's second run counts on from what is there then
        for name, version in op.reads:
            if version <= self.last.get(name, -1) and name not in overwritten:
                raise PassError(
                    f"the backward reads {name!r}, which the forward overwrites: the next forward would overwrite it "
                    "before this one's backward",
                    at=operator_text(op, self.net),
                    where=f"program {self.net.name!r}",
                    fix="read a copy in the forward (buffer.clone())",
                )
            self.need(name, version)
        self.made.update(op.makes)

    def need(self, name: str, version: int) -> None:
        """A value that the backward reads or hands back."""
        if (name, version) in self.made:
            return
        blob = self.net.blobs[name]
        if blob.storage == name:
            if blob.role not in STATE_ROLES:
                self.saved.setdefault(name)
            return
        maker = self.makers.get((name, version))
        if maker is None:  # a view that a step is given
            self.saved.setdefault(name)
            return
        if len(maker.effects.viewing) < len(maker.outputs) or maker.effects.writes:
            raise PassError(
                f"the backward reads {name!r}, a view that is made together with other values",
                at=operator_text(maker, self.net),
                where=f"program {self.net.name!r}",
                fix="leave the program whole: it runs as one step",
            )
        for read in maker.reads:
            self.need(*read)
        self.made.update(maker.makes)
        self.views.append(maker._replace(phase="backward", by=_NAME))

    def rebased(self, op: Operator) -> Operator:
        """The operator with the versions that it has where the forward has made none."""
        if not op.input_versions and not op.output_versions:
            return op
        versions = [[version - self.last.get(name, 0) for name, version in values] for values in (op.reads, op.makes)]
        return op._replace(input_versions=stored_versions(versions[0]), output_versions=stored_versions(versions[1]))


def _forward(
    program: Program, ops: Sequence[Operator], parts: _Interface, saved: Sequence[str], gradients: Sequence[str]
) -> Program:
    step = program.step
    given = [name for name in step.external_inputs if name not in gradients]
    handed = [p + slot.blob for slot in parts.fetches if slot.blob is not None for p in program.replicas]
    made = [name for name in saved if name not in given]
    interface = replace(
        program.interface,
        arguments=parts.arguments,
        feeds=parts.feeds,
        fetches=parts.fetches,
        results=parts.results,
        differentiable=(),
        gradients={},
    )
    net = _net(f"{program.name}.forward", step, ops, given, dict.fromkeys((*handed, *made)))
    return program.with_(name=f"{program.name}.forward", step=net, interface=interface)


def _backward(
    program: Program,
    ops: Sequence[Operator],
    parts: _Interface,
    given: Sequence[str],
    wanted: Sequence[str],
    homes: Mapping[str, str],
) -> Program:
    step = program.step
    read = {name for op in ops for name in op.inputs} | set(wanted)
    read |= {step.blobs[name].storage for name in read}
    state = [name for name in step.external_inputs if name in read and step.blobs[name].role in STATE_ROLES]
    held = {base_name(name) for name in state}
    everywhere = [name for name in held if all(p + name in state for p in program.replicas)]
    interface = replace(
        program.interface,
        arguments=parts.taken,
        feeds=parts.gradients,
        fetches=parts.of_inputs,
        results=parts.returned,
        differentiable=(),
        placed={**program.interface.placed, **{gradient: (prefix,) for gradient, prefix in homes.items()}},
        module_state={k: name for k, name in program.interface.module_state.items() if name in everywhere},
    )
    net = _net(f"{program.name}.backward", step, ops, (*state, *given), dict.fromkeys(wanted))
    net = net.with_(
        blobs={name: blob._replace(role="input") if blob.storage in given else blob for name, blob in net.blobs.items()}
    )
    init = [op for op in program.init.ops if set(op.outputs) <= set(state)]
    return program.with_(
        name=f"{program.name}.backward",
        init=_net(program.init.name, program.init, init, program.init.external_inputs, ()),
        step=net,
        interface=interface,
        witness=None,
    )


def _homes(program: Program, sums: str) -> dict[str, str]:
    """The replica that hands back each parameter's gradient, by its prefix."""
    gradients = list(dict.fromkeys(program.interface.gradients.values()))
    first = program.replicas[0]
    if sums == "first":
        return dict.fromkeys(gradients, first)
    nbytes = dict.fromkeys(program.replicas, 0)
    homes = {}
    for gradient in sorted(gradients, key=lambda name: -program.step.blobs[first + name].nbytes(program.dims)):
        homes[gradient] = min(nbytes, key=nbytes.__getitem__)
        nbytes[homes[gradient]] += program.step.blobs[first + gradient].nbytes(program.dims)
    return homes


def _without_unread_sums(ops: Sequence[Operator], wanted: Sequence[str]) -> list[Operator]:
    """The operators; of sums, each participant leaves its result out that nobody reads."""
    read = {*wanted, *(name for op in ops for name in op.inputs)}
    found = []
    for op in ops:
        if op.kind == "reduce" and not read.issuperset(op.outputs):
            kept = [name for name in op.outputs if name in read]
            results = "".join(["t" if name in read else "_" for name in op.outputs])
            op = op._replace(outputs=tuple(kept), results=f"[{results}]", by=_NAME)
        found.append(op)
    return found


def _net(
    name: str, net: Net, ops: Sequence[Operator], given: Sequence[str], handed: Mapping[str, None] | tuple[()]
) -> Net:
    """The part of a net that these operators are."""
    named = {*given, *handed, *(name for op in ops for name in (*op.inputs, *op.outputs))}
    named |= {net.blobs[name].storage for name in named}
    blobs = {name: blob for name, blob in net.blobs.items() if name in named}
    gradients = {a: g for a, g in net.gradients.items() if a in blobs and g in blobs}
    ops = [op if not op.of or op.of in blobs else op._replace(of="") for op in ops]
    return Net(name, tuple(ops), blobs, tuple(given), tuple(handed), gradients)
