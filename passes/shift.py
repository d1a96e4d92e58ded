"""Move the operators that handle chosen activations to other devices, by label propagation.

This is ``ShiftActivationDevices`` of Caffe2's ``data_parallel_model_utils``, over storages instead of names, and over
the forward alone (:mod:`.labels`). Chosen activations start with a label that moves, the other activations with one
that stays; both decide. Parameters so follow the first operator that computes with them. Views are transparent: they
live where their storage lives, and label nothing.

What computes gradients runs beside the operator whose gradients they are, and updates run beside their parameters
(:mod:`.following`). Caffe2's rule goes by the last activation among the operands. It leaves behind the weight's
gradient of the first layer that moves, such as ``mm(fc2_grad.t, relu)``, since that reads an activation that stays; and
the gradients that come down the residual stream of a transformer meet no activation at all. Caffe2's own nets are
shifted by it exactly (:mod:`.caffe2_shift`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Final

from pydantic import field_validator

from graphir.errors import PassError, nearest
from graphir.ir.device import Device, DeviceName, gpu
from graphir.ir.names import base_name
from graphir.ir.program import Program

from .activations import activation_names, find_activations
from .base import OptionError, Pass, Shifts, build, register
from .caffe2_shift import shift_by_name
from .following import follow, follows
from .labels import Label, Source, propagate
from .standing import Order

__all__ = ["ShiftActivations", "shift_activations"]


_MOST_LISTED: Final = 6
"""Activations that an error names."""


@register
class ShiftActivations(Pass):
    """See :func:`shift_activations`."""

    name: ClassVar[str] = "shift_activations"
    never_behind: ClassVar[Order] = {"shared": "an operand that moves would be overwritten in a copy alone"}

    activations: tuple[str, ...]
    shifts: Shifts
    strict: bool = True

    @field_validator("shifts")
    @classmethod
    def _disjoint(cls, shifts: dict[int, int]) -> dict[int, int]:
        both = sorted(shifts.keys() & set(shifts.values()))
        if both:
            raise OptionError(
                f"device {both[0]} is both a source and a target", fix="shift in two calls, targets first"
            )
        return shifts

    def rewrite(self, program: Program) -> Program:
        if program.step.dialect.workspace:
            return self._rewrite_caffe2(program)
        units = _units(program)
        known = activation_names(program)
        if units:
            known = dict.fromkeys([units.get(name, name) for name in known])
        chosen = dict.fromkeys([self._storage(program, name, units) for name in self.activations])
        self._refuse_unknown(program, known, chosen)
        targets = {gpu(source): gpu(target) for source, target in self.shifts.items()}
        sources = _sources(program, known, chosen, targets)
        moved = propagate(program.step.ops, sources, follows)
        homes = {
            name: targets[device]
            for device, source in sources.items()
            for name in program.step.external_inputs
            if (label := source.labels.get(name)) is not None and label.moves
        }
        ops = program.step.ops
        return follow(program, {i: targets[ops[i].device] for i in moved}, homes, self.name)

    def _rewrite_caffe2(self, program: Program) -> Program:
        """Shift a net whose labels belong to names. Where none is an activation, any blob's name will do."""
        prefix = program.replicas[0]
        known = [name[len(prefix) :] for name in activation_names(program)]
        names = known or [base_name(name) for name in program.step.blobs]
        unknown = sorted(set(self.activations) - set(names))
        if self.strict and unknown:
            raise _not_an_activation(program, unknown[0], find_activations(program))
        return shift_by_name(program, known, self.activations, self.shifts, self.name)

    def _storage(self, program: Program, name: str, units: Mapping[str, str]) -> str:
        """The first replica's blob that stands for *name*: for a view its storage; for a blob that a custom function
        makes, the result to which the function's operators belong."""
        name = program.replicas[0] + name
        blob = program.step.blobs.get(name)
        return name if blob is None else units.get(blob.storage, blob.storage)

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


def _units(program: Program) -> dict[str, str]:
    """For each blob that a forward operator with ``of`` makes, as a custom function's operators have: the storage of
    the blob that it belongs to."""
    step = program.step
    return {
        name: step.blobs[op.of].storage for op in step.ops if op.of and op.phase == "forward" for name in op.outputs
    }


def _not_an_activation(program: Program, name: str, listed: Sequence[str]) -> PassError:
    if name in program.module_paths:
        return PassError(
            f"{name!r} is a module of program {program.name!r}, and no activation",
            fix=f'move the module: shift_modules(program, {{"{name}": "gpu:1"}})',
        )
    some = ", ".join(listed[:_MOST_LISTED]) + (", …" if len(listed) > _MOST_LISTED else "")
    return PassError(
        f"{name!r} is not an activation of program {program.name!r}{nearest(name, listed)}",
        fix=f"find_activations(program) lists them, without a replica's prefix: {some or 'there are none'}",
    )


def shift_activations(
    program: Program,
    activations: Sequence[str],
    shifts: Mapping[int, DeviceName] | Mapping[str, DeviceName] | Mapping[DeviceName, DeviceName],
    *,
    strict: bool = True,
) -> Program:
    """Move what handles *activations* from device ``i`` to device ``shifts[i]``.

    Names have no prefix: the activation moves in every replica that has it on a source device. The result needs
    :func:`inject_copies` before it can be emitted.

    Args:
        program: captured, or replicated.
        activations: names as :func:`find_activations` gives them; a view stands for what it shows.
            Without names nothing moves.
        shifts: source gpu to target gpu, each as it is printed or by its number: ``{"gpu:0": "gpu:2", 1: 3}``. To the
            cpu :func:`shift_modules` moves.
        strict: refuse names that are not activations and sources that nothing is on. Otherwise such names are weak
            labels: they move what has no other label, as in Caffe2.

    Raises:
        PassError: an unknown name or device, or a device that is both source and target. Nothing has changed then.
    """
    return build(ShiftActivations, activations=activations, shifts=shifts, strict=strict)(program)


def _sources(
    program: Program, known: Mapping[str, None], chosen: Mapping[str, None], targets: Mapping[Device, Device]
) -> dict[Device, Source]:
    """Each source device with the labels that its activations start with, those of every replica.

    Args:
        program: captured, or replicated.
        known: the activations of the first replica.
        chosen: storages of the first replica that move; those that are not *known* get a label that decides nothing.
        targets: by source device, the target.
    """
    blobs, first = program.step.blobs, program.replicas[0]
    keys: dict[Device, dict[str, str]] = {device: {} for device in targets}
    sources = {device: Source(names, {}) for device, names in keys.items()}
    for name, blob in blobs.items():
        if blob.device in keys:
            keys[blob.device][name] = blob.storage
    for prefix in program.replicas:
        for names, decides in ((known, True), (chosen, False)):
            for name in names:
                own = prefix + name[len(first) :]
                if own in blobs and blobs[own].device in sources:
                    storage, labels = blobs[own].storage, sources[blobs[own].device].labels
                    labels[storage] = Label(moves=not decides, decides=decides or storage in labels)
    return sources
