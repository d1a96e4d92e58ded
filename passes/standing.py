"""What a program is, read off its operators, blobs and replicas, and the order of passes that follows from it.

A pass says behind which programs it may not come, and which it needs, in two fields of its class::

    never_behind = {"shared": "an operand that is copied elsewhere would be overwritten in the copy alone"}
    only_behind = {"replicated": "statistics are added over replicas"}

The frame (:mod:`.base`) asks before anything is built. A program answers alike however it came about: loaded from a
file, without its history, and without what its operators say of passes (``by``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Literal, NamedTuple, TypeAlias

from graphir.analysis.placed import exchanged
from graphir.errors import PassError, nearest
from graphir.ir.blob import STATE_ROLES
from graphir.ir.device import gpu
from graphir.ir.names import micro_batches, prefix_of
from graphir.ir.net import Net
from graphir.ir.operator import PURE
from graphir.ir.program import Program
from graphir.ir.verify import blamed

__all__ = ["Order", "Standing", "parked_storages", "recomputed_storages", "require_known", "require_order"]

Standing: TypeAlias = Literal[
    "replicated", "micro-batched", "placed", "moved", "copied", "crossing", "parked", "shared"
]
"""What a program can be, see :data:`_TRAITS`."""

Order: TypeAlias = Mapping[Standing, str]
"""What a program may not be, or has to be, for a pass, each with the reason."""


class _Trait(NamedTuple):
    """What it takes to be something, and how an error says it.

    Attributes:
        holds: whether a program is it.
        so: how an error says that a program is it.
        not_so: how an error says that a program is not.
        by: the passes that make programs it.
        once: what to do for a pass that may not come behind; by default, to run it before *by*.
        first: what to do for a pass that needs it; by default, to run *by* before the pass.
    """

    holds: Callable[[Program], bool]
    so: str
    not_so: str
    by: tuple[str, ...] = ()
    once: str = ""
    first: str = ""


def require_known(name: str, standings: Iterable[str]) -> None:
    """Refuse a pass that asks for what no program can be.

    Raises:
        PassError: one of the standings is unknown.
    """
    for standing in standings:
        if standing not in _TRAITS:
            raise PassError(
                f"{name}: a program cannot be {standing!r}{nearest(standing, _TRAITS)}",
                fix=f"programs can be {', '.join(_TRAITS)}",
            )


def require_order(program: Program, name: str, never_behind: Order, only_behind: Order) -> None:
    """Refuse a program behind which a pass may not come, or that is not what the pass needs.

    Args:
        program: for the pass.
        name: of the pass.
        never_behind: what the program may not be, each with the reason.
        only_behind: what the program has to be, each with the reason.

    Raises:
        PassError: the first of these that does not hold; says the right order.
        VerifyError: the program breaks an invariant, and that cannot be told.
    """
    with blamed(program):
        _require_order(program, name, never_behind, only_behind)


def _require_order(program: Program, name: str, never_behind: Order, only_behind: Order) -> None:
    for standing, why in never_behind.items():
        trait = _TRAITS[standing]
        if trait.holds(program):
            raise PassError(
                f"{name}: program {program.name!r} {trait.so}: {why}",
                fix=trait.once or f"run {name} before {_either(trait.by, name)}",
            )
    for standing, why in only_behind.items():
        trait = _TRAITS[standing]
        if not trait.holds(program):
            raise PassError(
                f"{name}: program {program.name!r} {trait.not_so}: {why}",
                fix=trait.first or f"run {_either(trait.by, name)} before {name}",
            )


def _either(names: Sequence[str], but: str) -> str:
    *others, last = [name for name in names if name != but]
    return f"{', '.join(others)} or {last}" if others else last


def _sources(net: Net) -> dict[str, str]:
    """What each copy is a copy of. A copy that gives state a later value is none."""
    return {
        op.outputs[0]: op.inputs[0]
        for op in net.ops
        if op.kind == "copy" and net.blobs[op.outputs[0]].role not in STATE_ROLES
    }


def parked_storages(net: Net) -> set[str]:
    """The storages that leave their device and come back to it.

    An activation does where a copy of it is copied back to its device. State does where a copy gives it a later value:
    it lives elsewhere than its operators. A value that goes to another replica, as a piece of a sharded batch does, is
    not parked.
    """
    blobs, sources = net.blobs, _sources(net)
    found = {op.outputs[0] for op in net.ops if op.kind == "copy" and op.outputs[0] not in sources}
    for copy, away in sources.items():
        home = sources.get(away)
        if home is not None and blobs[home].device == blobs[copy].device != blobs[away].device:
            found.update([blobs[home].storage] if prefix_of(home) == prefix_of(away) else ())
    return found


def recomputed_storages(net: Net) -> set[str]:
    """The storages that an operator of the backward computes again, as the operator did that made them."""
    again = {
        (op.of, op.type)
        for op in net.ops
        if op.of and op.phase == "backward" and net.blobs[op.outputs[0]].role == "activation"
    }
    return {
        net.blobs[name].storage
        for op in net.ops
        if op.phase == "forward"
        for name in op.outputs
        if (name, op.type) in again
    }


def _is_shared(program: Program) -> bool:
    """Whether an operator writes a result with a name of its own over its operand, as ``share_storage`` lets it."""
    return any(
        op.outputs[output] != op.inputs[source]
        for op in program.step.ops
        if op.effects is not PURE
        for output, source in op.effects.writes
    )


def _is_copied(program: Program) -> bool:
    """Whether copies bring values of a replica to others of its layers, and are not of what is parked."""
    net = program.step
    copies = [op for op in net.ops if op.kind == "copy" and op.phase in ("forward", "backward")]
    if not copies:
        return False
    sources, parked, exchange = _sources(net), parked_storages(net), set(map(id, exchanged(net)))
    for op in copies:
        if id(op) not in exchange:
            name = op.inputs[0]
            while name in sources:
                name = sources[name]
            if net.blobs[name].storage not in parked:
                return True
    return False


def _crosses(program: Program) -> bool:
    """Whether a copy of the forward or the backward brings a value from one device to another."""
    return any(op.kind == "copy" and op.phase in ("forward", "backward") for op in program.step.ops)


def _is_moved(program: Program) -> bool:
    """Whether a replica computes on several devices."""
    computing = {op.device for op in program.step.ops if op.phase in ("forward", "backward") and not op.device.is_host}
    return len(computing) > 1 and (len(computing) != len(program.replicas) or _crosses(program))


def _is_placed(program: Program) -> bool:
    """Whether a program computes elsewhere than on the gpu on which it was captured: on others, or more than numbers on
    the host."""
    blobs = program.step.blobs
    return any(
        op.device not in _CAPTURED
        and op.kind != "copy"
        and op.phase in ("forward", "backward")
        and not (op.device.is_host and all(blobs[name].shape == () for name in op.outputs))
        for op in program.step.ops
    )


_CAPTURED: Final = (gpu(0),)

_TRAITS: Final[Mapping[Standing, _Trait]] = {
    "replicated": _Trait(
        lambda program: program.replicas != ("",),
        so="is replicated already",
        not_so="is not replicated",
        by=("replicate",),
        once="replicate or shard the captured program once, over all its devices",
    ),
    "micro-batched": _Trait(
        lambda program: micro_batches(program.step.blobs) > 1,
        so="has several micro-batches",
        not_so="has one micro-batch",
        first="capture it with accumulate=4, or as many micro-batches as you like",
    ),
    "placed": _Trait(
        _is_placed, so="is placed already", not_so="is not placed", by=("shift_modules", "shift_activations", "balance")
    ),
    "moved": _Trait(
        _is_moved,
        so="has layers of a replica on several devices",
        not_so="has all layers of a replica on one device",
        first="run shift_modules or shift_activations, then inject_copies, before pipeline",
    ),
    "copied": _Trait(
        _is_copied,
        so="has the copies of a placement already",
        not_so="has no copies within a replica",
        by=("inject_copies",),
    ),
    "crossing": _Trait(
        _crosses, so="has copies between devices", not_so="has no copies between its devices", by=("inject_copies",)
    ),
    "parked": _Trait(
        lambda program: bool(parked_storages(program.step)),
        so="has something parked already",
        not_so="has nothing parked",
        by=("park", "balance"),
    ),
    "shared": _Trait(
        _is_shared,
        so="has operators that overwrite their operands",
        not_so="has no operators that overwrite their operands",
        by=("share_storage",),
    ),
}
