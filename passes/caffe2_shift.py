"""Label propagation over a Caffe2 net, where a label belongs to a name.

This is ``_ShiftActivationDevices`` of Caffe2's ``data_parallel_model_utils``: operators come out on the devices that
Caffe2 gives them. For the source ``g``, whose names begin with ``gpu_<g>/``, an operator on a device number ``g``, of
any kind,

    takes the label of the last activation among its inputs and outputs;
          if there is none, the first label among them;
          if there is none, it stays;
    and gives its device's number to every name of the source that it touches and that has no label yet.

An operator of the init net goes where the label of its first output says. Labels of one source are never asked for by
operators of another, so that one sweep does what Caffe2 does in one for each shift.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache

from graphir.ir.device import Device
from graphir.ir.net import Net
from graphir.ir.operator import Operator
from graphir.ir.placement import first_device
from graphir.ir.program import Program

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
    sources = {}
    for source, target in shifts.items():
        prefix = f"{head}_{source}/"
        labels = {prefix + name: source for name in known}
        labels.update({prefix + name: target for name in chosen})
        sources[source] = _Source(prefix, {prefix + name for name in known}, labels)
    step = _moved(program.step.ops, sources, by)
    init = _following(program.init.ops, sources, by)
    homes = _homes(program.init, init, {})
    made = {name for op in init for name in op.outputs}
    return program.with_(
        init=_at_home(program.init, init, homes),
        step=_at_home(program.step, step, _homes(program.step, step, homes, made)),
    )


@dataclass(frozen=True)
class _Source:
    """A device that is shifted from.

    Attributes:
        prefix: of the names that get labels.
        activations: the names whose labels decide.
        labels: by name, the number of a device.
    """

    prefix: str
    activations: set[str]
    labels: dict[str, int]


def _moved(ops: tuple[Operator, ...], sources: Mapping[int, _Source], by: str) -> tuple[Operator, ...]:
    """The step's operators on their new devices; fills the labels."""
    found = list(ops)
    of_device: dict[Device, tuple[int, _Source] | None] = {}
    for i, op in enumerate(ops):
        device = op.device
        if device not in of_device:
            source = sources.get(device.index)
            of_device[device] = None if source is None else (device.index, source)
        here = of_device[device]
        if here is None:
            continue
        number, source = here
        labels, activations = source.labels, source.activations
        decided = first = new = None
        for name in op.inputs + op.outputs:
            label = labels.get(name)
            if label is None:
                new = [*new, name] if new else [name]
            elif name in activations:
                decided = label
            elif first is None:
                first = label
        label = first if decided is None else decided
        if label is None:
            label = number
        if new:
            for name in new:
                if name.startswith(source.prefix):
                    labels[name] = label
        if label != number:
            found[i] = op.on(_numbered(device, label), by)
    return tuple(found)


def _following(ops: tuple[Operator, ...], sources: Mapping[int, _Source], by: str) -> tuple[Operator, ...]:
    """The init net's operators where the labels of what they fill say."""
    labels: dict[str, int] = {}
    for source in sources.values():
        labels.update(source.labels)
    found = list(ops)
    for i, op in enumerate(ops):
        label = labels.get(op.outputs[0]) if op.outputs else None
        if label is not None:
            device = _numbered(op.device, label)
            if device is not op.device:
                found[i] = op.on(device, by)
    return tuple(found)


@cache
def _numbered(device: Device, number: int) -> Device:
    return device if device.index == number else Device.parse(f"{device.kind}:{number}")


def _homes(
    net: Net, ops: tuple[Operator, ...], known: Mapping[str, Device], made: Collection[str] = ()
) -> dict[str, Device]:
    """Where the blobs of a net live that do not live where they did: what is *known*, what is in no earlier net *made*
    where it is first written."""
    homes = dict(known)
    external = set(net.external_inputs)
    for old, op in zip(net.ops, ops, strict=True):
        if op is not old:
            versions = op.output_versions
            for i, name in enumerate(op.outputs):
                if (versions is None or not versions[i]) and name not in external and name not in made:
                    homes[name] = first_device(op, i, net.blobs)
    return homes


def _at_home(net: Net, ops: tuple[Operator, ...], homes: Mapping[str, Device]) -> Net:
    blobs = dict(net.blobs)
    for name, device in homes.items():
        blob = blobs.get(name)
        if blob is not None and blob.device != device:
            blobs[name] = blob.on(device)
    return net.with_(ops=ops, blobs=blobs)
