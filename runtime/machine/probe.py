"""The CUDA devices that are there, and what leads from each to each other one and to the host: measured in seconds.

Each figure is the fastest of several runs, since whatever else the machine does only makes a run slower. An element
type that a card cannot multiply has no figure. A device without room for the operands is measured with smaller ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import permutations
from typing import Final, NamedTuple, Protocol

import torch

from graphir.analysis.profiles import driver
from graphir.analysis.topology import Link, Speed
from graphir.errors import GraphirError

from .calibration import fastest, short_calls
from .capacity import free_on

__all__ = ["Card", "Cards", "Probe", "speeds_and_links", "unmeasurable"]

_HOST: Final = "cpu:0"
_RUNS: Final = 5
_SIDES: Final = (4096, 1024, 256)
"""Rows and columns of a matrix: the largest for which there is room."""

_NBYTES: Final = (1 << 26, 1 << 22, 1 << 18)
"""Of a vector that is copied or added: larger than the caches of a card, where there is room."""

_SHORT: Final = 200
"""Short kernels that follow each other."""

_DTYPES: Final = {"f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16, "f16": torch.float16}


_ALL: Final = "f32"
"""What every card multiplies."""


class Card(NamedTuple):
    """A CUDA device: its name, its bytes in all and free, and what tells it from others of its name. The free bytes are
    None where the card was not asked for them."""

    name: str
    memory: int
    free: int | None = None
    uuid: str = ""


class Probe(Protocol):
    """What is asked of a machine; devices are ``gpu:0``, … in the order in which CUDA counts them, and ``cpu:0``."""

    def cards(self, free: bool) -> list[Card]:
        """The cards, in order; each is asked for its *free* bytes where these are wanted."""
        ...

    def driver(self) -> str:
        """The driver and the versions by which figures hold."""
        ...

    def flops_per_second(self, index: int) -> Mapping[str, float]:
        """Of matrix products on a card, by element type."""
        ...

    def bytes_per_second(self, index: int) -> float:
        """Of elementwise operators on a card."""
        ...

    def seconds_per_call(self, index: int) -> float:
        """What a kernel on a card takes, however small it is."""
        ...

    def seconds_to_issue(self) -> float:
        """What a thread of the host takes, in Python, to issue a short kernel to a card."""
        ...

    def link(self, source: str, destination: str) -> Link:
        """What leads from one device to another one."""
        ...


def speeds_and_links(probe: Probe, cards: Sequence[Card]) -> tuple[dict[str, Speed], tuple[Link, ...]]:
    """How fast each card is, and all links between cards and the host.

    Raises:
        GraphirError: a card has no room for what it is measured with, or has failed.
    """
    speeds, links = {}, []
    try:
        for index, card in enumerate(cards):
            measured = f"gpu:{index} ({card.name}) cannot be measured"
            speeds[f"gpu:{index}"] = Speed(
                flops_per_second=dict(probe.flops_per_second(index)),
                bytes_per_second=probe.bytes_per_second(index),
                memory=card.memory,
                seconds_per_call=probe.seconds_per_call(index),
            )
        for pair in permutations([*speeds, _HOST], 2):
            measured = f"the link from {pair[0]} to {pair[1]} cannot be measured"
            links.append(probe.link(*pair))
    except RuntimeError as e:
        raise unmeasurable(measured, e) from None
    return speeds, tuple(links)


def unmeasurable(what: str, e: RuntimeError) -> GraphirError:
    """The error that torch's stands for: there is too little memory, or a card has failed."""
    return GraphirError(
        f"{what}: {str(e).strip().partition(chr(10))[0]}",
        fix="nvidia-smi lists what holds a card's memory: end that; hide the card by CUDA_VISIBLE_DEVICES; or name the "
        "machine: topology=Topology.of('h100', …) or Topology.load(path)",
    )


