"""Plans that a person would try: one pass or two over a level of the modules, each judged as the plan that it gives.

::

    recompute "layers[0:7]"                       each unit of a level, as few of them as it takes
    shift_modules {"layers[6:12]": gpu:1}         a contiguous cut at a level
    the two together                              a cut, and the least that is recomputed or parked behind it
    shift_modules {"layers[6:12]": {0: 2, 1: 3}}  a cut that is alike in each replica

Whether a plan keeps within limits, the plan says, and not what groups are reckoned to hold: a balance never refuses
what one of these keeps, and never hands back a longer step. First of all plans are reckoned, of whatever kind
(:mod:`.reckoning`, :mod:`.few`); then they are judged, the fastest first of those that are reckoned to keep within the
limits. Where a plan holds more or less than was reckoned, the reckoning of the next one of its kind says so. Plans that
are reckoned to be slower than the fastest so far are not emitted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from functools import cached_property
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Final, Literal, NamedTuple, TypeAlias

from graphir.analysis.topology import Topology
from graphir.errors import GraphirError, PassError
from graphir.ir.device import CPU, Device
from graphir.ir.program import Program

from .chains import Chain, Target, chains, goes, partners
from .cuts import Cuts
from .drafts import Draft, Drafts, Hand, Way, says
from .few import Fate, Few
from .groups import Wanted
from .levels import Levels
from .moves import repeated
from .plans import Plans
from .reckoning import Cut, Reckoning

__all__ = ["ByHand"]

_CORRECTED: Final = 4
_CORRECTED_PARKED: Final = 2
"""How many plans of one way are judged, each corrected by what the one before holds: what is parked comes back as the
clock of a route says, which is not reckoned."""

_HOPELESS: Final = 1.1
"""How many times a limit may be reckoned to be held so that a plan is worth a look."""

_FASTER: Final = 1.03
_FASTER_BY_ORDER: Final = 1.25
_FRUITLESS: Final = 8
"""A plan that is reckoned to take more than so many times as long as the fastest so far is not judged, nor is any other
of its kind after so many in a row that were no faster. The reckoning leaves out the order of micro-batches: where these
flow, the first plan of each kind may be reckoned to take longer."""

_EARLY: Final = 2
_BEFORE_HOSTED: Final = 8
"""How many plans are judged before cuts with something behind them are reckoned, which takes long in large programs;
and how many more before modules go to the host, so that other plans do not use up the budget."""

_KNOWN: Final = "the passes of a placement of another batch"
"""How reports call a placement that was known."""

_STATE: Final[tuple[Literal["state", "updates"], ...]] = ("state", "updates")
"""What may become of state, as the options say it."""

_Tried: TypeAlias = "Generator[None, None, None]"
"""Yields whenever some work was done, so that whoever asks can stop."""


class _Try(NamedTuple):
    """A plan that is to be judged; of one kind, the first in order is the next.

    Attributes:
        over: the bytes by which it is reckoned to exceed limits.
        seconds: that a step is reckoned to take.
        number: how many were added before.
        cut: where modules are.
        ways: what is stored otherwise.
        way: all units of what is stored otherwise, of which it has the fewest that do; None where it is as it is.
        beside: what else is stored otherwise, all of it.
        corrected: how many plans led to it.
    """

    over: int
    seconds: float
    number: int
    cut: Cut
    ways: tuple[Way, ...] = ()
    way: Way | None = None
    beside: tuple[Way, ...] = ()
    corrected: int = 0

    @property
    def kind(self) -> tuple[str, ...]:
        """Whether modules move, and what is recomputed or parked."""
        return "moved" if self.cut.moves else "", *sorted({way.what if way.to else "again" for way in self.ways})


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
        on_host: the drafts with modules on the host.
        late: whether a plan that exceeds the limits is also judged with what is parked back late.
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
        self.cuts, self.sources = Cuts(self.reckoning), self.reckoning.sources
        self.equal = len(set(program.shares)) < 2
        self.known: dict[Draft, Hand | None] = {}
        self.tries: dict[tuple[str, ...], list[_Try]] = {}
        self.numbers = count()
        self.more: dict[object, Mapping[Device, int]] = {}
        self.said: dict[tuple[str, ...], float] = {}
        self.on_host: set[Draft] = set()
        self.late = False
        self.best: Hand | None = None
        self.nearest: Hand | None = None

    def tried(self) -> _Tried:
        """Try one plan after the other: those first that are reckoned to keep within the limits, and of these the
        fastest."""
        yield from self.judge(Draft())
        now = self.known[Draft()]
        chains = self.chains() if "shift" in self.options else []
        if now is None or (not self.plans.excess(now.judged.peaks) and not chains):
            return  # nothing that is stored otherwise takes less time
        places = [(tuple(level), chain) for level in self.levels.cuts() for chain in chains]
        yield from self.plain_cuts(places)
        if not self.plans.flows and any(heap and not heap[0].over for heap in self.tries.values()):
            yield from self.in_order(1)
        if self.plans.excess(now.judged.peaks):
            yield from self.every_one(chains[0] if chains else Chain(tuple([(source,) for source in self.sources])))
            yield from self.stored_otherwise(places)
            if self.wanted.hosts and self.reckoning.alike:
                yield from self.in_order(_BEFORE_HOSTED)
                yield from self.hosted()
        yield from self.in_order()

    def hosted(self) -> _Tried:
        """Judge modules on the host: at every depth, those with the most state by their seconds there, as few as keep
        within the limits, and all of them where fewer do not."""
        chain = Chain(tuple([(source, CPU) for source in self.sources]))
        limits = [self.plans.limits.get(source, inf) for source in self.sources]
        for level in self.levels.depths():
            ranked, more = self.reckoning.ranked_on_host(level), [0] * len(limits)
            for most in range(1, len(ranked) + 1):
                going = set(ranked[:most])
                cut = self.reckoning.cut_into({path: int(path in going) for path in level}, chain)
                yield
                reckoned = cut.placed.peaks.tolist()[: len(limits)]
                over = any(a + b > limit for a, b, limit in zip(reckoned, more, limits, strict=True))
                # Operators between modules that move go along, which is not reckoned: all are worth a plan.
                if over and most < len(ranked):
                    continue
                draft = Draft(cut.moves)
                self.on_host.add(draft)
                yield from self.judge(draft)
                hand = self.known[draft]
                if hand is None:
                    continue
                if not self.plans.excess(hand.judged.peaks):
                    break
                held = [hand.judged.peaks.get(str(source), 0) for source in self.sources]
                more = [max(a, b - c) for a, b, c in zip(more, held, reckoned, strict=True)]

    def plain_cuts(self, places: Sequence[tuple[tuple[str, ...], Chain]]) -> _Tried:
        """Add cuts alone: all in two parts, and the cheapest in each number of further ones."""
        for level, chain in places:
            for end in range(1, len(level)):
                self.add(self.cuts.cut(level, chain.first(2), (end,)))
                yield
            for parts in range(3, min(chain.parts, len(level)) + 1):
                self.add((yield from self.cuts.cheapest(level, chain.first(parts), Way())))

    def every_one(self, chain: Chain) -> _Tried:
        """Add every placement of a few modules, each of them in any part and stored in any way; where these are too
        many, without what is parked, and without what is computed again."""
        fates: list[Fate] = ["keep"]
        fates += ["again"] if "recompute" in self.options else []
        fates += ["park"] if "park" in self.options else []
        for level in self.levels.depths() if self.reckoning.alike else ():
            units = [path for path in level if self.levels.parts[path].state]
            some = [Few(self.reckoning, units, chain, fates[:most]) for most in range(len(fates), 0, -1)]
            few = next((one for one in some if not one.many), None)
            for placements in few.reckoned() if few is not None else ():
                for over, hoped, seconds, cut, ways in placements:
                    if not hoped or not self.is_hopeless(cut, over):
                        self.push(_Try(over, seconds, next(self.numbers), cut, ways))
                yield

    def stored_otherwise(self, places: Sequence[tuple[tuple[str, ...], Chain]]) -> _Tried:
        """Add the least of each way, alone and beside state that is parked, where modules are and behind the cheapest
        cut."""
        ways, here = list(self.ways()), self.reckoning.now()
        for way in ways:
            yield from self.add_both(here, way)
        yield from self.in_order(_EARLY)
        for level, chain in places:
            for way in ways:
                yield from self.add_both((yield from self.cuts.cheapest(level, chain, way)), way)

    def add_both(self, cut: Cut, way: Way) -> _Tried:
        """Add the least of a way alone. Where that does not do, or takes longer than all state to be parked, also the
        fewest of its units beside all state, and the fewest of the state beside all of its units."""
        alone = self.add(cut, way)
        yield
        for number, state in enumerate(self.states if way.what == "saved" else ()):
            if alone is None or alone.over or alone.seconds > self.reckoning.cost(cut, (state,)):
                self.add(cut, state, (way,))
                if number < len(self.aways):
                    self.add(cut, way, (state,))
                yield

    @cached_property
    def states(self) -> list[Way]:
        """How all state may be parked, by the modules that own it, at every depth."""
        kinds = [kind for kind in _STATE if kind in self.options]
        return [Way(tuple(units), to, kind) for units in self.levels.updated() for kind in kinds for to in self.aways]

    def add(self, cut: Cut, way: Way | None = None, beside: tuple[Way, ...] = (), corrected: int = 0) -> _Try | None:
        """Add the plan with the fewest units of a way that is reckoned to keep within the limits, *beside* others;
        without a way, the cut alone. None if it is not worth to be judged."""
        ways: tuple[Way, ...] = ()
        peaks, limits = cut.placed.peaks, self.reckoning.limits(cut, self.more.get(cut.moves, {}))
        over = plain = int((peaks - limits).clip(0).sum())
        if way is not None:
            more = self.more.get((cut.moves, way, beside), self.more.get(cut.moves, {}))
            some, over = self.reckoning.fewest(cut, way, more, beside)
            if some.what != "saved" and some.units == way.units:  # all state is one plan, at whatever depth
                some = next(state for state in self.states if (state.to, state.what) == (some.to, some.what))
            ways = (*beside, some) if some.units else beside
        if self.is_hopeless(cut, over) or (ways and not corrected and 0 < plain <= over):
            return None  # it is far from the limits, or no nearer than the cut alone
        one = _Try(over, self.reckoning.cost(cut, ways), next(self.numbers), cut, ways, way, beside, corrected)
        self.push(one)
        return one

    def is_hopeless(self, cut: Cut, over: int) -> bool:
        """Whether a plan that exceeds limits by so many bytes, as is reckoned, is not worth a look."""
        room = zip(cut.devices, self.reckoning.limits(cut, {}).tolist(), strict=True)
        given = sum([limit for device, limit in room if limit < 1 << 62 and not device.is_host])
        return bool(over > (_HOPELESS - 1) * given)

    def push(self, one: _Try) -> None:
        """Add a plan that is worth to be judged."""
        heappush(self.tries.setdefault(one.kind, []), one)

    def pop(self) -> _Try | None:
        """Take the plan that is to be judged next; None where no more are left."""
        heaps = [heap for heap in self.tries.values() if heap]
        return heappop(min(heaps, key=lambda heap: (heap[0].over, self.said_of(heap[0])))) if heaps else None

    def said_of(self, one: _Try) -> float:
        """The seconds that a plan is reckoned to take, times what judged plans of its kind took longer; where none was
        judged, times what plans took longer that move modules as this one does, and do nothing else."""
        return one.seconds * self.said.get(one.kind, self.said.get(one.kind[:1], 1.0))

    def faster(self, one: _Try) -> float:
        """How many times as long as the fastest so far a plan may be reckoned to take so that it is judged."""
        return _FASTER_BY_ORDER if self.plans.flows and one.kind not in self.said else _FASTER

    def in_order(self, most: int | None = None) -> _Tried:
        """Judge the plans that were added, so many at most; those that are reckoned to exceed limits only while none
        keeps within them."""
        fruitless, judged = Counter[tuple[str, ...]](), 0
        while judged != most and (one := self.pop()) is not None:
            draft, best = Draft(one.cut.moves, one.ways), self.best
            if (
                draft in self.known
                or fruitless[one.kind] >= _FRUITLESS
                or (best is not None and (one.over or self.said_of(one) > self.faster(one) * best.judged.seconds))
            ):
                continue
            if (over := self.known_over(one)) > one.over:
                self.push(one._replace(over=over))
                continue
            yield from self.judge(draft)
            judged += 1
            hand = self.known[draft]
            fruitless[one.kind] = 0 if self.best is None or self.best is not best else fruitless[one.kind] + 1
            if hand is not None:
                self.correct(one, hand)

    def known_over(self, one: _Try) -> int:
        """The bytes by which a plan of few modules is reckoned to exceed limits, with what the same modules where they
        are were found to hold beyond their reckoning."""
        more = self.more.get(one.cut.moves)
        if more is None or one.way is not None or not one.ways:
            return one.over
        found = self.reckoning.peaks(one.cut, one.ways) - self.reckoning.limits(one.cut, more)
        return max(int(found.clip(0).sum()), one.over)

    def correct(self, one: _Try, hand: Hand) -> None:
        """Go on with what a plan holds beyond what was reckoned."""
        reckoned = self.reckoning.peaks(one.cut, one.ways).tolist()
        if hand.judged.seconds < inf:
            ratio = hand.judged.seconds / one.seconds
            self.said[one.kind] = min(self.said.get(one.kind, ratio), ratio)
        more = {
            device: hand.judged.peaks.get(str(device), 0) - nbytes
            for device, nbytes in zip(one.cut.devices, reckoned, strict=True)
        }
        if one.way is None:
            if not one.ways:
                self.more[one.cut.moves] = more
            return
        self.more[one.cut.moves, one.way, one.beside] = more
        if one.corrected + 1 < (_CORRECTED if one.way.to is None else _CORRECTED_PARKED):
            self.add(one.cut, one.way, one.beside, one.corrected + 1)

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
            judged = self.plans.as_it_is if program is self.plans.program else self.plans.judged(program, timed=False)
            if self.late:
                program, judged = self.plans.later(program, judged.peaks) or (program, judged)
        except PassError:
            return None  # a pattern that the pass refuses, or what cannot be repeated
        return self.kept(Hand(draft, program, judged, says(draft)))

    def know(self, pipeline: str) -> Hand:
        """Judge the placement that some passes make, those of a balance of another batch.

        Raises:
            PassError: they are none of this one.
        """
        program = repeated(self.plans.program, pipeline)
        return self.kept(Hand(Draft(), program, self.plans.judged(program, timed=False), _KNOWN))

    def kept(self, hand: Hand) -> Hand:
        """A plan, kept if it is the best or the nearest so far."""
        judged = hand.judged
        if self.plans.excess(judged.peaks):
            if self.nearest is None or self.plans.factor(judged.peaks) < self.plans.factor(self.nearest.judged.peaks):
                self.nearest = hand
        elif self.best is None or judged.seconds < self.best.judged.seconds:
            self.best = hand
        return hand

    def chains(self) -> list[Chain]:
        """The orders in which parts of the model are on devices, alike in each replica."""
        if not self.reckoning.alike:
            return []
        return chains(self.sources, self.wanted.devices, self.likeness, equal=self.equal)

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
    def aways(self) -> list[Target]:
        """Where something may be parked: on an idle peer of each replica, or on the host."""
        peers = partners(self.sources, self.wanted.devices)
        return [to for to in (*([] if peers is None else [peers]), CPU) if self.reaches(to)]

    def reaches(self, to: Target) -> bool:
        """Whether copies go there from all devices, and back."""
        try:
            for device in {*self.sources, *self.wanted.devices}:
                if (there := goes(to, device)) is not None:
                    self.topology.link(str(device), str(there))
                    self.topology.link(str(there), str(device))
        except GraphirError:
            return False
        return True
