"""A net of torch operators in the making, and what the blobs of a Caffe2 net are in it.

A Caffe2 blob keeps its name. Where a later operator gives it a value of the same geometry, that is the next version of
the blob, and where it gives one of another geometry (Caffe2 resizes), a blob with a fresh name. What a translation
computes on the way gets names derived from the operator's first output.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

import torch

from ...errors import GraphirError
from ...ir.blob import ROLE_OF_PHASE, Blob, Role, contiguous_strides
from ...ir.device import Device
from ...ir.geometry import Geometry, contiguous, same_layout
from ...ir.infer import Inferred, infer
from ...ir.net import Net
from ...ir.operator import Arg, Operator, Symbol, flattened, stored_versions
from ...ir.opset import effects_of, signature, without_defaults

__all__ = ["ABSENT", "FLOATING", "Absent", "Builder", "Known", "LoweredValue", "Operand", "Static", "Temporary"]


class LoweredValue(NamedTuple):
    """A version of a lowered blob.

    Attributes:
        name, version: of the blob.
        geometry: shape, element type and layout.
        padded: Caffe2's blob holds only the first rows, how many depends on values; see :mod:`.sparse`.
        remapping: it numbers the rows of a padded blob.
    """

    name: str
    version: int
    geometry: Geometry
    padded: bool = False
    remapping: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return self.geometry.shape

    @property
    def dtype(self) -> str:
        return self.geometry.symbol


class Static(NamedTuple):
    """A tensor whose elements are known while lowering, such as the sizes that a ``Concat`` tells a ``Split``."""

    tensor: torch.Tensor


class Absent(NamedTuple):
    """A blob that is no tensor (a mutex)."""


ABSENT: Final = Absent()


class Temporary(NamedTuple):
    """The name and the place of a value on the way."""

    base: str
    device: Device


Known: TypeAlias = LoweredValue | Static | Absent
"""What is known of a Caffe2 blob."""

Target: TypeAlias = str | Temporary | None
"""What a returned tensor becomes: the next value of a Caffe2 blob, or a value on the way."""

Operand: TypeAlias = "LoweredValue | Sequence[LoweredValue | None] | None"


class Builder:
    """Appends torch operators for the operators of one Caffe2 net.

    Args:
        net: the Caffe2 net.

    Attributes:
        ops: the torch operators.
        blobs: those that they name.
        known: what each Caffe2 blob is, at this point of the net.
        external: blobs with a value before the first operator.
        constants: those of *external* that the net itself defines, with their values.
        notes: what a translation leaves for a later one, by whatever the two agree on.
    """

    def __init__(self, net: Net) -> None:
        self.net = net
        self.ops: list[Operator] = []
        self.blobs: dict[str, Blob] = {}
        self.versions: dict[str, int] = {}
        self.known: dict[str, Known] = {}
        self.external: list[str] = []
        self.constants: dict[str, torch.Tensor] = {}
        self.notes: dict[object, LoweredValue] = {}
        self.last_name: dict[str, int] = {}

    # -- blobs

    def declare(self, name: str, geometry: Geometry, device: Device, role: Role) -> LoweredValue:
        """An external blob."""
        self.external.append(name)
        return self._new(name, geometry, device, role)

    def constant(self, name: str, tensor: torch.Tensor, device: Device) -> LoweredValue:
        """An external blob that always holds *tensor*."""
        geometry = contiguous(tuple(tensor.shape), tensor.dtype)
        name = self.fresh(name)
        self.constants[name] = tensor
        return self.declare(name, geometry, device, "constant")

    def fresh(self, base: str) -> str:
        """A name that neither net has: *base*, or *base* with a number."""
        if base not in self.blobs and base not in self.net.blobs:
            return base
        # Numbers go on from the last one, so that a base of many copies isn't tried from its first one each time.
        n = self.last_name.get(base, 0) + 1
        while f"{base}_{n}" in self.blobs or f"{base}_{n}" in self.net.blobs:
            n += 1
        self.last_name[base] = n
        return f"{base}_{n}"

    def _new(self, name: str, geometry: Geometry, device: Device, role: Role, storage: str = "") -> LoweredValue:
        strides, offset = geometry.declared_strides, geometry.offset
        self.blobs[name] = Blob(name, geometry.shape, geometry.symbol, device, role, storage or name, strides, offset)
        self.versions[name] = 0
        return LoweredValue(name, 0, geometry)

    def _made(self, name: str, geometry: Geometry, role: Role) -> LoweredValue:
        """The next value of a Caffe2 blob."""
        device = self.net.blobs[name].device
        if name not in self.blobs:
            return self._new(name, geometry, device, role)
        blob = self.blobs[name]
        if (blob.shape, blob.dtype) == (geometry.shape, geometry.symbol):
            return self._next(name, geometry)
        return self._new(self.fresh(name), geometry, device, role)

    def _view(self, op: Operator, geometry: Geometry, source: LoweredValue) -> LoweredValue:
        base = self.blobs[source.name]
        name = self.fresh(f"{source.name}_{short_name(op.type)}")
        return self._new(name, geometry, base.device, base.role, base.storage)

    def _next(self, name: str, geometry: Geometry) -> LoweredValue:
        self.versions[name] += 1
        return LoweredValue(name, self.versions[name], geometry)

    def device(self, value: LoweredValue) -> Device:
        """Where a value lives."""
        return self.blobs[value.name].device

    # -- operators

    def emit(
        self,
        type: str,
        operands: Sequence[Operand],
        args: Mapping[str, Arg],
        like: Operator,
        targets: Sequence[Target],
        *,
        results: str | None = None,
        device: Device | None = None,
    ) -> list[LoweredValue]:
        """Append an operator.

        Args:
            type: of the operator.
            operands: for the tensor parameters of the type, in order.
            args: the other arguments; those that equal their defaults are left out.
            like: the Caffe2 operator that is translated.
            targets: what each tensor that is returned becomes.
            results: how the returned tensors fill what the type returns, see :class:`Operator`.
            device: where it runs; *like*'s by default.

        Returns:
            The values that the type returns; after them the operands that it overwrites and does not return.

        Raises:
            GraphirError: torch refuses the operands, one of them is overwritten already, or they have several
                floating types.
        """
        flat, arranged = flattened(operands, LoweredValue)
        pattern = None if arranged == "t" * len(flat) else arranged  # each is a tensor
        self._check(flat)
        args = without_defaults(type, args)
        count = len(signature(type).results) if results is None else results.count("t")
        effects = effects_of(type, args, pattern, len(flat), results)
        hidden = [source for output, source in effects.writes if output >= count]
        op = Operator(
            type,
            tuple([value.name for value in flat]),
            ("",) * (count + len(hidden)),
            args,
            like.device if device is None else device,
            like.phase,
            like.module,
            like.by,
            None,
            pattern,
            results,
            effects,
            stored_versions([value.version for value in flat]),
        )
        inferred = infer(op, [value.geometry for value in flat], {})
        if inferred.complaint:
            raise GraphirError(inferred.complaint)
        values, scattered = self._results(op, like, flat, inferred, targets)
        self.ops.append(
            op._replace(
                outputs=tuple([value.name for value in values]),
                output_versions=stored_versions([value.version for value in values]),
                seed=(len(self.ops) if like.seed is None else like.seed) if effects.random else None,
            )
        )
        for position, name in scattered.items():
            (values[position],) = self.emit(
                "aten.clone.default", [values[position]], {"memory_format": _CONTIGUOUS}, like, [name], device=device
            )
        return values

    def _results(
        self, op: Operator, like: Operator, flat: Sequence[LoweredValue], inferred: Inferred, targets: Sequence[Target]
    ) -> tuple[list[LoweredValue], dict[int, str]]:
        """The value of each output of *op*, which reads *flat*.

        Caffe2's tensors are contiguous, and views count on it: the second result says which outputs are not, by
        position, and of which Caffe2 blob they are to become the next value.
        """
        geometries = inferred.outputs or ()
        writes, views = dict(op.effects.writes), dict(op.effects.views)
        values: list[LoweredValue] = []
        scattered: dict[int, str] = {}
        for position in range(len(op.outputs)):
            if position in writes:
                source = flat[writes[position]]
                values.append(self._next(source.name, source.geometry))
                continue
            geometry = geometries[position] if position < len(geometries) else None
            if geometry is None:
                raise GraphirError(f"the shape of what {op.type} returns is not known")
            target = targets[position] if position < len(targets) else None
            dense = inferred.loose or same_layout(geometry, contiguous(geometry.shape, geometry.dtype))
            if isinstance(target, str) and not dense:
                scattered[position] = target
                target = None
            viewed = flat[views[position]] if position in views else None
            values.append(self._returned(op, like, geometry, target, viewed))
        return values, scattered

    def _returned(
        self, op: Operator, like: Operator, geometry: Geometry, target: Target, viewed: LoweredValue | None
    ) -> LoweredValue:
        """The value for one tensor that an operator returns: what *target* says, or a view of the value *viewed*."""
        if isinstance(target, str):
            return self._made(target, geometry._replace(strides=contiguous_strides(geometry.shape)), _role(like))
        if viewed is not None:
            return self._view(op, geometry, viewed)
        base, device = target or Temporary(f"{op_name(like)}_{short_name(op.type)}", op.device)
        return self._new(self.fresh(base), geometry, device, _role(like))

    def _check(self, operands: Iterable[LoweredValue]) -> None:
        for value in operands:
            if value.version != self.versions[value.name]:
                raise GraphirError(
                    f"{value.name!r} is read after an output overwrote it", fix="give the output another name"
                )
        floating = dict.fromkeys(value.dtype for value in operands if value.dtype in FLOATING)
        if len(floating) > 1:
            raise GraphirError(
                f"operands are of types {' and '.join(floating)}", fix="give inputs and state the same floating type"
            )


FLOATING: Final = ("bf16", "f16", "f32", "f64")
"""Element types of floating-point numbers that torch computes with."""

_CONTIGUOUS: Final = Symbol("contiguous_format")


def _role(op: Operator) -> Role:
    return ROLE_OF_PHASE.get(op.phase, "temporary")


def op_name(op: Operator) -> str:
    """What values on the way to an operator's results are named after."""
    return op.outputs[0] if op.outputs else op.type


def short_name(type: str) -> str:
    """``index_add`` of ``aten.index_add_.default``."""
    return type.split(".")[1].strip("_") if "." in type else type.lower()
