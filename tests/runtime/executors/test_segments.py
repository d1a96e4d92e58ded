"""Runs of operators that TorchScript's interpreter executes."""

import re

import pytest
import torch
from graphir.runtime import Session
from graphir.runtime.executors import segments
from graphir.runtime.executors.segments import Segments, unavailable
from runnable import forward_plan, setting_of

from graphir.errors import RunError

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))


def printed(monkeypatch, body, *inputs, output, **state):
    """The Python of the first thread of a plan, and the graphs of all segments."""
    graphs, compile_ = [], segments._compile
    monkeypatch.setattr(segments, "_compile", lambda *a: (graphs.append(segments._graph(*a)), compile_(*a))[1])
    plan = forward_plan(body, *inputs, output=output, state=state)
    executor = Segments(setting_of(plan, *inputs, **state))
    executor.close()
    return [line.strip() for line in executor.plain.threads[0].source.splitlines()[1:]], graphs


CHAIN = """
    param w : f32[2,3] @gpu:0
    input x : f32[4,3] @gpu:0
    a : f32[4,3] @gpu:0 = aten.mul.Scalar(x, other=0.1)
    w.t : f32[3,2] strides [1,3] in w @gpu:0 = aten.t(w) {views=[0:0]}
    b : f32[4,2] @gpu:0 = aten.mm(a, w.t)
    c : f32[4,2] @gpu:0 = aten.relu(b)
"""


def test_a_run_of_operators_is_one_call(monkeypatch):
    body, graphs = printed(monkeypatch, CHAIN, "x", output="c", w=torch.ones(2, 3))
    assert body == ["v2 = c1(i0, k0, s1)", "return (v2, )"]
    assert graphs == [
        "graph(%i0 : Tensor, %k0 : float, %s1 : Tensor):\n"
        "  %v0 : Tensor = aten::mul(%i0, %k0)\n"
        "  %v1 : Tensor = aten::mm(%v0, %s1)\n"
        "  %v2 : Tensor = aten::relu(%v1)\n"
        "  return (%v2)\n"
    ]


def test_what_was_made_before_is_dropped_after(monkeypatch):
    monkeypatch.setattr(segments, "_LONGEST", 1)
    body, graphs = printed(monkeypatch, CHAIN, "x", output="c", w=torch.ones(2, 3))
    assert len(graphs) == 3
    assert body[:3] == ["v0 = c1(i0, k0)", "v1 = c2(v0, s1); del v0", "v2 = c3(v1); del v1"]


MIXED = """
    input x : f32[4,3] @gpu:0
    a : f32[4,3] @gpu:0 = aten.neg(x)
    b : f32[4,3] @gpu:0 = aten.bernoulli(a) {seed=0}
    c : f32[4,3] @gpu:0 = aten.relu(b)
    d : f32[2,3] in c @gpu:0, e : f32[2,3] offset 6 in c @gpu:0 = aten.split.Tensor(c, split_size=2) {results="[tt]", views=[0:0, 1:0]}
    f : f32[4,3] @gpu:0 = aten.cat(d, e) {operands="[tt]"}
"""  # noqa: E501  # one operator a line


def test_random_numbers_stay_in_python(monkeypatch):
    body, graphs = printed(monkeypatch, MIXED, "x", output="f")
    assert len(graphs) == 2
    assert body[1].startswith("g")
    assert "prim::ListUnpack" in graphs[1]
    assert "Tensor[] = prim::ListConstruct(%v3, %v4)" in graphs[1]


def test_an_update_comes_before_the_segment_that_reads_it(monkeypatch):
    body, graphs = printed(
        monkeypatch,
        """
        param p : f32[2] @gpu:0
        buffer lr : f64[] @cpu:0
        input x : f32[2] @gpu:0
        p;1 = graphir.sgd(p, x, lr) {operands="tt_t", writes=[0:0]}
        y : f32[2] @gpu:0 = aten.neg(p;1)
        """,
        "x",
        output="y",
        p=torch.ones(2),
        lr=torch.tensor(0.5, dtype=torch.float64),
    )
    assert len(graphs) == 1
    assert [line.split(" = ")[0] for line in body[:2]] == ["c0([s0], [i0], [None], s1)", "v0"]


HOSTILE = """
    input "x); import os; (" : f32[2] @gpu:0
    "a\\"\\n  return (%v0)" : f32[2] @gpu:0 = aten.div.Tensor_mode("x); import os; (", other=2, rounding_mode="floor")
    "%v1 : Tensor" : f32[2] @gpu:0 = aten.neg("a\\"\\n  return (%v0)")
"""


