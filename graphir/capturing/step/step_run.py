"""A step that has backwards, while it is recorded: what becomes of the gradients that a backward leaves in ``p.grad``.

::

    p.grad of an earlier step ──zero_grad()──▶ None ──backward()──▶ the gradient ──clip_grad_norm_──▶ what is read

Gradients of several backwards are added where a backward makes them, as autograd adds to ``p.grad``. The step of an
optimizer is one update for each parameter that has a gradient. Operators behind an update read the parameters' next
versions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch.utils import _pytree as pytree

from ...errors import CaptureError
from ...ir.program import Scalar
from ..intake.options import LossScaler
from ..isolate.functions import Handlers
from ..record.extents import plain
from ..record.recorder import Recorder
from ..record.values import Value
from .backward import backward
from .between import EarlierGradients
from .clipping import Originals, clipping_named
from .gathering import gathered
from .gradients import update
from .micro_batches import early
from .recorded_step import Outcome
from .scaling import Scaling

__all__ = ["StepRun", "standing"]

_aten: Final = torch.ops.aten


def standing(fakes: Mapping[int, torch.Tensor]) -> Callable[[Any], Any]:
    """A function from a parameter or buffer to its fake: a list or a closure may hold the parameter itself."""
    return lambda tensor: fakes.get(id(tensor), tensor)


class StepRun:
    """One run of a step that has backwards.

    Args:
        recorder: records it.
        fakes: of the parameters and buffers, by the ``id`` of each.
        earlier: the gradients with which the step begins.
        scaler: the gradient scaler that the step uses; None without one.
    """

    def __init__(
        self,
        recorder: Recorder,
        fakes: Mapping[int, torch.Tensor],
        earlier: EarlierGradients,
        scaler: LossScaler | None,
    ) -> None:
        self._recorder, self._fakes, self._earlier = recorder, fakes, earlier
        self._losses: list[Value] = []
        self._activations: list[tuple[Value, Value]] = []
        self._parts: list[tuple[Value, Value]] = []
        self._sums: dict[int, tuple[Value, Value]] = {}
        self._whole: list[tuple[Value, Value]] = []
        self._begun: int | None = None
        self._last = 0
        self._sparse: dict[int, torch.Tensor] = {}
        self._finished: list[tuple[Value, Value]] = []
        self._steps = False
        self._originals = Originals(recorder)
        self._scaling: Scaling | None = None
        if scaler is not None:
            self._scaling = Scaling(scaler, recorder, self._originals, self._refuse_sparse)

    def handlers(self) -> Handlers:
        """Functions that run in the place of torch's, by the latter."""
        return {}

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """While this is active, parameters have the gradients of an earlier step, and clipping is named."""
        try:
            with torch.no_grad():
                self._earlier.begin()
            with clipping_named(self._recorder, self._originals, self._refuse_sparse):
                yield
        finally:
            self._earlier.clear()

    # What the step does.

    def go_back(
        self,
        start: torch.Tensor,
        loss: Value,
        given: torch.Tensor | None = None,
        retained: bool = False,
        asked: Collection[int] = (),
    ) -> None:
        """A backward, which leaves gradients in ``p.grad``.

        Args:
            start: from which it starts.
            loss: the same, before it was scaled.
            given: the gradient of *start*; None: 1.
            retained: whether another backward may go through the same graph.
            asked: the ``id`` of each tensor that gets a gradient, or of the edge of one; empty: all get one.
        """
        recorder = self._recorder
        self._losses.append(loss)
        found = self._gone_through(
            start,
            lambda param: param.tensor.grad is None and (not asked or id(param.tensor) in asked),
            None if given is None else [given],
            retained,
        )
        end = len(recorder.calls)
        first: list[tuple[torch.Tensor, torch.Tensor]] = []
        with recorder.unseen():
            for param, grad in found:
                if asked and id(param.tensor) not in asked and id(param.edge) not in asked:
                    continue
                if param.kind == "param":
                    self._parts.append((param, grad))
                    if param.tensor.grad is None:
                        self._sums[param.index] = param, grad
                        first.append((param.tensor, recorder.window(grad)))
                    else:
                        self._add(param, grad, param.tensor.grad)
                elif isinstance(param.edge, torch.Tensor) and param.edge.is_leaf and param.edge.requires_grad:
                    self._add_to_leaf(param.edge, grad)
            self._keep_sparse()
        with torch._C.DisableTorchFunction():  # and seen by the recorder, which knows a fake's device at once
            for tensor, gradient in first:
                tensor.grad = gradient
        recorder.calls[self._last :] = early(recorder.calls[self._last : end], recorder.calls[end:])

    def end_forward(self, loss: torch.Tensor) -> Value:
        """The value of a loss, behind the forward."""
        recorder = self._recorder
        recorder.end_forward()
        with recorder.unseen():
            value = recorder.read(loss)
            return recorder.apply(_aten.clone.default, loss) if value.kind or value.is_view else value

    def _gone_through(
        self,
        starts: torch.Tensor | Sequence[torch.Tensor],
        fresh: Callable[[Value], bool],
        given: Sequence[torch.Tensor] | None,
        retained: bool,
    ) -> list[tuple[Value, Value]]:
        """The gradients that a backward makes, as :func:`backward` returns them; those of activations are noted."""
        recorder = self._recorder
        self._last = len(recorder.calls)
        self._begun = self._last if self._begun is None else self._begun
        seeds = None if given is None else lambda: list(given)
        found = backward(starts, recorder, fresh=fresh, given=seeds, retained=retained)
        recorder.end_backward(0, found)
        self._activations += [pair for pair in found if pair[0].kind != "param"]
        return found

    def _add(self, param: Value, grad: Value, held: torch.Tensor) -> None:
        """Add to the gradient that a parameter has. A gradient that an update has read or changed is whole, so the
        addition belongs to the update."""
        recorder = self._recorder
        before = recorder.read(held)
        lasting, whole = self._earlier.has(before), before.phase == "update"
        if lasting or whole:
            self._whole += [pair for pair in [self._sums.get(param.index)] if pair is not None]
            self._sums[param.index] = param, grad
            recorder.start_update()
        if lasting:
            added = self._earlier.add(held, grad)
        else:
            total = recorder.apply(_aten.add.Tensor, before, grad)
            total.label = "sum"
            assert total.call is not None
            added = total.call
            recorder.overwrite(held, total)  # whoever holds it sees the sum
            if not whole:
                self._parts.append((param, total))
                self._sums[param.index] = param, total
        added.of = param

    def _add_to_leaf(self, leaf: torch.Tensor, grad: Value) -> None:
        """Add to the gradient of a tensor that the step has made, or was given."""
        if leaf.grad is None:
            leaf.grad = self._recorder.window(grad)
        else:
            summed = self._recorder.apply(_aten.add.Tensor, self._recorder.read(leaf.grad), grad)
            self._recorder.overwrite(leaf.grad, summed)

    def _keep_sparse(self) -> None:
        """Leave the sparse gradients of a backward in ``p.grad``."""
        for index, tensor in self._recorder.sparse.finished.items():
            param = self._recorder.values[index]
            if self._sparse.get(index) is tensor:
                continue
            held = param.tensor.grad
            value = None if held is None else self._value_of(held)
            if value is not None and self._earlier.has(value):
                self._earlier.added_sparse.add(value.root.index)
            elif held is not None:
                raise CaptureError(
                    f"the step adds to the sparse gradient of {param.label!r} by a second backward",
                    where=self._recorder.here(),
                    fix="add the losses before the backward, or use sparse=False",
                )
            param.tensor.grad = None
            param.tensor.grad = self._sparse[index] = tensor

    def update(self, params: Sequence[torch.Tensor]) -> None:
        """The step of an optimizer that has these parameters."""
        finished, names = [], []
        with self._recorder.unseen():
            for param in params:
                value = self._recorder.read(param).root
                names.append(value.label)
                if param.grad is None or param.grad.layout != torch.strided:
                    continue
                finished.append((value, self._recorder.read(param.grad)))
                if value.index not in self._sums:
                    self._earlier.updates_by(param.grad)
        sparse = self._recorder.sparse.gradients
        for index, tensor in self._sparse.items():
            if self._recorder.values[index].tensor.grad is not tensor:
                sparse.pop(index, None)  # the step has let go of it
        skips = None if self._scaling is None else self._scaling.skips
        earlier, sums = self._earlier, self._sums
        untouched = [(param, grad) for param, grad in finished if earlier.has(grad) and param.index not in sums]
        may_be_none = {param.index: earlier.is_none(grad) for param, grad in untouched}
        update(names, finished, self._recorder, skips, may_be_none)
        self._whole += [self._sums[value.index] for value, _ in finished if value.index in self._sums]
        self._finished += finished
        self._steps = True

    def _refuse_sparse(self, what: str) -> None:
        for index in self._recorder.sparse.gradients:
            raise CaptureError(
                f"{what} is called, but {self._recorder.values[index].label!r} has a sparse gradient",
                where=self._recorder.here(),
                fix="use sparse=False, or leave the call out",
            )

    def _value_of(self, tensor: torch.Tensor) -> Value | None:
        """The value that a tensor shows; None of a sparse one."""
        if tensor.layout != torch.strided:
            return None
        with self._recorder.unseen():
            return self._recorder.read(tensor)

    # What comes of it.

    def outcome_of(
        self, loss: Value | None, values: Sequence[Value | Scalar], results: pytree.TreeSpec | None
    ) -> Outcome:
        """The parts of the step.

        Args:
            loss: the scalar loss.
            values: the leaves of what the step returns, unless that is the loss alone.
            results: the structure of these.
        """
        whole = {gradient.index: (param, gradient) for param, gradient in (*self._whole, *self._sums.values())}
        of_params = list(whole.values())
        for _, gradient in of_params:
            gradient.prefix = ""
        return Outcome(
            loss=loss,
            returned=values,
            results=results,
            gathered=gathered(values, self._losses, of_params),
            steps=self._steps,
            backwards=len(self._losses),
            gradients=[*of_params, *self._activations],
            parts=[(param, gradient) for param, gradient in self._parts if gradient.index not in whole],
            finished=self._finished if self._steps else self._left(of_params),
            kept=self._earlier.kept,
        )

    def leaf(self, leaf: Any, where: str = "") -> Value | Scalar:
        """The value or number that a leaf of the step's results is; an error says *where* the leaf comes from.

        Raises:
            CaptureError: no tensor, number or text.
        """
        if isinstance(leaf, torch.Tensor):
            value = self._recorder.read(leaf)
            return self._recorder.apply(_aten.clone.default, leaf) if self._earlier.has(value) else value
        if isinstance(leaf, (int, float)):
            return plain(leaf)
        if isinstance(leaf, (str, type(None))):
            return leaf
        raise CaptureError(
            f"the step returns a {type(leaf).__name__} among its results",
            where=where,
            fix="return tensors, numbers, strings and None in tuples, lists, dicts and classes that "
            "torch.utils._pytree knows (torch.export.register_dataclass makes a dataclass known)",
        )

    def _left(self, of_params: Sequence[tuple[Value, Value]]) -> list[tuple[Value, Value]]:
        """The gradients that the step leaves to its caller, as it leaves them."""
        kept, left = {param.index for param, _, _ in self._earlier.kept}, []
        for param, gradient in of_params:
            held = param.tensor.grad
            if param.index in kept or (held is None and param.index in self._sums):
                continue
            now = None if held is None else self._value_of(held)
            left.append((param, gradient if now is None or self._earlier.has(now) else now))
        return left

    def first_values(self) -> Iterator[tuple[Value, torch.Tensor]]:
        """The first values of the gradients that last from step to step."""
        return self._earlier.first_values()

    @property
    def again(self) -> bool:
        """Whether the step has begun with gradients that it does not leave to the next one."""
        return self._earlier.again
