"""Devices that a step names: a recording is made on the host, and a program runs where passes place it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch

from ..errors import CaptureError
from .refusals import where

__all__ = ["modules_stay", "moves_stay", "on_host"]

_HOST: Final = torch.device("cpu")


def on_host(kwargs: Mapping[str, Any], here: Callable[[], str]) -> Mapping[str, Any]:
    """The keyword arguments of a call, with the host instead of another device, and memory that is not pinned.

    Args:
        kwargs: of the call.
        here: path of the module that calls.

    Raises:
        CaptureError: the step uses CUDA's autocast, which does nothing to tensors on the host.
    """
    if torch.is_autocast_enabled("cuda"):
        raise CaptureError(
            "the step uses autocast for CUDA, and it is recorded on the host",
            where=where(here()),
            fix='write torch.autocast("cpu", dtype): the program has its casts on every device',
        )
    if not kwargs:
        return kwargs
    device = kwargs.get("device")
    if device is not None and device != _HOST:
        kwargs = {**kwargs, "device": _HOST}
    return {**kwargs, "pin_memory": False} if kwargs.get("pin_memory") else kwargs


@contextlib.contextmanager
def moves_stay() -> Iterator[None]:
    """While this is active, ``x.to("cuda")``, ``x.cuda()`` and ``x.pin_memory()`` of this thread do not move tensors.

    They ask for the device before the dispatcher sees them, which fails where there is none.
    """
    thread = threading.get_ident()

    def moving(move: Callable[..., torch.Tensor], stays: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def method(*args: Any, **kwargs: Any) -> torch.Tensor:
            return (stays if threading.get_ident() == thread else move)(*args, **kwargs)

        return method

    def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if "device" in kwargs:
            kwargs["device"] = _hosted(kwargs["device"])
        return moves["to"](tensor, *map(_hosted, args), **kwargs)

    def stay(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return tensor

    moves: dict[str, Callable[..., torch.Tensor]] = {
        "to": torch.Tensor.to,
        "cuda": torch.Tensor.cuda,
        "pin_memory": torch.Tensor.pin_memory,
    }
    try:
        for name, move in moves.items():
            setattr(torch.Tensor, name, moving(move, to if name == "to" else stay))
        yield
    finally:
        for name in moves:  # they belong to its base class
            delattr(torch.Tensor, name)


@contextlib.contextmanager
def modules_stay(here: Callable[[], str]) -> Iterator[None]:
    """While this is active, ``module.to(...)`` of this thread does nothing where it would change no tensor.

    Torch would exchange the parameters, which fakes don't allow.

    Args:
        here: path of the module that runs.

    Raises:
        CaptureError: it would change one.
    """
    thread, apply = threading.get_ident(), torch.nn.Module._apply

    def unchanged(module: torch.nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        if threading.get_ident() != thread:
            return apply(module, fn, recurse)  # type: ignore[no-untyped-call]
        for name, tensor in (*module.named_parameters(recurse=recurse), *module.named_buffers(recurse=recurse)):
            with torch.no_grad():
                converted = fn(tensor)
            if converted is not tensor:
                raise CaptureError(
                    f"the step converts {name!r} of a {type(module).__name__} (module.to, .half, …), which no operator "
                    "tells",
                    where=where(here()),
                    fix="convert the module before the capture, or the tensor where it is used: weight.to(dtype)",
                )
        return module

    torch.nn.Module._apply = unchanged  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.nn.Module._apply = apply  # type: ignore[method-assign]


def _hosted(argument: Any) -> Any:
    """The host for a device, as an object, a text or a number; anything else as it is."""
    if isinstance(argument, (torch.device, str)) or type(argument) is int:
        return _HOST
    return argument
