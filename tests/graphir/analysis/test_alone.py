"""Plans of steps that one replica takes alone: sound wherever the state is, and what does not fit is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphir.runtime import check
from torch import Tensor, nn

import graphir
from graphir import CoverageError, passes
from graphir.analysis.alone import alone
from graphir.ir.program import Program


class Rows(nn.Module):
    """One row of it is a view where several are copied."""

    def __init__(self, norm: bool = False, max_norm: float | None = None) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4, max_norm=max_norm)
        self.norm = nn.BatchNorm1d(4) if norm else nn.Identity()
        self.fc = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        found = self.norm(self.table(x).transpose(1, 2))
        return self.fc(found.permute(2, 0, 1).reshape(-1, 4).relu())


def captured(model: nn.Module, trained: bool = True) -> Program:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) if trained else None
    inputs = (torch.randint(0, 7, (4, 3)),)
    program = graphir.capture(model, inputs, loss=lambda y: y.square().mean(), optimizer=optimizer)
    assert [str(guard) for guard in program.covers.guards] == ["batch>=2"]
    return program


def recorded(program: Program, rows: int = 1) -> Program:
    assert program.witness is not None
    return program.witness.recorded({"batch": rows})


def sharded(program: Program) -> Program:
    return passes.inject_copies(passes.shard(program, {"table": 1}, [0, 1, 2]))


def split(program: Program, kind: str, blocks: list[int]) -> Program:
    return passes.inject_copies(passes.shard(program, {"table": (kind, blocks)}, [0, 1]))


def parked(program: Program, place: str) -> Program:
    replicated = passes.replicate(program, [0, 1])
    state = "**.momentum_buffer"
    return passes.park(replicated, state, place) if program.interface.optimizers else replicated


PLACED: dict[str, Callable[[Program], Program]] = {
    "captured": lambda program: program,
    "replicated": lambda program: passes.replicate(program, [1, 0]),
    "sharded": sharded,
    "by rows": lambda program: split(program, "rows", [0, 1]),
    "by columns": lambda program: split(program, "columns", [1, 0]),
    "synchronised": lambda program: passes.sync_batch_norm(passes.replicate(program, [0, 1])),
    "state on the host": lambda program: parked(program, "cpu"),
    "state on a peer": lambda program: parked(program, "gpu:2"),
}


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("placed", PLACED)
def test_plans_are_sound(placed: str, trained: bool) -> None:
    program = captured(Rows(norm=True), trained)
    whole = PLACED[placed](program)
    plan = alone(passes.emit(whole), recorded(program))
    assert check(plan) == []
    graphir.verify(plan)
    assert plan.dims == {f"{whole.replicas[0]}batch": 1} and len(plan.program.sharing) == 1


def test_others_get_what_the_update_has_made_and_keep_their_buffers() -> None:
    program = captured(Rows(norm=True))
    plan = alone(passes.emit(passes.replicate(program, [0, 1])), recorded(program))
    copies = [op for op in plan.step.ops if op.type == "Copy"]
    state = ["table.weight", "norm.weight", "norm.bias", "fc.weight", "fc.bias"]
    made = {f"gpu_1/{name}" for param in state for name in (param, f"{param}.momentum_buffer")}
    assert {op.outputs[0] for op in copies} == made and all(op.phase == "update" for op in copies)


def test_the_step_runs_where_most_state_is_and_other_state_is_copied_there_and_back() -> None:
    program = captured(Rows())
    plan = alone(passes.emit(sharded(program)), recorded(program))
    names = [f"gpu_0/fc.{name}{kind}" for name in ("weight", "bias") for kind in ("", ".momentum_buffer")]
    there = {op.inputs[0] for op in plan.step.ops if op.type == "Copy" and op.phase == "forward"}
    back = {op.outputs[0] for op in plan.step.ops if op.type == "Copy" and op.phase == "update"}
    assert there == set(names) and set(names) < back
    assert {op.device for op in plan.step.ops if op.phase == "backward"} == {"gpu:1"}


def renormed() -> tuple[Program, Program]:
    program = captured(Rows(max_norm=0.5))
    return program, passes.replicate(program, [0, 1])


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (renormed, "'table.weight' is overwritten before its update"),
    ],
)
def test_what_one_replica_cannot_take_is_refused(made: Any, text: str) -> None:
    program, whole = made()
    with pytest.raises(CoverageError, match=f"no replica can take the step alone: {text}") as e:
        alone(passes.emit(whole), recorded(program))
    assert e.value.fix == "give more rows"


def test_the_recording_of_another_step_is_refused() -> None:
    program, other = captured(Rows()), captured(Rows(), trained=False)
    with pytest.raises(CoverageError, match="takes or returns something else than the plan's"):
        alone(passes.emit(program), recorded(other))
