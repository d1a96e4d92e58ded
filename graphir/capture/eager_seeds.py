"""Eager PyTorch as a captured step runs it: the random numbers that it draws, and the factorisations that it takes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import CaptureError
from ..ir.seeds import mix
from .composites import values_alone_asked, values_alone_of
from .forms import form_of
from .randomness import SeedIds, own_generator, rng_state_followed, seedable

__all__ = ["seeded"]


class _Seeded(TorchDispatchMode):
    def __init__(self, step: int, replica: int, ids: SeedIds) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._step, self._replica, self.seeds = step, replica, ids
        self._generators: dict[torch.device, torch.Generator] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if isinstance(func, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in func.tags:
            form = form_of(func)
            if form.draws(form.bind(args, kwargs).args) and own_generator(form, args, kwargs) is None:
                func = seedable(form, "graphir.seeded")
                args = args[: form.generator]
                kwargs["generator"] = self._generator(args, kwargs)
        alone = values_alone_of(func)
        if alone is not None:
            values = alone.func(*args[: alone.taken])
            return tuple([values if i == alone.position else values.new_empty(0) for i in range(alone.results)])
        return func(*args, **kwargs)

    def _generator(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Generator:
        device = kwargs.get("device") or next((a.device for a in args if isinstance(a, torch.Tensor)), "cpu")
        device = torch.device(device)
        generator = self._generators.get(device)
        if generator is None:
            generator = self._generators[device] = torch.Generator(device)
        return generator.manual_seed(mix(self._step, self._replica, self.seeds.take()))


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
            raise CaptureError(f"seeded: {word} is {number!r}", fix="give a whole number, counted from 0")
    with rng_state_followed(), values_alone_asked(), _Seeded(step, replica, SeedIds(draws=True)):
        yield
