"""passes.emit: lanes, events and frees."""

from __future__ import annotations

from collections.abc import Callable

import nets
import pytest
from small import program_of, two_layers

import graphir
from graphir import passes
from graphir.errors import PassError
from graphir.ir.blob import STATE_ROLES
from graphir.ir.plan import Plan


def shifted_plan(seed: int) -> Plan:
    program = passes.replicate(nets.random_program(seed), devices=[0, 1])
    chosen = passes.find_activations(program)
    program = passes.shift_activations(program, chosen[len(chosen) // 2 :], shifts={0: 2, 1: 3})
    return passes.emit(passes.share_storage(passes.inject_copies(program)))


def waits_of(plan: Plan, lane: str) -> list[str]:
    return [f"{i.event.blob} by {i.event.lane}" for i in plan.lanes[lane] if i.kind == "wait" and i.event]


def test_text_of_a_plan(golden: Callable[[str, str], None]) -> None:
    program = passes.shift_activations(two_layers(), ["fc2", "loss"], shifts={0: 1})
    golden("two_layers.plan", str(passes.emit(passes.inject_copies(program))))


def test_one_device_needs_no_events() -> None:
    plan = passes.emit(two_layers())
    assert {instruction.kind for instruction in plan.instructions} == {"run", "free"}
    assert set(plan.lanes) == {"gpu:0.compute"}


def test_every_operator_is_issued_once() -> None:
    for seed in range(10):
        plan = shifted_plan(seed)
        issued = [(i.op, i.part) for i in plan.instructions if i.op >= 0]
        assert len(issued) == len(set(issued))
        assert {op for op, _ in issued} == set(range(len(plan.step.ops)))


def test_copies_are_on_the_lanes_of_their_destination_or_of_their_source_when_they_leave_for_the_host() -> None:
    body = """
    input x : f32[3] @gpu:0
    a : f32[3] @gpu:1 = aten.relu(x)
    b : f32[3] @cpu:0 = aten.relu(x)
    """
    plan = passes.emit(passes.inject_copies(program_of(body)))
    copies = {plan.step.ops[i.op].outputs[0]: i.lane for i in plan.instructions if i.kind == "copy"}
    assert copies == {"x_gpu_1": "gpu:1.copy_in", "x_cpu": "gpu:0.copy_out"}


def test_storages_are_freed_once_and_state_and_outputs_never() -> None:
    for seed in range(10):
        plan = shifted_plan(seed)
        freed = [i.storage for i in plan.instructions if i.kind == "free"]
        assert len(freed) == len(set(freed))
        blobs = plan.step.blobs
        assert not [name for name in freed if blobs[name].role in STATE_ROLES]
        kept = {blobs[name].storage for name in plan.step.external_outputs}
        made = {name for op in plan.step.ops for name in op.outputs if not blobs[name].is_view}
        assert made - kept - set(plan.step.external_inputs) == set(freed) - set(plan.step.external_inputs)


def test_waits_that_others_imply_are_left_out() -> None:
    body = """
    input x : f32[3] @gpu:0
    a : f32[3] @gpu:1 = aten.relu(x)
    b : f32[3] @gpu:0 = aten.exp(x)
    b_gpu_1 : f32[3] @gpu:1 = Copy(b)
    c : f32[3] @gpu:1 = aten.mul.Tensor(b_gpu_1, a)
    d : f32[3] @gpu:1 = aten.mul.Tensor(b_gpu_1, c)
    """
    plan = passes.emit(passes.inject_copies(program_of(body)))
    assert waits_of(plan, "gpu:1.compute") == ["x_gpu_1 by gpu:1.copy_in", "b_gpu_1 by gpu:1.copy_in"]


def test_a_writer_waits_for_readers_on_other_lanes() -> None:
    body = """
    buffer count : f32[3] @gpu:0
    input x : f32[3] @gpu:1
    a : f32[3] @gpu:1 = aten.mul.Tensor(x, count)
    count;1 = aten.add_.Tensor(count, other=1.0)
    """
    plan = passes.emit(passes.inject_copies(program_of(body)))
    lane = [(i.kind, i.event.lane if i.event else "") for i in plan.lanes["gpu:0.compute"]]
    assert lane == [("wait", "gpu:1.copy_in"), ("run", "")]


def test_random_plans_verify_and_round_trip() -> None:
    for seed in range(12):
        plan = shifted_plan(seed)
        graphir.verify(plan)
        assert graphir.parse(str(plan)) == plan


def test_dimensions_are_one_replicas_and_can_be_set_for_each() -> None:
    program = passes.replicate(nets.random_program(1), devices=[0, 1])
    assert passes.emit(program).dims == {"gpu_0/batch": 6, "gpu_1/batch": 6}
    assert passes.emit(program, dims={"batch": 9}).dims == {"gpu_0/batch": 9, "gpu_1/batch": 9}
    assert passes.emit(program, dims={"gpu_1/batch": 9}).dims == {"gpu_0/batch": 6, "gpu_1/batch": 9}


def test_sizes_of_unlike_shares_are_their_mean() -> None:
    program = passes.replicate(nets.random_program(1), devices=[0, 1], shares=[3, 1])
    assert passes.emit(program).dims == {"gpu_0/batch": 9, "gpu_1/batch": 3}
    assert passes.emit(program, dims={"batch": 10}).dims == {"gpu_0/batch": 15, "gpu_1/batch": 5}
    assert passes.emit(program, dims={"batch": 5, "gpu_1/batch": 4}).dims == {"gpu_0/batch": 8, "gpu_1/batch": 4}
    message = r"2 rows is divided by shares=\[3, 1\] as \[2, 0\], .*\n  fix  give 'batch' as 4, or a multiple"
    with pytest.raises(PassError, match=message):
        passes.emit(program, dims={"batch": 1})


def test_instructions_do_not_depend_on_sizes() -> None:
    program = passes.replicate(nets.random_program(1), devices=[0, 1])
    assert passes.emit(program).instructions == passes.emit(program, dims={"batch": 99}).instructions


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        ({"bach": 3}, "has no dimension 'bach'.*dimensions: batch"),
        ({"batch": 0}, "dimension 'batch' cannot be 0"),
        ({"batch": "3"}, "dimension 'batch' cannot be '3'"),
    ],
)
def test_bad_dimensions_are_refused(dims: dict[str, int], message: str) -> None:
    with pytest.raises(PassError, match=f"(?s){message}"):
        passes.emit(nets.random_program(1), dims=dims)
