"""Torch's functions and methods while a step is recorded: those in a table have a handler that runs in their place.

A mode of torch's own is told of each call of this thread, under whatever name the step calls::

    x.to("cuda") ──▶ TorchFunctions ──┬─ a handler is in the table: the handler, with the function and its arguments
                                      └─ else: the function

The mode is off while a handler or a function runs. So the mode is not told of the calls in the body of a function that
torch has written in Python: the table holds that function beside the functions that it calls. Functions that run the
step's own lines, as a backward does, run with the mode on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FrameType, FunctionType
from typing import Any, Final, TypeAlias

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode_temporarily
from torch.utils import _pytree as pytree

from .patches import replaced

__all__ = ["Handlers", "TorchFunctions", "past_functions"]

Handlers: TypeAlias = Mapping[Any, Callable[..., Any]]
"""By function of torch, its handler, which is called with the function itself and its arguments."""


class TorchFunctions(TorchFunctionMode):
    """A mode in which handlers run in the place of torch's functions, in this thread.

    Args:
        tables: the handlers; no two tables have a function in common.
        standing: gives the tensor in the place of one that the step holds, such as a parameter in a list; None where
            there is none.
    """

    def __init__(self, *tables: Handlers, standing: Callable[[Any], Any] | None = None) -> None:
        super().__init__()
        self._standing = standing
        self._handlers: dict[Any, Callable[..., Any]] = {f: self._within(body) for f, body in _RUN_THE_STEPS.items()}
        self._handlers |= {function: handler for table in tables for function, handler in table.items()}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if self._standing is not None and _holds_some((*args, *(kwargs or {}).values())):
            args, kwargs = pytree.tree_map(self._standing, (args, kwargs or {}))
        handler = self._handlers.get(func)
        if handler is not None:
            return handler(func, *args, **(kwargs or {}))
        return func(*args, **kwargs) if kwargs else func(*args)

    def _within(self, body: Callable[..., Any]) -> Callable[..., Any]:
        def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            with self:
                return body(*args, **kwargs)

        return call

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """The mode is active, once, and torch's modules take the kernels that they take without it."""
        try:
            with self, replaced(torch.overrides, {"has_torch_function": _has_torch_function}):
                yield
        finally:  # a handler holds the mode
            self._handlers, self._standing = {}, None


def _holds_some(values: Iterable[Any]) -> bool:
    """Whether some of these are tensors from outside of the recording, whose tensors are fakes."""
    for value in values:
        kind = type(value)
        if kind in _PLAIN or (kind in (list, tuple) and any(type(item) in _PLAIN for item in value)):
            return True
    return False


_PLAIN: Final = (torch.Tensor, torch.nn.Parameter)


def past_functions(frame: FrameType) -> FrameType:
    """*frame*; or its first caller that is not the mode, which is told of calls of torch's functions."""
    while frame.f_code is _TOLD and frame.f_back is not None:
        frame = frame.f_back
    return frame


_TOLD: Final = TorchFunctions.__torch_function__.__code__
_torchs: Final = torch.overrides.has_torch_function


def _has_torch_function(tensors: Any) -> bool:
    """The answer of ``torch.overrides.has_torch_function`` without a recording.

    ``nn.MultiheadAttention`` asks, and takes another kernel where a mode is on.
    """
    modes = _get_current_function_mode_stack()
    if len(modes) != 1 or not isinstance(modes[0], TorchFunctions):
        return _torchs(tensors)
    with _pop_mode_temporarily():
        return _torchs(tensors)


def _unasked(function: Any) -> Callable[..., Any]:
    """A copy of one of torch's functions in Python that does not ask whether a mode is on."""
    asked = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    table = {**function.__globals__, **dict.fromkeys(asked, lambda *tensors: False)}
    body = FunctionType(function.__code__, table, argdefs=function.__defaults__, closure=function.__closure__)
    body.__kwdefaults__ = function.__kwdefaults__
    return body


_RUN_THE_STEPS: Final = {
    function: _unasked(function)
    for function in (
        torch.autograd.grad,
        torch.autograd.backward,
        torch.Tensor.backward,
        torch.nn.functional.triplet_margin_with_distance_loss,
    )
}
"""Functions that run the step's own lines."""
