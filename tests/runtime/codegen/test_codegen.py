"""The code that is generated for a plan."""

import ast
import re

import models
import pytest
import torch
from graphir.runtime import Session
from graphir.runtime.codegen.statements import generate
from graphir.runtime.executors.reference import Reference
from runnable import captured, forward_plan, setting_of, sgd

from graphir import passes
from graphir.errors import PlanError

AT = "gpu:0.compute"


def lane_of(plan, **state):
    names = [feed.blob for feed in plan.program.interface.feeds]
    (lane,) = generate(setting_of(plan, *names, **state), dict.fromkeys(plan.lanes, 0))
    return lane


def body(lane):
    return [line.strip() for line in lane.source.splitlines()[1:]]


CHAIN = """
    input x : f32[2] @gpu:0
    a : f32[2] @gpu:0 = aten.relu(x)
    b : f32[2] @gpu:0 = aten.neg(a)
    c : f32[2] @gpu:0 = aten.mul.Tensor(b, other=2.5)
"""


def test_a_line_an_instruction():
    lane = lane_of(forward_plan(CHAIN, "x", output="c"))
    assert body(lane) == ["v0 = c0(i0)", "v1 = c1(v0)", "del v0", "v2 = c2(v1, 2.5)", "del v1", "return (v2, )"]


def test_lines_lead_back_to_instructions():
    plan = forward_plan(CHAIN, "x", output="c")
    lane = lane_of(plan)
    lines = lane.source.splitlines()
    for number, position in enumerate(lane.instructions):
        if position >= 0:
            kind = plan.instructions[position].kind
            assert lines[number - 1].strip().startswith({"run": "v", "free": "del"}[kind])


def test_it_computes():
    lane = lane_of(forward_plan(CHAIN, "x", output="c"))
    (result,) = lane.bind({})(0, torch.tensor([1.0, -2.0]))
    assert result.tolist() == [-2.5, 0]


HOSTILE = """
    input "x); import os; (" : f32[2] @gpu:0
    "a\\"\\"\\"\\n raise SystemExit" : f32[2] @gpu:0 = aten.div.Tensor_mode("x); import os; (", other=2, rounding_mode="floor")
    "lambda: __import__('os')" : f32[2] @gpu:0 = aten.neg("a\\"\\"\\"\\n raise SystemExit")
"""  # noqa: E501  # one operator a line


def test_nothing_of_a_plans_text_is_in_the_code():
    plan = forward_plan(HOSTILE, "x); import os; (", output="lambda: __import__('os')")
    lane = lane_of(plan)
    assert not re.search("import|raise|lambda|floor|aten", lane.source)
    names = {node.id for node in ast.walk(ast.parse(lane.source)) if isinstance(node, ast.Name)}
    assert all(re.fullmatch(r"n|[cegikrsvx]\d+", name) for name in names)
    assert lane.bind({})(0, torch.tensor([3.0, -3.0]))[0].tolist() == [-1, 2]


def test_numbers_that_have_no_literal_are_bound():
    plan = forward_plan(
        """
        input x : f32[2] @gpu:0
        a : f32[2] @gpu:0 = aten.clamp(x, min=-inf, max=1e+300)
        """,
        "x",
        output="a",
    )
    lane = lane_of(plan)
    assert "inf" not in lane.source
    assert float("-inf") in lane.constants


def test_a_view_of_state_is_taken_once():
    plan = forward_plan(
        """
        param w : f32[2,3] @gpu:0
        input x : f32[4,3] @gpu:0
        w.t : f32[3,2] strides [1,3] in w @gpu:0 = aten.t(w) {views=[0:0]}
        w.tt : f32[2,3] in w @gpu:0 = aten.t(w.t) {views=[0:0]}
        a : f32[4,2] @gpu:0 = aten.mm(x, w.t)
        b : f32[4,3] @gpu:0 = aten.mm(a, w.tt)
        """,
        "x",
        output="b",
        state={"w": torch.randn(2, 3)},
    )
    w, x = torch.randn(2, 3), torch.randn(4, 3)
    lane = lane_of(plan, w=w)
    assert [line for line in body(lane) if "s" in line] == ["v0 = c0(i0, s1)", "v1 = c0(v0, s0)"]
    w.mul_(2)
    assert torch.equal(lane.bind({})(0, x)[0], x @ w.t() @ w)


def test_an_overwritten_operand_keeps_its_variable():
    plan = forward_plan(
        """
        buffer s : f32[2] @gpu:0
        input x : f32[2] @gpu:0
        s;1 = aten.add_.Tensor(s, x) {writes=[0:0]}
        y : f32[2] @gpu:0 = aten.neg(s;1)
        """,
        "x",
        output="y",
    )
    state = torch.ones(2)
    lane = lane_of(plan, s=state)
    assert body(lane)[:2] == ["c0(s0, i0)", "v0 = c1(s0)"]
    assert lane.bind({})(0, torch.ones(2))[0].tolist() == [-2, -2]
    assert state.tolist() == [2, 2]


