"""What a person would try, beside what `passes.balance` finds: blocks in a row, every placement of four units, and what
refusals say cannot be."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from random import Random
from typing import Final, get_args

import by_hand
from graphir.passes.balance import Balance
from graphir.passes.base import build
from graphir.passes.choice.asked import OPTIONS
from graphir.passes.choice.balancing import Balancing
from graphir.passes.choice.proven import proven
from graphir.passes.pipeline import Schedules
from limits import limited

import graphir
from graphir import Program, passes
from graphir.collector import collector_paused
from graphir.errors import PassError
from graphir.ir.device import Device, gpu

__all__ = ["rows"]

TOPOLOGY: Final = graphir.Topology.named("h200x8")

COUNTS: Final = (2, 3, 4, 6, 8, 12, 16, 24)
ACCUMULATE: Final = (1, 2, 4)
MARGIN: Final = 1.05
"""What a recompute by hand holds, times so much, is the limit."""

SAMPLE: Final = 6
"""How many limits are tried of a program of more than so many blocks: the least, the largest, and some between. Equal
peaks are equal limits, so that of smaller programs all are tried."""

BY_HAND: Final = 0.2
"""The part of the budget that a balance has for a person's plans before it searches."""

SECONDS: Final = 3.0
SLOWER: Final = 1.01
"""The most seconds of a choice, and the longest step in steps of a person's plan."""

PROBLEMS: Final = 30
IN_PARTS: Final = 10
EVALUATIONS: Final = 3_000
RULED_OUT: Final = 500

KINDS: Final = ("exp_avg", "exp_avg_sq")
STATE: Final = 0.5
"""What Adam keeps of each parameter, and how often a unit's is parked in a plan whose peaks are the limits."""


def rows() -> Iterator[str]:
    """The three tables."""
    yield from _recomputed()
    yield ""
    yield from _every()
    yield ""
    yield from _ruled_out()


def _recomputed() -> Iterator[str]:
    """By kind of block and number of devices: what is found within what one recompute holds."""
    yield (
        "| blocks | devices | recomputes by hand | limits tried | refused | longest step, in steps by hand "
        "| seconds at most |"
    )
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    for kind in by_hand.KINDS:
        found = {devices: _Found() for devices in (1, 2)}
        for count in COUNTS:
            for accumulate in ACCUMULATE:
                program = by_hand.blocks(kind, count, accumulate)
                hands = list(_hands(program))
                for peak in _spread(sorted({peak for peak, _ in hands}), count):
                    limit = int(MARGIN * peak)
                    best = min(seconds for peak, seconds in hands if peak <= limit)
                    for devices, one in found.items():
                        one.take(program, {f"gpu:{device}": limit for device in range(devices)}, best)
                for one in found.values():
                    one.hands += len(hands)
        for devices, one in found.items():
            yield (
                f"| {kind} | {devices} | {one.hands:,} | {one.tried} | {limited(str(one.refused), at_most=0)} "
                f"| {limited(f'{one.longest:.3f}', at_most=SLOWER)} "
                f"| {limited(f'{one.slowest:.2f}', at_most=SECONDS)} |"
            )


class _Found:
    """What balance finds within some limits.

    Attributes:
        hands: how many recomputes were made by hand.
        tried: how many limits.
        refused: how many of them balance refuses.
        longest: step, in steps of the fastest recompute that keeps within the same limits.
        slowest: the most seconds of a choice.
    """

    def __init__(self) -> None:
        self.hands = self.tried = self.refused = 0
        self.longest = self.slowest = 0.0

    def take(self, program: Program, limits: Mapping[str, int], best: float) -> None:
        """Find a placement within limits: a person's plans come first, and a balance is no slower than the fastest of
        them, so that the search is run only where these do not do."""
        self.tried += 1
        begun = time.perf_counter()
        with collector_paused():  # as in a balance
            balancing = Balancing(build(Balance, limits=limits, topology=TOPOLOGY).asked(program, None, 1))
            balancing.try_by_hand(BY_HAND)
        hand = balancing.hand
        if hand is not None and hand.judged.seconds <= SLOWER * best:
            self.longest = max(self.longest, hand.judged.seconds / best)
        else:
            begun = time.perf_counter()  # what was tried is tried again
            try:
                self.longest = max(self.longest, passes.balance(program, limits, topology=TOPOLOGY).after / best)
            except PassError:
                self.refused += 1
        self.slowest = max(self.slowest, time.perf_counter() - begun)


def _hands(program: Program) -> Iterator[tuple[int, float]]:
    """The peak and the seconds of each recompute by hand."""
    for what in by_hand.whats(program):
        try:
            plan = passes.emit(passes.inject_copies(passes.recompute(program, what)))
        except PassError:  # it saves nothing but what others read
            continue
        peak = graphir.memory(plan, threads=1, profile=None).peak["gpu:0"]
        yield peak, graphir.estimate(plan, TOPOLOGY, profile=None, threads=1).seconds


