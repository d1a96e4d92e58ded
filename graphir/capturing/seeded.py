"""Eager PyTorch with the random numbers and the factorisations of a captured step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode_stack

from ..errors import CaptureError
from ..ir.opset import is_composite
from ..ir.seeds import mix
from .isolate.patches import replaced
from .record.factorisations import ALONE
from .record.forms import Form, form_of
from .record.seeds import SeedIds, own_generator, rng_state_followed, seedable

__all__ = ["DrawsMode", "seeded", "seeded_step", "values_computed_alone"]


class DrawsMode(TorchDispatchMode):
    """A mode in which the random operators of this thread draw from generators that the mode chooses.

    A generator that a call passes is used as it is. A subclass chooses the next generator in :meth:`generator`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if torch.is_inference_mode_enabled() and _is_made_of_others(func):
            with self:  # in inference mode torch shows a composite operator as one call and hides its draws
                return func._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
        if _is_random(func):
            form = form_of(func)
            if form.draws(form.bind(args, kwargs).args) and own_generator(form, args, kwargs) is None:
                place = kwargs.get("device") or next((a.device for a in args if isinstance(a, torch.Tensor)), "cpu")
                return self.draw(form, args, kwargs, torch.device(place))
        return func(*args, **kwargs)

    def draw(self, form: Form, args: tuple[Any, ...], kwargs: dict[str, Any], place: torch.device) -> Any:
        """Call a random operator on a device."""
        func = seedable(form, "graphir.seeded")
        kwargs["generator"] = self.generator(place)
        return func(*args[: form.generator], **kwargs)

    def generator(self, place: torch.device) -> torch.Generator:
        """The generator of the next random operator on a device."""
        raise NotImplementedError


@cache
def _is_random(func: Any) -> bool:
    return isinstance(func, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in func.tags


@cache
def _is_made_of_others(func: Any) -> bool:
    return isinstance(func, torch._ops.OpOverload) and is_composite(func)


@contextlib.contextmanager
def values_computed_alone() -> Iterator[None]:
    """While this is active, torch's functions for singular values and eigenvalues ignore a :class:`DrawsMode`.

    Within a mode torch computes vectors too, which rounds differently.
    """

    def outside(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with _disable_current_modes():
                return function(*args, **kwargs)

        return call

    def draws(instance: object) -> bool:
        modes = _get_current_dispatch_mode_stack()
        return bool(modes) and all(isinstance(mode, DrawsMode) for mode in modes)

    with contextlib.ExitStack() as stack:
        for owner, names in ALONE:
            stack.enter_context(replaced(owner, {name: outside(getattr(owner, name)) for name in names}, draws))
        yield


class _Seeded(DrawsMode):
    def __init__(self, step: int, replica: int, ids: SeedIds) -> None:
        super().__init__()
        self.step, self._replica, self.seeds = step, replica, ids
        self._generators: dict[torch.device, torch.Generator] = {}

    def generator(self, place: torch.device) -> torch.Generator:
        generator = self._generators.get(place)
        if generator is None:
            generator = self._generators[place] = torch.Generator(place)
        return generator.manual_seed(mix(self.step, self._replica, self.seeds.take()))


def seeded_step() -> int | None:
    """The step of the innermost :func:`seeded` that this thread is in; None outside of any."""
    modes = reversed(_get_current_dispatch_mode_stack())
    return next((mode.step for mode in modes if isinstance(mode, _Seeded)), None)


@contextlib.contextmanager
def seeded(step: int, replica: int = 0) -> Iterator[None]:
    """Let eager PyTorch draw the random numbers that the captured step draws.

    Run the forward, the loss and the backward of one step inside it. The global random state stays as it is. Generators
    that a call is given are used as they are.

    Args:
        step: steps done before this one, from 0.
        replica: the position of the replica in ``devices``, from 0.

    Raises:
        CaptureError: an operator draws random numbers but takes no generator; *step* or *replica* is no whole number.
    """
    for word, number in (("step", step), ("replica", replica)):
        if type(number) is not int or number < 0:
            raise CaptureError(f"seeded: {word} is {number!r}, not a whole number of at least 0", fix="count from 0")
    with rng_state_followed(), values_computed_alone(), _Seeded(step, replica, SeedIds(draws=True)):
        yield
