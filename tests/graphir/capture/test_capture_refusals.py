"""What can't be captured is refused: with the module, the line and a remedy; and everything is as it was."""

from __future__ import annotations

import contextlib
import gc
import inspect
import logging
import random
import re
import sys
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import models
import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops import while_loop
from torch.nn.modules import module as hooks
from torch.utils.checkpoint import checkpoint

from graphir.capture import capture
from graphir.errors import CaptureError

HERE = Path(__file__).name
GLOBAL = torch.ones(4)


class Subclass(torch.Tensor):
    """A tensor of a user's own."""


@torch.library.custom_op("graphir_tests::foreign", mutates_args=())
def foreign(x: Tensor) -> Tensor:
    return x * 2


foreign.register_fake(torch.empty_like)


class Inner(nn.Module):
    def __init__(self, body: Callable[[Any, Tensor], Tensor]) -> None:
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
        self.recent: deque[int] = deque([1], maxlen=2)
        self.tables = [torch.ones(4)]
        self.params = [self.fc.weight]
        self.subclass = torch.ones(4).as_subclass(Subclass)
        self.book = SimpleNamespace(calls=0)
        self.python = random.Random(0)
        self.numpy = numpy.random.default_rng(0)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, self.fc(x))


class Net(nn.Module):
    def __init__(self, body: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner = Inner(body)
        self.out = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.inner(x))


class Case:
    """What a refused body does, what the message says, and of which module; the line is marked by ``# here``."""

    def __init__(self, body: Callable[[Any, Tensor], Tensor], text: str, module: str) -> None:
        self.body, self.text = body, text
        lines, first = inspect.getsourcelines(body)
        line = first + next(i for i, found in enumerate(lines) if "# here" in found)
        self.where = f"module {module!r}, at {HERE}:{line}"


CASES: dict[str, Case] = {}
READS = "reads a number out of a tensor, so the step depends on data\n"
SHAPE = "result depends on data\n"


def refused(text: str, module: str = "inner") -> Callable[[Callable[[Any, Tensor], Tensor]], None]:
    """Add a body to the table of what is refused."""

    def add(body: Callable[[Any, Tensor], Tensor]) -> None:
        CASES[body.__name__] = Case(body, text, module)

    return add


# Numbers of tensors


@refused(READS)
def item(m: Any, h: Tensor) -> Tensor:
    return h * h.sum().item()  # here


@refused(READS)
def as_float(m: Any, h: Tensor) -> Tensor:
    return h * float(h.sum())  # here


@refused(READS)
def as_int(m: Any, h: Tensor) -> Tensor:
    return h[: int(h.sum())]  # here


@refused(READS)
def as_bool(m: Any, h: Tensor) -> Tensor:
    return h * bool(h.sum() > 0)  # here


@refused(READS)
def branch(m: Any, h: Tensor) -> Tensor:
    h = h * 2
    if h.sum() > 0:  # here
        return h
    return -h


@refused(READS)
def as_list(m: Any, h: Tensor) -> Tensor:
    return h * h.sum(0).tolist()[0]  # here


@refused(".tolist() reads numbers out of a tensor, so the step depends on data")
def list_of_what_holds_data(m: Any, h: Tensor) -> Tensor:
    return h * m.tables[0].tolist()[0]  # here


@refused(".numpy() reads numbers out of a tensor, so the step depends on data")
def as_numpy(m: Any, h: Tensor) -> Tensor:
    return h * float(h.detach().numpy().sum())  # here


@refused(".numpy() reads numbers out of a tensor, so the step depends on data")
def numpy_of_what_holds_data(m: Any, h: Tensor) -> Tensor:
    return h * float(numpy.asarray(GLOBAL)[0])  # here


@refused(".__format__() reads numbers out of a tensor, so the step depends on data")
def formatted(m: Any, h: Tensor) -> Tensor:
    return h * float(f"{h.sum():.3f}")  # here


@refused("aten.equal.default reads a number out of a tensor")
def equal(m: Any, h: Tensor) -> Tensor:
    return h if torch.equal(h, h + 1) else -h  # here


