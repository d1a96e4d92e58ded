"""Devices that a step names: a recording is made on the host, and a program runs where passes place it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from ...errors import CaptureError
from ..words.libraries import Outside
from ..words.places import where
from .functions import Handlers
from .patches import replaced

__all__ = ["modules_stay", "moves", "on_host"]

_HOST: Final = torch.device("cpu")


def on_host(kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """The keyword arguments of a call, with the host instead of another device, and memory that is not pinned."""
    if not kwargs:
        return kwargs
    device = kwargs.get("device")
    if device is not None and device != _HOST:
        kwargs = {**kwargs, "device": _HOST}
    return {**kwargs, "pin_memory": False} if kwargs.get("pin_memory") else kwargs


def moves() -> Handlers:
    """Handlers of ``x.to("cuda")``, ``x.cuda()`` and ``x.pin_memory()`` that do not move the tensor.

    These methods ask for the device before the dispatcher sees them, which fails where there is none.
    """

    def to(move: Callable[..., torch.Tensor], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return move(tensor, *map(_hosted, args), **{key: _hosted(value) for key, value in kwargs.items()})

    def stay(move: Callable[..., torch.Tensor], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return tensor

    return {torch.Tensor.to: to, torch.Tensor.cuda: stay, torch.Tensor.pin_memory: stay}


def modules_stay(here: Callable[[], str]) -> contextlib.AbstractContextManager[None]:
    """While this is active, ``module.to(...)`` of this thread does nothing where it would change no tensor.

    Torch's own would exchange the parameters, which fakes don't allow.

    Args:
        here: the path of the module that runs.

    Raises:
        CaptureError: a module would change one of its tensors.
    """
    return replaced(torch.nn.Module, {"_apply": _unchanged(here)})


def _unchanged(here: Callable[[], str]) -> Callable[..., Any]:
    """A replacement of a module's ``_apply``, which does nothing, or raises if a tensor would change."""

    def unchanged(module: torch.nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        for name, tensor in (*module.named_parameters(recurse=recurse), *module.named_buffers(recurse=recurse)):
            with torch.no_grad():
                converted = fn(tensor)
            if converted is not tensor:
                raise CaptureError(
                    f"the step converts {name!r} of a {type(module).__name__} (module.to, .half, …), and no operator "
                    "records the conversion",
                    where=where(here()),
                    fix=Outside(
                        "convert the module before the capture, or the tensor where it is used: weight.to(dtype)"
                    ),
                )
        return module

    return unchanged


def _hosted(argument: Any) -> Any:
    """The host, if the argument is a device, as an object, a text or a number; else the argument."""
    if isinstance(argument, (torch.device, str)) or type(argument) is int:
        return _HOST
    return argument
