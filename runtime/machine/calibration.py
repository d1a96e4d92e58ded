"""How fast this machine runs operators: measured once a process, in some 60 ms.

Each figure is the fastest of several runs, since whatever else the machine does only makes a run slower. A rate that is
too high makes operators look shorter, and keeps the choice of an executor at one thread.
"""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable, Sequence
from functools import cache
from itertools import permutations
from typing import Final

import torch
from torch import Tensor

from graphir.analysis.cost import Rates
from graphir.analysis.profiles import machine
from graphir.analysis.topology import Host, Link, Speed, Topology
from graphir.errors import counted
from graphir.ir.device import Device

from .capacity import capacity, free_memory
from .surroundings import neutral

__all__ = [
    "beside",
    "cores",
    "fastest",
    "forget",
    "host_rates",
    "host_speed",
    "host_topology",
    "short_calls",
    "today",
]

_RUNS: Final = 7
_SIDE: Final = 256
"""Rows and columns of a matrix: small enough to take a millisecond, large enough for a kernel's full speed."""

_ELEMENTS: Final = 2**20
"""Of a vector: three of them do not fit the cache of one core."""

_CALLS: Final = 64
"""Sets of operands for short operators: as many as a step has, so that none finds its own in the first cache."""

_SHORT: Final = 16
_SLOWDOWN: Final = 1.03
"""How many times as long a kernel takes beside another: ``python tests/bench parallel`` has two threads that have
nothing to do with each other at 0.97 to 0.99 of one."""

_HOST: Final = torch.device("cpu")
_BESIDE: Final = 0.05
"""The share of the host's memory for what is on the host itself, where its logical devices have all of it."""

_DTYPES: Final = {"f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16}


def cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def host_rates(threads: int) -> Rates:
    """The rates of kernels that use so many threads; no more than there are cores are measured, since they would be no
    faster, and stay in the process."""
    return _rates(min(threads, cores()))


@cache
def _rates(threads: int) -> Rates:
    with neutral(threads), torch.inference_mode():
        long, other, sums = torch.ones(_ELEMENTS), torch.ones(_ELEMENTS), torch.empty(_ELEMENTS)
        flops = {name: 2 * _SIDE**3 / fastest(_product(dtype)) for name, dtype in _DTYPES.items()}
        nbytes = 3 * long.nbytes / fastest(lambda: torch.add(long, other, out=sums))

        return Rates(flops, nbytes, _seconds_per_call(), _seconds_per_view())


def forget() -> None:
    """Let :func:`host_rates` measure anew."""
    _rates.cache_clear()


def _product(dtype: torch.dtype) -> Callable[[], object]:
    square = torch.ones(_SIDE, _SIDE, dtype=dtype)
    result = torch.empty_like(square)
    return lambda: torch.mm(square, square, out=result)


def _seconds_per_call() -> float:
    calls, count = short_calls(_HOST)
    return fastest(calls) / count


def short_calls(place: torch.device) -> tuple[Callable[[], None], int]:
    """Short operators that follow each other as in a step, and how many they are: of several types in turn, each on
    operands of its own. The same one called again and again takes less."""
    types: Sequence[Callable[[Tensor], object]] = (
        lambda x: torch.addmm(x[0], x, x),
        torch.relu,
        lambda x: torch.mul(x, x),
        lambda x: torch.sum(x, [0]),
        lambda x: torch.native_layer_norm(x, [_SHORT], None, None, 1e-5),
        torch.tanh,
    )
    operands = [torch.ones(_SHORT, _SHORT, device=place) for _ in range(_CALLS)]

    def calls() -> None:
        for x in operands:
            for call in types:
                call(x)

    return calls, _CALLS * len(types)


def _seconds_per_view() -> float:
    """What views take, called as generated code calls them: of several types in turn."""
    aten = torch.ops.aten
    calls: Sequence[tuple[Callable[..., object], tuple[object, ...]]] = (
        (torch.Tensor.view, ((_SHORT * _SHORT,),)),
        (aten._unsafe_view.default._op, ((_SHORT * _SHORT,),)),
        (torch.Tensor.transpose, (0, 1)),
        (aten.slice.Tensor._op, (0, 0, 1, 1)),
    )
    operands = [torch.ones(_SHORT, _SHORT) for _ in range(_CALLS)]

    def views() -> None:
        for x in operands:
            for call, arguments in calls:
                call(x, *arguments)

    return fastest(views) / (_CALLS * len(calls))


def host_speed(*threads: int) -> Speed:
    """The host as one device, whose kernels use so many threads; of several such numbers the fastest for each figure.

    Where other processes are busy, kernels of as many threads as there are cores wait for each other, and come out a
    hundred times slower than those of one thread.
    """
    tried = [host_rates(count) for count in dict.fromkeys(threads)]
    return Speed(
        flops_per_second={
            dtype: max(rates.flops_per_second[dtype] for rates in tried) for dtype in tried[0].flops_per_second
        },
        bytes_per_second=max(rates.bytes_per_second for rates in tried),
        memory=capacity(_HOST),
        free=free_memory(),
        seconds_per_call=min(rates.seconds_per_call for rates in tried),
        seconds_per_view=min(rates.seconds_per_view for rates in tried),
    )


def host_topology(devices: Sequence[Device], threads: int) -> Topology:
    """This host, where each of these devices is a thread whose kernels use so many threads.

    Its gpus share the memory equally. What the host itself holds beside them is in the same memory: for it there is
    little, a share of :data:`_BESIDE`.
    """
    rates, speed = host_rates(threads), host_speed(threads)
    gpus = sum(not device.is_host for device in devices)
    shares = {
        str(device): (beside(speed) if device.is_host else _part(speed, 1 / gpus)) if gpus else speed
        for device in devices
    }
    # A copy reads and writes what it brings; an elementwise operator of the same bytes takes as long.
    rate, latency = rates.bytes_per_second / 2, rates.seconds_per_call
    return Topology(
        name=f"this host ({counted(cores(), 'core')})",
        devices=shares,
        links=tuple(
            [
                Link(source=a, destination=b, bytes_per_second=rate, latency=latency)
                for a, b in permutations(map(str, devices), 2)
            ]
        ),
        host=Host(cores=max(cores() // threads, 1), slowdown=_SLOWDOWN),
        machine=str(machine()),
        measured=today(),
    )


def beside(speed: Speed) -> Speed:
    """The host itself, some of whose logical devices share its memory."""
    return _part(speed, _BESIDE)


def _part(speed: Speed, share: float) -> Speed:
    """A device that holds a share of the memory."""
    held = {"memory": speed.memory, "free": speed.free}
    return speed.model_copy(update={name: None if n is None else int(share * n) for name, n in held.items()})


def today() -> str:
    """The date, as topologies say when they were measured."""
    return datetime.date.today().isoformat()


def fastest(run: Callable[[], object], runs: int = _RUNS, before: Callable[[], object] = lambda: None) -> float:
    """Seconds of the fastest of several runs, after one that warms up; *before* each one is no part of it."""
    run()
    found = []
    for _ in range(runs):
        before()
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return min(found)
