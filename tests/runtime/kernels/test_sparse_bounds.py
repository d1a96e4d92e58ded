"""Indices that a plan makes up lead kernels of sparse gradients nowhere but into their tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from graphir.runtime import Session
from runnable import forward_plan

import graphir
from graphir.errors import RunError
from graphir.ir.plan import Plan

UPDATES = {
    "graphir.sparse_sgd": ((), "w;1 = graphir.sparse_sgd(w, i, v, lr)"),
    "graphir.sparse_adagrad": (
        ("sum : f32[4,2]", "count : f32[]"),
        "w;1, sum;1, count;1 = graphir.sparse_adagrad(w, i, v, sum, count, lr)",
    ),
    "graphir.sparse_adam": (
        ("m : f32[4,2]", "s : f32[4,2]", "count : f32[]"),
        "w;1, m;1, s;1, count;1 = graphir.sparse_adam(w, i, v, m, s, count, lr)",
    ),
}


def plan_of(kind: str, index: int) -> tuple[Plan, dict[str, torch.Tensor]]:
    """One update of a parameter of four rows at an index that the plan makes up, and the state."""
    states, update = UPDATES[kind]
    lines = [
        "param w : f32[4,2] @cpu:0",
        *(f"state {state} @cpu:0" for state in states),
        f"i : i64[1,3] @cpu:0 = aten.full(size=[1, 3], fill_value={index}, dtype=i64)",
        "v : f32[3,2] @cpu:0 = aten.full(size=[3, 2], fill_value=1.0)",
        "lr : f64[] @cpu:0 = aten.full(size=[], fill_value=0.5, dtype=f64)",
        f"{update} {{phase=update}}",
    ]
    shapes = {"w": (4, 2), "sum": (4, 2), "m": (4, 2), "s": (4, 2), "count": ()}
    state = {name: torch.zeros(shapes[name]) for name in ("w", *(text.partition(" ")[0] for text in states))}
    return forward_plan("\n".join(lines), output="lr", state=state), state


@pytest.mark.parametrize("executor", ["reference", "serial"])
@pytest.mark.parametrize("index", [2_000_000_000, 4, -2, -(2**62)])
@pytest.mark.parametrize("kind", UPDATES)
def test_an_index_beyond_the_rows_is_refused_and_named(kind: str, index: int, executor: str) -> None:
    plan, state = plan_of(kind, index)
    with Session(plan, state, executor=executor) as session:
        with pytest.raises(RunError, match=f"the sparse index {index} is out of bounds for 4 rows") as caught:
            session.step()
        assert kind in caught.value.what
        assert isinstance(caught.value.__cause__, IndexError)


@pytest.mark.parametrize("index", [3, 0, -1])
@pytest.mark.parametrize("kind", UPDATES)
def test_rows_and_empty_slots_are_taken(kind: str, index: int) -> None:
    plan, state = plan_of(kind, index)
    with Session(plan, state) as session:
        session.step()
        changed = session.state()["w"].ne(0).any(1)
    assert changed.tolist() == [row == index for row in range(4)]


@pytest.mark.parametrize("index", [2_000_000_000, -2])
def test_a_sum_of_sparse_gradients_is_of_rows_that_there_are(index: int) -> None:
    body = f"""
        i : i64[1,3] @cpu:0 = aten.full(size=[1, 3], fill_value={index}, dtype=i64)
        v : f32[3,2] @cpu:0 = aten.full(size=[3, 2], fill_value=1.0)
        j : i64[1,6] @cpu:0, u : f32[6,2] @cpu:0 = graphir.sparse_sum([v, v], [i, i], rows=4)
    """
    plan = forward_plan(body, output="j")
    with Session(plan, {}) as session, pytest.raises(RunError, match=f"index {index} is out of bounds for 4 rows"):
        session.step()


def test_indices_of_a_strangers_file_are_refused(tmp_path: Path) -> None:
    plan, state = plan_of("graphir.sparse_sgd", 2_000_000_000)
    plan.save(tmp_path / "plan.json")
    loaded = graphir.load(tmp_path / "plan.json")
    assert isinstance(loaded, Plan)
    with (
        Session(loaded, state) as session,
        pytest.raises(RunError, match="index 2000000000 is out of bounds"),
    ):
        session.step()
