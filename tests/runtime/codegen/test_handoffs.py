"""Which events become locks between threads."""

import pytest
import tiny
from graphir.runtime.codegen.handoffs import handoffs

from graphir.errors import PlanError
from graphir.ir.plan import Event, Instruction, Plan

A, B, C = "gpu:0.compute", "gpu:1.compute", "gpu:1.copy_in"


def plan_of(*steps):
    """A plan of records and waits: ``"A x"`` records x on lane A, ``"B x<A"`` waits on B for it."""
    instructions = []
    for step in steps:
        at, _, what = step.partition(" ")
        blob, _, by = what.partition("<")
        lanes = {"A": A, "B": B, "C": C}
        event = Event(blob, 0, lanes[by or at])
        instructions.append(Instruction("wait" if by else "record", lanes[at], event=event))
    return Plan(tiny.program(), {}, tuple(instructions))


THREADS = {A: 0, B: 1, C: 1}


def test_a_wait_for_another_thread_takes_what_the_record_gives():
    found = handoffs(plan_of("A x", "B x<A"), THREADS)
    assert found == (1, {0: (0,)}, {1: 0})


def test_lanes_of_one_thread_need_nothing():
    assert handoffs(plan_of("C x", "B x<C"), THREADS).total == 0


def test_a_wait_that_an_earlier_wait_of_the_thread_implies_is_left_out():
    assert handoffs(plan_of("A x", "A y", "C y<A", "B x<A"), THREADS).taken == {2: 0}


def test_a_wait_that_follows_through_a_third_thread_is_left_out():
    threads = {A: 0, B: 1, C: 2}
    found = handoffs(plan_of("A x", "B x<A", "B y", "C y<B", "C x<A"), threads)
    assert found.taken == {1: 0, 3: 1}


def test_a_later_record_of_the_same_event_is_handed_over_again():
    found = handoffs(plan_of("A x", "B x<A", "A x", "B x<A"), THREADS)
    assert found == (2, {0: (0,), 2: (1,)}, {1: 0, 3: 1})


def test_a_wait_for_what_nobody_recorded_is_refused():
    with pytest.raises(PlanError, match=r"gpu:1.compute waits for 'x' by gpu:0.compute, which is not recorded before"):
        handoffs(plan_of("B x<A", "A x"), THREADS)
