"""A step as columns: the same as what is found by walking over its operators, whatever the program."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import models
import numpy as np
import pytest
from graphir.passes.choice.groups import Reading, Wanted
from graphir.passes.choice.step import Step
from graphir.passes.choice.tasks import Tasks
from graphir.passes.saved import uses_of
from runnable import trained

import graphir
from graphir import Program, passes
from graphir.ir.blob import STATE_ROLES
from graphir.ir.device import gpu


def moved() -> Program:
    """One on both sides of another device, with what overwrites buffers."""
    program = trained(models.resnet, blocks=4, dropout=0.1)
    chosen = passes.find_activations(program)
    return passes.shift_activations(program, chosen[3:9], {0: 1})


PROGRAMS: dict[str, Callable[[], Program]] = {
    "gpt": lambda: trained(models.gpt, layers=3, dropout=0.1),
    "resnet": lambda: trained(models.resnet, blocks=4),
    "moved": moved,
    "replicas": lambda: passes.replicate(trained(models.gpt), [0, 1]),
    "micro-batches": lambda: trained(models.resnet, accumulate=2),
    "forward": lambda: graphir.capture(models.mlp().model, models.mlp().inputs),
}

program_of = cache(lambda name: PROGRAMS[name]())


@pytest.fixture(params=list(PROGRAMS))
def program(request: pytest.FixtureRequest) -> Program:
    return program_of(request.param)


def test_storages_are_touched_where_a_walk_finds_them(program: Program) -> None:
    step, uses = Step(program, None, 1), uses_of(program.step)
    found = zip(step.names, step.made.tolist(), step.late.tolist(), step.written.tolist(), strict=True)
    assert list(found) == [(name, use.made, use.late, use.written) for name, use in uses.items()]


def test_spans_hold_what_memory_has_without_state(program: Program) -> None:
    step, memory = Step(program, None, 1), graphir.memory(program, threads=1, profile=None)
    live = step.live(np.ones(len(step.spans.start), np.bool_))
    states = {program.step.blobs[n].storage for n in program.step.external_inputs}
    states = {name for name in states if program.step.blobs[name].role in STATE_ROLES}
    for number, device in enumerate(step.devices):
        state = sum(use.nbytes for use in memory.uses if use.device == device and use.blob in states)
        expected = memory.timeline(device) - state
        assert live[number][: len(expected)].tolist() == expected.tolist()


def wanted_of(program: Program) -> Wanted:
    devices = (gpu(0), gpu(1))
    return Wanted(dict.fromkeys(devices, 10**6), devices, ("shift", "park", "recompute"), {}, {})


def test_groups_of_another_size_do_not_depend_on_what_was_read_before(program: Program) -> None:
    topology = graphir.Topology.named("h200x8")
    reading = Reading(program, wanted_of(program), topology, None, 1)
    for most in (48, 4, 2, 48):
        alone = Reading(program, wanted_of(program), topology, None, 1).grouped(most)
        again = reading.grouped(most)
        assert again == alone
    assert (reading.tailed is None) or reading.grouped(48, tails=True) != reading.grouped(48)


def test_no_task_reads_what_a_later_one_makes(program: Program) -> None:
    reading = Reading(program, wanted_of(program), graphir.Topology.named("h200x8"), None, 1)
    units = reading.units
    tasks = Tasks(units, {unit: number for number, unit in enumerate(units.at)})
    writer: dict[str, int] = {}
    blobs = program.step.blobs
    for run in tasks.runs:
        assert len({program.step.ops[i].device for i in run.ops}) == 1
    for i, op in enumerate(program.step.ops):
        task = int(tasks.of_op[i])
        if task >= 0:
            for name in op.inputs:
                assert writer.get(blobs[name].storage, -1) <= task
            writer.update([(blobs[name].storage, task) for name in op.outputs])
    walked = [[writer_of(program, tasks, i, name) for name in op.inputs] for i, op in enumerate(program.step.ops)]
    assert walked == [tasks.last_writers[begin:end] for begin, end in tasks.step.bounds]


def writer_of(program: Program, tasks: Tasks, at: int, name: str) -> int:
    """The last operator of a group before another one that has made or overwritten a blob's storage."""
    blobs, ops = program.step.blobs, program.step.ops
    storage = blobs[name].storage
    return next(
        (
            i
            for i in range(at - 1, -1, -1)
            if tasks.group_of_op[i] >= 0 and any(blobs[o].storage == storage for o in ops[i].outputs)
        ),
        -1,
    )
