"""Ways out of torch that no dispatcher sees: a tensor's data or hidden state as Python's own numbers and text.

A tensor of the step has no data to give, and its text, its version and its memory are not those of the eager step. So
each way is refused, as ``.item()`` is. Allowed are the text of known values, and the text that ``print`` and logging's
functions make of their arguments.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Final

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ...errors import CaptureError
from ..words.places import READS_DATA, where
from .functions import Handlers, TorchFunctions
from .patches import replaced
from .prints import prints_followed

__all__ = ["escapes", "unseen_escapes_refused"]

_NUMBERS: Final = ("tolist", "numpy", "__array__", "__dlpack__", "__deepcopy__")
"""Methods that give a tensor's data away. A fake tensor would refuse them; a tensor with data would not."""
_PICKLES: Final = "__reduce_ex__"
_TEXT: Final = ("__repr__", "__format__")
_HIDDEN: Final = {
    "_version": "asks how often a tensor was overwritten, a number that differs in each step",
    "is_shared": "asks whether a tensor is in shared memory, which may differ in a program",
    "data_ptr": "asks for the address of a tensor's data, which differs in a program",
}
"""Attributes of a tensor, and of its storage, that differ from run to run, and what a step does that reads one."""
_OF_STORAGES: Final = ("is_shared", "data_ptr")
_ON_THE_WAY: Final = frozenset({"torch._tensor", "torch.nn.parameter", "torch.overrides", "torch.storage"})
"""Modules of torch that ask on behalf of their callers."""
_LOGS: Final = "logging"
_COPIES: Final = "copy"
"""Python's module, which copies a tensor's data behind torch's back."""


def escapes(here: Callable[[], str], known: Callable[[torch.Tensor], torch.Tensor | None]) -> Handlers:
    """Handlers that refuse to give away the data of a tensor, or its hidden state.

    Args:
        here: the path of the module that runs.
        known: the tensor with a tensor's values, if these are known; else None.

    Raises:
        CaptureError: the step asks for data or hidden state.
    """

    def text(method: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        real = known(tensor)
        if real is not None:
            with _disable_current_modes():
                return method(real, *args, **kwargs)
        if _is_others(_asker()):
            return method(tensor, *args, **kwargs)
        what = "formatting a tensor as text" if args in ((), ("",)) else f".{method.__name__}()"
        fix = f"{READS_DATA}; print(tensor) is harmless, and so is logger.info('%s', tensor)"
        raise _refused(f"{what} {_READS}", fix, here)

    def tensordot(
        function: Callable[..., Any], a: torch.Tensor, b: torch.Tensor, dims: Any = 2, out: Any = None
    ) -> Any:
        if isinstance(dims, torch.Tensor):
            raise _refused(f"tensordot {_READS}", "pass dims= as Python integers", here)
        return function(a, b, dims, out=out)

    tensors: Any = torch.Tensor
    return {
        **{getattr(tensors, name): _numbers(here) for name in _NUMBERS},
        **{getattr(tensors, name): text for name in _TEXT},
        **{getattr(tensors, name): _hidden(name, here) for name in _OF_STORAGES},
        tensors._version.__get__: _hidden("_version", here),
        torch.tensordot: tensordot,
    }


@contextlib.contextmanager
def unseen_escapes_refused(here: Callable[[], str]) -> Iterator[None]:
    """While this is active, escapes are refused that torch tells no mode of: pickles, and hidden state of storages.

    Tensors may be printed.

    Args:
        here: the path of the module that runs.
    """

    def refusing(owner: type, name: str, handler: Callable[..., Any]) -> Callable[..., Any]:
        method = getattr(owner, name)
        return lambda found, *args: handler(method, found, *args)

    storages = torch.UntypedStorage
    of_storages = {name: refusing(storages, name, _hidden(name, here)) for name in _OF_STORAGES}
    of_tensors = {_PICKLES: refusing(torch.Tensor, _PICKLES, _numbers(here))}
    with replaced(storages, of_storages), replaced(torch.Tensor, of_tensors), prints_followed():
        yield


_READS: Final = "reads numbers out of a tensor, so the step depends on data"


def _numbers(here: Callable[[], str]) -> Callable[..., Any]:
    def refuse(method: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        raise _refused(f".{method.__name__}() {_READS}", READS_DATA, here)

    return refuse


def _hidden(name: str, here: Callable[[], str]) -> Callable[..., Any]:
    def refuse(method: Callable[..., Any], found: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_others(_asker()):
            return method(found, *args, **kwargs)
        raise _refused(f"the step {_HIDDEN[name]}", "leave the call out, or decide outside of the step", here)

    return refuse


def _refused(what: str, fix: str, here: Callable[[], str]) -> CaptureError:
    if _asker().f_globals.get("__name__") == _COPIES:
        what = "the step copies a tensor with Python's copy module, which a program does not repeat"
        fix = "write tensor.clone() instead, or tensor.detach().clone() for a copy without a gradient"
    return CaptureError(what, where=where(here()), fix=fix)


def _asker() -> FrameType:
    """The frame that asks, past those of this module, of the mode, and of torch's modules that ask for callers."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name = frame.f_globals.get("__name__", "")
        if name not in _ON_THE_WAY and name not in (__name__, TorchFunctions.__module__):
            break
        frame = frame.f_back
    return frame


def _is_others(frame: FrameType) -> bool:
    """Whether the frame is not the step's own: torch asks to write errors, logging and graphir to print."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in ("torch", "graphir", _LOGS)
