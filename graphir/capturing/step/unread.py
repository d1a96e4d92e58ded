"""A step function is refused where it uses a number or the state of an optimizer, which move between steps; or a
scheduler; or an optimizer or a gradient scaler that was not found."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ...errors import CaptureError
from ..isolate.patches import replaced

__all__ = ["others_refused", "unread_attributes"]

_Here: TypeAlias = Callable[[], str]
"""Says which module runs, in the words of errors."""


def unread_attributes(optimizer: torch.optim.Optimizer, standing: Callable[[Any], Any], here: _Here) -> dict[str, Any]:
    """What an optimizer has in the place of its own attributes: groups with the fakes that stand for parameters, and
    nothing that moves from step to step."""
    kind = type(optimizer).__name__
    groups = [
        _UnreadGroup({**group, "params": [standing(param) for param in group["params"]]}, kind, here)
        for group in optimizer.param_groups
    ]
    refused = {name: _refusing(f"{kind}.{name}", here) for name in ("load_state_dict", "state_dict", "add_param_group")}
    return {"param_groups": groups, "state": _UnreadState(kind, here), **refused}


@contextlib.contextmanager
def others_refused(here: _Here) -> Iterator[None]:
    """While this is active, schedulers, and optimizers and scalers that were not found, refuse to be used in this
    thread."""
    with contextlib.ExitStack() as stack:
        for kind in _classes(LRScheduler, "step"):
            stack.enter_context(replaced(kind, {"step": _scheduled(here)}))
        stack.enter_context(replaced(LRScheduler, {"get_last_lr": _refusing("a scheduler's get_last_lr", here)}))
        stack.callback(register_optimizer_step_pre_hook(_unfound("an optimizer", here)).remove)
        for kind in _classes(torch.amp.GradScaler, "scale"):
            stack.enter_context(replaced(kind, {"scale": _unfound_scaler(vars(kind)["scale"], here)}))
        yield


def _classes(cls: type, method: str) -> Iterator[type]:
    """A class and its subclasses, where they have a method of their own."""
    if method in vars(cls):
        yield cls
    subclasses: list[type] = cls.__subclasses__()
    for other in subclasses:
        yield from _classes(other, method)


def _refusing(what: str, here: _Here) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise _unread(f"calls {what}", here)

    return refuse


def _scheduled(here: _Here) -> Callable[..., None]:
    def step(scheduler: object, *args: Any, **kwargs: Any) -> None:
        raise CaptureError(
            f"the step calls {type(scheduler).__name__}.step, whose numbers every step of a program would repeat",
            where=here(),
            fix="step schedulers between steps: a session reads learning rates before each step",
        )

    return step


def _unfound(what: str, here: _Here) -> Callable[..., None]:
    mine = threading.get_ident()

    def refuse(of: object, *args: Any, **kwargs: Any) -> None:
        if threading.get_ident() != mine:  # a hook of all optimizers
            return
        raise CaptureError(
            f"the step uses {what}, {type(of).__name__}, that was not found",
            where=here(),
            fix="name it in a cell, a global or an attribute of self, or pass stateful=(model, optimizer)",
        )

    return refuse


def _unfound_scaler(scale: Callable[..., Any], here: _Here) -> Callable[..., Any]:
    refuse = _unfound("a gradient scaler", here)
    return lambda of, *args, **kwargs: (refuse if of.is_enabled() else scale)(of, *args, **kwargs)


def _unread(does: str, here: _Here) -> CaptureError:
    """The error of a step that *does* something with what moves between steps."""
    return CaptureError(
        f"the step {does}, which moves from step to step",
        where=here(),
        fix="read and set it between steps: a session reads the optimizer's numbers before each step; or pass a number "
        "to the step as a tensor",
    )


class _UnreadGroup(dict[str, Any]):
    """A parameter group whose parameters can be read, and nothing else.

    Args:
        group: itself.
        kind: the class of its optimizer.
        here: says which module runs.
    """

    def __init__(self, group: dict[str, Any], kind: str, here: _Here) -> None:
        super().__init__(group)
        self._kind, self._here = kind, here

    def _refuse(self, verb: str, key: object) -> CaptureError:
        return _unread(f"{verb} {key!r} of a parameter group of {self._kind}", self._here)

    def __getitem__(self, key: str) -> Any:
        if key != "params":
            raise self._refuse("reads", key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """As of a dict."""
        return self[key]

    def __setitem__(self, key: str, value: Any) -> None:
        raise self._refuse("sets", key)

    def __delitem__(self, key: str) -> None:
        raise self._refuse("deletes", key)

    def _whole(self, *args: Any, **kwargs: Any) -> Any:
        raise self._refuse("reads or sets", "all")

    items = values = update = pop = popitem = setdefault = clear = _whole


class _UnreadState(dict[Any, Any]):
    """The state of an optimizer, which cannot be read or set.

    Args:
        kind: the class of the optimizer.
        here: says which module runs.
    """

    def __init__(self, kind: str, here: _Here) -> None:
        super().__init__()
        self._kind, self._here = kind, here

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise _unread(f"reads or sets the state of {self._kind}", self._here)

    __getitem__ = __setitem__ = __delitem__ = __contains__ = __iter__ = __len__ = _refuse
    get = keys = items = values = update = pop = popitem = setdefault = clear = _refuse
