"""passes.inject_copies: right, minimal, and never stale."""

from __future__ import annotations

from collections.abc import Callable

import nets
import pytest
from small import program_of, two_layers

import graphir
from graphir import passes
from graphir.errors import PassError
from graphir.ir.program import Program


def copies(program: Program) -> list[tuple[str, str]]:
    """(source, copy) of every copy, with versions."""
    found = []
    for op in program.step.ops:
        if op.type == "Copy":
            ((source, read),), ((target, made),) = op.reads, op.makes
            found.append((f"{source};{read}", f"{target};{made}"))
    return found


def injected(body: str) -> Program:
    program = program_of(body)
    after = passes.inject_copies(program)
    graphir.verify(after)
    assert graphir.certify(program, after).holds
    return after


def test_text_of_a_placed_program(golden: Callable[[str, str], None]) -> None:
    shifted = passes.shift_activations(two_layers(), ["fc2", "loss"], shifts={0: 1})
    golden("two_layers.placed", str(passes.inject_copies(shifted).step))


def test_a_copy_stands_before_its_first_reader_and_serves_the_others() -> None:
    after = injected("""
    input x : f32[3] @gpu:0
    a : f32[3] @gpu:0 = aten.relu(x)
    b : f32[3] @gpu:1 = aten.exp(a)
    c : f32[3] @gpu:1 = aten.mul.Tensor(a, b)
    """)
    assert [op.outputs[0] for op in after.step.ops] == ["a", "a_gpu_1", "b", "c"]
    assert after.step.ops[3].inputs == ("a_gpu_1", "b")


def test_a_blob_read_twice_by_one_operator_is_copied_once() -> None:
    after = injected("""
    input x : f32[3] @gpu:0
    b : f32[3] @gpu:1 = aten.mul.Tensor(x, x)
    """)
    assert copies(after) == [("x;0", "x_gpu_1;0")]


def test_each_device_gets_a_copy_of_its_own_from_the_original() -> None:
    after = injected("""
    input x : f32[3] @gpu:0
    a : f32[3] @gpu:1 = aten.relu(x)
    b : f32[3] @gpu:2 = aten.relu(x)
    c : f32[3] @cpu:0 = aten.relu(x)
    """)
    assert copies(after) == [("x;0", "x_gpu_1;0"), ("x;0", "x_gpu_2;0"), ("x;0", "x_cpu;0")]


def test_a_copy_is_not_used_after_its_source_was_rewritten() -> None:
    after = injected("""
    buffer count : f32[3] @gpu:0
    input x : f32[3] @gpu:1
    a : f32[3] @gpu:1 = aten.mul.Tensor(x, count)
    count;1 = aten.add_.Tensor(count, other=1.0)
    b : f32[3] @gpu:1 = aten.mul.Tensor(x, count;1)
    """)
    assert copies(after) == [("count;0", "count_gpu_1;0"), ("count;1", "count_gpu_1_1;0")]


def test_an_update_made_elsewhere_is_written_back() -> None:
    after = injected("""
    buffer count : f32[3] @gpu:0
    input x : f32[3] @gpu:1
    count;1 = aten.add_.Tensor(count, x) {device=gpu:1}
    b : f32[3] @gpu:1 = aten.mul.Tensor(x, count;1)
    """)
    assert copies(after) == [("count;0", "count_gpu_1;0"), ("count_gpu_1;1", "count;1")]
    reader = after.step.producer("b")
    assert reader is not None
    assert list(reader.reads) == [("x", 0), ("count_gpu_1", 1)]


def test_two_updates_made_elsewhere_copy_in_once() -> None:
    after = injected("""
    buffer count : f32[3] @gpu:0
    input x : f32[3] @gpu:1
    count;1 = aten.add_.Tensor(count, x) {device=gpu:1}
    count;2 = aten.mul_.Tensor(count;1, x) {device=gpu:1}
    """)
    assert copies(after) == [("count;0", "count_gpu_1;0"), ("count_gpu_1;1", "count;1"), ("count_gpu_1;2", "count;2")]


def test_what_was_shifted_away_from_what_it_overwrites_is_refused() -> None:
    with pytest.raises(PassError, match=r"relu_.default writes 'b' over 'a', which gpu:1 has a copy of") as caught:
        injected("""
        input x : f32[3] @gpu:0
        a : f32[3] @gpu:0 = aten.exp(x)
        b : f32[3] in a @gpu:0 = aten.relu_(a) {device=gpu:1, writes=[0:0]}
        """)
    assert caught.value.fix == "shift before share_storage, which puts operators in place"


