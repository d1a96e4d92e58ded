"""A witness of a program: the captured step, recorded once more at sizes that no recording had.

Recordings at a few sizes, with the step's questions about sizes, show most of what Python computes with sizes. They do
not show what Python computes with plain integers: ``int(n) > 100``, a table by sizes, ``len(x)``. A recording at a size
shows all of that for this size. So the witness records the step there and compares the recording with the program. ::

    recordings at 8, 19, 1 ──▶ program ──at batch 128──▶ operators, arguments, sizes ─┐
    the step ──────────────recorded at batch 128──────▶ operators, arguments, sizes ──┴─▶ equal, or a CoverageError
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Final, NamedTuple, TypeVar

import torch

from ..errors import CaptureError, CoverageError
from ..ir.blob import Blob, bound_layout
from ..ir.fitting import point_text
from ..ir.operator import Arg, Operator, stored_versions
from ..ir.program import Program
from ..ir.size import Dims, Polynomial, bind
from ..ir.symbols import to_torch
from ..ir.tensor import same_bits
from ..ir.text import operator_text
from .intake.arguments import Arguments
from .intake.found import Between
from .intake.state import ModelState, has_data, read_state
from .isolate.attributes import AllowedChanges, Attributes
from .isolate.caches import Caches
from .isolate.modes import Modes
from .program.one_size import program_at_one_size
from .record.values import UPDATE, RecordedCall, Value
from .sizes.fit import is_floating_anyway
from .step.again import run_until_alike
from .step.comparison import Outline, outcome
from .step.recorded_step import Recording
from .step.recording import Step
from .words.places import described, where

__all__ = ["StepWitness"]

_T = TypeVar("_T")

_NO_STATE: Final = ModelState((), {}, {})


class _Difference(NamedTuple):
    """A difference of a recording from the program: the sizes, what differs, the module, and the program's operator."""

    point: str
    how: str
    where: str = ""
    at: str = ""


