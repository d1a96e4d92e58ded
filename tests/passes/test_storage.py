"""passes.share_storage: in place where nobody can tell."""

from __future__ import annotations

import nets
import pytest
import torch
from small import program_of, two_layers

import graphir
from graphir import passes
from graphir.ir.opset import effects_of, overload, signature
from graphir.ir.optypes.table import LISTED, operator_type
from graphir.ir.program import Program


def types(program: Program) -> list[str]:
    return [op.type for op in program.step.ops]


def shared(body: str) -> Program:
    program = program_of(body)
    after = passes.share_storage(program)
    assert graphir.certify(program, after).holds
    return after


def test_an_operand_that_nobody_reads_again_is_overwritten() -> None:
    after = passes.share_storage(two_layers())
    assert "aten.relu_.default" in types(after)
    assert after.step.blobs["relu"].storage == "fc1"
    assert after.step.producer("relu").by == "share_storage"  # type: ignore[union-attr]


def test_a_chain_ends_up_in_one_storage() -> None:
    after = shared("""
    input x : f32[3] @gpu:0
    a : f32[3] @gpu:0 = aten.exp(x)
    b : f32[3] @gpu:0 = aten.relu(a)
    c : f32[3] @gpu:0 = aten.tanh(b)
    output d : f32[3] @gpu:0 = aten.mul.Tensor(c, x)
    output d
    """)
    assert {after.step.blobs[name].storage for name in "abcd"} == {"a"}
    assert types(after)[0] == "aten.exp.default"


@pytest.mark.parametrize(
    "body",
    [
        pytest.param("a : f32[3] @gpu:0 = aten.relu(x)", id="an input"),
        pytest.param(
            "a : f32[3] @gpu:0 = aten.exp(x)\n b : f32[3] @gpu:0 = aten.relu(a)\n c : f32[] @gpu:0 = aten.sum(a)",
            id="read later",
        ),
        pytest.param(
            "a : f32[3] @gpu:0 = aten.exp(x)\n"
            "v : f32[3,1] in a @gpu:0 = aten.unsqueeze(a, dim=1)\n"
            "b : f32[3] @gpu:0 = aten.relu(a)\n"
            "c : f32[3,1] @gpu:0 = aten.neg(v)",
            id="a view is read later",
        ),
        pytest.param(
            "output a : f32[3] @gpu:0 = aten.exp(x)\n b : f32[3] @gpu:0 = aten.relu(a)\n output a", id="an output"
        ),
        pytest.param(
            "a : f32[3] @gpu:0 = aten.exp(x)\n b : f32[3,3] @gpu:0 = aten.mul.Tensor(a, w)", id="the result is larger"
        ),
        pytest.param(
            "a : f32[3] @gpu:0 = aten.exp(x)\n b : f32[3] @gpu:0 = aten.mul.Tensor(a, a)", id="both operands"
        ),
    ],
)  # fmt: skip
def test_what_somebody_needs_is_left_alone(body: str) -> None:
    after = shared(f"input x : f32[3] @gpu:0\n input w : f32[3,3] @gpu:0\n {body}")
    assert not any(op.effects.writes for op in after.step.ops)


def test_what_a_copy_made_is_not_overwritten() -> None:
    """A copy may begin at an odd address, where a fresh result does not; kernels may round by that."""
    after = shared("""
    input x : f32[3] @gpu:0
    a : f32[3] @gpu:1 = Copy(x)
    b : f32[3] @gpu:1 = aten.relu(a)
    output c : f32[3] @gpu:1 = aten.exp(b)
    output c
    """)
    assert after.step.blobs["b"].storage == "b"
    assert after.step.blobs["c"].storage == "b"


def test_it_lowers_the_peak() -> None:
    program = two_layers()
    assert graphir.memory(passes.share_storage(program)).peak["gpu:0"] <= graphir.memory(program).peak["gpu:0"]


def test_random_programs_certify_and_verify() -> None:
    changed = 0
    for seed in range(30):
        program = nets.random_program(seed, devices=2)
        program = passes.inject_copies(
            passes.shift_activations(program, passes.find_activations(program)[1::2], {0: 1})
        )
        after = passes.share_storage(program)
        graphir.verify(after)
        assert graphir.certify(program, after).holds
        changed += any(op.by == "share_storage" for op in after.step.ops)
    assert changed > 10


@pytest.mark.parametrize("type", sorted(type for type in LISTED if operator_type(type).in_place))
def test_the_in_place_form_takes_the_same_arguments_and_computes_the_same_bits(type: str) -> None:
    in_place = operator_type(type).in_place
    assert [p.name for p in signature(type).params] == [p.name for p in signature(in_place).params]
    assert effects_of(in_place, {}, None, 1, None).writes == ((0, 0),)
    generator = torch.Generator().manual_seed(0)
    given: dict[str, object] = {"other": 1.5, "mask": torch.rand(2, 17, generator=generator) > 0.5, "value": -2.0}
    given |= {"min": -0.5}
    needed = [p.name for p in signature(type).params[1:] if p.required or p.name == "min"]
    if type.endswith("Tensor"):
        given["other"] = torch.randn(2, 17, generator=generator)
    arguments = [given[name] for name in needed]
    x = torch.randn(2, 17, generator=generator)
    expected = overload(type)(x, *arguments)
    written = x.clone()
    assert overload(in_place)(written, *arguments) is written
    assert torch.equal(expected, written)
