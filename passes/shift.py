"""Move the operators that handle chosen activations to other devices, by label propagation.

This is ``ShiftActivationDevices`` of Caffe2's ``data_parallel_model_utils`` over storages instead of names. A label
says whether a storage goes along. Chosen activations start with "moves", the other activations with "stays", and
gradients of activations with the label of theirs. One sweep in program order then labels everything else on the source
device::

    an operator takes the label of the last activation among its inputs and outputs;
                if there is none, that of an input of the step, if it has one;
                if there is none, the first label among them;
                if there is none, it stays;
    and gives it to every storage that it touches and that has no label yet.

The second line and the labels of gradients are ours. Caffe2's ``FCGradient(data, w, dy)`` finds the label of the data
first; torch computes the same by ``mm(dy.t, data)`` and ``mm(dy, w.t)``, which would find the gradient's. A gradient
that comes down a transformer's residual stream meets no activation: it would carry the backward of all layers before
the chosen ones along.

So parameters follow the first operator that computes with them, and gradients and updates follow both. Views are
transparent: they live where their storage lives, and do not label it. A fresh value lives where its operator runs,
state lives where its label says.

One gradient may be that of several activations, as of the operands of an addition; it has the label of the last one.
The backward of an embedding bag, which reads the gradient and no activation beside it, may so run on another device
than the bag, and its table's update read a copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, Final

from pydantic import field_validator

from graphir.errors import PassError, nearest
from graphir.ir.blob import Blob
from graphir.ir.device import Device, gpu
from graphir.ir.names import base_name
from graphir.ir.net import Net
from graphir.ir.operator import PURE, Operator
from graphir.ir.program import Program

from .activations import activation_names, find_activations
from .base import Pass, build, register
from .caffe2_shift import shift_by_name

__all__ = ["ShiftActivations", "shift_activations"]


_MOST_LISTED: Final = 6
"""Activations that an error names."""


@register
class ShiftActivations(Pass):
    """See :func:`shift_activations`."""

    name: ClassVar[str] = "shift_activations"

    activations: tuple[str, ...]
    shifts: dict[int, int]
    strict: bool = True

    @field_validator("shifts")
    @classmethod
    def _disjoint(cls, shifts: dict[int, int]) -> dict[int, int]:
        negative = sorted(d for pair in shifts.items() for d in pair if d < 0)
        if negative:
            raise ValueError(f"{negative[0]} is not a device number; they count from 0")
        both = sorted(shifts.keys() & set(shifts.values()))
        if both:
            raise ValueError(f"device {both[0]} is both a source and a target; shift in two calls, targets first")
        return shifts

    def rewrite(self, program: Program) -> Program:
        if program.step.dialect.workspace:
            return self._rewrite_caffe2(program)
        known = activation_names(program)
        chosen = dict.fromkeys([self._storage(program, name) for name in self.activations])
        self._refuse_unknown(program, known, chosen)
        moves = {gpu(source): gpu(target) for source, target in self.shifts.items()}
        sweep = _Sweep(program, known, chosen, moves)
        sweep.run()
        blobs = sweep.blobs()
        step = program.step.with_(ops=tuple(sweep.ops(blobs)), blobs=blobs)
        return program.with_(init=_follow(program.init, blobs), step=step)

    def _rewrite_caffe2(self, program: Program) -> Program:
        """Shift a net whose labels belong to names. Where none is an activation, any blob's name will do."""
        prefix = program.replicas[0]
        known = [name[len(prefix) :] for name in activation_names(program)]
        names = known or [base_name(name) for name in program.step.blobs]
        unknown = sorted(set(self.activations) - set(names))
        if self.strict and unknown:
            raise _not_an_activation(program, unknown[0], find_activations(program))
        return shift_by_name(program, known, self.activations, self.shifts, self.name)

    def _storage(self, program: Program, name: str) -> str:
        """The first replica's blob that holds the bytes of *name*: a view's name stands for its storage."""
        name = program.replicas[0] + name
        blob = program.step.blobs.get(name)
        return name if blob is None else blob.storage

    def _refuse_unknown(self, program: Program, known: Mapping[str, None], chosen: Mapping[str, None]) -> None:
        used = [device for device in program.devices if device.kind == "gpu"]
        for source in self.shifts:
            if self.strict and gpu(source) not in used:
                raise PassError(
                    f"no operator of program {program.name!r} is on gpu:{source}",
                    fix=f"sources can be {', '.join(used)}",
                )
        unknown = sorted(base_name(name) for name in chosen if name not in known)
        if self.strict and unknown:
            raise _not_an_activation(program, unknown[0], find_activations(program))


