"""The class of a placed model, and the model as its own class has it."""

from __future__ import annotations

import copy
import copyreg
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from ...errors import CaptureError, EagerWarning, warn

__all__ = ["OWN", "Placer", "is_placed", "plain_class", "swap", "swap_back", "twin_of"]

OWN: Final = "__graphir_placed__"
"""The attribute of a class that was made for a placed model: what it was placed by."""


class Placer(Protocol):
    """What a placed model's class asks."""

    def call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What the model's forward returns."""

    def apply(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        """A change of all tensors, as ``module._apply`` is given it, less what it moves to other devices."""

    def place_copy(self, model: torch.nn.Module) -> None:
        """Place a copy of the model as the model is placed."""

    @property
    def hf_device_map(self) -> Mapping[str, int | str] | None:
        """The device of each module, as Accelerate writes it; None where a Trainer would take it for another one."""


def is_placed(model: torch.nn.Module) -> bool:
    """Whether the model is placed."""
    return OWN in vars(type(model))


def plain_class(model: torch.nn.Module) -> type[torch.nn.Module]:
    """The class of the model, before it was placed if it is."""
    cls = type(model)
    return cls.__mro__[1] if OWN in vars(cls) else cls


def swap(model: torch.nn.Module, placed: Placer) -> None:
    """Give the model a class of its own, by the name of the class that it has.

    Raises:
        CaptureError: its class cannot have a subclass, or the model not another class.
    """
    plain = type(model)

    @functools.wraps(plain.forward)
    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if type(self) is not made:
            _refuse_sharded(type(self))
        if torch.compiler.is_compiling():
            return plain.forward(self, *args, **kwargs)
        return placed.call(args, kwargs)

    forward.__signature__ = inspect.signature(plain.forward)  # type: ignore[attr-defined]

    def reduced(self: torch.nn.Module, protocol: Any) -> Any:
        _, _, *others = tuple(super(made, self).__reduce_ex__(2))
        # Not as a new object of its class, which pickle compares with the class that the object has.
        return (copyreg._reconstructor, (plain, object, None), *others)  # type: ignore[attr-defined]

    def copied(self: torch.nn.Module, memo: dict[int, Any]) -> torch.nn.Module:
        own = getattr(super(made, self), "__deepcopy__", None)
        if own is not None:
            found: torch.nn.Module = own(memo)
            if not is_placed(found):
                warn(f"{plain.__name__} copies itself: the copy is not placed", EagerWarning)
            return found
        how, given, state, *_ = reduced(self, 2)
        twin: torch.nn.Module = how(*given)
        memo[id(self)] = twin
        twin.__setstate__(copy.deepcopy(state, memo))
        placed.place_copy(twin)
        return twin

    def mapped(self: torch.nn.Module) -> dict[str, int | str]:
        if placed.hf_device_map is None:
            raise AttributeError("hf_device_map")
        return dict(placed.hf_device_map)

    def applied(self: torch.nn.Module, fn: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
        return super(made, self)._apply(placed.apply(fn), *args, **kwargs)  # type: ignore[misc,no-any-return]

    body: dict[str, Any] = {
        "__module__": plain.__module__,
        "__qualname__": plain.__qualname__,
        "__doc__": plain.__doc__,
        OWN: placed,
        "forward": forward,
        "_apply": applied,
        "__reduce_ex__": reduced,
        "__deepcopy__": copied,
        "placement": property(lambda self: placed),
        "hf_device_map": property(mapped),
    }
    made = _subclass(plain, body)
    try:
        model.__class__ = made
    except TypeError as e:
        raise _refused(plain, e) from e


def _subclass(plain: type[torch.nn.Module], body: Mapping[str, Any]) -> type[torch.nn.Module]:
    """A subclass by the same name.

    Raises:
        CaptureError: the class takes none.
    """
    try:
        made: type[torch.nn.Module] = type(plain)(plain.__name__, (plain,), dict(body))  # type: ignore[misc]
        return made
    except Exception as e:  # of __init_subclass__, or a metaclass
        raise _refused(plain, e) from e


def _refuse_sharded(cls: type) -> None:
    """Refuse the class that ``fully_shard`` gives to a model: its parameters are whole for a moment of a call only."""
    if any(base.__module__.startswith("torch.distributed.fsdp") for base in cls.__mro__):
        raise CaptureError(
            "a placed model cannot be sharded by fully_shard, which moves its parameters in each call",
            fix="shard it or place it; model.placement.undo() lets a placed model go",
        )


def _refused(plain: type[torch.nn.Module], error: Exception) -> CaptureError:
    return CaptureError(
        f"place: the class {plain.__qualname__} cannot be that of a placed model: {error}",
        fix="compile its step instead, or place a module that has the model inside",
    )


def swap_back(model: torch.nn.Module) -> None:
    """Give the model the class that it had."""
    model.__class__ = plain_class(model)


def twin_of(model: torch.nn.Module) -> torch.nn.Module:
    """A module that has all that the model has, also what is set later. A call of it runs the ``forward`` of the
    model's own class, without what was put around that of the model: hooks of the model, and a ``forward`` that was set
    on the model itself."""
    plain = plain_class(model)

    def call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, FakeTensor)]
        before = [tensor._version for tensor in given]
        output = plain.forward(self, *args, **kwargs)
        if [tensor._version for tensor in given] != before:  # it is being recorded
            raise CaptureError("forward overwrites an argument, which a plan would not do", fix="write into a copy")
        return output

    body = {
        "__module__": plain.__module__,
        "__qualname__": plain.__qualname__,
        "__call__": call,
        "forward": property(lambda self: plain.forward.__get__(self)),
    }
    made = _subclass(plain, body)
    twin: torch.nn.Module = made.__new__(made)
    object.__setattr__(twin, "__dict__", vars(model))
    return twin
