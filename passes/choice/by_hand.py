"""Plans that a person would try: one pass or two over a level of the modules, each judged as the plan that it gives.

::

    recompute "layers[0:7]"                       each unit of a level, as few of them as it takes
    shift_modules {"layers[6:12]": gpu:1}         a contiguous cut at a level
    the two together                              a cut, and the least that is recomputed or parked behind it

Whether a plan keeps within limits, the plan says, and not what groups are reckoned to hold: a balance never refuses
what one of these keeps, and never hands back a longer step. What is cheap comes first: the program as it is, cuts
alone, then what is stored otherwise, the fastest first. Which cut, and how many units it takes, :mod:`.reckoning` says;
where a plan holds more or less, the reckoning goes on with that in mind. What cannot be faster than the fastest plan so
far is not emitted.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import permutations, product
from math import inf
from typing import Final, Literal, TypeAlias

from graphir.analysis.topology import Topology
from graphir.errors import GraphirError, PassError
from graphir.ir.device import CPU, Device
from graphir.ir.program import Program

from .drafts import Draft, Drafts, Hand, Way, says
from .groups import Wanted
from .levels import Levels, Unit
from .moves import repeated
from .plans import Plans
from .reckoning import Cut, Reckoning

__all__ = ["ByHand"]

_MOST_ORDERS: Final = 6
"""How many orders of unlike devices are tried."""

_CORRECTED: Final = 4
_CORRECTED_PARKED: Final = 2
"""How many plans of one way are judged, each corrected by what the one before holds: what is parked comes back as the
clock of a route says, which is not reckoned."""

_HOPELESS: Final = 1.1
"""How many times a limit may be reckoned to be held so that a plan is worth a look."""

_MOST_PLACED: Final = 1_500
_FASTER: Final = 1.02
"""Where there are so few placements of modules, all are reckoned; and those judged that are reckoned to take no more
than so many times as long as the first that keeps within the limits."""

_KNOWN: Final = "the passes of a placement of another batch"
"""How reports call a placement that was known."""

_STATE: Final[tuple[Literal["state", "updates"], ...]] = ("state", "updates")
"""What may become of state, as the options say it."""

_Tried: TypeAlias = "Generator[None, None, None]"
"""Yields whenever some work was done, so that whoever asks can stop."""


class ByHand:
    """Tries the plans of a person for one program.

    Args:
        program: to be placed.
        plans: that judge.
        levels: of its modules.
        wanted: what the caller says of a placement.
        pin: by pattern, where modules have to be.
        topology: how fast devices and links are.
        issue: seconds that one host thread takes to issue a copy.

    Attributes:
        best: the fastest so far that keeps within the limits.
        nearest: the one whose limits would have to be multiplied by the least.
    """

    def __init__(
        self,
        program: Program,
        plans: Plans,
        levels: Levels,
        wanted: Wanted,
        pin: Mapping[str, str | None],
        topology: Topology,
        issue: float = 0.0,
    ) -> None:
        self.plans, self.levels, self.topology = plans, levels, topology
        self.wanted, self.options = wanted, wanted.options
        self.drafts = Drafts(program, levels, pin)
        self.reckoning = Reckoning(program, levels, wanted, topology, issue)
        self.sources = self.reckoning.sources
        self.known: dict[Draft, Hand | None] = {}
        self.best: Hand | None = None
        self.nearest: Hand | None = None

    def tried(self) -> _Tried:
        """Try one plan after the other."""
        yield from self.judge(Draft())
        now = self.known[Draft()]
        chains = list(self.chains()) if "shift" in self.options else []
        if now is None or (not self.plans.excess(now.judged.peaks) and not chains):
            return  # nothing that is stored otherwise takes less time
        places = [(tuple(level), chain) for level in self.levels.cuts() for chain in chains]
        for place in places:
            cut = yield from self.reckoning.cheapest(*place, Way())
            yield from self.least(cut, Way())
        if not self.plans.excess(now.judged.peaks):
            return
        yield from self.every_one(chains or [tuple(self.sources)])
        ways = list(self.ways())
        here = self.reckoning.now()
        yield from self.in_order([(here, way) for way in ways])
        for place in places:
            cuts = []
            for way in ways:
                cuts.append((yield from self.reckoning.cheapest(*place, way)))
            yield from self.in_order(list(zip(cuts, ways, strict=True)))
        for level, chain in places:
            for end in range(1, len(level)) if len(chain) == 2 else ():
                if self.best is None:  # what a plan holds does not always grow from one cut to the next
                    yield from self.judge(Draft(self.reckoning.cut(level, chain, (end,)).moves))
        yield from self.hosted()

    def hosted(self) -> _Tried:
        """Judge modules on the host: at every depth, those with the most state by their seconds there, as few as keep
        within the limits."""
        if not self.wanted.hosts or len(self.sources) != 1:
            return
        chain, limits = (self.sources[0], Device.parse(CPU)), self.plans.limits
        for level in self.levels.depths():
            ranked = self.reckoning.ranked_on_host(level)
            for count in range(1, len(ranked) + 1):
                going = set(ranked[:count])
                cut = self.reckoning.cut_at(tuple(level), chain, tuple([int(path in going) for path in level]))
                yield
                if cut.placed.peaks[0] > _HOPELESS * limits.get(chain[0], inf):
                    continue
                yield from self.judge(Draft(cut.moves))
                hand = self.known[Draft(cut.moves)]
                if hand is None or not self.plans.excess(hand.judged.peaks):
                    break

    def every_one(self, chains: Sequence[tuple[Device, ...]]) -> _Tried:
        """Judge placements of a few modules, each of them on any device and stored in any way, in the order in which
        they are reckoned to be fast."""
        for level in self.levels.depths():
            units = [path for path in level if self.levels.parts[path].state]
            for chain in chains[:1] if len(self.sources) == 1 else ():
                kinds = ["keep", *(["again"] if "recompute" in self.options else [])]
                kinds += ["park"] if "park" in self.options else []
                if not units or (len(chain) * len(kinds)) ** len(units) > _MOST_PLACED:
                    continue
                drafts: list[tuple[bool, float, int, Draft]] = []
                for at in product(range(len(chain)), repeat=len(units)):
                    cut = self.reckoning.cut_at(tuple(units), chain, at)
                    limits = self.reckoning.limits(cut, {})
                    for stored in product(kinds, repeat=len(units)):
                        ways = self.ways_of(units, chain, at, stored)
                        over = bool((self.reckoning.peaks(cut, ways) > limits).any())
                        if not over or not (self.reckoning.peaks(cut, ways, hopes=True) > limits).any():
                            drafts.append((over, self.reckoning.cost(cut, ways), len(drafts), Draft(cut.moves, ways)))
                    yield
                yield from self.fastest_of(drafts)

    def fastest_of(self, drafts: Sequence[tuple[bool, float, int, Draft]]) -> _Tried:
        """Judge drafts, each with whether limits are reckoned to be exceeded, and with its seconds: the fastest first,
        and while none is found, those that are over."""
        most = inf
        for over, cost, _, draft in sorted(drafts):
            if cost > most or (over and self.best is not None):
                continue
            yield from self.judge(draft)
            hand = self.known[draft]
            if hand is not None and not self.plans.excess(hand.judged.peaks):
                most = min(most, _FASTER * cost)

    def ways_of(
        self, units: Sequence[str], chain: Sequence[Device], at: Sequence[int], stored: Sequence[str]
    ) -> tuple[Way, ...]:
        """What modules store otherwise: what is parked of one part is on the next device, or on the host."""
        found: dict[Device | None, list[Unit]] = {}
        for path, part, kind in zip(units, at, stored, strict=True):
            if kind != "keep":
                away = chain[(part + 1) % len(chain)] if len(chain) > 1 else CPU
                found.setdefault(None if kind == "again" else away, []).append((path,))
        return tuple(
            [Way(tuple(paths), to) for to, paths in sorted(found.items(), key=lambda pair: str(pair[0] or ""))]
        )

    def in_order(self, tries: Sequence[tuple[Cut, Way]]) -> _Tried:
        """Look for the least of some ways, each of them alone and beside state that is parked, those first that are
        reckoned to keep within the limits, and of these the fastest. Two ways together are for where one alone does
        not keep within them, or takes longer."""
        together = [(cut, *both) for cut, way in tries for both in self.beside_state(way)]
        all_tries = [*[(cut, way, ()) for cut, way in tries], *together]
        ranked, fits = [], inf
        for number, (cut, way, beside) in enumerate(all_tries):
            some, over = self.reckoning.fewest(cut, way, {}, beside)
            ranked.append((over, sum(map(self.reckoning.longer, (some, *beside))), number))
            yield
        for over, longer, number in sorted(ranked):
            cut, way, beside = all_tries[number]
            if (over > 0 and self.best is not None) or (beside and longer > _FASTER * fits):
                continue
            before = self.best
            yield from self.least(cut, way, beside)
            fits = fits if self.best is before else min(fits, longer)

    def beside_state(self, way: Way) -> Iterator[tuple[Way, tuple[Way, ...]]]:
        """A way beside state that is parked: the fewest of its units beside all state, and the fewest of the state
        beside all of its units."""
        for number, state in enumerate(self.states if way.what == "saved" else ()):
            yield state, (way,)
            if number < len(self.aways):
                yield way, (state,)

    @cached_property
    def states(self) -> list[Way]:
        """How all state may be parked, by the modules that own it, at every depth."""
        kinds = [kind for kind in _STATE if kind in self.options]
        return [Way(tuple(units), to, kind) for units in self.levels.updated() for kind in kinds for to in self.aways]

    # What a plan comes to.

    def judge(self, draft: Draft) -> _Tried:
        """Know what a draft comes to as a plan; None where a pass refuses it."""
        if draft not in self.known:
            self.known[draft] = self.made(draft)
            yield

    def made(self, draft: Draft) -> Hand | None:
        """A draft as a plan."""
        try:
            program = self.drafts.placed(draft)
            judged = self.plans.judged(program, timed=draft == Draft())
        except PassError:
            return None  # a pattern that the pass refuses, or what cannot be repeated
        return self.kept(Hand(draft, program, judged, says(draft)))

    def know(self, pipeline: str) -> None:
        """Judge the placement that some passes make, those of a balance of another batch."""
        if pipeline:
            try:
                program = repeated(self.plans.program, pipeline)
                self.kept(Hand(Draft(), program, self.plans.judged(program, timed=False), _KNOWN))
            except PassError:
                pass  # they are none of this batch

    def kept(self, hand: Hand) -> Hand:
        """A plan, kept if it is the best or the nearest so far."""
        judged = hand.judged
        if self.plans.excess(judged.peaks):
            if self.nearest is None or self.plans.factor(judged.peaks) < self.plans.factor(self.nearest.judged.peaks):
                self.nearest = hand
        elif self.best is None or judged.seconds < self.best.judged.seconds:
            self.best = hand
        return hand

    def least(self, cut: Cut, way: Way, beside: tuple[Way, ...] = ()) -> _Tried:
        """Judge the plan with the fewest units of a way that keeps within the limits, *beside* others."""
        more: dict[Device, int] = {}
        for _ in range(_CORRECTED if way.to is None else _CORRECTED_PARKED):
            some, over = self.reckoning.fewest(cut, way, more, beside)
            if some.what != "saved" and some.units == way.units:  # all state is one plan, at whatever depth
                some = next(state for state in self.states if (state.to, state.what) == (some.to, some.what))
            ways = (*beside, some) if some.units else beside
            draft = Draft(cut.moves, ways)
            limits = zip(cut.devices, self.reckoning.limits(cut, {}).tolist(), strict=True)
            given = sum([limit for device, limit in limits if limit < 1 << 62 and not device.is_host])
            if draft in self.known or over > (_HOPELESS - 1) * given or self.beaten(some):
                return
            yield from self.judge(draft)
            hand = self.known[draft]
            if hand is None:
                return
            reckoned = self.reckoning.peaks(cut, ways).tolist()
            for device, nbytes in zip(cut.devices, reckoned, strict=True):
                more[device] = hand.judged.peaks.get(str(device), 0) - nbytes

    def beaten(self, way: Way) -> bool:
        """Whether no plan can be faster than the best that stores so otherwise: devices compute all of it."""
        if self.best is None or way.to is not None or not way.units:
            return False
        return (
            self.reckoning.least_seconds + self.reckoning.longer(way) / self.reckoning.count >= self.best.judged.seconds
        )

    def chains(self) -> Iterator[tuple[Device, ...]]:
        """The orders in which parts of the model are on devices: one where these are alike."""
        usable = list(dict.fromkeys((*self.sources, *self.wanted.devices)))
        if len(self.sources) != 1 or len(usable) < 2:
            return
        alike = len({self.likeness(device) for device in usable}) == 1
        yield from [tuple(usable)] if alike else list(permutations(usable))[:_MOST_ORDERS]

    def likeness(self, device: Device) -> tuple[object, ...]:
        """What tells devices apart."""
        return self.plans.limits.get(device), self.topology.speed(str(device)).model_dump_json()

    def ways(self) -> Iterator[Way]:
        """What may be stored otherwise, all of it."""
        levels = self.levels
        if "recompute" in self.options:
            yield from [Way(tuple(units)) for units in levels.recomputed()]
        if "park" in self.options:
            for level in levels.depths():
                saving = tuple([(path,) for path in level if levels.parts[path].saved])
                yield from [Way(saving, to) for to in self.aways if saving]
        yield from self.states

    @cached_property
    def aways(self) -> list[Device]:
        """Where something may be parked: on an idle peer, or on the host."""
        peers = [device for device in self.wanted.devices if device not in self.sources]
        return [to for to in (*peers[:1], CPU) if self.reaches(to)]

    def reaches(self, to: Device) -> bool:
        """Whether copies go there from all devices, and back."""
        try:
            for device in {*self.sources, *self.wanted.devices} - {to}:
                self.topology.link(str(device), str(to))
                self.topology.link(str(to), str(device))
        except GraphirError:
            return False
        return True
