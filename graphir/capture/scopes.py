"""Which module is running: a stack of module paths, kept by global forward hooks."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.modules import module as hooks

from .refusals import refuse_module
from .structures import named_leaves

__all__ = ["Scopes"]


class Scopes:
    """The stack of the paths of the modules that are running, the outermost first.

    Attributes:
        current: path of the innermost running module; empty in the model itself, ``loss`` in the loss function.
        failed: path of the innermost module that the last exception left, None while there was none.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._paths = {id(m): path for path, m in model.named_modules()}
        self._stack: list[tuple[str, int, BaseException | None]] = []
        self.current = ""
        self.failed: str | None = None
        self._error: BaseException | None = None

    @contextlib.contextmanager
    def follow(self, count: Callable[[], int], claim: Callable[[torch.Tensor, str, int], None]) -> Iterator[None]:
        """Keep the stack while modules run, and refuse those that can't be captured.

        Args:
            count: how many values have been made so far.
            claim: called at the end of each module with a tensor that it returns, the name of that output, and the
                number of values that had been made before it started.
        """

        def enter(module: torch.nn.Module, args: Any) -> None:
            self._stack.append((self.current, count(), sys.exc_info()[1]))
            self.current = self._paths.get(id(module), self.current)
            refuse_module(module, self.current)

        def leave(module: torch.nn.Module, args: Any, output: Any) -> None:
            path, (self.current, before, handled) = self.current, self._stack.pop()
            error = sys.exc_info()[1]
            if error is not handled:  # a module may run where its caller handles another exception
                if error is not self._error:
                    self.failed, self._error = path, error
            elif path and id(module) in self._paths:
                for name, leaf in named_leaves(path, output):
                    if isinstance(leaf, torch.Tensor):
                        claim(leaf, name, before)

        handles = [
            hooks.register_module_forward_pre_hook(enter),
            hooks.register_module_forward_hook(leave, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextlib.contextmanager
    def inside(self, path: str) -> Iterator[None]:
        """Treat what runs as part of *path*."""
        before, self.current = self.current, path
        try:
            yield
        finally:
            self.current = before
