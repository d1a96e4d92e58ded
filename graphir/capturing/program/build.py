"""From recordings to a program: blobs with their roles, the operators of ``init`` and of the step, the interface."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import torch
from torch.utils import _pytree as pytree

from ...errors import CaptureError
from ...ir.blob import Blob, Role
from ...ir.device import gpu
from ...ir.dtype import TORCH_NAME
from ...ir.names import RESERVED, Names
from ...ir.net import Net
from ...ir.operator import Arg, Operator, stored_versions
from ...ir.opset import effects_of
from ...ir.program import GRADIENT, IS_NONE, Gathered, Interface, Program, Scalar, Slot
from ...ir.symbols import has_symbol
from ..intake.optimizers import Group
from ..intake.snapshots import snapshot
from ..intake.state import has_data
from ..intake.structures import tuple_of, written_structure
from ..record.values import UPDATE, RecordedCall, Value
from ..sizes.fit import Sizes
from ..sizes.follow import Followed
from ..step.recorded_step import Recording
from ..step.recording import Step
from .naming import name_values
from .update import Update, build_update

__all__ = ["build_program"]

_HERE: Final = gpu(0)


def build_program(
    step: Step,
    followed: Followed,
    copies: dict[str, torch.Tensor],
    *,
    name: str,
    optimizers: tuple[str, ...] = (),
    groups: Sequence[Group] = (),
    like: Callable[[Recording, Sequence[str]], Iterable[Operator]] | None = None,
) -> tuple[Program, Sequence[str]]:
    """The program of a recorded step, and the blob of each value of its recording.

    Args:
        step: the recorded step.
        followed: the step's recordings, and how their sizes follow the dimensions.
        copies: of the parameters and buffers, by the names of their blobs.
        name: of the program.
        optimizers: the names of the classes of the step's optimizers.
        groups: their parameter groups.
        like: makes the operators of the updates, of the recording and the blobs of its values; None: they are those of
            the groups.

    Raises:
        CaptureError: a value is of a type that programs don't have.
    """
    sizes, recording = followed.sizes, followed.sizes.recording
    names = Names([*RESERVED, *recording.state])
    update = build_update(groups, recording, names)
    modules = frozenset(path for path, _ in step.model.named_modules() if path)
    named = name_values(recording, names, modules)
    updates = iter(like(recording, named) if like is not None else update.operators(recording.updates, named))
    roles = _roles(recording)
    state, inputs = _externals(recording, sizes, named, update)
    made = {
        named[v.index]: _blob(named, v, roles[v.root.index], sizes)
        for call in recording.calls
        for v in call.outputs
        if not v.version
    }
    blobs = {**state, **inputs, **made}
    ops = [
        next(updates) if call.type == UPDATE else _operator(call, args, named, blobs)
        for call, args in zip(recording.calls, sizes.args, strict=True)
    ]
    if not optimizers:
        _refuse_sparse_outputs(recording, named)
    outputs = _external_outputs(recording, named, optimizers)
    net = Net(
        f"{name}.step",
        tuple(ops),
        blobs,
        (*state, *inputs),
        outputs,
        {
            named[v.index]: named[g.index]
            for v, g in recording.gradients
            if not v.kind and v.root is v and v.follows_input
        },
    )
    program = Program(
        name,
        _init(name, state, recording, named, update),
        net,
        followed.dims,
        followed.covers,
        interface=_interface(step, recording, followed.batch_dims, named, optimizers, update),
        state=_state(step, recording, copies, named, update),
        module=step.model,
    )
    return program, named


def _blob(named: Sequence[str], value: Value, role: Role, sizes: Sizes) -> Blob:
    shape, strides, offset = sizes.geometries[value.index]
    name = named[value.index]
    if not has_symbol(value.dtype):
        raise CaptureError(f"{name!r} has elements of type {value.dtype}", fix=f"supported: {', '.join(TORCH_NAME)}")
    return Blob(name, shape, value.geometry.symbol, _HERE, role, named[value.root.index], strides, offset)


def _roles(recording: Recording) -> dict[int, Role]:
    """The role of each storage, by the index of its root."""
    handed_back = {v.root.index for v in [recording.loss, *recording.outputs] if v is not None}
    pairs = [*recording.gradients, *recording.parts, *recording.finished]
    gradients = {gradient.root.index for _, gradient in pairs}
    gradients |= {value.root.index for pair in recording.sparse_gradients.values() for value in pair}
    of_params = {gradient.root.index for value, gradient in pairs if value.kind == "param"}
    roles: dict[int, Role] = {}
    for value in recording.values:
        if value.root is not value:
            continue
        if value.kind:
            roles[value.index] = value.kind  # type: ignore[assignment]
        elif value.index in handed_back and value.index not in of_params:
            roles[value.index] = "output"
        elif value.phase != "forward":
            roles[value.index] = "gradient" if value.index in gradients else "temporary"
        else:
            roles[value.index] = "activation" if value.follows_input else "temporary"
    return roles


def _externals(
    recording: Recording, sizes: Sizes, named: Sequence[str], update: Update
) -> tuple[dict[str, Blob], dict[str, Blob]]:
    """The blobs that live from step to step, and the blobs that a step is given."""
    constants = [value for value, _ in recording.constants]
    lasting = [
        *(_blob(named, v, v.kind, sizes) for v in recording.state.values()),  # type: ignore[arg-type]
        *update.state_blobs,
        *(_blob(named, v, v.kind, sizes) for v in constants),  # type: ignore[arg-type]
    ]
    inputs = [*recording.inputs, *(gradient for _, _, gradient in recording.given)]
    given = [_blob(named, v, "input", sizes) for v in inputs if v is not None]
    return {b.name: b for b in lasting}, {b.name: b for b in [*update.number_blobs, *given]}


def _operator(call: RecordedCall, args: Mapping[str, Arg], named: Sequence[str], blobs: Mapping[str, Blob]) -> Operator:
    inputs = tuple([named[v.index] for v in call.inputs])
    outputs = tuple([named[v.index] for v in call.outputs])
    effects = effects_of(call.type, args, call.operands, len(inputs), call.results)
    return Operator(
        call.type,
        inputs,
        outputs,
        args,
        _HERE,
        call.phase,
        call.scope,
        seed=call.seed,
        operands=call.operands,
        results=call.results,
        effects=effects,
        input_versions=stored_versions([v.version for v in call.inputs]),
        output_versions=stored_versions([v.version for v in call.outputs]),
        of="" if effects.shows else _belongs_to(call, named, blobs),
        source=call.line,
    )


def _belongs_to(call: RecordedCall, named: Sequence[str], blobs: Mapping[str, Blob]) -> str:
    """The blob of the value that a call belongs to; of the value's storage, if the program has no blob of the view."""
    if call.of is None:
        return ""
    own, root = named[call.of.index], named[call.of.root.index]
    return own if own in blobs else root if root in blobs else ""


