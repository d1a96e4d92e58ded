"""passes.pipeline beside other passes and options: parking, recomputation, clipping, a GradScaler, tied weights, …"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import models
import pytest
import torch
from micro import assert_same, captured, captured_gpt, captured_mlp, mlp, steps
from torch.utils import _pytree as pytree

import graphir
from graphir import passes
from graphir.ir.program import Program

PARTS = 4
SECOND: Mapping[str, Any] = {"layers[1]": 1, "norm": 1}


def gpt(layers: int = 2, dropout: float = 0.0) -> Program:
    return captured_gpt(layers, dropout=dropout)


def gpt_with(layers: int = 2, **options: Any) -> Program:
    return captured(models.gpt(batch=8, layers=layers), PARTS, **options)


def scaled() -> Program:
    return gpt_with(loss_scale=torch.amp.GradScaler("cpu", init_scale=8.0), clip_grad_norm=0.5)


def halves(program: Program) -> Program:
    return passes.shift_modules(program, SECOND)


def interleaved(program: Program) -> Program:
    """Two stages on each device."""
    return passes.shift_modules(program, {"layers[1]": 1, "layers[3]": 1, "norm": 1})


def parked(program: Program) -> Program:
    return passes.park(halves(program), "layers[0]", "cpu")


def recomputed(program: Program) -> Program:
    return passes.recompute(halves(program), ["layers[0]", "layers[1]"])


def both(program: Program) -> Program:
    return passes.recompute(passes.park(halves(program), "layers[0]", {0: 1}), "layers[1]")


def side_by_side(program: Program) -> Program:
    moved = passes.shift_modules(passes.replicate(program, [0, 1]), {"layers[1]": {0: 2, 1: 3}, "norm": {0: 2, 1: 3}})
    return passes.park(moved, "layers[0]", {0: 2, 1: 3})


CASES: dict[str, tuple[Callable[[], Program], Callable[[Program], Program]]] = {
    "tied weights": (gpt, halves),
    "dropout": (lambda: gpt(4, dropout=0.2), interleaved),
    "a GradScaler and clipping": (scaled, halves),
    "clipping by value": (lambda: gpt_with(4, clip_grad_value=0.01), interleaved),
    "parked on the host": (gpt, parked),
    "recomputed": (lambda: gpt(dropout=0.2), recomputed),
    "parked on a peer, and recomputed": (gpt, both),
    "replicas that park": (gpt, side_by_side),
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_limits_are_kept_beside(name: str) -> None:
    make, place = CASES[name]
    program = make()
    before = passes.inject_copies(place(program))
    assert before.replicas != program.replicas or graphir.certify(program, before).holds
    example = models.gpt(batch=8 * len(before.replicas))
    given = (*example.inputs, *example.targets)
    expected, state = steps(before, "reference", given)
    serial = graphir.memory(passes.emit(before)).peak
    limits = {device: nbytes * 5 // 4 for device, nbytes in serial.items() if device.startswith("gpu")}
    for options in ({"limits": None}, {"limits": limits}):
        after = passes.pipeline(before, **options)
        assert_same(before, after)
        losses, left = steps(after, "threads", given)
        assert all(map(torch.equal, pytree.tree_leaves(losses), pytree.tree_leaves(expected)))
        assert left.keys() == state.keys() and all(torch.equal(left[key], state[key]) for key in state)
        peak = graphir.memory(passes.emit(after)).peak
        assert options["limits"] is None or all(peak[device] <= limit for device, limit in limits.items())


def test_what_is_parked_does_not_come_back_before_it_is_due() -> None:
    program = captured_gpt(2, batch=64)
    placed = [passes.inject_copies(place(program)) for place in (parked, halves)]
    peaks = [graphir.memory(passes.emit(passes.pipeline(each, "gpipe"))).peak["gpu:0"] for each in placed]
    assert peaks[0] < peaks[1]


def test_copies_of_an_ordered_program_are_issued_where_they_stand() -> None:
    plain = passes.inject_copies(passes.shift_modules(captured_mlp(), {"[3:6]": 1}))
    flowing = passes.pipeline(plain)
    assert passes.emit(flowing) == passes.emit(flowing, ahead=0) != passes.emit(flowing, ahead=8)
    assert passes.emit(plain) == passes.emit(plain, ahead=8) != passes.emit(plain, ahead=0)


def test_zero_bubble_puts_gradients_of_parameters_off_within_what_1f1b_takes() -> None:
    program = captured(mlp(batch=1024, width=96, layers=8), 8)
    before = passes.inject_copies(passes.shift_modules(program, {"[4:8]": 1}))
    plans = [passes.emit(passes.share_storage(passes.pipeline(before, name))) for name in ("1f1b", "zero_bubble")]
    plain, bubble = [graphir.overlap(plan).seconds for plan in plans]
    peaks = [max(graphir.memory(plan).peak.values()) for plan in plans]
    assert bubble < 0.99 * plain and peaks[1] <= peaks[0]


def test_compile_takes_the_pass_in_its_pipeline() -> None:
    given = mlp(), mlp()
    text = 'shift_modules{modules={"[3:6]": 1}} | inject_copies | pipeline | share_storage'
    losses = []
    for example, pipeline in zip(given, ("share_storage", text), strict=True):
        optimizer = torch.optim.SGD(example.model.parameters(), lr=0.1)
        options = {"loss": example.loss, "optimizer": optimizer, "accumulate": PARTS}
        with graphir.compile(
            example.model, example.inputs, targets=example.targets, passes=pipeline, **options
        ) as session:
            losses.append([session.step(*example.inputs, *example.targets) for _ in range(3)])
            overlap = graphir.overlap(session.plan)
    assert all(map(torch.equal, *losses)) and set(overlap.grid) == {"gpu:0", "gpu:1"}
