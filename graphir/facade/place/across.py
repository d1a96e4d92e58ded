"""A module's own code on the devices where its parameters are."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

__all__ = ["across"]


def across(module: torch.nn.Module) -> AbstractContextManager[Any]:
    """While this is active, operands of one call that are on several devices come to that of the module's parameter or
    buffer among them, or else to that of the first. Gradients flow back through these copies."""
    state = {id(tensor): tensor for tensor in chain(module.parameters(), module.buffers())}
    if len({tensor.device for tensor in state.values()}) < 2:
        return contextlib.nullcontext()
    return _Across(frozenset(state))


class _Across(TorchFunctionMode):
    def __init__(self, state: frozenset[int]) -> None:
        super().__init__()
        self.state = state

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        places = dict.fromkeys([tensor.device for tensor in tensors if tensor.dim() or tensor.device.type != "cpu"])
        if len(places) > 1:
            place = next((tensor.device for tensor in tensors if id(tensor) in self.state), next(iter(places)))
            name = getattr(func, "__name__", "")
            if name.startswith("__i") or (name.endswith("_") and not name.startswith("__")):
                place = tensors[0].device  # what is overwritten stays where it is
            args, kwargs = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(place), (args, kwargs))
        return func(*args, **kwargs)
