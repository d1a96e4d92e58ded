"""The modes that a step was captured in, for recording the step once more after they have changed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from .global_state import SETTINGS

__all__ = ["Modes"]


class Modes:
    """The modes of a model's modules, training or evaluation, and torch's settings, as they are now.

    The settings are those that a step must leave: gradients, autocast and the default dtype.

    Args:
        model: the module.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._training = [(module, module.training) for module in model.modules()]
        self._settings = {name: setting.get() for name, setting in SETTINGS.items()}

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """While this is active, modes and settings are as they were. Only those that differ are set."""
        modules = [(module, module.training) for module, training in self._training if module.training != training]
        settings: dict[str, Any] = {}
        for name, value in self._settings.items():
            now = SETTINGS[name].get()
            if now != value:
                settings[name] = now
        try:
            for module, training in modules:
                module.training = not training
            for name in settings:
                SETTINGS[name].set(self._settings[name])
            yield
        finally:
            for name, value in settings.items():
                SETTINGS[name].set(value)
            for module, training in modules:
                module.training = training