@refused(READS)
def caught(m: Any, h: Tensor) -> Tensor:
    try:
        return h * h.sum().item()  # here
    except Exception:
        return h


# Shapes and branches that depend on data


@refused(f"the shape of aten.nonzero.default's {SHAPE}")
def nonzero(m: Any, h: Tensor) -> Tensor:
    return h[h.nonzero()[:, 0]]  # here


@refused(f"the shape of aten.masked_select.default's {SHAPE}")
def masked_select(m: Any, h: Tensor) -> Tensor:
    return h * h.masked_select(h > 0).sum()  # here


@refused("a boolean mask selects an unknown number of elements")
def mask(m: Any, h: Tensor) -> Tensor:
    return h * h[h > 0].sum()  # here


@refused(SHAPE)
def unique(m: Any, h: Tensor) -> Tensor:
    return h * len(torch.unique(h))  # here


@refused(f"the shape of aten.repeat_interleave.Tensor's {SHAPE}")
def repeat_interleave(m: Any, h: Tensor) -> Tensor:
    return h * torch.repeat_interleave(h, torch.arange(6), dim=0).sum()  # here


@refused("cond can't be captured: which branch runs depends on data")
def cond(m: Any, h: Tensor) -> Tensor:
    return torch.cond(h.sum() > 0, torch.sin, torch.cos, (h,))  # here


@refused("can't be captured: which branch runs depends on data")
def loop(m: Any, h: Tensor) -> Tensor:
    (h,) = while_loop(lambda x: x.sum() < 9, lambda x: (x + 1,), (h,))  # here
    return h


@refused("reentrant checkpointing runs a backward of its own inside the backward\n")
def reentrant(m: Any, h: Tensor) -> Tensor:
    return checkpoint(torch.sin, h, use_reentrant=True)  # here


# State that is not overwritten in place


@refused("the step rebinds buffer 'counter'")
def rebound_buffer(m: Any, h: Tensor) -> Tensor:
    m.counter = m.counter + 1  # here
    return h


@refused("the step rebinds parameter 'weight'", module="inner.fc")
def rebound_parameter(m: Any, h: Tensor) -> Tensor:
    m.fc.weight = nn.Parameter(m.fc.weight * 2)  # here
    return h * 2


@refused("the step gives param 'inner.fc.weight' other memory (.data = …)")
def exchanged_memory(m: Any, h: Tensor) -> Tensor:
    m.fc.weight.data = m.fc.weight.data * 2  # here
    h = h + 1
    return h @ m.fc.weight


@refused("aten.resize_.default changes what a tensor refers to")
def resized(m: Any, h: Tensor) -> Tensor:
    return h + torch.zeros(2).resize_(4)  # here


@refused("aten.resize_as_.default changes what a tensor refers to")
def resized_like_another(m: Any, h: Tensor) -> Tensor:
    return h + torch.zeros(2).resize_as_(h)  # here


@refused("aten.set_.source_Tensor changes what a tensor refers to")
def pointed_elsewhere(m: Any, h: Tensor) -> Tensor:
    other = h.detach().clone()
    other.set_(h.detach())  # here
    return h + other


@refused("aten.mul.out overwrites a tensor and has no functional form")
def written_out(m: Any, h: Tensor) -> Tensor:
    return h + torch.mul(h.detach(), 2, out=torch.empty(6, 4))  # here


@refused("aten.mul_.Tensor overwrites 'inner.scale', which is neither parameter nor buffer")
def overwritten_attribute(m: Any, h: Tensor) -> Tensor:
    m.scale.mul_(2)  # here
    return h * m.scale


@refused("aten.add_.Tensor overwrites 'inner.tables.0', which is neither parameter nor buffer")
def overwritten_item(m: Any, h: Tensor) -> Tensor:
    return h * m.tables[0].add_(1)  # here


@refused("aten.add_.Tensor overwrites 'constant', which is neither parameter nor buffer")
def overwritten_global(m: Any, h: Tensor) -> Tensor:
    GLOBAL.add_(1)  # here
    return h * GLOBAL


@refused("the step puts a hook on the gradient of parameter 'weight'", module="inner.fc")
def hooked_parameter(m: Any, h: Tensor) -> Tensor:
    m.fc.weight.register_hook(lambda gradient: gradient * 2)  # here
    return h


