"""Settings of torch that hold for the whole process: a step that changes one is noticed, and all of them put back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import torch

from .conditions import Broken, Conditions

__all__ = ["global_state_kept"]


class _Setting(NamedTuple):
    get: Callable[[], Any]
    set: Callable[[Any], object]


def _autocast(device: str) -> _Setting:
    def get() -> tuple[bool, torch.dtype]:
        return torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)

    def restore(value: tuple[bool, torch.dtype]) -> None:
        torch.set_autocast_enabled(device, value[0])
        torch.set_autocast_dtype(device, value[1])

    return _Setting(get, restore)


_SETTINGS: Final[Mapping[str, _Setting]] = {
    "the default dtype": _Setting(torch.get_default_dtype, torch.set_default_dtype),
    "whether gradients are computed": _Setting(torch.is_grad_enabled, torch.set_grad_enabled),
    "autocast": _autocast("cpu"),
    "autocast on CUDA": _autocast("cuda"),
    "whether autocast caches": _Setting(torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
}


@contextlib.contextmanager
def global_state_kept(conditions: Conditions) -> Iterator[None]:
    """Leave torch's settings as they are.

    Args:
        conditions: is given the condition that the step leaves them too.

    Raises:
        Broken: it does not hold.
    """
    before = {name: setting.get() for name, setting in _SETTINGS.items()}

    def check() -> None:
        for name, setting in _SETTINGS.items():
            if setting.get() != before[name]:
                raise Broken(
                    "settings",
                    f"the step changes {name} for everything that comes after it",
                    fix="use the context manager of torch for it, or set it before the step",
                )

    conditions["settings"] = check
    try:
        yield
        check()
    finally:
        for name, setting in _SETTINGS.items():
            setting.set(before[name])
