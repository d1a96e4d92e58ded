"""Random numbers of replicas: each draws from generators of its own, derived from torch's.

A forward of replicas takes one number from torch's generator, once the first replica draws, and has it for its *step*.
A replica's n-th random operator is then seeded by :func:`graphir.ir.seeds.mix` of the step, the replica and n, as in a
session, so that a mask depends neither on timing nor on the thread.

Once a replica asks for torch's random state, or sets it, as activation checkpointing does, its draws are one stream of
its own: the state is that stream's, and whoever restores it in the backward draws the same numbers again.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ..capturing.isolate.patches import replaced
from ..capturing.record.forms import Form
from ..capturing.seeded import DrawsMode, seeded_step, values_computed_alone
from ..ir.seeds import mix

__all__ = ["ForwardSeed", "ReplicaDraws", "replicas_followed"]

_CPU: Final = torch.device("cpu")
_thread: Final = threading.local()
_SWAPPED: Final = threading.Lock()
"""Held while torch's own generators have another state, for operators that take no generator."""


class ForwardSeed:
    """The step of one forward of replicas, of which their seeds are made.

    Within ``graphir.seeded(step)`` it is that step. In a replica of another forward it is drawn from that replica's
    generator, else from torch's. Make it in the thread that calls the forward.
    """

    def __init__(self) -> None:
        self._step, self._outer, self._lock = seeded_step(), _current(), threading.Lock()

    @property
    def step(self) -> int:
        """A whole number below 2^62. The first look draws it."""
        with self._lock, _disable_current_modes():
            if self._step is None:
                source = torch.default_generator if self._outer is None else self._outer.generator(_CPU)
                self._step = int(torch.randint(2**62, (), generator=source))
            return self._step


class ReplicaDraws(DrawsMode):
    """A replica's random numbers, while this is active in its thread.

    Args:
        seed: of the forward.
        replica: its position, from 0.
    """

    def __init__(self, seed: ForwardSeed, replica: int) -> None:
        super().__init__()
        self._seed, self._replica, self._ids = seed, replica, itertools.count()
        self._generators: dict[torch.device, torch.Generator] = {}
        self._streams: set[torch.device] = set()
        self._before: list[ReplicaDraws | None] = []

    def __enter__(self) -> ReplicaDraws:
        self._before.append(_current())
        _thread.draws = self
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *failed: Any) -> None:
        super().__exit__(*failed)  # type: ignore[no-untyped-call]
        _thread.draws = self._before.pop()

    def draw(self, form: Form, args: tuple[Any, ...], kwargs: dict[str, Any], place: torch.device) -> Any:
        if form.seedable is not None:
            return super().draw(form, args, kwargs, place)
        own, torchs = self.generator(place), _default_generator(place)
        with _SWAPPED:
            before = torchs.get_state()
            torchs.set_state(own.get_state())
            try:
                return form.func(*args, **kwargs)
            finally:
                own.set_state(torchs.get_state())
                torchs.set_state(before)

    def generator(self, place: torch.device) -> torch.Generator:
        place = _numbered(place)
        generator = self._own(place)
        return generator if place in self._streams else self._seeded(generator)

    def stream(self, place: torch.device) -> torch.Generator:
        """The generator from which all later random operators on a device draw, one after the other."""
        place = _numbered(place)
        generator = self._own(place)
        if place not in self._streams:
            self._streams.add(place)
            self._seeded(generator)
        return generator

    def _own(self, place: torch.device) -> torch.Generator:
        if place not in self._generators:
            self._generators[place] = torch.Generator(place)
        return self._generators[place]

    def _seeded(self, generator: torch.Generator) -> torch.Generator:
        return generator.manual_seed(mix(self._seed.step, self._replica, next(self._ids)))


@contextmanager
def replicas_followed() -> Iterator[None]:
    """While this is active, torch's functions of the random state are, in replicas, about their own."""
    # Any dispatch mode imports this, which wraps `torch.manual_seed` for good: let it find torch's own.
    import torch._dynamo

    with ExitStack() as stack:
        for owner in (torch, torch.random):
            stack.enter_context(replaced(owner, _ON_HOST, _in_replica))
        if torch.cuda.is_available():
            for owner in (torch.cuda, torch.cuda.random):
                stack.enter_context(replaced(owner, _ON_GPU, _in_replica))
        stack.enter_context(values_computed_alone())
        yield


def _current() -> ReplicaDraws | None:
    return getattr(_thread, "draws", None)


def _in_replica(instance: object) -> bool:
    return _current() is not None


def _stream(place: torch.device = _CPU) -> torch.Generator:
    draws = _current()
    assert draws is not None
    return draws.stream(place)


def _get_rng_state() -> torch.Tensor:
    return _stream().get_state()


def _set_rng_state(new_state: torch.Tensor) -> None:
    _stream().set_state(new_state)


def _manual_seed(seed: int) -> torch.Generator:
    return _stream().manual_seed(int(seed))


def _seed() -> int:
    return _stream().seed()


def _initial_seed() -> int:
    return _stream().initial_seed()


def _gpu_state(device: Any = "cuda") -> torch.Tensor:
    return _stream(torch.device(device)).get_state()


def _set_gpu_state(new_state: torch.Tensor, device: Any = "cuda") -> None:
    _stream(torch.device(device)).set_state(new_state)


_ON_HOST: Final[dict[str, Callable[..., Any]]] = {
    "get_rng_state": _get_rng_state,
    "set_rng_state": _set_rng_state,
    "manual_seed": _manual_seed,
    "seed": _seed,
    "initial_seed": _initial_seed,
}
_ON_GPU: Final[dict[str, Callable[..., Any]]] = {"get_rng_state": _gpu_state, "set_rng_state": _set_gpu_state}


def _numbered(place: torch.device) -> torch.device:
    index: int | None = place.index
    if place.type == "cuda" and index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return place if place.type == "cuda" else _CPU


def _default_generator(place: torch.device) -> torch.Generator:
    return torch.cuda.default_generators[place.index or 0] if place.type == "cuda" else torch.default_generator
