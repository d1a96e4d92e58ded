"""The names of what is parked or computed again: they stand for just that, and a pipeline's text is read back."""

from __future__ import annotations

import random
from typing import Literal

import models
import pytest
from graphir.passes.choice.naming import patterns, storages_named
from graphir.passes.recompute import repeated_alone
from graphir.passes.saved import saved_in, uses_of
from runnable import captured, sgd

from graphir import Program, passes


@pytest.mark.parametrize(
    ("paths", "taken", "named"),
    [
        (["h.0", "h.1", "h.2", "h.4", "head"], [], ["h[0:3]", "h.4", "head"]),
        (["h.1.mlp", "h.0.mlp", "h.0.attn"], [], ["h[0:2].mlp", "h.0.attn"]),
        (["0", "1", "3"], [], ["[0:2]", "3"]),
        (["h.4.mlp", "head"], ["h.4.mlp", "head"], ["h[4].mlp"]),
        (["h.0.experts.1", "h.0.experts.2"], [], ["h.0.experts.1", "h.0.experts.2"]),
        (["h.01", "h.02"], [], ["h.01", "h.02"]),
    ],
)
def test_neighbours_are_one_pattern(paths: list[str], taken: list[str], named: list[str]) -> None:
    assert patterns(paths, taken) == named


def trained(example: models.Example) -> Program:
    return captured(example, sgd(example.model.parameters()))


PROGRAMS = {"gpt": lambda: models.gpt(layers=3, dropout=0.1), "resnet": models.resnet}


@pytest.mark.parametrize("by", ["park", "recompute"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_names_stand_for_just_those_storages(name: str, by: Literal["park", "recompute"]) -> None:
    program = trained(PROGRAMS[name]())
    uses = uses_of(program.step)
    saved = list(saved_in(program, dict.fromkeys([op.module for op in program.step.ops], ""), uses))
    if by == "recompute":
        alone = repeated_alone(program)
        saved = [storage for storage in saved if uses[storage].made in alone]
    modules = sorted({program.step.ops[uses[storage].made].module for storage in saved})
    draw = random.Random(0)
    shorter = 0
    for _ in range(12):
        some = {module for module in modules if draw.random() < 0.5}
        chosen = [s for s in saved if program.step.ops[uses[s].made].module in some and draw.random() < 0.95]
        named = storages_named(program, chosen, by)
        shorter += len(named) < len(chosen)
        made = {
            "park": lambda what: passes.park(program, what, to="gpu:1"),
            "recompute": lambda what: passes.recompute(program, what),
        }[by]
        assert str(made(named).step) == str(made(chosen).step)
    assert shorter > 8
