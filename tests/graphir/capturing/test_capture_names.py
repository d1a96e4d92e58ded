"""Names, roles and modules: blobs are called as users know them."""

from __future__ import annotations

import models
import pytest
import torch
import torch.nn.functional as F
from recognisable import numbers_upon_numbers
from torch import Tensor, nn

from graphir.capturing.capture import capture
from graphir.errors import CaptureError
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
    assert not numbers_upon_numbers(gpt)


class Normalized(nn.Module):
    """Its backward has several operators of a type for each operator of the forward."""

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        for _ in range(3):
            x = x / x.norm(dim=1, keepdim=True) / weight
        return x


def test_what_a_backward_repeats_is_called_after_what_it_is_made_of() -> None:
    x, weight = torch.rand(3, 4, requires_grad=True), torch.rand(4, requires_grad=True)
    program = capture(Normalized(), (x, weight), loss=lambda out: out.sum())
    made = {op.outputs[0]: op.inputs for op in program.step.ops}
    assert made["div_4.backward_div.div"][0] == "div_4.backward_div"
    assert made["div_4_grad.div"][0] == "div_4_grad"
    assert not numbers_upon_numbers(program)


class Written(nn.Module):
    """Part of an activation is overwritten, as in relative positions added to attention weights."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.part = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x).unsqueeze(0)
        h[:, 1:, 2:] += self.part(x)[1:]
        return h.softmax(-1)


def test_the_backward_of_written_parts_belongs_to_them() -> None:
    program = capture(nn.Sequential(Written()), (torch.randn(3, 4),), loss=lambda out: out.square().sum())
    for op in program.step.ops:
        assert op.module in ("0", "0.fc", "0.part", "loss") and op.source, op
    assert not [name for name in program.step.blobs if "recomputed" in name]


def test_what_nothing_reads_takes_no_number() -> None:
    class Unread(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x.sin()
            y[1:], y[2:]
            return y[:1] * y[1:2]

    blobs = capture(Unread(), (torch.randn(3, 4),)).step.blobs
    assert {"slice", "slice_1"} < blobs.keys() and "slice_2" not in blobs


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


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_module_that_is_called_twice_leaves_other_modules_their_names(accumulate: int) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.relu, self.relu_1 = nn.ReLU(), nn.ReLU()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.relu_1(self.relu(self.fc(self.relu(self.fc(x)))).sin())  # type: ignore[no-any-return]

    program = capture(Twice(), (torch.randn(4, 4),), loss=lambda out: out.sum(), accumulate=accumulate)
    prefix = "micro_0/" if accumulate > 1 else ""
    relus = {op.outputs[0]: op.module for op in program.step.ops if op.type == "aten.relu.default"}
    assert relus[f"{prefix}relu"] == relus[f"{prefix}relu_2"] == "relu"
    assert relus[f"{prefix}relu_1"] == "relu_1"


class Fallback(nn.Module):
    """Runs another module where the first one fails."""

    def __init__(self, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 4), second

    def forward(self, x: Tensor) -> Tensor:
        try:
            return self.first(x)  # type: ignore[no-any-return]
        except RuntimeError:
            return self.second(x).sin()  # type: ignore[no-any-return]


def test_a_module_that_handles_another_ones_failure_has_not_failed_itself() -> None:
    program = capture(Fallback(nn.Linear(4, 4)), (torch.randn(3, 4),))
    assert program.step.producer("second") is not None


def test_a_module_that_fails_while_a_failure_is_handled_is_named() -> None:
    with pytest.raises(CaptureError, match=r"module '0\.second'"):
        capture(nn.Sequential(Fallback(nn.Linear(6, 4))), (torch.randn(3, 4),))


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
