"""What operators return on tensors without data, and the modes in which torch is asked."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from functools import cache
from types import FunctionType, SimpleNamespace
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from .opset import overload
from .optypes.layouts import as_kernel
from .optypes.table import operator_type

__all__ = ["errors_not_logged", "fresh_fake_mode", "rule_of"]


def fresh_fake_mode() -> FakeTensorMode:
    """A mode that asks torch for every result.

    Torch's cache of results knows neither the number of threads nor whether oneDNN was on. A convolution chooses its
    backend by both, and with the backend the layout of its result.
    """
    mode = FakeTensorMode.__new__(FakeTensorMode)
    _made_without_stack()(mode)
    mode.cache_enabled = False
    return mode


@contextlib.contextmanager
def errors_not_logged() -> Iterator[None]:
    """Keep torch from logging errors on fake tensors that are expected, or raised again as other errors."""
    logging.getLogger("torch._subclasses.fake_tensor").addFilter(_QUIET)  # a logger keeps a filter once
    depth = _QUIET.depth
    try:
        _QUIET.depth = depth + 1
        yield
    finally:
        _QUIET.depth = depth


class _Quiet(threading.local, logging.Filter):
    """Drops the records of threads within :func:`errors_not_logged`. A disabled logger would silence all threads."""

    depth = 0

    def filter(self, record: logging.LogRecord) -> bool:
        return not self.depth


_QUIET: Final = _Quiet()


@cache
def _made_without_stack() -> Callable[[FakeTensorMode], None]:
    """A copy of the mode's ``__init__`` that does not read the stack.

    Torch's own keeps the stack of its caller for an error message. Reading the stack takes longer than all the rest.
    """
    make: Any = FakeTensorMode.__init__
    none = SimpleNamespace(extract_stack=list, format_stack=list)
    made = FunctionType(make.__code__, {**make.__globals__, "traceback": none}, closure=make.__closure__)
    made.__kwdefaults__ = make.__kwdefaults__
    return made


@cache
def rule_of(type: str) -> Callable[..., Any]:
    """The function that gives an operator's results on tensors without data: the rule in its record, or torch's own.

    An operand may be contiguous and channels-last at once. The kernels of some types take it for one of the two, and
    torch's rules for the other. A convolution that reads the result chooses its layout by the result's strides.
    """
    known = operator_type(type)
    if known.fake is not None:
        return known.fake
    func = overload(type)
    if known.rule is not None:
        return known.rule(func)
    pointwise = torch.Tag.pointwise in func.tags and not func._schema.is_mutable
    return as_kernel(func, ambiguous=True) if pointwise or known.ambiguous else func
