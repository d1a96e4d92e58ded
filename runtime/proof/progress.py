"""Whether every lane of a plan gets to its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from graphlib import CycleError, TopologicalSorter

from graphir.ir.plan import Event, Plan

from .findings import Finding

__all__ = ["collectives_in_order", "unsatisfied_waits"]


def unsatisfied_waits(plan: Plan, waits: Sequence[int]) -> list[Finding]:
    """What is wrong with *waits*, positions of waits for events that nothing records before them in issue order.

    One finding for each cycle of lanes that wait for each other, and one for each wait that is in no cycle.
    """
    if not waits:
        return []
    recorded = _first_records(plan)
    findings = []
    cycles = _cycles(plan, recorded)
    for cycle in cycles:
        links = [f"#{wait} waits for #{recorded[_event(plan, wait)]}" for wait in cycle]
        lanes = list(dict.fromkeys([plan.instructions[wait].lane for wait in cycle]))
        what = f"{' and '.join(lanes)} wait for each other: {', '.join(links)}"
        first, second = recorded[_event(plan, cycle[0])], cycle[0]
        event = plan.instructions[second].event
        assert event is not None
        findings.append(Finding("cycle", what, event.blob, first, second, f"#{first} before #{second}", plan))
    known = {wait for cycle in cycles for wait in cycle}
    for wait in waits:
        if wait in known:
            continue
        event, lane = _event(plan, wait), plan.instructions[wait].lane
        late = recorded.get(event, -1)
        why = "nothing records" if late < 0 else "is recorded only after it"
        what = f"{lane} waits for {event.blob!r} by {event.lane}, which {why}"
        missing = f"a record of {event.blob!r} by {event.lane} before #{wait}"
        findings.append(Finding("unsatisfied wait", what, event.blob, late, wait, missing, plan))
    return findings


def collectives_in_order(plan: Plan, parts: Sequence[int]) -> list[Finding]:
    """The collectives, of positions *parts*, that lanes take part in in orders that do not fit together.

    A collective of a backend, such as NCCL's, waits for all its participants.
    """
    ranks: dict[int, int] = {}
    last: dict[str, int] = {}
    orderly = True
    for position in parts:
        instruction = plan.instructions[position]
        rank = ranks.setdefault(instruction.op, len(ranks))
        orderly = orderly and last.get(instruction.lane, -1) <= rank
        last[instruction.lane] = rank
    return [] if orderly else _disagreement(plan, parts)


def _disagreement(plan: Plan, positions: Sequence[int]) -> list[Finding]:
    """A cycle of collectives each of which some lane has directly before another one."""
    lanes: dict[str, dict[int, int]] = {}
    for position in positions:
        instruction = plan.instructions[position]
        lanes.setdefault(instruction.lane, {}).setdefault(instruction.op, position)
    before: dict[int, dict[int, str]] = {}
    for lane, parts in lanes.items():
        for one, other in zip(parts, list(parts)[1:], strict=False):
            before.setdefault(other, {}).setdefault(one, lane)
    try:
        TopologicalSorter(before).prepare()
    except CycleError as e:
        members = e.args[1][:0:-1]  # each has the next one before it; the last closes the cycle
    else:
        return []
    names = {member: plan.step.ops[member].outputs[0] for member in members}
    orders = []
    for one, other in zip(members, [*members[1:], members[0]], strict=True):
        orders.append(f"{before[one][other]} has {names[other]!r} before {names[one]!r}")
    one, other = members[0], members[1]
    parts = lanes[before[one][other]]
    what = f"lanes take part in collectives in different orders: {', '.join(orders)}"
    missing = f"one order of these collectives on all lanes, such as #{parts[one]} before #{parts[other]}"
    return [Finding("collective order", what, names[one], parts[one], parts[other], missing, plan)]


def _event(plan: Plan, position: int) -> Event:
    event = plan.instructions[position].event
    assert event is not None
    return event


def _first_records(plan: Plan) -> dict[Event, int]:
    found: dict[Event, int] = {}
    for position, (kind, lane, _, _, event, _) in enumerate(plan.instructions):
        if kind == "record" and event is not None and event.lane == lane:
            found.setdefault(event, position)
    return found


def _cycles(plan: Plan, recorded: Mapping[Event, int]) -> list[list[int]]:
    """The waits of lanes that wait for each other when each lane goes as far as it can."""
    stuck = _stuck(plan)
    cycles = []
    seen: set[str] = set()
    for start in stuck:
        path: dict[str, None] = {}
        lane = start
        while lane in stuck and lane not in seen and lane not in path:
            path[lane] = None
            event = _event(plan, stuck[lane])
            lane = event.lane if event in recorded else ""
        if lane in path:
            members = list(path)
            cycles.append([stuck[member] for member in members[members.index(lane) :]])
        seen.update(path)
    return cycles


def _stuck(plan: Plan) -> dict[str, int]:
    """For each lane that cannot get to its end, the wait at which it stays."""
    lanes: dict[str, list[int]] = {}
    for position, instruction in enumerate(plan.instructions):
        lanes.setdefault(instruction.lane, []).append(position)
    gone = dict.fromkeys(lanes, 0)
    recorded: set[Event] = set()
    waiting: dict[Event, list[str]] = {}
    ready = list(lanes)
    while ready:
        lane = ready.pop()
        positions = lanes[lane]
        while gone[lane] < len(positions):
            kind, _, _, _, event, _ = plan.instructions[positions[gone[lane]]]
            if event is not None:
                if kind == "wait" and event not in recorded:
                    waiting.setdefault(event, []).append(lane)
                    break
                if kind == "record" and event.lane == lane:
                    recorded.add(event)
                    ready += waiting.pop(event, ())
            gone[lane] += 1
    return {lane: lanes[lane][gone[lane]] for lanes_ in waiting.values() for lane in lanes_}
