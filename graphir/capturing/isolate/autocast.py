"""Autocast while a step is recorded: the kind of device that the step is for, and what torch tells the step.

On a machine without a GPU ``torch.autocast("cuda")`` switches itself off, and tensors say that they are on the host.
While a step is recorded for CUDA, autocast for CUDA can be entered all the same, and autocast for the host, as
``torch.autocast(x.device.type, ...)`` asks for it, is CUDA's. ::

    torch.autocast("cuda", dtype) ──┐
                                    ├─▶ torch.set_autocast_enabled ──▶ state of CUDA ──▶ casts of :mod:`.cuda_casts`
    torch.autocast("cpu", dtype) ───┘   (target: CUDA)
"""

from __future__ import annotations

import contextlib
import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch.amp import autocast_mode

from ...errors import CaptureError, TrainingWarning, warn
from ..words.libraries import Outside
from ..words.places import where
from .cuda_casts import CUDA, CastWeights, casts_included, casts_lent, has_kernel
from .functions import Handlers
from .global_state import open_regions
from .patches import replaced

__all__ = ["Target", "autocast_followed", "autocast_off", "fast_paths"]

_C: Final[Any] = torch._C
_KINDS: Final = ("cpu", "cuda")
_CUSTOM: Final = "decorate_fwd"
"""The function that ``torch.amp.custom_fwd`` puts around another one."""
_RECOMPUTING: Final = "torch.utils.checkpoint"
"""The module of checkpoints. A checkpoint recomputes under the autocast for the host that torch told its forward of.
Here this is CUDA's: the step has not asked for two kinds."""
_UNTOLD: Final = (
    "without a GPU torch disables every autocast for CUDA, so capture can't know whether this one was meant to cast"
)
_MADE: Final[weakref.WeakSet[Any]] = weakref.WeakSet()
"""Autocasts that were made within recordings, where torch does not switch off those for CUDA."""


class Target:
    """The kind of device that a step is recorded for.

    Attributes:
        given: the kind that the caller named; None: CUDA if autocast for CUDA is on somewhere, else the host.
        is_cuda: whether the kind is CUDA, as far as the recording has come.
        casts_on_host: whether the step is under autocast for the host somewhere.
        casts: whether the operator that runs now is under autocast for CUDA.

    Raises:
        CaptureError: there is no such kind.

    Warns:
        TrainingWarning: an autocast for CUDA around the capture is off, for want of a GPU or on purpose.
    """

    def __init__(self, given: str | None) -> None:
        if given is not None and given not in _KINDS:
            raise CaptureError(
                f"target={given!r} is neither 'cpu' nor 'cuda'",
                fix='write target="cpu" or target="cuda"; passes choose the devices on which the program runs',
            )
        self.given = given
        self.is_cuda = given == "cuda" or (given is None and _C.is_autocast_enabled("cuda"))
        self.casts = False
        self.casts_on_host = not self.is_cuda and _C.is_autocast_enabled("cpu")
        if given != "cpu" and _is_within_idle_region():
            warn(
                f"the capture is within a torch.autocast for CUDA that casts nothing: {_UNTOLD}. To record CUDA's "
                'casts, enter torch.autocast("cuda", …) in the forward, or write torch.autocast("cpu", …) around a '
                'capture with target="cuda"; to record no casts, pass target="cpu"',
                TrainingWarning,
            )

    def refuse_kernel(self, func: Any, scope: str) -> None:
        """Refuse an operator of a library that has a kernel of its own for CUDA's autocast, under autocast for CUDA."""
        if self.casts and has_kernel(func.name(), CUDA):
            raise CaptureError(
                f"the step calls {func.name()} under autocast for CUDA: this operator registers casts of its own for "
                "CUDA, which can't be recorded on the host",
                where=where(scope),
                fix='call the operator within torch.autocast("cuda", enabled=False), and cast the arguments as the '
                "operator would cast them, such as x.bfloat16()",
            )

    def refuse_inference(self, scope: str) -> None:
        """Refuse a composite operator in inference mode, which torch shows whole, under autocast for CUDA."""
        if self.casts:
            raise CaptureError(
                "the step enters inference mode under autocast for CUDA, where casts within operators don't show",
                where=where(scope),
                fix="write torch.no_grad() in place of torch.inference_mode()",
            )


