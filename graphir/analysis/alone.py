"""Plans of steps that one replica takes alone, by another recording than the plan's.

PyTorch runs another step where the batch has one row: a view where it copies several. So a plan that takes two rows or
more says nothing about one. The step that was recorded at one row is put in its place::

    state of gpu_0/… ──▶ the recorded step, on one device ──▶ state of gpu_0/…
                                                                   │ Copy
                                                                   └─▶ parameters, optimizer state of gpu_1/…

The other replicas execute nothing. They keep their buffers, and get the parameters and the optimizer's state that the
first one has updated. The step runs where most of the first replica's state is; state on other devices is copied there
and back again, and what lives in parts is joined there and divided again. The plan's passes have no say in the step,
which is rare and small. So the plan is one like all others: ``graphir.runtime.check`` proves it, and every executor
runs it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from ..collector import collector_paused
from ..errors import CoverageError
from ..ir.blob import STATE_ROLES, Blob, Role
from ..ir.device import Device
from ..ir.names import fresh
from ..ir.operator import Arg, Operator, Phase, bind_arg, stored_versions
from ..ir.opset import without_defaults
from ..ir.parts import starts
from ..ir.plan import Plan
from ..ir.program import Interface, Program, Slot
from ..ir.size import BATCH, bind, bind_shape
from .buffers import Buffers
from .hazards import hazards, outliving
from .instructions import Issue, instructions
from .values import value_numbers

__all__ = ["alone"]

_BY: Final = "alone"
_SYNCHRONISED: Final = "graphir.synchronised_batch_norm"
_MEETING: Final = ("forward", "backward")
"""The phases in which replicas meet only where a pass lets them."""


def alone(plan: Plan, recorded: Program) -> Plan:
    """The plan of a step in which the first replica takes the whole batch, by what was *recorded* at its size.

    Args:
        plan: of a program that was captured from the same module.
        recorded: the step as captured, of which the whole batch has the sizes ``dims``, ``batch`` among them. Its
            constants are the program's.

    Raises:
        CoverageError: the recorded step and the plan do not fit together; says why.
    """
    with collector_paused():
        program = _Alone(plan.program, recorded).program
        step = program.step
        return Plan(
            program=program,
            dims=program.dims,
            instructions=instructions(step, list(_order(program)), hazards(step), Buffers(step, program.dims)),
            values=value_numbers(program),
        )


def _order(program: Program) -> Iterator[Issue]:
    """Operators in program order, each storage freed after its last use."""
    step = program.step
    kept, touched = outliving(step), hazards(step).touched
    last = {storage: position for position, storages in enumerate(touched) for storage in storages}
    for position, storages in enumerate(touched):
        yield (position,)
        yield from (storage for storage in storages if last[storage] == position and storage not in kept)


class _Alone:
    """The recorded step on the state of another program.

    Attributes:
        program: see :func:`alone`.
    """

    def __init__(self, whole: Program, recorded: Program) -> None:
        self._whole, self._recorded = whole, recorded
        self._first = whole.replicas[0]
        self._blobs: dict[str, Blob] = {}
        self._ops: list[Operator] = []
        self._names: dict[str, str] = {}
        """The blob here of each of the recorded step."""
        self._last: dict[str, int] = {}
        """The last version so far of each blob."""
        self._require_alike()
        lasting = self._lasting()
        self._device = self._most_state()
        inputs = [*lasting, *self._inputs()]
        self._results()
        self._compute()
        self._bring_home()
        self._update_others()
        handed = [*self._hand_out()]
        divided = {self._names[name] for name in whole.interface.gradients.values() if name in whole.interface.parts}
        made = [self._names[name] for name in recorded.step.external_outputs]
        outputs = [*(name for name in made if name not in divided), *handed]
        self.program = self._program(inputs, outputs)

    # What is there before the step

    def _lasting(self) -> list[str]:
        """All that lives from step to step, and the optimizer's numbers, as the program has it."""
        step, groups = self._whole.step, self._whole.interface.param_groups
        numbers = {name for group in groups for name in group.blobs}
        lasting = [name for name in step.external_inputs if step.blobs[name].role != "input" or name in numbers]
        self._blobs.update({name: step.blobs[name] for name in lasting})
        return lasting

    def _most_state(self) -> Device:
        """The device that has most bytes of the first replica's state; of two, the first: the others' is copied."""
        nbytes = dict.fromkeys((device for device in self._whole.devices if not device.is_host), 0)
        for name in self._recorded.step.external_inputs:
            home = self._home(name)
            if home is not None and home.device in nbytes and home.role in STATE_ROLES:
                nbytes[home.device] += home.nbytes(self._whole.dims)
        return max(nbytes, key=nbytes.__getitem__)

    def _inputs(self) -> list[str]:
        """The recorded step's inputs, and its state, where it lives on another device, as a copy."""
        step, inputs = self._recorded.step, []
        called = {mine.blob: its.blob for mine, its in self._feeds() if mine.blob is not None}
        for name in step.external_inputs:
            if wanted := called.get(name):
                inputs.append(self._declare(name, self._whole.blob_of(wanted)))
            elif step.blobs[name].role == "input":  # a number of the optimizer
                self._names[name] = name
            else:
                self._bring(name)
        return inputs

    def _bring(self, name: str) -> None:
        """Let the recorded step have state on its device."""
        if name in self._whole.interface.parts:
            self._join(name)
            return
        home, blob = self._home(name), self._recorded.step.blobs[name]
        if home is None or (home.shape, home.dtype, home.strides) != (blob.shape, blob.dtype, blob.strides):
            raise self._misfit(f"the plan does not hold {blob.role} {name!r} as it was recorded")
        if home.device == self._device_of(blob):
            self._names[name] = home.name
        else:
            self._copy(home.name, self._declare(name, self._first + name), "forward")

    def _join(self, name: str) -> None:
        """Let the recorded step have state on its device that the program has in parts."""
        dim, parts = self._whole.interface.parts[name].dim, self._parts(name)
        brought = []
        for part in parts if dim is not None else parts[:1]:
            here = fresh(f"{part.name}_alone", self._blobs)
            self._blobs[here] = part._replace(name=here, device=self._device, role="temporary", storage=here)
            self._copy(part.name, here, "forward")
            brought.append(here)
        if dim is None:
            self._names[name] = brought[0]
            return
        whole = self._declare(name, f"{self._first}{name}_alone")
        self._emit(
            "aten.cat.default", brought, whole, {"dim": dim} if dim else {}, "forward", f"[{'t' * len(brought)}]"
        )

    def _divide(self, name: str, phase: Phase) -> list[str]:
        """Bring back what the recorded step has made and the program has in parts; the parts."""
        dim, parts, here = self._whole.interface.parts[name].dim, self._parts(name), self._names[name]
        shapes = [bind_shape(part.shape or (), self._whole.dims) for part in parts]
        for part, shape, start in zip(parts, shapes, starts(dim, shapes), strict=True):
            piece = here
            if dim is not None:
                piece = fresh(f"{part.name}_alone", self._blobs)
                self._blobs[piece] = part._replace(name=piece, device=self._device, role="temporary", storage=piece)
                args: dict[str, Arg] = {"dim": dim, "start": start, "end": start + shape[dim]}
                self._emit(
                    "aten.slice_copy.Tensor", [here], piece, without_defaults("aten.slice_copy.Tensor", args), phase
                )
            self._copy(piece, part.name, phase)
        return [part.name for part in parts]

    def _parts(self, name: str) -> list[Blob]:
        """The blobs that hold a value together; results are declared."""
        step, found = self._whole.step, []
        for part in self._whole.interface.parts[name].blobs:
            blob = step.blobs[self._whole.blob_of(part)]
            found.append(self._blobs.setdefault(blob.name, blob._replace(storage=blob.name, offset=0)))
        return found

    def _emit(
        self,
        type: str,
        inputs: Sequence[str],
        made: str,
        args: Mapping[str, Arg],
        phase: Phase,
        operands: str | None = None,
    ) -> None:
        """Append an operator on the step's device."""
        versions = stored_versions([self._last.get(name, 0) for name in inputs])
        self._append(
            Operator(
                type,
                tuple(inputs),
                (made,),
                args,
                self._device,
                phase,
                by=_BY,
                operands=operands,
                input_versions=versions,
            )
        )

    def _device_of(self, blob: Blob) -> Device:
        """The device here of a blob of the recorded step. What was recorded on the host stays there."""
        return blob.device if blob.device.is_host else self._device

    def _home(self, name: str) -> Blob | None:
        """The blob of state that the first replica has, or the first one that has it; None where parts hold it."""
        return None if name in self._whole.interface.parts else self._blobs.get(self._whole.blob_of(name))

    # The step

    def _compute(self) -> None:
        for op in self._recorded.step.ops:
            for name in op.outputs:
                if name not in self._names:
                    self._declare(name, self._first + name)
            self._append(
                op._replace(
                    inputs=tuple([self._names[name] for name in op.inputs]),
                    outputs=tuple([self._names[name] for name in op.outputs]),
                    args={key: bind_arg(arg, self._recorded.dims) for key, arg in op.args.items()},
                    device=op.device if op.device.is_host else self._device,
                    by=_BY,
                    of=self._names.get(op.of, ""),
                )
            )

    def _bring_home(self) -> None:
        """Copy state back that the step has changed on another device than its own."""
        for name, phase in self._changed():
            if name in self._whole.interface.parts:
                self._divide(name, phase)
                continue
            home, here = self._home(name), self._names[name]
            if home is not None and home.name != here:
                self._copy(here, home.name, phase)

    def _update_others(self) -> None:
        """Copy what the update has changed to the other replicas. Each replica keeps its own buffers."""
        for name, phase in self._changed():
            if name in self._whole.interface.parts:  # there is one of it
                continue
            home = self._whole.blob_of(name)
            others = range(1, len(self._whole.replicas)) if phase == "update" else ()
            for replica in others:
                other = self._whole.blob_of(name, replica)
                if other != home:
                    self._copy(home, other, "update")

    def _hand_out(self) -> Iterator[str]:
        """Copy to the other replicas the gradients that the program hands back."""
        for name in self._whole.interface.gradients.values():
            if name in self._whole.interface.parts:
                yield from self._divide(name, "reduce")
                continue
            home = self._whole.blob_of(name)
            for replica in range(1, len(self._whole.replicas)):
                other = self._whole.blob_of(name, replica)
                if other != home:
                    self._blobs[other] = self._blobs[home]._replace(
                        name=other, storage=other, offset=0, device=self._whole.step.blobs[other].device
                    )
                    self._copy(home, other, "reduce")
                    yield other

    def _changed(self) -> Iterator[tuple[str, Phase]]:
        """The state that the recorded step changes, and in which phase.

        Raises:
            CoverageError: a parameter is changed before its update, by what the other replicas do not execute.
        """
        step, phases = self._recorded.step, dict[str, Phase]()
        for op in step.ops:
            for name in op.outputs:
                if step.blobs[name].role in STATE_ROLES:
                    earlier = phases.setdefault(name, op.phase)
                    if op.phase == "update" != earlier:
                        raise self._misfit(f"{name!r} is overwritten before its update")
        yield from phases.items()

    # Names

    def _results(self) -> None:
        """Call what the step returns as the program does."""
        mine, its = self._recorded.interface, self._whole.interface
        pairs = [(ours.blob, theirs.blob) for ours, theirs in zip(mine.fetches, its.fetches, strict=True)]
        pairs += [(mine.loss, its.loss), *((mine.gradients[param], its.gradients[param]) for param in its.gradients)]
        for ours, theirs in dict.fromkeys(pairs):
            if ours is None or theirs is None:
                continue
            if theirs in self._whole.interface.parts:  # which are made of it
                self._names[theirs] = self._declare(ours, f"{self._first}{theirs}_alone")
            else:
                wanted = self._whole.blob_of(theirs)
                if ours in self._names or wanted in self._blobs:
                    raise self._misfit(f"{ours!r} is returned otherwise than the plan returns {wanted!r}")
                self._declare(ours, wanted)

    def _declare(self, name: str, wanted: str) -> str:
        """A blob on the step's device for one of the recorded step; called as *wanted* if that is free."""
        blob = self._recorded.step.blobs[name]
        here = self._names[name] = fresh(wanted, self._blobs)
        role: Role = "temporary" if blob.role in STATE_ROLES else blob.role
        storage = here
        if blob.is_view:
            storage = self._names.get(blob.storage) or self._declare(blob.storage, self._first + blob.storage)
            role = self._blobs[storage].role
        dims = self._recorded.dims
        shape, strides = (None if sizes is None else bind_shape(sizes, dims) for sizes in (blob.shape, blob.strides))
        device, offset = self._device_of(blob), bind(blob.offset, dims)
        self._blobs[here] = Blob(here, shape, blob.dtype, device, role, storage, strides, offset)
        return here

    def _copy(self, source: str, target: str, phase: Phase) -> None:
        changes = self._blobs[target].role in STATE_ROLES
        versions = [self._last.get(source, 0)], [self._last.get(target, 0) + 1 if changes else 0]
        reads, makes = map(stored_versions, versions)
        device = self._blobs[target].device
        self._append(
            Operator(
                "Copy",
                (source,),
                (target,),
                {},
                device,
                phase,
                by=_BY,
                input_versions=reads,
                output_versions=makes,
            )
        )

    def _append(self, op: Operator) -> None:
        self._ops.append(op)
        self._last.update(op.makes)

    # The program

    def _feeds(self) -> Iterator[tuple[Slot, Slot]]:
        return zip(self._recorded.interface.feeds, self._whole.interface.feeds, strict=True)

    def _require_alike(self) -> None:
        mine, its = self._recorded.interface, self._whole.interface
        for ours, theirs in (
            (mine.arguments, its.arguments),
            (mine.results, its.results),
            (len(mine.fetches), len(its.fetches)),
            (mine.gradients.keys(), its.gradients.keys()),
        ):
            if ours != theirs:
                raise self._misfit("the recorded step takes or returns something else than the plan's")
        ops = self._whole.step.ops
        synchronised = {op.module for op in ops if op.type == _SYNCHRONISED}
        if any(op.kind == "reduce" and op.phase in _MEETING and op.module not in synchronised for op in ops):
            raise self._misfit("a callback lets its replicas meet in the forward or backward")

    def _misfit(self, what: str) -> CoverageError:
        return CoverageError(
            f"no replica can take the step alone: {what}", where=f"program {self._whole.name!r}", fix="give more rows"
        )

    def _program(self, inputs: list[str], outputs: list[str]) -> Program:
        names = dict.fromkeys([*inputs, *(name for op in self._ops for name in op.outputs)])
        step = self._whole.step.with_(
            ops=tuple(self._ops),
            blobs={name: self._blobs[name] for name in names},
            external_inputs=tuple(inputs),
            external_outputs=tuple(dict.fromkeys(outputs)),
            gradients={},
        )
        return self._whole.with_(
            step=step,
            interface=self._interface(),
            dims={self._first + BATCH: self._recorded.dims[BATCH]},
            covers=self._recorded.covers.with_guards(()),
        )

    def _interface(self) -> Interface:
        """The program's, in which one replica has each argument and each result."""
        interface = self._whole.interface
        given = {slot.blob for slot in (*interface.feeds, *interface.fetches)} | {interface.loss}
        placed = {name: at[:1] if name in given else at for name, at in interface.placed.items()}
        return replace(interface, placed=placed)
