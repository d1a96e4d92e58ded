"""One copy of the step per device, gradients reduced over the copies.

::

    x, y ──▶ gpu_0/… ──▶ gpu_0/w_grad ─┐             ┌─▶ gpu_0/w_grad_reduced ──▶ update gpu_0/w
                                       ├─ AllReduce ─┤
    x, y ──▶ gpu_1/… ──▶ gpu_1/w_grad ─┘             └─▶ gpu_1/w_grad_reduced ──▶ update gpu_1/w

Every replica has its own parameters, optimizer state and buffers, starts from the same values, and applies the same
reduced gradient; so parameters and optimizer state stay bitwise equal, while buffers (batch norm's statistics) follow
each replica's share of the batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import field_validator

from graphir.errors import PassError
from graphir.ir.blob import STATE_ROLES, Blob
from graphir.ir.device import Device, gpu
from graphir.ir.names import fresh, replica_prefix
from graphir.ir.net import Net
from graphir.ir.operator import Arg, Operator, map_arg
from graphir.ir.program import Interface, Program
from graphir.ir.size import Polynomial, Shape, dimension, rename_dims

from .base import Gpu, Pass, build, register
from .sparse_reduction import reduce_sparse, sparse_gradients

__all__ = ["Replicate", "replicate"]


@register
class Replicate(Pass):
    """See :func:`replicate`."""

    name: ClassVar[str] = "replicate"

    devices: tuple[Gpu, ...]
    reduction: Literal["mean", "sum"] = "mean"

    @field_validator("devices")
    @classmethod
    def _distinct(cls, devices: tuple[int, ...]) -> tuple[int, ...]:
        if not devices:
            raise ValueError("no devices; give at least one, such as [0]")
        repeated = sorted({d for d in devices if devices.count(d) > 1})
        if repeated:
            raise ValueError(f"device {repeated[0]} is given more than once; each replica needs a device of its own")
        return devices

    def rewrite(self, program: Program) -> Program:
        if program.replicas != ("",):
            raise PassError(
                f"program {program.name!r} is replicated already, as {', '.join(program.replicas)}",
                fix="replicate the captured program once, over all its devices",
            )
        elsewhere = [d for d in program.devices if d.kind == "gpu" and d != gpu(0)]
        if elsewhere:
            raise PassError(
                f"program {program.name!r} is placed on {', '.join(elsewhere)} already",
                fix="replicate first, then shift",
            )
        if program.interface.one_replica and len(self.devices) > 1:
            raise PassError(
                f"the results of {len(self.devices)} replicas of program {program.name!r} can't be put together: the "
                f"step could be recorded at one batch only, so nobody knows along which dimension ({program.fixed})",
                fix="replicate it on one device, or let the model take other batches",
            )
        copies = [_Copy(program, replica, gpu(device)) for replica, device in enumerate(self.devices)]
        copied = _interleave(program.step, copies)
        step = _reduce(copied, program, copies, self.reduction)
        return program.with_(
            init=_interleave(program.init, copies),
            step=step,
            interface=_with_gradients_of(program.interface, copies[0].prefix, copied, step),
            dims={copy.prefix + dim: value for copy in copies for dim, value in program.dims.items()},
            guards=tuple([guard.renamed(copy.prefix.__add__) for copy in copies for guard in program.guards]),
            replicas=tuple(copy.prefix for copy in copies),
        )


def replicate(program: Program, devices: Sequence[int | str], *, reduction: Literal["mean", "sum"] = "mean") -> Program:
    """One replica of a captured program per device, gradients averaged (or summed) in replica order.

    *devices* are numbers of gpus, or gpus as they are printed (``"gpu:1"``). Replica r lives on ``gpu:<devices[r]>``
    and its blobs have the prefix ``gpu_<devices[r]>/``; learning rates are shared. With ``reduction="mean"`` each
    replica counts by its share of the batch. The reference is eager PyTorch run share by share with the gradients added
    in replica order and divided by their number.

    Raises:
        PassError: devices are missing, no gpus, or repeated, the program is replicated or placed already, or the
            results of several replicas can't be put together.
    """
    return build(Replicate, devices=devices, reduction=reduction)(program)


class _Copy:
    """How names, dimensions, blobs and operators of the captured program read in one replica."""

    def __init__(self, program: Program, replica: int, device: Device) -> None:
        self.replica, self.device = replica, device
        self.prefix = replica_prefix(device.index)
        self.shared = frozenset(group.lr for group in program.interface.param_groups)
        self._names: dict[str, str] = {}
        self._shapes: dict[Shape, Shape] = {}

    def blob_name(self, name: str) -> str:
        found = self._names.get(name)
        if found is None:  # one string a name: look-ups by the same object are the fastest
            found = self._names[name] = name if name in self.shared else self.prefix + name
        return found

    def names(self, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(self.blob_name, names))

    def shape(self, shape: Shape | None) -> Shape | None:
        if shape is None:
            return None
        if shape not in self._shapes:
            self._shapes[shape] = tuple(rename_dims(size, self.prefix.__add__) for size in shape)
        return self._shapes[shape]

    def blob(self, blob: Blob) -> Blob:
        return blob._replace(
            name=self.blob_name(blob.name),
            shape=self.shape(blob.shape),
            device=self.device if blob.device.kind == "gpu" else blob.device,
            storage=self.blob_name(blob.storage),
            strides=self.shape(blob.strides),
            offset=rename_dims(blob.offset, self.prefix.__add__),
        )

    def scalar(self, scalar: Any) -> Any:
        return rename_dims(scalar, self.prefix.__add__) if scalar.__class__ is Polynomial else scalar

    def op(self, op: Operator) -> Operator:
        device = self.device if op.device.kind == "gpu" else op.device
        by = "replicate" if self.replica or device != op.device else op.by
        args = {key: map_arg(value, self.scalar) for key, value in op.args.items()} if op.args else op.args
        of = self.blob_name(op.of) if op.of else ""
        names = op.type, self.names(op.inputs), self.names(op.outputs), args, device
        return Operator._make(names + op[5:7] + (by,) + op[8:15] + (of, op.source))  # noqa: RUF005  # half of _replace


def _interleave(net: Net, copies: Sequence[_Copy]) -> Net:
    """Every operator once per copy: all copies of the first, all of the second, …"""

    def every(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(copy.blob_name(name) for name in names for copy in copies))

    blobs = [copy.blob(blob) for blob in net.blobs.values() for copy in copies]
    return Net(
        name=net.name,
        ops=tuple([copy.op(op) for op in net.ops for copy in copies]),
        blobs={blob.name: blob for blob in blobs},
        external_inputs=every(net.external_inputs),
        external_outputs=every(net.external_outputs),
        gradients={
            copy.blob_name(name): copy.blob_name(grad) for name, grad in net.gradients.items() for copy in copies
        },
    )


def _reduce(net: Net, program: Program, copies: Sequence[_Copy], reduction: str) -> Net:
    """Reduce every gradient that an update reads or that is an output, before the first update."""
    sparse = sparse_gradients(program.step)
    parts = {name for pair in sparse for name in pair}
    grads = [grad for grad in _reduced_gradients(program.step) if grad not in parts]
    if len(copies) == 1 or not (grads or sparse):
        return net
    blobs = dict(net.blobs)
    reduced: dict[str, str] = {}
    reductions: list[Operator] = []
    args: dict[str, Arg] = {}
    if reduction == "mean":
        args = {"reduction": "mean", "shares": _shares(program, copies)}
    pattern = f"[{'t' * len(copies)}]"
    for grad in grads:
        inputs = tuple(copy.blob_name(grad) for copy in copies)
        outputs = tuple(fresh(f"{name}_reduced", blobs) for name in inputs)
        for name, output in zip(inputs, outputs, strict=True):
            blobs[output] = blobs[name]._replace(name=output, storage=output, offset=0, role="gradient")
        reduced.update(zip(inputs, outputs, strict=True))
        reductions.append(
            Operator(
                type="AllReduce",
                inputs=inputs,
                outputs=outputs,
                args=args,
                device=copies[0].device,
                phase="reduce",
                by="replicate",
                operands=pattern,
                results=pattern,
            )
        )
    for (indices, values), param in sparse.items():
        pairs = [(copy.blob_name(indices), copy.blob_name(values)) for copy in copies]
        reductions += reduce_sparse(pairs, [copy.blob_name(param) for copy in copies], args, blobs, reduced)
    before = [op for op in net.ops if op.phase != "update"]
    updates = [_read(op, reduced) for op in net.ops if op.phase == "update"]
    return net.with_(
        ops=(*before, *reductions, *updates),
        blobs=blobs,
        external_outputs=tuple(reduced.get(name, name) for name in net.external_outputs),
    )


def _with_gradients_of(interface: Interface, prefix: str, copied: Net, reduced: Net) -> Interface:
    """The interface whose gradients are the reduced ones, which have the same names on every replica."""
    handed = dict(zip(copied.external_outputs, reduced.external_outputs, strict=True))
    gradients = {param: handed[prefix + grad].removeprefix(prefix) for param, grad in interface.gradients.items()}
    return replace(interface, gradients=gradients)


def _reduced_gradients(step: Net) -> list[str]:
    """Blobs that the backward makes and an update reads or the caller gets, in the order in which they are made."""
    wanted = {name for op in step.ops if op.phase == "update" for name in op.inputs}
    wanted.update(name for name in step.external_outputs if step.blobs[name].role == "gradient")
    made = [name for op in step.ops if op.phase in ("forward", "backward") for name in op.outputs]
    return [name for name in dict.fromkeys(made) if name in wanted and step.blobs[name].role not in STATE_ROLES]


def _shares(program: Program, copies: Sequence[_Copy]) -> tuple[Arg, ...]:
    """Each replica's share of the batch: its batch dimension where sizes follow it, else one each."""
    if "batch" in program.dims:
        return tuple(dimension(copy.prefix + "batch") for copy in copies)
    return (1,) * len(copies)


def _read(op: Operator, renamed: Mapping[str, str]) -> Operator:
    """*op* reading the renamed blobs."""
    inputs = tuple(renamed.get(name, name) for name in op.inputs)
    return op if inputs == op.inputs else op._replace(inputs=inputs)
