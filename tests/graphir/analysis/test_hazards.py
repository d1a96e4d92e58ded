"""What orders the operators of a net."""

from __future__ import annotations

from small import program_of

from graphir.analysis.hazards import hazards


def test_hazards_are_found_between_the_nearest_operators_only() -> None:
    program = program_of("""
        buffer s : f32[2] @gpu:0
        input x : f32[2] @gpu:0
        a : f32[2] @gpu:0 = aten.neg(s)
        b : f32[2] @gpu:0 = aten.relu(s)
        s;1 = aten.add_.Tensor(s, x) {writes=[0:0]}
        v : f32[2] in s @gpu:0 = aten.view(s;1, size=[2]) {views=[0:0]}
        c : f32[2] @gpu:0 = aten.neg(v)
        s;2 = aten.add_.Tensor(s;1, x) {writes=[0:0]}
    """)
    assert hazards(program.step).earlier == [[], [], [0, 1], [2], [2, 3], [2, 3, 4]]


def test_storages_are_shared_that_another_lane_touches() -> None:
    found = hazards(program_of("""
        buffer s : f32[] @cpu:0
        input x : f32[2] @gpu:0
        a : f32[2] @gpu:0 = aten.relu(x)
        v : f32[2] in a @gpu:0 = aten.view(a, size=[2]) {views=[0:0]}
        b : f32[2] @gpu:0 = aten.mul.Tensor(v, s)
        c : f32[2] @gpu:1 = Copy(b)
        d : f32[2] @gpu:1 = aten.neg(c)
    """).step)  # fmt: skip
    assert found.touched == [("x", "a"), ("a",), ("a", "s", "b"), ("b", "c"), ("c", "d")]
    assert found.shared == {"s", "b", "c"}
