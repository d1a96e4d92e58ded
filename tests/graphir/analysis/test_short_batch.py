"""What is left of a plan where the last replicas have no rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import models
import nets
import pytest
import torch
from graphir.runtime import Session, check
from runnable import captured
from small import program_of, two_layers
from test_shard_training import captured as captured_dlrm
from torch import nn

import graphir
from graphir import PlanError, passes
from graphir.analysis.short_batch import short_batch
from graphir.demo.dlrm import Config, Dlrm, clicks
from graphir.ir.names import prefix_of
from graphir.ir.plan import Plan
from graphir.ir.program import Program
from graphir.ir.text import instruction_text


def replicated(program: Program, count: int = 4) -> Program:
    return passes.replicate(program, devices=range(count))


def shifted(program: Program, count: int = 4) -> Program:
    """The second half of the activations of all replicas on two devices, in place where that is safe."""
    program = replicated(program, count)
    activations = passes.find_activations(program)
    shifts = {r: count + r % 2 for r in range(count)}
    moved = passes.shift_activations(program, activations[len(activations) // 2 :], shifts=shifts)
    return passes.share_storage(passes.inject_copies(moved))


def mlp() -> Program:
    """With running statistics."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))
    example = models.Example(model, (torch.randn(4, 3),), (torch.randn(4, 2),), nn.functional.mse_loss)
    return captured(example, torch.optim.SGD(model.parameters(), lr=0.1))


@cache
def dlrm(sparse: bool) -> Program:
    config = Config(sparse=sparse)
    torch.manual_seed(0)
    model = Dlrm(config)
    return captured_dlrm(config, model, torch.optim.SGD(model.parameters(), lr=0.1))


@cache
def sharded(count: int = 4, sparse: bool = False) -> Plan:
    placed = passes.shard(dlrm(sparse), {"emb_l.*": "round_robin"}, range(count))
    return passes.emit(passes.inject_copies(placed))


def test_text_of_one_replica_of_two_without_rows(golden: Callable[[str, str], None]) -> None:
    """A gradient is copied in the place of a part of its reduction, in the same lane."""
    plan = short_batch(passes.emit(replicated(mlp(), 2)), 1)
    instructions = "\n".join(instruction_text(plan, instruction) for instruction in plan.instructions)
    golden("short_batch", f"{plan.step}\n\n{instructions}")


@pytest.mark.parametrize("place", [replicated, shifted])
@pytest.mark.parametrize("seed", [0, 1, 4])  # the program of seed 3 has no step of one row
def test_what_is_left_is_what_so_many_replicas_compute(seed: int, place: Callable[[Program], Program]) -> None:
    """State and results of the replicas that have rows are those of a program that has no others."""
    program = nets.random_program(seed, mutate=seed % 4 != 0)
    whole, blobs = passes.emit(place(program)), program.step.blobs
    for count, rows in ((1, 1), (3, 6)):
        plan = short_batch(whole, count)
        graphir.verify(plan)
        assert check(plan) == []
        alone = passes.emit(replicated(program, count))
        with (
            Session(whole, program.state, executor="reference") as ours,
            Session(alone, program.state, executor="reference") as theirs,
        ):
            for step in range(2):
                given = nets.example_inputs(program, seed=step, batch=rows)
                assert torch.equal(ours.step(*given).nan_to_num(), theirs.step(*given).nan_to_num())
            for replica in range(4):
                mine, expected = ours.state(replica), theirs.state(min(replica, count - 1))
                for name, tensor in expected.items():
                    kept = replica >= count and name in blobs and blobs[name].role == "buffer"
                    tensor = program.state[name] if kept else tensor
                    assert torch.equal(mine[name].nan_to_num(), tensor.nan_to_num()), (replica, name)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("sparse", [False, True])
def test_sharded_plans_are_sound(count: int, sparse: bool) -> None:
    plan = short_batch(sharded(sparse=sparse), count)
    graphir.verify(plan)
    assert check(plan) == []
    assert plan.program.sharing == ("gpu_0/", "gpu_1/", "gpu_2/", "gpu_3/")[:count]
    (join,) = [op for op in plan.step.ops if op.outputs[0] == "gpu_2/emb_l.2_grad"]
    (split,) = [op for op in plan.step.ops if op.inputs == ("gpu_2/emb_l.2",)]
    assert len(join.inputs) == len(split.outputs) == count


