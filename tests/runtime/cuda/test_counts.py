"""What one thread issues in a step, counted on pretended devices, and the reason of each number.

The model is a residual block. Its gradients are reduced at the end of the backward, side by side: one group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import models
import pytest
import torch
from fake_cuda import watched
from runnable import captured, sgd

from graphir import passes
from graphir.ir.program import Program

REPLICAS = (2, 4, 8)


class Counts(NamedTuple):
    """Calls of the second step.

    Attributes:
        kernels: on devices; a foreach operator is one.
        copies: between places.
        records, waits: of events.
        switches: of the current stream.
        streams: lanes, the streams beside them that copies need, and the gate.
        nbytes: that copies bring.
    """

    kernels: int
    copies: int
    records: int
    waits: int
    switches: int
    streams: int
    nbytes: int


@cache
def example() -> models.Example:
    return models.resnet(batch=4, blocks=1)


@cache
def program(accumulate: int = 1) -> Program:
    model = example().model
    return captured(example(), sgd(model.parameters(), fused=True), accumulate=accumulate)


def shifted(program: Program, shifts: dict[int, int]) -> Program:
    acts = passes.find_activations(program)
    return passes.inject_copies(passes.shift_activations(program, acts[len(acts) // 2 :], shifts))


PROGRAMS: dict[str, Callable[[], Program]] = {
    "plain": program,
    **{f"{r} replicas": lambda r=r: passes.replicate(program(), range(r)) for r in REPLICAS},  # type: ignore[misc]
    "shifted": lambda: shifted(program(), {0: 1}),
    "2 replicas, shifted": lambda: shifted(passes.replicate(program(), range(2)), {0: 2, 1: 3}),
    "parked": lambda: passes.park(program(), passes.find_activations(program())[:1], "cpu"),
    "2 micro-batches": lambda: program(2),
    "pipelined": lambda: passes.pipeline(
        passes.inject_copies(passes.shift_modules(program(2), {"blocks": 1, "avgpool": 1, "fc": 1}))
    ),
}


@cache
def counts(name: str) -> Counts:
    plan = passes.emit(passes.share_storage(PROGRAMS[name]()))
    places = {str(device): f"cuda:{device.index}" for device in plan.devices if not device.is_host}
    replicas = int(name[0]) if "replicas" in name else 1
    batch = [torch.cat([tensor] * replicas) for tensor in (*example().inputs, *example().targets)]
    session, machine = watched(plan, program().state, places)
    with session:
        session.step(*batch)
        machine.calls.clear()
        machine.moved = 0
        session.step(*batch)
        assert not machine.races
        found = Counter("host" if call[-1] == "host" else call[0] for call in machine.calls)
        return Counts(*[found[kind] for kind in ("run", "copy", "record", "wait", "use")], machine.made, machine.moved)


PLAIN = Counts(kernels=40, copies=0, records=4, waits=4, switches=1, streams=2, nbytes=0)
"""A kernel for each operator that is no view, one for all updates. Events are the gate's: see :func:`gate`."""


def gate(devices: int, streams: int) -> tuple[int, int]:
    """Records and waits around a step: the gate and its streams record and wait before it and after it, and so do the
    caller's streams of all devices."""
    return devices + streams + 1, 2 * (devices + streams - 1)


def pack() -> int:
    """Bytes of all gradients, each of which begins where 256 divides its address."""
    return sum(-(-parameter.nbytes // 256) * 256 for parameter in example().model.parameters())


def replicated(r: int) -> Counts:
    """All gradients are one group; see :class:`graphir.runtime.cuda.receive.JointReduction`."""
    packs, divisions, first, own, received = r, r, 1, r - 1, (r - 1) ** 2
    taken, ready, reduced = r, r, r  # memory for the sums; gradients; sums
    records, waits = gate(r, 2 * r + 1)
    return Counts(
        kernels=r * PLAIN.kernels + packs + divisions + first + own + received,
        copies=r * (r - 1),
        records=records + taken + ready + reduced,
        waits=waits + taken + r * r + r * r,  # sums for all gradients; gradients' memory for all sums
        switches=44 * r - 1,  # operators of replicas alternate; one for each pair would be too many
        streams=2 * r + 1,  # compute and copy_in, and the gate
        nbytes=r * (r - 1) * pack(),
    )


ACTIVATION = 4 * 4 * 8 * 8 * 4
"""Bytes of what is moved: a batch of four, four channels, eight by eight, f32."""

EXPECTED: dict[str, Counts] = {
    "plain": PLAIN,
    **{f"{r} replicas": replicated(r) for r in REPLICAS},
    # A residual is cut: two activations cross, and their gradients. One more sum, of gradients of two readers. Each
    # direction has a lane, and a stream beside that on the device that it copies from.
    "shifted": Counts(41, 4, 17, 25, 15, 2 + 2 + 2 + 1, 4 * ACTIVATION),
    # The same of both replicas; gradients are two groups, one on each pair of devices.
    "2 replicas, shifted": Counts(96, 2 * 4 + 2 * 2, 42, 70, 114, 4 + 4 + 4 + 1, 8 * ACTIVATION + 2 * pack()),
    # Out and back: copy_out and copy_in of one device, whose lanes are on the host and on the device.
    "parked": Counts(40, 2, 12, 13, 7, 4, 2 * ACTIVATION),
    # Forward and backward twice, the sums of gradients, and one update.
    "2 micro-batches": PLAIN._replace(kernels=95),
    # For each micro-batch an activation and its gradient, half of the rows each.
    "pipelined": Counts(98, 2 * 2, 20, 28, 48, 7, 4 * ACTIVATION // 2),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_calls_of_a_step(name: str) -> None:
    assert counts(name) == EXPECTED[name]


def test_reductions_grow_with_groups_and_not_with_gradients() -> None:
    """Kernels and copies for a group of any size, beyond those of all replicas alone: 20,608 for ResNet-50 on eight
    GPUs if each gradient were a group."""
    for r in REPLICAS:
        found = counts(f"{r} replicas")
        assert found.kernels + found.copies - r * PLAIN.kernels == 2 * r * r + 1
