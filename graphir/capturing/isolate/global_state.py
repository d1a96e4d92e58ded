"""Settings of torch that outlast a step: a step that changes one is refused, and the settings are put back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import torch
from torch.backends import cuda, mha

from ...errors import CaptureError
from ..words.libraries import Outside
from ..words.places import where
from .patches import replaced

__all__ = ["SETTINGS", "global_state_kept", "open_regions"]


class _Setting(NamedTuple):
    get: Callable[[], Any]
    set: Callable[[Any], object]


_C: Final[Any] = torch._C


def _autocast(device: str) -> _Setting:
    """The state of autocast for a device, as ``torch._C`` has it.

    While a step is recorded for CUDA, torch's public functions are replaced, and give CUDA's state for the host's.
    """

    def get() -> tuple[bool, torch.dtype]:
        return _C.is_autocast_enabled(device), _C.get_autocast_dtype(device)

    def restore(value: tuple[bool, torch.dtype]) -> None:
        _C.set_autocast_enabled(device, value[0])
        _C.set_autocast_dtype(device, value[1])

    return _Setting(get, restore)


def open_regions() -> int:
    """How many regions of autocast are open: torch keeps the weights that it has cast until the outermost one ends."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def _open_regions(count: int) -> None:
    while open_regions() < count:
        torch.autocast_increment_nesting()
    while open_regions() > count:
        torch.autocast_decrement_nesting()


_ATTENTION: Final = (
    _Setting(cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    _Setting(cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    _Setting(cuda.math_sdp_enabled, cuda.enable_math_sdp),
    _Setting(mha.get_fastpath_enabled, mha.set_fastpath_enabled),
)
"""Kernels of attention, which round differently. On the host, too, they are chosen by settings of ``backends.cuda``."""


def _enabled() -> tuple[bool, ...]:
    return tuple([kernel.get() for kernel in _ATTENTION])


def _enable(values: tuple[bool, ...]) -> None:
    for kernel, enabled in zip(_ATTENTION, values, strict=True):
        kernel.set(enabled)


_DTYPE: Final = "the default dtype"
_KERNELS: Final = "the choice of attention kernels"
_SHARED: Final = (_DTYPE, _KERNELS)
"""Settings that all threads share: another thread may set one meanwhile."""
_SET_DTYPE: Final = ("set_default_dtype", "set_default_tensor_type")
SETTINGS: Final[Mapping[str, _Setting]] = {
    _DTYPE: _Setting(torch.get_default_dtype, torch.set_default_dtype),
    "the grad mode": _Setting(torch.is_grad_enabled, torch.set_grad_enabled),
    "autocast": _autocast("cpu"),
    "autocast on CUDA": _autocast("cuda"),
    _KERNELS: _Setting(_enabled, _enable),
    "the caching of autocast": _Setting(torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    "the number of open autocast regions": _Setting(open_regions, _open_regions),
}


@contextlib.contextmanager
def global_state_kept() -> Iterator[Callable[[], None]]:
    """Leave torch's settings as they are.

    Yields:
        A check, which raises if the step has changed a setting. The end of the context checks, too.

    Raises:
        CaptureError: names the setting.
    """
    before = {name: setting.get() for name, setting in SETTINGS.items()}
    mine = dict.fromkeys(name for name in SETTINGS if name not in _SHARED)

    def noting(set_dtype: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any, **kwargs: Any) -> None:
            mine[_DTYPE] = None
            set_dtype(*args, **kwargs)

        return call

    def check() -> None:
        for name in mine:
            if SETTINGS[name].get() != before[name]:
                raise CaptureError(
                    f"the step changes {name} for everything that runs after the step",
                    where=where(""),
                    fix=Outside("use torch's context manager for this setting, or change the setting before the step"),
                )

    try:
        with replaced(torch, {name: noting(getattr(torch, name)) for name in _SET_DTYPE}):
            yield check
        check()
    finally:
        for name in mine:
            SETTINGS[name].set(before[name])
