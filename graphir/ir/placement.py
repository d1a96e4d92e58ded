"""Where an operator needs its operands: the device rules that ``verify`` checks and ``inject_copies`` meets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from .blob import Blob
from .device import CPU, Device
from .dialect import Dialect, HostOperands
from .operator import Operator, participants

__all__ = ["blob_devices", "first_device", "is_host_scalar", "required_devices", "same_memory"]


def same_memory(a: Device, b: Device) -> bool:
    """Whether two devices share one memory. All devices of the host do."""
    return a == b or (a.is_host and b.is_host)


def is_host_scalar(blob: Blob) -> bool:
    """Whether the blob is a 0-dim tensor on the host, which a torch operator on any device may read and update."""
    return blob.shape == () and blob.device.is_host


def required_devices(op: Operator, blobs: Mapping[str, Blob], dialect: Dialect) -> tuple[list[Device], list[Device]]:
    """The device on which *op* needs each of its inputs and outputs.

    An operator needs its operands on its own device. Exceptions: a ``Copy`` reads from anywhere, participant i of a
    collective stays where its input lives, torch's operators leave host scalars on the host, and some of Caffe2's
    operators keep operands on the host.

    Args:
        op: the operator.
        blobs: its operands, by name.
        dialect: of the net.
    """
    device = op.device
    inputs, outputs = [device] * len(op.inputs), [device] * len(op.outputs)
    if op.type in dialect.elsewhere:
        if op.kind == "copy":
            return [blobs[name].device for name in op.inputs], outputs
        if op.type in dialect.stays:
            given = [blobs[name].device for name in op.inputs]
            made = [(given + outputs)[participant] for participant in participants(op)]
            return given, [blobs[name].device if name in op.inputs else made[i] for i, name in enumerate(op.outputs)]
        host, rule = device if device.is_host else CPU, dialect.host[op.type]
        if op.type != "Split" or len(inputs) == 2:
            inputs = _with_host(inputs, rule.inputs, host)
        outputs = _with_host(outputs, rule.outputs, host)
    elif dialect.host_scalars:
        for names, devices in ((op.inputs, inputs), (op.outputs, outputs)):
            for i, name in enumerate(names):
                if is_host_scalar(blobs[name]):
                    devices[i] = blobs[name].device
    return inputs, outputs


def _with_host(devices: list[Device], positions: tuple[int, ...] | None, host: Device) -> list[Device]:
    """*devices* with the host at the given positions; None: at all. Positions past the end are ignored."""
    return [host if positions is None or i in positions else device for i, device in enumerate(devices)]


def blob_devices(
    ops: Sequence[Operator],
    known: Mapping[str, Device],
    dialect: Dialect,
    external_inputs: Iterable[str] = (),
    default: Device = CPU,
) -> dict[str, Device]:
    """Where each blob of a net without views lives: where *known* says, else where it is first written.

    Args:
        ops: the operators, in program order.
        known: blobs that live somewhere already.
        dialect: of the net.
        external_inputs: blobs that have a value before the first operator.
        default: the device of external inputs that are not *known*.
    """
    found = dict(known)
    for name in external_inputs:
        found.setdefault(name, default)
    elsewhere = dialect.elsewhere
    for op in ops:
        special = op.type in elsewhere
        for i, name in enumerate(op.outputs):
            if name not in found:
                found[name] = _elsewhere(op, i, found, dialect) if special else op.device
    return found


def first_device(op: Operator, position: int, blobs: Mapping[str, Blob], dialect: Dialect) -> Device:
    """Where the output at *position* lives if the operator is the first to write it."""
    if op.type not in dialect.elsewhere:
        return op.device
    return _elsewhere(op, position, {name: blobs[name].device for name in op.inputs}, dialect)


def _elsewhere(op: Operator, position: int, found: Mapping[str, Device], dialect: Dialect) -> Device:
    """Where the output at *position* lives, for a type in ``dialect.elsewhere``."""
    if op.type in dialect.stays:
        position = participants(op)[position]
        return found.get(op.inputs[position], op.device) if position < len(op.inputs) else op.device
    rule = dialect.host.get(op.type, HostOperands())
    on_host = rule.outputs is None or position in rule.outputs
    return CPU if on_host and not op.device.is_host else op.device