def _not_an_activation(program: Program, name: str, listed: Sequence[str]) -> PassError:
    some = ", ".join(listed[:_MOST_LISTED]) + (", …" if len(listed) > _MOST_LISTED else "")
    return PassError(
        f"{name!r} is not an activation of program {program.name!r}{nearest(name, listed)}",
        fix=f"find_activations(program) lists them, without a replica's prefix: {some or 'there are none'}",
    )


def shift_activations(
    program: Program, activations: Sequence[str], shifts: Mapping[int, int], *, strict: bool = True
) -> Program:
    """Move what handles *activations* from device ``i`` to device ``shifts[i]``.

    Names have no prefix: the activation moves in every replica that has it on a source device. The result needs
    :func:`inject_copies` before it can be emitted.

    Args:
        program: captured, or replicated.
        activations: names as :func:`find_activations` gives them; a view stands for what it shows.
            Without names nothing moves.
        shifts: source device number to target device number.
        strict: refuse names that are not activations and sources that nothing is on. Otherwise such names are weak
            labels: they move what has no other label, as in Caffe2.

    Raises:
        PassError: an unknown name or device, or a device that is both source and target. Nothing has changed then.
    """
    return build(ShiftActivations, activations=activations, shifts=shifts, strict=strict)(program)


_MOVES, _FED, _ACTIVATION, _SOURCE = 1, 2, 4, -8
"""What a label says, as bits: its storage moves; it is an input of the step; it is an activation, which decides; and,
in the bits above, on which source device it is. The sweep takes as long as its look-ups, so one must tell all."""


