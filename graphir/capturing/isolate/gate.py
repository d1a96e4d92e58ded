"""Other threads that run the module while it is captured: they wait until it has been.

Its parameters are theirs all the time (:mod:`.tables`). Its attributes are not: a step may set them, and a capture puts
them back. So a capture begins once no other thread is inside the module, and lets none in before it ends::

    another thread    ──[ model(x) ]──            ┆ model(x) waits      ▶──[ model(x) ]──
    the capture               ┆ gate shuts, waits ▶──[ records … ]──────┘ gate opens
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Final

import torch

from ...errors import CaptureError
from .patches import replaced

__all__ = ["shut"]

PATIENCE_SECONDS: float = 60
"""How long a capture waits for calls that began before it."""
STUCK_SECONDS: float = 10
"""How long a thread that waits sees the capture stay where it is, until it takes it to be waiting for that thread."""
_LOOK_SECONDS: Final = 0.02
_CALLS: Final = frozenset(
    {
        torch.nn.Module._wrapped_call_impl.__code__,
        torch.nn.Module._call_impl.__code__,
    }
)


@contextlib.contextmanager
def shut(model: torch.nn.Module, is_recorded: Callable[[object], bool]) -> Iterator[None]:
    """While this is active, no other thread runs *model* or a module of it: calls wait until it ends.

    A thread for which the step itself waits gets an error, as one does that the step gave its tensors to.

    Args:
        model: the module.
        is_recorded: whether something is a tensor of a recording.

    Raises:
        CaptureError: another thread is inside the module and does not leave it.
    """
    gate = _Gate(model, is_recorded)
    with replaced(torch.nn.Module, {"__call__": gate.call}, gate.concerns):
        try:
            gate.wait_for_others()
            yield
        finally:
            gate.opened.set()


class _Gate:
    """Stands before the modules of *model* for all threads but this one."""

    def __init__(self, model: torch.nn.Module, is_recorded: Callable[[object], bool]) -> None:
        self._is_recorded = is_recorded
        self._modules = {id(module): module for module in model.modules()}
        self._thread = threading.get_ident()
        self._name = type(model).__name__
        self._shutting = True
        self.opened = threading.Event()
        self._run: Callable[..., Any] = torch.nn.Module._wrapped_call_impl
        gate = self

        def call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            return gate._arrived(module, args, kwargs)

        self.call = call

    def concerns(self, instance: object) -> bool:
        """Whether a call of a module is another thread's, of one that is captured."""
        return id(instance) in self._modules and threading.get_ident() != self._thread

    def wait_for_others(self) -> None:
        """Wait until every call that had begun has ended.

        Raises:
            CaptureError: one does not.
        """
        end = time.monotonic() + PATIENCE_SECONDS
        while any(self._is_inside(frame) for thread, frame in _frames().items() if thread != self._thread):
            if time.monotonic() > end:
                raise CaptureError(
                    f"another thread has been running the module {self._name} for {PATIENCE_SECONDS:g} s, and a "
                    "capture begins once none does",
                    fix="capture it before other threads run it, or where they don't",
                )
            time.sleep(_LOOK_SECONDS / 10)
        self._shutting = False

    def _is_inside(self, frame: FrameType | None) -> bool:
        """Whether a call of one of the modules is among *frame* and those that called it."""
        while frame is not None:
            if frame.f_code in _CALLS and id(frame.f_locals.get("self")) in self._modules:
                return True
            frame = frame.f_back
        return False

    def _arrived(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._shutting and self._is_inside(sys._getframe(1)):
            return self._run(module, *args, **kwargs)  # the call that is waited for
        if any(map(self._is_recorded, (*args, *kwargs.values()))):
            raise self._error("its tensors have no data, and no other thread can use them")
        seen, since = None, time.monotonic()
        while not self.opened.wait(_LOOK_SECONDS):
            frame = _frames().get(self._thread)
            now = None if frame is None else (id(frame), frame.f_lasti)
            if now != seen or not self._is_inside(frame):
                seen, since = now, time.monotonic()
            elif time.monotonic() - since > STUCK_SECONDS:
                raise self._error(f"it has not gone on for {STUCK_SECONDS:g} s")
        return module(*args, **kwargs)

    def _error(self, why: str) -> CaptureError:
        return CaptureError(
            f"the module {self._name} is being captured in another thread, and {why}",
            fix="run it in this thread before or after the capture; and let its forward run in one thread",
        )


def _frames() -> dict[int, FrameType]:
    """What each thread runs now."""
    return sys._current_frames()
