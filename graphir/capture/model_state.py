"""The model's parameters and buffers, and fakes in their place while the model runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy

from ..errors import CaptureError
from ..ir.tensor import PLAIN
from .attributes import TABLES, Attributes, Change
from .conditions import Broken, Conditions
from .libraries import Outside
from .naming import RESERVED, Names
from .overlaps import overlaps
from .refusals import DENSE, where
from .tables import Table

__all__ = [
    "ModelState",
    "StateTensor",
    "attributes_kept",
    "fakes_in_place",
    "has_data",
    "read_state",
]


class StateTensor(NamedTuple):
    """A parameter or buffer: its blob's name, its role, and the tensor itself."""

    name: str
    kind: str
    tensor: torch.Tensor


class ModelState(NamedTuple):
    """The parameters and buffers of a model.

    Attributes:
        tensors: each parameter and buffer once, parameters first, in the module's order.
        module_state: each name of ``module.state_dict()`` and its blob.
        by_id: the blob of each tensor, by the tensor's ``id``.
    """

    tensors: tuple[StateTensor, ...]
    module_state: dict[str, str]
    by_id: dict[int, str]


def read_state(model: torch.nn.Module, hooked: bool = False) -> ModelState:
    """The model's state; a tensor under several names is one blob, called by the first.

    Args:
        model: the module.
        hooked: whether parameters may have hooks on their gradients, since the step adds up none.

    Raises:
        CaptureError: a tensor is of a kind that programs don't have, has hooks, or shares memory with another one.
    """
    names = Names(RESERVED)
    by_id: dict[int, str] = {}
    tensors: list[StateTensor] = []
    for kind, named in (("param", model.named_parameters()), ("buffer", model.named_buffers())):
        for path, tensor in named:
            if id(tensor) not in by_id:
                _check(path, kind, tensor, hooked)
                name = by_id[id(tensor)] = names.take(path)
                tensors.append(StateTensor(name, kind, tensor))
    _check_memory(tensors)
    state = model.state_dict(keep_vars=True)
    module_state = {key: by_id[id(value)] for key, value in state.items() if id(value) in by_id}
    return ModelState(tuple(tensors), module_state, by_id)


def _check(path: str, kind: str, tensor: torch.Tensor, hooked: bool) -> None:
    owner = where(path.rpartition(".")[0])
    if is_lazy(tensor):
        raise CaptureError(
            f"{kind} {path!r} has no shape yet", where=owner, fix="run the model once, which gives lazy modules theirs"
        )
    if type(tensor) not in PLAIN or tensor.layout != torch.strided:
        what = f"a {type(tensor).__name__} of layout {tensor.layout}"
        raise CaptureError(f"{kind} {path!r} is {what}, which is not supported", where=owner, fix=DENSE)
    if tensor.is_complex():
        raise CaptureError(
            f"{kind} {path!r} is complex, which is not supported", where=owner, fix="store real and imaginary parts"
        )
    if not hooked and (tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None)):
        raise CaptureError(
            f"{kind} {path!r} has a hook on its gradient, which a program would not run",
            where=owner,
            fix="remove the hook, or do what it does in the loss or in the optimizer",
        )


def _check_memory(tensors: list[StateTensor]) -> None:
    shared = overlaps((name, tensor) for name, _, tensor in tensors)
    for name, _, _ in tensors:
        if name in shared:
            raise CaptureError(
                f"{name!r} and {shared[name]!r} share memory but are two tensors",
                where=where(name.rpartition(".")[0]),
                fix="register one tensor under both names, or clone one of them",
            )


