"""passes.inject_copies: right, minimal, and never stale."""

from __future__ import annotations

from collections.abc import Callable

import nets
import pytest
import torch
from small import program_of, two_layers
from torch import nn

import graphir
from graphir import passes, runtime
from graphir.errors import PassError
from graphir.ir.device import gpu
from graphir.ir.operator import Operator
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


def test_two_updates_made_elsewhere_cross_once_each_way() -> None:
    after = injected("""
    buffer count : f32[3] @gpu:0
    input x : f32[3] @gpu:1
    count;1 = aten.add_.Tensor(count, x) {device=gpu:1}
    count;2 = aten.mul_.Tensor(count;1, x) {device=gpu:1}
    """)
    assert copies(after) == [("count;0", "count_gpu_1;0"), ("count_gpu_1;2", "count;1")]


def test_an_update_made_elsewhere_is_brought_home_for_who_reads_it_there() -> None:
    after = injected("""
    buffer count : f32[3] @gpu:0
    input x : f32[3] @gpu:1
    count;1 = aten.add_.Tensor(count, x) {device=gpu:1}
    a : f32[3] @gpu:0 = aten.exp(count;1)
    count;2 = aten.mul_.Tensor(count;1, x) {device=gpu:1}
    count;3 = aten.add_.Tensor(count;2, count;2)
    """)
    assert copies(after) == [("count;0", "count_gpu_1;0"), ("count_gpu_1;1", "count;1"), ("count_gpu_1;2", "count;2")]
    assert [op.output_versions for op in after.step.ops if op.outputs == ("count",)] == [(1,), (2,), (3,)]


def test_an_update_made_elsewhere_goes_from_there_to_a_third_device() -> None:
    after = injected("""
    buffer count : f32[3] @gpu:0
    input x : f32[3] @gpu:1
    count;1 = aten.add_.Tensor(count, x) {device=gpu:1}
    a : f32[3] @gpu:2 = aten.exp(count;1)
    """)
    assert copies(after)[1:] == [("count_gpu_1;1", "count_gpu_2;0"), ("count_gpu_1;1", "count;1")]


def test_what_nobody_reads_at_home_stays_where_it_was_overwritten() -> None:
    after = injected("""
    input x : f32[3] @gpu:0
    a : f32[3] @gpu:0 = aten.exp(x)
    a;1 = aten.relu_(a) {device=gpu:1}
    b : f32[3] @gpu:1 = aten.exp(a;1)
    output b
    """)
    assert copies(after) == [("a;0", "a_gpu_1;0")]


def test_a_copy_reads_where_a_value_is() -> None:
    after = injected("""
    buffer count : f32[3] @gpu:0
    input x : f32[3] @gpu:1
    count;1 = aten.add_.Tensor(count, x) {device=gpu:1}
    y : f32[3] @gpu:2 = Copy(count;1)
    """)
    assert copies(after) == [("count;0", "count_gpu_1;0"), ("count_gpu_1;1", "y;0"), ("count_gpu_1;1", "count;1")]


@pytest.mark.parametrize("last", ["forward", "update"])
def test_a_state_comes_home_before_the_update_if_anything_was_written_before_it(last: str) -> None:
    after = injected(f"""
    buffer count : f32[3] @gpu:0
    input x : f32[3] @gpu:1
    count;1 = aten.add_.Tensor(count, x) {{device=gpu:1}}
    count;2 = aten.mul_.Tensor(count;1, x) {{phase={last}, device=gpu:1}}
    """)
    assert (after.step.ops[-1].type, after.step.ops[-1].phase) == ("Copy", "forward")


def test_a_view_of_what_was_updated_elsewhere_is_made_again_there() -> None:
    after = injected("""
    buffer count : f32[3,2] @gpu:0
    input x : f32[3,2] @gpu:1
    count;1 = aten.add_.Tensor(count, x) {device=gpu:1}
    t : f32[2,3] strides [1,2] in count @gpu:0 = aten.t(count;1)
    a : f32[2,3] strides [1,2] @gpu:1 = aten.exp(t)
    """)
    assert copies(after) == [("count;0", "count_gpu_1;0"), ("count_gpu_1;1", "count;1")]
    assert after.step.blobs["t_gpu_1"].storage == "count_gpu_1"


def test_the_host_is_one_memory() -> None:
    program = program_of("""
    input x : f32[3] @cpu:1
    a : f32[3] @cpu:0 = aten.exp(x)
    """)
    assert passes.inject_copies(program) == program.with_(history=("inject_copies",))


def test_a_counter_that_is_counted_up_elsewhere_crosses_once_each_way_in_a_session() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    program = graphir.capture(model, (x,), targets=(y,), loss=nn.functional.mse_loss, optimizer=optimizer, accumulate=2)
    counter = "1.num_batches_tracked"
    ops = tuple(op.on(gpu(1), "test") if op.outputs == (counter,) else op for op in program.step.ops)
    placed = passes.inject_copies(program.with_(step=program.step.with_(ops=ops)))
    assert copies(placed) == [(f"{counter};0", f"{counter}_gpu_1;0"), (f"{counter}_gpu_1;2", f"{counter};1")]
    assert graphir.certify(program, placed).holds
    plan = passes.emit(placed)
    assert runtime.check(plan) == []
    states = []
    for each in (passes.emit(program), plan):
        with runtime.Session(each, program.state) as session:
            losses = [session.step(x, y) for _ in range(2)]
            states.append({"loss": losses[1], **session.state_dict()})
    assert states[1][counter] == 4
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


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
    """It could not cross with what its storage holds later."""
    after = injected("""
    input x : f32[6,8] @gpu:0
    part : f32[6,2] strides [8,1] offset 4 in x @gpu:0 = aten.slice.Tensor(x, dim=1, start=4, end=6)
    a : f32[6,2] @gpu:1 = aten.relu(part)
    x;1 = aten.relu_(x) {device=gpu:0}
    later : f32[6,2] strides [8,1] offset 4 in x @gpu:0 = aten.slice.Tensor(x;1, dim=1, start=4, end=6)
    wide : f32[9,6,2] strides [0,8,1] offset 4 in x @gpu:0 = aten.expand(later, size=[9, 6, 2])
    b : f32[9,6,2] @gpu:1 = aten.relu(wide)
    """)
    assert copies(after) == [("part;0", "part_gpu_1;0"), ("x;1", "x_gpu_1;0")]
    assert after.step.blobs["wide_gpu_1"].offset == 4


