"""Value numbers of a plan: what changes them, and what does not."""

from __future__ import annotations

from collections.abc import Mapping

import nets
import pytest
import tiny
from small import program_of, two_layers

from graphir import passes
from graphir.analysis.values import value_numbers
from graphir.ir.program import Program

TINY = """
    param w : f32[4] @gpu:0
    buffer count : f32[4] @gpu:0
    input x : f32[4] @gpu:0
    input y : f32[4] @gpu:0
    a : f32[4] @gpu:0 = aten.mul.Tensor(x, w)
    b : f32[4] @gpu:0 = aten.mul.Tensor(y, w)
    output c : f32[4] @gpu:0 = aten.add.Tensor(a, b)
    w;1 = aten.add_.Tensor(w, a) {phase=update}
    output c
"""


def numbers(text: str) -> Mapping[str, str]:
    return value_numbers(program_of(text))


def shifted(program: Program) -> Program:
    program = passes.shift_activations(program, passes.find_activations(program)[1:], shifts={0: 2, 1: 3})
    return passes.share_storage(passes.inject_copies(program))


def test_outputs_and_the_state_that_a_step_changes_have_numbers() -> None:
    assert list(numbers(TINY)) == ["c", "w"]


@pytest.mark.parametrize("seed", range(6))
def test_placement_copies_and_reuse_of_storage_change_no_number(seed: int) -> None:
    program = passes.replicate(nets.random_program(seed), devices=[0, 1])
    before = value_numbers(program)
    after = value_numbers(shifted(program))
    assert before and {name: after.get(name) for name in before} == before


def test_state_that_init_copies_is_the_state_that_it_copies() -> None:
    body = "param w : f32[4] @gpu:0\nparam v : f32[4] @gpu:1\noutput c : f32[4] @gpu:1 = aten.relu(v)\noutput c"
    p = program_of(body)
    copy = p.init.ops[1]._replace(type="Copy", inputs=("w",), args={})
    copied = value_numbers(p.with_(init=p.init.with_(ops=(p.init.ops[0], copy))))
    assert copied == numbers("param w : f32[4] @gpu:0\noutput c : f32[4] @gpu:0 = aten.relu(w)\noutput c")
    assert copied != value_numbers(p)


def test_numbers_are_those_of_files_written_before() -> None:
    assert value_numbers(two_layers()) == {
        "loss": "9989d6334198dbc8",
        "fc1.weight": "d503111541e38009",
        "fc2.weight": "acecdcdc15659720",
        "fc1.weight.momentum_buffer": "df2429a849a18f98",
        "fc2.weight.momentum_buffer": "31ea8269117efd8c",
    }


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [
        ("= aten.mul.Tensor(x, w)", "= aten.mul.Tensor(y, w)", {"c", "w"}),
        ("= aten.mul.Tensor(y, w)", "= aten.mul.Tensor(y, count)", {"c"}),
        ("= aten.mul.Tensor(y, w)", "= aten.div.Tensor(y, w)", {"c"}),
        ("Tensor(w, a)", "Tensor(w, a, alpha=2)", {"w"}),
        ("Tensor(w, a)", "Tensor(w, b)", {"w"}),
        ("w;1 = aten.add_.Tensor(w, a)", "count;1 = aten.add_.Tensor(count, a)", {"w", "count"}),
    ],
)
def test_what_is_computed_changes_them(old: str, new: str, changed: set[str]) -> None:
    assert old in TINY
    before, after = numbers(TINY), numbers(TINY.replace(old, new))
    assert {name for name in {**before, **after} if before.get(name) != after.get(name)} == changed


def test_an_operator_that_reads_what_was_overwritten_changes_them() -> None:
    program = program_of(TINY)
    assert value_numbers(program, [(1, 0), (0, 0), (2, 0), (3, 0)]) == value_numbers(program)
    assert value_numbers(program, [(0, 0), (3, 0), (1, 0), (2, 0)])["c"] != value_numbers(program)["c"]


def test_a_part_of_a_collective_makes_its_own_output_only() -> None:
    program = program_of("""
    param v : f32[2] @gpu:0
    param w : f32[2] @gpu:1
    input x : f32[2] @gpu:0
    input y : f32[2] @gpu:1
    [s : f32[2] @gpu:0, t : f32[2] @gpu:1] = AllReduce([x, y]) {phase=reduce}
    v;1 = aten.copy_(v, s) {phase=update}
    w;1 = aten.copy_(w, t) {phase=update}
    """)
    whole = value_numbers(program)
    assert whole == value_numbers(program, [(0, 0), (1, 0), (0, 1), (2, 0)])
    assert whole != value_numbers(program, [(0, 1), (0, 0), (1, 0)])


def test_a_plan_carries_them() -> None:
    moved = tiny.moved()
    plan = passes.emit(moved)
    assert plan.values == value_numbers(moved) != {}
