"""Bytes by device, category and position."""

from __future__ import annotations

import sys

import nets
import numpy as np
import pytest
import tiny
import torch
from small import program_of
from tiny import BATCH, GPU1

import graphir
from graphir import passes, runtime
from graphir.analysis.liveness import Lifetime, liveness, stays
from graphir.analysis.memory import Memory, memory
from graphir.errors import GraphirError
from graphir.ir.blob import STATE_ROLES
from graphir.ir.plan import Plan
from graphir.ir.program import Program

TINY = tiny.program()
ROWS = 6 * 4 * 4  # bytes of f32[batch,4]


def test_lifetimes_in_program_order() -> None:
    found = liveness(TINY)
    assert found["w"] == found["m"] == Lifetime(0, 14)
    assert found["x"] == Lifetime(0, 13), "its view is read by the operator at 12"
    assert found["d"] == Lifetime(3, 7), "views keep their storage alive"
    assert found["loss"] == Lifetime(6, 14), "what is handed back lives to the end"
    assert found["loss_grad"] == Lifetime(7, 10)
    assert "d.t" not in found


def test_lifetimes_in_a_plan_end_at_its_frees() -> None:
    plan = tiny.plan(TINY)
    found = liveness(plan)
    for position, instruction in enumerate(plan.instructions):
        if instruction.kind == "free":
            assert found[instruction.storage].end == position
    assert found["w"] == found["x"] == Lifetime(0, len(plan.instructions))


def test_peak_by_category() -> None:
    found = memory(TINY)
    # At the product (9): x, r, mask and r_grad, and two scalars. At the other product (3) it is x, r, mask and d.
    state = 4 * 4 * 4 * 2 + 8
    assert found.state == {"gpu:0": state, "cpu:0": 0}
    assert found.peak == {"gpu:0": state + 4 * ROWS + 8, "cpu:0": 8}
    assert found.at_peak["gpu:0"] == {
        "parameters": 64,
        "buffers": 8,
        "optimizer state": 64,
        "inputs": ROWS,
        "activations": 2 * ROWS,
        "gradients": ROWS + 4,
        "outputs": 4,
    }
    assert found.at_peak["cpu:0"] == {"inputs": 8}
    assert found.peak_position("gpu:0") == 9


def test_copies_are_a_category_of_their_own() -> None:
    found = memory(tiny.moved())
    assert {u.blob for u in found.uses if u.category == "copies"} == {"h_gpu_1", "r_gpu_0"}
    assert found.peak["gpu:1"] == 2 * ROWS


RELAY = """
    input x : f32[batch,4] @gpu:0
    a : f32[batch,4] @gpu:0 = aten.relu(x)
    b : f32[batch,4] @gpu:1 = aten.neg(a)
    c : f32[batch,4] @gpu:0 = aten.exp(b)
    d : f32[batch,4] @gpu:1 = aten.neg(c)
    output e : f32[6,6] @gpu:1 = aten.new_zeros(d, size=[6, 6])
    output e
"""


def relay() -> Plan:
    """A value that goes back and forth between two devices, through receive buffers."""
    plan = passes.emit(passes.inject_copies(program_of(RELAY, dims={"batch": 6})))
    assert plan.buffers == {"a_gpu_1": 0, "b_gpu_0": 0, "c_gpu_1": 0}
    return plan


def test_receive_buffers_are_there_throughout_and_what_they_receive_takes_nothing() -> None:
    plan = relay()
    found = memory(plan)
    uses = {use.blob: use for use in found.uses if use.category in ("receive buffers", "copies")}
    assert {blob: (use.device, use.nbytes, use.start, use.end) for blob, use in uses.items()} == {
        "a_gpu_1": ("gpu:1", ROWS, 0, found.positions),
        "b_gpu_0": ("gpu:0", ROWS, 0, found.positions),
    }
    assert [use.start for use in found.uses] == sorted(use.start for use in found.uses)
    assert found.at_peak["gpu:0"] == {"inputs": ROWS, "activations": ROWS, "receive buffers": ROWS}
    assert found.total == memory(plan.program).total, "which counts each copy"
    assert "receive buffers" in str(found)
    without = memory(plan.with_(buffers={}))
    assert without.at_peak["gpu:0"] == {"inputs": ROWS, "activations": ROWS, "copies": ROWS}
    assert without.timeline("gpu:1").tolist()[0] == 0 < found.timeline("gpu:1").tolist()[0]


