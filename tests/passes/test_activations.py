"""passes.find_activations: Caffe2's definition, by net.gradients."""

from __future__ import annotations

import nets
from small import program_of, two_layers

from graphir import passes


def test_names_in_program_order_without_prefix() -> None:
    expected = ["fc1", "relu", "fc2", "loss"]
    assert passes.find_activations(two_layers()) == expected
    assert passes.find_activations(passes.replicate(two_layers(), devices=[1, 0])) == expected


def test_views_and_parameters_are_not_activations() -> None:
    found = passes.find_activations(two_layers())
    assert "fc1.weight.t" not in found
    assert "fc1.weight" not in found


def test_a_value_whose_gradient_nobody_reads_is_none() -> None:
    body = """
    input x : f32[3] @gpu:0
    input y : f32[3] @gpu:0
    a : f32[3] @gpu:0 = aten.mul.Tensor(x, y)
    b : f32[3] @gpu:0 = aten.relu(a)
    b_grad : f32[3] @gpu:0 = aten.ones_like(b) {phase=backward}
    a_grad : f32[3] @gpu:0 = aten.threshold_backward(b_grad, b, threshold=0) {phase=backward}
    grad a -> a_grad
    grad b -> b_grad
    """
    assert passes.find_activations(program_of(body)) == ["b"]


def test_forward_only_programs_count_what_depends_on_an_input() -> None:
    body = """
    param w : f32[3] @gpu:0
    input x : f32[3] @gpu:0
    temporary scale : f32[3] @gpu:0 = aten.exp(w)
    a : f32[3] @gpu:0 = aten.mul.Tensor(x, scale)
    output b : f32[3] @gpu:0 = aten.relu(a)
    output b
    """
    assert passes.find_activations(program_of(body)) == ["a"]


def test_random_programs_agree_with_the_definition() -> None:
    for seed in range(15):
        step = (program := nets.random_program(seed)).step
        read = {name for op in step.ops for name in op.inputs}
        made = [name for op in step.ops for name in op.outputs]
        expected = [n for n in made if step.gradients.get(n) in read and n in read and step.blobs[n].role != "param"]
        assert passes.find_activations(program) == list(dict.fromkeys(expected))
