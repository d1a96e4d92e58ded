"""passes.split_gradients: a convolution's backward in two operators, of the same bits."""

from __future__ import annotations

import random
from collections.abc import Callable

import models
import pytest
import torch
from micro import assert_same, captured, steps
from torch import nn

import graphir
from graphir import passes, runtime
from graphir.errors import EquivalenceError
from graphir.ir.operator import Operator
from graphir.ir.program import Program

CONVOLUTION = "aten.convolution_backward.default"


def convolutions(program: Program) -> list[Operator]:
    return [op for op in program.step.ops if op.type == CONVOLUTION]


def with_bias(groups: int = 1, transposed: bool = False) -> models.Example:
    """Convolutions with a bias, the first of which has no gradient of its input to give."""
    torch.manual_seed(0)
    kind = nn.ConvTranspose2d if transposed else nn.Conv2d
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        kind(8, 8, 3, stride=2, padding=1, groups=groups),
        nn.GroupNorm(2, 8),
        kind(8, 4, 1),
        nn.Flatten(1),
    )
    x = torch.randn(8, 3, 9, 9)
    y = torch.randn_like(model(x))
    return models.Example(model, (x,), (y,), nn.functional.mse_loss)


MODELS: dict[str, tuple[Callable[[], models.Example], str]] = {
    "resnet": (lambda: models.resnet(batch=8), "blocks"),
    "biased": (with_bias, "[2:5]"),
    "in groups": (lambda: with_bias(groups=4), "[2:5]"),
    "transposed": (lambda: with_bias(transposed=True), "[2:5]"),
}


def test_a_backward_becomes_that_of_the_input_and_that_of_the_parameters() -> None:
    program = captured(with_bias(), 1)
    after = passes.split_gradients(program)
    first, *_ = convolutions(program)
    of_input, of_weight = convolutions(after)[:2]
    assert first.outputs == of_input.outputs + of_weight.outputs and first.inputs == of_input.inputs == of_weight.inputs
    assert [op.results for op in (of_input, of_weight)] == ["t__", "_tt"]
    masks = [op.args["output_mask"] for op in (of_input, of_weight)]
    assert masks == [(True, False, False), (False, True, True)]
    assert {op.by for op in (of_input, of_weight)} == {"split_gradients"} and of_input.of == first.of
    assert after.history[-1] == "split_gradients"


def test_what_gives_one_of_both_is_left_as_it_is() -> None:
    program = captured(with_bias(), 1)
    after = passes.split_gradients(program)
    assert convolutions(program)[-1] == convolutions(after)[-1]  # the model's input has no gradient
    assert len(convolutions(after)) == 2 * len(convolutions(program)) - 1
    assert passes.split_gradients(after).step == after.step
    norms = [[op for op in p.step.ops if "norm_backward" in op.type] for p in (program, after)]
    assert norms[0] and norms[0] == norms[1]


@pytest.mark.parametrize("name", MODELS)
def test_every_executor_gives_the_bits_of_the_whole(name: str) -> None:
    make, second = MODELS[name]
    example = make()
    given = (*example.inputs, *example.targets)
    whole = passes.inject_copies(passes.shift_modules(captured(example, 4), {second: 1}))
    expected, state = steps(whole, "reference", given)
    split = passes.split_gradients(whole)
    assert graphir.certify(whole, split).holds and graphir.certify(split, whole).holds
    after = passes.pipeline(split)
    assert graphir.certify(whole, after).holds
    assert_same(split, after)
    for executor in ("reference", "threads"):
        losses, left = steps(after, executor, given)
        assert all(map(torch.equal, losses, expected)), executor
        assert left.keys() == state.keys() and all(torch.equal(left[key], state[key]) for key in state), executor


@pytest.mark.parametrize("seed", range(4))
def test_parts_have_the_bits_of_the_whole(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    groups, kernel = rng.choice((1, 2, 4)), rng.choice((1, 3))
    kind = rng.choice((nn.Conv1d, nn.Conv2d, nn.ConvTranspose2d))
    dims, dtype = (1 if kind is nn.Conv1d else 2), rng.choice((torch.float32, torch.float64, torch.bfloat16))
    layer = {"stride": rng.choice((1, 2)), "padding": kernel // 2, "groups": groups, "bias": rng.random() < 0.5}
    model = nn.Sequential(*[kind(8, 8, kernel, **layer) for _ in range(3)], nn.Flatten(1)).to(dtype)
    x = torch.randn(4, 8, *[rng.choice((7, 8, 16))] * dims, dtype=dtype)
    example = models.Example(model, (x,), (torch.randn_like(model(x)),), nn.functional.mse_loss)
    program = captured(example, rng.choice((1, 2)))
    after = passes.split_gradients(program)
    assert len(convolutions(after)) > len(convolutions(program))
    assert graphir.certify(program, after).holds and not runtime.check(passes.emit(after))
    given = (*example.inputs, *example.targets)
    (expected, state), (losses, left) = steps(program, "reference", given), steps(after, "serial", given)
    assert all(map(torch.equal, losses, expected)) and all(torch.equal(left[key], state[key]) for key in state)


def test_the_certificate_says_what_is_taken_for_granted() -> None:
    program = captured(with_bias(), 1)
    said = f"parts of a result have the bits that they have together: {CONVOLUTION}"
    assert said in graphir.certify(program, passes.split_gradients(program)).assumptions
    assert said not in graphir.certify(program, program).assumptions


def changed(program: Program, position: int, **changes: object) -> Program:
    """The program with a changed convolution's backward."""
    op = convolutions(program)[position]
    ops = tuple([other._replace(**changes) if other is op else other for other in program.step.ops])  # type: ignore[arg-type]
    return program.with_(step=program.step.with_(ops=ops))


def test_parts_of_another_call_are_not_taken_for_those_of_the_whole() -> None:
    program = captured(with_bias(), 1)
    split = passes.split_gradients(program)
    for position in (0, 1):
        wider = changed(split, position, args={**convolutions(split)[position].args, "dilation": (2, 2)})
        with pytest.raises(EquivalenceError):
            graphir.certify(program, wider)  # of a kernel of one element, with the same shapes


def test_zero_bubble_puts_gradients_of_weights_off() -> None:
    example = models.resnet(batch=32, blocks=6, channels=32, image=32)
    program = captured(example, 4)
    moved = passes.inject_copies(passes.shift_modules(program, {"blocks[3:6]": 1, "avgpool": 1, "fc": 1}))
    programs = moved, passes.split_gradients(moved)
    whole, apart = [graphir.overlap(passes.emit(passes.pipeline(program, limits={}))).seconds for program in programs]
    assert apart < 0.995 * whole


def test_a_norm_is_left_whole() -> None:
    program = captured(models.gpt(batch=2), 1)
    assert passes.split_gradients(program).step == program.step