@contextlib.contextmanager
def autocast_followed(target: Target, here: Callable[[], str]) -> Iterator[None]:
    """While this is active, autocast for CUDA is followed, and torch's state is left as it was.

    If the caller named no target, the first region for CUDA makes the target CUDA. If the caller named the host,
    autocast for CUDA does what it does in torch: nothing to tensors on the host.

    Args:
        target: of the step.
        here: the path of the module that runs.

    Raises:
        CaptureError: it is not clear which casts the step has.
    """
    if target.given == "cpu":
        yield
        return
    before = {kind: (_C.is_autocast_enabled(kind), _C.get_autocast_dtype(kind)) for kind in _KINDS}
    follow = _Follow(target, here)
    try:
        with casts_lent(follow.weights), follow.torch_told():
            if target.is_cuda:
                follow.start()
            yield
    finally:
        target.casts = False
        for kind, (enabled, dtype) in before.items():
            _C.set_autocast_enabled(kind, enabled)
            _C.set_autocast_dtype(kind, dtype)


def fast_paths(here: Callable[[], str]) -> Handlers:
    """What runs in the place of kernels that call other operators: autocast casts these, and a plan has no autocast.

    Args:
        here: the path of the module that runs.
    """

    def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if any(map(_C.is_autocast_enabled, _KINDS)):
            raise CaptureError(
                f"torch.{function.__name__} calls other operators, which autocast casts",
                where=where(here()),
                fix="switch the fast path off: torch.backends.mha.set_fastpath_enabled(False)",
            )
        return function(*args, **kwargs)

    return dict.fromkeys((torch._transformer_encoder_layer_fwd, torch._native_multi_head_attention), call)


@contextlib.contextmanager
def autocast_off() -> Iterator[None]:
    """While this is active, autocast is off.

    A region around a step is for its forward and its loss. torch recommends to call ``backward`` outside of the region:
    operators of the backward have the element types of those of the forward.
    """
    # Set, not entered: the exit of an autocast's context would empty the cache of casts of all threads.
    kinds = [kind for kind in _KINDS if torch.is_autocast_enabled(kind)]
    for kind in kinds:
        torch.set_autocast_enabled(kind, False)
    try:
        yield
    finally:
        for kind in kinds:
            torch.set_autocast_enabled(kind, True)


