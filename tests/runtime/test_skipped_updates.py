"""Optimizer operators that are told whether a gradient was infinite or NaN: they skip, in both executors."""

import pytest
import torch
from runnable import forward_plan

from graphir import runtime

UPDATES = """
    param p : f32[2] @gpu:0
    param q : f32[2] @gpu:0
    state m : f32[2] @gpu:0
    state v : f32[2] @gpu:0
    state t : f32[] @cpu:0
    buffer lr : f64[] @cpu:0
    input x : f32[2] @gpu:0
    input found : f32[] @gpu:0
    input other : f32[] @gpu:0
    g : f32[2] @gpu:0 = aten.neg(x)
    p;1 = graphir.sgd(p, g, lr, found) {{operands="tt_tt", writes=[0:0]}}
    q;1, m;1, v;1, t;1 = graphir.adam(q, g, m, v, t, lr, {second}, form="{form}") {{operands="tttt_ttt"}}
    y : f32[2] @gpu:0 = aten.add.Tensor(p;1, q;1)
"""


def session(executor, form="for_loop", second="found"):
    plan = forward_plan(UPDATES.format(form=form, second=second), "x", "found", "other", output="y")
    state = {name: torch.zeros(2) for name in "pqmv"} | {"lr": torch.tensor(0.5, dtype=torch.float64)}
    return runtime.Session(plan, {**state, "t": torch.tensor(0.0)}, executor=executor)


@pytest.mark.parametrize("executor", ["reference", "threads"])
@pytest.mark.parametrize("form", ["for_loop", "foreach", "fused"])
def test_an_update_is_skipped_where_a_gradient_is_infinite(executor, form):
    x, no, yes = torch.tensor([1.0, -2.0]), torch.tensor(0.0), torch.tensor(1.0)
    with session(executor, form) as running:
        running.step(x, yes, no)
        assert not any(running.state()[name].any() for name in ("p", "q", "m", "v"))
        running.step(x, no, no)
        assert all(running.state()[name].all() for name in ("p", "q", "m", "v"))


@pytest.mark.parametrize("executor", ["reference", "threads"])
def test_each_update_has_its_own_reason_to_be_skipped(executor):
    with session(executor, second="other") as running:
        running.step(torch.tensor([1.0, -2.0]), torch.tensor(1.0), torch.tensor(0.0))
        assert not running.state()["p"].any() and running.state()["q"].all()
