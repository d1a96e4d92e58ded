"""Who made an operator, and the history of a program, are for people: no pass and no plan depends on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TypeAlias

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import graphir
from graphir import passes
from graphir.errors import PassError
from graphir.ir.net import Net
from graphir.ir.plan import Plan
from graphir.ir.program import Program

_Step: TypeAlias = Callable[[Program], Program]


def stripped(program: Program) -> Program:
    """The program without its history, its operators without the names of passes."""

    def net(found: Net) -> Net:
        return found.with_(ops=tuple([op._replace(by="") for op in found.ops]))

    return program.with_(init=net(program.init), step=net(program.step), history=())


def emitted(program: Program) -> str:
    """The text of the program's plan, without provenance."""
    plan = passes.emit(program)
    return str(Plan(stripped(plan.program), plan.dims, plan.instructions, plan.values, plan.buffers))


class Items(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.norm = nn.Embedding(8, 4), nn.BatchNorm1d(4, affine=False)

    def forward(self, items: torch.Tensor) -> torch.Tensor:
        return self.norm(self.emb(items)).square().sum()


@cache
def layers(accumulate: int = 1) -> Program:
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.ReLU())], nn.BatchNorm1d(16))
    x, y = torch.randn(8, 16), torch.randn(8, 16)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return graphir.capture(model, (x,), targets=(y,), loss=F.mse_loss, optimizer=optimizer, accumulate=accumulate)


@cache
def items() -> Program:
    torch.manual_seed(0)
    model = Items()
    given = torch.arange(6)
    return graphir.capture(model, (given,), loss=lambda loss: loss, optimizer=torch.optim.SGD(model.parameters(), 0.1))


_SHIFT: _Step = partial(passes.shift_modules, modules={"[4:6]": "gpu:1", "[6:9]": "gpu:2"})
_OTHERS: _Step = partial(passes.shift_modules, modules={"[4:9]": {0: 2, 1: 3}})
_PARK: _Step = partial(passes.park, what=["1", "3", "**.momentum_buffer"], to="gpu:3")
_REPLICATE: _Step = partial(passes.replicate, devices=[0, 1])
_SHARD: _Step = partial(passes.shard, placement={"emb": "gpu:1"}, devices=[0, 1])


def _balance(program: Program) -> Program:
    whole = graphir.memory(passes.emit(program)).peak["gpu:0"]
    limits = {"gpu:0": int(0.8 * whole), "gpu:1": whole}
    return passes.balance(program, limits, topology="h200x8", evaluations=30, seconds=60).program


PROGRAMS: dict[str, tuple[Callable[[], Program], Sequence[_Step]]] = {
    "parked": (layers, [_SHIFT, _PARK, passes.inject_copies, passes.share_storage]),
    "parked on the host": (layers, [partial(passes.park, what=["1", "3"], to="cpu"), passes.inject_copies]),
    "pipelined": (partial(layers, 4), [_SHIFT, _PARK, passes.inject_copies, passes.pipeline, passes.share_storage]),
    "pipelined twice": (partial(layers, 4), [_SHIFT, passes.inject_copies, passes.pipeline, passes.pipeline]),
    "replicated": (layers, [_REPLICATE, passes.sync_batch_norm, _OTHERS, passes.inject_copies]),
    "summed": (layers, [partial(_REPLICATE, reduction="sum"), passes.sync_batch_norm]),
    "recomputed": (layers, [partial(passes.recompute, what=["1", "3"]), _SHIFT, passes.inject_copies]),
    "sharded": (items, [_SHARD, passes.sync_batch_norm, passes.inject_copies]),
    "sharded, summed": (items, [partial(_SHARD, reduction="sum"), passes.sync_batch_norm, passes.inject_copies]),
    "balanced": (layers, [_balance, passes.inject_copies]),
}


def saved(program: Program, path: Path) -> Program:
    """The program as it comes back from a file."""
    program.save(path)
    loaded = graphir.load(path)
    assert isinstance(loaded, Program)
    return loaded


@pytest.mark.parametrize("name", PROGRAMS)
def test_plans_do_not_depend_on_who_made_what(name: str, tmp_path: Path) -> None:
    capture, steps = PROGRAMS[name]
    program = unknown = loaded = known = capture()
    for step in steps:
        program, unknown = step(program), step(stripped(unknown))
        loaded, known = step(saved(stripped(loaded), tmp_path / "loaded")), step(saved(known, tmp_path / "known"))
    assert program.history and known.history == program.history
    assert emitted(unknown) == emitted(stripped(program)) == emitted(program)
    assert emitted(loaded) == emitted(known), "a program from a file has no witness, and so may have other guards"


def test_a_pass_of_ones_own_parks_as_park_does() -> None:
    """The fields of its copies are all that a user's pass needs."""
    parked = passes.park(layers(), ["1", "3"], "gpu:1")
    copies = [op for op in parked.step.ops if op.type == "Copy"]
    assert {(op.issue, op.received) for op in copies} == {("placed", "fresh")}
    ops = tuple([op._replace(issue="", received="") if op in copies else op for op in parked.step.ops])
    without = parked.with_(step=parked.step.with_(ops=ops))
    assert emitted(without) != emitted(parked)
    assert passes.emit(without).buffers and not passes.emit(parked).buffers
    assert graphir.certify(parked, without).holds, "they say nothing of values"
    mine = {"by": "mine", "issue": "placed", "received": "fresh"}
    again = tuple([op._replace(**mine) if op.type == "Copy" else op for op in without.step.ops])
    assert emitted(without.with_(step=without.step.with_(ops=again))) == emitted(parked)


def test_balance_knows_copies_and_what_is_parked() -> None:
    """As it did by the names of passes."""
    for program, what in (
        (passes.inject_copies(_SHIFT(layers())), "has the copies of a placement already"),
        (_PARK(layers()), "has something parked already"),
    ):
        with pytest.raises(PassError, match=what):
            _balance(stripped(program))