@refused("the step computes a gradient of its own for parameter 'weight'", module="inner.fc")
def backward_inside(m: Any, h: Tensor) -> Tensor:
    h.sum().backward(retain_graph=True)  # here
    return h


@refused("the step sets requires_grad of parameter 'weight'", module="inner.fc")
def frozen_late(m: Any, h: Tensor) -> Tensor:
    m.fc.weight.requires_grad_(False)  # here
    return h


@refused("that needs a gradient and is no parameter of the modules that run")
def parameter_in_a_list(m: Any, h: Tensor) -> Tensor:
    return h @ m.params[0]  # here


# Attributes that change


@refused("the step changes the attribute 'calls'")
def counted(m: Any, h: Tensor) -> Tensor:
    m.calls += 1  # here
    return h * m.calls


@refused("the step changes the attribute 'hidden'")
def kept(m: Any, h: Tensor) -> Tensor:
    before = 1 if m.hidden is None else m.hidden
    m.hidden = h.detach()  # here
    return h * before


@refused("the step changes the attribute 'training'")
def switched(m: Any, h: Tensor) -> Tensor:
    m.training = False  # here
    return h


@refused("the step changes what the attribute 'seen' holds")
def appended(m: Any, h: Tensor) -> Tensor:
    m.seen.append(h)  # here
    return h


@refused("the step changes what the attribute 'seen' holds")
def appended_inside(m: Any, h: Tensor) -> Tensor:
    def note() -> None:
        m.seen[1].append(3)  # here

    note()
    return h


@refused("the step changes the attribute 'seen'")
def new_list(m: Any, h: Tensor) -> Tensor:
    m.seen = [*m.seen, h]  # here
    return h


@refused("the step changes what the attribute 'cache' holds")
def cached(m: Any, h: Tensor) -> Tensor:
    m.cache["h"] = h.detach()  # here
    return h


@refused("the step changes what the attribute 'cache' holds")
def counted_in_a_dict(m: Any, h: Tensor) -> Tensor:
    m.cache["kept"]["inner"] += 1  # here
    return h


@refused("the step changes what the attribute 'shapes' holds")
def added_to_a_set(m: Any, h: Tensor) -> Tensor:
    m.shapes.add(tuple(h.shape))  # here
    return h


@refused("the step changes what the attribute 'recent' holds")
def put_into_a_deque(m: Any, h: Tensor) -> Tensor:
    m.recent.append(2)  # here
    return h


@refused("the step changes what the attribute 'book' holds")
def counted_in_an_object(m: Any, h: Tensor) -> Tensor:
    m.book.calls += 1  # here
    return h * m.book.calls


# Random numbers that are not torch's


@refused("the step draws from Python's random")
def layer_drop(m: Any, h: Tensor) -> Tensor:
    for _ in range(2):
        if random.uniform(0, 1) < 0.5:  # here
            h = h * 2
    return h


@refused("the step draws from numpy.random")
def drawn_by_numpy(m: Any, h: Tensor) -> Tensor:
    return h * numpy.random.rand()  # here


@refused("the step changes what the attribute 'python' holds")
def drawn_by_a_generator_of_pythons(m: Any, h: Tensor) -> Tensor:
    return h * m.python.random()  # here


@refused("the step changes what the attribute 'numpy' holds")
def drawn_by_a_generator_of_numpys(m: Any, h: Tensor) -> Tensor:
    return h * float(m.numpy.random())  # here


@refused("the step calls torch.manual_seed")
def seeded_inside(m: Any, h: Tensor) -> Tensor:
    torch.manual_seed(3)  # here
    return F.dropout(h)


# Kinds of tensors and operators


@refused("aten._to_sparse.default makes a sparse_coo tensor")
def sparse(m: Any, h: Tensor) -> Tensor:
    return torch.sparse.mm(h.to_sparse(), h.t())[:, :1] + h  # here


@refused("torch.qint8 is not supported")
def quantized(m: Any, h: Tensor) -> Tensor:
    return h + torch.quantize_per_tensor(h.detach(), 0.1, 0, torch.qint8).dequantize()  # here


