"""What a person would try, beside what `passes.balance` finds: blocks in a row, every placement of four units, and what
refusals say cannot be."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from random import Random
from typing import Final

import by_hand
from graphir.passes.choice.asked import OPTIONS
from graphir.passes.choice.proven import proven
from limits import limited

import graphir
from graphir import Program, passes
from graphir.errors import PassError
from graphir.ir.device import Device, gpu

__all__ = ["rows"]

TOPOLOGY: Final = graphir.Topology.named("h200x8")

COUNTS: Final = (2, 3, 4, 6, 8, 12, 16, 24)
ACCUMULATE: Final = (1, 2, 4)
MARGIN: Final = 1.05
"""What a recompute by hand holds, times so much, is the limit."""

SAMPLE: Final = 6
"""How many runs and modules of one program are tried; all of them take a night."""

SECONDS: Final = 3.0
SLOWER: Final = 1.01
"""The most seconds of a choice, and the longest step in steps of a person's plan."""

PROBLEMS: Final = 30
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
    yield "| blocks | devices | limits | refused | longest step, in steps by hand | seconds at most |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: |"
    for kind in by_hand.KINDS:
        for devices in (1, 2):
            tried, refused, longest, slowest = 0, 0, 0.0, 0.0
            for count in COUNTS:
                for accumulate in ACCUMULATE:
                    program = by_hand.blocks(kind, count, accumulate)
                    for hand in _some(program, Random(f"{kind} {count} {accumulate}")):
                        limit = int(MARGIN * by_hand.held(hand)["gpu:0"])
                        limits = {f"gpu:{device}": limit for device in range(devices)}
                        tried += 1
                        begun = time.perf_counter()
                        try:
                            found = passes.balance(program, limits, topology=TOPOLOGY)
                            longest = max(longest, found.after / _seconds(hand))
                        except PassError:
                            refused += 1
                        slowest = max(slowest, time.perf_counter() - begun)
            yield (
                f"| {kind} | {devices} | {tried} | {limited(str(refused), at_most=0)} "
                f"| {limited(f'{longest:.3f}', at_most=SLOWER)} | {limited(f'{slowest:.2f}', at_most=SECONDS)} |"
            )


def _some(program: Program, rng: Random) -> Iterator[Program]:
    """The program with some of its runs and modules recomputed."""
    whats = list(by_hand.whats(program))
    rng.shuffle(whats)
    found = 0
    for what in whats:
        try:
            hand = passes.recompute(program, what)
        except PassError:  # it saves nothing but what others read
            continue
        yield hand
        found += 1
        if found == SAMPLE:
            return


def _every() -> Iterator[str]:
    """Of problems of four units on two devices: the step that is found, in steps of the best placement there is."""
    yield "| problems of four units | placements of each | refused | longest step, in steps of the best | mean |"
    yield "| ---: | ---: | ---: | ---: | ---: |"
    ratios, refused, most = [], 0, 0
    for seed in range(PROBLEMS):
        rng = Random(seed)
        program = by_hand.units(rng, 4)
        every = [(by_hand.held(one), one) for one in by_hand.every_placement(program, 4)]
        most = max(most, len(every))
        whole = every[0][0]["gpu:0"]
        spread = [peaks for peaks, _ in every if len(peaks) == 2 and max(peaks.values()) < 0.95 * whole]
        factor = rng.choice([1.02, 1.1, 1.25])
        limits = {device: int(factor * nbytes) for device, nbytes in rng.choice(spread).items()}
        best = min(_seconds(one) for peaks, one in every if _keeps(peaks, limits))
        try:
            ratios.append(passes.balance(program, limits, topology=TOPOLOGY, evaluations=EVALUATIONS).after / best)
        except PassError:
            refused += 1
    longest = limited(f"{max(ratios):.4f}", at_most=SLOWER)
    mean = sum(ratios) / len(ratios)
    yield f"| {PROBLEMS} | {most:,} | {limited(str(refused), at_most=0)} | {longest} | {mean:.4f} |"


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
