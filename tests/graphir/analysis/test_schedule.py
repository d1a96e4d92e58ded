"""When instructions would be executed."""

import itertools

import pytest
from small import program_of

from graphir import passes
from graphir.analysis.cost import Cost
from graphir.analysis.execution import Execution
from graphir.analysis.schedule import Interval, schedule
from graphir.ir.plan import lane_device

TWO_DEVICES = """
    input x : f32[2] @gpu:0
    a : f32[2] @gpu:0 = aten.neg(x)
    b : f32[2] @gpu:0 = aten.exp(x)
    a_gpu_1 : f32[2] @gpu:1 = Copy(a)
    c : f32[2] @gpu:1 = aten.neg(a_gpu_1)
    output c
    output b
"""
SECONDS = [2.0, 5.0, 1.0, 4.0]


def of_operators(worker):
    plan = passes.emit(program_of(TWO_DEVICES))
    found = schedule(
        plan, plan.dims, [Cost(seconds, "roofline") for seconds in SECONDS], Execution("any", worker)
    ).intervals()
    return {plan.instructions[p].op: i for p, i in found.items() if plan.instructions[p].op >= 0}, plan, found


def test_lanes_that_run_for_themselves_overlap():
    found, _, _ = of_operators(lambda lane: lane)
    assert found == {0: Interval(0, 2), 1: Interval(2, 7), 2: Interval(2, 3), 3: Interval(3, 7)}


def test_lanes_of_one_thread_take_turns():
    found, plan, _ = of_operators(lambda lane: "")
    assert sum(interval.seconds for interval in found.values()) == sum(SECONDS)
    ordered = [found[instruction.op] for instruction in plan.instructions if instruction.op >= 0]
    assert all(before.end == after.start for before, after in itertools.pairwise(ordered))


@pytest.mark.parametrize("worker", [str, lane_device], ids=["lanes", "devices"])
def test_a_wait_lasts_until_its_event_is_recorded(worker):
    _, plan, found = of_operators(worker)
    waits = {
        i.lane: found[p] for p, i in enumerate(plan.instructions) if i.kind == "wait" and i.lane == "gpu:1.copy_in"
    }
    assert waits == {"gpu:1.copy_in": Interval(0, 2)}


def test_every_instruction_has_its_interval_and_lanes_keep_their_order():
    _, plan, found = of_operators(str)
    assert sorted(found) == list(range(len(plan.instructions)))
    for lane in plan.lanes:
        mine = [found[p] for p, i in enumerate(plan.instructions) if i.lane == lane]
        assert all(before.end <= after.start for before, after in itertools.pairwise(mine))
