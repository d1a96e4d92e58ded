"""Where groups are in a choice, why, and as Accelerate writes it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from graphir.ir.device import Device
from graphir.ir.names import base_name
from graphir.ir.program import Program

from ..base import as_gpu
from .bound import bound_of
from .groups import Grouped
from .outcome import Outcome, Outcomes
from .problem import AGAIN, KEEP, Choice, Problem

__all__ = ["GroupPlace", "Reasons", "device_map"]


class GroupPlace(NamedTuple):
    """Where a group of modules is, and why.

    Attributes:
        modules: its first and last one.
        device: where it is.
        saved: what becomes of what it saves for the backward: ``kept``, ``recomputed``, or ``parked on`` a device; and
            where its optimizer state is, if that is parked.
        moved: whether any of that is new.
        otherwise: the next best for this group alone.
        seconds: how much longer a step would take then.
        over: the device that would exceed its limit then, and by how many bytes; empty and 0 where none would.
    """

    modules: str
    device: str
    saved: str
    moved: bool
    otherwise: str
    seconds: float
    over: str
    excess: int


class Reasons(NamedTuple):
    """What says how good a choice is, and why it is so.

    Attributes:
        problem: what was placed.
        choice: the placement.
        others: the problems that were searched, with the limits that were given.
        peaks: by device, what the choice holds.
        by_hand: which plan of a person it is, of which groups say nothing; empty of a choice.
    """

    problem: Problem
    choice: Choice
    others: Sequence[Problem]
    peaks: Sequence[int]
    by_hand: str = ""

    def bound(self) -> float:
        """Seconds below which no choice for these problems can be."""
        return min([bound_of(problem, self.peaks) for problem in self.others])

    def places(self) -> list[GroupPlace]:
        """Where each group is, and what the next best would have cost; nothing of a plan by hand."""
        return [] if self.by_hand else _group_places(Outcomes(self.problem), self.choice)


def _group_places(outcomes: Outcomes, choice: Choice) -> list[GroupPlace]:
    problem, here = outcomes.problem, outcomes(choice)
    found = []
    for i, group in enumerate(problem.groups):
        kept = choice.state or (KEEP,) * len(problem.groups)
        others: list[tuple[float, float, str, Outcome]] = []
        for device in group.devices:
            for stored in dict.fromkeys((choice.stored[i], *group.stored)):
                for state in dict.fromkeys((kept[i], KEEP, *group.away)):
                    now = device, stored, state
                    if now == (choice.devices[i], choice.stored[i], kept[i]) or device in (stored, state):
                        continue
                    rows = zip((choice.devices, choice.stored, kept), now, strict=True)
                    outcome = outcomes(Choice(*[(*row[:i], one, *row[i + 1 :]) for row, one in rows]))
                    others.append((outcome.over, outcome.seconds, _described(problem, *now), outcome))
        best = min(others, key=lambda other: other[:2], default=None)
        over, excess = "", 0
        if best is not None:
            for name, limit, peak in zip(problem.devices, problem.limits, best[3].peaks, strict=True):
                if limit is not None and peak - limit > excess:
                    over, excess = name, peak - limit
        device, stored, state = choice.devices[i], choice.stored[i], kept[i]
        found.append(
            GroupPlace(
                modules=group.name,
                device=problem.devices[device],
                saved=_stored(problem, stored, state),
                moved=device != group.now or stored != KEEP or state != KEEP,
                otherwise="" if best is None else best[2],
                seconds=0.0 if best is None else best[1] - here.seconds,
                over=over,
                excess=excess,
            )
        )
    return found


def _stored(problem: Problem, stored: int, state: int) -> str:
    parked = "" if state == KEEP else f", state on {problem.devices[state]}"
    if stored == KEEP:
        return f"kept{parked}"
    return ("recomputed" if stored == AGAIN else f"parked on {problem.devices[stored]}") + parked


def _described(problem: Problem, device: int, stored: int, state: int) -> str:
    return f"on {problem.devices[device]}, {_stored(problem, stored, state)}"


def device_map(program: Program, grouped: Grouped) -> dict[str, int | str]:
    """By module that is a unit, or owns state, the number of the gpu where a placed program has its state, or else runs
    it; by name of its state, where that is on several devices. Of a replicated program, where the first replica has it.
    """
    step, prefix = program.step, program.replicas[0]
    wanted = dict.fromkeys([unit.module for units in grouped.units for unit in units if not unit.piece])
    wanted.update(dict.fromkeys([module for _, module in grouped.homes]))
    state: dict[str, dict[str, Device]] = defaultdict(dict)
    for name in step.external_inputs:
        if (blob := step.blobs[name]).role not in ("param", "buffer"):
            continue
        own = base_name(name)
        module = own.rpartition(".")[0]
        if name == prefix + own and (module in wanted or blob.device.is_host):  # the search has no units of the host
            state[module][own] = blob.device
            wanted.setdefault(module)
    run: dict[str, Device] = {}
    without = wanted.keys() - state.keys()
    for op in step.ops if without else ():
        if op.phase == "forward" and op.module in without and not op.effects.shows:
            run.setdefault(op.module, op.device)
    found: dict[str, int | str] = {}
    for module in wanted:
        devices = {run[module]} if module in run else set(state[module].values())
        if len(devices) == 1:
            found[module] = _gpu(devices.pop())
        else:
            found.update({name: _gpu(device) for name, device in state[module].items()})
    return found


def _gpu(device: Device) -> int | str:
    return "cpu" if device.is_host else as_gpu(device)