def test_nothing_of_a_plans_text_is_in_a_graph(monkeypatch):
    _, graphs = printed(monkeypatch, HOSTILE, "x); import os; (", output="%v1 : Tensor")
    assert all(re.fullmatch(r"[\w%:?.,() \[\]=\n-]*", graph) for graph in graphs)
    assert not any(re.search("import|floor", graph) for graph in graphs)


@pytest.mark.parametrize(
    ("type", "arguments", "resolves"),
    [
        ("aten.mul.Tensor", ("Tensor", "Tensor"), True),
        ("aten.mul.Scalar", ("Tensor", "float"), True),
        ("aten.mul.Tensor", ("Tensor", "float"), False),
        ("aten.sum.default", ("Tensor", "NoneType"), True),
        ("aten.sum.dim_IntList", ("Tensor", "int", "bool", "NoneType"), False),
        ("aten.view.default", ("Tensor", "int[]"), True),
        ("aten._assert_async.default", ("Tensor",), False),
    ],
)
def test_an_operator_is_printed_where_it_resolves_to_its_own_overload(type, arguments, resolves):
    assert segments._resolves(type, arguments) is resolves


FAILING = """
    param table : f32[5,3] @gpu:0
    buffer count : f32[2] @gpu:0
    input i : i64[2] @gpu:0
    input d : f32[2,3] @gpu:1
    j : i64[2] @gpu:0 = aten.neg(i)
    {first}
    k : i64[2] @gpu:0 = aten.neg(j)
    a : f32[2,3] @gpu:0 = aten.embedding(table, k)
    {last}
    a_gpu_1 : f32[2,3] @gpu:1 = Copy(a)
    b : f32[2,3] @gpu:1 = aten.add.Tensor(a_gpu_1, d)
"""
WRITE = "count;1 = aten.add_.Scalar(count, other=1) {writes=[0:0]}"
STATE = {"table": torch.arange(15.0).view(5, 3), "count": torch.zeros(2)}


@pytest.mark.parametrize(("lines", "usable"), [(("", ""), True), ((WRITE, ""), False)], ids=["pure", "written"])
def test_a_failing_operator_of_a_segment_is_named(lines, usable):
    plan = forward_plan(FAILING.format(first=lines[0], last=lines[1]), "i", "d", output="b", state=STATE)
    with Session(plan, STATE, executor="segments") as session:
        with pytest.raises(RunError) as caught:
            session.step(torch.tensor([1, 99]), torch.zeros(2, 3))
        assert str(caught.value).splitlines()[:3] == [
            "aten.embedding.default failed: RuntimeError: index out of range in self",
            "  at   a : f32[2,3] @gpu:0 = aten.embedding(table, k)",
            "  in   module 'a', plan 'small', step 0, lane gpu:0.compute",
        ]
        assert session.usable is usable
        if usable:
            assert torch.equal(session.step(torch.tensor([1, 2]), torch.zeros(2, 3)), STATE["table"][1:3])


def test_a_writing_operator_of_an_earlier_segment_counts(monkeypatch):
    monkeypatch.setattr(segments, "_LONGEST", 2)
    plan = forward_plan(FAILING.format(first=WRITE, last=""), "i", "d", output="b", state=STATE)
    with Session(plan, STATE, executor="segments") as session:
        with pytest.raises(RunError, match="index out of range"):
            session.step(torch.tensor([1, 99]), torch.zeros(2, 3))
        assert not session.usable


@pytest.mark.parametrize(
    ("name", "replacement", "why"),
    [
        ("parse_ir", None, "TypeError"),
        ("_set_graph_executor_optimize", None, "TypeError"),
        ("_create_function_from_graph", lambda name, graph: lambda x: x, "runs TorchScript's IR with another result"),
    ],
)
def test_it_is_tried_out_what_torch_can_do(monkeypatch, name, replacement, why):
    monkeypatch.setattr(torch._C, name, replacement)
    assert re.match(rf"torch \S+ (does not run TorchScript's IR: )?{why}", segments.unavailable.__wrapped__())


def test_the_callers_thread_keeps_its_settings():
    before = torch._C._get_graph_executor_optimize()
    assert segments.unavailable.__wrapped__() is None
    assert torch._C._get_graph_executor_optimize() == before
