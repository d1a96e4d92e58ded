"""Gradients of parameters that do not call the parameters' hooks: whoever asked for the gradients will call them.

A hook belongs to the parameter, and other threads may go through other graphs to it. So hooks are put into an envelope
that passes one backward over.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import torch
from torch import Tensor

__all__ = ["unhooked"]

_lock: Final = threading.Lock()
_passed_over: Final[set[int]] = set()
"""The backwards, by autograd's numbers, that call no hooks."""


class _Hook:
    """A hook in its envelope."""

    def __init__(self, hook: Callable[[Tensor], Any]) -> None:
        self._hook = hook

    def __call__(self, gradient: Tensor) -> Any:
        if torch._C._current_graph_task_id() in _passed_over:
            return None
        return self._hook(gradient)


@contextlib.contextmanager
def unhooked(params: Iterable[Tensor], outputs: Iterable[Tensor]) -> Iterator[None]:
    """While this is active, a backward from *outputs* calls no hooks of *params*."""
    tables = [table for param in params if (table := param._backward_hooks)]
    if not tables:
        yield
        return
    with _lock:
        for table in tables:
            for key, hook in list(table.items()):
                if type(hook) is not _Hook:
                    table[key] = _Hook(hook)
    begun: list[int] = []

    def begin(_: Any) -> None:
        begun.append(torch._C._current_graph_task_id())
        _passed_over.add(begun[-1])

    nodes = {output.grad_fn for output in outputs if output.grad_fn is not None}
    handles = [node.register_prehook(begin) for node in nodes]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        _passed_over.difference_update(begun)
