"""The backward of a loss: forward values, and the values of their gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch

from ...errors import CaptureError
from ...ir.blob import dense_strides, same_strides
from ..record.recorder import Recorder
from ..record.values import Value
from ..words.places import USE_REENTRANT, in_short

__all__ = ["backward"]

_aten: Final = torch.ops.aten


def backward(
    start: torch.Tensor | Sequence[torch.Tensor],
    recorder: Recorder,
    fresh: Callable[[Value], bool],
    given: Callable[[], Sequence[torch.Tensor]] | None = None,
    retained: bool = False,
) -> list[tuple[Value, Value]]:
    """Forward values and the values of their gradients, parameters first.

    *start* is the loss; or outputs, whose gradients *given* makes once the backward has begun.

    The gradients of *fresh* parameters, which have none so far, are laid out as autograd lays out ``param.grad``.
    Autograd adds later gradients to them, whatever the layout of these is. Another backward may go through what is
    *retained*.
    """
    asked = sorted(recorder.start_backward(), key=lambda pair: (pair[0].kind != "param", pair[0].index))
    try:
        found: Sequence[torch.Tensor | None] = torch.autograd.grad(
            start, [edge for _, edge in asked], given() if given is not None else None, retained, allow_unused=True
        )
    except RuntimeError as e:
        if "checkpoint is incompatible" not in str(e):
            raise CaptureError(
                f"the backward failed while it was recorded: {in_short(e)}",
                fix="check that loss.backward() runs by itself on these inputs",
            ) from e
        raise CaptureError(
            "reentrant checkpointing runs a backward of its own inside the backward",
            fix=USE_REENTRANT,
        ) from e
    with recorder.unseen():
        return list(_gradients(asked, found, recorder, fresh))


def _gradients(
    asked: Sequence[tuple[Value, Any]],
    found: Sequence[torch.Tensor | None],
    recorder: Recorder,
    fresh: Callable[[Value], bool],
) -> Iterator[tuple[Value, Value]]:
    """Each value that has a gradient, and its gradient."""
    used: set[int] = set()
    for (value, _), tensor in zip(asked, found, strict=True):
        if tensor is None:
            continue
        if tensor.layout != torch.strided:
            recorder.sparse.finish(recorder, value, tensor)
            continue
        gradient = recorder.read(tensor)
        if value.kind == "param" and fresh(value):
            gradient = _own_gradient(value, gradient, gradient.index in used, recorder)
            used.add(gradient.index)
        yield value, gradient


def _own_gradient(param: Value, gradient: Value, shared: bool, recorder: Recorder) -> Value:
    """The parameter's gradient in a blob of its own, laid out as autograd leaves it in ``param.grad``.

    Source: ``clone_obey_contract`` in torch/csrc/autograd/utils/grad_layout_contract.h.
    """
    wanted = _dense_order(param)
    if gradient.dtype != param.dtype or not _laid_out(gradient, wanted, param):
        if wanted is None or wanted == list(range(len(wanted))):
            return recorder.apply(_aten.clone.default, gradient, memory_format=torch.contiguous_format)
        view = recorder.apply(_aten.permute.default, gradient, wanted)
        dense = recorder.apply(_aten.clone.default, view, memory_format=torch.contiguous_format)
        back = sorted(range(len(wanted)), key=wanted.__getitem__)
        return recorder.apply(_aten.permute.default, dense, back)
    if gradient.root.kind:  # memory that the step is given belongs to the caller
        return recorder.apply(_aten.clone.default, gradient, memory_format=torch.preserve_format)
    if shared or gradient.phase == "forward":
        return recorder.apply(_aten.alias.default, gradient)
    return gradient


def _dense_order(param: Value) -> list[int] | None:
    """The dimensions from the outermost in memory to the innermost; None where the parameter has gaps."""
    order = sorted(range(len(param.shape)), key=lambda d: (-param.strides[d], d))
    dense = dense_strides(param.shape, reversed(order))
    return order if same_strides(param.shape, param.strides, dense) else None


def _laid_out(gradient: Value, wanted: list[int] | None, param: Value) -> bool:
    if wanted is None:
        return gradient.tensor.is_contiguous()
    return same_strides(gradient.shape, gradient.strides, param.strides)
