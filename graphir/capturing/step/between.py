"""Gradients between the steps of a function: what an earlier step has left, and what this one leaves.

::

    begins with     the step                           ends with     so that the gradient
    -------------   --------------------------------   -----------   ------------------------------------------
    none            adds to it, or updates by it       none          is the step's own, and begins as it ends
    any             adds to it                         the sum       is state, the blob ``w.grad``
    any             does not read it                   another one   is state, if an optimizer of the function
                                                                     has the parameter, and has made no step
    what a program  anything                           anything      is state
    beside keeps

Such a gradient begins at -0.0, the neutral element of addition, and is that again where a step leaves none. An
optimizer skips a parameter without a gradient: a number beside each gradient, ``w.grad_is_none``, is 1 where there is
none, and a step that updates by a gradient to which it adds nothing reads the number.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

import torch

from ...errors import CaptureError, TrainingWarning, counted, warn
from ...ir.program import GRADIENT, IS_NONE
from ..intake.found import Between
from ..record.recorder import Recorder
from ..record.values import RecordedCall, Value
from .recorded_step import Recording

__all__ = ["EarlierGradients", "warn_of_gradients"]


class EarlierGradients:
    """The gradients that an earlier step has left, during one run of a step.

    Args:
        between: which gradients last, as far as recordings tell.
        model: the module that the step uses.
        optimizers: those of the step.
        recorder: records it.
        fakes: of its parameters and buffers, by the ``id`` of each.

    Attributes:
        added_sparse: the gradients to which a sparse gradient would be added.
        again: whether the step has to be recorded again, since it has begun with gradients that no step leaves.
        kept: after :meth:`end`, each parameter whose gradient lasts, and the first versions of the gradient and of the
            number that says whether there is none.
    """

    def __init__(
        self,
        between: Between,
        model: torch.nn.Module,
        optimizers: Iterable[torch.optim.Optimizer],
        recorder: Recorder,
        fakes: Mapping[int, torch.Tensor],
    ) -> None:
        self._between, self._recorder = between, recorder
        self._params = {id(fakes[id(p)]): p for p in model.parameters() if p.requires_grad}
        self._fakes = [fakes[id(param)] for param in self._params.values()]
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self._trained = {id(fakes[id(p)]) for group in groups for p in group["params"] if id(p) in fakes}
        self._of: dict[int, tuple[Value, Value]] = {}
        self._is_none: dict[int, Value] = {}
        self._additions: set[int] = set()
        self._zeros: dict[int, tuple[torch.Tensor, int]] = {}
        self._updated_by_zeros: set[int] = set()
        self.added_sparse: set[int] = set()
        self.again = False
        self.kept: list[tuple[Value, Value, Value]] = []

    def begin(self) -> None:
        """Give the parameters the gradients of an earlier step; these are memory that lasts."""
        recorder = self._recorder
        for fake in self._fakes:
            value = recorder.read(fake)
            if value.label not in self._between.cleared:
                fake.grad = recorder.fake(value.shape, value.strides, value.dtype)
                earlier = recorder.external(fake.grad, f"{_last(value)}.{GRADIENT}", "state")
                earlier.scope = value.scope
                self._of[earlier.index] = value, earlier

    def clear(self) -> None:
        """Take all gradients from the parameters."""
        for fake in self._fakes:
            fake.grad = None

    def has(self, value: Value) -> bool:
        """Whether a value is such a gradient, or what the step has made of it in its place."""
        return value.root.index in self._of

    def add(self, held: torch.Tensor, grad: Value) -> RecordedCall:
        """Add a gradient to one that *held* has from an earlier step."""
        recorder = self._recorder
        with recorder, torch.no_grad():
            held.add_(recorder.window(grad))
        self._additions.add(id(recorder.calls[-1]))
        return recorder.calls[-1]

    def end(self, returned: Sequence[Value], made: Container[int], updated: Container[int], steps: bool) -> None:
        """Decide which gradients last, and leave in these what the step leaves.

        Args:
            returned: by the step.
            made: the indices of the parameters whose gradients the step computes.
            updated: those of the parameters that the step updates.
            steps: whether the step makes an update.

        Raises:
            CaptureError: a sparse gradient would last; or a program beside leaves what the step reads, but does not
                keep it.
        """
        between = self._between
        used, read = set(self._updated_by_zeros), {value.root.index for value in returned}
        for call in self._recorder.calls:
            used.update([value.index for value in call.inputs])
            read.update(() if id(call) in self._additions else [value.root.index for value in call.inputs])
        for param, earlier in self._of.values():
            grad, trained = param.tensor.grad, id(param.tensor) in self._trained
            replaced = grad is not None and grad is not earlier.tensor
            zeroed = replaced and param.index not in made and id(grad) in self._zeros
            mine, left = earlier.index in used, param.index in made or (replaced and not zeroed)
            left &= grad is not None
            if grad is earlier.tensor and not mine:
                continue
            fresh = trained and param.index not in updated
            lost = param.label in between.lost
            foreign = earlier.index not in read and (lost or (steps and not trained))
            if mine and lost and not (left and foreign):
                raise CaptureError(
                    f"the step reads the gradient of {param.label!r}, which a step beside leaves and does not keep",
                    fix="call optimizer.zero_grad() before the backward, or name the optimizer in that step",
                )
            if grad is not None and grad.layout != torch.strided:
                self._check_sparse(param, earlier, fresh)
            elif param.label in between.wanted or (
                left
                and not (lost and foreign)
                and (param.label in between.assumed or (not foreign and (mine or fresh)))
            ):
                self.kept.append((param, earlier, self.is_none(earlier)))
                self.again |= replaced and param.label not in between.lasting | between.wanted
                between.lasting.add(param.label)
                continue
            elif left:
                between.left.add(param.label)
            between.touched.add(param.label)
            if mine or zeroed or (param.index not in made and param.index in updated and not left):
                between.cleared.add(param.label)
                self.again = True
        if self.again:
            return
        self._check_cleared()
        for param, earlier, is_none in self.kept:
            self._leave(param, earlier, is_none, made)

    def _check_cleared(self) -> None:
        """Refuse a step that leaves a gradient only if it begins without one."""
        begun = {param.index for param, _ in self._of.values()}
        for fake in self._fakes:
            value = self._recorder.read(fake).root
            if value.index not in begun and fake.grad is not None and value.label not in self._between.left:
                raise CaptureError(
                    f"the step leaves the gradient of {value.label!r} only where it begins without one",
                    fix="call optimizer.zero_grad() before the backward",
                )

    def _check_sparse(self, param: Value, earlier: Value, fresh: bool) -> None:
        """Refuse a sparse gradient that would last from step to step."""
        if param.label in self._between.wanted or fresh or earlier.index in self.added_sparse:
            raise CaptureError(
                f"{param.label!r} has a sparse gradient, which would last from step to step",
                fix="use sparse=False, or call optimizer.zero_grad() before the backward",
            )

    def is_none(self, value: Value) -> Value:
        """The number that is 1 where there is no such gradient, to which the step has added nothing."""
        index = value.root.index
        if index not in self._is_none:
            param, _ = self._of[index]
            number = self._recorder.fake((), (), torch.float32)
            made = self._recorder.external(number, f"{_last(param)}.{IS_NONE}", "state")
            made.phase, made.scope, self._is_none[index] = "forward", param.scope, made
        return self._is_none[index]

    def set_to_zero(self, earlier: Value, zeros: torch.Tensor) -> None:
        """Note what is in the place of a gradient of an earlier step that was set to zero."""
        self._zeros[id(zeros)] = zeros, earlier.index

    def updates_by(self, grad: torch.Tensor) -> None:
        """Note an update by a gradient to which the step has added nothing."""
        if id(grad) in self._zeros:
            self._updated_by_zeros.add(self._zeros[id(grad)][1])

    def lasts(self, value: Value) -> bool:
        """Whether the step is known to keep what it has of an earlier step, or has written there."""
        param, earlier = self._of[value.root.index]
        return value is not earlier or param.label in self._between.lasting | self._between.wanted

    def _leave(self, param: Value, earlier: Value, is_none: Value, made: Container[int]) -> None:
        """Let the gradient that lasts be what the step leaves."""
        recorder, left = self._recorder, param.tensor.grad
        first = len(recorder.calls)
        recorder.start_update()
        with torch.no_grad():
            if left is None:
                earlier.tensor.fill_(-0.0)
            elif left is not earlier.tensor:
                earlier.tensor.copy_(left)
            if left is not earlier.tensor or param.index in made:
                is_none.tensor.fill_(float(left is None))
        for call in recorder.calls[first:]:
            call.phase, call.scope = "update", param.scope

    def first_values(self) -> Iterator[tuple[Value, torch.Tensor]]:
        """The first value of each gradient that lasts, and of its number: the parameter's own gradient, or none. Only a
        caller outside of the recording may ask: the values are real tensors."""
        for param, earlier, is_none in self.kept:
            real = self._params[id(param.tensor)]
            none = real.detach().new_full((), -0.0).expand(real.shape)
            yield earlier, none if real.grad is None else real.grad.detach()
            yield is_none, torch.full((), float(real.grad is None), device=real.device)


def _last(param: Value) -> str:
    """The last part of a parameter's name."""
    return param.label.rpartition(".")[2]


