"""Kernels that add in one order, where torch's default ones add as their threads happen to come.

Torch chooses them under ``torch.use_deterministic_algorithms``. That holds for the whole process, warns of every matrix
product unless the environment configures cuBLAS, and fills all new memory; so it is on during these calls alone. Other
matrix products and cuDNN need no more than :func:`~..machine.surroundings.neutral`: torch gives cuBLAS a workspace of
its own for each stream.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils import deterministic

from graphir.analysis.certify import NONDETERMINISTIC
from graphir.ir.device import Device
from graphir.ir.net import Net
from graphir.ir.opset import overload

__all__ = ["REPEATABLE", "repeatable", "unrepeatable"]

_MEMORY: Final[Any] = deterministic
_lock = threading.RLock()  # what one thread restores shall not be what another one has set
if hasattr(os, "register_at_fork"):  # nor shall a forked process begin with what a thread has set that is not in it
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)
_WARN, _ERROR = 1, 2
"""Debug modes. Attention's kernels add in one order in the second one only, whose name is for operators that can't."""


@contextmanager
def repeatable(strict: bool = False) -> Iterator[None]:
    """Choose kernels that add in one order, where there are any.

    Args:
        strict: refuse operators that have none; else torch warns of them.
    """
    with _lock:
        mode, fills = torch.get_deterministic_debug_mode(), _MEMORY.fill_uninitialized_memory
        torch.set_deterministic_debug_mode(max(mode, _ERROR if strict else _WARN))
        _MEMORY.fill_uninitialized_memory = False
        try:
            yield
        finally:
            torch.set_deterministic_debug_mode(mode)
            _MEMORY.fill_uninitialized_memory = fills


def _called(type: str, first: Tensor, *rest: Any, **named: Any) -> Any:
    if not (first.is_cuda or type in _ANYWHERE):
        return overload(type)(first, *rest, **named)
    with repeatable():
        return overload(type)(first, *rest, **named)


_NAMES: Final = """
    _unsafe_index_put.default index_add.default index_add_.default index_copy.default index_copy_.default
    index_put.default index_put_.default scatter.src scatter_.src scatter_add.default scatter_add_.default
    scatter_reduce.two scatter_reduce_.two
"""

_ANYWHERE: Final = frozenset({"aten._unsafe_index_put.default", "aten.index_put.default", "aten.index_put_.default"})
"""Types whose kernels on the host add in no fixed order either, from 32,768 elements on and in several threads."""

REPEATABLE: Final[Mapping[str, Callable[..., Any]]] = {
    type: partial(_called, type) for type in (f"aten.{name}" for name in _NAMES.split())
}
"""Torch's types that have such a kernel, and what calls it (the documentation of
``torch.use_deterministic_algorithms``)."""


def unrepeatable(net: Net, places: Mapping[Device, torch.device]) -> list[str]:
    """The types on CUDA whose bits may differ from run to run nevertheless."""
    known = NONDETERMINISTIC.keys() - REPEATABLE.keys() - {"graphir.attention_backward"}
    return sorted({op.type for op in net.ops if op.type in known and places[op.device].type == "cuda"})
