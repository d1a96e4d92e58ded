"""The devices of the parts of a model, alike in each replica.

::

    replica 0    gpu:0    gpu:2        a column is where one part is: in each replica on a device of its own,
    replica 1    gpu:1    gpu:3        or in several on one device
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import islice, permutations
from typing import Final, NamedTuple, TypeAlias

from graphir.ir.device import Device
from graphir.ir.names import prefix_of
from graphir.ir.program import Program

__all__ = ["Chain", "Target", "chains", "goes", "is_alike", "partners", "said", "target"]

_MOST: Final = 6
_LOOKED: Final = 720
"""How many orders of unlike devices are tried, and how many are looked at to find them."""

Target: TypeAlias = "Device | tuple[tuple[Device, Device], ...]"
"""Where something goes: a device, or for each device another one, as :func:`.shift_modules.shift_modules` takes it."""


class Chain(NamedTuple):
    """The devices of the parts of a model.

    Attributes:
        rows: by replica and part, the device.
    """

    rows: tuple[tuple[Device, ...], ...]

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices, each once: those of the first part come first."""
        return tuple(dict.fromkeys([device for column in self.columns for device in column]))

    @property
    def columns(self) -> tuple[tuple[Device, ...], ...]:
        """By part and replica, the device."""
        return tuple(zip(*self.rows, strict=True))

    @property
    def parts(self) -> int:
        """How many parts there may be."""
        return len(self.rows[0])

    @property
    def is_apart(self) -> bool:
        """Whether no two parts are on one device."""
        found = [device for column in self.columns for device in dict.fromkeys(column)]
        return len(found) == len(set(found))

    def first(self, parts: int) -> Chain:
        """The devices of the first parts alone."""
        return Chain(tuple([row[:parts] for row in self.rows]))

    def behind(self, part: int) -> Target:
        """For each device of a part, the one of the next part in the same replica; behind the last part comes the
        first."""
        here, there = self.columns[part], self.columns[(part + 1) % self.parts]
        return target(dict(zip(reversed(here), reversed(there), strict=True)))


def target(going: Mapping[Device, Device]) -> Target:
    """Where devices go, as one device if there is only one source."""
    if len(going) == 1:
        return next(iter(going.values()))
    return tuple(sorted(going.items(), key=lambda pair: Device.order(pair[0])))


@cache
def goes(to: Target | None, device: Device) -> Device | None:
    """Where what is on a device goes; None if it stays."""
    found = to if to is None or isinstance(to, Device) else dict(to).get(device)
    return None if found == device else found


def said(to: Target) -> str:
    """A target as a report says it."""
    return to if isinstance(to, Device) else " and ".join(dict.fromkeys([there for _, there in to]))


def is_alike(program: Program, sources: Sequence[Device]) -> bool:
    """Whether a program is on one gpu, or has replicas with the same state, each on a gpu of its own."""
    if len(sources) == 1:
        return True
    if len(program.replicas) != len(sources):
        return False
    homes: dict[str, set[Device]] = {prefix: set() for prefix in program.replicas}
    state: dict[str, set[str]] = {prefix: set() for prefix in program.replicas}
    for name, blob in program.step.blobs.items():
        prefix = prefix_of(name)
        if not blob.device.is_host and prefix in homes:
            homes[prefix].add(blob.device)
    for name in program.step.external_inputs:
        prefix = prefix_of(name)
        if prefix in state:
            state[prefix].add(name[len(prefix) :])
    first = state[program.replicas[0]]
    apart = sorted(map(sorted, homes.values())) == sorted([[device] for device in sources])
    return apart and all(names == first for names in state.values())


def partners(sources: Sequence[Device], usable: Sequence[Device]) -> Target | None:
    """Where each replica may park what it saves: on an idle peer of its own, or of several; None without such peers."""
    idle = [device for device in usable if device not in sources]
    if not idle or len(sources) == 1:
        return idle[0] if idle else None
    own = [idle[number % len(idle)] for number in range(len(sources))]
    if len(set(own)) == 1:
        return own[0]
    further = {device: own[number % len(own)] for number, device in enumerate(idle) if device not in own}
    return target({**dict(zip(sources, own, strict=True)), **further})


def chains(
    sources: Sequence[Device], usable: Sequence[Device], likeness: Callable[[Device], object], *, equal: bool = True
) -> list[Chain]:
    """The orders in which parts of a model are on devices: one where devices are alike.

    Args:
        sources: by replica, where it is.
        usable: all devices.
        likeness: what tells devices apart.
        equal: whether replicas have equal shares of the batch.
    """
    usable = list(dict.fromkeys((*sources, *usable)))
    alike = len(set(map(likeness, usable))) == 1
    if len(sources) == 1:
        orders = [usable] if alike else islice(permutations(usable), _MOST)
        return [Chain((tuple(order),)) for order in orders] if len(usable) > 1 else []
    idle = [device for device in usable if device not in sources]
    found: dict[object, Chain] = {}
    for chain in islice(_with_replicas(sources, idle, alike=alike and equal, equal=equal), _LOOKED):
        columns = [[likeness(device) for device in column] for column in chain.columns]
        kinds = [sorted(column, key=str) if equal else column for column in columns]
        found.setdefault(repr((kinds, _meetings(chain))), chain)
        if len(found) == _MOST or (alike and equal):
            break
    return list(found.values())


def _with_replicas(sources: Sequence[Device], idle: Sequence[Device], *, alike: bool, equal: bool) -> Iterator[Chain]:
    """The orders for replicas. Where replicas or devices are unlike, some of them may go on where others are."""
    here, count = tuple(sources), len(sources)
    if idle:
        yield _of(here, *_columns(idle, count))
    if alike:
        return
    for to in (*idle, *sources):
        yield _of(here, (to,) * count)
    for to in idle:
        yield from [_of(here, (*here[:r], to, *here[r + 1 :])) for r in range(count)]
    if not equal:
        yield _of(here, (*here[1:], here[0]))
    for order in permutations(idle):
        for columns in permutations([here, *_columns(order, count)]):
            if len(columns) > 1:
                yield _of(*columns)


def _of(*columns: tuple[Device, ...]) -> Chain:
    return Chain(tuple(zip(*columns, strict=True)))


def _columns(idle: Sequence[Device], count: int) -> list[tuple[Device, ...]]:
    """Idle devices as the devices of further parts: of replicas one each; of the last part, several may have one."""
    some = [idle[begin : begin + count] for begin in range(0, len(idle), count)]
    return [tuple([column[number % len(column)] for number in range(count)]) for column in some]


def _meetings(chain: Chain) -> list[list[int]]:
    """By part and replica, the number of the device: which parts meet on one."""
    numbers = {device: number for number, device in enumerate(chain.devices)}
    return [[numbers[device] for device in column] for column in chain.columns]
