"""The receive buffers that emit gives to copies."""

from __future__ import annotations

from pathlib import Path

import nets
import pytest
import torch
from graphir.runtime import Session
from runnable import forward_plan
from small import program_of

import graphir
from graphir import passes
from graphir.ir.plan import Plan

SIZES = """
    input x : f32[{first}] @gpu:0
    input y : f32[{second}] @gpu:0
    x_gpu_1 : f32[{first}] @gpu:1 = Copy(x)
    a : f32[] @gpu:1 = aten.sum(x_gpu_1)
    a_gpu_0 : f32[] @gpu:0 = Copy(a)
    c : f32[{second}] @gpu:0 = aten.mul.Tensor(y, a_gpu_0)
    c_gpu_1 : f32[{second}] @gpu:1 = Copy(c)
    d : f32[{second}] @gpu:1 = aten.exp(c_gpu_1)
"""

RELAY = """
    input x : f32[8] @gpu:0
    a : f32[8] @gpu:0 = aten.relu(x)
    b : f32[8] @gpu:1 = aten.neg(a)
    c : f32[8] @gpu:0 = aten.exp(b)
    d : f32[8] @gpu:1 = aten.neg(c)
    e : f32[8] @gpu:0 = aten.exp(d)
    f : f32[{last}] @gpu:1 = aten.{op}
    output f
"""


def relay(last: int = 8, op: str = "neg(e)") -> Plan:
    """A value that goes back and forth between two devices."""
    return passes.emit(passes.inject_copies(program_of(RELAY.format(last=last, op=op))))


def test_copies_take_turns() -> None:
    plan = relay()
    assert plan.buffers == {"a_gpu_1": 0, "b_gpu_0": 0, "c_gpu_1": 0, "d_gpu_0": 0, "e_gpu_1": 0}


def test_a_copy_waits_for_the_last_use_of_what_its_buffer_held() -> None:
    plan = relay()
    lane = [f"{i.kind} {i.event.blob if i.event else ''}" for i in plan.lanes["gpu:1.copy_in"] if i.kind != "record"]
    assert lane == ["wait a", "copy ", "wait c", "copy ", "wait e", "copy "]  # c and e are made after b and d are
    both = passes.emit(passes.inject_copies(program_of("""
        input x : f32[8] @gpu:0
        input y : f32[8] @gpu:0
        a : f32[8] @gpu:1 = aten.relu(x)
        b0 : f32[8] @gpu:1 = aten.neg(a)
        b1 : f32[8] @gpu:1 = aten.neg(b0)
        b2 : f32[8] @gpu:1 = aten.neg(b1)
        b3 : f32[8] @gpu:1 = aten.neg(b2)
        b4 : f32[8] @gpu:1 = aten.neg(b3)
        b5 : f32[8] @gpu:1 = aten.neg(b4)
        b6 : f32[8] @gpu:1 = aten.neg(b5)
        b7 : f32[8] @gpu:1 = aten.neg(b6)
        b8 : f32[8] @gpu:1 = aten.neg(b7)
        c : f32[8] @gpu:1 = aten.add.Tensor(y, b8)
        output c
    """)))  # fmt: skip
    assert both.buffers == {"x_gpu_1": 0, "y_gpu_1": 0}
    lane = [f"{i.kind} {i.event.blob if i.event else ''}" for i in both.lanes["gpu:1.copy_in"] if i.kind != "record"]
    assert lane == ["copy ", "wait x_gpu_1", "copy "]


@pytest.mark.parametrize(("first", "second"), [(8, 3), (3, 8)])
@pytest.mark.parametrize("executor", ["reference", "serial", "threads", "adversarial"])
def test_copies_of_several_sizes_share_what_the_largest_takes(first: int, second: int, executor: str) -> None:
    plan = forward_plan(SIZES.format(first=first, second=second), "x", "y", output="d")
    assert plan.buffers == {"x_gpu_1": 0, "a_gpu_0": 0, "c_gpu_1": 0}
    x, y = torch.randn(first), torch.randn(second)
    with Session(plan, {}, executor=executor) as session:  # type: ignore[arg-type]
        for _ in range(2):
            assert torch.equal(session.step(x, y), (y * x.sum()).exp())
    held = {use.device: use.nbytes for use in graphir.memory(plan).uses if use.category == "receive buffers"}
    assert held == {"gpu:0": 4, "gpu:1": 32}


def test_a_copy_takes_the_smallest_buffer_that_is_large_enough() -> None:
    plan = passes.emit(passes.inject_copies(program_of("""
        input x : f32[8] @gpu:0
        input y : f32[4] @gpu:0
        a : f32[8] @gpu:1 = aten.add.Tensor(x, x)
        b : f32[4] @gpu:1 = aten.add.Tensor(y, y)
        c : f32[] @gpu:1 = aten.sum(a)
        d : f32[] @gpu:1 = aten.sum(b)
        e : f32[] @gpu:1 = aten.add.Tensor(c, d)
        e_0 : f32[] @gpu:0 = aten.neg(e)
        f : f32[4] @gpu:0 = aten.mul.Tensor(y, e_0)
        g : f32[8] @gpu:0 = aten.mul.Tensor(x, e_0)
        h : f32[4] @gpu:1 = aten.neg(f)
        i : f32[8] @gpu:1 = aten.neg(g)
    """)))  # fmt: skip
    assert plan.buffers == {"x_gpu_1": 0, "y_gpu_1": 1, "e_gpu_0": 0, "f_gpu_1": 1, "g_gpu_1": 0}


def test_what_is_used_together_has_a_buffer_of_its_own() -> None:
    plan = passes.emit(passes.inject_copies(program_of("""
        input x : f32[8] @gpu:0
        input y : f32[8] @gpu:0
        input z : f32[4] @gpu:0
        a : f32[8] @gpu:1 = aten.add.Tensor(x, y)
        b : f32[4] @gpu:1 = aten.relu(z)
    """)))  # fmt: skip
    assert plan.buffers == {"x_gpu_1": 0, "y_gpu_1": 1, "z_gpu_1": 2}


def test_what_the_step_hands_back_or_keeps_has_no_buffer() -> None:
    plan = passes.emit(program_of("""
        buffer s : f32[8] @gpu:1
        input x : f32[8] @gpu:0
        s;1 = Copy(x) {device=gpu:1}
        y : f32[8] @gpu:1 = Copy(x)
        output y
    """))  # fmt: skip
    assert plan.buffers == {}


@pytest.mark.parametrize("seed", range(12))
def test_buffers_of_random_plans_are_sound_and_kept_by_texts_and_files(seed: int, tmp_path: Path) -> None:
    program = passes.replicate(nets.random_program(seed), devices=[0, 1])
    chosen = passes.find_activations(program)
    program = passes.shift_activations(program, chosen[len(chosen) // 2 :], shifts={0: 2, 1: 3})
    plan = passes.emit(passes.share_storage(passes.inject_copies(program)))
    assert plan.buffers
    graphir.verify(plan)
    assert graphir.parse(str(plan)) == plan
    plan.save(tmp_path / "plan.json")
    assert graphir.load(tmp_path / "plan.json") == plan