class _Sweep:
    """The labels of one shift, and what follows from them.

    Attributes:
        labels: by storage, its label; what has none, and every view, has its blob there. (One look-up a name tells all
            that the sweep asks, and the order is that of the blobs: a large net's sweep takes as long as its cache
            misses.)
        sources: the bits of each source device.
        fed: the storages of the step's inputs.
        moving: the storages whose label says that they move.
        moved: by position of an operator that moves, its new device.
        made: by storage that an operator makes against its label, the device of that operator.
        followers: positions of view operators and collectives, which are where their operands are.
        reductions: positions of what else reduces over replicas, which is where its result is used.
    """

    def __init__(
        self,
        program: Program,
        known: Mapping[str, None],
        chosen: Mapping[str, None],
        moves: Mapping[Device, Device],
    ) -> None:
        self.net, self.moves = program.step, moves
        self.labels: dict[str, int | Blob] = dict(self.net.blobs)
        self.sources = {device: (k << 3) for k, device in enumerate(moves)}
        self.moving: list[str] = []
        self.moved: dict[int, Device] = {}
        self.made: dict[str, Device] = {}
        self.followers: list[int] = []
        self.reductions: list[int] = []
        fed = {feed.blob for feed in program.interface.feeds if feed.blob is not None}
        self.fed = {prefix + name for prefix in program.replicas for name in fed}
        for prefix in program.replicas:
            self.label(self.of_replica(chosen, program, prefix), _MOVES)
            self.label(self.of_replica(known, program, prefix), _ACTIVATION)
        self.label_gradients()

    def of_replica(self, names: Mapping[str, None], program: Program, prefix: str) -> Iterable[str]:
        """A replica's blobs for the first replica's."""
        first = program.replicas[0]
        return names if prefix == first else [prefix + name[len(first) :] for name in names]

    def label(self, names: Iterable[str], bits: int) -> None:
        """Add *bits* to the labels of those among *names* that are on a source device."""
        labels, sources = self.labels, self.sources
        for name in names:
            label = labels.get(name)
            if label is None:
                continue
            if isinstance(label, Blob):
                if label.storage != name:
                    name = label.storage
                    label = labels[name]
                if isinstance(label, Blob):
                    source = sources.get(label.device)
                    if source is None:
                        continue
                    label = source
            labels[name] = label | bits
            if bits & _MOVES:
                self.moving.append(name)

    def label_gradients(self) -> None:
        """A gradient on its activation's device goes along with it; where it is that of several, with the last one."""
        labels, sources = self.labels, self.sources
        for name, gradient in reversed([*self.net.gradients.items()]):  # who comes first here labels it
            label = labels[name]
            if isinstance(label, Blob):
                label = labels[label.storage]
            if isinstance(label, Blob) or not label & _ACTIVATION:
                continue
            own = labels[gradient]
            if isinstance(own, Blob) and own.storage != gradient:
                gradient = own.storage
                own = labels[gradient]
            if isinstance(own, Blob) and sources.get(own.device) == label & _SOURCE:
                labels[gradient] = label & (_SOURCE | _MOVES)
                if label & _MOVES:
                    self.moving.append(gradient)

    def run(self) -> None:
        """Label every storage and find the operators that move, in program order."""
        labels, fed, sources = self.labels, self.fed, self.sources
        for i, op in enumerate(self.net.ops):
            if op.effects is not PURE and op.effects.views and not op.effects.writes:
                self.followers.append(i)
                continue
            if op.type == "AllReduce":
                self.followers.append(i)
                self.label_participants(op)
                continue
            if op.phase == "reduce":
                self.reductions.append(i)
                continue
            device = op.device
            source = sources.get(device)
            if source is None:
                continue
            decided = given = first = new = None
            some, every = 0, _MOVES
            for name in op.inputs + op.outputs:
                label = labels[name]
                if isinstance(label, Blob):
                    if label.storage != name:
                        name = label.storage
                        label = labels[name]
                    if isinstance(label, Blob):
                        if label.device == device:
                            new = [*new, name] if new else [name]
                        continue
                if label & _SOURCE != source:
                    continue
                some |= label
                every &= label
                if label & _ACTIVATION:
                    decided = label
                elif label & _FED:
                    given = label
                elif first is None:
                    first = label
            label = decided if decided is not None else given if given is not None else first or 0
            moves = label & _MOVES
            if new:
                for storage in new:
                    labels[storage] = source | moves | _FED if storage in fed else source | moves
                if moves:
                    self.moving += new
            if moves:
                self.moved[i] = self.moves[device]
            if some & _MOVES and not every:
                self.note_made(op, self.moves[device] if moves else device)

        for i in reversed(self.reductions):
            self.label_operands(self.net.ops[i])

    def label_operands(self, op: Operator) -> None:
        """What a reduction brings to its own device goes where its result goes."""
        result = self.labels[op.outputs[0]]
        if isinstance(result, Blob):
            return
        for name in op.inputs:
            label = self.labels[name]
            if isinstance(label, Blob) and label.storage == name and label.device == op.device:
                self.labels[name] = result
                if result & _MOVES:
                    self.moving.append(name)

    def label_participants(self, op: Operator) -> None:
        """Results of a collective go where their participants go, or were made."""
        for participant, result in zip(op.inputs, op.outputs, strict=True):
            given = self.net.blobs[participant].storage
            label, storage = self.labels[given], self.net.blobs[result].storage
            if given in self.made:
                self.made[storage] = self.made[given]
            if isinstance(label, int) and not isinstance(self.labels[storage], int):
                self.labels[storage] = label & (_SOURCE | _MOVES)
                if label & _MOVES:
                    self.moving.append(storage)

    def note_made(self, op: Operator, device: Device) -> None:
        """An operator whose operands have different labels has made its own storages on *device*."""
        blobs, external = self.net.blobs, self.net.external_inputs
        self.made.update((name, device) for name in op.outputs if not blobs[name].is_view and name not in external)

    def blobs(self) -> dict[str, Blob]:
        """Every blob where its storage now lives.

        State lives where its label says. A storage that an operator makes lives where that operator runs, which
        differs from its label where an operator with several results took the label of another one.
        """
        blobs = dict(self.net.blobs)
        for name in self.moving:
            blob = self.net.blobs[name]
            blobs[name] = blob.on(self.moves[blob.device])
        for name, device in self.made.items():
            blobs[name] = blobs[name].on(device)
        for name, blob in self.net.blobs.items():
            if blob.storage != name and blobs[blob.storage].device != blob.device:
                blobs[name] = blob.on(blobs[blob.storage].device)
        return blobs

    def ops(self, blobs: Mapping[str, Blob]) -> list[Operator]:
        """Every operator on its new device."""
        ops = list(self.net.ops)
        deciding = {i: ops[i].inputs[0] for i in self.followers} | {i: ops[i].outputs[0] for i in self.reductions}
        for i, name in deciding.items():
            if blobs[name].device != ops[i].device:
                self.moved[i] = blobs[name].device
        for i, device in self.moved.items():
            ops[i] = ops[i].on(device, ShiftActivations.name)
        return ops


def _follow(init: Net, moved: Mapping[str, Blob]) -> Net:
    """Fill every blob of the step where it now lives."""
    blobs = {name: blob.on(moved[name].device) if name in moved else blob for name, blob in init.blobs.items()}
    ops = []
    for op in init.ops:
        device = blobs[op.outputs[0]].device
        ops.append(op if device == op.device else op.on(device, ShiftActivations.name))
    return init.with_(ops=tuple(ops), blobs=blobs)
