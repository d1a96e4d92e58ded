"""Seeded random programs, nets and plans, built from the IR's own classes, without capture.

:func:`random_program` is small, mathematically a training step, and can be executed. :func:`synthetic_net` is large
and fast to make, for measurements. :func:`random_plan` says anything that a plan can say, and is not sound.
"""

from __future__ import annotations

import random

import torch
from building import ProgramBuilder

from graphir.ir.blob import Blob
from graphir.ir.device import gpu
from graphir.ir.net import Net
from graphir.ir.operator import Operator
from graphir.ir.plan import STREAMS, Event, Instruction, Plan, lane
from graphir.ir.program import Program
from graphir.ir.size import Shape, bind, dimension


def random_program(
    seed: int,
    ops: int = 40,
    devices: int = 2,
    mutate: bool = True,
    views: bool = True,
    spread: float = 0.0,
) -> Program:
    """A training step with about *ops* operators, as capture would give it.

    Args:
        seed: equal seeds give equal programs and equal state.
        ops: about how many operators the step has.
        devices: how many gpus *spread* chooses from.
        mutate: batch norm with running statistics, and SGD with momentum; without it, gradients are outputs.
        views: also draw operators that return views.
        spread: the probability that an operator that computes sits on another device than gpu:0, with its outputs.
            State stays on gpu:0 and no copies are made, so with ``spread > 0`` the program is not placed.
    """
    builder = ProgramBuilder(random.Random(seed), devices, spread)
    builder.forward(max(ops // 2 - 4, 3), mutate, views)
    builder.loss()
    builder.backward()
    if mutate:
        builder.update()
    return builder.program(f"random{seed}")


def example_inputs(program: Program, seed: int = 0, batch: int | None = None) -> tuple[torch.Tensor, ...]:
    """Arguments for a step of a captured-like program, at its captured batch size or another."""
    generator = torch.Generator().manual_seed(seed)
    dims = dict(program.dims) if batch is None else {"batch": batch}
    found = []
    for feed in program.interface.feeds:
        assert feed.blob is not None
        shape = program.step.blobs[feed.blob].shape
        assert shape is not None
        found.append(torch.randn([bind(size, dims) for size in shape], generator=generator))
    return tuple(found)


def synthetic_net(ops: int, devices: int = 8, cross: float = 0.1, seed: int = 0) -> Net:
    """A replicated-looking net of *ops* operators, half forward and half backward, already spread over *devices*.

    Each operator adds two values. About *cross* of the reads are of a value on another device; there are no copies.
    Every forward value has a gradient that is read, so the first replica's are activations.
    """
    rng = random.Random(seed)
    draw, pick = rng.random, rng.randrange
    places = [gpu(d) for d in range(devices)]
    shape: Shape = (dimension("batch"), 64)
    add, no_args = "aten.add.Tensor", {}
    blobs: dict[str, Blob] = {}
    made: list[Operator] = []
    recent = []
    for d, place in enumerate(places):
        name = f"gpu_{d}/x"
        blobs[name] = Blob(name, shape, "f32", place, "input", name)
        recent.append([name])
    inputs = tuple(blobs)
    # A quarter of the reads is of an operator's own forward value, and some draws give the own device.
    odds = cross * 4 / 3 * devices / max(devices - 1, 1)

    def value(d: int, latest: bool) -> str:
        near = recent[pick(devices) if draw() < odds else d]
        return near[-1] if latest else near[pick(len(near))]

    forward = ops // 2
    path: list[tuple[str, int]] = []
    for i in range(forward):
        d = i % devices
        name = f"gpu_{d}/act_{i // devices}"
        blobs[name] = Blob(name, shape, "f32", places[d], "activation", name)
        made.append(Operator(add, (value(d, True), value(d, False)), (name,), no_args, places[d]))
        near = recent[d]
        near.append(name)
        if len(near) > 8:
            del near[0]
        path.append((name, d))

    gradients: dict[str, str] = {}
    recent = [[f"gpu_{d}/act_{(forward - 1 - d) // devices}" if forward > d else f"gpu_{d}/x"] for d in range(devices)]
    for name, d in reversed(path):
        grad = name + "_grad"
        blobs[grad] = Blob(grad, shape, "f32", places[d], "gradient", grad)
        made.append(Operator(add, (value(d, True), name), (grad,), no_args, places[d], "backward", of=name))
        gradients[name] = grad
        recent[d] = [grad]
    outputs = tuple(dict.fromkeys(near[-1] for near in recent))
    return Net("synthetic", tuple(made), blobs, inputs, outputs, gradients)


def random_plan(seed: int, ops: int = 30) -> Plan:
    """A plan with every kind of instruction, in an order that means nothing: for its text and its files."""
    rng = random.Random(seed)
    program = random_program(seed, ops, spread=0.3).with_(history=("replicate{devices=[0]}", "emit"))
    lanes = [lane(device, stream) for device in program.devices for stream in STREAMS]
    made: list[Instruction] = []
    for position, op in enumerate(program.step.ops):
        for part in range(rng.choice((1, 1, 1, 2))):
            kind = "collective" if part else "run"
            made.append(Instruction(kind, lane(op.device, "compute"), position, part))
        event = Event(*next(op.makes), lane(op.device, "compute"))
        made.append(Instruction("record", event.lane, event=event))
        if rng.random() < 0.5:
            made.append(Instruction("wait", rng.choice(lanes), event=event))
        if rng.random() < 0.3:
            made.append(Instruction("free", rng.choice(lanes), storage=rng.choice(op.outputs)))
    if rng.random() < 0.3:
        rng.shuffle(made)
    dims = program.dims if rng.random() < 0.5 else {"batch": rng.randrange(100)}
    values = {name: f"{rng.randrange(2**64):016x}" for name in program.step.external_outputs}
    return Plan(program.with_(state={}), dims, tuple(made), values)
