"""Seeded steps of a few blocks in micro-batches, cut at random, and what their plans come to."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import nn

import graphir
from graphir import passes
from graphir.ir.program import Program

__all__ = ["SCHEDULES", "Planned", "cut", "least_of", "planned"]

SCHEDULES = ("gpipe", "1f1b", "zero_bubble")


class Planned(NamedTuple):
    """What the plan of an order comes to.

    Attributes:
        seconds: of a step: as :func:`graphir.estimate` says for a *machine*, else as :func:`graphir.overlap` does.
        peaks: by gpu.
    """

    seconds: float
    peaks: Mapping[str, int]

    def keeps(self, limits: Mapping[str, int]) -> bool:
        return all(self.peaks[device] <= limit for device, limit in limits.items())


def cut(seed: int) -> Program:
    """A step of three to six blocks on two or three devices, contiguous or not, in two to six micro-batches; of a fifth
    of the seeds, two replicas side by side. Of shapes alone."""
    rng = random.Random(seed)
    places: list[int] = []
    while len(set(places)) < 2:
        width, count, parts = rng.choice([128, 512]), rng.randint(3, 6), rng.choice([2, 3, 4, 6])
        devices = rng.choice([2, 3])
        hidden = [rng.choice([width, 2 * width, 4 * width]) for _ in range(count)]
        places = [rng.randrange(devices) for _ in range(count)]
        if rng.random() < 0.5:
            places.sort()
    replicas = 2 if rng.random() < 0.2 else 1
    with torch.device("meta"):
        blocks = [nn.Sequential(nn.Linear(width, wide), nn.ReLU(), nn.Linear(wide, width)) for wide in hidden]
        model, x = nn.Sequential(*blocks), torch.empty(parts * 1024, width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    program = graphir.capture(
        model, (x,), targets=(x,), loss=nn.functional.mse_loss, optimizer=optimizer, accumulate=parts
    )
    if replicas == 1:
        shifts: dict[str, int | dict[int, int]] = {str(block): place for block, place in enumerate(places) if place}
    else:
        program = passes.replicate(program, [0, 1])
        shifts = {str(block): {0: 2 * place, 1: 2 * place + 1} for block, place in enumerate(places) if place}
    return passes.inject_copies(passes.shift_modules(program, shifts))


def planned(program: Program, machine: str | None = None) -> Planned:
    plan = passes.emit(program)
    if machine is None:
        seconds = graphir.overlap(plan).seconds
    else:
        seconds = graphir.estimate(plan, machine, profile=None).seconds
    peaks = graphir.memory(plan).peak
    return Planned(seconds, {device: peak for device, peak in peaks.items() if device.startswith("gpu")})


def least_of(program: Program, machine: str | None = None) -> dict[str, int]:
    """The least limits of all gpus that a refusal names."""
    gpus = [str(device) for device in program.devices if not device.is_host]
    try:
        passes.pipeline(program, limits=dict.fromkeys(gpus, 1), topology=machine)
    except graphir.PassError as refusal:
        named = refusal.fix.partition("{")[2].rstrip("}")
    return {device.strip(" '"): int(nbytes) for device, nbytes in (one.rsplit(":", 1) for one in named.split(","))}
