"""Programs that park and recompute, held against the same program without."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree

import graphir
from graphir import passes, runtime
from graphir.ir.plan import Plan
from graphir.ir.program import Program

__all__ = ["EXECUTORS", "assert_runs_the_same", "bits_of", "peak", "placed", "saved"]

EXECUTORS = ("reference", "serial", "threads", "adversarial")
"""Those of the host."""


def placed(before: Program, after: Program, share: bool = True) -> Program:
    """The program with its copies, proved to compute what *before* does."""
    result = passes.inject_copies(after)
    result = passes.share_storage(result) if share else result
    assert graphir.certify(before, result).holds
    return result


def peak(program: Program, device: str = "gpu:0", ahead: int = 0) -> int:
    """The most bytes that a placed program's plan holds on a device beside state, gradients and scratch.

    In small models the whole peak is where all gradients are, and says nothing of activations.
    """
    found = graphir.memory(passes.emit(program, ahead=ahead), profile=None)
    others = ("parameters", "buffers", "optimizer state", "constants", "gradients", "scratch")
    left = found.timeline(device) - sum([found.timeline(device, category) for category in others])
    return int(left.max())


def saved(program: Program) -> list[str]:
    """The activations that can be parked and recomputed."""
    found = []
    for name in passes.find_activations(program):
        try:
            passes.park(program, name, "gpu:7")
        except graphir.PassError:
            continue
        found.append(name)
    return found


def bits_of(
    program: Program, batches: Sequence[tuple[tuple[Any, ...], Mapping[str, Any]]], executor: str, **options: Any
) -> list[torch.Tensor]:
    """All that a session hands back and has in the end, after a step on each batch."""
    return _bits_of(_checked(program, **options), program.state, batches, executor)


def _checked(program: Program, **options: Any) -> Plan:
    plan = passes.emit(program, **options)
    assert runtime.check(plan) == []
    return plan


def _bits_of(
    plan: Plan,
    state: Mapping[str, torch.Tensor],
    batches: Sequence[tuple[tuple[Any, ...], Mapping[str, Any]]],
    executor: str,
) -> list[torch.Tensor]:
    with runtime.Session(plan, state, binding="cpu", executor=executor) as session:
        results = [session.step(*given, **kwargs) for given, kwargs in batches]
        tensors = _pytree.tree_leaves([results, session.state_dict(), session.optimizer_state_dict()])
    return [tensor.clone() for tensor in tensors if isinstance(tensor, torch.Tensor)]


def assert_runs_the_same(
    before: Program,
    after: Program,
    batches: Sequence[tuple[tuple[Any, ...], Mapping[str, Any]]],
    executors: Sequence[str] = EXECUTORS,
) -> None:
    """Both programs hand back the same bits, and end in the same state, on every executor."""
    expected, plan = bits_of(before, batches, "reference"), _checked(after)
    for executor in executors:
        found = _bits_of(plan, after.state, batches, executor)
        assert len(found) == len(expected)
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.equal(ours.reshape(-1).view(torch.uint8), theirs.reshape(-1).view(torch.uint8)), executor
