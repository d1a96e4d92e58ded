"""Seeded problems of choosing a placement: small steps of a few shapes, on two to four devices, under tight limits."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Final, Literal, NamedTuple, TypeAlias, get_args

from graphir.passes.choice.problem import AGAIN, KEEP, Group, Problem, Task, Value

__all__ = ["INSTANCES", "Instance", "instance"]

Shape: TypeAlias = Literal["gpt", "resnet", "u-net", "two replicas"]
"""Of the step: layers that are alike; layers that save less and weigh more towards the end; layers of which the last
read what the first have made; and two steps that are alike, both on the first device."""

MIB: Final = 1 << 20


class Instance(NamedTuple):
    """What a problem is made of.

    Attributes:
        seed: of its random numbers.
        shape: of the step.
        groups: how many.
        devices: how many, beside the host.
        share: of what the first device needs alone, which each device may hold.
    """

    seed: int
    shape: Shape
    groups: int
    devices: int
    share: float

    @property
    def name(self) -> str:
        """For tables and tests."""
        return f"{self.shape} {self.groups}, {self.devices} devices, {self.share}"


def _instances() -> Iterator[Instance]:
    seed = 0
    for shape in get_args(Shape):
        for devices, share in ((2, 0.9), (2, 0.7), (2, 0.6), (2, 0.5), (4, 0.7), (4, 0.5), (3, 0.45)):
            seed += 1
            yield Instance(seed, shape, 8 if devices == 2 else 6, devices, share)
    yield Instance(seed + 1, "resnet", 10, 2, 0.55)
    yield Instance(seed + 2, "u-net", 10, 2, 0.5)


INSTANCES: Final = tuple(_instances())
"""Thirty, of which the last of each shape and the last two are the tightest."""


class _Made:
    """A problem that grows task by task."""

    def __init__(self, given: Instance) -> None:
        self.given, self.random = given, random.Random(given.seed)
        self.tasks: list[Task] = []
        self.values: list[Value] = []
        self.reads: dict[str, list[int]] = {}
        self.facts: dict[str, tuple[int, int, int]] = {}

    def task(self, group: int, seconds: float, room: int = 0, reads: tuple[str, ...] = ()) -> int:
        """Append a task."""
        self.tasks.append(Task(group, (seconds,) * (self.given.devices + 1), room, 8, int(seconds * 4.8e12)))
        for name in reads:
            self.reads[name].append(len(self.tasks) - 1)
        return len(self.tasks) - 1

    def value(self, name: str, nbytes: int, group: int, made: int) -> None:
        """A value that tasks after this one read."""
        self.facts[name] = nbytes, group, made
        self.reads[name] = []


def instance(given: Instance) -> Problem:
    """The problem of an instance: equal ones give equal problems."""
    made = _Made(given)
    draw = made.random.uniform
    chains = 2 if given.shape == "two replicas" else 1
    count = given.groups // chains
    names = [f"{chain}.{layer}" for chain in range(chains) for layer in range(count)]
    saved, out, state, seconds = [], [], [], []
    for chain in range(chains):
        for layer in range(count):
            if chain:
                for row in (saved, out, state, seconds):
                    row.append(row[layer])
                continue
            late = layer / max(count - 1, 1)
            shrink = {
                "gpt": 1.0,
                "two replicas": 1.0,
                "resnet": 2.0 ** (-3 * late),
                "u-net": 4.0 ** -min(layer, count - 1 - layer),
            }
            factor = shrink[given.shape]
            saved.append(int(draw(200, 300) * factor * MIB))
            out.append(int(draw(30, 60) * factor * MIB))
            state.append(int(draw(40, 60) * (8**late if given.shape == "resnet" else 1.0) * MIB))
            seconds.append(draw(0.5e-3, 1.5e-3) * (factor**0.3))
    skips = {count - 1 - k: k for k in range(count // 2 - 1)} if given.shape == "u-net" else {}
    for chain in range(chains):
        for layer in range(count):
            g = chain * count + layer
            reads = ((f"out{g - 1}",) if layer else ()) + ((f"out{skips[layer]}",) if layer in skips else ())
            task = made.task(g, seconds[g], int(out[g] * 0.5), reads)
            made.value(f"saved{g}", saved[g], g, task)
            made.value(f"out{g}", out[g], g, task)
    for chain in range(chains):
        for layer in reversed(range(count)):
            g = chain * count + layer
            inner = (f"saved{g}", f"out{g}") + ((f"out{g - 1}",) if layer else ())
            inner += (f"out{skips[layer]}",) if layer in skips else ()
            grads = (f"grad{g}",) if layer < count - 1 else ()
            grads += tuple(f"skip{late}" for late, early in skips.items() if early == layer)
            back = made.task(g, seconds[g], int(out[g]), inner + grads)
            if layer:
                made.value(f"grad{g - 1}", out[g - 1], g, back)
            if layer in skips:
                made.value(f"skip{layer}", out[skips[layer]], g, back)
            weights = made.task(g, seconds[g], 0, (f"saved{g}",))
            made.value(f"weight{g}", state[g] // 4, g, weights)
    for g in range(len(names)):
        made.task(g, seconds[g] * 0.05, 0, (f"weight{g}",))
    return _problem(made, names, state, seconds)


def _problem(made: _Made, names: list[str], state: list[int], seconds: list[float]) -> Problem:
    given = made.given
    forward = len(names)
    host = given.devices
    values = []
    for name, (nbytes, group, at) in made.facts.items():
        reads = tuple(made.reads[name])
        inner, out = name.startswith("saved"), name.startswith("out")
        late = sum(read < forward for read in reads)
        rebuilds = tuple({made.tasks[r].group: None for r in reads if r < forward}) if out else ()
        values.append(Value(nbytes, at, reads, late, group, parks=inner or out, again=inner, rebuilds=rebuilds))
    devices = tuple(range(given.devices))
    groups = []
    for g, name in enumerate(names):
        again_at = next(i for i, task in enumerate(made.tasks) if task.group == g and i >= forward)
        again = (seconds[g],) * (given.devices + 1)
        stored = (KEEP, AGAIN, *devices, host)
        groups.append(Group(name, state[g], devices, stored, 0, again, again_at, 0))
    links = [
        [(0.0, 0.0) if a == b else (10e-6, 1 / (50e9 if host in (a, b) else 300e9)) for b in range(host + 1)]
        for a in range(host + 1)
    ]
    need = _need(made, groups, values)
    return Problem(
        devices=(*(f"gpu:{d}" for d in devices), "cpu:0"),
        limits=(*[int(need * given.share)] * given.devices, None),
        held=(0,) * (host + 1),
        latency=tuple(tuple(link[0] for link in row) for row in links),
        pace=tuple(tuple(link[1] for link in row) for row in links),
        groups=tuple(groups),
        tasks=tuple(made.tasks),
        values=tuple(values),
    )


def _need(made: _Made, groups: list[Group], values: list[Value]) -> int:
    """What one device holds that has everything."""
    most = 0
    for position, task in enumerate(made.tasks):
        live = sum(v.nbytes for v in values if v.made <= position <= max([v.made, *v.reads]))
        most = max(most, live + task.room)
    return most + sum(group.state for group in groups)
