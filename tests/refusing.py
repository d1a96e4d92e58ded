"""A model whose forward is given, tables of what its forward must not do, and what a capture must leave as it was."""

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

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as hooks

from graphir.capturing.capture import capture
from graphir.errors import CaptureError

GLOBAL = torch.ones(4)
READS = "reads a number out of a tensor, so the step depends on data\n"
SHAPE = "result depends on data\n"


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
        self.nested = ([1],)
        self.shapes = {(1, 2)}
        self.recent: deque[int] = deque([1], maxlen=2)
        self.tables = [torch.ones(4)]
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
    """What a refused body does, what the message says, and of which module.

    The line is marked by ``# here``. Of a change that Python tells nobody of there is none.
    """

    def __init__(self, body: Callable[[Any, Tensor], Tensor], text: str, module: str) -> None:
        self.body, self.text = body, text
        lines, first = inspect.getsourcelines(body)
        self.where = f"module {module!r}" if module else "the model"
        for line, found in enumerate(lines, first):
            if "# here" in found:
                self.where += f", at {Path(inspect.getfile(body)).name}:{line}"

    def check(self) -> None:
        """The capture is refused with the module, the line and a remedy, and leaves everything as it was."""
        net = Net(self.body)
        with nothing_left_behind(net), pytest.raises(CaptureError, match=re.escape(self.text)) as error:
            capture(net, (torch.ones(6, 4),), targets=(torch.zeros(6, dtype=torch.int64),), loss=F.cross_entropy)
        assert error.value.where == self.where
        assert error.value.fix and type(error.value) is CaptureError


class Cases(dict[str, Case]):
    """Refused bodies, by name."""

    def refused(self, text: str, module: str = "inner") -> Callable[[Callable[[Any, Tensor], Tensor]], None]:
        """Add a body."""

        def add(body: Callable[[Any, Tensor], Tensor]) -> None:
            self[body.__name__] = Case(body, text, module)

        return add


def snapshot(net: Net) -> list[Any]:
    """Everything that a capture must leave as it is, in a form that ``==`` compares."""
    generators = [random.getstate()]
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
