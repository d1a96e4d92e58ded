"""The order in which emit issues instructions."""

from __future__ import annotations

import random
from itertools import pairwise

import nets
import pytest
import torch
from small import program_of, two_layers
from torch import nn

import graphir
from graphir import passes
from graphir.errors import VerifyError
from graphir.ir.plan import Instruction, Plan
from graphir.ir.program import Program

WIDTH = 1024
"""Layers of so many rows and columns have gradients that are not small."""


def wide(layers: int, clip_grad_norm: float | None = None) -> Program:
    """Two replicas of some large layers."""
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)])
    program = graphir.capture(
        model,
        inputs=(torch.randn(2, WIDTH),),
        loss=lambda y: y.square().mean(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        clip_grad_norm=clip_grad_norm,
    )
    return passes.replicate(program, devices=[0, 1])


def places(plan: Plan, *, phase: str, kind: str = "") -> list[int]:
    """Where in the plan the operators of a phase are issued."""
    return [
        position
        for position, i in enumerate(plan.instructions)
        if i.op >= 0 and plan.step.ops[i.op].phase == phase and kind in ("", i.kind)
    ]


def executed(plan: Plan) -> list[Instruction]:
    return [i for i in plan.instructions if i.op >= 0]


def freed(plan: Plan, storage: str) -> int:
    return next(p for p, i in enumerate(plan.instructions) if i.storage == storage)


def made(plan: Plan, blob: str, part: int = 0) -> int:
    ops = plan.step.ops
    return next(
        p for p, i in enumerate(plan.instructions) if i.op >= 0 and blob in ops[i.op].outputs and i.part == part
    )


@pytest.mark.parametrize("seed", range(10))
def test_without_reductions_operators_keep_the_order_of_the_program(seed: int) -> None:
    program = nets.random_program(seed)
    chosen = passes.find_activations(program)
    for placed in (program, passes.shift_activations(program, chosen[len(chosen) // 2 :], shifts={0: 1})):
        plan = passes.emit(passes.share_storage(passes.inject_copies(placed)))
        runs = [i.op for i in executed(plan) if i.kind == "run"]
        assert runs == sorted(runs)


def test_large_gradients_are_reduced_while_earlier_ones_are_computed() -> None:
    plan = passes.emit(wide(4))
    backward, reductions = places(plan, phase="backward"), places(plan, phase="reduce")
    assert sum(place < backward[-1] for place in reductions) == 3 * 2
    for layer in (3, 2, 1):
        reduced = made(plan, f"gpu_0/{layer}.weight_grad_reduced")
        assert made(plan, f"gpu_1/{layer}.weight_grad") < reduced < made(plan, f"gpu_0/{layer - 1}.weight_grad")


def test_a_parameter_is_updated_once_its_reduction_had_time() -> None:
    plan = passes.emit(wide(4))
    for layer in (3, 2, 1):
        updated = made(plan, f"gpu_0/{layer}.weight")
        assert made(plan, f"gpu_0/{layer - 1}.weight_grad_reduced") < updated
        assert layer == 1 or updated < made(plan, f"gpu_0/{layer - 2}.weight_grad")


def test_gradients_are_freed_before_the_backward_ends() -> None:
    program = wide(6)
    plan = passes.emit(program)
    end = places(plan, phase="backward")[-1]
    for layer in (5, 4, 3, 2):
        assert freed(plan, f"gpu_0/{layer}.weight_grad_reduced") < end
    gradient = WIDTH * WIDTH * 4
    late, early = graphir.memory(program), graphir.memory(plan)
    assert late.peak["gpu:0"] - late.state["gpu:0"] > 7 * gradient
    assert early.peak["gpu:0"] - early.state["gpu:0"] < 5 * gradient


def test_what_needs_all_gradients_comes_after_all_of_them() -> None:
    plan = passes.emit(wide(4, clip_grad_norm=1.0))
    updates = [made(plan, f"gpu_0/{layer}.weight") for layer in range(4)]
    assert min(updates) > places(plan, phase="reduce")[-1]
    assert places(plan, phase="reduce")[0] < places(plan, phase="backward")[-1]
    graphir.verify(plan)


def test_small_gradients_are_gathered_and_waited_for_as_one() -> None:
    plan = passes.emit(passes.replicate(two_layers(), devices=[0, 1]))
    copy_in = [i.kind for i in plan.lanes["gpu:0.copy_in"]]
    assert copy_in == ["wait", "wait", "collective", "collective", "record"]
    joined = [i.kind for i in plan.lanes["gpu:0.compute"] if i.kind != "free"][-5:]
    assert joined == ["record", "wait", "run", "run", "wait"]


SKIPS = """
    input x : f32[{n}] @gpu:0
    a : f32[{n}] @gpu:0, a_indices : i64[{n}] @gpu:0 = aten.sort(x)
    b : f32[{n}] @gpu:1 = aten.relu(a)
    c : i64[{n}] @gpu:1 = aten.neg(a_indices)
"""


def test_small_copies_that_are_ready_together_have_one_wait_and_one_record() -> None:
    plan = passes.emit(passes.inject_copies(program_of(SKIPS.format(n=8))))
    assert [i.kind for i in plan.lanes["gpu:1.copy_in"]] == ["wait", "copy", "copy", "record"]
    assert [i.kind for i in plan.lanes["gpu:1.compute"]][:3] == ["wait", "run", "free"]


def test_large_copies_are_waited_for_one_by_one() -> None:
    plan = passes.emit(passes.inject_copies(program_of(SKIPS.format(n=1 << 16))))
    assert [i.kind for i in plan.lanes["gpu:1.copy_in"]] == ["wait", "copy", "record", "copy", "record"]


def chain(length: int) -> Program:
    """A value that is copied to a device where others are computed first."""
    body = ["input x : f32[8] @gpu:0", "input y : f32[8] @gpu:1", "a : f32[8] @gpu:0 = aten.relu(x)"]
    body += [f"y{i} : f32[8] @gpu:1 = aten.neg({f'y{i - 1}' if i else 'y'})" for i in range(length)]
    return passes.inject_copies(
        program_of("\n".join([*body, f"b : f32[8] @gpu:1 = aten.add.Tensor(a, y{length - 1})"]))
    )


@pytest.mark.parametrize(("length", "before"), [(3, 0), (8, 0), (20, 12)])
def test_a_copy_is_issued_early_but_not_long_before_its_place(length: int, before: int) -> None:
    plan = passes.emit(chain(length))
    copied = made(plan, "a_gpu_1")
    assert sum(i.lane == "gpu:1.compute" and i.kind == "run" for i in plan.instructions[:copied]) == before


def test_no_lane_waits_for_a_transfer_that_is_just_issued_only_to_free_its_source() -> None:
    plan = passes.emit(passes.inject_copies(program_of("""
        input x : f32[8] @gpu:0
        a : f32[8] @gpu:0 = aten.relu(x)
        b : f32[8] @gpu:1 = aten.neg(a)
        c : f32[8] @gpu:0 = aten.neg(x)
        d : f32[8] @gpu:0 = aten.add.Tensor(b, c)
    """)))  # fmt: skip
    kinds = [i.kind for i in plan.lanes["gpu:0.compute"]]
    assert kinds == ["run", "record", "run", "free", "wait", "free", "wait", "run", "free", "free", "free"]


def test_every_order_that_respects_the_hazards_is_sound_and_no_other() -> None:
    rng, found = random.Random(0), {True: 0, False: 0}
    for seed in range(30):
        program = nets.random_program(seed % 20)
        plan = passes.emit(program)
        runs = [i for i in plan.instructions if i.kind == "run"]
        for a, b in [sorted(rng.sample(range(len(runs)), 2)) for _ in range(3)]:
            moved = [*runs[:a], *runs[a + 1 : b + 1], runs[a], *runs[b + 1 :]]
            sound = respects_hazards(program, [i.op for i in moved])
            found[sound] += 1
            if sound:
                graphir.verify(plan.with_(instructions=tuple(moved)))
            else:
                with pytest.raises(VerifyError, match=r"before it is made|used before a write|used after a write"):
                    graphir.verify(plan.with_(instructions=tuple(moved)))
    assert min(found.values()) > 5


def respects_hazards(program: Program, order: list[int]) -> bool:
    """Whether any two operators that touch one storage, one of them to write it, keep their order."""
    net, at = program.step, {op: place for place, op in enumerate(order)}

    def touched(i: int) -> tuple[set[str], set[str]]:
        op = net.ops[i]
        storages = {net.blobs[name].storage for name in (*op.inputs, *op.outputs)}
        views = {output for output, _ in op.effects.views}
        return storages, {net.blobs[name].storage for k, name in enumerate(op.outputs) if k not in views}

    uses = [touched(i) for i in range(len(net.ops))]
    for i in range(len(net.ops)):
        for j in range(i):
            clash = uses[i][0] & uses[j][1] or uses[i][1] & uses[j][0]
            viewed = any(output in net.ops[i].inputs for output in net.ops[j].outputs)
            if (clash or viewed) and at[j] > at[i]:
                return False
    return True


def test_the_order_is_the_same_each_time() -> None:
    program = passes.replicate(nets.random_program(4), devices=[0, 1, 2])
    plans = [passes.emit(program) for _ in range(3)]
    assert all(a.instructions == b.instructions for a, b in pairwise(plans))


@pytest.mark.parametrize("seed", range(10))
def test_copies_that_stand_early_are_issued_together_and_before_what_overwrites_their_source(seed: int) -> None:
    """Each copy of a placed program is put right behind what makes its source."""
    program = nets.random_program(seed)
    chosen = passes.find_activations(program)
    placed = passes.inject_copies(passes.shift_activations(program, chosen[len(chosen) // 2 :], shifts={0: 1}))
    ops = list(placed.step.ops)
    for copy in [op for op in ops if op.type == "Copy"]:
        at = ops.index(copy)
        storage = placed.step.blobs[copy.inputs[0]].storage
        made = [i for i in range(at) if storage in {placed.step.blobs[name].storage for name in ops[i].outputs}]
        ops.insert(made[-1] + 1 if made else 0, ops.pop(at))
    early = placed.with_(step=placed.step.with_(ops=tuple(ops)))
    plan = passes.emit(early)
    order = [i.op for i in executed(plan)]
    assert sorted(order) == list(range(len(ops)))
    assert respects_hazards(early, order)
    runs = [i.op for i in executed(plan) if i.kind == "run"]
    assert runs == sorted(runs)


def test_small_copies_wait_for_the_first_that_is_due() -> None:
    """Four pieces that one operator reads cross as a group, behind a large one that is issued once it is there."""
    pieces = dict.fromkeys("abcd", 64) | {"large": 1 << 18}
    body = "\n".join(
        f"{name} : f32[{size}] @gpu:0 = aten.relu(x{size})\n{name}_gpu_1 : f32[{size}] @gpu:1 = Copy({name})"
        for name, size in pieces.items()
    )
    first = "input x64 : f32[64] @gpu:0\ninput x262144 : f32[262144] @gpu:0\ninput y0 : f32[2] @gpu:1\n"
    others = "\n".join(f"y{i + 1} : f32[2] @gpu:1 = aten.relu(y{i})" for i in range(12))
    joined = ", ".join(f"{name}_gpu_1" for name in pieces)
    last = f"output joined : f32[{sum(pieces.values())}] @gpu:1 = aten.cat([{joined}])"
    plan = passes.emit(program_of(f"{first}{body}\n{others}\n{last}"))
    copies = [plan.step.ops[i.op].inputs[0] for i in executed(plan) if i.kind == "copy"]
    assert copies == ["large", "a", "b", "c", "d"]
    assert sum(i.kind == "wait" for i in plan.instructions if i.lane == "gpu:1.compute") == 1
