"""What lives from step to step: the tensors of parameters, buffers, optimizer state and constants."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple, cast

import torch
from torch import Tensor

from graphir.analysis.interfaces import written_before_update
from graphir.errors import CoverageError, RunError, SessionError, nearest
from graphir.ir.blob import Blob, bound_layout
from graphir.ir.device import Device
from graphir.ir.operator import Operator
from graphir.ir.parts import Parts, whole_shape
from graphir.ir.program import GRADIENT, IS_NONE, Interface, Program
from graphir.ir.symbols import to_torch
from graphir.ir.tensor import not_dense
from graphir.ir.text import operator_text

from .failures.faults import reason_of
from .kernels.communication import copy
from .kernels.invoke import fill
from .kernels.joined import Joined, overwrite, where_once
from .kernels.optimizers import as_torch_has_it
from .machine.ending import ENDS_IN, stay

__all__ = ["State", "Use"]

_COMMON_ROLES: Final = frozenset({"param", "buffer", "state"})
"""Roles of what two programs of one model have in common; constants are each program's own."""


class _Progress:
    """How far steps have brought a state.

    Attributes:
        steps_done: how many steps were done.
        broken: why the state cannot be trusted any more; empty while it can.
        user: the thread that uses the state now, and what it does; 0 while none does.
    """

    def __init__(self, steps_done: int) -> None:
        self.steps_done, self.broken = steps_done, ""
        self.user = _NOBODY


_NOBODY: Final = 0, ""


class _Names(NamedTuple):
    """What the interfaces of programs with a common state say of it: fields of an interface."""

    optimizer_state: dict[str, Mapping[str, str]]
    parts: dict[str, Parts]
    placed: dict[str, tuple[str, ...]]

    def add(self, interface: Interface) -> None:
        """Add what another program says."""
        for param, own in interface.optimizer_state.items():
            self.optimizer_state[param] = {**self.optimizer_state.get(param, {}), **own}
        self.parts.update(interface.parts)
        self.placed.update(interface.placed)


class Use:
    """While this is active, the calling thread uses a state, which one thread at a time may.

    A thread that enters or leaves while the interpreter ends stays there, and the state is not in use.

    Args:
        progress: of the state.
        what: it does, such as ``is in a step of``.
    """

    def __init__(self, progress: _Progress, what: str) -> None:
        self.progress, self.what = progress, what

    def __enter__(self) -> None:
        self.progress.user = threading.get_ident(), self.what
        if ENDS_IN:  # asked once the state is in use: the thread that ends the interpreter asks in the other order
            self._stay()

    def __exit__(self, *raised: object) -> None:
        if ENDS_IN:
            self._stay()
        self.progress.user = _NOBODY

    def _stay(self) -> None:
        user, self.progress.user = self.progress.user, _NOBODY
        stay()
        self.progress.user = user


