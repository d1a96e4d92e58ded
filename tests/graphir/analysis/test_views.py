"""Views that generated code leaves out."""

import pytest
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


def uncalled(body, *, thread=0, shared=(), output="b", also=()):
    """What needs no call where the last two operators run in a thread of their own."""
    plan = forward_plan(body, "x", output=output)
    step = plan.step.with_(external_outputs=(*plan.step.external_outputs, *also))
    plan = plan.with_(program=plan.program.with_(step=step))
    last = len(plan.step.ops) - 2
    moved = [i._replace(lane="late") if i.op >= last else i for i in plan.instructions]
    found = uncalled_views(plan.with_(instructions=tuple(moved)), {"gpu:0.compute": 0, "late": thread}, shared)
    return {name: earlier for (name, _), (earlier, _) in found.same.items()}, {name for name, _ in found.unread}


def test_a_matrix_transposed_twice_is_itself():
    assert uncalled(CHAIN) == ({"a.t.t": "a"}, {"a.t", "a.flat"})


def test_what_the_caller_gets_is_nobody_elses():
    assert uncalled(CHAIN, output="a.t.t") == ({"a.t.t": "a"}, {"a.t", "a.flat"})
    assert uncalled(CHAIN, output="a.t.t", also=["a"]) == ({}, {"a.flat"})
    again = CHAIN + "    c : f32[4,3] in a @gpu:0 = aten.detach(a)\n"
    assert uncalled(again, output="a.t.t", also=["c"]) == ({"a.t.t": "a"}, {"a.t", "a.flat"})
    of_input = CHAIN.replace("a : f32[4,3] @gpu:0 = aten.neg(x)", "a : f32[4,3] in x @gpu:0 = aten.detach(x)")
    of_input = of_input.replace(" in a @", " in x @")
    assert uncalled(of_input, output="a.t.t") == ({"a": "x"}, {"a.flat"})


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


SUM = """
    input x : f32[4,3] @gpu:0
    kept : f32[1,3] @gpu:0 = aten.sum.dim_IntList(x, dim=[0], keepdim=true)
    flat : f32[3] in kept @gpu:0 = aten.view(kept, size=[3])
    b : f32[3] @gpu:0 = aten.exp(flat)
"""


def test_a_sum_is_made_without_the_dimension_that_a_view_drops():
    assert uncalled(SUM) == ({"flat": "kept"}, set())
    assert uncalled(SUM, output="flat") == ({"flat": "kept"}, set())


@pytest.mark.parametrize(
    ("body", "also"),
    [
        (SUM, ["kept"]),
        (SUM + "    c : f32[1,3] @gpu:0 = aten.neg(kept)\n", []),
        (
            SUM.replace("size=[3]", "size=[3, 1]")
            .replace("f32[3] in", "f32[3,1] in")
            .replace("b : f32[3]", "b : f32[3,1]"),
            [],
        ),
        (SUM.replace("[0]", "[1]").replace("f32[1,3]", "f32[4,1]").replace("3]", "4]").replace("[4,4]", "[4,3]"), None),
    ],
)
def test_a_sum_that_others_read_keeps_its_dimension(body, also):
    found = uncalled(body, also=also or ())[0]
    assert found == ({} if also is not None else {"flat": "kept"})


@pytest.mark.parametrize("body", [CHAIN, SUM])
def test_generated_code_has_the_bits_of_the_reference(body):
    x = torch.randn(4, 3)
    for output in ("b", "flat" if body == SUM else "a.t.t"):
        found = []
        for name in ("reference", "serial"):
            with Session(forward_plan(body, "x", output=output), {}, executor=name) as session:
                found.append(session.step(x))
        assert torch.equal(*found) and found[0].shape == found[1].shape
