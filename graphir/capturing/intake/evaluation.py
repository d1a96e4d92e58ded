"""A warning about training steps of models in evaluation mode, such as ``from_pretrained`` returns."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from ...errors import TrainingWarning, warn

__all__ = ["warn_of_evaluation"]


def warn_of_evaluation(model: nn.Module) -> None:
    """Warn where *model*, whose step trains, is in evaluation mode and has modules that training mode changes."""
    if model.training:
        return
    changed = [(path, module) for path, module in model.named_modules() if not module.training and _is_changed(module)]
    if changed:
        path, module = changed[0]
        others = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        warn(
            f"{type(model).__name__} is in evaluation mode, but a training step is captured: {type(module).__name__} "
            f"{path!r}{others} will not act as in training; call model.train() before the capture, or filter this "
            "warning if evaluation mode is intended",
            TrainingWarning,
        )


def _is_changed(module: nn.Module) -> bool:
    """Whether training mode changes what a module computes: the module drops values, or keeps running statistics."""
    if isinstance(module, nn.modules.batchnorm._NormBase):
        return module.track_running_stats
    return any(isinstance(rate, (int, float)) and rate > 0 for rate in _rates(module))


def _rates(module: nn.Module) -> Iterator[object]:
    """The probabilities with which a module drops values; of an ``RReLU``, the width of its random range."""
    if "drop" in type(module).__name__.lower() or type(module).__name__ == "StochasticDepth":
        yield from [getattr(module, name, None) for name in ("p", "drop_prob")]
    if isinstance(module, (nn.RNNBase, nn.MultiheadAttention)):
        yield module.dropout
    if isinstance(module, nn.RReLU):
        yield module.upper - module.lower
