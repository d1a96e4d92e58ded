"""Known values: values whose numbers follow from sizes and literals alone, such as ``torch.arange(x.shape[1])``.

The step may read a known value (``.item()``, ``if``), as it may read sizes.

Some libraries look into a tensor to leave work out, such as a mask that masks nothing. They do not look into a fake
tensor: transformers asks ``isinstance(x, torch._subclasses.FakeTensor)``. So while a step is recorded, this test is
false of a tensor whose value is known, and the captured step leaves out the same work as the eager one.
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
    """Whether the results of the call are known: every step computes the same numbers."""
    return call.seed is None and all(v.known for v in call.inputs) and _has_values(call.type)


def _has_values(type: str) -> bool:
    """Whether *type* is an operator of torch's own that computes numbers: none that leaves its result unwritten."""
    known = operator_type(type)
    return type not in OWN and not known.unwritten and not known.registered


def tensor_of(value: Value, literals: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """A real tensor with the numbers of a known value.

    Args:
        value: the value; its ``known`` is true.
        literals: real tensors of the values that no call made, by the value's index.
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

    Other threads see no difference. Torch's own code asks ``torch._subclasses.fake_tensor.FakeTensor``, which stays as
    it is. A module that is imported meanwhile, such as torch's compiler at its first use, gets the real class at the
    end.
    """
    before, imported = torch._subclasses.FakeTensor, len(sys.modules)
    _UNKNOWN_FAKE.is_known = is_known
    try:
        with replaced(torch._subclasses, {"FakeTensor": _UNKNOWN_FAKE}):
            yield
    finally:
        del _UNKNOWN_FAKE.is_known  # to code that still holds the class, no value is known
        for late in [*sys.modules.values()][imported:] if len(sys.modules) > imported else ():
            for name in [name for name, held in getattr(late, "__dict__", {}).items() if held is _UNKNOWN_FAKE]:
                setattr(late, name, before)


def _nothing_known(tensor: torch.Tensor) -> bool:
    return False


class _Unknown(type):
    """The metaclass of a class whose instances are the fake tensors with unknown values."""

    is_known: Callable[[torch.Tensor], bool] = staticmethod(_nothing_known)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, FakeTensor) and not cls.is_known(instance)


_UNKNOWN_FAKE: Final = _Unknown("FakeTensor", (), {})
