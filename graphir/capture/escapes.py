"""Ways out of torch that no dispatcher sees: numbers of a tensor as Python's or as numpy's."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

from ..errors import CaptureError
from .patches import in_this_thread, replaced
from .refusals import READS_DATA, where
from .scopes import Scopes

__all__ = ["escapes_refused"]

_METHODS: Final = ("tolist", "numpy", "__dlpack__", "__format__")
"""A tensor that holds data gives it away by them; only a fake one would object."""


@contextlib.contextmanager
def escapes_refused(scopes: Scopes) -> Iterator[None]:
    """Refuse what would make the data of a tensor, such as one that a closure holds, part of the program unseen."""
    with replaced(torch.Tensor, {name: _refusing(getattr(torch.Tensor, name), name, scopes) for name in _METHODS}):
        yield


def _refusing(method: Callable[..., Any], name: str, scopes: Scopes) -> Callable[..., Any]:
    def refuse(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(2)  # beyond what chooses by the thread
        if args == ("",) or caller.f_globals.get("__name__") == "torch._tensor_str":  # it is printed
            return method(tensor, *args, **kwargs)
        raise CaptureError(
            f".{name}() reads numbers out of a tensor, so the step depends on data",
            where=where(scopes.current),
            fix=READS_DATA,
        )

    return in_this_thread(refuse, method)