def test_a_storage_crosses_once_where_it_is_read_as_a_whole_and_in_pieces() -> None:
    after = injected("""
    input x : f32[6,8] @gpu:0
    part : f32[6,2] strides [8,1] offset 4 in x @gpu:0 = aten.slice.Tensor(x, dim=1, start=4, end=6)
    a : f32[6,2] @gpu:1 = aten.relu(part)
    b : f32[6,2] @gpu:2 = aten.relu(part)
    c : f32[6,8] @gpu:1 = aten.relu(x)
    """)
    assert copies(after) == [("x;0", "x_gpu_1;0"), ("part;0", "part_gpu_2;0")]
    assert after.step.blobs["part_gpu_1"].storage == "x_gpu_1"


def test_pieces_that_are_together_as_large_as_their_storage_cross_with_it() -> None:
    after = injected("""
    input x : f32[6,8] @gpu:0
    left : f32[6,4] strides [8,1] in x @gpu:0 = aten.slice.Tensor(x, dim=1, start=0, end=4)
    right : f32[6,4] strides [8,1] offset 4 in x @gpu:0 = aten.slice.Tensor(x, dim=1, start=4, end=8)
    a : f32[6,4] @gpu:1 = aten.relu(left)
    b : f32[6,4] @gpu:1 = aten.relu(right)
    """)
    assert copies(after) == [("x;0", "x_gpu_1;0")]


def test_views_of_the_same_elements_cross_as_one() -> None:
    """A transpose is made again of the copy, and so is a slice that is taken twice."""
    after = injected("""
    input x : f32[6,8] @gpu:0
    part : f32[6,2] strides [8,1] offset 4 in x @gpu:0 = aten.slice.Tensor(x, dim=1, start=4, end=6)
    part.t : f32[2,6] strides [1,8] offset 4 in x @gpu:0 = aten.t(part)
    again : f32[6,2] strides [8,1] offset 4 in x @gpu:0 = aten.slice.Tensor(x, end=6, dim=1, start=4)
    a : f32[6,6] @gpu:1 = aten.mm(part, part.t)
    b : f32[6,2] @gpu:1 = aten.relu(again)
    """)
    assert copies(after) == [("part;0", "part_gpu_1;0")]
    assert (after.step.blobs["part.t_gpu_1"].storage, after.step.blobs["part.t_gpu_1"].offset) == ("part_gpu_1", 0)


def test_pieces_cross_alone_where_the_storage_would_be_more() -> None:
    after = injected("""
    input x : f32[6,8] @gpu:0
    left : f32[6,4] strides [8,1] in x @gpu:0 = aten.slice.Tensor(x, dim=1, start=0, end=4)
    right : f32[6,3] strides [8,1] offset 4 in x @gpu:0 = aten.slice.Tensor(x, dim=1, start=4, end=7)
    a : f32[6,4] @gpu:1 = aten.relu(left)
    b : f32[6,3] @gpu:1 = aten.relu(right)
    """)
    assert copies(after) == [("left;0", "left_gpu_1;0"), ("right;0", "right_gpu_1;0")]


def test_copies_and_replays_say_who_made_them() -> None:
    shifted = passes.shift_activations(two_layers(), ["fc2", "loss"], shifts={0: 1})
    placed = passes.inject_copies(shifted)
    added = [op for op in placed.step.ops if op.outputs[0] not in shifted.step.blobs]
    assert added
    assert {op.by for op in added} == {"inject_copies"}


@pytest.mark.parametrize("spread", [0.2, 0.6])
def test_random_programs_are_placed_and_certified(spread: float) -> None:
    for seed in range(30):
        program = nets.random_program(seed, devices=3, spread=spread)
        placed = passes.inject_copies(program)
        graphir.verify(placed)
        assert graphir.certify(program, placed).holds


def test_no_copy_can_be_left_out() -> None:
    """None brings what is there already, and each is read, or is the last value of what the step hands on."""
    for seed in range(20):
        step = passes.inject_copies(nets.random_program(seed, devices=3, spread=0.4)).step
        value: dict[str, object] = {name: name for name in step.external_inputs}
        unread: dict[str, Operator] = {}
        for i, op in enumerate(step.ops):
            for name in op.inputs:
                unread.pop(name, None)
            assert unread.keys().isdisjoint(op.outputs), f"nobody reads {op.outputs} before they are written again"
            value.update({name: (i, name) for name in op.outputs})
            if op.type == "Copy":
                (source,), (target,) = op.inputs, op.outputs
                there = step.blobs[target].device
                assert not [n for n, v in value.items() if v == value[source] and step.blobs[n].device == there]
                value[target], unread[target] = value[source], op
        assert unread.keys() <= {*step.external_inputs, *step.external_outputs}


def test_injecting_again_changes_nothing() -> None:
    placed = passes.inject_copies(nets.random_program(3, devices=3, spread=0.4))
    assert passes.inject_copies(placed).step == placed.step
