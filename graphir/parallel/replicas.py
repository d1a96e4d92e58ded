"""Copies of a module, whose gradients are summed into the original.

As torch's ``replicate``: a replica is a shallow copy of each module; its parameters are plain tensors, computed from
the original's by one function whose backward adds the replicas' gradients in replica order. ::

    module.weight ──▶ Broadcast ──┬──▶ replica 0: the same storage
                                  └──▶ replica 1: a copy
    module.weight.grad ◀── grad 0 + grad 1

Replica 0 shares storage with the original, so that what it writes into parameters and buffers in place, such as running
statistics, stays; what other replicas write is lost. So are hooks that a replica registers on itself; torch leaves them
on the original.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from ..replication import HOOKS
from .collective import summed
from .errors import ReplicationRuntimeError

__all__ = ["replicate"]

_M = TypeVar("_M", bound=nn.Module)


def replicate(network: _M, places: Sequence[torch.device], detach: bool = False) -> list[_M]:
    """One copy of a module for each place.

    Args:
        network: the original.
        places: real devices; the first is where the original is.
        detach: whether no gradients flow back.

    Raises:
        ReplicationRuntimeError: there is a ScriptModule in it, or a parameter that has no shape yet.
    """
    _refuse(network)
    tensors = _Copies(network, places, detach)
    modules = list(network.modules())
    copies = [{module: _shallow(module) for module in modules} for _ in places]
    for replica, copied in enumerate(copies):
        for module, copy in copied.items():
            for name, child in module._modules.items():
                if child is None:
                    copy._modules[name] = None
                else:
                    setattr(copy, name, copied[child])
            for name, parameter in module._parameters.items():
                if parameter is None:
                    copy._parameters[name] = None
                else:
                    # No leaf any more, so it becomes a plain attribute, and `parameters()` stays empty.
                    setattr(copy, name, tensors.of(parameter, replica))
                    copy._former_parameters[name] = tensors.of(parameter, replica)
            for name, buffer in module._buffers.items():
                if buffer is None:
                    copy._buffers[name] = None
                else:
                    setattr(copy, name, tensors.of(buffer, replica))
    return [cast(_M, copied[network]) for copied in copies]


def _refuse(network: nn.Module) -> None:
    for name, module in network.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ReplicationRuntimeError(
                f"cannot replicate a ScriptModule: {name or type(module).__name__}",
                where="DataParallel.replicate",
                fix="wrap the Python module that it was compiled from",
            )
    for name, tensor in (*network.named_parameters(), *network.named_buffers()):
        if isinstance(tensor, (nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer)):
            raise ReplicationRuntimeError(
                f"cannot replicate {name}, which has no shape yet",
                where="DataParallel.replicate",
                fix="call the module itself once on a batch, so that its lazy modules know their shapes",
            )


def _shallow(module: nn.Module) -> Any:
    copy: Any = module._replicate_for_data_parallel()
    # A hook that a replica registers, as transformers' modules do in their first forward, is its own.
    vars(copy).update({name: hooks.copy() for name, hooks in vars(copy).items() if name in HOOKS})
    copy._former_parameters = OrderedDict()  # torch's name, for code that looks for a replica's parameters
    return copy


class _Copies:
    """Parameters and buffers of a module, once for each replica; what modules share, their copies share."""

    def __init__(self, network: nn.Module, places: Sequence[torch.device], detach: bool) -> None:
        parameters, buffers = list(network.parameters()), list(network.buffers())
        through = [] if detach else [t for t in (*parameters, *buffers) if t.requires_grad]
        self._found: dict[int, list[Tensor]] = {}
        if through:
            made = _Broadcast.apply(places, *through)  # type: ignore[no-untyped-call]
            for i, tensor in enumerate(through):
                self._found[id(tensor)] = list(made[i :: len(through)])
        # Also where nothing flows back they are as the module's: no inference tensors, and requiring a gradient where
        # those do. torch's matmul chooses its kernels by that, and so its bits.
        with torch.inference_mode(False):
            for tensor in (*parameters, *buffers):
                if id(tensor) not in self._found:
                    self._found[id(tensor)] = [_like(tensor, copy) for copy in _broadcast(tensor, places)]

    def of(self, tensor: Tensor, replica: int) -> Tensor:
        """A replica's copy of a tensor of the module."""
        return self._found[id(tensor)][replica]


def _broadcast(tensor: Tensor, places: Sequence[torch.device]) -> list[Tensor]:
    """A tensor that shares *tensor*'s storage, and copies of it, without gradients."""
    original = tensor.detach()
    return [original, *(_copied(original, place) for place in places[1:])]


def _like(tensor: Tensor, copy: Tensor) -> Tensor:
    return copy if tensor.is_inference() else copy.requires_grad_(tensor.requires_grad)


def _copied(tensor: Tensor, place: torch.device) -> Tensor:
    return tensor.clone() if tensor.device == place else tensor.to(place, non_blocking=True)


class _Broadcast(torch.autograd.Function):
    """Copies of tensors: all of the first replica, all of the second, …."""

    @staticmethod
    def forward(ctx: Any, places: Sequence[torch.device], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.like = [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]
        copies = [_broadcast(tensor, places) for tensor in tensors]
        return tuple(copied[replica] for replica in range(len(places)) for copied in copies)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        number = len(ctx.like)
        sums = (summed(gradients[i::number], ctx.like[i][2]) for i in range(number))
        # A parameter that no replica has used gets zeros, as in torch.
        return None, *(
            torch.zeros(shape, dtype=dtype, device=device) if found is None else found
            for found, (shape, dtype, device) in zip(sums, ctx.like, strict=True)
        )