@refused("torch can't tell the shape of what aten._nested_tensor_from_tensor_list.default makes")
def nested(m: Any, h: Tensor) -> Tensor:
    return h + torch.nested.nested_tensor([h.detach()]).to_padded_tensor(0.0)[0]  # here


@refused("a tensor of type Subclass is not supported")
def subclassed(m: Any, h: Tensor) -> Tensor:
    return h + m.subclass  # here


@refused("operator graphir_tests.foreign.default is not one of torch's own")
def foreign_operator(m: Any, h: Tensor) -> Tensor:
    return h + foreign(h)  # here


# Settings and failures


@refused("the step changes the default dtype for everything that comes after it")
def other_default_dtype(m: Any, h: Tensor) -> Tensor:
    torch.set_default_dtype(torch.float64)  # here
    return h * 2


@refused("the step changes whether gradients are computed for everything that comes after it")
def no_gradients_from_here(m: Any, h: Tensor) -> Tensor:
    h = h * 2
    torch.set_grad_enabled(False)  # here
    return h


@refused("the step failed while it was recorded: KeyError: 'missing'")
def failed(m: Any, h: Tensor) -> Tensor:
    m.cache["h"] = h
    torch.set_default_dtype(torch.float64)
    raise KeyError("missing")  # here


@refused("a and b must have same reduction dim")
def wrong_shapes(m: Any, h: Tensor) -> Tensor:
    return h @ torch.zeros(3, 3)  # here


def snapshot(net: Net) -> list[Any]:
    """Everything that a capture must leave as it is, in a form that ``==`` compares."""
    generators = [net.inner.python.getstate(), net.inner.numpy.bit_generator.state, random.getstate()]
    attributes = [
        {key: value for key, value in vars(m).items() if not isinstance(value, (dict, Tensor))} for m in net.modules()
    ]
    held = [net.inner.seen, net.inner.cache, net.inner.shapes, net.inner.recent, vars(net.inner.book)]
    tensors = {**dict(net.named_parameters()), **dict(net.named_buffers()), "scale": net.inner.scale, "global": GLOBAL}
    tensors["table"] = net.inner.tables[0]
    states = [
        (name, id(t), t.tolist(), t.requires_grad, t.grad is None, t._version, t._backward_hooks)
        for name, t in tensors.items()
    ]
    patched = [
        torch.initial_seed,
        torch.get_rng_state,
        torch.random.get_rng_state,
        torch.set_rng_state,
        torch.Tensor.numpy,
    ]
    patched += [torch.Tensor.tolist, torch.Tensor.__format__, nn.Module.__setattr__, sys.gettrace()]
    settings = [torch.is_grad_enabled(), torch.get_default_dtype(), torch.is_autocast_enabled("cpu"), gc.isenabled()]
    settings += [torch.get_rng_state().tolist(), str(numpy.random.get_state()), torch.is_inference_mode_enabled()]
    settings += [torch._C._len_torch_dispatch_stack(), logging.getLogger("torch._subclasses.fake_tensor").disabled]
    global_hooks = [dict(hooks._global_forward_hooks), dict(hooks._global_forward_pre_hooks)]
    return [generators, attributes, repr(held), states, patched, settings, global_hooks]


@contextlib.contextmanager
def nothing_left_behind(net: Net) -> Iterator[None]:
    before = snapshot(net)
    try:
        yield
    finally:
        after = snapshot(net)
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
    for old, new in zip(before, after, strict=True):
        assert old == new


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning", "ignore:.*quantiz:UserWarning")
def test_refused_with_module_line_and_remedy(case: str) -> None:
    expected = CASES[case]
    net = Net(expected.body)
    with nothing_left_behind(net), pytest.raises(CaptureError, match=re.escape(expected.text)) as error:
        capture(net, (torch.ones(6, 4),), targets=(torch.zeros(6, dtype=torch.int64),), loss=F.cross_entropy)
    assert error.value.where == expected.where
    assert error.value.fix and type(error.value) is CaptureError


