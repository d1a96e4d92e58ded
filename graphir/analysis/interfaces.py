"""What a session reads of a program beside its operators, compared between two programs as it stands."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from ..ir.blob import STATE_ROLES
from ..ir.fitting import point_text
from ..ir.net import Net
from ..ir.program import Program
from ..ir.tensor import same_bits
from .values import lasting

if TYPE_CHECKING:
    import torch

__all__ = ["InterfaceDifference", "interface_difference", "phase_difference", "written_before_update"]


_KEEP: Final = "keep what a session reads of a program; passes that move operators leave it as it is"


class InterfaceDifference(NamedTuple):
    """Something that a session would do otherwise: what it is, what it is in each program, and what to do about it."""

    what: str
    before: Any
    after: Any
    fix: str = _KEEP


_Pairs: TypeAlias = "Iterator[tuple[str, Any, Any] | tuple[str, Any, Any, str]]"


def interface_difference(before: Program, after: Program) -> InterfaceDifference | None:
    """The first thing that a session reads of the programs and that differs between them."""
    return next((found for compare in _ASPECTS for found in _different(compare(before, after))), None)


def phase_difference(before: Program, after: Program) -> InterfaceDifference | None:
    """The first state that only one of the programs writes before its update."""
    ours, theirs = (written_before_update(program.step) for program in (before, after))
    pairs = ((f"writes to {name!r} before the update", name in ours, name in theirs) for name in sorted(ours ^ theirs))
    return next(_different(pairs), None)


def written_before_update(step: Net) -> frozenset[str]:
    """The storages of states that operators of other phases than ``update`` write: replicas may come to differ in what
    these hold, where updates leave them alike. By this a session tells what ``state()`` is common to all."""
    states = {step.blobs[name].storage for name in lasting(step)}
    written = (
        step.blobs[name].storage
        for op in step.ops
        if op.phase != "update"
        for output, name in enumerate(op.outputs)
        if output not in op.effects.viewing
    )
    return frozenset(states.intersection(written))


def _different(pairs: _Pairs) -> Iterator[InterfaceDifference]:
    found = (InterfaceDifference(*pair) for pair in pairs)
    return (each for each in found if each.before is not each.after and _exact(each.before) != _exact(each.after))


def _replicas(a: Program, b: Program) -> _Pairs:
    yield "replicas", a.replicas, b.replicas
    fix = "certify programs with the same shares: other rows give other means, and so other bits"
    yield "shares of the batch", a.shares, b.shares, fix


def _sizes(a: Program, b: Program) -> _Pairs:
    yield "captured sizes", dict(a.dims), dict(b.dims)
    yield "fixed sizes", bool(a.covers.fixed), bool(b.covers.fixed)
    ours, theirs = (sorted({str(guard) for guard in program.covers.guards}) for program in (a, b))
    yield "guards", ours, theirs
    yield "sizes that are recorded alone", bool(a.covers.only), bool(b.covers.only)
    ours, theirs = (sorted(map(point_text, program.covers.recorded)) for program in (a, b))
    yield "recorded sizes", ours, theirs


def _interface(a: Program, b: Program) -> _Pairs:
    for each in fields(a.interface):
        yield f"{each.name} of the interface", getattr(a.interface, each.name), getattr(b.interface, each.name)


def _given(a: Program, b: Program) -> _Pairs:
    """Blobs that a session fills, keeps or hands back."""
    inputs = [[n for n in p.step.external_inputs if p.step.blobs[n].role == "input"] for p in (a, b)]
    if not a.step.dialect.workspace:  # the interface has their order, and that of the outputs
        inputs = [sorted(names) for names in inputs]
    else:
        yield "outputs of the step", a.step.external_outputs, b.step.external_outputs
    yield "inputs of the step", inputs[0], inputs[1]
    kept = [_holding_state(p.step) for p in (a, b)]
    shared = a.step.blobs.keys() & b.step.blobs.keys()
    yield "blobs that hold state", sorted(kept[0] & shared), sorted(kept[1] & shared)
    for name in a.step.external_inputs:
        if name in b.step.blobs:
            yield f"roles of {name!r}", a.step.blobs[name].role, b.step.blobs[name].role


def _holding_state(step: Net) -> set[str]:
    """The blobs that hold state, or are given as views of some. Views that operators make of it hold nothing."""
    states = {name for name, blob in step.blobs.items() if blob.role in STATE_ROLES}
    return {name for name in states if not step.blobs[name].is_view or name in step.external_inputs}


def _state(a: Program, b: Program) -> _Pairs:
    """The tensors that the states start from, where both programs have them."""
    for key, ours in a.state.items():
        theirs = b.state.get(key) if b.state else ours
        if theirs is None or not (ours is theirs or _same_start(ours, theirs)):
            yield f"tensors of program.state[{key!r}]", _described(ours), "missing" if theirs is None else "other bits"


def _described(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _same_start(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two states are one; those on ``meta`` are where they look it."""
    if a.is_meta or b.is_meta:
        return (a.is_meta, a.shape, a.dtype) == (b.is_meta, b.shape, b.dtype)
    return same_bits(a, b)


_ASPECTS: Final[tuple[Callable[[Program, Program], _Pairs], ...]] = (
    _replicas,
    _sizes,
    _interface,
    _given,
    _state,
)


def _exact(value: Any) -> Any:
    """A value as one that equals only what reads the same: 1 is neither 1.0 nor True, 0.0 is not -0.0, NaN is NaN."""
    if isinstance(value, Mapping):
        return {key: _exact(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_exact(item) for item in value]
    return type(value).__name__, repr(value)