def test_a_name_that_is_taken_is_not_overwritten() -> None:
    after = injected("""
    input x : f32[3] @gpu:0
    input x_gpu_1 : f32[3] @gpu:1
    a : f32[3] @gpu:1 = aten.mul.Tensor(x, x_gpu_1)
    """)
    assert copies(after) == [("x;0", "x_gpu_1_1;0")]


def test_explicit_copies_get_no_copy() -> None:
    after = injected("""
    input x : f32[3] @gpu:0
    y : f32[3] @gpu:1 = Copy(x)
    z : f32[3] @gpu:1 = aten.relu(y)
    """)
    assert copies(after) == [("x;0", "y;0")]


def test_host_scalars_and_collectives_stay() -> None:
    program = passes.replicate(two_layers(), devices=[0, 1])
    assert passes.inject_copies(program).step == program.step


def test_a_small_view_crosses_alone_with_its_strides() -> None:
    after = injected(
        """
    input x : f32[6,8] @gpu:0
    part : f32[6,2] strides [8,1] offset 4 in x @gpu:0 = aten.slice.Tensor(x, dim=1, start=4, end=6)
    a : f32[6,2] strides [8,1] @gpu:1 = aten.relu(part)
    """.replace("strides [8,1] @gpu:1", "@gpu:1")
    )
    blob = after.step.blobs["part_gpu_1"]
    assert copies(after) == [("part;0", "part_gpu_1;0")]
    assert (blob.strides, blob.offset, blob.storage) == ((8, 1), 0, "part_gpu_1")


def test_a_view_as_large_as_its_storage_is_replayed_on_a_copy_of_it() -> None:
    after = injected("""
    input x : f32[6,8] @gpu:0
    t : f32[8,6] strides [1,8] in x @gpu:0 = aten.t(x)
    wide : f32[2,8,6] strides [0,1,8] in x @gpu:0 = aten.expand(t, size=[2, 8, 6])
    a : f32[2,8,6] strides [48,1,8] @gpu:1 = aten.relu(wide)
    b : f32[6,8] @gpu:1 = aten.relu(x)
    """)
    assert copies(after) == [("x;0", "x_gpu_1;0")]
    assert [op.outputs[0] for op in after.step.ops][2:] == ["x_gpu_1", "t_gpu_1", "wide_gpu_1", "a", "b"]
    assert after.step.blobs["wide_gpu_1"].storage == "x_gpu_1"
    assert after.step.blobs["wide_gpu_1"].strides == (0, 1, 8)


def test_a_view_of_a_view_that_crossed_alone_goes_back_to_the_storage() -> None:
    after = injected("""
    input x : f32[6,8] @gpu:0
    part : f32[6,2] strides [8,1] offset 4 in x @gpu:0 = aten.slice.Tensor(x, dim=1, start=4, end=6)
    a : f32[6,2] @gpu:1 = aten.relu(part)
    wide : f32[9,6,2] strides [0,8,1] offset 4 in x @gpu:0 = aten.expand(part, size=[9, 6, 2])
    b : f32[9,6,2] @gpu:1 = aten.relu(wide)
    """)
    assert copies(after) == [("part;0", "part_gpu_1;0"), ("x;0", "x_gpu_1;0")]
    assert after.step.blobs["wide_gpu_1"].offset == 4


def test_copies_and_replays_say_who_made_them() -> None:
    shifted = passes.shift_activations(two_layers(), ["fc2", "loss"], shifts={0: 1})
    placed = passes.inject_copies(shifted)
    added = [op for op in placed.step.ops if op.outputs[0] not in shifted.step.blobs]
    assert added
    assert {op.by for op in added} == {"inject_copies"}


@pytest.mark.parametrize("spread", [0.2, 0.6])
def test_random_programs_are_placed_and_certified(spread: float) -> None:
    for seed in range(60):
        program = nets.random_program(seed, devices=3, spread=spread)
        placed = passes.inject_copies(program)
        graphir.verify(placed)
        assert graphir.certify(program, placed).holds


def test_no_copy_can_be_left_out() -> None:
    for seed in range(20):
        placed = passes.inject_copies(nets.random_program(seed, devices=3, spread=0.4))
        for i, op in enumerate(placed.step.ops):
            if op.type != "Copy" or op.output_versions:
                continue
            source, target = op.inputs[0], op.outputs[0]
            readers = [reader for reader in placed.step.ops[i + 1 :] if target in reader.inputs]
            assert readers, f"nobody reads {target}"
            at = placed.step.blobs[target].device
            assert placed.step.blobs[source].device != at
            assert [c for c in copies(placed) if c[0].startswith(f"{source};") and c[1] == f"{target};0"]


def test_injecting_again_changes_nothing() -> None:
    placed = passes.inject_copies(nets.random_program(3, devices=3, spread=0.4))
    assert passes.inject_copies(placed).step == placed.step