def warn_of_gradients(recording: Recording, wanted: Container[str]) -> None:
    """Warn of gradients that the step's optimizer does not read, and that the step does not return; and of gradients
    that grow from update to update, unless a program beside keeps them (*wanted*), which may set them to zero."""
    read = {param.index for param, _ in recording.finished}
    read |= {value.index for call in recording.calls if call.phase == "update" for value in call.inputs}
    read |= {value.index for value in recording.outputs}
    of_params = [pair for pair in recording.gradients if pair[0].kind == "param"]
    unread = [param.label for param, gradient in of_params if not read & {param.index, gradient.index}]
    if unread:
        warn(
            f"the step computes the gradient of {_named(unread)}, which its optimizer does not read: give the "
            "optimizer these parameters, or set requires_grad=False",
            TrainingWarning,
        )
    written = {value.root.index: value for call in recording.calls for value in call.outputs if value.version}
    last = {gradient.index for _, gradient in recording.finished} if recording.steps else ()
    grow = [(param.label, written.get(gradient.index)) for param, gradient, _ in recording.kept]
    growing = [name for name, value in grow if value is not None and value.index in last and name not in wanted]
    if growing:
        warn(
            f"the step adds to the gradient of {_named(growing)}, updates by the sum and leaves it to the next step: "
            "call optimizer.zero_grad(), unless another step does",
            TrainingWarning,
        )


def _named(names: Sequence[str]) -> str:
    return repr(names[0]) + (f" and {counted(len(names) - 1, 'other')}" if len(names) > 1 else "")
