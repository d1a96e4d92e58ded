"""Which Caffe2 types have a translation, and what a translation works with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Final, TypeAlias

import torch

from ...errors import GraphirError, counted
from ...ir.device import CPU, Device
from ...ir.operator import Arg, Operator, Symbol
from .builder import FLOATING, Absent, Builder, Known, LoweredValue, Operand, Static, Target

__all__ = ["TRANSLATIONS", "Lowering", "Translation", "refuse", "translates"]


class Lowering:
    """One Caffe2 operator while it is translated.

    A translation appends torch operators (:meth:`emit`, :meth:`one`) and says what each output becomes, by the
    ``out`` of the call that makes it or by :meth:`bind`.

    Attributes:
        op: the operator.
        builder: where the torch operators go.
    """

    def __init__(self, op: Operator, builder: Builder) -> None:
        self.op, self.builder = op, builder

    # -- operands

    @property
    def count(self) -> int:
        """How many inputs there are."""
        return len(self.op.inputs)

    def known(self, position: int) -> Known:
        """What is known of an input."""
        if position >= len(self.op.inputs):
            least = counted(position + 1, "input")
            raise refuse(f"{self.op.type} needs at least {least}, {len(self.op.inputs)} given")
        name = self.op.inputs[position]
        found = self.builder.known.get(name)
        if found is None:
            raise refuse(f"blob {name!r} is read before it is made")
        return found

    def __getitem__(self, position: int) -> LoweredValue:
        """The tensor at an input."""
        value = self.padded(position)
        if value.padded:
            raise refuse(
                f"how many rows {self.op.inputs[position]!r} has depends on values, and {self.op.type} reads it",
                "only sums and means of unsorted segments and the sparse optimizers can read what Unique gives",
            )
        return value

    def padded(self, position: int) -> LoweredValue:
        """The tensor at an input, which may be padded."""
        found, name = self.known(position), self.op.inputs[position]
        if isinstance(found, Absent):
            raise refuse(f"blob {name!r} is no tensor, but {self.op.type} reads it")
        if isinstance(found, Static):
            found = self.builder.constant(name, found.tensor, self.builder.net.blobs[name].device)
            self.builder.known[name] = found
        return found

    def floating(self, position: int) -> LoweredValue:
        """The tensor at an input, of floating-point numbers."""
        value = self[position]
        if value.dtype not in FLOATING:
            raise refuse(f"{self.op.inputs[position]!r} is {value.geometry}, not of floating-point numbers")
        return value

    def counts(self, position: int) -> LoweredValue:
        """The tensor at an input, which may be padded: indices or lengths."""
        value = self.padded(position)
        if value.dtype not in ("i32", "i64"):
            raise refuse(f"{self.op.inputs[position]!r} is {value.geometry}, not indices (int32 or int64)")
        return value

    def static(self, position: int) -> tuple[int, ...] | None:
        """The numbers at an input, where they are known."""
        found = self.known(position)
        return tuple([int(n) for n in found.tensor.tolist()]) if isinstance(found, Static) else None

    def alike(self, first: int, *others: int, dtype: bool = True) -> LoweredValue:
        """The tensor at an input, of whose shape and element type others have to be: torch would repeat or convert
        them.

        Args:
            first, others: the inputs.
            dtype: whether element types are compared too.
        """
        value = self[first]
        for position in others:
            other = self[position]
            if other.shape != value.shape or (dtype and other.dtype != value.dtype):
                one, two = self.op.inputs[position], self.op.inputs[first]
                raise refuse(f"{one!r} is {other.geometry}, but {two!r} is {value.geometry}", "give both the same one")
        return value

    def output(self, position: int) -> str:
        """The name of an output."""
        if position >= len(self.op.outputs):
            least = counted(position + 1, "output")
            raise refuse(f"{self.op.type} needs at least {least}, {len(self.op.outputs)} given")
        return self.op.outputs[position]

    def home(self, output: int) -> Device:
        """Where an output's blob lives."""
        return self.builder.net.blobs[self.output(output)].device

    # -- arguments

    def _arg(self, name: str, kinds: tuple[type, ...], default: Arg) -> Arg:
        value = self.op.args.get(name, default)
        if isinstance(value, kinds) or value is default:
            return value
        raise refuse(f"argument {name!r} is {value!r}, not {' or '.join(kind.__name__ for kind in kinds)}")

    def integer(self, name: str, default: int = 0) -> int:
        """An integer argument."""
        return int(self._arg(name, (int,), default))  # type: ignore[arg-type]  # checked

    def number(self, name: str, default: float = 0.0) -> float:
        """A number that float32 has: as in the file, or the nearest one to *default*, as in Caffe2."""
        value = float(self._arg(name, (float, int), default))  # type: ignore[arg-type]  # checked
        return value if name in self.op.args else torch.tensor(value, dtype=torch.float32, device="cpu").item()

    def text(self, name: str, default: str = "") -> str:
        """A text argument."""
        return str(self._arg(name, (str,), default))

    def integers(self, name: str) -> tuple[int, ...] | None:
        """A list of integers; None where there is none."""
        value = self._arg(name, (tuple, int), None)
        items = value if isinstance(value, tuple) else (value,)
        return None if value is None else tuple([int(n) for n in items])  # type: ignore[arg-type]  # checked

    # -- what is made

    def emit(
        self,
        type: str,
        operands: Sequence[Operand],
        args: Mapping[str, Arg] | None = None,
        out: Sequence[int | Target] = (),
        *,
        results: str | None = None,
        device: Device | None = None,
    ) -> list[LoweredValue]:
        """Append a torch operator; see :meth:`Builder.emit`.

        Args:
            type, operands, args, results, device: as there.
            out: for each returned tensor, the output that it becomes; None for a value on the way.
        """
        targets = [self.output(target) if isinstance(target, int) else target for target in out]
        values = self.builder.emit(type, operands, args or {}, self.op, targets, results=results, device=device)
        for target, value in zip(out, values, strict=False):
            if isinstance(target, int):
                self.bind(target, value)
        return values

    def one(
        self,
        type: str,
        operands: Sequence[Operand],
        args: Mapping[str, Arg] | None = None,
        out: int | None = None,
        *,
        device: Device | None = None,
    ) -> LoweredValue:
        """Append a torch operator that returns one tensor."""
        return self.emit(type, operands, args, [out], device=device)[0]

    def bind(self, output: int, known: Known) -> None:
        """Say what an output is from now on."""
        self.builder.known[self.output(output)] = known

    def updated(self, source: int, output: int) -> LoweredValue:
        """The value that is overwritten so as to become an output: an input itself where the operator works in place,
        else a copy of it.

        Raises:
            GraphirError: the output overwrites another input, which the operator still reads.
        """
        value, name = self[source], self.output(output)
        if name in self.op.inputs[:source] + self.op.inputs[source + 1 :]:
            raise refuse(f"output {name!r} overwrites an input that is still read", "give the output another name")
        in_place = self.op.inputs[source] == name
        if in_place and self.builder.blobs[value.name].role != "constant":
            return value
        return self.one("aten.clone.default", [value], {}, output)

    # -- common steps

    def reshaped(self, value: LoweredValue, shape: Sequence[int], out: int | None = None) -> LoweredValue:
        """*value* in another shape: the same elements, or a copy of them as an output."""
        if prod(value.shape) != prod(shape):
            raise refuse(f"{value.geometry} cannot be seen as {list(shape)}")
        if out is not None:
            return self.one("aten.view_copy.default", [value], {"size": tuple(shape)}, out)
        if value.shape == tuple(shape):
            return value
        return self.one("aten.view.default", [value], {"size": tuple(shape)}, device=self.builder.device(value))

    def rows(self, value: LoweredValue, axis: int = 1) -> LoweredValue:
        """*value* as a matrix: dimensions before *axis* are its rows."""
        shape = value.shape
        axis = self.axis(axis, len(shape), end=True)
        return self.reshaped(value, (prod(shape[:axis]), prod(shape[axis:])))

    def cast(self, value: LoweredValue, dtype: str) -> LoweredValue:
        """*value* with another element type."""
        if value.dtype == dtype:
            return value
        device = self.builder.device(value)
        return self.one("aten._to_copy.default", [value], {"dtype": Symbol(dtype)}, device=device)

    def full(self, shape: Sequence[int], fill: Arg, dtype: str = "f32", out: int | None = None) -> LoweredValue:
        """A tensor of one number."""
        args: dict[str, Arg] = {"size": tuple(shape), "fill_value": fill, "dtype": Symbol(dtype)}
        return self.one("aten.full.default", [], args, out)

    def host_number(self, position: int) -> LoweredValue:
        """The single element of an input, as a 0-dim tensor on the host."""
        value, name = self[position], self.op.inputs[position]
        if prod(value.shape) != 1:
            raise refuse(f"{name!r} should have one element, but is {value.geometry}")
        device = self.builder.device(value)
        if not device.is_host:
            (value,), device = self.emit("Copy", [value], device=CPU), CPU
        return self.one("aten.view.default", [value], {"size": ()}, device=device) if value.shape else value

    def scalar(self, position: int) -> LoweredValue:
        """The single element of an input, as a 0-dim tensor where it is."""
        value = self[position]
        if prod(value.shape) != 1:
            raise refuse(f"{self.op.inputs[position]!r} should have one element, but is {value.geometry}")
        return self.reshaped(value, ())

    def axis(self, axis: int, rank: int, *, end: bool = False) -> int:
        """A dimension, counted from the front."""
        if not -rank <= axis < rank + end:
            raise refuse(f"there is no axis {axis} among {rank} dimensions")
        return axis + rank if axis < 0 else axis


def refuse(what: str, fix: str = "") -> GraphirError:
    """An operator that cannot be translated; :func:`graphir.caffe2.lower` adds which one it is."""
    return GraphirError(what, fix=fix)


Translation: TypeAlias = Callable[[Lowering], None]

TRANSLATIONS: Final[dict[str, Translation]] = {}
"""The translation of each Caffe2 type."""


def translates(*types: str) -> Callable[[Translation], Translation]:
    """Register a function as the translation of Caffe2 types."""

    def register(translation: Translation) -> Translation:
        TRANSLATIONS.update(dict.fromkeys(types, translation))
        return translation

    return register
