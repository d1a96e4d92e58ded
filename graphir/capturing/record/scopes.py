"""Which module is running: a stack of module paths, kept where modules are called in the thread that records them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..intake.structures import named_leaves
from ..isolate.patches import replaced

__all__ = ["Scopes"]


class Scopes:
    """The stack of the paths of the modules that are running, the outermost first.

    Attributes:
        current: path of the innermost running module; empty in the model itself, ``loss`` in the loss function.
        failed: path of the innermost module that the last exception left, None while there was none.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._paths = {id(m): path for path, m in model.named_modules()}
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
            self._error = None  # its frames hold tensors in cycles with torch's graph, where no collector looks

    def here(self) -> str:
        """The path of the innermost running module."""
        return self.current

    @contextlib.contextmanager
    def inside(self, path: str) -> Iterator[None]:
        """Treat what runs as part of *path*."""
        before, self.current = self.current, path
        try:
            yield
        finally:
            self.current = before
