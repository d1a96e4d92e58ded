"""Where an operator needs its operands: the device rules that ``verify`` checks and ``inject_copies`` meets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from .blob import Blob
from .device import Device
from .operator import Operator

__all__ = ["ELSEWHERE", "is_host_scalar", "required_devices"]

ELSEWHERE: Final = frozenset({"Copy", "AllReduce"})
"""Types whose operands may be on other devices than the operator."""


def is_host_scalar(blob: Blob) -> bool:
    """Whether the blob is a 0-dim tensor on the host, which an operator on any device may read and update."""
    return blob.device.kind == "cpu" and blob.shape == ()


def required_devices(op: Operator, blobs: Mapping[str, Blob]) -> tuple[list[Device], list[Device]]:
    """The device on which *op* needs each of its inputs and outputs.

    An operator needs them on its own device, except that a ``Copy`` reads from anywhere, that participant i of a
    collective stays where its input lives, and that host scalars stay on the host.
    """
    if op.type == "Copy":
        return [blobs[name].device for name in op.inputs], [op.device] * len(op.outputs)
    if op.type == "AllReduce":
        participants = [blobs[name].device for name in op.inputs]
        return participants, participants
    inputs = [blob.device if is_host_scalar(blob) else op.device for blob in map(blobs.__getitem__, op.inputs)]
    outputs = [blob.device if is_host_scalar(blob) else op.device for blob in map(blobs.__getitem__, op.outputs)]
    return inputs, outputs