def _refuse_sparse_outputs(recording: Recording, named: Sequence[str]) -> None:
    for index in recording.sparse_gradients:
        raise CaptureError(
            f"{named[index]!r} has a sparse gradient, which a program can't return",
            fix="use sparse=False, or capture or compile the step with its optimizer",
        )


def _external_outputs(recording: Recording, named: Sequence[str], optimizers: Sequence[str]) -> tuple[str, ...]:
    results = [*recording.outputs, *([] if recording.loss is None else [recording.loss])]
    gradients = [g for _, g in recording.finished if not optimizers]
    return tuple(dict.fromkeys(named[v.index] for v in [*results, *gradients]))


def _init(name: str, state: Mapping[str, Blob], recording: Recording, named: Sequence[str], update: Update) -> Net:
    scopes = {named[v.index]: v.scope for v in [*recording.state.values(), *(v for v, _ in recording.constants)]}
    scopes |= update.state_modules
    loads = tuple(
        Operator("graphir.load", (), (blob.name,), {"key": blob.name}, blob.device, "init", scopes[blob.name])
        for blob in state.values()
    )
    return Net(f"{name}.init", loads, dict(state))


def _state(
    step: Step,
    recording: Recording,
    copies: dict[str, torch.Tensor],
    named: Sequence[str],
    update: Update,
) -> dict[str, torch.Tensor]:
    given = [*(entry.tensor for entry in step.state.tensors), *(tensor for _, tensor in recording.constants)]
    if not all(map(has_data, given)):
        return {}
    tensors = copies | update.state_tensors
    tensors |= {named[value.index]: snapshot(_dense(tensor)) for value, tensor in recording.constants}
    tensors["step"] = torch.zeros((), dtype=torch.int64, device="cpu")
    return tensors


def _interface(
    step: Step,
    recording: Recording,
    batch_dims: Sequence[int | None] | None,
    named: Sequence[str],
    optimizers: tuple[str, ...],
    update: Update,
) -> Interface:
    gathered = batch_dims if batch_dims is not None else [None] * len(recording.returned)
    how = recording.gathered or ["first"] * len(recording.returned)
    feeds = []
    for leaf, value in zip(step.arguments.leaves, recording.inputs, strict=True):
        scalar = None if isinstance(leaf.value, torch.Tensor) else leaf.value
        feeds.append(Slot(None if value is None else named[value.index], leaf.batch_dim, scalar))
    arguments, end = step.arguments, step.arguments.positional
    if step.joint:
        arguments = arguments.with_tuple(len(recording.given))
        feeds[end:end] = [Slot(named[g.index], gathered[position]) for position, _, g in recording.given]
    return Interface(
        arguments=arguments.dumps(),
        feeds=tuple(feeds),
        loss=None if recording.loss is None else named[recording.loss.index],
        fetches=tuple([_slot(*found, named) for found in zip(recording.returned, gathered, how, strict=True)]),
        results=_results(step, recording, named),
        differentiable=tuple([position for position, _, _ in recording.given]),
        one_replica=batch_dims is None,
        gradients={} if optimizers else {named[p.index]: named[g.index] for p, g in recording.finished},
        module_state=step.state.module_state,
        optimizers=optimizers,
        optimizer_state=_lasting(update, recording, named),
        param_groups=update.param_groups,
    )


def _lasting(update: Update, recording: Recording, named: Sequence[str]) -> dict[str, dict[str, str]]:
    """The state of each parameter beside itself: its optimizer's, and its gradient where that lasts."""
    found = {param: dict(own) for param, own in update.optimizer_state.items()}
    for param, gradient, is_none in recording.kept:
        lasting = {GRADIENT: named[gradient.index], IS_NONE: named[is_none.index]}
        found.setdefault(named[param.index], {}).update(lasting)
    return found


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, with memory for each element."""
    return tensor.contiguous() if 0 in tensor.stride() else tensor


def _results(step: Step, recording: Recording, named: Sequence[str]) -> str | None:
    """The structure, as JSON, of the results of a step without loss."""
    spec = recording.results
    if spec is not None and step.joint:
        spec = tuple_of([spec, pytree.tree_structure(dict.fromkeys([named[v.index] for v in recording.of_inputs]))])
    return None if spec is None else written_structure(spec, "what the model returns")


def _slot(leaf: Value | Scalar, batch_dim: int | None, how: Gathered | None, named: Sequence[str]) -> Slot:
    return (
        Slot(named[leaf.index], batch_dim, gather="first" if batch_dim is not None else how)
        if isinstance(leaf, Value)
        else Slot(None, None, leaf)
    )
