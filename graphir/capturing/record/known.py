"""Values that follow from sizes and literals alone, such as ``torch.arange(x.shape[1])``: what they hold is known.

The step may read them (``.item()``, ``if``), as it may read sizes. Libraries that look into a tensor to leave something
out, a mask that masks nothing for instance, don't try where they find a fake tensor: transformers asks
``isinstance(x, torch._subclasses.FakeTensor)``. So that the captured step leaves out what the eager one does, that says
no about a tensor whose value is known.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from ...ir.calls import call_of, evaluate, filled
from ...ir.opset import overload
from ...ir.optypes.own import OWN
from ...ir.optypes.table import operator_type
from ..isolate.patches import replaced
from .values import RecordedCall, Value

__all__ = ["fakes_with_known_values_hidden", "is_known_result", "number_in", "tensor_of"]

_HOST: Final = torch.device("cpu")


def is_known_result(call: RecordedCall) -> bool:
    """Whether the call makes the same values in every step."""
    return call.seed is None and all(v.known for v in call.inputs) and _has_values(call.type)


def _has_values(type: str) -> bool:
    """Whether torch alone computes values by *type*: not of memory that nothing has written yet, nor by a user's."""
    known = operator_type(type)
    return type not in OWN and not known.unwritten and not known.registered


def tensor_of(value: Value, literals: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """What a known value holds.

    Args:
        value: its ``known`` is true.
        literals: the tensors of those that no call made, by index.
    """
    needed: dict[int, Value] = {}
    pending = [value]
    while pending:
        found = pending.pop()
        if found.index not in needed:
            needed[found.index] = found
            pending += found.call.inputs if found.call is not None else ()
    real = dict(literals)
    with _disable_current_modes():
        for index in sorted(needed):
            call = needed[index].call
            if index not in real and call is not None:
                made = _run(call, [real[v.index] for v in call.inputs])
                real.update(zip([v.index for v in call.outputs], made, strict=True))
        return real[value.index]


def number_in(known: torch.Tensor) -> bool | int | float:
    """The number in a tensor of one element, while a recorder is active."""
    with _disable_current_modes():
        return known.item()


def _run(call: RecordedCall, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    arranged = call_of(call.type, call.args, call.operands, len(tensors))
    args, kwargs = filled(arranged, tensors, lambda arg: evaluate(arg, {}), _HOST)
    return [t for t in pytree.tree_leaves(overload(call.type)(*args, **kwargs)) if isinstance(t, torch.Tensor)]


@contextlib.contextmanager
def fakes_with_known_values_hidden(is_known: Callable[[torch.Tensor], bool]) -> Iterator[None]:
    """While this is active, ``isinstance(x, torch._subclasses.FakeTensor)`` is false where the value of ``x`` is known.

    It is in this thread. Torch's own code asks ``torch._subclasses.fake_tensor.FakeTensor``, which stays as it is.
    Modules that are imported meanwhile, as torch's compiler is where it is first used, get the class itself afterwards.
    """
    before, imported = torch._subclasses.FakeTensor, len(sys.modules)
    _UNKNOWN_FAKE.is_known = is_known
    try:
        with replaced(torch._subclasses, {"FakeTensor": _UNKNOWN_FAKE}):
            yield
    finally:
        del _UNKNOWN_FAKE.is_known  # what still holds the class finds that nothing is known
        for late in [*sys.modules.values()][imported:] if len(sys.modules) > imported else ():
            for name in [name for name, held in getattr(late, "__dict__", {}).items() if held is _UNKNOWN_FAKE]:
                setattr(late, name, before)


def _nothing_known(tensor: torch.Tensor) -> bool:
    return False


class _Unknown(type):
    """Of a class whose instances are the fake tensors of unknown values."""

    is_known: Callable[[torch.Tensor], bool] = staticmethod(_nothing_known)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, FakeTensor) and not cls.is_known(instance)


_UNKNOWN_FAKE: Final = _Unknown("FakeTensor", (), {})
