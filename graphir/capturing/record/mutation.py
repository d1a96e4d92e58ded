"""In-place operators and writes through views, expressed by functional operators.

``relu_(x)`` is recorded as ``relu(x)``. A write through a view is recorded as the functional operator on the view, and
a scatter of the result into the view's base. Each result has the strides of the tensor that PyTorch overwrites: on
other strides, later operators may compute other bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

from ...errors import CaptureError
from .forms import Form
from .tape import Tape
from .values import Alias, Value

__all__ = ["functional_call", "functional_view", "laid_out", "overwritten_base"]

_aten: Final = torch.ops.aten

_SCATTERS: Final[Mapping[Any, Any]] = {
    _aten.slice.Tensor: _aten.slice_scatter.default,
    _aten.select.int: _aten.select_scatter.default,
    _aten.diagonal.default: _aten.diagonal_scatter.default,
}


def functional_call(tape: Tape, form: Form, target: Alias, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Value:
    """Record the functional form of an in-place operator.

    The result has the shape and element type of *target*, and also its strides unless *target* is a view.

    Raises:
        CaptureError: the operator has no functional form.
    """
    seen = tape.read(target.tensor)
    if form.func is _aten.copy_.default:
        new = _source(tape, target, args[1])
    else:
        functional = _functional(tape, form)
        if functional is _aten.bernoulli.p:
            return _bernoulli(tape, target, seen, args, kwargs)
        new = tape.emit(functional, args, kwargs)[0]
    return laid_out(tape, new, target.tensor, seen) if target.is_base else new


def _source(tape: Tape, target: Alias, source: torch.Tensor) -> Value:
    """The value that ``copy_`` writes, in the shape and element type of *target*."""
    new = tape.read(source)
    tensor = target.tensor
    if new.dtype != tensor.dtype:
        new = tape.apply(_aten._to_copy.default, new, dtype=tensor.dtype)
    if new.shape != tuple(tensor.shape):
        new = tape.apply(_aten.expand.default, new, list(tensor.shape))
    if target.is_base and _same_geometry(new.tensor, tensor):
        # A clone, so that the new value does not change when the source, which may be state, is overwritten.
        new = tape.apply(_aten.clone.default, new)
    return new


def _functional(tape: Tape, form: Form) -> torch._ops.OpOverload:
    name, overload = form.func._opname, form.func._overloadname
    plain = form.known.functional or f"{name.removesuffix('_')}.{overload}"
    packet = getattr(getattr(torch.ops, form.func.namespace), plain.partition(".")[0], None)
    found = getattr(packet, plain.partition(".")[2], None)
    if found is None or not name.endswith("_") or found._schema.is_mutable:
        raise CaptureError(
            f"{form.type} overwrites a tensor and has no functional form",
            where=tape.here(),
            fix="use the operator that returns a new tensor",
        )
    return found  # type: ignore[no-any-return]


def functional_view(form: Form) -> torch._ops.OpOverload:
    """``squeeze`` of ``squeeze_``."""
    name, overload = form.func._opname, form.func._overloadname
    plain = form.known.functional or f"{name.rstrip('_')}.{overload}"
    packet, _, overload = plain.partition(".")
    return getattr(getattr(_aten, packet), overload)  # type: ignore[no-any-return]


def _same_geometry(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype


def laid_out(tape: Tape, new: Value, like: torch.Tensor, seen: Value) -> Value:
    """The value *new*, laid out like the tensor *like*, which shows the value *seen*."""
    # ``copy(seen, new)`` returns *new* in the strides of *seen*.
    if _same_geometry(new.tensor, like):
        return new
    copied = tape.apply(_aten.copy.default, seen, new)
    if not _same_geometry(copied.tensor, like):
        raise CaptureError(
            f"an in-place operator on a tensor with strides {list(like.stride())} has no functional form",
            where=tape.here(),
            fix="make the tensor contiguous, or use the operator that returns a new tensor",
        )
    return copied


def _bernoulli(tape: Tape, target: Alias, seen: Value, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Value:
    """Record ``bernoulli_`` as ``bernoulli.p``, which reads only its operand's shape and returns a contiguous tensor.

    ``bernoulli_`` fills a tensor in the order of its memory. So for a permuted tensor, ``bernoulli.p`` is called on a
    view whose dimensions are in the order of memory, and its result is permuted back.
    """
    call = seen.call
    if call is not None and call.type == "aten.empty_like.default" and not call.args:
        model = call.inputs[0]
        if _same_geometry(model.tensor, target.tensor):
            seen = model
    tensor = seen.tensor
    order = sorted(range(tensor.dim()), key=lambda d: (-tensor.stride()[d], d))
    permuted = order != list(range(tensor.dim())) and not tensor.is_contiguous()
    if permuted:
        seen = tape.apply(_aten.permute.default, seen, order)
    if not seen.tensor.is_contiguous():
        raise CaptureError(
            f"the step draws random numbers into a tensor with strides {list(target.tensor.stride())}",
            where=tape.here(),
            fix="make the tensor contiguous",
        )
    drawn = tape.apply(_aten.bernoulli.p, seen, *(args[1:] or (0.5,)), **kwargs)
    if permuted:
        back = sorted(range(len(order)), key=order.__getitem__)
        drawn = tape.apply(_aten.permute.default, drawn, back)
    return drawn


def overwritten_base(tape: Tape, target: Alias, whole: Value, new: Value) -> Value:
    """The value of the base of the view *target* after *new* was written to the view; the base showed *whole* before.

    Raises:
        CaptureError: the view shows the memory as another element type, and not as parts of complex numbers.
    """
    base, view = target.store.base.tensor, target.tensor
    if new.dtype != view.dtype:
        new = tape.apply(_aten._to_copy.default, new, dtype=view.dtype)
    for shows, physical in ((view.is_conj(), _aten._conj_physical.default), (view.is_neg(), _aten.neg.default)):
        if shows:  # memory holds the conjugate, or the negative, of the value that the view shows
            new = tape.apply(physical, new)
    if view.dtype != base.dtype:
        return _overwritten_parts(tape, target, whole, new)
    dense = all(t.is_contiguous() for t in (view, base, new.tensor))
    if dense and view.numel() == base.numel() and new.root is new and not new.kind:
        return tape.apply(_aten.view.default, new, list(base.shape))
    scatter = _SCATTERS.get(target.replay[0]) if target.replay is not None else None
    if scatter is not None and target.parent is target.store.base and target.replay is not None:
        _, args, kwargs = target.replay
        result = tape.apply(scatter, whole, new, *args[1:], **kwargs)
        if _same_geometry(result.tensor, base):
            return result
    offset = whole.tensor.storage_offset() + view.storage_offset() - base.storage_offset()
    shape, strides = list(view.shape), list(view.stride())
    result = tape.apply(_aten.as_strided_scatter.default, whole, new, shape, strides, offset)
    return laid_out(tape, result, base, whole)


def _overwritten_parts(tape: Tape, target: Alias, whole: Value, new: Value) -> Value:
    """See :func:`overwritten_base`; the view shows real or imaginary parts of complex numbers."""
    base, view = target.store.base.tensor, target.tensor
    if not base.is_complex() or view.dtype != base.dtype.to_real():
        raise CaptureError(
            f"the step overwrites a view with dtype {str(view.dtype).removeprefix('torch.')} of a tensor with dtype "
            f"{str(base.dtype).removeprefix('torch.')}",
            where=tape.here(),
            fix="make a new tensor with the dtype of the view, and view the new tensor with the other dtype",
        )
    parts = tape.apply(_aten.view_as_real.default, whole)
    offset = parts.tensor.storage_offset() + view.storage_offset() - 2 * base.storage_offset()
    shape, strides = list(view.shape), list(view.stride())
    written = tape.apply(_aten.as_strided_scatter.default, parts, new, shape, strides, offset)
    return laid_out(tape, tape.apply(_aten.view_as_complex.default, written), base, whole)
