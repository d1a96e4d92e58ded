"""A watch for NaN and infinities: a probe that stops the step at the operator that made the first ones.

Every value costs one reduction: its sum is NaN or infinite where one of its elements is. A sum can overflow by itself,
so that what looks infinite is looked at again, exactly. Parameters and what else lasts, and the step's arguments, are
looked at before the step.

A value that is not finite may be meant: masks are made of infinities, and data may have NaN in place of what is
missing. So a step stops at an operator that makes NaN if no operand held NaN, and at one that makes infinities if its
operands were finite and its own arguments name no infinity. NaN that came from outside stops the step only once it
reaches state or a result. Views make nothing.
"""

from __future__ import annotations

import cmath
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from graphir.errors import RunError
from graphir.ir.blob import STATE_ROLES
from graphir.ir.operator import Operator, origin_of
from graphir.ir.optypes.table import operator_type
from graphir.ir.plan import Instruction, Plan
from graphir.ir.text import operator_text

from ..executor import Feedable

__all__ = ["FiniteWatch"]

_NAN, _INFINITY = "NaN", "infinity"

_SCALER: Final = "aten._amp_update_scale_.default"


class _Made(NamedTuple):
    """A value that an instruction makes.

    Attributes:
        position: among what it makes.
        name: of the blob.
        storage: the blob's storage.
        whole: it is all of that storage.
        kept: it is state, or a result of the step.
    """

    position: int
    name: str
    storage: str
    whole: bool
    kept: bool


class _Held(NamedTuple):
    """What a storage holds that is not finite: which kind, and where it came from; no origin where a step made it."""

    kind: str
    origin: str = ""


class FiniteWatch:
    """See :mod:`graphir.runtime.observing.finite`.

    With a loss scaler only the forward up to the scaled loss is watched: what follows overflows now and then, which
    skips the update.

    Args:
        plan: whose steps are watched.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan, self.net = plan, plan.step
        scales = {op.inputs[0] for op in self.net.ops if op.type == _SCALER}
        results = {self.net.blobs[name].storage for name in self.net.external_outputs}
        self.made: dict[int, tuple[_Made, ...]] = {}
        for at, instruction in enumerate(plan.instructions):
            if instruction.op < 0:
                continue
            op = self.net.ops[instruction.op]
            if not scales or (op.phase == "forward" and scales.isdisjoint(op.inputs)):
                self.made[at] = tuple(self._made_by(instruction, results))
        self.held: dict[str, _Held] = {}
        self.step = 0

    def _made_by(self, instruction: Instruction, results: set[str]) -> list[_Made]:
        op, blobs = self.net.ops[instruction.op], self.net.blobs
        views = op.effects.viewing
        found = []
        for position, name in enumerate(instruction.makes(op.outputs)):
            if position not in views:
                storage = blobs[name].storage
                kept = blobs[storage].role in STATE_ROLES or storage in results
                whole = blobs[name].shape == blobs[storage].shape
                found.append(_Made(position, name, storage, whole, kept))
        return found

    def start(self, step: int, state: Mapping[str, Tensor], inputs: Mapping[str, Feedable]) -> None:
        """Look at what a step is given, before it."""
        self.step = step
        self.held.clear()
        for values, what in ((state, "held it before the step"), (inputs, "was given with it")):
            for name, value in values.items():
                if isinstance(value, Tensor) and (kind := _kind(value)):
                    self.held[self.net.blobs[name].storage] = _Held(kind, f"{name!r} {what}")

    def begin(self, position: int) -> None:
        """See :class:`.probes.Probe`."""

    def end(self, position: int, reads: Sequence[Feedable], makes: Sequence[Tensor]) -> None:
        """See :class:`.probes.Probe`."""
        made = self.made.get(position)
        if not made:
            return
        instruction = self.plan.instructions[position]
        op = self.net.ops[instruction.op]
        blobs = self.net.blobs
        found = [self.held[storage] for name in op.inputs if (storage := blobs[name].storage) in self.held]
        for value in made:
            kind = _kind(makes[value.position])
            if kind:
                held = next((held for held in found if held.kind == kind or kind == _INFINITY), None)
                if held is None and not _meant(op, kind):
                    outside = next((held.origin for held in found if held.origin), "")
                    raise self.stop(instruction, value, makes[value.position], reads, outside=outside)
                if kind == _NAN and value.kept and held is not None and held.origin:
                    raise self.stop(instruction, value, makes[value.position], reads, held.origin)
                self.held[value.storage] = _Held(kind, "" if held is None else held.origin)
            elif value.whole:
                self.held.pop(value.storage, None)

    def stop(
        self,
        instruction: Instruction,
        made: _Made,
        value: Tensor,
        reads: Sequence[Feedable],
        origin: str = "",
        outside: str = "",
    ) -> RunError:
        """The error for a value that an instruction should not have made: it came from *origin*, or was made of finite
        values, or of an infinity that came from *outside*."""
        op = self.net.ops[instruction.op]
        nans, infinities = int(value.isnan().sum()), int(value.isinf().sum())
        counts = (nans, "NaN"), (infinities, "infinity" if infinities == 1 else "infinities")
        what = " and ".join([f"{count} {kind}" for count, kind in counts if count])
        overwritten = {source for _, source in op.effects.writes}
        operands = [
            f"{name!r} overwritten" if i in overwritten else f"{name!r} {_range(read)}"
            for i, (name, read) in enumerate(zip(op.inputs, reads, strict=True))
            if not isinstance(read, Tensor) or _is_inexact(read)
        ]
        read = f"; its operands: {', '.join(operands)}" if operands else ""
        read += f"; an infinity came from outside: {outside}" if outside else ""
        place = [*origin_of(op), f"plan {self.plan.name!r}", f"step {self.step}", f"lane {instruction.lane}"]
        return RunError(
            f"{op.type} made {what} among the {value.numel()} elements of {made.name!r}"
            + (f", and {origin}" if origin else read),
            at=operator_text(op, self.net),
            where=", ".join(place),
        )


def _is_inexact(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _kind(tensor: Tensor) -> str:
    """``NaN``, ``infinity`` or nothing: the worst that a tensor holds."""
    if not _is_inexact(tensor):
        return ""
    if tensor.is_floating_point() and tensor.element_size() == 1:
        tensor = tensor.float()  # torch adds up no numbers of eight bits
    if cmath.isfinite(tensor.sum().item()):
        return ""
    if tensor.isnan().any():
        return _NAN
    return _INFINITY if tensor.isinf().any() else ""


def _meant(op: Operator, kind: str) -> bool:
    """Whether an operator's arguments ask for such values, or its type makes memory whose values nobody knows."""
    if operator_type(op.type).unwritten:
        return True
    numbers = [arg for arg in op.args.values() if isinstance(arg, float)]
    return any(arg != arg if kind == _NAN else abs(arg) == float("inf") for arg in numbers)


def _range(value: Feedable) -> str:
    if not isinstance(value, Tensor):
        return f"{value:.4g}"
    if value.is_complex():
        value = torch.view_as_real(value)
    finite = value[value.isfinite()].double()
    if not finite.numel():
        return "nothing finite"
    other = "" if finite.numel() == value.numel() else f" and {value.numel() - finite.numel()} not finite"
    return f"from {finite.min().item():.4g} to {finite.max().item():.4g}{other}"