def test_an_interrupted_capture_leaves_nothing_behind() -> None:
    def interrupt(m: Any, h: Tensor) -> Tensor:
        m.seen.append(h)
        m.counter.add_(1)
        torch.set_grad_enabled(False)
        raise KeyboardInterrupt

    net = Net(interrupt)
    with nothing_left_behind(net), pytest.raises(KeyboardInterrupt):
        capture(net, (torch.ones(6, 4),), loss=lambda out: out.sum())


def test_a_capture_leaves_nothing_behind() -> None:
    net = Net(lambda m, h: F.dropout(h) + m.counter.add_(1))
    with nothing_left_behind(net):
        capture(net, (torch.ones(6, 4),), loss=lambda out: out.sum())


def test_the_backward_of_a_user_and_the_loss_are_refused_with_their_lines() -> None:
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * gradient.sum().item()

    def loss(out: Tensor) -> Tensor:
        return out.sum() * out.max().item()

    line = inspect.getsourcelines(Scaled.backward)[1] + 2
    with pytest.raises(CaptureError) as error:
        capture(Net(lambda m, h: Scaled.apply(h)), (torch.ones(6, 4),), loss=lambda out: out.sum())
    assert error.value.where == f"module 'inner', at {HERE}:{line}"
    line = inspect.getsourcelines(loss)[1] + 1
    with pytest.raises(CaptureError) as error:
        capture(Net(lambda m, h: h), (torch.ones(6, 4),), loss=loss)
    assert error.value.where == f"the loss function, at {HERE}:{line}"


def test_printing_is_no_reading(capsys: pytest.CaptureFixture[str]) -> None:
    def show(m: Any, h: Tensor) -> Tensor:
        print(h, m.fc.weight, m.scale, f"{h.sum()}")
        return h

    program = capture(Net(show), (torch.ones(6, 4),), loss=lambda out: out.sum())
    assert not any(blob.role == "constant" for blob in program.step.blobs.values())
    assert "FakeTensor" in capsys.readouterr().out


# Arguments, and models before they run


def refuses(text: str, **changes: Any) -> None:
    example = models.mlp()
    given: dict[str, Any] = {"model": example.model, "inputs": example.inputs, "targets": example.targets}
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
    refuses("capture takes an nn.Module, not a function", model=lambda x: x)
    refuses("capture takes an nn.Module, not None", model=None)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_modules_that_torchscript_compiled() -> None:
    scripted = torch.jit.script(nn.Linear(10, 5))
    model = nn.Sequential(scripted)
    refuses("modules that TorchScript compiled can't be captured", model=model)
    assert model(torch.zeros(2, 10)).shape == (2, 5)
    with pytest.raises(CaptureError) as error:
        capture(model, (torch.zeros(2, 10),))
    assert error.value.where == "module '0'"


def test_complex_inputs() -> None:
    refuses("argument 'x' is a complex tensor", inputs=(torch.zeros(6, 10, dtype=torch.complex64),))


def test_unknown_argument_types() -> None:
    refuses("argument 'x' is a object", inputs=(object(),))


def test_targets_without_loss() -> None:
    refuses("targets are given, but no loss that takes them", loss=None)


def test_a_loss_that_is_no_scalar() -> None:
    refuses(
        "the loss is a tensor of shape [6], not a scalar", loss=lambda y, t: F.cross_entropy(y, t, reduction="none")
    )


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

    refuses("the model returns a object among its outputs", model=Pair(), targets=(), loss=None)


def test_gradient_hooks() -> None:
    example = models.mlp()
    example.model.fc1.weight.register_hook(lambda g: g * 2)
    refuses("param 'fc1.weight' has a hook on its gradient", model=example.model)


def test_memory_shared_by_two_tensors() -> None:
    example = models.mlp()
    example.model.fc2.bias = nn.Parameter(example.model.fc1.bias.detach()[:5])
    refuses("'fc2.bias' and 'fc1.bias' share memory but are two tensors", model=example.model)


def test_attention_that_draws_for_itself_on_request_only() -> None:
    example = models.gpt(layers=1)
    capture(example.model, example.inputs, targets=example.targets, loss=example.loss)  # dropout_p=0: no refusal
