"""What operators return on fake tensors, remembered: a repeated layer's results are made without asking PyTorch again.

A fake tensor costs PyTorch a good hundred microseconds an operator, most of it for finding out the result's shape. That
depends on the operator and the geometry of what it reads alone, so it is found out once, for this capture and the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from ...errors import CaptureError
from ...ir.blob import reach
from ...ir.meta import fresh_fake_mode, rule_of
from ...ir.tensor import Geometry
from ..isolate.cuda_casts import opens_cells
from ..words.places import where
from .forms import Bound, Form

__all__ = ["Results", "forget", "in_sequence"]

_CPU: Final = torch.device("cpu")
_META: Final = torch.device("meta")
_MOST: Final = 100_000
"""Entries kept; a step of thousands of different operators has tens of thousands."""


class _Fresh(NamedTuple):
    """A tensor with memory of its own."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


class _View(NamedTuple):
    """A tensor that looks at the memory of operand *source*."""

    source: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


class _Same(NamedTuple):
    """Operand *source* itself."""

    source: int


_Result: TypeAlias = "_Fresh | _View | _Same | None"
_Known: TypeAlias = "_Result | tuple[type, tuple[_Result, ...]]"

_known: Final[dict[tuple[object, ...], _Known]] = {}
_UNKNOWN: Final = object()


def forget() -> None:
    """Start anew with nothing remembered."""
    _known.clear()


def in_sequence(returned: Any) -> Sequence[Any]:
    """What an operator returned, as a sequence also where it is one thing."""
    return returned if isinstance(returned, (tuple, list)) else (returned,)


class Results:
    """Calls operators on the fake tensors of one mode.

    Args:
        fake_mode: the mode.
        here: path of the module that is running.
    """

    def __init__(self, fake_mode: FakeTensorMode, here: Callable[[], str]) -> None:
        self._here = here
        self._attributes = {**_attributes_of_a_fake(), "fake_mode": fake_mode}
        # Convolutions choose their backend, and with that their layout, by these.
        self._surroundings = torch.get_num_threads(), torch.backends.mkldnn.enabled

    def of(
        self,
        form: Form,
        bound: Bound,
        geometries: Iterable[Geometry],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """What ``form.func(*args, **kwargs)`` returns.

        Args:
            form: of the operator.
            bound: its arguments in place.
            geometries: of the tensors among them.
            args, kwargs: its arguments; a device among them is the host.

        Raises:
            CaptureError: its kernels are others than outside of the step.
        """
        if (
            form.by_onednn
            and bound.tensors[0].dtype in form.by_onednn
            and torch.backends.mkldnn.enabled != self._surroundings[1]
            and not opens_cells()
        ):
            raise CaptureError(
                f"the step switches oneDNN for {form.type}, which rounds otherwise then; a program would not switch it",
                where=where(self._here()),
                fix="switch it off outside of the step, for the capture and the session; or around an LSTM in single "
                "precision alone",
            )
        if not form.repeats:
            return rule_of(form.type)(*args, **kwargs)
        # The text of the arguments tells 1, 1.0 and True apart, and 0.0 and -0.0.
        setting = torch.get_default_dtype(), *self._surroundings
        key = (form.func, bound.operands, repr(bound.args), setting, *geometries)
        known: Any = _known.get(key, _UNKNOWN)
        if known is _UNKNOWN:
            out = rule_of(form.type)(*args, **kwargs)
            described = _describe(out, bound.tensors)
            if described is not _UNKNOWN:
                if len(_known) >= _MOST:
                    forget()
                _known[key] = described
            return out
        if type(known) is tuple:
            kind, results = known
            return kind([self._make(result, bound.tensors) for result in results])
        return self._make(known, bound.tensors)

    def empty(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A fake tensor with memory of its own."""
        return self._make(_Fresh(shape, strides, dtype), ())  # type: ignore[return-value]

    def _make(self, result: _Result, operands: Sequence[torch.Tensor]) -> torch.Tensor | None:
        if result is None:
            return None
        if type(result) is _Same:
            return operands[result.source]
        with torch._C._DisableTorchDispatch():
            if type(result) is _View:
                elem = torch.as_strided(operands[result.source], result.shape, result.strides, result.offset)
            else:
                elem = torch.empty_strided(result.shape, result.strides, dtype=result.dtype, device=_META)  # type: ignore[union-attr]
            made = torch.Tensor._make_subclass(
                FakeTensor, elem, False, dispatch_device=True, device_for_backend_keys=_CPU
            )
        torch._C._set_throw_on_mutable_data_ptr(made)
        vars(made).update(self._attributes)
        return made


@cache
def _attributes_of_a_fake() -> dict[str, Any]:
    """What torch writes onto a new fake tensor, but for its mode."""
    sample = FakeTensor(fresh_fake_mode(), torch.empty(0, device=_META), _CPU)
    return {name: value for name, value in vars(sample).items() if name != "fake_mode"}


def _describe(out: Any, operands: Sequence[torch.Tensor]) -> Any:
    """What is to be remembered of *out*; ``_UNKNOWN`` where that would not tell all of it."""
    owners = {t.untyped_storage()._cdata: i for i, t in reversed(list(enumerate(operands)))}
    fresh: set[int] = set()
    results: list[_Result] = []
    for leaf in in_sequence(out):
        result = _describe_leaf(leaf, operands, owners, fresh)
        if result is _UNKNOWN:
            return _UNKNOWN
        results.append(result)
    return (type(out), tuple(results)) if isinstance(out, (tuple, list)) else results[0]


def _describe_leaf(leaf: Any, operands: Sequence[torch.Tensor], owners: Mapping[int, int], fresh: set[int]) -> Any:
    if leaf is None:
        return None
    source = next((i for i, t in enumerate(operands) if t is leaf), None)
    if source is not None:
        return _Same(source)
    if type(leaf) is not FakeTensor or leaf.layout != torch.strided or leaf.is_conj() or leaf.is_neg():
        return _UNKNOWN
    storage = leaf.untyped_storage()
    shape, strides, offset = tuple(leaf.shape), leaf.stride(), int(leaf.storage_offset())
    source = owners.get(storage._cdata)
    if source is not None:
        operand = operands[source]
        if leaf.dtype != operand.dtype or operand.is_conj() or operand.is_neg():
            return _UNKNOWN
        return _View(source, shape, strides, offset)
    nbytes = reach(shape, strides) * leaf.itemsize
    if storage._cdata in fresh or offset or storage.nbytes() != nbytes or leaf.constant is not None:
        return _UNKNOWN
    fresh.add(storage._cdata)
    return _Fresh(shape, strides, leaf.dtype)
