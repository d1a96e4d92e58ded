"""The CUDA executor where some devices are on the host and others on pretended GPUs."""

from __future__ import annotations

from functools import cache

import nets
import pytest
import torch
from fake_cuda import watched
from graphir.runtime import Session
from runnable import forward_plan, spread

from graphir import passes
from graphir.ir.device import CPU, gpu
from graphir.ir.net import Net
from graphir.ir.program import Program
from graphir.plan import Plan

MIXTURES = {
    "host and cuda:0": {"gpu:0": "cuda:0", "gpu:2": "cuda:0"},
    "host and cuda:1": {"gpu:1": "cuda:1"},
    "state on the host": {"gpu:1": "cuda:0", "gpu:2": "cuda:1", "gpu:3": "cuda:1"},
    "two and the host": {"gpu:0": "cuda:1", "gpu:2": "cuda:0", "gpu:3": "cuda:0"},
    "one on the host": {"gpu:0": "cuda:0", "gpu:1": "cuda:0", "gpu:3": "cuda:0"},
}
ROWS = (6, 4, 6)


def moved(net: Net) -> Net:
    """The net with the host in place of gpu:4."""
    return net.with_(
        blobs={name: blob._replace(device=CPU) if blob.device == gpu(4) else blob for name, blob in net.blobs.items()},
        ops=tuple([op._replace(device=CPU) if op.device == gpu(4) else op for op in net.ops]),
    )


@cache
def scattered(seed: int, share: bool = False) -> tuple[Program, Plan]:
    """A random step spread over four logical devices and the host, whose scalars torch's operators read anywhere."""
    program = nets.random_program(seed, ops=30, devices=5, spread=0.6)
    program = passes.inject_copies(program.with_(step=moved(program.step)))
    return program, passes.emit(passes.share_storage(program) if share else program)


@cache
def replicated(seed: int) -> tuple[Program, Plan]:
    program = nets.random_program(seed, ops=30)
    return program, passes.emit(spread(program))


def assert_bits_of_the_reference(program: Program, plan: Plan, session: Session) -> None:
    with session, Session(plan, program.state, binding="cpu", executor="reference") as reference:
        for step, rows in enumerate(ROWS):
            given = nets.example_inputs(program, seed=step, batch=rows)
            assert torch.equal(session.step(*given).nan_to_num(), reference.step(*given).nan_to_num())
        mine, its = session.state(), reference.state()
        assert mine.keys() == its.keys()
        assert all(torch.equal(mine[name].nan_to_num(), its[name].nan_to_num()) for name in mine)


@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize("seed", range(2))
def test_the_bits_of_the_reference_and_no_race(seed: int, mixture: str) -> None:
    program, plan = scattered(seed, share=seed % 2 > 0)
    session, machine = watched(plan, program.state, MIXTURES[mixture])
    assert_bits_of_the_reference(program, plan, session)
    assert not machine.races


@pytest.mark.parametrize("mixture", MIXTURES)
def test_replicas_on_the_host_and_on_gpus(mixture: str) -> None:
    program, plan = replicated(1)
    session, machine = watched(plan, program.state, MIXTURES[mixture])
    assert_bits_of_the_reference(program, plan, session)
    assert not machine.races


STATE = """
    buffer s : f32[3] @gpu:0
    input x : f32[3] @gpu:1
    s_gpu_1 : f32[3] @gpu:1 = Copy(s)
    t : f32[3] @gpu:1 = aten.add.Tensor(s_gpu_1, x)
    s;1 = Copy(t)
    loss : f32[3] @gpu:1 = aten.neg(t)
"""


def test_state_on_the_host_is_there_when_the_step_returns() -> None:
    state = {"s": torch.zeros(3)}
    plan = forward_plan(STATE, "x", output="loss", state=state)
    session, machine = watched(plan, state, {"gpu:1": "cuda:0"})
    for step in range(1, 3):
        session.step(torch.ones(3))
        machine.access(machine.host, session._setting.state["s"], False, "the caller")
        assert session.state_dict()["s"].tolist() == [step] * 3
    assert not machine.races


REDUCED = """
    input x : f32[3] @gpu:0
    a : f32[3] @gpu:0 = aten.relu(x)
    a_gpu_1 : f32[3] @gpu:1 = Copy(a)
    [r0 : f32[3] @gpu:0, r1 : f32[3] @gpu:1] = AllReduce([a, a_gpu_1], reduction="sum")
    a_gpu_1;1 = aten.mul_.Tensor(a_gpu_1, other=2) {writes=[0:0]}
    b : f32[3] @gpu:1 = aten.add.Tensor(a_gpu_1;1, r1)
    b_gpu_0 : f32[3] @gpu:0 = Copy(b)
    c : f32[3] @gpu:0 = aten.add.Tensor(r0, b_gpu_0)
"""


def test_the_host_overwrites_what_a_gpu_has_summed_up() -> None:
    session, machine = watched(forward_plan(REDUCED, "x", output="c"), {}, {"gpu:0": "cuda:0"})
    for _ in range(2):
        assert session.step(torch.ones(3)).tolist() == [6.0] * 3
    assert not machine.races
