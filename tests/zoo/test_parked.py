"""Models of the zoo that park and recompute: proved, checked, and run to the same bits with less memory."""

from __future__ import annotations

from functools import cache

import parking
import pytest
from mutations.subjects import zoo_batch, zoo_program

import graphir
from graphir import Program, passes

pytestmark = pytest.mark.usefixtures("one_thread")

MODULES = {
    "resnet": "layer*.*",
    "gpt2": "transformer.h.*",
    "u-net": "*",
    "t5": "*.block.*",
}
"""The blocks of each model."""

program_of = cache(zoo_program)


def given(name: str, size: int, steps: int = 2) -> list[tuple[tuple[object, ...], dict[str, object]]]:
    batches = [zoo_batch(name, size, step) for step in range(steps)]
    return [((*batch.inputs, *batch.targets), dict(batch.kwargs)) for batch in batches]


def size_of(name: str, program: Program) -> int:
    return program.dims.get("batch") or len(zoo_batch(name, 2, 0).targets[0])


@pytest.mark.parametrize(
    ("name", "to"), [("resnet", "gpu:1"), ("gpt2", "cpu"), ("u-net", "gpu:1"), ("u-net", "cpu"), ("t5", "cpu")]
)
def test_parked_blocks(name: str, to: str) -> None:
    program = program_of(name)
    parked = parking.placed(program, passes.park(program, "**", to, ahead=1))
    assert parking.peak(parked) < parking.peak(program)
    batches = given(name, size_of(name, program))
    parking.assert_runs_the_same(program, parked, batches, ["threads", "adversarial"])


@pytest.mark.parametrize("name", MODULES)
def test_recomputed_blocks(name: str) -> None:
    program = program_of(name)
    again = parking.placed(program, passes.recompute(program, MODULES[name]))
    assert parking.peak(again) < parking.peak(program)
    batches = given(name, size_of(name, program))
    parking.assert_runs_the_same(program, again, batches, ["threads", "adversarial"])


@pytest.mark.parametrize("name", ["resnet", "gpt2"])
def test_all_together_on_two_replicas(name: str) -> None:
    """Shifted, recomputed, parked on another device by each replica, optimizer state on the host."""
    program = passes.replicate(program_of(name), devices=[0, 1])
    modules = {
        "resnet": ("layer3", "layer1.*", "layer2"),
        "gpt2": ("transformer.h[1]", "transformer.h[0]", "lm_head"),
    }
    shifted, recomputed, parked = modules[name]
    made = passes.shift_modules(program, {shifted: {0: 2, 1: 3}})
    made = passes.recompute(made, recomputed)
    made = passes.park(made, parked, {0: 4, 1: 5}) if name == "resnet" else made
    state = "**.exp_avg" if name == "resnet" else "**.momentum_buffer"
    made = parking.placed(program, passes.park(made, state, "cpu"))
    peaks = [graphir.memory(passes.emit(p), profile=None).peak_of_storages("gpu:0") for p in (made, program)]
    assert peaks[0] < peaks[1]
    batches = given(name, 2 * size_of(name, program_of(name)))
    parking.assert_runs_the_same(program, made, batches, ["threads", "adversarial"])
