"""Shifting a Caffe2 net, where a label belongs to a name.

This is ``ShiftActivationDevices`` of Caffe2's ``data_parallel_model_utils``: operators come out on the devices that
Caffe2 gives them. The source ``g`` has the names that begin with ``gpu_<g>/`` and the operators on a device number
``g`` of any kind. An operator of the init net goes where the label of its first output says.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from graphir.ir.device import Device
from graphir.ir.net import Net
from graphir.ir.operator import Operator
from graphir.ir.placement import first_device
from graphir.ir.program import Program

from .labels import Label, Source, propagate

__all__ = ["shift_by_name"]


def shift_by_name(
    program: Program, known: Collection[str], chosen: Collection[str], shifts: Mapping[int, int], by: str
) -> Program:
    """A Caffe2 program with its operators shifted.

    Args:
        program: as loaded.
        known: the activations, without a prefix.
        chosen: the names to move, without a prefix; those that are not *known* get a label that decides nothing.
        shifts: source device number to target device number.
        by: the pass that moves them.
    """
    head = program.replicas[0].partition("_")[0]
    by_number = {number: _source(program, f"{head}_{number}/" if head else "", known, chosen) for number in shifts}
    sources = {device: by_number[device.index] for device in program.devices if device.index in shifts}
    moved = propagate(program.step.ops, sources, follows=lambda op: False)
    step = {i: _numbered(op, shifts[op.device.index], by) for i in moved for op in (program.step.ops[i],)}
    filled = {
        name: shifts[number] if label.moves else number
        for number, source in by_number.items()
        for name, label in source.labels.items()
    }
    init = {
        i: _numbered(op, filled[op.outputs[0]], by)
        for i, op in enumerate(program.init.ops)
        if op.outputs and op.device.index != filled.get(op.outputs[0], op.device.index)
    }
    homes: dict[str, Device] = {}
    return program.with_(
        init=_rehomed(program.init, init, homes),
        step=_rehomed(program.step, step, homes, program.init.blobs),
    )


def _source(program: Program, prefix: str, known: Collection[str], chosen: Collection[str]) -> Source:
    """The names that begin with *prefix*, and the labels that its activations start with."""
    labels = {prefix + name: Label(moves=False, decides=True) for name in known}
    labels |= {prefix + name: Label(moves=True, decides=prefix + name in labels) for name in chosen}
    return Source({name: name for name in program.step.blobs if name.startswith(prefix)}, labels)


def _numbered(op: Operator, number: int, by: str) -> Operator:
    """*op* on the device of its kind that has this number."""
    return op.on(Device.parse(f"{op.device.kind}:{number}"), by)


def _rehomed(net: Net, moved: Mapping[int, Operator], homes: dict[str, Device], made: Collection[str] = ()) -> Net:
    """A net with its *moved* operators. Each blob lives where *homes* says, or else where it did. A blob that a moved
    operator is the first to write is added to *homes*, unless an earlier net has *made* it."""
    ops, blobs, external = list(net.ops), dict(net.blobs), set(net.external_inputs)
    for name, device in homes.items():
        if name in blobs:
            blobs[name] = blobs[name].on(device)
    for i, op in moved.items():
        ops[i] = op
        versions = op.output_versions
        for k, name in enumerate(op.outputs):
            if (versions is None or not versions[k]) and name not in external and name not in made:
                homes[name] = first_device(op, k, blobs, net.dialect)
                blobs[name] = blobs[name].on(homes[name])
    return net.with_(ops=tuple(ops), blobs=blobs)
