"""Functions that ``torch.compile`` has wrapped: the step's own lines run in their place, in the thread that records it.

``torch.compiler.set_stance`` would do so for the whole process. The stance is one object, which torch asks at each
call: an object that answers by thread takes its place.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch

from .interrupts import Interrupts

__all__ = ["compiled_run_as_written"]


@contextlib.contextmanager
def compiled_run_as_written() -> Iterator[None]:
    """While this is active, compiled functions and modules run in this thread as if they were not compiled.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed while torch imported its compiler.
    """
    with Interrupts().held_back(again=True):  # a process can't repeat an import of sympy that was cut short
        import torch._dynamo.eval_frame as compiler  # takes seconds, and the step may compile

    if not hasattr(compiler, "_stance"):  # a version of torch that keeps the stance elsewhere
        with torch.compiler.set_stance("force_eager"):
            yield
        return
    place: Any = compiler
    stance = _Stance(place._stance)
    place._stance = stance
    try:
        yield
    finally:
        if place._stance is stance:
            place._stance = stance.before
        stance.thread = None


class _Stance:
    """A stance that is ``force_eager`` in the thread that makes it, and *before* in all others.

    Another thread that sets a stance of its own meanwhile puts this one back, maybe after the capture.
    """

    def __init__(self, before: Any) -> None:
        self.before = before
        self.thread: int | None = threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.before, name)

    @property
    def stance(self) -> str:
        own: str = self.before.stance
        return "force_eager" if threading.get_ident() == self.thread else own
