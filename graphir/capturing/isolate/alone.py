"""One rule for other threads: while a module is captured, no other thread runs it.

Other threads may read, copy and save the module: its parameters and buffers (:mod:`.tables`) and torch's attributes
(:mod:`.patches`) are as without a capture for them. A call of the module in another thread is not waited for: the
capture is refused.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Final

import torch

from ...errors import CaptureError
from .patches import replaced

__all__ = ["BusyError", "run_here_alone"]

_CALLS: Final = frozenset({torch.nn.Module._wrapped_call_impl.__code__, torch.nn.Module._call_impl.__code__})


class BusyError(CaptureError):
    """Another thread runs the module: a later capture may do."""


@contextlib.contextmanager
def run_here_alone(model: torch.nn.Module) -> Iterator[None]:
    """Refuse if another thread runs *model* or one of its modules when this context begins, or before it ends.

    Raises:
        BusyError: another thread runs one of them.
    """
    modules = {id(module): module for module in model.modules()}
    run: Callable[..., Any] = torch.nn.Module._wrapped_call_impl
    this = threading.get_ident()
    called = [_is_inside(frame, modules) for thread, frame in sys._current_frames().items() if thread != this]

    def concerns(instance: object) -> bool:
        return id(instance) in modules and threading.get_ident() != this

    def call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        called.append(True)
        return run(module, *args, **kwargs)

    def check() -> None:
        if any(called):
            raise BusyError(
                f"another thread runs the module {type(model).__name__} while it is captured",
                fix="hold a lock around the capture and around each call of the module; and let the forward of the "
                "module run its submodules in one thread",
            ) from None

    check()
    with replaced(torch.nn.Module, {"__call__": call}, concerns):
        try:
            yield
        except CaptureError:
            check()
            raise
    check()


def _is_inside(frame: FrameType | None, modules: dict[int, torch.nn.Module]) -> bool:
    """Whether a call of one of the modules is among *frame* and its callers."""
    while frame is not None:
        if frame.f_code in _CALLS and id(frame.f_locals.get("self")) in modules:
            return True
        frame = frame.f_back
    return False
