"""Fakes that stand for the tensors that a step starts from; the recorder knows them by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from ...ir.blob import contiguous_strides, dense_strides, same_strides
from ...ir.size import Dims
from ..intake.arguments import Leaf
from ..intake.state import ModelState
from ..words.places import described
from .recorder import Recorder
from .values import Value

__all__ = ["attribute_paths", "fake_leaves", "fake_state"]


def attribute_paths(model: torch.nn.Module) -> Callable[[torch.Tensor], str]:
    """A function that finds the path of a tensor in a plain attribute of a module, or in a list or dict there."""

    def path_of(tensor: torch.Tensor) -> str:
        for path, module in model.named_modules():
            for key, value in module.__dict__.items():
                if value is tensor:
                    return f"{path}.{key}" if path else key
                for place, item in _numbered(value):
                    if item is tensor:
                        return f"{path}.{key}.{place}" if path else f"{key}.{place}"
        return ""

    return path_of


def _numbered(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, dict):
        return value.items()
    return enumerate(value) if isinstance(value, (list, tuple)) else ()


def fake_state(
    state: ModelState, recorder: Recorder, shared: Mapping[str, str]
) -> tuple[dict[int, torch.Tensor], dict[str, Value]]:
    """Fakes of parameters and buffers by the ``id`` of the tensor, and their first versions by blob.

    *shared* is the result of :func:`.intake.state.overlaps` for the parameters, buffers and arguments.
    """
    fakes, values = {}, {}
    for name, kind, tensor in state.tensors:
        fake = recorder.fake(tensor.shape, tensor.stride(), tensor.dtype)
        fake.requires_grad_(tensor.requires_grad)
        fake._is_param = isinstance(tensor, torch.nn.Parameter)
        fakes[id(tensor)] = fake
        values[name] = recorder.external(fake, name, kind, shared.get(described(kind, name), ""))
        recorder.stand_in(tensor, fake)
        values[name].scope = name.rpartition(".")[0]
    return fakes, values


def fake_leaves(
    leaves: Sequence[Leaf], dims: Dims, parts: int, recorder: Recorder, shared: Mapping[str, str]
) -> tuple[list[Any], list[Value | None]]:
    """For each leaf the argument of the step, *parts* times as long as ``batch``, and its value; None for no tensor.

    See :func:`fake_state` for *shared*.
    """
    fakes: dict[int, tuple[torch.Tensor, Value]] = {}
    made: list[Any] = []
    values: list[Value | None] = []
    for leaf in leaves:
        tensor = leaf.tensor
        if tensor is None:
            made.append(leaf.value)
            values.append(None)
            continue
        if id(tensor) not in fakes:
            sizes = {d: dims[name] * (parts if d == leaf.batch_dim else 1) for d, name in leaf.dims.items()}
            shape = tuple([sizes.get(d, size) for d, size in enumerate(tensor.shape)])
            fake = recorder.fake(shape, _strides(tensor, shape), tensor.dtype)
            fake.requires_grad_(tensor.requires_grad)
            other = shared.get(described("input", leaf.name), "")
            fakes[id(tensor)] = fake, recorder.external(fake, leaf.name, "input", other)
            recorder.arguments[id(tensor)] = leaf.name
        fake, value = fakes[id(tensor)]
        made.append(fake)
        values.append(value)
    return made, values


def _strides(tensor: torch.Tensor, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides for *shape* in the layout of *tensor*; for a tensor with gaps, the tensor's own strides."""
    if tensor.is_contiguous():
        return contiguous_strides(shape)
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda d: (strides[d], -d))
    dense = same_strides(tensor.shape, strides, dense_strides(tensor.shape, order))
    return dense_strides(shape, order) if dense else strides
