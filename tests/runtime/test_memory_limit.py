"""What a plan may take of the memory of a real device."""

import models
import pytest
import torch
from graphir.runtime import Session
from graphir.runtime.machine import capacity as machine
from runnable import captured, forward_plan, sgd, spread

import graphir
from graphir import passes
from graphir.errors import SessionError

HUGE = """
    input x : f32[4] @gpu:0
    one : f32[1] in x @gpu:0 = aten.slice.Tensor(x, dim=0, start=0, end=1)
    all : f32[70368744177664] strides [0] in x @gpu:0 = aten.expand(one, size=[70368744177664])
    y : f32[70368744177664] @gpu:0 = aten.neg(all)
    z : f32[] @gpu:0 = aten.sum(y)
"""
"""256 TiB, more than any machine has."""


@pytest.fixture(scope="module")
def step():
    example = models.mlp()
    return example, captured(example, sgd(example.model.parameters()))


def test_a_plan_that_the_machine_has_no_memory_for_is_refused_with_the_numbers():
    with pytest.raises(SessionError) as caught:
        Session(forward_plan(HUGE, "x", output="z"), {})
    assert caught.value.what.startswith("a step of the plan takes 256.0 TiB on gpu:0; the limit of cpu is ")
    assert caught.value.where == "plan 'small'"
    assert caught.value.fix == (
        "give smaller sizes, or bind devices to memory of their own; Session(..., memory_limit=None) runs it all the "
        "same"
    )


def test_no_plan_is_refused_without_a_limit():
    Session(forward_plan(HUGE, "x", output="z"), {}, memory_limit=None).close()


def test_the_limit_is_the_predicted_peak(step):
    _, program = step
    plan = passes.emit(program)
    predicted = graphir.memory(plan, profile=None)
    peak = int(sum(predicted.timeline(device) for device in predicted.peak).max())
    Session(plan, program.state, memory_limit=peak, executor="serial").close()
    with pytest.raises(SessionError, match=r"takes .*; the limit of cpu is "):
        Session(plan, program.state, memory_limit=peak - 1, executor="serial")


def test_devices_that_share_a_memory_are_counted_together(step):
    _, program = step
    plan = passes.emit(spread(program))
    predicted = graphir.memory(plan, profile=None)
    together = int(sum(predicted.timeline(device) for device in predicted.peak).max())
    assert max(predicted.peak.values()) < together <= sum(predicted.peak.values())
    Session(plan, program.state, memory_limit=together).close()
    with pytest.raises(SessionError, match=r"on (cpu:0, )?gpu:0, gpu:1, gpu:2, gpu:3(, cpu:0)?; the limit of cpu"):
        Session(plan, program.state, memory_limit=together - 1)


def test_other_sizes_are_refused_before_their_first_step(step):
    example, program = step
    plan = passes.emit(program)
    most = graphir.memory(plan, profile=None).peak["gpu:0"] * 2
    (x,), (y,) = example.inputs, example.targets
    with Session(plan, program.state, memory_limit=most) as session:
        with pytest.raises(SessionError, match=r"takes .*\n  in   plan 'mlp' at batch="):
            session.step(x.repeat(10_000, 1), y.repeat(10_000))
        assert session.usable
        assert session.steps_done == 0
        session.step(x, y)


def test_state_that_is_filled_counts_before_it_is():
    plan = forward_plan("input x : f32[4] @gpu:0\ny : f32[4] @gpu:0 = aten.neg(x)", "x", output="y")
    init = graphir.parse(
        "init net small.init {\n  w : f32[70368744177664] @gpu:0 = aten.full(size=[70368744177664], fill_value=0.0)\n}"
    )
    plan = plan.with_(program=plan.program.with_(init=init))
    with pytest.raises(SessionError, match=r"filling the plan's state takes 256\.0 TiB; the limit of cpu is"):
        Session(plan, {})


@pytest.mark.parametrize("given", [0, -1, 1.5, True, "all", (1,)])
def test_what_is_no_limit_is_refused(given):
    with pytest.raises(SessionError, match=r"memory_limit: .* is not a number of bytes"):
        Session(forward_plan(HUGE, "x", output="z"), {}, memory_limit=given)


@pytest.fixture
def host(tmp_path, monkeypatch):
    """A machine of 8 GiB, 2 of them left, as the system tells it."""
    (tmp_path / "meminfo").write_text("MemTotal:        8388608 kB\nMemFree: 1 kB\nMemAvailable:    2097152 kB\n")
    monkeypatch.setattr(machine, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(machine, "_GROUP", tmp_path)
    return tmp_path


def test_the_host_has_its_memory_within_the_limit_of_its_group(host):
    cpu = torch.device("cpu")
    assert (machine.capacity(cpu), machine.free_memory()) == (8 << 30, 2 << 30)
    (host / "memory.max").write_text("max\n")
    (host / "memory.current").write_text("1000\n")
    assert (machine.capacity(cpu), machine.free_memory()) == (8 << 30, 2 << 30)
    (host / "memory.max").write_text("5000\n")
    assert (machine.capacity(cpu), machine.free_memory()) == (5000, 4000)
    (host / "memory.stat").write_text("anon 10\nfile 3000\nshmem 500\ninactive_file 700\nactive_file 200\n")
    assert machine.free_memory() == 4900
    (host / "memory.current").write_text("7000\n")
    assert machine.free_memory() == 0
    (host / "meminfo").unlink()
    assert (machine.capacity(cpu), machine.free_memory()) == (None, None)


def test_a_device_that_nobody_knows_the_memory_of_has_no_limit():
    assert machine.capacity(torch.device("meta")) is None
