"""Traces that torch takes of a function while a step is recorded."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Final

from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode

from ..errors import CaptureError

__all__ = ["traces_refused"]

_BRANCHES: Final = ("torch._higher_order_ops.cond", "torch._higher_order_ops.while_loop")


@contextlib.contextmanager
def traces_refused(here: Callable[[], str]) -> Iterator[None]:
    """While this is active, ``make_fx`` and what uses it, such as ``torch.func.linearize``, raise in this thread.

    The trace would be of what the recorder asks torch for, and that is nothing where it remembers a result.

    Args:
        here: where the step is.

    Raises:
        CaptureError: the step traces a function.
    """
    thread, enter = threading.get_ident(), ProxyTorchDispatchMode.__enter__

    def refuse(mode: ProxyTorchDispatchMode) -> Any:
        if threading.get_ident() != thread or _for_a_branch():
            return enter(mode)
        raise CaptureError(
            "the step traces a function, as make_fx, torch.func.linearize and operators such as scan do",
            where=here(),
            fix="call the function itself, in a loop where it runs several times",
        )

    try:
        ProxyTorchDispatchMode.__enter__ = refuse  # type: ignore[method-assign]
        yield
    finally:
        ProxyTorchDispatchMode.__enter__ = enter  # type: ignore[method-assign]


def _for_a_branch() -> bool:
    """Whether ``torch.cond`` or ``while_loop`` is about to trace what it then calls, and is refused for."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") in _BRANCHES:
            return True
        frame = frame.f_back
    return False
