"""What can't be captured is refused: the error names the module and a remedy, and everything is as it was."""

from __future__ import annotations

import contextlib
import copy
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import models
import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as hooks
from torch.utils.checkpoint import checkpoint

from graphir.capture import capture
from graphir.errors import CaptureError


class Inner(nn.Module):
    def __init__(self, body: Callable[[Inner, Tensor], Tensor]) -> None:
        super().__init__()
        self.body = body
        self.fc = nn.Linear(4, 4)
        self.register_buffer("counter", torch.zeros(4))
        self.scale = torch.tensor(2.0)
        self.calls = 0
        self.hidden: Tensor | None = None
        self.seen: list[Any] = [1, [2]]
        self.cache: dict[str, Any] = {"kept": {"inner": 1}}
        self.shapes = {(1, 2)}

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, self.fc(x))


class Net(nn.Module):
    def __init__(self, body: Callable[[Inner, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner = Inner(body)
        self.out = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.inner(x))


def rebind_buffer(m: Inner, h: Tensor) -> Tensor:
    m.counter = m.counter + 1
    return h


def count_calls(m: Inner, h: Tensor) -> Tensor:
    m.calls += 1
    return h * m.calls


def keep_hidden(m: Inner, h: Tensor) -> Tensor:
    m.hidden = h.detach()
    return h


def append(m: Inner, h: Tensor) -> Tensor:
    m.seen.append(h)
    return h


def append_inside(m: Inner, h: Tensor) -> Tensor:
    m.seen[1].append(3)
    return h


def cache_in_dict(m: Inner, h: Tensor) -> Tensor:
    m.cache["h"] = h.detach()
    return h


def count_in_dict(m: Inner, h: Tensor) -> Tensor:
    m.cache["kept"]["inner"] += 1
    return h


def add_to_set(m: Inner, h: Tensor) -> Tensor:
    m.shapes.add(tuple(h.shape))
    return h


def new_list(m: Inner, h: Tensor) -> Tensor:
    m.seen = [h, h]
    return h


def fail_after_caching(m: Inner, h: Tensor) -> Tensor:
    m.cache["h"] = h
    raise KeyError("missing")


def overwrite_attribute(m: Inner, h: Tensor) -> Tensor:
    m.scale.mul_(2)
    return h * m.scale


def write_out(m: Inner, h: Tensor) -> Tensor:
    return h + torch.mul(h.detach(), 2, out=torch.empty(6, 4))


def through_numpy(m: Inner, h: Tensor) -> Tensor:
    return h * float(h.detach().numpy().sum())


REFUSED: dict[str, tuple[Callable[[Inner, Tensor], Tensor], str]] = {
    "item": (lambda m, h: h * h.sum().item(), "reads a number out of a tensor, so the step depends on data"),
    "if": (lambda m, h: h if h.sum() > 0 else -h, "torch.where chooses by data"),
    "nonzero": (lambda m, h: h[h.nonzero()[:, 0]], "the shape of aten.nonzero.default's result depends on data"),
    "mask": (lambda m, h: h * h[h > 0].sum(), "a boolean mask selects an unknown number of elements"),
    "unique": (lambda m, h: h * len(torch.unique(h)), "depends on data"),
    "cond": (lambda m, h: torch.cond(h.sum() > 0, torch.sin, torch.cos, (h,)), "cond can't be captured"),
    "reentrant": (lambda m, h: checkpoint(torch.sin, h, use_reentrant=True), "pass use_reentrant=False"),
    "rebinding": (rebind_buffer, "write the value into it: self.counter.copy_(value)"),
    "counting": (count_calls, "the step changes the attribute 'calls'"),
    "hidden state": (keep_hidden, "the step changes the attribute 'hidden'"),
    "list": (append, "the step changes what the attribute 'seen' holds"),
    "list in list": (append_inside, "the step changes what the attribute 'seen' holds"),
    "dict": (cache_in_dict, "the step changes what the attribute 'cache' holds"),
    "dict in dict": (count_in_dict, "the step changes what the attribute 'cache' holds"),
    "set": (add_to_set, "the step changes what the attribute 'shapes' holds"),
    "new list": (new_list, "the step changes the attribute 'seen'"),
    "failure": (fail_after_caching, "the step failed while it was recorded: KeyError: 'missing'"),
    "attribute": (overwrite_attribute, "overwrites 'inner.scale', which is neither parameter nor buffer"),
    "out=": (write_out, "aten.mul.out overwrites a tensor and has no functional form"),
    "numpy": (through_numpy, ".numpy() is not supported"),
    "sparse": (lambda m, h: torch.sparse.mm(h.to_sparse(), h.t())[:, :1] + h, "makes a sparse_coo tensor"),
    "python's random": (lambda m, h: h * random.random(), "the step draws from Python's random,"),
    "numpy's random": (lambda m, h: h * numpy.random.rand(), "the step draws from numpy.random"),
    "wrong shapes": (lambda m, h: h @ torch.zeros(3, 3), "a and b must have same reduction dim"),
    "resize": (lambda m, h: h + torch.zeros(2).resize_(4), "changes what a tensor refers to"),
}


@contextlib.contextmanager
def nothing_left_behind() -> Iterator[None]:
    random_state, python_state, numpy_state = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    yield
    assert torch.equal(torch.get_rng_state(), random_state)
    assert random.getstate() == python_state
    assert all(map(numpy.array_equal, numpy.random.get_state(), numpy_state))
    assert not hooks._global_forward_hooks and not hooks._global_forward_pre_hooks
    assert torch.get_rng_state is torch.random.get_rng_state and torch.get_rng_state.__module__ == "torch.random"


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_module_and_remedy(case: str) -> None:
    body, text = REFUSED[case]
    net = Net(body)
    attributes = [dict(m.__dict__) for m in net.modules()]
    held = copy.deepcopy([net.inner.seen, net.inner.cache, net.inner.shapes])
    tables = [(dict(m._parameters), dict(m._buffers)) for m in net.modules()]
    values = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    with nothing_left_behind(), pytest.raises(CaptureError, match=re.escape(text)) as error:
        capture(net, (torch.ones(6, 4),), targets=(torch.zeros(6, dtype=torch.int64),), loss=F.cross_entropy)
    assert error.value.fix
    if case not in ("python's random", "numpy's random"):
        assert error.value.where == "module 'inner'"
    assert [dict(m.__dict__) for m in net.modules()] == attributes
    assert [net.inner.seen, net.inner.cache, net.inner.shapes] == held
    assert [(dict(m._parameters), dict(m._buffers)) for m in net.modules()] == tables
    assert all(torch.equal(tensor, values[name]) for name, tensor in net.state_dict().items())
    assert all(param.grad is None for param in net.parameters())


def refused(text: str, **changes: Any) -> None:
    example = models.mlp()
    given: dict[str, Any] = {"model": example.model, "inputs": example.inputs, "targets": example.targets}
    given |= {"loss": example.loss} | changes
    with pytest.raises(CaptureError, match=re.escape(text)):
        capture(**given)


def test_inputs_that_are_no_tuple() -> None:
    refused("inputs is a Tensor, not a tuple", inputs=torch.zeros(6, 10))


def test_an_empty_batch() -> None:
    refused("the batch is empty: 'x' has no samples", inputs=(torch.zeros(0, 10),), targets=(torch.zeros(0),))


def test_models_that_are_no_module() -> None:
    refused("capture takes an nn.Module, not a function", model=lambda x: x)
    refused("capture takes an nn.Module, not None", model=None)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_modules_that_torchscript_compiled() -> None:
    scripted = torch.jit.script(nn.Linear(10, 5))
    model = nn.Sequential(scripted)
    refused("modules that TorchScript compiled can't be captured", model=model)
    assert model(torch.zeros(2, 10)).shape == (2, 5)
    with pytest.raises(CaptureError) as error:
        capture(model, (torch.zeros(2, 10),))
    assert error.value.where == "module '0'"


def test_complex_inputs() -> None:
    refused("argument 'x' is a complex tensor", inputs=(torch.zeros(6, 10, dtype=torch.complex64),))


def test_unknown_argument_types() -> None:
    refused("argument 'x' is a object", inputs=(object(),))


def test_targets_without_loss() -> None:
    refused("targets are given, but no loss that takes them", loss=None)


def test_a_loss_that_is_no_scalar() -> None:
    refused(
        "the loss is a tensor of shape [6], not a scalar", loss=lambda y, t: F.cross_entropy(y, t, reduction="none")
    )


def test_a_loss_that_depends_on_no_parameter() -> None:
    refused("the loss does not depend on any parameter", loss=lambda y, t: y.detach().sum())


def test_batch_dims_that_do_not_fit() -> None:
    refused("batch_dims does not fit the arguments", batch_dims=((0, 0, 0), {}, (0,)))


def test_batch_dims_of_different_sizes() -> None:
    refused("the batch dimensions differ in size (x: 10, target: 6)", batch_dims=((1,), {}, (0,)))


def test_outputs_that_are_no_tensors() -> None:
    class Pair(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, object]:
            return x * 2, object()

    refused("the model returns a object among its outputs", model=Pair(), targets=(), loss=None)


def test_gradient_hooks() -> None:
    example = models.mlp()
    example.model.fc1.weight.register_hook(lambda g: g * 2)
    refused("param 'fc1.weight' has a hook on its gradient", model=example.model)


def test_memory_shared_by_two_tensors() -> None:
    example = models.mlp()
    example.model.fc2.bias = nn.Parameter(example.model.fc1.bias.detach()[:5])
    refused("'fc2.bias' and 'fc1.bias' share memory but are two tensors", model=example.model)


def test_attention_that_draws_for_itself_on_request_only() -> None:
    example = models.gpt(layers=1)
    capture(example.model, example.inputs, targets=example.targets, loss=example.loss)  # dropout_p=0: no refusal