class StepWitness:
    """Compares a program with the step that it was captured from, once for each combination of sizes.

    Args:
        step: the captured step.
        allowed: names of the attributes that the step may change.
        program: the captured program.
        outline: of the program's recording.
        recorded: sizes at which the step was recorded and was the program's.
        alone: the context in which a model is recorded.
    """

    def __init__(
        self,
        step: Step,
        allowed: Iterable[str],
        program: Program,
        outline: Outline,
        recorded: Iterable[Dims],
        alone: Callable[[torch.nn.Module], AbstractContextManager[None]],
    ) -> None:
        self._step = step._replace(state=_NO_STATE, arguments=_without_data(step.arguments))
        self._allowed, self._alone, blobs = tuple(allowed), alone, program.step.blobs
        compared = {k: t for k, t in program.state.items() if k in blobs and blobs[k].role == "constant"}
        self._program, self._outline = program.with_(state=compared), outline
        self._lent: Mapping[str, torch.Tensor] = {}
        self._modes = Modes(step.model)
        self._found: dict[tuple[int, ...], _Difference | None] = {self._point(dims): None for dims in recorded}

    def __call__(self, dims: Dims) -> None:
        """Raise where the step at these sizes is not the program's.

        Args:
            dims: the sizes of one replica, by dimension, without prefix; a dimension left out has its captured size.

        Raises:
            CoverageError: names the operator that differs.
            CaptureError: another thread runs the module, so that it can't be recorded now.
        """
        point = self._point(dims)
        if point not in self._found:
            at = dict(zip(self._step.arguments.dims, point, strict=True))
            self._found[point] = self._compared(at)
        found = self._found[point]
        if found is not None:
            raise self._refusal(found, "; a session without a witness would run the program unchanged")

    def recorded(self, dims: Dims) -> Program:
        """A program of the step at sizes where the step differs from the captured program, with that program's update.

        Args:
            dims: as in :meth:`__call__`; the batch is one of the program's dimensions.

        Returns:
            A program of fixed sizes without state, whose ``dims`` has the batch.

        Raises:
            CoverageError: the step can't be recorded at these sizes, reads other constants there, or has changed since
                the capture.
        """
        captured = self._step.arguments.dims
        changed = self._compared(captured)
        if changed is not None:
            raise self._refusal(changed)
        at = dict(zip(captured, self._point(dims), strict=True))
        try:
            with self._alone(self._step.model):
                return self._read(
                    at,
                    lambda step, recording: program_at_one_size(
                        step, recording, at, self._program, self._outline, self._holds
                    ),
                    named=True,
                )
        except CaptureError as e:
            raise self._refusal(_unrecordable(at, e)) from None

    def _refusal(self, found: _Difference, otherwise: str = "") -> CoverageError:
        return CoverageError(
            f"the step differs from the program at {found.point}: {found.how}",
            at=found.at,
            where=found.where or f"program {self._program.name!r}",
            fix=f"capture the model at these sizes, or run other sizes{otherwise}",
        )

    @property
    def between(self) -> Between | None:
        """What is known of the gradients between the steps of a function; None: the step is none."""
        return None if self._step.function is None else self._step.function.between

    @property
    def changed(self) -> Mapping[Hashable, object]:
        """The changes of the step that a capture has put back; see :class:`.isolate.attributes.AllowedChanges`."""
        return self._step.allowed.changed

    def lend(self) -> Mapping[str, torch.Tensor]:
        """The tensors that the step reads as constants, by their blobs, for plans that read them where they are.

        From now on their values count as right and are not compared.
        """
        self._lent = {name: tensor.detach() for name, tensor in self._outline.constants.items() if _is_plain(tensor)}
        return self._lent

    def _point(self, dims: Dims) -> tuple[int, ...]:
        return tuple([dims.get(dim, captured) for dim, captured in self._step.arguments.dims.items()])

    def _compared(self, dims: Dims) -> _Difference | None:
        """Record the step at these sizes, and return how it differs from the program; None if it does not.

        Raises:
            CaptureError: another thread runs the module.
        """
        with self._alone(self._step.model):
            try:
                return self._read(dims, lambda step, recording: self._compare(recording, dims))
            except CaptureError as e:
                return _unrecordable(dims, e)

    def _read(self, dims: Dims, read: Callable[[Step, Recording], _T], named: bool = False) -> _T:
        """The result of *read* on a recording, at these sizes, of the step as it is now.

        Raises:
            CaptureError: no program can express the step.
        """
        model = self._step.model
        with self._modes.held():
            allowed, caches = AllowedChanges(model, self._allowed), Caches()
            step = self._step._replace(
                state=read_state(model, hooked=self._step.loss is None),
                allowed=allowed,
                attributes=Attributes(model, allowed),
                caches=caches,
            )
            try:
                with step.attributes.restored():
                    found = _read(step, dims, read, named)
            finally:
                caches.leave()
            caches.check()  # once nothing holds the recording
            return found

    def _compare(self, recording: Recording, dims: Dims) -> _Difference | None:
        ops = self._program.step.ops
        given = [*recording.state.values(), *(v for v in recording.inputs if v is not None)]
        for value in [*given, *(value for value, _ in recording.constants)]:
            if not self._is_laid_out(value, dims):
                return _Difference(point_text(dims), f"{described(value.kind, value.label)} has another shape or type")
        for i, (op, call) in enumerate(zip(ops, recording.calls, strict=False)):
            if how := self._update_difference(i, call) if call.type == UPDATE else self._difference(op, call, dims):
                at = operator_text(op, self._program.step)
                return _Difference(point_text(dims), how, where(op.module, op.source), at)
        if len(ops) != len(recording.calls):
            how = f"the step calls {len(recording.calls)} operators, the program {len(ops)}"
            return _Difference(point_text(dims), how)
        parts = outcome(recording)
        for part, became in self._outline.parts.items():
            if parts[part] != became:
                return _Difference(point_text(dims), f"the difference is in {part}")
        for value, tensor in recording.constants:
            name = self._outline.names[value.index]
            if not self._holds(name, tensor):
                return _Difference(point_text(dims), f"the constant {name!r} has other values")
        return None

    def _holds(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether a constant of a recording equals the program's constant *name*."""
        if name in self._lent and tensor is self._outline.constants[name]:
            return True
        ours = self._program.state.get(name)
        return ours is None or not has_data(tensor) or same_bits(ours, tensor)

    def _update_difference(self, position: int, call: RecordedCall) -> str:
        """How a recorded update differs from the program's at the same place; empty where it does not."""
        names = tuple([self._outline.names[index] for index in self._outline.updates.get(position, ())])
        return "" if self._of(call.inputs) == names else "the step updates another parameter, or by another gradient"

    def _difference(self, op: Operator, call: RecordedCall, dims: Dims) -> str:
        """How a recorded call differs from the program's operator at the same place; empty where it does not."""
        if call.type != op.type:
            return f"the step calls {call.type}"
        for verb, values, names, versions in (
            ("reads", call.inputs, op.inputs, op.input_versions),
            ("makes", call.outputs, op.outputs, op.output_versions),
        ):
            if self._of(values) != names or stored_versions([v.version for v in values]) != versions:
                return f"the operator {verb} other values"
        if (call.operands, call.results, call.seed) != (op.operands, op.results, op.seed):
            return "the operator groups its operands and results differently, or has another seed"
        for name in dict.fromkeys([*op.args, *call.args]):
            ours, its = _bound(op.args.get(name), dims), call.args.get(name)
            if not _same_arg(ours, its, call):
                return f"argument {name} is {its}, in the program {ours}"
        for value in call.outputs:
            if not self._is_laid_out(value, dims):
                return f"the operator makes {tuple(value.shape)} {value.dtype} with strides {tuple(value.strides)}"
        return ""

    def _of(self, values: Sequence[Value]) -> tuple[str, ...]:
        names = self._outline.names
        return tuple([names[v.index] if v.index < len(names) else "" for v in values])

    def _is_laid_out(self, value: Value, dims: Dims) -> bool:
        """Whether a value has the shape, the strides, the offset and the type of its blob."""
        (name,) = self._of((value,))
        blob: Blob | None = self._program.step.blobs.get(name)
        if blob is None or blob.dtype is None or to_torch(blob.dtype) != value.dtype:
            return False
        if self._of((value.root,)) != (blob.storage,):
            return False
        shape, strides = bound_layout(blob, dims)
        return (
            shape == value.shape
            and bind(blob.offset, dims) == value.offset
            and (0 in shape or all(n == 1 or a == b for n, a, b in zip(shape, strides, value.strides, strict=True)))
        )


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory holds its elements: there is memory, and no pending conjugation or negation."""
    return has_data(tensor) and not (tensor.is_conj() or tensor.is_neg())


def _read(step: Step, dims: Dims, read: Callable[[Step, Recording], _T], named: bool) -> _T:
    recording = run_until_alike(step, dims, named=named)
    try:
        return read(step, recording)
    finally:
        recording.release()


def _unrecordable(dims: Dims, error: CaptureError) -> _Difference:
    return _Difference(point_text(dims), f"the step can't be recorded: {error.what}", error.where)


def _without_data(arguments: Arguments) -> Arguments:
    """The arguments, with a tensor without data in the place of each tensor; a tensor given twice stays one."""
    made: dict[int, torch.Tensor] = {}
    leaves = []
    for leaf in arguments.leaves:
        tensor = leaf.tensor
        if tensor is not None and id(tensor) not in made:
            bare = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            made[id(tensor)] = bare.requires_grad_(tensor.requires_grad)
        leaves.append(leaf if tensor is None else leaf._replace(value=made[id(tensor)]))
    return arguments._replace(leaves=tuple(leaves))


def _bound(arg: Arg | None, dims: Dims) -> Arg | None:
    if isinstance(arg, Polynomial):  # asked first: a Polynomial is a tuple, too
        return bind(arg, dims)
    return tuple([_bound(item, dims) for item in arg]) if isinstance(arg, tuple) else arg


def _same_arg(ours: Arg | None, its: Arg | None, call: RecordedCall) -> bool:
    if repr(ours) == repr(its):  # NaN is the same as NaN
        return True
    # To a floating-point operator a size means the same as a float and as an integer.
    numbers = isinstance(ours, int | float) and isinstance(its, int | float)
    return numbers and ours == its and is_floating_anyway(call)
