"""Kernels that add in one order, where torch's default ones add as their threads happen to come.

On the host kernels add in one order where they compute in one thread, and on CUDA an accumulating ``index_put`` always
does. For the rest torch chooses such kernels under ``torch.use_deterministic_algorithms``. This mode is the whole
process's: it warns of every matrix product unless the environment configures cuBLAS, and fills all new memory. So it is
set during these calls alone, and never in the form that refuses operators, since other threads call theirs meanwhile.
Other matrix products and cuDNN need no more than :func:`~..machine.surroundings.neutral`: torch gives cuBLAS a
workspace of its own for each stream.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils import deterministic

from graphir.ir.device import Device
from graphir.ir.net import Net
from graphir.ir.opset import overload
from graphir.ir.optypes.table import operator_type
from graphir.process import Setting, held

from ..machine.openmp import in_threads

__all__ = ["REPEATABLE", "refuses_others", "repeatable", "unrepeatable"]

_MEMORY: Final[Any] = deterministic


def _set_mode(mode: int) -> None:
    """Torch keeps the mode as two flags, *deterministic* and *warn only*, and a kernel in another thread reads one
    after the other. So *warn only* is set before *deterministic*, and stays set: with *deterministic* alone that kernel
    would refuse to run."""
    if mode == _ERROR:
        torch.set_deterministic_debug_mode(mode)
        return
    torch._C._set_deterministic_algorithms(False, warn_only=True)
    if mode == _WARN:
        torch._C._set_deterministic_algorithms(True, warn_only=True)


_MODE: Final = Setting("the deterministic debug mode", torch.get_deterministic_debug_mode, _set_mode)
_FILLS: Final = Setting(
    "fill_uninitialized_memory",
    lambda: _MEMORY.fill_uninitialized_memory,
    lambda fills: setattr(_MEMORY, "fill_uninitialized_memory", fills),
)
_WARN, _ERROR = 1, 2
"""Debug modes: operators that have no such kernel warn, or raise."""


def refuses_others() -> bool:
    """Whether the program has torch refuse operators that have no such kernel."""
    return torch.get_deterministic_debug_mode() == _ERROR


def repeatable() -> AbstractContextManager[None]:
    """Choose kernels that add in one order, where there are any; torch warns of operators that have none, unless the
    program has it refuse them."""
    return held({_FILLS: False} if refuses_others() else {_FILLS: False, _MODE: _WARN})


def _called(type: str, first: Tensor, *rest: Any, **named: Any) -> Any:
    if not first.is_cuda:
        return overload(type)(first, *rest, **named)
    with repeatable():
        return overload(type)(first, *rest, **named)


def _put(type: str, first: Tensor, indices: Any, values: Tensor, accumulate: bool = False) -> Any:
    """``index_put``: on the host its kernel adds in no fixed order either, from 32,768 elements on and in several
    threads; on CUDA it sorts, if it is to add."""
    if first.is_cuda:
        put = overload(type) if accumulate else partial(_called, type)
        return put(first, indices, values, accumulate)
    if not type.endswith("put_.default"):  # as torch does, and in all threads
        first, type = first.clone(), "aten.index_put_.default"
    with in_threads(1):
        return overload(type)(first, indices, values, accumulate)


_NAMES: Final = """
    _unsafe_index_put.default embedding_dense_backward.default index_add.default index_add_.default index_copy.default
    index_copy_.default index_put.default index_put_.default scatter.src scatter_.src scatter_add.default
    scatter_add_.default scatter_reduce.two scatter_reduce_.two
"""

_PUT: Final = frozenset({"aten._unsafe_index_put.default", "aten.index_put.default", "aten.index_put_.default"})

REPEATABLE: Final[Mapping[str, Callable[..., Any]]] = {
    type: partial(_put if type in _PUT else _called, type) for type in (f"aten.{name}" for name in _NAMES.split())
}
"""Torch's types that have such a kernel, and what calls it.

Source: the documentation of ``torch.use_deterministic_algorithms``. It does not name a lookup's backward, which for
tables of a few rows adds as its threads come (an H200 with torch 2.11), and in one order under that mode.
"""


def unrepeatable(net: Net, places: Mapping[Device, torch.device]) -> list[str]:
    """The types on CUDA whose bits may differ from run to run nevertheless."""
    on_cuda = {op.type for op in net.ops if places[op.device].type == "cuda"}
    repeated = REPEATABLE.keys() | {"graphir.attention_backward"}
    return sorted(type for type in on_cuda - repeated if operator_type(type).nondeterministic)
