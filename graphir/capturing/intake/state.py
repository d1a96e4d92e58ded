"""What a step starts from: the model's parameters and buffers, and which tensors share memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy

from ...errors import CaptureError
from ...ir.blob import reach
from ...ir.names import RESERVED, Names
from ...ir.tensor import PLAIN
from ..words.places import DENSE, where

__all__ = ["ModelState", "StateTensor", "has_data", "overlaps", "reach_of", "read_state"]


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
        hooked: whether parameters may have hooks on their gradients, as in a step that accumulates none.

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
            f"{kind} {path!r} has no shape yet",
            where=owner,
            fix="run the model once before the capture, so that lazy modules get their shapes",
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


def overlaps(tensors: Iterable[tuple[str, torch.Tensor]]) -> Mapping[str, str]:
    """Tensors that may share memory: by the name of each, the name of another one.

    The memory of a tensor reaches from its first element to its last, gaps included. Storages do not count: each tensor
    that is made of one numpy array has another storage. Tensors without elements and tensors on meta share no memory.
    """
    spans: dict[object, list[tuple[int, int, str]]] = {}
    for name, tensor in tensors:
        if tensor.numel() and not tensor.is_meta:
            memory, first = _place(tensor)
            spans.setdefault(memory, []).append((first, first + reach_of(tensor) * tensor.itemsize, name))
    found: dict[str, str] = {}
    for of_memory in spans.values():
        furthest, *others = sorted(of_memory)
        for span in others:
            if span[0] < furthest[1]:
                found.setdefault(span[2], furthest[2])
                found.setdefault(furthest[2], span[2])
            furthest = max(furthest, span, key=lambda span: span[1])
    return found


def _place(tensor: torch.Tensor) -> tuple[object, int]:
    """The memory that a tensor lies in, and its first byte there; the memory of a fake tensor is its storage."""
    if isinstance(tensor, FakeTensor):
        return tensor.untyped_storage()._cdata, int(tensor.storage_offset()) * tensor.itemsize
    return tensor.device, tensor.data_ptr()


def reach_of(tensor: torch.Tensor) -> int:
    """The number of elements from the tensor's first to its last, gaps included."""
    return reach(tensor.shape, tensor.stride())
