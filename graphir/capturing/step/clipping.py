"""``clip_grad_norm_`` and ``clip_grad_value_`` in a step function: as for-loops, with names after gradients."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn.utils import clip_grad

from ..record.recorder import Recorder
from ..record.values import RecordedCall, Value
from .gradients import name_norms

__all__ = ["Originals", "clipping_named"]


class Originals:
    """The gradients that others were made of by scaling and clipping, after which these are named.

    Args:
        recorder: records what makes them.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._of: dict[int, Value] = {}

    def of(self, value: Value) -> Value:
        """The gradient that *value* was made of, or *value* itself."""
        return self._of.get(value.index, value)

    def made(self, value: Value, label: str, of: Value) -> None:
        """Name *value*, which was made of a gradient, ``<gradient>.<label>``."""
        original = self.of(of)
        value.source, value.label = original, label
        self._of[value.index] = original

    @contextlib.contextmanager
    def changed(self, params: Sequence[torch.Tensor], label: str) -> Iterator[None]:
        """Name what becomes of the gradients of parameters while this is active."""
        recorder = self._recorder
        with recorder.unseen():
            before = [recorder.read(param.grad) for param in params if param.grad is not None]
        first = len(recorder.calls)
        yield
        with recorder.unseen():
            now = [recorder.read(param.grad) for param in params if param.grad is not None]
        for value, original in zip(now, before, strict=True):
            self.made(value, label, original)
        _of_all_parameters(recorder.calls[first:])


def _of_all_parameters(calls: Sequence[RecordedCall]) -> None:
    """Let calls belong to no module where what they make belongs to no gradient."""
    for call in calls:
        if all(value.source is None for value in call.outputs):
            call.scope = ""


@contextlib.contextmanager
def clipping_named(recorder: Recorder, originals: Originals, refuse: Callable[[str], None]) -> Iterator[None]:
    """While this is active, both functions record so in this thread: users hold them under any name.

    Args:
        recorder: records them.
        originals: what gradients were made of.
        refuse: is given the name of the function, and raises where it would leave out gradients.
    """
    total_norm, clip = clip_grad._get_total_norm, clip_grad._clip_grads_with_norm_
    table, mine, current = vars(clip_grad), threading.get_ident(), threading.get_ident

    def named_norm(tensors: Any, norm_type: float = 2.0, error: bool = False, foreach: object = None) -> torch.Tensor:
        if current() != mine:
            return total_norm(tensors, norm_type, error, foreach)  # type: ignore[arg-type]
        refuse("clip_grad_norm_")
        grads = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        with recorder.unseen():
            of = {value.index: originals.of(value) for value in map(recorder.read, grads)}
        first = len(recorder.calls)
        total = total_norm(grads, norm_type, error, False)
        with recorder.unseen():
            name_norms(recorder.calls[first:], of, recorder.read(total))
        _of_all_parameters(recorder.calls[first:])
        return total

    def named_clip(params: Any, max_norm: float, norm: torch.Tensor, foreach: object = None) -> None:
        if current() != mine:
            clip(params, max_norm, norm, foreach)  # type: ignore[arg-type]
            return
        given = [params] if isinstance(params, torch.Tensor) else list(params)
        first = len(recorder.calls)
        with originals.changed(given, "clipped"):
            clip(given, max_norm, norm, False)
        for call in recorder.calls[first:]:
            for made in call.outputs:
                if made.source is None and made.claim is None:
                    made.claim = f"grad_norm.{made.label}"

    try:
        table.update({"_get_total_norm": named_norm, "_clip_grads_with_norm_": named_clip})
        yield
    finally:
        table.update({"_get_total_norm": total_norm, "_clip_grads_with_norm_": clip})