def _spread(limits: Sequence[int], count: int) -> Sequence[int]:
    """All limits of a program of a few blocks, some of a larger one."""
    if count <= SAMPLE or len(limits) <= SAMPLE:
        return limits
    return [limits[round(i * (len(limits) - 1) / (SAMPLE - 1))] for i in range(SAMPLE)]


def _every() -> Iterator[str]:
    """Of small problems on two devices: the step that is found, in steps of the best placement there is, in its own
    order or that of a schedule."""
    yield (
        "| problems | units | micro-batches | placements of each | refused | longest step, in steps of the best "
        "| mean |"
    )
    yield "| ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    for problems, count, accumulate in ((PROBLEMS, 4, 1), (IN_PARTS, 3, 2)):
        ratios, refused, most = [], 0, 0
        for seed in range(problems):
            rng = Random(seed)
            program = by_hand.units(rng, count, accumulate)
            every = [(by_hand.held(one), one) for one in by_hand.every_placement(program, count)]
            most = max(most, len(every))
            whole = every[0][0]["gpu:0"]
            spread = [peaks for peaks, _ in every if len(peaks) == 2 and max(peaks.values()) < 0.95 * whole]
            factor = rng.choice([1.02, 1.1, 1.25])
            limits = {device: int(factor * nbytes) for device, nbytes in rng.choice(spread).items()}
            best = min([seconds for peaks, one in every for seconds in _orders(one, peaks, limits, accumulate)])
            try:
                ratios.append(passes.balance(program, limits, topology=TOPOLOGY, evaluations=EVALUATIONS).after / best)
            except PassError:
                refused += 1
        longest = limited(f"{max(ratios):.4f}", at_most=SLOWER)
        mean = sum(ratios) / len(ratios)
        yield (
            f"| {problems} | {count} | {accumulate} | {most:,} | {limited(str(refused), at_most=0)} | {longest} "
            f"| {mean:.4f} |"
        )


def _orders(program: Program, peaks: Mapping[str, int], limits: Mapping[str, int], accumulate: int) -> Iterator[float]:
    """The seconds of a placed program in its own order and in that of each schedule, where these keep within limits."""
    if _keeps(peaks, limits):
        yield _seconds(program)
    if accumulate > 1 and len(program.step.devices) > 2:
        for schedule in get_args(Schedules):
            ordered = passes.pipeline(passes.inject_copies(program), schedule=schedule, topology=TOPOLOGY)
            plan = passes.emit(ordered)
            if _keeps(graphir.memory(plan, threads=1, profile=None).peak, limits):
                yield graphir.estimate(plan, TOPOLOGY, profile=None, threads=1).seconds


def _ruled_out() -> Iterator[str]:
    """Of limits that plans keep: how many are said to be too small for any placement."""
    yield "| limits that a plan keeps | ruled out |"
    yield "| ---: | ---: |"
    rng, wrong = Random(0), 0
    programs = [by_hand.units(rng, 4) for _ in range(RULED_OUT // 10)]
    for program in [program for program in programs for _ in range(10)]:
        saved = ("kept", "parked", "recomputed")
        one = by_hand.placed(program, [by_hand.Where(rng.randrange(2), rng.choice(saved)) for _ in range(4)])
        if one is not None:
            away = [f"[{i}].**.{kind}" for i in range(4) for kind in KINDS if rng.random() < STATE]
            away = [what for what in away if _names_state(one, what)]
            one = passes.park(one, away, "cpu") if away else one
            shared = passes.share_storage(passes.inject_copies(one))
            peaks = graphir.memory(passes.emit(shared), threads=1, profile=None).peak
            limits = {Device.parse(f"gpu:{device}"): max(peaks.get(f"gpu:{device}", 0), 1) for device in range(2)}
            wrong += proven(program, limits, [gpu(0), gpu(1)], OPTIONS) > 1
    yield f"| {RULED_OUT} | {limited(str(wrong), at_most=0)} |"


def _names_state(program: Program, what: str) -> bool:
    kind = what.rpartition(".")[2]
    return any(name.endswith(f".{kind}") for name in program.step.external_inputs)


def _seconds(program: Program) -> float:
    plan = passes.emit(passes.inject_copies(program))
    return graphir.estimate(plan, TOPOLOGY, profile=None, threads=1).seconds


def _keeps(peaks: Mapping[str, int], limits: Mapping[str, int]) -> bool:
    return all(peaks.get(device, 0) <= limit for device, limit in limits.items())
