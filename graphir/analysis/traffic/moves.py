"""Which entry of a program's history put an operator or a blob where it is."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Final, NamedTuple

from ...errors import GraphirError
from ...ir.device import Device, gpu
from ...ir.history import PassText, parse_passes, pass_name
from ...ir.module_patterns import ModulePattern
from ...ir.names import base_name, prefix_of
from ...ir.program import Program
from .wording import some

__all__ = ["Moves", "Placed", "Reason"]

_STAY: Final = frozenset(
    {"replicate", "inject_copies", "inject_caffe2_copies", "share_storage", "park", "recompute", "pipeline"}
)
"""Passes that move no operator."""


@dataclass(frozen=True, slots=True)
class Reason:
    """A move of a pass.

    Attributes:
        position: of the pass in the program's history.
        by: the name of the pass.
        what: what it moved, as it was given: a module, a pattern of modules, or the activation that decided. Empty
            where nobody knows. Of ``replicate``, whose values meet: ``gpu_0/ and gpu_1/``.
        where: ``gpu:1`` or ``gpu:0 -> gpu:1``; the text of the pass's options where nothing is known of its moves.
    """

    position: int
    by: str
    what: str
    where: str

    def __str__(self) -> str:
        return " ".join(filter(None, (self.by, self.what + ":" * bool(self.what and self.where), self.where)))


class Placed(NamedTuple):
    """Something that is on a device, and what is known of how it came there.

    Attributes:
        name: of a blob of it, with its replica's prefix.
        device: where it is.
        by: the pass that made or moved it last; empty as captured, or if nobody knows.
        module: its module.
        handles: the storages that it reads and makes, in that order, and the activations whose gradients these are.
    """

    name: str
    device: Device
    by: str
    module: str
    handles: tuple[str, ...]


class _Entry(NamedTuple):
    """A pass of the history that moves things.

    Attributes:
        position: in the history.
        by: its name.
        text: its options, as the history has them.
        shifts: by source device, the target.
        activations: what it was given to move, by base name; of a view, the storage.
        modules: for each pattern of modules, the targets.
    """

    position: int
    by: str
    text: str
    shifts: Mapping[Device, Device]
    activations: Mapping[str, None]
    modules: Mapping[str, Collection[Device]]

    def leads_to(self, placed: Placed) -> bool:
        """Whether it can have moved something there; where nothing is known of its moves, whether it was the last."""
        if not self.shifts and not self.modules:
            return self.by == placed.by
        return any(placed.device in targets for targets in (self.shifts.values(), *self.modules.values()))


class Moves:
    """The moves that a program went through, by what its history says."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.entries = list(_entries(program))
        self.named = {entry.by for entry in self.entries}
        self.replicated = next((i for i, text in enumerate(program.history) if pass_name(text) == "replicate"), None)
        self.known: dict[tuple[int, str, str], Reason] = {}
        self.parks = list(_parks(program))

    def of(self, placed: Placed) -> tuple[Reason, ...]:
        """The moves that can have brought it there, all of them where several can; none where it has not moved.

        A pass can that leads to its device, and is the last one that moved it as far as that is known. Of several
        those are taken that name it: its module, or an activation that it handles.
        """
        if not self.entries:
            return ()
        moved = placed.by in self.named
        if not moved and self._home(placed.name) in (None, placed.device):
            return ()
        leading = [e for e in self.entries if e.leads_to(placed) and (not moved or e.by == placed.by)]
        naming = [reason for entry in leading for reason in self._naming(entry, placed)]
        return tuple(naming or [reason for entry in leading for reason in self._leading(entry, placed)])

    def parked(self, name: str, module: str) -> tuple[Reason, ...]:
        """The passes ``park`` that can have parked a blob, which *module* makes: those that name it, else all."""
        naming = [
            self._reason(position, "park", what, to)
            for position, options, to in self.parks
            for what in options
            if what in (name, base_name(name)) or _covers(what, module) or _covers(what, base_name(name))
        ]
        return tuple(naming[-1:] or [self._reason(position, "park", "", to) for position, _, to in self.parks])

    def between_replicas(self, a: str, b: str) -> tuple[Reason, ...]:
        """``replicate``, where the blobs *a* and *b* belong to two replicas."""
        first, second = prefix_of(a), prefix_of(b)
        if self.replicated is None or first == second:
            return ()
        met = f"{first} and {second}" if first and second else first or second
        return (self._reason(self.replicated, "replicate", met, ""),)

    def _home(self, name: str) -> Device | None:
        """Where a blob is unless it moves; None where nobody knows."""
        prefix = prefix_of(name)
        if prefix not in self.program.replicas:
            return None
        if prefix:
            return Device.parse(prefix[:-1].replace("_", ":"))
        return None if self.program.step.dialect.workspace else gpu(0)

    def _naming(self, entry: _Entry, placed: Placed) -> Iterator[Reason]:
        """The moves of a pass that name it."""
        for pattern, targets in entry.modules.items():
            if placed.device in targets and _covers(pattern, placed.module):
                yield self._reason(entry.position, entry.by, pattern, placed.device)
        chosen = next((n for n in map(base_name, reversed(placed.handles)) if n in entry.activations), None)
        if chosen is not None:
            for source, target in entry.shifts.items():
                if target == placed.device:
                    yield self._reason(entry.position, entry.by, chosen, f"{source} -> {target}")

    def _leading(self, entry: _Entry, placed: Placed) -> Iterator[Reason]:
        """The moves of a pass that lead where it is."""
        moves = [("", f"{source} -> {target}") for source, target in entry.shifts.items() if target == placed.device]
        moves += [
            (pattern, str(placed.device)) for pattern, targets in entry.modules.items() if placed.device in targets
        ]
        for what, where in moves or [("", entry.text)]:
            yield self._reason(entry.position, entry.by, what, where)

    def _reason(self, position: int, by: str, what: str, where: str) -> Reason:
        return self.known.setdefault((position, what, where), Reason(position, by, what, where))