def test_a_receive_buffer_is_as_large_as_the_largest_step_takes() -> None:
    plan, largest = relay(), [{"batch": 60}, {"batch": 2}]
    found, after = memory(plan), memory(plan, earlier=largest)
    for device in plan.devices:
        assert (after.timeline(device) - found.timeline(device)).tolist() == [9 * ROWS] * found.positions
    assert memory(plan, {"batch": 60}, earlier=[{"batch": 2}]).uses == memory(plan, {"batch": 60}).uses
    assert memory(plan.program, earlier=largest).uses == memory(plan.program).uses


def test_state_that_a_copy_overwrites_is_no_copy() -> None:
    program = program_of("""
        state w : f32[10] @gpu:0
        input x : f32[10] @gpu:1
        y : f32[10] @gpu:1 = aten.exp(x)
        w;1 = Copy(y)
        output w
    """)
    assert memory(program).state == {"gpu:0": 40, "gpu:1": 0}


def test_other_sizes() -> None:
    small, large = memory(TINY), memory(TINY, {"batch": 60})
    assert large.state == small.state
    assert large.peak["gpu:0"] - small.peak["gpu:0"] == 9 * 4 * ROWS
    assert large.dims == {"batch": 60}


def test_gaps_count_and_repeats_do_not() -> None:
    padded = tiny.reblobbed(TINY, "h", strides=(8, 1))
    assert {u.blob: u.nbytes for u in memory(padded).uses}["h"] == (5 * 8 + 4) * 4
    assert {u.blob: u.nbytes for u in memory(TINY).uses}["loss_grad"] == 4, "the view of it repeats one element"


@pytest.mark.parametrize(
    ("program", "dims", "what"),
    [
        (TINY, {"batch": -1}, "dims has 'batch' at -1"),
        (TINY, {"batch": 2**70}, "blob 'x' would take"),
        (tiny.reblobbed(TINY, "h", strides=(1,)), {}, "cannot be computed: ValueError"),
        (tiny.edited(TINY, 1, inputs=("hh",)), {}, "cannot be computed: KeyError"),
        (TINY, {"batch": "six"}, "dims has 'batch' at 'six'"),
    ],
)
def test_what_has_no_memory_is_refused(program: Program, dims: dict[str, int], what: str) -> None:
    with pytest.raises(GraphirError, match=what) as e:
        memory(program, dims)
    assert e.value.fix


def test_more_bytes_than_can_be_counted_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[memory.__module__], "_MOST_COUNTED", 100)
    with pytest.raises(GraphirError, match=r"the blobs of 'tiny.step' would take 8\d\d bytes"):
        memory(TINY)


def test_largest() -> None:
    largest = memory(TINY).largest("gpu:0", 3)
    assert [(u.blob, u.nbytes) for u in largest] == [("x", ROWS), ("r", ROWS), ("mask", ROWS)]


WORKSPACE = """
    state w : f32[10] @gpu:0
    input x : f32[20] @gpu:0
    input unused : f32[99] @gpu:0
    a : f32[30] @gpu:0 = FC(x, w)
    b : f32[40] @gpu:0 = FC(a, w)
    a;1 = Free(a)
    n : i32[5] @cpu:0 = Count(b)
    a;2 = FC(b, w)
    output c : f32[50] @gpu:0 = FC(a;2, w)
    output c
"""


def workspace() -> Program:
    return program_of(WORKSPACE)


def test_total_is_every_storage_that_is_named_once() -> None:
    assert memory(workspace()).total == {"gpu:0": 4 * (10 + 20 + 30 + 40 + 50), "cpu:0": 20}
    assert sum(memory(TINY).total.values()) == sum(u.nbytes for u in memory(TINY).uses), "all are named"


def test_without_frees_by_use_only_free_operators_free() -> None:
    program = workspace()
    assert [stay for stay in stays(program) if stay[0] == "a"] == [("a", Lifetime(0, 2)), ("a", Lifetime(4, 6))]
    found = memory(program, frees="operators")
    gpu = [4 * (n + 99) for n in (60, 100, 70, 70, 100, 150)]
    assert found.timeline("gpu:0").tolist() == gpu
    assert found.peak == {"gpu:0": gpu[-1], "cpu:0": 20}
    assert found.total == memory(program).total
    assert found.peak["gpu:0"] > memory(program).peak["gpu:0"]