class Cards:
    """The :class:`Probe` of the machine that this process runs on."""

    def cards(self, free: bool) -> list[Card]:
        found = []
        for index in range(torch.cuda.device_count()):
            about = torch.cuda.get_device_properties(index)
            left = free_on(torch.device("cuda", index)) if free else None
            found.append(Card(about.name, about.total_memory, left, str(getattr(about, "uuid", ""))))
        return found

    def driver(self) -> str:
        return driver()

    def flops_per_second(self, index: int) -> dict[str, float]:
        found = {}
        for name, dtype in _DTYPES.items():
            for side in _SIDES:
                try:
                    square = torch.randn(side, side, device=f"cuda:{index}").to(dtype)
                    result = torch.empty_like(square)
                    seconds = _seconds(index, partial(torch.mm, square, square, out=result))
                except torch.OutOfMemoryError:
                    if side == _SIDES[-1]:
                        raise
                    continue
                except RuntimeError:  # no kernel multiplies these
                    if name == _ALL:
                        raise
                    break
                found[name] = 2 * side**3 / seconds
                break
        return found

    def bytes_per_second(self, index: int) -> float:
        x, y, out = (_vector(f"cuda:{index}") for _ in range(3))
        return 3 * x.nbytes / _seconds(index, lambda: torch.add(x, y, out=out))

    def seconds_per_call(self, index: int) -> float:
        x = torch.ones(16, device=f"cuda:{index}")

        def short() -> None:
            for _ in range(_SHORT):
                x.add_(1.0)

        with torch.cuda.device(index):  # in a graph, so that Python's time is no part of it
            stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
            with torch.cuda.stream(stream):
                short()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                short()
            return _seconds(index, graph.replay) / _SHORT

    def seconds_to_issue(self) -> float:
        calls, count = short_calls(torch.device("cuda", 0))
        return fastest(calls, _RUNS, before=lambda: torch.cuda.synchronize(0)) / count

    def link(self, source: str, destination: str) -> Link:
        a, b = _place(source), _place(destination)
        peers = None
        if "cpu" not in (a.type, b.type):
            peers = torch.cuda.can_device_access_peer(b.index, a.index)
        pageable = None
        if peers is None:
            pageable = _rate(a, b, pinned=False)[0]
        rate, latency = _rate(a, b, pinned=True)
        return Link(
            source=source,
            destination=destination,
            bytes_per_second=rate,
            latency=latency,
            peer=bool(peers),
            pageable_bytes_per_second=pageable,
        )


def _place(name: str) -> torch.device:
    kind, _, index = name.partition(":")
    return torch.device("cpu") if kind == "cpu" else torch.device("cuda", int(index))


def _vector(place: torch.device | str, *, pinned: bool = False) -> torch.Tensor:
    """A vector as large as there is room for."""
    for nbytes in _NBYTES[:-1]:
        try:
            return torch.zeros(nbytes // 4, device=place, pin_memory=pinned)
        except RuntimeError:  # too little memory, or none that could be pinned
            continue
    return torch.zeros(_NBYTES[-1] // 4, device=place, pin_memory=pinned)


def _rate(a: torch.device, b: torch.device, *, pinned: bool) -> tuple[float, float]:
    """Bytes a second of a large copy, and the seconds of a small one."""
    large, into = _vector(a, pinned=pinned and a.type == "cpu"), _vector(b, pinned=pinned and b.type == "cpu")
    count = min(len(large), len(into))
    small = large[:1]
    index = b.index if a.type == "cpu" else a.index

    def seconds(source: torch.Tensor) -> float:
        return _seconds(index, lambda: into[: len(source)].copy_(source, non_blocking=True))

    latency = seconds(small)
    taken = seconds(large[:count])
    return count * 4 / max(taken - latency, taken / 2), latency


def _seconds(index: int, run: Callable[[], object]) -> float:
    """Seconds of a call and of what it lets a device do, the fastest of some."""

    def finished() -> None:
        run()
        torch.cuda.synchronize(index)

    return fastest(finished, _RUNS)
