"""Small programs written out as text, for tests that show one thing."""

from __future__ import annotations

from graphir.ir.blob import STATE_ROLES
from graphir.ir.net import Net
from graphir.ir.operator import Operator
from graphir.ir.program import Program
from graphir.ir.text import parse


def program_of(body: str, **changes: object) -> Program:
    """The program whose step has this text between ``net … {`` and ``}``; its init loads what the step keeps."""
    step = parse(f"net small.step {{\n{body}\n}}")
    assert isinstance(step, Net)
    kept = {name: blob for name, blob in step.blobs.items() if blob.role in STATE_ROLES and not blob.is_view}
    loads = tuple(
        Operator("graphir.load", (), (name,), {"key": name}, blob.device, phase="init") for name, blob in kept.items()
    )
    return Program("small", Net("small.init", loads, kept), step).with_(**changes)


TWO_LAYERS = """
    param fc1.weight : f32[4,8] @gpu:0
    param fc2.weight : f32[2,4] @gpu:0
    state fc1.weight.momentum_buffer : f32[4,8] @gpu:0
    state fc2.weight.momentum_buffer : f32[2,4] @gpu:0
    input x : f32[6,8] @gpu:0
    input lr : f64[] @cpu:0
    fc1.weight.t : f32[8,4] strides [1,8] in fc1.weight @gpu:0 = aten.t(fc1.weight)
    fc1 : f32[6,4] @gpu:0 = aten.mm(x, fc1.weight.t)
    relu : f32[6,4] @gpu:0 = aten.relu(fc1)
    fc2.weight.t : f32[4,2] strides [1,4] in fc2.weight @gpu:0 = aten.t(fc2.weight)
    fc2 : f32[6,2] @gpu:0 = aten.mm(relu, fc2.weight.t)
    output loss : f32[] @gpu:0 = aten.sum(fc2)
    loss_grad : f32[] @gpu:0 = aten.ones_like(loss) {phase=backward}
    fc2_grad : f32[6,2] strides [0,0] in loss_grad @gpu:0 = aten.expand(loss_grad, size=[6, 2]) {phase=backward}
    fc2_grad.t : f32[2,6] strides [0,0] in loss_grad @gpu:0 = aten.t(fc2_grad) {phase=backward}
    fc2.weight_grad : f32[2,4] @gpu:0 = aten.mm(fc2_grad.t, relu) {phase=backward}
    relu_grad : f32[6,4] @gpu:0 = aten.mm(fc2_grad, fc2.weight) {phase=backward}
    fc1_grad : f32[6,4] @gpu:0 = aten.threshold_backward(relu_grad, relu, threshold=0) {phase=backward}
    fc1_grad.t : f32[4,6] strides [1,4] in fc1_grad @gpu:0 = aten.t(fc1_grad) {phase=backward}
    fc1.weight_grad : f32[4,8] @gpu:0 = aten.mm(fc1_grad.t, x) {phase=backward}
    fc1.weight;1, fc1.weight.momentum_buffer;1 = graphir.sgd(fc1.weight, fc1.weight_grad, fc1.weight.momentum_buffer, lr, momentum=0.9) {phase=update}
    fc2.weight;1, fc2.weight.momentum_buffer;1 = graphir.sgd(fc2.weight, fc2.weight_grad, fc2.weight.momentum_buffer, lr, momentum=0.9) {phase=update}
    output loss
    grad loss -> loss_grad
    grad fc2 -> fc2_grad
    grad relu -> relu_grad
    grad fc1 -> fc1_grad
"""  # noqa: E501 - one operator a line, as printed


def two_layers() -> Program:
    """Two linear layers with a relu between, momentum SGD; all on gpu:0."""
    return program_of(TWO_LAYERS)
