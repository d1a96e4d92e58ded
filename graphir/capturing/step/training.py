"""A step that is made of a module, a loss and the other arguments of ``capture``, as a step function would do it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NoReturn

import torch

from ...errors import CaptureError
from ..intake.arguments import Arguments
from ..intake.found import Between
from ..intake.options import LossScaler, Options
from ..isolate.autocast import autocast_off
from ..isolate.functions import Handlers
from ..record.recorder import Recorder
from ..record.values import Value
from .between import EarlierGradients
from .gradients import refuse_sparse
from .micro_batches import micro_batch, prefix_of_micro_batch
from .recorded_step import Outcome
from .step_run import StepRun

__all__ = ["TrainingRun"]

_aten: Final = torch.ops.aten


class TrainingRun(StepRun):
    """One run of such a step: forward, loss and backward of each micro-batch, then clipping, and an update.

    Args:
        model: the module.
        loss: the loss function.
        options: of the capture.
        trained: the blobs of the parameters that the optimizer updates, in its order; None without one.
        recorder: records the step.
        fakes: of its parameters and buffers, by the ``id`` of each.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss: Callable[..., Any],
        options: Options,
        trained: Sequence[str] | None,
        recorder: Recorder,
        fakes: Mapping[int, torch.Tensor],
    ) -> None:
        own = [fakes[id(param)] for param in model.parameters()]
        params = {recorder.read(fake).label: fake for fake in own}
        scaler = options.loss_scale if isinstance(options.loss_scale, LossScaler) else None
        self._factor = None if isinstance(options.loss_scale, LossScaler) else options.loss_scale
        super().__init__(recorder, fakes, EarlierGradients(Between.none_of(params), model, (), recorder, fakes), scaler)
        self._model, self._loss, self._options = model, loss, options
        self._trained = [params[name] for name in params if trained is None or name in trained]
        self._updated = None if trained is None else [params[name] for name in trained]

    def run(self, arguments: Arguments, leaves: Sequence[Any], check_settings: Callable[[], None]) -> Outcome:
        """Run the step.

        Raises:
            CaptureError: no program can express the step.
        """
        recorder, count = self._recorder, self._options.accumulate
        whole: Value | None = None
        for i in range(count):
            recorder.start_micro_batch(prefix_of_micro_batch(i, count))
            args, kwargs, targets = arguments.split(micro_batch(arguments.leaves, leaves, i, count, recorder))
            with recorder.follow_step():
                output = self._model(*args, **kwargs)
            check_settings()  # before the loss, which would be refused first: it needs no gradient then
            with recorder.scopes.inside("loss"), recorder.follow_step():
                total = _scalar(self._loss(output, *targets))
                total = total / count if count > 1 else total
                start = self._scaled(total)
            loss = self.end_forward(total)
            loss.claim = "loss"
            if whole is None:
                whole = loss
            else:
                with recorder.unseen():
                    whole = recorder.apply(_aten.add.Tensor, whole, loss)
                whole.claim = "loss.sum"
            with autocast_off(), recorder.follow_step():
                self.go_back(start, loss)
            refuse_sparse(recorder, self._options)
        with autocast_off(), torch.no_grad():
            self._finish()
        return self.outcome_of(whole, (), None)

    def handlers(self) -> Handlers:
        """What refuses a backward inside of the forward."""
        return dict.fromkeys((torch.Tensor.backward, torch.autograd.backward), self._refuse_backward)

    def _refuse_backward(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise CaptureError(
            "a backward runs inside of the forward",
            where=self._recorder.here(),
            fix="call torch.autograd.grad, or extend the loss; a function of the whole step, "
            "graphir.capture(train_step, batch), may have several backwards",
        )

    def _scaled(self, loss: torch.Tensor) -> torch.Tensor:
        if self._scaling is not None:
            return self._scaling.scale(loss)
        if self._factor is None:
            return loss
        scaled = loss * self._factor
        self._recorder.read(scaled).claim = "loss.scaled"
        return scaled

    def _finish(self) -> None:
        """What is behind the backwards: gradients are unscaled and clipped, and parameters updated."""
        norm, most, _, scale = self._options
        params = [param for param in self._trained if param.grad is not None]
        if not params and any(option is not None for option in (norm, most, scale)):
            raise CaptureError(
                "no parameter of the optimizer has a gradient to unscale or to clip",
                fix="give the optimizer parameters that the loss depends on",
            )
        self._recorder.start_update()
        if self._scaling is not None:
            found = self._scaling.skips = self._scaling.unscale(params)
        elif self._factor is not None:
            with self._originals.changed(params, "unscaled"):
                for param in params:
                    param.grad.mul_(1.0 / self._factor)  # type: ignore[union-attr]
        if norm is not None:
            torch.nn.utils.clip_grad_norm_(params, norm)
        if most is not None:
            with self._originals.changed(params, "clipped"):
                torch.nn.utils.clip_grad_value_(params, most, foreach=False)
        if self._updated is not None:
            self.update(self._updated)
        if self._scaling is not None:
            self._scaling.rescale([found])


def _scalar(loss: Any) -> torch.Tensor:
    total = loss
    if isinstance(loss, dict):
        if not loss:
            raise CaptureError("the loss is an empty dict", where="the loss function", fix="return a scalar tensor")
        terms = list(loss.values())
        total = terms[0]
        for term in terms[1:]:
            total = total + term
    if not isinstance(total, torch.Tensor) or total.numel() != 1 or total.dim():
        kind = f"tensor of shape {list(total.shape)}" if isinstance(total, torch.Tensor) else type(total).__name__
        raise CaptureError(
            f"the loss is a {kind}, not a scalar",
            where="the loss function",
            fix="return a 0-dim tensor, such as loss.mean(), or a dict of them; a function of the whole step, "
            "graphir.capture(train_step, batch), may return more",
        )
    if not total.requires_grad:
        raise CaptureError(
            "the loss does not depend on any parameter",
            where="the loss function",
            fix="use parameters with requires_grad=True, and don't detach tensors that the loss reads",
        )
    return total