class _Follow:
    """The functions that replace torch's functions about autocast during one recording."""

    def __init__(self, target: Target, here: Callable[[], str]) -> None:
        self._target, self._here = target, here
        self.weights = CastWeights()

    def start(self) -> None:
        """Make the autocast around the capture, for the host or for CUDA, one for CUDA."""
        on_host = _C.is_autocast_enabled("cpu")
        if on_host:
            _C.set_autocast_enabled("cpu", False)
            _C.set_autocast_dtype("cuda", _C.get_autocast_dtype("cpu"))
        self._set_enabled("cuda", on_host or _C.is_autocast_enabled("cuda"))

    @contextlib.contextmanager
    def torch_told(self) -> Iterator[None]:
        """Replace torch's functions."""
        functions = {
            "is_autocast_enabled": self._is_enabled,
            "set_autocast_enabled": self._set_enabled,
            "get_autocast_dtype": lambda device_type: _C.get_autocast_dtype(self._meant(device_type)),
            "set_autocast_dtype": lambda device_type, dtype: _C.set_autocast_dtype(self._meant(device_type), dtype),
            "is_autocast_cpu_enabled": lambda: _C.is_autocast_enabled(self._meant("cpu")),
            "set_autocast_cpu_enabled": lambda enabled: self._set_enabled("cpu", enabled),
            "get_autocast_cpu_dtype": lambda: _C.get_autocast_dtype(self._meant("cpu")),
            "set_autocast_cpu_dtype": lambda dtype: _C.set_autocast_dtype(self._meant("cpu"), dtype),
            "clear_autocast_cache": self._clear,
        }
        regions = {"__init__": self._made(autocast_mode.autocast.__init__), "__enter__": self._entered()}
        with (
            replaced(torch, functions),
            replaced(torch.cuda.amp.common, {"amp_definitely_not_available": lambda: False}),
            replaced(torch.cuda, {} if torch.cuda.is_available() else {"is_bf16_supported": lambda *args: True}),
            replaced(autocast_mode.autocast, regions),
        ):
            yield

    def _meant(self, kind: str) -> str:
        kind = torch.device(kind).type  # torch takes "cuda:0", too
        return "cuda" if kind == "cpu" and self._target.is_cuda else kind

    def _is_enabled(self, device_type: str = "cuda") -> bool:
        enabled: bool = _C.is_autocast_enabled(self._meant(device_type))
        asking = sys._getframe(1)
        if enabled and asking.f_code.co_name == _CUSTOM and asking.f_locals.get("cast_inputs") is not None:
            raise CaptureError(
                "the step runs a custom_fwd with cast_inputs under autocast for CUDA: custom_fwd casts only tensors on "
                "a CUDA device, and recorded tensors are on the host",
                where=where(self._here()),
                fix="leave cast_inputs out, and convert the arguments in the forward, as by x.float(), within "
                'torch.autocast("cuda", enabled=False)',
            )
        return enabled

    def _set_enabled(self, device_type: str | bool = "cuda", enabled: bool = False) -> None:
        if isinstance(device_type, bool):  # without a device type, torch means CUDA
            kind, enabled = "cuda", device_type
        else:
            kind = self._meant(device_type)
        if kind == "cuda" and enabled and not self._target.is_cuda:
            if self._target.casts_on_host:
                raise self._ambiguous()
            self._target.is_cuda = True
        _C.set_autocast_enabled(kind, enabled)
        if kind == "cuda":
            self._target.casts = enabled
            casts_included(enabled)

    def _clear(self) -> None:
        self.weights.clear()
        if not self._target.is_cuda:
            _C.clear_autocast_cache()  # a cache that other threads share

    def _made(self, make: Callable[..., None]) -> Callable[..., None]:
        """Autocast's ``__init__``."""

        def made(
            autocast: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None
        ) -> None:
            target = self._target
            if enabled and target.given is None and torch.device(device_type).type == "cpu":
                if not target.is_cuda:
                    target.casts_on_host = True
                elif not _C.is_autocast_enabled("cuda") and _caller() != _RECOMPUTING:
                    raise self._ambiguous()
            make(autocast, self._meant(device_type), dtype, enabled, cache_enabled)
            _MADE.add(autocast)

        return made

    def _entered(self) -> Callable[..., Any]:
        """Autocast's ``__enter__``."""
        enter: Callable[[Any], Any] = autocast_mode.autocast.__enter__
        switched_off = _switched_off()

        def entered(autocast: Any) -> Any:
            if autocast.device == "cuda" and not autocast._enabled and switched_off and autocast not in _MADE:
                raise CaptureError(
                    "the step enters a torch.autocast for CUDA that was made outside of the step, as by a decorator: "
                    f"{_UNTOLD}",
                    where=where(self._here()),
                    fix='make the autocast in the forward: with torch.autocast("cuda", …); or capture with '
                    'target="cpu", which records no casts for CUDA',
                )
            return enter(autocast)

        return entered

    def _ambiguous(self) -> CaptureError:
        return CaptureError(
            "the step is under autocast for CUDA in one place and for the host in another",
            where=where(self._here()),
            fix=Outside(
                'write the same kind of device in both places; or capture with target="cuda", which records CUDA\'s '
                'casts in both, or with target="cpu", where autocast for CUDA casts nothing'
            ),
        )


def _is_within_idle_region() -> bool:
    """Whether this thread is within regions of autocast that cast nothing, one of them for CUDA.

    torch only counts open regions, so the autocasts are looked for among all objects. An autocast
    whose region has ended may be taken for an open one.
    """
    if not open_regions() or not _switched_off() or any(map(_C.is_autocast_enabled, _KINDS)):
        return False
    regions = [it for it in gc.get_objects() if autocast_mode.autocast in type(it).__mro__]
    return any(getattr(region, "device", "") == "cuda" for region in regions)


def _switched_off() -> bool:
    """Whether torch switches autocast for CUDA off, for want of a GPU."""
    return bool(torch.cuda.amp.common.amp_definitely_not_available())


def _caller() -> str:
    """The module of the code that makes an autocast, past the ``__init__`` of subclasses of torch's autocast."""
    frame = sys._getframe(2)
    while frame.f_code.co_name == "__init__" and frame.f_back is not None:
        frame = frame.f_back
    name: str = frame.f_globals.get("__name__", "")
    return name
