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
from typing import Final

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
        prefix = f"{head}_{source}/" if head else ""
        labels = {prefix + name: _label(source, decides=True) for name in known}
        labels.update({name: _label(target, decides=name in labels) for name in [prefix + name for name in chosen]})
        sources[source] = _Source(prefix, labels)
    step = _moved(program.step.ops, sources, by)
    init = _following(program.init.ops, sources, by)
    homes: dict[str, Device] = {}
    return program.with_(
        init=_rehomed(program.init, init, homes),
        step=_rehomed(program.step, step, homes, program.init.blobs),
    )


_DECIDES: Final = 1


def _label(number: int, *, decides: bool = False) -> int:
    """A device's number, and in the lowest bit whether an operator takes this label rather than its first."""
    return number << 1 | decides


@dataclass(frozen=True)
class _Source:
    """A device that is shifted from.

    Attributes:
        prefix: of the names that get labels.
        labels: by name, see :func:`_label`.
    """

    prefix: str
    labels: dict[str, int]


def _moved(ops: tuple[Operator, ...], sources: Mapping[int, _Source], by: str) -> dict[int, Operator]:
    """The step's operators that move, by position, on their new devices; fills the labels."""
    found = {}
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
        labels = source.labels
        decided = first = new = None
        for name in op.inputs + op.outputs:
            label = labels.get(name)
            if label is None:
                new = [*new, name] if new else [name]
            elif label & _DECIDES:
                decided = label
            elif first is None:
                first = label
        label = first if decided is None else decided
        goes_to = number if label is None else label >> 1
        if new:
            for name in new:
                if name.startswith(source.prefix):
                    labels[name] = goes_to << 1
        if goes_to != number:
            found[i] = op.on(_numbered(device, goes_to), by)
    return found


def _following(ops: tuple[Operator, ...], sources: Mapping[int, _Source], by: str) -> dict[int, Operator]:
    """The init net's operators that go where the labels of what they fill say, by position."""
    labels: dict[str, int] = {}
    for source in sources.values():
        labels.update(source.labels)
    found = {}
    for i, op in enumerate(ops):
        label = labels.get(op.outputs[0]) if op.outputs else None
        if label is not None:
            device = _numbered(op.device, label >> 1)
            if device is not op.device:
                found[i] = op.on(device, by)
    return found


@cache
def _numbered(device: Device, number: int) -> Device:
    return device if device.index == number else Device.parse(f"{device.kind}:{number}")


def _rehomed(net: Net, moved: Mapping[int, Operator], homes: dict[str, Device], made: Collection[str] = ()) -> Net:
    """A net with its *moved* operators, and its blobs where they live then: where they did, or in *homes*, to which
    what a moved operator is the first to write is added, unless an earlier net has *made* it."""
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
