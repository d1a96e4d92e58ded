"""Which module is running: a stack of module paths, followed in the thread that records."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..intake.structures import named_leaves
from ..isolate.patches import replaced

__all__ = ["Scopes"]


class Scopes:
    """Knows which module of a model is running.

    Attributes:
        current: path of the innermost running module; empty for the model itself, ``loss`` for the loss function.
        failed: path of the innermost module that the last exception left; None if there was no exception.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._paths = {id(m): path for path, m in model.named_modules()}
        self.current = ""
        self.failed: str | None = None
        self._error: BaseException | None = None

    @contextlib.contextmanager
    def follow(self, count: Callable[[], int], claim: Callable[[torch.Tensor, str, int], None]) -> Iterator[None]:
        """While this is active, follow which module runs, and claim the outputs of modules.

        Args:
            count: returns how many values have been made so far.
            claim: called when a module ends, for each tensor that it returns: with the tensor, the name of the output,
                and the number of values that had been made before the module started.
        """
        run: Callable[..., Any] = torch.nn.Module.__call__

        def call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            outer, before = self.current, count()
            path = self.current = self._paths.get(id(module), outer)
            try:
                output = run(module, *args, **kwargs)
            except BaseException as error:
                if error is not self._error:
                    self.failed, self._error = path, error
                raise
            finally:
                self.current = outer
            if path and id(module) in self._paths:
                for name, leaf in named_leaves(path, output):
                    if isinstance(leaf, torch.Tensor):
                        claim(leaf, name, before)
            return output

        try:
            with replaced(torch.nn.Module, {"__call__": call}):
                yield
        finally:
            self._error = None  # the error's frames hold tensors in cycles with torch's graph, which no collector finds

    def here(self) -> str:
        """The path of the innermost running module."""
        return self.current

    @contextlib.contextmanager
    def inside(self, path: str) -> Iterator[None]:
        """While this is active, *path* is the running module."""
        before, self.current = self.current, path
        try:
            yield
        finally:
            self.current = before
