"""Captured programs whose operators give other shapes on one backend than on another."""

from __future__ import annotations

import models
import pytest
import torch
from torch import nn

import graphir
from graphir import passes, runtime
from graphir.ir.program import Program


def frozen(model: nn.Module) -> nn.Module:
    """The model in training mode, its batch norms in evaluation mode."""
    for module in model.train().modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    return model


def through_all_passes(program: Program) -> Program:
    replicated = passes.replicate(program, devices=[0, 1])
    chosen = passes.find_activations(replicated)
    shifted = passes.shift_activations(replicated, chosen[len(chosen) // 2 :], shifts={0: 2, 1: 3})
    moved = passes.inject_copies(shifted)
    graphir.verify(moved)
    assert graphir.certify(replicated, moved).holds
    return moved


def test_batch_norm_in_evaluation_mode() -> None:
    example = models.resnet(4)
    program = graphir.capture(example.model.eval(), inputs=example.inputs)
    graphir.verify(program)
    with torch.no_grad():
        expected = example.model(*example.inputs)
    with runtime.Session(passes.emit(program), program.state) as session:
        assert torch.equal(session.step(*example.inputs), expected)
    with runtime.Session(passes.emit(through_all_passes(program)), program.state) as session:
        assert torch.allclose(session.step(*example.inputs), expected, atol=1e-5)


def test_frozen_batch_norm_in_a_training_step() -> None:
    example = models.resnet(4)
    model = frozen(example.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    program = graphir.capture(
        model, inputs=example.inputs, targets=example.targets, loss=example.loss, optimizer=optimizer
    )
    graphir.verify(program)
    with runtime.Session(passes.emit(through_all_passes(program)), program.state) as moved:
        shared = moved.step(*example.inputs, *example.targets)
    with runtime.Session(passes.emit(program), program.state) as session:
        loss = session.step(*example.inputs, *example.targets)
        assert torch.allclose(shared, loss)
        expected = example.loss(model(*example.inputs), *example.targets)
        assert torch.equal(loss, expected)
        expected.backward()
        optimizer.step()
        assert all(torch.equal(session.state_dict()[name], tensor) for name, tensor in model.state_dict().items())


def test_saved_statistics_of_training_are_compared() -> None:
    example = models.resnet(4)
    program = graphir.capture(example.model.train(), inputs=example.inputs)
    op = next(op for op in program.step.ops if op.type == "aten.native_batch_norm.default")
    mean = op.outputs[1]
    blobs = {**program.step.blobs, mean: program.step.blobs[mean]._replace(shape=(0,))}
    with pytest.raises(graphir.VerifyError, match=r"is declared f32\[0\] but aten.native_batch_norm.default gives"):
        graphir.verify(program.with_(step=program.step.with_(blobs=blobs)))