def has_data(tensor: torch.Tensor) -> bool:
    """Whether there is memory behind a tensor; there is none on meta and under a ``FakeTensorMode``."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


@contextlib.contextmanager
def attributes_kept(attributes: Sequence[Attributes]) -> Iterator[None]:
    """Afterwards the attributes of every module are what they were."""
    try:
        yield
    finally:
        for kept in attributes:
            kept.restore()


@contextlib.contextmanager
def fakes_in_place(
    model: torch.nn.Module, fakes: Mapping[int, torch.Tensor], conditions: Conditions, attributes: Sequence[Attributes]
) -> Iterator[list[Change]]:
    """Put a fake in the place of each parameter and buffer, for this thread; afterwards they are as they were.

    Args:
        model: the module.
        fakes: by ``id`` of the tensor that each stands for.
        conditions: is given the condition that each module is left as it was.
        attributes: of each module, as they are now.

    Yields:
        A list that is filled afterwards with the changes that a second step has to tell about.

    Raises:
        Broken: the model rebound a buffer, or changed an attribute otherwise.
    """
    modules = list(model.named_modules())
    saved = [(dict(m._parameters), dict(m._buffers)) for _, m in modules]
    changes: list[Change] = []
    own = [(module.__dict__, name, module.__dict__[name]) for _, module in modules for name in TABLES]
    tables: list[Table] = []
    try:
        for attributes_of_module, name, table in own:
            tables.append(Table(table, {key: _fake_of(tensor, key, fakes) for key, tensor in table.items()}))
            attributes_of_module[name] = tables[-1]
        checks = {
            path: partial(_changed, path, module, kept, before, fakes)
            for (path, module), kept, before in zip(modules, attributes, saved, strict=True)
        }
        conditions.update({f"module {path}": check for path, check in checks.items()})
        conditions.update({f"private {path}": partial(_check_private, check) for path, check in checks.items()})
        yield changes
        changes += [change for check in checks.values() for change in check()]
    finally:
        for attributes_of_module, name, table in own:
            attributes_of_module[name] = table
        for stand_in in tables:
            stand_in.release()


def _fake_of(tensor: torch.Tensor | None, key: str, fakes: Mapping[int, torch.Tensor]) -> torch.Tensor | None:
    if tensor is not None and id(tensor) not in fakes:
        raise CaptureError(
            f"another tensor has taken the place of {key!r} since the capture began",
            fix="let no other thread exchange parameters or buffers meanwhile; it may write into them",
        )
    return None if tensor is None else fakes[id(tensor)]


def _check_gradient(path: str, kind: str, key: str, tensor: torch.Tensor, fake: torch.Tensor) -> None:
    if fake.requires_grad == tensor.requires_grad and fake.grad is None and not fake._backward_hooks:
        return
    what = f"{kind} {key!r}"
    for broken, doing, fix in (
        (fake._backward_hooks, "puts a hook on the gradient of", "do what the hook does in the loss"),
        (fake.grad is not None, "computes a gradient of its own for", "call torch.autograd.grad, or add to the loss"),
        (fake.requires_grad != tensor.requires_grad, "sets requires_grad of", Outside("set it before the capture")),
    ):
        if broken:
            raise Broken(f"module {path}", f"the step {doing} {what}", where=where(path), fix=fix)


def _changed(
    path: str,
    module: torch.nn.Module,
    attributes: Attributes,
    saved: tuple[Mapping[str, Any], Mapping[str, Any]],
    fakes: Mapping[int, torch.Tensor],
) -> list[Change]:
    parameters, buffers = saved
    for kind, table, before in (("parameter", module._parameters, parameters), ("buffer", module._buffers, buffers)):
        for key in dict.fromkeys([*before, *table]) if before or table else ():
            old = before.get(key)
            if table.get(key) is not (None if old is None else fakes[id(old)]):
                raise Broken(
                    f"module {path}",
                    f"the step rebinds {kind} {key!r}: a new tensor takes its place instead of a new value",
                    where=where(path),
                    fix=Outside(
                        f"write the value into it: self.{key}.copy_(value); "
                        "if the first step alone sets it up, run one before the capture"
                    ),
                )
            if old is not None:
                _check_gradient(path, kind, key, old, fakes[id(old)])
    return attributes.changed(fakes)


def _check_private(check: Callable[[], list[Change]]) -> None:
    for change in check():
        raise change.complaint
