"""The reference executor raises on everything that a sound plan never does."""

import pytest
import torch
from graphir.runtime.executors.reference import Reference
from runnable import forward_plan, setting_of

from graphir.errors import PlanError, RunError
from graphir.ir.plan import Event, Instruction

AT = "gpu:0.compute"
X = torch.tensor([1.0, -2.0])


def run(plan, *inputs, **state):
    names = [feed.blob for feed in plan.program.interface.feeds]
    return Reference(setting_of(plan, *names, **state)).run({}, inputs, 0)


def two_ops():
    return forward_plan(
        """
        input x : f32[2] @gpu:0
        a : f32[2] @gpu:0 = aten.relu(x)
        b : f32[2] @gpu:0 = aten.neg(a)
        """,
        "x",
        output="b",
    )


def overwriting():
    return forward_plan(
        """
        buffer s : f32[2] @gpu:0
        input x : f32[2] @gpu:0
        v : f32[2] in s @gpu:0 = aten.view(s, size=[2]) {views=[0:0]}
        y : f32[2] @gpu:0 = aten.mul.Tensor(v, x)
        s;1 = aten.add_.Tensor(s, x) {writes=[0:0]}
        """,
        "x",
        output="y",
    )


def test_it_computes_the_outputs():
    (result,) = run(two_ops(), X)
    assert result.tolist() == [-1, 0]


def test_state_is_overwritten_in_place():
    state = torch.tensor([10.0, 20.0])
    (result,) = run(overwriting(), X, s=state)
    assert result.tolist() == [10, -40]
    assert state.tolist() == [11, 18]


def test_a_read_after_a_free_raises():
    plan = two_ops()
    free = Instruction("free", AT, storage="a")
    with pytest.raises(PlanError, match="'a' is read after its storage 'a' was freed"):
        run(plan.with_(instructions=(plan.instructions[0], free, *plan.instructions[1:])), X)


def test_a_second_free_raises():
    plan = two_ops()
    free = Instruction("free", AT, storage="a")
    with pytest.raises(PlanError, match="storage 'a' is freed twice"):
        run(plan.with_(instructions=(*plan.instructions, free, free)), X)


def test_a_read_of_what_was_not_made_raises():
    plan = two_ops()
    with pytest.raises(PlanError, match="version 0 of 'a' is read before it is made"):
        run(plan.with_(instructions=plan.instructions[1:]), X)


def test_a_read_of_a_view_after_its_storage_was_overwritten_raises():
    plan = overwriting()
    by_op = {i.op: i for i in plan.instructions}
    late = plan.with_(instructions=(by_op[0], by_op[2], by_op[1]))
    with pytest.raises(PlanError, match="version 0 of 'v' is read after its storage 's' was overwritten"):
        run(late, X, s=torch.ones(2))


def test_a_wait_for_what_nobody_recorded_raises():
    plan = two_ops()
    wait = Instruction("wait", AT, event=Event("a", 0, AT))
    with pytest.raises(PlanError, match="which nobody recorded before"):
        run(plan.with_(instructions=(wait, *plan.instructions)), X)


def test_a_failing_operator_is_named():
    with pytest.raises(RunError, match=r"aten.add_.Tensor failed: RuntimeError(.|\n)*at .*s;1 .*= aten.add_.Tensor"):
        run(overwriting(), X, s=torch.ones(1, 2).expand(2, 2)[0].view(2).to(torch.int32))
