"""Names, roles and modules: blobs are called as users know them."""

from __future__ import annotations

import re

import models
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphir.capture import capture
from graphir.ir.names import prefix_of
from graphir.ir.program import Program


def captured(example: models.Example) -> Program:
    optimizer = torch.optim.SGD(example.model.parameters(), lr=0.1, momentum=0.9)
    return capture(example.model, example.inputs, targets=example.targets, loss=example.loss, optimizer=optimizer)


@pytest.fixture(scope="module")
def resnet() -> Program:
    return captured(models.resnet(blocks=2))


@pytest.fixture(scope="module")
def gpt() -> Program:
    return captured(models.gpt(layers=2))


def test_the_output_of_a_module_is_called_after_it(resnet: Program) -> None:
    forward = [op for op in resnet.step.ops if op.phase == "forward"]
    made = {op.outputs[0]: op.type.split(".")[1] for op in forward}
    assert made["conv1"] == "convolution" and made["blocks.0.bn2"] == "native_batch_norm"
    assert made["blocks.0.relu"] == "relu" and made["blocks.0.relu_1"] == "relu"
    assert made["blocks.0.add"] == "add" and made["fc"] == "addmm" and made["view"] == "view"


def test_a_module_that_reshapes_its_output_gives_its_name_to_what_it_computed(gpt: Program) -> None:
    computed, shown = gpt.step.blob("layers.0.mlp.0"), gpt.step.blob("layers.0.mlp.0.view_1")
    assert not computed.is_view and computed.name in gpt.step.gradients
    assert shown.storage == computed.name


def test_later_results_are_called_after_the_first(resnet: Program) -> None:
    op = resnet.step.producer("bn1")
    assert op is not None
    assert op.outputs == ("bn1", "bn1.save_mean", "bn1.save_invstd", "bn1.running_mean", "bn1.running_var")
    assert op.output_versions == (0, 0, 0, 1, 1) and op.effects.writes == ((3, 3), (4, 4))


def test_views_of_parameters_are_called_after_them(resnet: Program) -> None:
    blob = resnet.step.blob("fc.weight.t")
    assert blob.is_view and blob.storage == "fc.weight" and blob.role == "param"


def test_inputs_targets_and_loss(resnet: Program) -> None:
    assert resnet.name == "resnet" and resnet.step.name == "resnet.step" and resnet.init.name == "resnet.init"
    roles = {name: resnet.step.blobs[name].role for name in ("x", "target", "loss", "lr")}
    assert roles == {"x": "input", "target": "input", "loss": "output", "lr": "input"}
    assert resnet.step.external_outputs == ("loss",) and resnet.interface.loss == "loss"


def test_every_activation_that_has_a_gradient_maps_to_it(resnet: Program) -> None:
    step = resnet.step
    assert step.gradients["conv1"] == "conv1_grad" and step.gradients["bn1"] == "bn1_grad"
    for name, gradient in step.gradients.items():
        assert step.blobs[name].role in ("activation", "output") and not step.blobs[name].is_view
        assert step.blobs[step.blobs[gradient].storage].role == "gradient"
    without = {n for n, b in step.blobs.items() if b.role == "activation" and not b.is_view} - step.gradients.keys()
    assert {name.rpartition(".")[2] for name in without} == {"save_mean", "save_invstd", "total_weight"}


def test_one_gradient_serves_both_operands_of_an_addition(resnet: Program) -> None:
    gradients = resnet.step.gradients
    assert gradients["blocks.1.bn2"] == gradients["blocks.1.add"] == "blocks.1.bn2_grad"


def test_other_backward_values_are_called_after_the_forward_value(gpt: Program) -> None:
    backward = [op for op in gpt.step.ops if op.phase == "backward"]
    names = [name for op in backward for name in op.outputs]
    assert all("_grad" in n or ".backward_" in n or gpt.step.blobs[n].role == "param" for n in names), names
    assert "layers.0.mlp.0.backward_mm" in names


def test_few_names_have_numbers_upon_numbers(gpt: Program) -> None:
    odd = [name for name in gpt.step.blobs if re.search(r"_\d+(_\d+|\.\d+)$", name)]
    assert len(odd) <= len(gpt.step.blobs) // 100, odd


def test_every_operator_of_a_module_knows_it(gpt: Program) -> None:
    modules = {name for name, _ in models.gpt(layers=2).model.named_modules()} | {"loss"}
    for op in gpt.step.ops:
        assert op.module in modules
    attention = {op.phase for op in gpt.step.ops if op.module == "layers.1.attention"}
    assert attention == {"forward", "backward"}


def test_forward_values_that_follow_no_input_are_no_activations(gpt: Program) -> None:
    assert gpt.step.blobs["arange"].role == "temporary" and gpt.step.blobs["position"].role == "temporary"
    assert "position" not in gpt.step.gradients and "position_grad" in gpt.step.blobs
    assert gpt.step.blobs["token"].role == "activation"


def test_tied_parameters_are_one_blob(gpt: Program) -> None:
    state = gpt.interface.module_state
    assert state["token.weight"] == state["head.weight"] == "token.weight"
    assert "head.weight" not in gpt.step.blobs


class Clashing(nn.Module):
    """Modules and parameters with the names that programs give."""

    def __init__(self) -> None:
        super().__init__()
        self.loss = nn.Linear(4, 4)
        self.lr = nn.Parameter(torch.ones(4))
        self.register_buffer("step", torch.zeros(4))
        self.add_module("gpu_0/x", nn.Linear(4, 4))
        self.relu = nn.Identity()

    def forward(self, x: Tensor, gpu_0: Tensor) -> Tensor:
        return F.relu(self.loss(x)) * self.lr + self.step + self._modules["gpu_0/x"](gpu_0)  # type: ignore[misc]


def test_names_do_not_clash() -> None:
    x = torch.randn(3, 4)
    model = Clashing()
    optimizer = torch.optim.Adam(model.parameters())
    program = capture(model, (x, x + 1), loss=lambda out: out.sum(), optimizer=optimizer)
    blobs = program.step.blobs
    assert program.interface.loss == "loss" and blobs["loss"].shape == ()
    assert program.interface.param_groups[0].lr == "lr_1" and blobs["lr"].role == "param"
    assert program.interface.module_state["step"] != "step" and program.state["step"].dtype == torch.int64
    assert blobs["relu_1"].role == "activation"
    assert not any(prefix_of(name) for name in blobs)
    assert "gpu_0/x.weight" in program.interface.module_state


def test_parameters_with_one_gradient_have_a_blob_each() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return x + (self.a + self.b)

    program = capture(Sum(), (torch.randn(3, 4),), loss=lambda out: out.sum())
    assert program.step.external_outputs == ("loss", "a_grad", "b_grad")
    assert program.step.blobs["b_grad"].storage == program.step.blobs["a_grad"].storage