@pytest.mark.parametrize("executor", ["reference", "threads", "adversarial"])
@pytest.mark.parametrize("sparse", [False, True])
def test_sharded_plans_compute_what_so_many_replicas_do(sparse: bool, executor: Any) -> None:
    config, program = Config(sparse=sparse), dlrm(sparse)
    placement = {"emb_l.0": 1, "emb_l.1": 0, "emb_l.2": 1}
    ours, theirs = (
        Session(
            passes.emit(passes.inject_copies(passes.shard(program, placement, devices))),
            program.state,
            binding="cpu",
            executor=executor,
        )
        for devices in (range(4), range(2))
    )
    with ours, theirs:
        for step in range(4):
            batch = clicks(config, 2, step)
            loss = ours.step(*batch.inputs, batch.target)
            assert torch.equal(loss, theirs.step(*batch.inputs, batch.target))
        for replica in range(4):
            expected = theirs.state_dict(min(replica, 1))
            for name, tensor in ours.state_dict(replica).items():
                assert torch.equal(tensor, expected[name]), (replica, name)


@pytest.mark.parametrize("plan", [lambda: passes.emit(shifted(mlp())), sharded], ids=["shifted", "sharded"])
def test_a_replica_without_rows_only_receives_and_updates(plan: Callable[[], Plan]) -> None:
    whole = plan()
    short = short_batch(whole, 2)
    for op in short.step.ops:
        own = prefix_of(op.outputs[0]) in ("gpu_2/", "gpu_3/") and "emb_l" not in op.outputs[0]
        assert not (own and op.phase in ("forward", "backward")), op
    updates = [[op for op in p.step.ops if op.phase == "update"] for p in (whole, short)]
    assert [op.outputs for op in updates[0]] == [op.outputs for op in updates[1]]
    assert "gpu_3/batch" in str(whole) and "gpu_3/batch" not in str(short)


def test_transfers_stay_in_groups() -> None:
    """Waits are for several reductions, or several pieces of placed modules, at once, as in the plan."""
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(20)])
    program = graphir.capture(
        model,
        (torch.randn(4, 4),),
        targets=(torch.randn(4, 4),),
        loss=nn.functional.mse_loss,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    )
    for whole in (passes.emit(replicated(program)), sharded()):
        waits = [sum(i.kind == "wait" for i in plan.instructions) for plan in (whole, short_batch(whole, 3))]
        assert waits[1] <= waits[0]


@pytest.mark.parametrize(
    ("wanted", "having", "left"),
    [
        ("_tt", 2, [("AllReduce", ("gpu_0/g", "gpu_1/g"), ("gpu_1/s",)), ("Copy", ("gpu_1/s",), ("gpu_2/s",))]),
        ("t_t", 2, [("AllReduce", ("gpu_0/g", "gpu_1/g"), ("gpu_0/s",)), ("Copy", ("gpu_0/s",), ("gpu_2/s",))]),
        ("t_t", 1, [("AllReduce", ("gpu_0/g",), ("gpu_0/s",)), ("Copy", ("gpu_0/s",), ("gpu_2/s",))]),
    ],
)
def test_a_reduction_hands_its_result_to_those_that_want_it(
    wanted: str, having: int, left: list[tuple[str, tuple[str, ...], tuple[str, ...]]]
) -> None:
    takes = [r for r in range(3) if wanted[r] == "t"]
    body = "\n".join(
        f"input gpu_{r}/x : f32[gpu_{r}/batch,2] @gpu:{r}\n"
        f"gpu_{r}/g : f32[2] @gpu:{r} = aten.sum.dim_IntList(gpu_{r}/x, dim=[0]) {{phase=backward}}"
        for r in range(3)
    )
    made = ", ".join(f"gpu_{r}/s : f32[2] @gpu:{r}" if r in takes else "_" for r in range(3))
    body += f"\n[{made}] = AllReduce([gpu_0/g, gpu_1/g, gpu_2/g]) {{phase=reduce, device=gpu:0}}\n"
    body += "\n".join(
        f"param gpu_{r}/w : f32[2] @gpu:{r}\n"
        f"gpu_{r}/w;1 = aten.add_.Tensor(gpu_{r}/w, gpu_{r}/s) {{phase=update, writes=[0:0]}}"
        for r in takes
    )
    dims, replicas = {f"gpu_{r}/batch": 2 for r in range(3)}, ("gpu_0/", "gpu_1/", "gpu_2/")
    plan = short_batch(passes.emit(program_of(body, dims=dims, replicas=replicas)), having)
    assert [(op.type, op.inputs, op.outputs) for op in plan.step.ops if op.phase == "reduce"] == left
    assert check(plan) == []