class State:
    """The tensors behind a program's state blobs, filled by its ``init``.

    Each tensor stays the same object throughout: steps and :meth:`load_module` overwrite it in place.

    Args:
        program: whose state.
        given: the module's and the optimizer's own names, and ``step``, to tensors; nothing of it is kept or written.
            An entry under a blob's full name (``gpu_1/bn.running_mean``) is for that replica alone.
        beside: a state whose parameters, buffers, optimizer state and number of steps this one has too: the same
            tensors, which steps of both overwrite.
        places: the real device of each logical one; the host where it is not given.
        lent: tensors by their own names, which are kept instead of being copied where they are on the blob's device
            and laid out as the blob.

    Attributes:
        copied: those of the *lent* of which copies were made, by name, and their versions then.
        keys: the own name of each blob that ``init`` loads.
        tensors: by blob.
        untouched: what the module has and no step touches, by its own names, to be handed back as it was given.
        common: those of them that states beside this one have too.
        named: the program, whose interface names what is common as well: a parameter may have a gradient, and with that
            optimizer state, in some programs only.
        progress: common to them as well.
        counted: whether its steps are among those that *progress* counts: not those of a program without optimizer,
            such as an evaluation's, beside one with.

    Raises:
        SessionError: a tensor is missing, or has another shape, dtype, device or layout than its blob; the state beside
            is of another model, of other replicas, or on other devices.
    """

    def __init__(
        self,
        program: Program,
        given: Mapping[str, Tensor],
        beside: State | None = None,
        places: Mapping[Device, torch.device] | None = None,
        lent: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.program = program
        self.copied: dict[str, tuple[Tensor, int]] = {}
        if beside is not None:
            _check_beside(program, beside.program)
        self.keys = {op.outputs[0]: str(op.args["key"]) for op in program.init.ops if op.type == "graphir.load"}
        _check_given(given, program, set(self.keys.values()))
        steps_done = _steps_done(given)
        self.common: dict[str, Tensor] = {} if beside is None else beside.common
        with torch.inference_mode():
            self.tensors = self._filled(given)
            self._place(places or {})
            self._lend(lent or {})
            lasting = (name for name in self.tensors if program.init.blob(name).role in _COMMON_ROLES)
            self.common.update({name: self.tensors[name] for name in lasting})
            self.untouched = {
                name: given[blob].clone()
                for name, blob in program.interface.module_state.items()
                if self.tensors.keys().isdisjoint(program.blobs_of(blob)) and blob in given
            }
        self.names: _Names = _Names({}, {}, {}) if beside is None else beside.names
        self.names.add(program.interface)
        self.named: Program = program.with_(interface=replace(program.interface, **self.names._asdict()))
        self.progress: _Progress = _Progress(steps_done) if beside is None else beside.progress
        self.counted: bool = beside is None or (beside.counted and (_trains(program) or not _trains(beside.program)))

    def _filled(self, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What ``init`` makes of the given state, on the host; what states beside have is taken from there."""
        init = self.program.init
        values: dict[str, Tensor] = {}
        for op in init.ops:
            name = op.outputs[0] if op.outputs else ""
            if name in self.common:
                values[name] = _taken(init.blob(name), self.common[name])
            elif op.type == "graphir.load":
                values[name] = _load(init.blob(name), op, given, self.program)
            else:
                values.update(_fill(op, values, self.program))
        return values

    def _place(self, places: Mapping[Device, torch.device]) -> None:
        """Bring the tensors to their devices."""
        for name, value in self.tensors.items():
            place = places.get(self.program.init.blob(name).device, value.device)
            if place == value.device:
                continue
            if name in self.common:
                raise SessionError(
                    f"{name!r} is on {value.device} in the session beside, and would be on {place} in this one",
                    where=f"program {self.program.name!r}",
                    fix="give both the same binding, or make a session of its own",
                )
            self.tensors[name] = copy(value, place)

    def _lend(self, lent: Mapping[str, Tensor]) -> None:
        """Put lent tensors in the place of copies of them."""
        for name, key in self.keys.items():
            if key in lent:
                ours, its = self.tensors[name], lent[key]
                if _geometry(ours) == _geometry(its):
                    self.tensors[name] = its
                else:
                    self.copied[key] = its, its._version

    def check_copied(self) -> None:
        """Raise a CoverageError where a lent tensor was written since it was copied."""
        for name, (tensor, version) in self.copied.items():
            if tensor._version != version:
                raise CoverageError(
                    f"{name!r} was written since the session copied it to its device",
                    where=f"program {self.program.name!r}",
                    fix="make a session of the program as it is captured now",
                )

    def of_step(self) -> dict[str, Tensor]:
        """The tensors that a step takes."""
        return {name: self.tensors[name] for name in self.program.step.external_inputs if name in self.tensors}

    def joined(self, name: str, replica: int, tensors: Mapping[str, Tensor]) -> Joined | None:
        """What a replica has under a name of the interface; None where that is not among the *tensors*."""
        parts = self.names.parts.get(name)
        found = [tensors.get(blob) for blob in self.named.blobs_of(name, replica)]
        held = [tensor for tensor in found if tensor is not None]
        return Joined(None if parts is None else parts.dim, held) if len(held) == len(found) else None

    def of_module(self, name: str, replica: int) -> Joined | None:
        """A replica's value under its name in ``module.state_dict()``, where it was given one."""
        found = self.joined(self.program.interface.module_state[name], replica, self.tensors)
        if found is None and name in self.untouched:
            found = Joined(None, [self.untouched[name]])
        return found

    def check_replica(self, replica: int) -> None:
        """Raise a SessionError unless there is such a replica."""
        if type(replica) is not int or not 0 <= replica < len(self.program.replicas):
            raise SessionError(
                f"no replica {replica!r}",
                where=f"program {self.program.name!r}",
                fix=f"replicas: 0 to {len(self.program.replicas) - 1}",
            )

    def all(self, replica: int | None) -> dict[str, Tensor]:
        """Everything that another session can go on from, under the names of ``program.state``.

        Without a *replica* it is the first one's, and what the others have of their own follows under their blobs' full
        names.
        """
        self.check_replica(replica or 0)
        named = partial(self.named.blob_of, replica=replica or 0)
        found: dict[str, Tensor] = {}
        for blob, key in self.keys.items():
            if blob == named(key):
                found[key] = self.tensors[blob].clone()
            elif key in self.names.parts and key not in found and (joined := self.joined(key, 0, self.tensors)):
                found[key] = joined.clone()
        # Of a state beside, too: a parameter that has no gradient here may have one there.
        for blob in [blob for own in self.names.optimizer_state.values() for blob in own.values()]:
            if blob not in found and (kept := self.joined(blob, replica or 0, self.common)):
                found[blob] = kept.clone()
        for name, tensor in self.untouched.items():
            found.setdefault(self.program.interface.module_state[name], tensor.clone())
        if replica is None:
            own = self._roles_of_their_own()
            for blob, key in self.keys.items():
                if blob != named(key) and key not in self.names.parts and self.program.init.blob(blob).role in own:
                    found[blob] = self.tensors[blob].clone()
        return {**found, "step": torch.tensor(self.progress.steps_done, device="cpu")}

    def _roles_of_their_own(self) -> frozenset[str]:
        """Roles of what replicas may differ in: more than buffers where a forward overwrites parameters."""
        step = self.program.step
        written = {step.blobs[storage].role for storage in written_before_update(step)}
        return _COMMON_ROLES if "param" in written else frozenset({"buffer"})

    def module(self, replica: int) -> dict[str, Tensor]:
        """Copies under the names of ``module.state_dict()``; tied names share one."""
        self.check_replica(replica)
        copies: dict[str, Tensor] = {}
        found = {}
        for name, blob in self.program.interface.module_state.items():
            source = self.of_module(name, replica)
            if source is None:
                raise SessionError(
                    f"the state has no {name!r}",
                    where=f"program {self.program.name!r}",
                    fix="make the session from program.state",
                )
            found[name] = copies.setdefault(blob, source.clone())
        return found

    def load_module(self, given: Mapping[str, Tensor]) -> None:
        """Overwrite the module's state on every replica; nothing changes where it does not fit.

        Raises:
            SessionError: a name is missing or unknown, or a tensor has another shape, dtype, device or layout.
        """
        _check_mapping(given, self.program)
        known, where = self.program.interface.module_state, f"program {self.program.name!r}"
        fix = "pass the state_dict() of the captured module, or of a session"
        for name in given:
            if name not in known:
                raise SessionError(f"the module has no {name!r}{nearest(name, known)}", where=where, fix=fix)
        for name in known:
            if name not in given:
                raise SessionError(f"the state has no {name!r}{nearest(name, given)}", where=where, fix=fix)
            ours = self.of_module(name, 0)
            if ours is None:
                _check(name, given[name])
            else:
                _check(name, given[name], ours.shape, ours.dtype)
                for place, target in zip(ours.places(given[name]), ours.tensors, strict=True):
                    _check_expanded(name, place, target)
        with torch.inference_mode():
            for name in known:
                for replica in range(len(self.program.replicas)):
                    held = self.of_module(name, replica)
                    if held is not None:
                        held.overwrite(given[name])

    def optimizer(self, groups: Sequence[Mapping[str, Any]], kind: str, replica: int) -> dict[str, Any]:
        """Copies in the format of ``torch.optim.Optimizer.state_dict()``, of an optimizer of a class, with *groups*."""
        self.check_replica(replica)
        state: dict[int, dict[str, Any]] = {}
        packed = []
        count = 0
        for group in groups:
            indices = list(range(count, count + len(group["params"])))
            count += len(indices)
            for index, param in zip(indices, group["params"], strict=True):
                own = self.names.optimizer_state.get(param, {})
                own = {name: blob for name, blob in own.items() if name not in (GRADIENT, IS_NONE)}
                joined = {name: self.joined(blob, replica, self.common) for name, blob in own.items()}
                found = {name: each for name, each in joined.items() if each is not None}
                kept = as_torch_has_it(found, kind)
                if kept:
                    state[index] = kept
            packed.append({**group, "params": indices})
        return {"state": state, "param_groups": packed}

    def gradients(self, replica: int) -> dict[str, Tensor] | None:
        """Copies of the gradients that a step has left, by parameter; None where none last from step to step."""
        self.check_replica(replica)
        lasting = {param: own for param, own in self.names.optimizer_state.items() if GRADIENT in own}
        found = {}
        for param, own in lasting.items():
            gradient, is_none = (self.joined(own[name], replica, self.common) for name in (GRADIENT, IS_NONE))
            if gradient is not None and is_none is not None and not is_none.clone():
                found[param] = gradient.clone()
        return found if lasting else None

    def loss_scaler(self) -> dict[str, Any]:
        """The state in the format of ``torch.amp.GradScaler.state_dict()``; replicas have the same."""
        op = next((op for op in self.program.step.ops if op.type == "aten._amp_update_scale_.default"), None)
        if op is None:
            raise SessionError(
                "the program has no loss scaler",
                where=f"program {self.program.name!r}",
                fix="capture it with loss_scale=torch.amp.GradScaler(…)",
            )
        scale, growth_tracker = (self.tensors[name].item() for name in op.inputs[:2])
        return {
            "scale": scale,
            "growth_factor": op.args["scale_growth_factor"],
            "backoff_factor": op.args["scale_backoff_factor"],
            "growth_interval": op.args["growth_interval"],
            "_growth_tracker": growth_tracker,
        }


def _check_given(given: Mapping[str, Tensor], program: Program, loaded: AbstractSet[str]) -> None:
    """Raise a SessionError unless the state holds tensors, and all that ``init`` loads."""
    _check_mapping(given, program)
    for name in given:
        if name in loaded or name == "step" or name in program.init.blobs:
            _check(name, given[name])
    where = f"program {program.name!r}"
    if not given and loaded:
        raise SessionError(
            "the state is empty, as that of a program which was captured without data (meta or fake tensors)",
            where=where,
            fix="pass program.state of a capture of the model with its weights; or a mapping from each name in "
            "[op.args['key'] for op in program.init.ops] to a tensor, as model.state_dict() has them",
        )
    missing = sorted(loaded - given.keys())
    if missing:
        raise SessionError(
            f"the state has no {missing[0]!r}"
            + (f" (and {len(missing) - 1} more are missing)" if len(missing) > 1 else nearest(missing[0], given)),
            where=where,
            fix="pass program.state, which has the module's and the optimizer's own names",
        )


def _steps_done(given: Mapping[str, Tensor]) -> int:
    step = given.get("step", torch.tensor(0, device="cpu"))
    _check("step", step, (), torch.int64)
    if int(step) < 0:
        raise SessionError(f"'step' in the state is {int(step)}", fix="give the number of steps done")
    return int(step)


def _load(blob: Blob, op: Operator, given: Mapping[str, Tensor], program: Program) -> Tensor:
    """A blob's own tensor, with its geometry and the value that is given under its name, or else its place in that
    under the key of *op*, which loads it."""
    key, dim = str(op.args["key"]), op.args.get("dim")
    name = blob.name if blob.name in given else key
    source = given[name]
    if blob.shape is None or blob.dtype is None:
        return source.clone()
    (shape, strides), dtype = bound_layout(blob, {}), to_torch(blob.dtype)
    if name == key and isinstance(dim, int):
        shapes = [bound_layout(program.init.blob(part), {})[0] for part in program.blobs_of(key)]
        _check(name, source, whole_shape(dim, shapes), dtype)
        source = source.narrow(dim, cast("int", op.args.get("first", 0)), shape[dim])
    else:
        _check(name, source, shape, dtype)
    made = torch.empty_strided(shape, strides, dtype=dtype, device="cpu")
    _check_expanded(name, source, made)
    overwrite(made, source)
    return made


def _geometry(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _taken(blob: Blob, tensor: Tensor) -> Tensor:
    """A blob's tensor of the states beside this one, which has to fit it."""
    if blob.shape is not None and blob.dtype is not None:
        shape, strides = bound_layout(blob, {})
        _check(blob.name, tensor, shape, to_torch(blob.dtype))
        if tensor.stride() != strides:
            raise SessionError(f"{blob.name!r} in the state is laid out otherwise", fix="make a session of its own")
    return tensor


def _fill(op: Operator, values: Mapping[str, Tensor], program: Program) -> dict[str, Tensor]:
    try:
        return fill(op, values, program)
    except (RuntimeError, TypeError, ValueError, OverflowError) as e:
        raise RunError(
            f"{op.type} failed: {reason_of(e)}",
            at=operator_text(op, program.init),
            where=f"init of program {program.name!r}",
        ) from e


def _trains(program: Program) -> bool:
    """Whether a program makes updates, or what an update reads."""
    kept = program.interface.optimizer_state.values()
    return bool(program.interface.optimizers) or any(GRADIENT in own for own in kept)


def _check_beside(ours: Program, theirs: Program) -> None:
    """Raise a SessionError unless both have the blobs of one model's state."""
    where = f"program {ours.name!r}"
    if ours.interface.module_state != theirs.interface.module_state:
        raise SessionError(
            f"the session beside is of another model, in program {theirs.name!r}",
            where=where,
            fix="give one of the same model, or make a session of its own",
        )
    apart = {name for name in ours.interface.module_state.values() if _parts_of(ours, name) != _parts_of(theirs, name)}
    if apart:
        raise SessionError(
            f"{min(apart)!r} lives in other parts than in the session beside",
            where=where,
            fix="shard both programs alike, or make a session of its own from the other one's state()",
        )
    if ours.replicas != theirs.replicas:
        raise SessionError(
            f"the replicas are {_replicas(ours)}, those of the session beside are {_replicas(theirs)}",
            where=where,
            fix="replicate both programs alike, or make a session of its own from the other one's state()",
        )


def _parts_of(program: Program, name: str) -> Parts | None:
    return program.interface.parts.get(name)


def _replicas(program: Program) -> str:
    return ", ".join([repr(prefix) for prefix in program.replicas])


def _check_mapping(given: object, program: Program) -> None:
    if not isinstance(given, Mapping):
        raise SessionError(
            f"the state is of type {type(given).__name__}, not a mapping of names to tensors",
            where=f"program {program.name!r}",
            fix="pass program.state, or the state() of a session",
        )


def _check(name: str, tensor: Tensor, shape: tuple[int, ...] | None = None, dtype: torch.dtype | None = None) -> None:
    """Raise a SessionError unless it is a dense tensor with data, of this shape and dtype where they are given."""
    what = f"{name!r} in the state"
    if not isinstance(tensor, Tensor):
        raise SessionError(f"{what} is of type {type(tensor).__name__}, not a tensor", fix="give a torch.Tensor")
    if tensor.is_meta:
        raise SessionError(f"{what} is on meta, so it has no data", fix="give a tensor with data")
    if kind := not_dense(tensor):
        raise SessionError(f"{what} is a {kind} tensor", fix="give a dense (strided) one")
    if shape is not None and tuple(tensor.shape) != shape:
        raise SessionError(
            f"{what} has shape {list(tensor.shape)}, the program takes {list(shape)}",
            fix="give the state of the captured module",
        )
    if dtype is not None and tensor.dtype != dtype:
        raise SessionError(f"{what} has dtype {tensor.dtype}, the program takes {dtype}", fix=f"give it .to({dtype})")


def _check_expanded(name: str, source: Tensor, target: Tensor) -> None:
    """Raise a SessionError where *source* has different values for one element of *target*'s memory."""
    if 0 in target.stride() and target.numel():
        rows = source[where_once(target)].expand_as(source)
        if not bool(((rows == source) | (source != source)).all()):
            raise SessionError(
                f"{name!r} in the state has values of its own along a dimension that was captured expanded",
                fix="give values that are the same along it, or capture the model with a clone of that tensor",
            )
