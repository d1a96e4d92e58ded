"""Views that generated code leaves out."""

import torch
from graphir.runtime import Session
from runnable import forward_plan

from graphir.analysis.views import uncalled_views

CHAIN = """
    input x : f32[4,3] @gpu:0
    a : f32[4,3] @gpu:0 = aten.neg(x)
    a.t : f32[3,4] strides [1,3] in a @gpu:0 = aten.t(a)
    a.t.t : f32[4,3] in a @gpu:0 = aten.t(a.t)
    a.flat : f32[12] in a @gpu:0 = aten.view(a, size=[12])
    b : f32[4,3] @gpu:0 = aten.exp(a.t.t)
"""


def uncalled(body, *, thread=0, shared=(), output="b"):
    """What needs no call where the last two operators run in a thread of their own."""
    plan = forward_plan(body, "x", output=output)
    last = len(plan.step.ops) - 2
    moved = [i._replace(lane="late") if i.op >= last else i for i in plan.instructions]
    found = uncalled_views(plan.with_(instructions=tuple(moved)), {"gpu:0.compute": 0, "late": thread}, shared)
    return {name: earlier for (name, _), (earlier, _) in found.same.items()}, {name for name, _ in found.unread}


def test_a_matrix_transposed_twice_is_itself():
    assert uncalled(CHAIN) == ({"a.t.t": "a"}, {"a.t", "a.flat"})


def test_what_the_caller_gets_is_a_view():
    assert uncalled(CHAIN, output="a.t.t") == ({}, {"a.flat"})


def test_what_other_threads_read_is_made():
    assert uncalled(CHAIN, shared={("a.t.t", 0)}) == ({}, {"a.flat"})


def test_another_threads_value_is_not_taken():
    body = CHAIN.replace("    a.flat : f32[12] in a @gpu:0 = aten.view(a, size=[12])\n", "")
    assert uncalled(body) == ({"a.t.t": "a"}, {"a.t"})
    assert uncalled(body, thread=1) == ({}, set())


def test_a_view_of_sizes_is_made():
    """Its strides at other sizes are for torch to say."""
    body = CHAIN.replace("aten.t(a.t)", "aten.view(a, size=[4, 3])")
    assert uncalled(body) == ({}, {"a.t", "a.flat"})


def test_generated_code_has_the_bits_of_the_reference():
    x = torch.randn(4, 3)
    found = []
    for name in ("reference", "serial"):
        with Session(forward_plan(CHAIN, "x", output="b"), {}, executor=name) as session:
            found.append(session.step(x))
    assert torch.equal(*found)
