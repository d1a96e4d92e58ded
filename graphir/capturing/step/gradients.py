"""From the backward to the update: gradients unscaled and clipped, as ``torch.amp`` and ``torch.nn.utils`` do.

::

    fc.weight_grad ──▶ fc.weight_grad.unscaled ──▶ fc.weight_grad.clipped ──▶ update of fc.weight
                └────▶ fc.weight_grad.found_inf ──▶ found_inf ──▶ every update, then the next loss scale

Torch's own operators are recorded in the phase ``update``. Replicas run them on the reduced gradients, so that all
replicas do the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch

from ...errors import CaptureError
from ..intake.options import LossScaler, Options
from ..record.recorder import Recorder
from ..record.values import RecordedCall, Value
from ..words.places import where

__all__ = [
    "fake_scaler",
    "name_norms",
    "refuse_sparse",
    "rescale",
    "scale_loss",
    "unscaled",
    "update",
]

_aten: Final = torch.ops.aten


def fake_scaler(scaler: LossScaler, recorder: Recorder) -> LossScaler:
    """The scaler with fakes in the place of its tensors, which become state of the program."""
    fakes = []
    for name, tensor in (("scale", scaler.scale), ("growth_tracker", scaler.growth_tracker)):
        fakes.append(recorder.fake((), (), tensor.dtype))
        recorder.constants.append((recorder.external(fakes[-1], f"loss_scale.{name}", "state"), tensor))
    return scaler._replace(scale=fakes[0], growth_tracker=fakes[1])


def scale_loss(loss: torch.Tensor, scale: float | LossScaler | None) -> torch.Tensor:
    """The loss times *scale*, from which the backward starts."""
    if scale is None:
        return loss
    return loss * (scale.scale if isinstance(scale, LossScaler) else scale)


def refuse_sparse(recorder: Recorder, options: Options) -> None:
    """Raise where sparse gradients would have to be added up, scaled or clipped.

    Raises:
        CaptureError: names the option and the parameter.
    """
    given = [name for name, value in options._asdict().items() if value != Options._field_defaults[name]]
    for index in recorder.sparse.gradients if given else ():
        raise CaptureError(
            f"{given[0]} is given, but {recorder.values[index].label!r} has a sparse gradient",
            fix=f"use sparse=False, or leave {given[0]} out",
        )


def update(
    params: Sequence[str],
    gradients: Sequence[tuple[Value, Value]],
    recorder: Recorder,
    skips: Value | None,
    may_be_none: Mapping[int, Value],
) -> None:
    """Record the updates of parameters, in this order, but of those without a gradient.

    Args:
        params: by the names of their blobs.
        gradients: parameters and their gradients, unscaled and clipped.
        recorder: records the updates.
        skips: 1 where a gradient was infinite or NaN, so that the updates are skipped; None where they never are.
        may_be_none: by the index of a parameter, the number that is 1 where it has no gradient after all.
    """
    given: dict[str, tuple[Value, tuple[Value, ...]]]
    given = {param.label: (param, (gradient,)) for param, gradient in gradients}
    for index, pair in recorder.sparse.gradients.items():
        param = recorder.values[index]
        given[param.label] = param, (pair.indices, pair.values)
    with recorder.unseen():
        for name in params:
            if name in given:
                param, gradient = given[name]
                skip, is_none = skips, may_be_none.get(param.index)
                if skip is None or is_none is None:
                    skip = skip or is_none
                else:
                    skip = recorder.apply(_aten.maximum.default, skip, is_none)
                recorder.update(param, gradient, skip)


def _called(value: Value, label: str, of: Value | None = None) -> Value:
    """*value* under the name ``<of>.<label>``, or *label* where it belongs to no gradient alone."""
    if of is None:
        value.claim = label
    else:
        value.source, value.label = of, label
    return value


def _refuse_half(gradients: Sequence[tuple[Value, Value]]) -> None:
    for param, gradient in gradients:
        if gradient.dtype == torch.float16:
            raise CaptureError(
                f"the gradient of {param.label!r} is torch.float16, which a GradScaler does not unscale",
                where=where(param.scope),
                fix="keep the parameters in float32 and compute in float16 under torch.autocast",
            )


def unscaled(
    gradients: Sequence[tuple[Value, Value]], scaler: LossScaler, recorder: Recorder
) -> tuple[list[Value], Value]:
    """``GradScaler.unscale_``: the unscaled gradients, and whether to skip the updates.

    Raises:
        CaptureError: the scaler would not unscale a gradient.
    """
    _refuse_half(gradients)
    inverse = scaler.scale.double().reciprocal().float()
    none = torch.full((), 0.0, dtype=torch.float32, device="cpu")
    for tensor, name in ((inverse, "loss_scale.inverse"), (none, "loss_scale.found_none")):
        _called(recorder.read(tensor), name)
    made, found = [], []
    for _, gradient in gradients:
        (tensor,), found_inf = _aten._amp_foreach_non_finite_check_and_unscale.default(
            [recorder.window(gradient)], none, inverse
        )
        found.append(found_inf)
        _called(recorder.read(found_inf), "found_inf", of=gradient)
        made.append(_called(recorder.read(tensor), "unscaled", of=gradient))
    together = torch.stack(found)
    _called(recorder.read(together), "found_infs")
    return made, _called(recorder.read(together.amax()), "found_inf")


def rescale(scaler: LossScaler, found: Sequence[Value], recorder: Recorder) -> None:
    """``GradScaler.update``: the next scale, after whether the gradients of some optimizer were infinite or NaN."""
    with torch.no_grad():
        first, *others = map(recorder.window, found)
        _aten._amp_update_scale_.default(
            scaler.scale,
            scaler.growth_tracker,
            sum(others, first),
            scaler.growth_factor,
            scaler.backoff_factor,
            scaler.growth_interval,
        )


def name_norms(calls: Sequence[RecordedCall], of: Mapping[int, Value], total: Value) -> None:
    """Name the values that ``clip_grad_norm_`` made.

    Args:
        calls: the calls that it recorded.
        of: by the index of each gradient that they read, the gradient after which its norm is named.
        total: the norm that the function returned.
    """
    for call in calls:
        (made,) = call.outputs
        if made is total:
            _called(made, "grad_norm")
        elif call.inputs[0].index in of:
            _called(made, "norm", of=of[call.inputs[0].index])
        else:
            _called(made, "grad_norms" if made.label == "stack" else f"grad_norm.{made.label}")