def _parks(program: Program) -> Iterator[tuple[int, list[str], str]]:
    """Of each ``park``: its position, what it was given, and where to."""
    for position, text in enumerate(program.history):
        if pass_name(text) == "park":
            try:
                (found,) = parse_passes(text)
            except (GraphirError, ValueError):  # a history may say anything
                found = PassText("park", {})
            what, to = found.options.get("what"), found.options.get("to")
            targets = [str(device) for device in to.values()] if isinstance(to, Mapping) else [str(to or "")]
            yield position, [str(name) for name in what] if isinstance(what, list) else [], some(targets)


def _entries(program: Program) -> Iterator[_Entry]:
    for position, text in enumerate(program.history):
        if pass_name(text) in _STAY:
            continue
        try:
            (found,) = parse_passes(text)
        except (GraphirError, ValueError):  # a history may say anything
            found = PassText(pass_name(text), {})
        yield _entry(program, position, text, found)


def _entry(program: Program, position: int, text: str, found: PassText) -> _Entry:
    shifts, activations, modules = (found.options.get(name) for name in ("shifts", "activations", "modules"))
    targets: dict[str, Collection[Device]] = {}
    for pattern, to in modules.items() if isinstance(modules, Mapping) else ():
        named = map(_device, to.values() if isinstance(to, Mapping) else [to])
        targets[str(pattern)] = {device for device in named if device is not None}
    return _Entry(
        position,
        found.name,
        text.partition("{")[2].rpartition("}")[0],
        {
            source: target
            for pair in (shifts.items() if isinstance(shifts, Mapping) else ())
            for source, target in [tuple(map(_device, pair))]
            if source is not None and target is not None
        },
        _storages(program, activations if isinstance(activations, list) else ()),
        targets,
    )


def _device(named: object) -> Device | None:
    """The device that an option names, as it is printed or by number; None if it does not."""
    try:
        return Device.parse(named) if isinstance(named, str | int) else None
    except GraphirError:
        return None


def _storages(program: Program, names: Iterable[object]) -> dict[str, None]:
    """What a shift was given, and the storages of what are views, without prefix."""
    blobs, prefix = program.step.blobs, program.replicas[0]
    found: dict[str, None] = {}
    for name in names:
        found[str(name)] = None
        blob = blobs.get(f"{prefix}{name}")
        if blob is not None:
            found[base_name(blob.storage)] = None
    return found


@cache
def _covers(pattern: str, module: str) -> bool:
    """Whether a pattern names *module*, or one that it is in."""
    try:
        return ModulePattern(pattern).covers(module)
    except GraphirError:  # a history may say anything
        return False
