"""What a thread has set in torch, carried into the threads that work for it."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

import torch

from graphir.runtime.machine.openmp import set_threads

__all__ = ["ThreadSettings"]

_T = TypeVar("_T")


class ThreadSettings:
    """The calling thread's modes of autograd and autocast, its context variables, and its threads per kernel.

    torch's own DataParallel loses inference mode and the element type of autocast. Hooks of saved tensors are not
    carried: checkpointing's count on one thread.

    Args:
        kinds: the kinds of devices on which the threads will work.
    """

    def __init__(self, kinds: Iterable[str]) -> None:
        self._grad, self._inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self._casts = [_Autocast.of(kind) for kind in sorted(set(kinds)) if torch.amp.is_autocast_available(kind)]
        self._cache = torch.is_autocast_cache_enabled()
        self._threads = torch.get_num_threads()
        self._context = contextvars.copy_context()

    def call(self, function: Callable[[], _T]) -> _T:
        """Call *function* in a new thread, which keeps these settings until its end."""
        # Set, not entered: at its end an autocast's context empties what all threads have cast.
        for cast in self._casts:
            torch.set_autocast_enabled(cast.kind, cast.enabled)
            torch.set_autocast_dtype(cast.kind, cast.dtype)
        torch.set_autocast_cache_enabled(self._cache)
        set_threads(self._threads)
        with torch.inference_mode(self._inference), torch.set_grad_enabled(self._grad and not self._inference):
            return self._context.copy().run(function)


class _Autocast(NamedTuple):
    kind: str
    enabled: bool
    dtype: Any

    @classmethod
    def of(cls, kind: str) -> _Autocast:
        return cls(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
