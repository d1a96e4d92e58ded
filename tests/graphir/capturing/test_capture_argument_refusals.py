"""Arguments of capture that don't fit, and models before they run, are refused."""

from __future__ import annotations

import re
from typing import Any

import models
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphir
from graphir.capturing.capture import capture
from graphir.errors import CaptureError


def refuses(text: str, **changes: Any) -> None:
    example = models.mlp()
    given: dict[str, Any] = {"step": example.model, "inputs": example.inputs, "targets": example.targets}
    given |= {"loss": example.loss} | changes
    with pytest.raises(CaptureError, match=re.escape(text)):
        capture(**given)


def test_inputs_that_are_no_tuple() -> None:
    refuses("inputs is a Tensor, not a tuple", inputs=torch.zeros(6, 10))


@pytest.mark.parametrize("kwargs", [3, "ab", [("mask", None)], {1: None}], ids=str)
def test_kwargs_that_are_no_names_and_arguments(kwargs: Any) -> None:
    refuses("kwargs is no mapping of names to arguments", kwargs=kwargs)


def test_an_empty_batch() -> None:
    refuses("the batch is empty: 'x' has no samples", inputs=(torch.zeros(0, 10),), targets=(torch.zeros(0),))


def test_names_that_are_no_strings() -> None:
    example = models.mlp()
    with pytest.raises(CaptureError, match="name is a int, not a string"):
        capture(example.model, example.inputs, name=5)  # type: ignore[arg-type]


def test_models_that_are_no_module() -> None:
    given: dict[str, Any] = {"targets": (), "loss": None}
    refuses("<lambda> uses no module: none is in its cells, globals, defaults or its self", step=lambda x: x, **given)
    refuses("capture takes an nn.Module, not None", step=None)
    refuses("capture takes an nn.Module, not the class Linear", step=torch.nn.Linear)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_modules_that_torchscript_compiled() -> None:
    scripted = torch.jit.script(nn.Linear(10, 5))
    model = nn.Sequential(scripted)
    refuses("modules that TorchScript compiled can't be captured", step=model)
    assert model(torch.zeros(2, 10)).shape == (2, 5)
    for take in (capture, graphir.compile):
        with pytest.raises(CaptureError) as error:
            take(model, (torch.zeros(2, 10),))
        assert error.value.where == "module '0'"


def test_complex_and_sparse_inputs() -> None:
    refuses("argument 'x' is a sparse_coo tensor", inputs=(torch.zeros(6, 10).to_sparse(),))
    refuses("argument 'x' is a complex tensor", inputs=(torch.zeros(6, 10, dtype=torch.complex64),))


def test_unknown_argument_types() -> None:
    refuses("argument 'x' is a object", inputs=(object(),))


def test_arguments_that_contain_themselves() -> None:
    nested: list[Any] = [torch.zeros(6, 10)]
    nested.append(nested)
    refuses("'x' is nested too deep; a container may contain itself", inputs=(nested,))
    refuses("batch_dims does not fit the arguments", batch_dims=nested)


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        ("mse", "loss is a str, not a function\n  fix  pass a function of the model's output and the targets"),
        (3.0, "loss is a float, not a function"),
        (nn.MSELoss, "loss is the class MSELoss, not a loss\n  fix  make one: loss=MSELoss()"),
    ],
)
def test_a_loss_that_is_no_function(loss: Any, text: str) -> None:
    refuses(text, loss=loss)


def test_a_loss_that_takes_other_targets() -> None:
    refuses(
        "the loss can't be called with the model's output and the targets (0): missing", loss=F.mse_loss, targets=()
    )
    refuses(
        "the targets (0): missing a required argument: 'target'\n  fix  pass in targets=", loss=nn.MSELoss(), targets=()
    )
    refuses("the targets (1): too many positional arguments", loss=lambda output: output.sum())
    refuses("targets is a Tensor, not a tuple", loss=F.mse_loss, targets=torch.zeros(6))


@pytest.mark.parametrize(
    ("optimizer", "text"),
    [
        ("sgd", "optimizer is a str, not an optimizer\n  fix  make one: torch.optim.SGD(model.parameters(), lr=0.1)"),
        (torch.optim.SGD, "optimizer is the class SGD, not an optimizer"),
    ],
)
def test_an_optimizer_that_is_none(optimizer: Any, text: str) -> None:
    refuses(text, optimizer=optimizer)


def test_an_optimizer_without_loss() -> None:
    example = models.mlp()
    sgd = torch.optim.SGD(example.model.parameters(), lr=0.1)
    refuses("an optimizer is given, but no loss\n", loss=None, targets=(), step=example.model, optimizer=sgd)


def test_targets_without_loss() -> None:
    refuses("targets are given, but no loss that takes them", loss=None)


def test_a_loss_that_is_no_scalar() -> None:
    refuses(
        "the loss is a tensor of shape [6], not a scalar", loss=lambda y, t: F.cross_entropy(y, t, reduction="none")
    )


def test_a_loss_without_terms() -> None:
    refuses("the loss is an empty dict", loss=lambda y, t: {})


def test_a_loss_that_depends_on_no_parameter() -> None:
    refuses("the loss does not depend on any parameter", loss=lambda y, t: y.detach().sum())


def test_batch_dims_that_do_not_fit() -> None:
    refuses("batch_dims does not fit the arguments", batch_dims=((0, 0, 0), {}, (0,)))


def test_batch_dims_of_different_sizes() -> None:
    refuses("the batch dimensions differ in size (x: 10, target: 6)", batch_dims=((1,), {}, (0,)))


def test_outputs_that_are_no_tensors() -> None:
    class Pair(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, object]:
            return x * 2, object()

    refuses("the model returns a object among its outputs", step=Pair(), targets=(), loss=None)


def test_gradient_hooks() -> None:
    example = models.mlp()
    example.model.fc1.weight.register_hook(lambda g: g * 2)
    refuses("param 'fc1.weight' has a hook on its gradient", step=example.model)


def test_memory_shared_by_two_tensors() -> None:
    example = models.mlp()
    example.model.fc2.bias = nn.Parameter(example.model.fc1.bias.detach()[:5])
    refuses("'fc1.bias' and 'fc2.bias' share memory but are two tensors", step=example.model)


def test_attention_that_draws_for_itself_on_request_only() -> None:
    example = models.gpt(layers=1)
    capture(example.model, example.inputs, targets=example.targets, loss=example.loss)  # dropout_p=0: no refusal


class Doubled(Tensor):
    """A tensor whose sines are others."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result * 2 if func is torch.sin else result


def test_subclasses_of_tensors() -> None:
    refuses("argument 'x' is a Doubled", inputs=(torch.zeros(6, 10).as_subclass(Doubled),))
