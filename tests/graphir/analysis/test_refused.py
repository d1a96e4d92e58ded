"""Figures for sizes that no session runs say so."""

import json

import pytest
import torch
from torch import nn

import graphir
from graphir import passes, runtime
from graphir.errors import SessionError


class Branching(nn.Module):
    def forward(self, x):
        return x.softmax(1) if x.shape[1] <= 512 else x.sigmoid()


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(7, 3)

    def forward(self, lookups, offsets):
        return self.bag(lookups, offsets)


def branching():
    return graphir.capture(Branching(), (torch.randn(4, 10),), batch_dims={0: "batch", 1: "length"})


@pytest.mark.parametrize(("dim", "shape"), [("batch", (0, 10)), ("length", (4, 0)), ("length", (4, 600))])
def test_sizes_that_no_session_runs_are_told(dim, shape):
    dims = {dim: shape[dim == "length"]}
    plan = passes.emit(branching())
    for found in (graphir.memory(plan, dims), graphir.memory(plan.program, dims)):
        assert "no session runs this step: " + found.refused in str(found) and found.refused
    times = graphir.estimate(plan, "h200x8", dims=dims, profile=None)
    assert times.refused == found.refused and times.refused in str(times)
    assert json.loads(times.to_json())["refused"] == times.refused
    with runtime.Session(plan, {}) as session, pytest.raises(SessionError):
        session.step(torch.randn(shape))


def test_sizes_that_a_session_runs_are_not():
    plan = passes.emit(branching())
    for dims in ({}, {"batch": 1, "length": 1}, {"length": 512}):
        assert not graphir.memory(plan, dims).refused and "no session" not in str(graphir.memory(plan, dims))
        assert not graphir.estimate(plan, "h200x8", dims=dims, profile=None).refused


def test_a_replica_has_rows():
    plan = passes.emit(passes.replicate(branching(), [0, 1]))
    assert graphir.memory(plan, {"gpu_1/batch": 0}).refused == "gpu_1/batch=0, and gpu_1/x has at least one row"
    assert graphir.memory(plan, {"gpu_1/length": 513}).refused.startswith("gpu_1/length=513 does not meet")


def test_there_may_be_no_lookups():
    arguments = torch.arange(5), torch.tensor([0, 2, 2])
    program = graphir.capture(Bag(), arguments, batch_dims=(({0: "lookups"}, {0: "batch"}), {}, ()))
    plan = passes.emit(program)
    assert not graphir.memory(plan, {"lookups": 0}).refused
    assert graphir.memory(plan, {"batch": 0}).refused
    with runtime.Session(plan, program.state) as session:
        session.step(torch.arange(0), torch.tensor([0, 0, 0]))