def test_high_water_is_of_what_the_operators_of_a_device_make() -> None:
    program = workspace()
    assert {u.blob: u.maker for u in memory(program).uses if u.maker is None} == {"x": None, "unused": None}
    found = memory(program, frees="operators")
    assert found.high_water == {"gpu:0": 4 * (10 + 30 + 40 + 50), "cpu:0": 20}
    ops = tuple(op._replace(device=program.step.ops[0].device) for op in program.step.ops)
    moved = memory(program.with_(step=program.step.with_(ops=ops)), frees="operators")
    assert moved.high_water["gpu:0"] == 4 * (10 + 30 + 40 + 50) + 20, "made on the host by an operator of the gpu"
    assert moved.peak == found.peak


def test_storages_of_unknown_size_are_named() -> None:
    program = program_of("input x : f32[4] @gpu:0\n a : ? @gpu:0 = FC(x)\n b : ? @gpu:0 = FC(a)")
    found = memory(program)
    assert found.unknown == ("a", "b")
    text = found.largest_text("gpu:0")
    assert "0 B  " not in text and text.endswith("not counted, their sizes not known: a and 1 more")
    assert str(found).endswith("not counted, their sizes not known: a and 1 more")
    assert "not counted" not in str(memory(TINY))


def test_what_frees_is_one_of_two_and_a_plan_says_it_itself() -> None:
    with pytest.raises(GraphirError, match="frees is 'never'"):
        memory(TINY, frees="never")  # type: ignore[arg-type]
    with pytest.raises(GraphirError, match="a plan frees its storages itself"):
        memory(tiny.plan(TINY), frees="operators")


def test_table() -> None:
    text = str(memory(tiny.plan(tiny.moved())))
    assert text.splitlines()[0] == "memory of 'tiny' at batch=6: bytes at each device's peak"
    assert text.splitlines()[1].split() == ["gpu:0", "gpu:1", "cpu:0"]
    assert "copies" in text and "of which state" in text


def test_table_of_many_devices_is_folded_to_100_columns() -> None:
    net = nets.synthetic_net(400, devices=16)
    text = str(memory(Program("wide", net.with_(ops=(), blobs={}), net, {"batch": 4096})))
    assert max(map(len, text.splitlines())) <= 100
    assert all(f"gpu:{d}" in text for d in range(16))


def brute_force(found: Memory, device: str) -> list[int]:
    return [
        sum(u.nbytes for u in found.uses if u.device == device and u.start <= at < u.end)
        for at in range(found.positions)
    ]


@pytest.mark.parametrize("seed", range(6))
def test_timeline_is_the_sum_of_what_is_live(seed: int) -> None:
    program = nets.random_program(seed, devices=3, spread=0.4)
    for subject in (program, tiny.plan(program)):
        found = memory(subject)
        for device in subject.devices:
            timeline = found.timeline(device)
            assert timeline.tolist() == brute_force(found, device)
            assert found.peak[device] == timeline.max() == sum(found.at_peak[device].values())
            parts = [found.timeline(device, category) for category in {u.category for u in found.uses}]
            assert np.array_equal(sum(parts), timeline)


@pytest.mark.parametrize("seed", range(6))
def test_every_use_is_within_the_lifetime(seed: int) -> None:
    program = nets.random_program(seed)
    net, found = program.step, liveness(program)
    for position, op in enumerate(net.ops):
        for name in (*op.inputs, *op.outputs):
            start, end = found[net.blobs[name].storage]
            assert start <= position < end
    for name in net.external_inputs:
        if net.blobs[name].role in STATE_ROLES:
            assert found[name] == Lifetime(0, len(net.ops))


def test_an_unused_result_takes_bytes_once() -> None:
    blob = tiny.program().step.blobs["h"]._replace(name="z", storage="z", shape=(BATCH, 1000), device=GPU1)
    p = tiny.inserted(TINY, 1, TINY.step.ops[1]._replace(outputs=("z",), device=GPU1), blob)
    assert memory(p).timeline("gpu:1").nonzero()[0].tolist() == [1]


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_memory_that_results_keep_beyond_their_elements_counts(mode: str, last: bool) -> None:
    """Torch shrinks the bag of each lookup, and the sizes of bags, by an element."""
    torch.manual_seed(0)
    model = torch.nn.EmbeddingBag(20, 8, mode=mode, include_last_offset=last)
    x, offsets = torch.randint(20, (12,)), torch.tensor([0, 3, 5] + [12] * last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    program = graphir.capture(
        model, (x, offsets), targets=(torch.randn(3, 8),), loss=torch.nn.functional.mse_loss, optimizer=optimizer
    )
    with runtime.Session(passes.emit(program), program.state, executor="reference") as session:
        with session.measured():
            session.step(x, offsets, torch.randn(3, 8))
        (found,) = [device for device in session.report().devices if device.device == "gpu:0"]
    assert found.peak == found.predicted_peak
