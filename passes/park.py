"""Keep on a peer or on the host what a device holds without using it.

A saved activation leaves after its last use in the forward and comes back before its first use after that::

    relu        @gpu:0 = aten.relu(bn1)              relu        @gpu:0 = aten.relu(bn1)
    conv2       @gpu:0 = aten.convolution(relu, …)   conv2       @gpu:0 = aten.convolution(relu, …)
                                                     relu_gpu_1  @gpu:1 = Copy(relu)            relu is freed
    …                                                …
                                                     relu_gpu_0  @gpu:0 = Copy(relu_gpu_1)
    conv1_grad  @gpu:0 = …backward(g, relu)          conv1_grad  @gpu:0 = …backward(g, relu_gpu_0)

State lives where it is parked, from step to step. It is brought in for each phase that uses it, and what the phase
made of it goes back. Readers on other devices read a parked blob where it is parked, or what came back. Updates can run
where their state is parked (:mod:`.updates`); then gradients leave instead.

When a copy back begins, its place in the program says (:mod:`.trips`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from heapq import nlargest
from typing import ClassVar, Final, NamedTuple, TypeAlias

from pydantic import NonNegativeInt, field_validator

from graphir.analysis.liveness import liveness
from graphir.errors import PassError, PassWarning, counted, warn
from graphir.ir.blob import STATE_ROLES, Blob
from graphir.ir.device import Device, DeviceName, gpu
from graphir.ir.names import copy_name
from graphir.ir.net import Net
from graphir.ir.operator import Issue, Operator, Phase, Received
from graphir.ir.program import Program
from graphir.ir.text import nbytes_text

from .base import Gpu, OptionError, Pass, Placed, build, register
from .following import filled
from .saved import Use, choose, nothing_saved, require_captured, saved_in, unsaved, uses_of, warn_of_modules
from .standing import Order
from .substitutes import Substitutes, with_operands
from .trips import Clock, Stay, Trip, most_at_once, toll, two_at_a_time
from .updates import Updates, updates_of

__all__ = ["LATER", "Park", "park"]

_Targets: TypeAlias = Callable[[Device], Device | None]
"""Where what is on a device is parked; None if it stays."""

LATER: Final = 2
"""How many operators ahead copies back begin, as a warning advises, and where limits would not be kept otherwise."""


@register
class Park(Pass):
    """See :func:`park`."""

    name: ClassVar[str] = "park"
    never_behind: ClassVar[Order] = {"shared": "what is parked would be overwritten on its device"}
    warns: ClassVar[bool] = True
    """Whether little gain is warned of: a search that tries it knows what it gains."""

    what: tuple[str, ...]
    to: Placed | dict[Gpu, Placed]
    ahead: NonNegativeInt | None = None
    update_there: bool = False

    @field_validator("to")
    @classmethod
    def _moves(cls, to: str | dict[int, str]) -> str | dict[int, str]:
        for source, target in to.items() if isinstance(to, dict) else ():
            if gpu(source) == target:
                raise OptionError(f"{target} is where it is already", fix="give another device")
        return to

    def rewrite(self, program: Program) -> Program:
        require_captured(program, self.name)
        uses = uses_of(program.step)
        stays = _Chosen(program, uses, self._target).stays(self.what)
        if not stays:
            return program
        updates = updates_of(program, stays, self.name) if self.update_there else Updates(program.step, {}, {}, {}, {})
        stays = {storage: to for storage in uses if (to := stays.get(storage, updates.state.get(storage))) is not None}
        parking = _Parking(program, uses, stays, updates, self.ahead, self.name)
        short = [use for use in parking.at_home(uses) if use.falls_short] if self.warns else []
        if short:
            warn(_few_saved(short, self.ahead), PassWarning)
        step = parking.run()
        return program.with_(init=filled(program.init, step.blobs, self.name), step=step)

    def _target(self, device: Device) -> Device | None:
        if isinstance(self.to, str):
            return Device.parse(self.to)
        found = self.to.get(device.index) if device.kind == "gpu" else None
        return None if found is None else Device.parse(found)


def park(
    program: Program,
    what: str | Sequence[str],
    to: DeviceName | Mapping[str, DeviceName] | Mapping[int, DeviceName] | Mapping[DeviceName, DeviceName],
    *,
    ahead: int | None = None,
    update_there: bool = False,
) -> Program:
    """Keep saved activations or state on a peer or on the host while the device does not use them.

    It goes after the shifts and before :func:`inject_copies`. No operator moves but updates that are to, and no value
    changes: certify holds.

    Args:
        program: captured, replicated or sharded.
        what: names of activations, which stand for those of every replica, of other blobs, or patterns of modules as
            for :func:`shift_modules`, which stand for all that the modules save for the backward. A pattern that
            matches no module stands for state: ``"**.exp_avg"``.
        to: where to: ``"gpu:1"``, ``1`` or ``"cpu"``; or for each gpu another device, as ``{0: 2, 1: 3}``.
        ahead: how many operators of its device before its first reader a copy back begins; of an activation at least
            those that :func:`emit` gives every copy. By default, so many that the copy should be there in time, and of
            state at most two at a time; see above.
        update_there: whether updates of parked state run where it is parked: on the host, in the threads and with the
            bits of its kernels, which certify lists as a caveat. What else only these updates use is parked there, too.
            Gradients go there as soon as they are made. A parameter that is not parked goes there and back.

    Warns:
        PassWarning: a name means an activation, not the module of that name; or less than half is saved of what is
            parked, less the two largest copies back.

    Raises:
        PassError: a name is unknown, or of what cannot be parked; the message says why. Nothing has changed then.
    """
    named = (what,) if isinstance(what, str) else what
    chosen = build(Park, what=named, to=to, ahead=ahead, update_there=update_there)
    made = chosen(program)
    warn_of_modules(program, chosen.what, Park.name)
    return made


class _AtHome(NamedTuple):
    """What a device holds of what is parked elsewhere.

    Attributes:
        home: the device.
        parked: the most bytes at once if nothing was parked.
        left: the most bytes at once as it is.
        trips: the bytes of the two largest trips.
        updates: whether the largest trip is to an update.
    """

    home: Device
    parked: int
    left: int
    trips: int
    updates: bool

    @property
    def falls_short(self) -> bool:
        """Whether less than half is saved of what is parked, less two trips."""
        return 2 * (self.parked - self.left) < self.parked - self.trips


def _few_saved(short: Sequence[_AtHome], ahead: int | None) -> str:
    """What a caller is told of devices where parking falls short."""
    home, parked, left, _, updates = short[0]
    others = f", and as little on {counted(len(short) - 1, 'other device')}" if short[1:] else ""
    remedy = "the step reads them together, so leave them out"
    if updates and ahead is None:
        remedy = "one update reads most of them, and update_there=True runs it where they are parked"
    elif ahead is None or ahead > LATER:
        remedy = f"ahead={LATER} brings them back later"
    return (
        f"park saves {nbytes_text(parked - left)} of the {nbytes_text(parked)} that it parks of {home}{others}: "
        f"{nbytes_text(left)} are there at once; {remedy}"
    )


class _Chosen:
    """Finds where each storage goes that a caller has named."""

    def __init__(self, program: Program, uses: Mapping[str, Use], target: _Targets) -> None:
        self.program, self.uses, self.target = program, uses, target

    def stays(self, what: Sequence[str]) -> dict[str, Device]:
        """By storage, the device where it is parked."""
        chosen = choose(self.program, what, "park")
        found: dict[str, Device] = {}
        for name in chosen.blobs:
            self.refuse(name)
            to = self.elsewhere(name)
            if to is not None:
                found[name] = to
        served = {chosen.blobs[name] for name in found}
        for name, given in chosen.blobs.items():
            if given not in served:
                raise self.unused(self.program.step.blobs[name], given)
        blobs, matched = self.program.step.blobs, dict.fromkeys(chosen.modules.values(), False)
        for storage, pattern in saved_in(self.program, chosen.modules, self.uses).items():
            to = self.target(blobs[storage].device)
            if to is not None and to != blobs[storage].device and not blobs[storage].device.is_host:
                found[storage], matched[pattern] = to, True
        for pattern, some in matched.items():
            if not some:
                raise nothing_saved(
                    self.program,
                    chosen.modules,
                    pattern,
                    "park",
                    "that is not where it would be parked",
                    "name a module with saved activations, and another device than theirs",
                )
        return found

    def elsewhere(self, name: str) -> Device | None:
        """Where a named blob goes; None if it is on no source."""
        blob = self.program.step.blobs[name]
        to = self.target(blob.device)
        if to == blob.device or (to is not None and to.is_host and blob.device.is_host):
            raise PassError(f"park: {name!r} is on {blob.device} already", fix="park it on another device")
        return to

    def refuse(self, name: str) -> None:
        """Refuse what cannot be parked."""
        blob = self.program.step.blobs[name]
        if blob.device.is_host:
            raise PassError(
                f"park: {name!r} is on the host, where parking saves no memory of a gpu", fix="leave it out"
            )
        if blob.role in STATE_ROLES and not blob.is_view:
            use = self.uses[name]
            if use.early < 0 and use.late < 0:
                raise PassError(f"park: no operator of the step uses {name!r}", fix="leave it out, or shift its module")
            step = self.program.step
            views = [n for n in step.external_inputs if step.blobs[n].storage == name != n]
            if views:
                raise PassError(f"park: {name!r} is given together with its view {views[0]!r}", fix="leave it out")
            return
        why = unsaved(self.program, name, self.uses, "park")
        if why is not None:
            raise PassError(f"park: {name!r} {why[0]}", fix=why[1])

    def unused(self, blob: Blob, given: str) -> PassError:
        return PassError(f"park: {given!r} is on {blob.device}, and 'to' says nothing of it", fix="add it to 'to'")


class _Parking(Substitutes):
    """The sweep that puts the copies in.

    Attributes:
        stays: by storage, where it is parked.
        homes: by storage, where its operators are; of a parameter that goes to its update, where the update is.
        states: those of the storages that are state.
        updates: what runs where its state is parked.
        runs: of each state, its uses at home: the first and the last position of every run of one phase, and the first
            position at which nobody uses it before.
        parked: by activation, and by gradient that leaves, the blob that holds it elsewhere.
        spread: by activation, the other devices that read it in the forward, and so have a copy for the backward.
        kept: of each state, the version that its blob has so far.
        coming: the trips home, and the position before which each sets out.
    """

    def __init__(
        self,
        program: Program,
        uses: Mapping[str, Use],
        stays: Mapping[str, Device],
        updates: Updates,
        ahead: int | None,
        by: str,
    ) -> None:
        super().__init__(updates.step, by, "_parked", program.init.blobs)
        blobs, self.dims, self.stays, self.updates = self.net.blobs, program.dims, stays, updates
        self.homes = {storage: blobs[storage].device for storage in stays}
        self.parked: dict[str, str] = {}
        self.kept: dict[str, int] = {}
        self.states = {storage for storage in stays if blobs[storage].role in STATE_ROLES}
        self.runs = _runs(self.net, self.states, updates.ops)
        for name, blob in blobs.items():
            if blob.storage in self.states:
                self.blobs[name] = blob.on(stays[blob.storage])
        self.spread: dict[str, set[Device]] = {storage: set() for storage in stays if storage not in self.states}
        self.coming: list[tuple[Trip, int]] = []
        self.leaves, self.comes, self.ends = self.schedule(uses, ahead)

    def substitute(self, storage: str, reader: Device) -> str | None:
        if reader in self.spread.get(storage, ()):
            return None
        parked, held = self.parked.get(storage), self.held.get(storage)
        if parked is not None and reader == self.blobs[parked].device:
            return parked
        return None if storage in self.updates.params and reader != self.homes[storage] else held

    def touches(self, names: Iterable[str]) -> bool:
        blobs, parked = self.net.blobs, self.parked
        return any(blobs[name].storage in parked for name in names) or super().touches(names)

    def schedule(
        self, uses: Mapping[str, Use], ahead: int | None
    ) -> tuple[dict[int, list[str]], dict[int, list[str]], dict[int, list[str]]]:
        """Before which operators storages leave, come back, and, of state, go home."""
        leaves, comes, ends = dict[int, list[str]](), dict[int, list[str]](), dict[int, list[str]]()
        trips: dict[tuple[Device, Device], list[Trip]] = {}
        first = self.first_readers(uses)
        for storage, to in self.stays.items():
            route = trips.setdefault((self.homes[storage], to), [])
            for start, end, earliest in self.runs.get(storage, ()):
                route.append(Trip(storage, start, earliest, end + 1))
                ends.setdefault(end + 1, []).append(storage)
            if storage in first:
                leaves.setdefault(uses[storage].early + 1, []).append(storage)
                if (needed := first[storage]) is not None:
                    route.append(Trip(storage, needed, uses[storage].early + 1))
        for storage, (to, goes, ends_at) in self.updates.params.items():
            self.homes[storage] = to
            comes.setdefault(goes, []).append(storage)
            ends.setdefault(ends_at, []).append(storage)
        for storage in self.updates.gradients:
            leaves.setdefault(uses[storage].made + 1, []).append(storage)
        clocks = {home: Clock.of(self.net, home, self.dims) for home, _ in trips}
        state: dict[Device, list[tuple[Trip, int]]] = {}
        for (home, to), route in trips.items():
            sizes = [self.nbytes(trip.storage) * toll(to) for trip in route]
            for trip, position in clocks[home].latest(route, sizes, ahead):
                if trip.ends < 0 or ahead is not None:
                    self.coming.append((trip, position))
                else:
                    state.setdefault(home, []).append((trip, position))
        for found in state.values():
            found.sort(key=lambda pair: pair[0].needed)
            self.coming += two_at_a_time(found, self.nbytes)
        for trip, position in self.coming:
            comes.setdefault(position, []).append(trip.storage)
        return leaves, comes, ends

    def at_home(self, uses: Mapping[str, Use]) -> Iterator[_AtHome]:
        """What each device holds of what is parked."""
        before, after = defaultdict[Device, list[Stay]](list), defaultdict[Device, list[Stay]](list)
        sizes: dict[Device, dict[int, int]] = defaultdict(lambda: defaultdict(int))
        lives, steps = liveness(self.net), len(self.net.ops)
        leaving = {storage for left in self.leaves.values() for storage in left}
        for storage in self.stays:
            home = self.homes[storage]
            nbytes, life, use = self.nbytes(storage), lives[storage], uses[storage]
            if storage in self.states:
                before[home].append(Stay(0, steps, nbytes))
            else:
                before[home].append(Stay(*life, nbytes))
                after[home].append(Stay(life.start, use.early + 1 if storage in leaving else life.end, nbytes))
        for trip, position in self.coming:
            nbytes, home = self.nbytes(trip.storage), self.homes[trip.storage]
            after[home].append(Stay(position, lives[trip.storage].end if trip.ends < 0 else trip.ends, nbytes))
            sizes[home][trip.needed] += nbytes
        for home, stays in before.items():
            largest = nlargest(2, sizes[home], key=sizes[home].__getitem__)
            trips = sum([sizes[home][needed] for needed in largest])
            updates = bool(largest) and self.net.ops[largest[0]].phase == "update"
            yield _AtHome(home, most_at_once(stays), most_at_once(after[home]), trips, updates)

    def nbytes(self, storage: str) -> int:
        return self.net.blobs[storage].nbytes(self.dims)

    def first_readers(self, uses: Mapping[str, Use]) -> dict[str, int | None]:
        """For each activation that leaves, the first operator that reads what comes back; None where nothing has to,
        since all readers are where it is parked. What only devices read that have a copy anyway does not leave."""
        found: dict[str, int | None] = {}
        for i, op in enumerate(self.net.ops):
            for storage in {self.net.blobs[name].storage for name in op.inputs} & self.spread.keys():
                home, to, late = self.homes[storage], self.stays[storage], uses[storage].late
                if i < late:
                    self.spread[storage].update({op.device} - {home, to})
                elif op.device not in self.spread[storage] and found.get(storage) is None:
                    found[storage] = None if op.device == to else i
        return found

    def run(self) -> Net:
        """The net with the copies."""
        phase: Phase = "forward"
        for i, op in enumerate((*self.net.ops, None)):
            phase = phase if op is None else op.phase
            for storage in self.ends.get(i, ()):
                self.goes_home(storage)
            for storage in self.leaves.get(i, ()):
                to = self.stays.get(storage) or self.updates.gradients[storage]
                self.parked[storage] = self.copied(storage, 0, storage, to, self.ops[-1].phase)
            for storage in self.comes.get(i, ()):
                source = self.parked.get(storage, storage)
                version = self.kept.get(storage, 0)
                issue: Issue = "due" if storage in self.runs else "placed"
                self.put(storage, self.copied(source, version, storage, self.homes[storage], phase, issue))
            if op is not None:
                self.append(op)
                if i in self.updates.ops:
                    self.updated(op)
        return self.result

    def updated(self, op: Operator) -> None:
        """Note the versions of states that an operator has made where they live."""
        for name, version in op.makes:
            if name in self.states and self.held.get(name, name) == name:
                self.now[name], self.kept[name] = version, self.kept.get(name, 0) + 1

    def goes_home(self, storage: str) -> None:
        """Bring what a phase has made of a state to where it lives."""
        held, made = self.held[storage], self.now.get(storage, 0) - self.since[storage]
        if made:
            version = self.kept[storage] = self.kept.get(storage, 0) + 1
            self.copy((held, made), (storage, version), storage, self.ops[-1].phase)
        self.drop(storage)
        if behind := self.now.get(storage, 0) - self.kept.get(storage, 0):  # several versions have come home as one
            self.held[storage], self.since[storage] = storage, behind

    def copied(self, source: str, version: int, of: str, device: Device, phase: Phase, issue: Issue = "placed") -> str:
        """A new blob on a device that a copy fills."""
        made = self.declare(self.net.blobs[of], copy_name(of, device), device)
        self.copy((source, version), (made, 0), of, phase, issue)
        return made

    def copy(
        self, source: tuple[str, int], target: tuple[str, int], of: str, phase: Phase, issue: Issue = "placed"
    ) -> None:
        device = self.blobs[target[0]].device
        received: Received = "" if device.is_host else "fresh"  # a buffer would keep what parking gives back
        blank = Operator("Copy", (), (), {}, device, phase, by=self.by, of=of, issue=issue, received=received)
        self.ops.append(with_operands(blank, [source], [target]))


def _runs(net: Net, states: Container[str], there: Container[int]) -> dict[str, list[tuple[int, int, int]]]:
    """Of each of some storages, the first and the last operator of every run of uses in one phase, and the position
    behind the last use before it. Operators that run *there*, where the storage is, part runs and are none."""
    found: dict[str, list[tuple[int, int, int]]] = {}
    used: dict[str, tuple[Phase | None, int]] = {}
    for i, op in enumerate(net.ops):
        phase = None if i in there else op.phase
        for storage in {net.blobs[name].storage: None for name in (*op.inputs, *op.outputs)}:
            if storage not in states:
                continue
            before, last = used.get(storage, (None, -1))
            used[storage] = phase, i
            if phase is None:
                continue
            runs = found.setdefault(storage, [])
            if phase == before:
                runs[-1] = runs[-1][0], i, runs[-1][2]
            else:
                runs.append((i, i, last + 1))
    return found
