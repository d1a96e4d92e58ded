"""A gradient scaler in a step function: its scale is a blob of the program, and its methods record what they do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...errors import CaptureError
from ..intake.options import LossScaler
from ..record.recorder import Recorder
from ..record.values import Value
from .clipping import Originals
from .gradients import fake_scaler, rescale, scale_loss, unscaled

__all__ = ["Scaling"]


class Scaling:
    """A gradient scaler during one run of a step.

    Args:
        scaler: itself as it is now.
        recorder: records what its methods compute.
        originals: what gradients were made of.
        refuse: is given the name of a method, and raises where it would leave out gradients.

    Attributes:
        skips: while the scaler lets an optimizer make its step: 1 where it is skipped.
    """

    def __init__(
        self,
        scaler: LossScaler,
        recorder: Recorder,
        originals: Originals,
        refuse: Callable[[str], None],
    ) -> None:
        self._recorder, self._originals, self._refuse = recorder, originals, refuse
        self._scaler = fake_scaler(scaler, recorder)
        self._scaled: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._found: dict[int, Value] = {}
        self._stepped: set[int] = set()
        self.skips: Value | None = None

    def methods(self) -> Mapping[str, Callable[..., Any]]:
        """By name, what runs in the place of the scaler's own."""
        return {
            "scale": self.scale,
            "unscale_": self._unscale,
            "step": self._step,
            "update": self._update,
            "get_scale": lambda: self._scaler.scale,
        }

    def unscaled(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss before it was scaled; itself, if it was not."""
        return next((before for scaled, before in self._scaled if scaled is loss), loss)

    def check_end(self) -> None:
        """Raise where the step leaves the scaler to be updated by nobody.

        Raises:
            CaptureError: it does.
        """
        if self._found:
            raise CaptureError("the step does not update its scaler", fix="call scaler.update() after its step")

    def scale(self, loss: Any) -> torch.Tensor:
        """``GradScaler.scale`` of a loss."""
        if not isinstance(loss, torch.Tensor):
            raise self._refused("the scaler is given several losses", "scale their sum")
        scaled = scale_loss(loss, self._scaler)
        self._scaled.append((scaled, loss))
        self._recorder.read(scaled).claim = "loss.scaled"
        return scaled

    def _unscale(self, optimizer: torch.optim.Optimizer) -> None:
        if id(optimizer) in self._found:
            raise self._refused("unscale_() is called twice for one optimizer before update()", "call it once")
        self._refuse("scaler.unscale_")
        params = [param for group in optimizer.param_groups for param in group["params"]]
        params = [param for param in params if param.grad is not None]
        if not params:
            raise self._refused("no parameter of the optimizer has a gradient to unscale", "call backward() before")
        self._found[id(optimizer)] = self.unscale(params)

    def unscale(self, params: Sequence[torch.Tensor]) -> Value:
        """Unscale the gradients of parameters; 1 where one is infinite or NaN."""
        recorder = self._recorder
        with recorder.unseen():
            pairs = [(recorder.read(param).root, recorder.read(param.grad)) for param in params]  # type: ignore[arg-type]
        with self._originals.changed(params, "unscaled"):
            with torch.no_grad():
                made, found = unscaled(pairs, self._scaler, recorder)
            with recorder.unseen():
                for param, value in zip(params, made, strict=True):
                    recorder.overwrite(param.grad, value)  # type: ignore[arg-type]
        return found

    def _step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        if id(optimizer) not in self._found:
            self._unscale(optimizer)
        if id(optimizer) in self._stepped:
            raise self._refused("step() is called twice for one optimizer before update()", "call update() between")
        self._stepped.add(id(optimizer))
        self.skips = self._found[id(optimizer)]
        try:
            optimizer.step(*args, **kwargs)
        finally:
            self.skips = None

    def _update(self, new_scale: object = None) -> None:
        if new_scale is not None or not self._found:
            raise self._refused(
                "the scaler is given a scale, or updated before its step",
                "call scaler.step(optimizer) and then scaler.update()",
            )
        self.rescale(list(self._found.values()))
        self._found.clear()
        self._stepped.clear()

    def rescale(self, found: Sequence[Value]) -> None:
        """``GradScaler.update`` behind these outcomes of :meth:`unscale`."""
        rescale(self._scaler, found, self._recorder)

    def _refused(self, what: str, fix: str) -> CaptureError:
        return CaptureError(what, where=self._recorder.here(), fix=fix)