def test_a_reduction_takes_no_gradient_of_a_replica_without_rows() -> None:
    """Not even one that is there without them."""
    body = "\n".join(
        f"""
        param gpu_{r}/w : f32[2] @gpu:{r}
        input gpu_{r}/x : f32[gpu_{r}/batch,2] @gpu:{r}
        gpu_{r}/g : f32[2] @gpu:{r} = aten.neg(gpu_{r}/w) {{phase=backward}}
        """
        for r in range(2)
    )
    body += """
        [gpu_0/s : f32[2] @gpu:0, gpu_1/s : f32[2] @gpu:1] = AllReduce([gpu_0/g, gpu_1/g]) {phase=reduce}
        gpu_0/w;1 = aten.add_.Tensor(gpu_0/w, gpu_0/s) {phase=update, writes=[0:0]}
        gpu_1/w;1 = aten.add_.Tensor(gpu_1/w, gpu_1/s) {phase=update, writes=[0:0]}
    """
    program = program_of(body, dims={"gpu_0/batch": 2, "gpu_1/batch": 2}, replicas=("gpu_0/", "gpu_1/"))
    plan = short_batch(passes.emit(program), 1)
    assert [(op.type, op.inputs, op.outputs) for op in plan.step.ops if op.phase in ("backward", "reduce")] == [
        ("aten.neg.default", ("gpu_0/w",), ("gpu_0/g",)),
        ("AllReduce", ("gpu_0/g",), ("gpu_0/s",)),
        ("Copy", ("gpu_0/s",), ("gpu_1/s",)),
    ]
    assert check(plan) == []


def test_a_state_that_only_the_forward_of_a_left_out_replica_writes_stays() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 2)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls.add_(1)
            return self.fc(x) * self.calls

    program = graphir.capture(Counting(), (torch.randn(4, 3),))
    plan = short_batch(passes.emit(replicated(program, 2)), 1)
    assert [op.outputs for op in plan.step.ops if "calls" in op.outputs[0]] == [("gpu_0/calls",)]
    assert "gpu_1/calls" in plan.step.external_inputs


def test_updates_by_what_is_not_reduced_are_refused() -> None:
    body = "\n".join(
        f"""
        param gpu_{r}/w : f32[2] @gpu:{r}
        input gpu_{r}/x : f32[gpu_{r}/batch,2] @gpu:{r}
        gpu_{r}/g : f32[2] @gpu:{r} = aten.sum.dim_IntList(gpu_{r}/x, dim=[0]) {{phase=backward}}
        gpu_{r}/w;1 = aten.add_.Tensor(gpu_{r}/w, gpu_{r}/g) {{phase=update, writes=[0:0]}}
        """
        for r in range(2)
    )
    program = program_of(body, dims={"gpu_0/batch": 2, "gpu_1/batch": 2}, replicas=("gpu_0/", "gpu_1/"))
    with pytest.raises(PlanError, match="an update reads what a replica without rows does not compute") as caught:
        short_batch(passes.emit(program), 1)
    assert "gpu_1/w;1 : f32[2] @gpu:1 = aten.add_.Tensor(gpu_1/w, gpu_1/g)" in caught.value.at
    assert caught.value.fix == "give each replica rows"


def test_sizes_that_are_fixed_are_refused() -> None:
    with pytest.raises(PlanError, match="replica gpu_0/ of program 'small' has no batch dimension") as caught:
        short_batch(passes.emit(replicated(two_layers(), 2)), 1)
    assert caught.value.fix == "capture the model so that its sizes follow the batch"
