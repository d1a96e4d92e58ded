"""A step that is made of a module, a loss and the other arguments of ``capture``, as a step function would do it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NoReturn

import torch
from torch.utils import _pytree as pytree

from ...errors import CaptureError
from ..intake.arguments import Arguments
from ..intake.found import Between
from ..intake.options import LossScaler, Options
from ..isolate.autocast import autocast_off
from ..isolate.functions import Handlers
from ..record.recorder import Recorder
from ..record.values import Value
from .between import EarlierGradients
from .gradients import refuse_sparse, scale_loss
from .micro_batches import micro_batch, prefix_of_micro_batch
from .recorded_step import Outcome
from .step_run import StepRun

__all__ = ["TrainingRun"]

_aten: Final = torch.ops.aten

_LOSS: Final = "the loss function"

_GRAD_NORM: Final = "grad_norm"
"""The name of the norm by which gradients are clipped, among what comes back."""


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
        results: Any = None
        for i in range(count):
            recorder.start_micro_batch(prefix_of_micro_batch(i, count))
            args, kwargs, targets = arguments.split(micro_batch(arguments.leaves, leaves, i, count, recorder))
            with recorder.follow_step():
                output = self._model(*args, **kwargs)
            check_settings()  # before the loss, which would be refused first: it needs no gradient then
            with recorder.scopes.inside("loss"), recorder.follow_step():
                total, beside = self._read(self._loss(output, *targets))
                start = self._scaled(total)
                with recorder.unseen():
                    found = pytree.tree_map(partial(self.leaf, where=_LOSS), beside)
            loss = self.end_forward(total)
            loss.claim = "loss"
            with recorder.unseen():
                if whole is None:
                    whole, results = loss, found
                else:
                    whole = self._added(whole, loss, "loss.sum")
                    results = found and {k: self._added(results[k], found[k], f"loss.{k}.sum") for k in found}
            with autocast_off(), recorder.follow_step():
                self.go_back(start, loss)
            refuse_sparse(recorder, self._options)
        with autocast_off(), torch.no_grad():
            norm = self._finish()
        if norm is not None:
            results = {**(results or {}), _GRAD_NORM: norm}
        if results is None:
            return self.outcome_of(whole, (), None)
        return self.outcome_of(whole, *pytree.tree_flatten((whole, results)))

    def _read(self, found: Any) -> tuple[torch.Tensor, Any]:
        """The loss of a micro-batch, as a part of the step's, and what comes back beside the loss; None: nothing."""
        count, clips = self._options.accumulate, self._options.clip_grad_norm is not None
        loss, results = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
        total = _scalar(loss)
        if results is not None and count > 1:
            raise _refused(
                "the loss has results beside it, and accumulate is given, which tells nothing of what becomes of them",
                "gather them in a function of the whole step, graphir.capture(train_step, batch), or leave them out",
            )
        if count > 1:
            total = total / count
        if isinstance(loss, dict):
            parts = {k: v / count if isinstance(v, torch.Tensor) and count > 1 else v for k, v in loss.items()}
            results = parts if results is None else _merged(parts, results)
        if clips and results is not None:
            _merged({_GRAD_NORM: None}, results)
        return total, results

    def _added(self, one: Any, other: Any, name: str) -> Any:
        """The sum of what two micro-batches have; of a number, the number."""
        if not isinstance(one, Value):
            return one
        made = self._recorder.apply(_aten.add.Tensor, one, other)
        made.claim = name
        return made

    def handlers(self) -> Handlers:
        """Functions that refuse a backward inside of the forward."""
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
        scaled = scale_loss(loss, self._factor)
        if scaled is not loss:
            self._recorder.read(scaled).claim = "loss.scaled"
        return scaled

    def _finish(self) -> Value | None:
        """Unscale and clip the gradients, behind all backwards, and update the parameters.

        Returns:
            The norm of the gradients, where they are clipped by that.
        """
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
        total = None
        if norm is not None:
            total = self._recorder.read(torch.nn.utils.clip_grad_norm_(params, norm))
        if most is not None:
            with self._originals.changed(params, "clipped"):
                torch.nn.utils.clip_grad_value_(params, most, foreach=False)
        if self._updated is not None:
            self.update(self._updated)
        if self._scaling is not None:
            self._scaling.rescale([found])
        return total


def _merged(parts: Mapping[str, Any], results: Any) -> dict[str, Any]:
    if not isinstance(results, dict) or not results.keys().isdisjoint(parts):
        names = " and ".join(map(repr, parts))
        raise _refused(
            f"the results beside the loss are no dict that {names} can be added to", f"return a dict without {names}"
        )
    return {**parts, **results}


def _refused(what: str, fix: str) -> CaptureError:
    return CaptureError(what, where=_LOSS, fix=fix)


def _scalar(loss: Any) -> torch.Tensor:
    total = loss
    if isinstance(loss, dict):
        if not loss:
            raise _refused("the loss is an empty dict", "return a scalar tensor")
        terms = list(loss.values())
        total = terms[0]
        for term in terms[1:]:
            total = total + term
    if not isinstance(total, torch.Tensor) or total.numel() != 1 or total.dim():
        kind = f"tensor of shape {list(total.shape)}" if isinstance(total, torch.Tensor) else type(total).__name__
        raise _refused(
            f"the loss is a {kind}, not a scalar",
            "return a 0-dim tensor, such as loss.mean(), or a dict of them, or a pair of these and of results",
        )
    if not total.requires_grad:
        raise _refused(
            "the loss does not depend on any parameter",
            "use parameters with requires_grad=True, and don't detach tensors that the loss reads",
        )
    return total