def test_a_new_value_of_state_is_copied_into_its_tensor():
    plan = forward_plan(
        """
        buffer s : f32[2] @gpu:0
        input x : f32[2] @gpu:0
        s;1 = aten.neg(x)
        y : f32[2] @gpu:0 = aten.neg(s;1)
        """,
        "x",
        output="y",
    )
    state = torch.zeros(2)
    assert lane_of(plan, s=state).bind({})(0, torch.ones(2))[0].tolist() == [1, 1]
    assert state.tolist() == [-1, -1]


def test_a_copy_back_fills_the_tensor_of_the_state():
    plan = forward_plan(
        """
        buffer s : f32[2] @gpu:0
        input x : f32[2] @gpu:0
        s;1 = Copy(x)
        y : f32[2] @gpu:0 = aten.neg(s;1)
        """,
        "x",
        output="y",
    )
    state = torch.zeros(2)
    assert lane_of(plan, s=state).bind({})(0, torch.ones(2))[0].tolist() == [-1, -1]
    assert state.tolist() == [1, 1]


def test_a_view_of_state_that_depends_on_sizes_is_taken_in_each_step():
    plan = forward_plan(
        """
        param b : f32[3] @gpu:0
        input x : f32[batch,3] @gpu:0
        e : f32[batch,3] strides [0,1] in b @gpu:0 = aten.expand(b, size=[batch, 3]) {views=[0:0]}
        y : f32[batch,3] @gpu:0 = aten.mul.Tensor(e, x)
        """,
        "x",
        output="y",
        dims={"batch": 2},
    )
    lane = lane_of(plan, b=torch.ones(3))
    for batch in (2, 5, 2):
        assert lane.bind({"batch": batch})(0, torch.ones(batch, 3))[0].shape == (batch, 3)


def test_unread_results_of_an_operator_are_dropped_with_their_storage():
    plan = forward_plan(
        """
        input x : f32[4,3] @gpu:0
        m : f32[3] @gpu:0, i : i64[3] @gpu:0 = aten.max.dim(x, dim=0)
        """,
        "x",
        output="m",
    )
    assert body(lane_of(plan))[:2] == ["v0, v1,  = c0(i0, 0)", "del v1"]


def test_a_read_of_what_was_not_made_is_refused():
    plan = forward_plan(CHAIN, "x", output="c")
    with pytest.raises(PlanError, match="version 0 of 'a' is read before it is made"):
        lane_of(plan.with_(instructions=plan.instructions[1:]))


UPDATES = """
    param p : f32[2] @gpu:0
    param q : f32[2] @gpu:0
    buffer lr : f64[] @cpu:0
    buffer lr2 : f64[] @cpu:0
    input x : f32[2] @gpu:0
    g : f32[2] @gpu:0 = aten.neg(x)
    h : f32[2] @gpu:0 = aten.relu(x)
    p;1 = graphir.sgd(p, g, lr) {{operands="tt_t", writes=[0:0]}}
    q;1 = graphir.sgd(q, {grad}, {lr}{options}) {{operands="tt_t", writes=[0:0]}}
    y : f32[2] @gpu:0 = aten.add.Tensor(p;1, q;1)
"""


@pytest.mark.parametrize(
    ("grad", "lr", "options", "calls"),
    [
        pytest.param("h", "lr", "", 1, id="alike"),
        pytest.param("h", "lr2", "", 2, id="another rate"),
        pytest.param("h", "lr", ", maximize=true", 2, id="other options"),
        pytest.param("p;1", "lr", "", 2, id="one reads what the other writes"),
    ],
)
def test_updates_that_follow_each_other_are_one_call(grad, lr, options, calls):
    plan = forward_plan(UPDATES.format(grad=grad, lr=lr, options=options), "x", output="y")
    rate = torch.tensor(0.5, dtype=torch.float64)
    state = {"p": torch.ones(2), "q": torch.ones(2), "lr": rate, "lr2": 2 * rate}
    names = [feed.blob for feed in plan.program.interface.feeds]
    setting = setting_of(plan, *names, **{name: tensor.clone() for name, tensor in state.items()})
    lane = lane_of(plan, **state)
    assert sum("([s" in line for line in body(lane)) == calls
    x = torch.tensor([1.0, -2.0])
    (expected,) = Reference(setting).run({}, [x], 0)
    assert torch.equal(lane.bind({})(0, x)[0], expected)


def test_reductions_that_follow_each_other_are_one_call():
    example = models.mlp()
    program = passes.replicate(captured(example, sgd(example.model.parameters())), [0, 1])
    with Session(passes.emit(program), program.state, executor="threads") as session:
        for lane in session._executor.plain.threads:
            (call,) = [line for line in body(lane) if "((" in line]
            results = call.partition(" = ")[0].rstrip(",").split(", ")
            assert len(results) == len(list(example.model.parameters()))


@pytest.mark.parametrize("executor", ["serial", "threads"])
def test_a_reduction_of_a_reduction_is_a_call_of_its_own(executor):
    text = """
    input x : f32[4] @gpu:0
    a : f32[4] @gpu:0 = AllReduce([x], reduction="sum")
    b : f32[4] @gpu:0 = AllReduce([a], reduction="sum")
    c : f32[4] @gpu:0 = AllReduce([b], reduction="sum")
    output a
    output b
    """
    with Session(forward_plan(text, "x", output="c"), {}, executor=executor) as session:
        assert torch.equal(session.step(torch.arange(4.0)), torch.arange(4.0))
