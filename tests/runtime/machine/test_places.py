"""Bindings: which real device each logical one is, and what runs there.

The meta device stands in for one that is not here: its operators refuse operands of other devices, as CUDA's do, so a
step on it shows that everything was created and brought there.
"""

from __future__ import annotations

import copy
from typing import Any

import models
import pytest
import runnable
import torch
from eager import assert_same_bits
from graphir.runtime import Session
from graphir.runtime.machine.places import is_on_cuda, places_of
from runnable import spread

import graphir
from graphir import SessionError, passes
from graphir.ir.device import CPU, gpu
from graphir.ir.program import Program

EXAMPLES = {
    "mlp": models.mlp,
    "resnet": lambda: models.resnet(blocks=2),
    "gpt": lambda: models.gpt(layers=1),
}


def captured(example: models.Example, fused: bool = False) -> Program:
    optimizer = torch.optim.AdamW(example.model.parameters(), lr=0.01, fused=fused)
    return runnable.captured(example, optimizer, clip_grad_norm=1.0)


@pytest.mark.parametrize("example", EXAMPLES)
def test_a_step_captured_on_the_host_runs_wholly_elsewhere(example: str) -> None:
    made = EXAMPLES[example]()
    plan = passes.emit(spread(program := captured(made), share=False))
    binding = {str(device): "meta" for device in plan.devices if not device.is_host}
    with Session(plan, program.state, binding=binding) as session:
        assert session.step(*made.inputs, *made.targets)[0].is_meta
        assert all(tensor.is_meta for tensor in session.state_dict().values())


def test_an_operand_elsewhere_is_not_overlooked_on_the_meta_device() -> None:
    made = models.mlp()
    program = captured(made)
    plan = passes.emit(spread(program, share=False))
    with (
        pytest.raises(graphir.RunError),
        Session(
            plan, program.state, binding={"gpu:0": "meta", "gpu:1": "cpu", "gpu:2": "meta", "gpu:3": "cpu"}
        ) as session,
    ):  # the mean over replicas needs data of gpu:0 on gpu:1
        session.step(*made.inputs, *made.targets)


def test_devices_are_bound_by_number_too() -> None:
    places = places_of({0: "meta", "gpu:1": "cpu"}, (gpu(0), gpu(1), CPU))
    assert [str(place) for place in places.values()] == ["meta", "cpu", "cpu"]


@pytest.mark.parametrize(
    ("binding", "what"),
    [
        ("cudo", "binding 'cudo' is not supported"),
        (3, "binding 3 is not supported"),
        ({"gpu:0": "cpu"}, "binding: gpu:1 has no place"),
        ({"gpu:0": "cpu", "gpu:1": "cpu", "gpu:7": "cpu"}, "binding: the plan has no device 'gpu:7'"),
        ({"gpu:0": "cpu", 1: "cpu", 7: "cpu"}, "binding: the plan has no device 7"),
        ({"gpu:0": "cpu", 0: "cpu"}, "binding: gpu:0 is given twice"),
        ({"gpu_0": "cpu"}, "binding: 'gpu_0' is not a device"),
        ({"gpu:0": "cpu", "gpu:1": "nowhere"}, "binding: 'nowhere' is no device"),
        ({"gpu:0": "cpu", "gpu:1": 0.5}, "binding: 0.5 is no device"),
        ({"gpu:0": "cpu", "gpu:1": "cuda:99"}, "binding"),
    ],
)
def test_bindings_that_do_not_fit_are_refused(binding: Any, what: str) -> None:
    program = passes.replicate(captured(models.mlp()), [0, 1])
    with pytest.raises(SessionError) as error:
        Session(passes.emit(program), program.state, binding=binding)
    assert error.value.what.startswith(what) and error.value.fix


def test_cuda_without_cuda_is_refused() -> None:
    program = captured(models.mlp())
    with pytest.raises(SessionError, match="there is no CUDA device here"):
        Session(passes.emit(program), program.state, binding="cuda")


def test_each_device_is_on_the_cuda_device_of_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cards may be unlike, and plans are made for those of their numbers; where there are fewer, some share."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert [str(place) for place in places_of("cuda", [gpu(2), gpu(1)]).values()] == ["cuda:2", "cuda:1"]
    assert [str(place) for place in places_of("cuda", [gpu(5), gpu(1)]).values()] == ["cuda:1", "cuda:0"]


def test_cuda_devices_are_dealt_out_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    devices = [gpu(0), gpu(1), gpu(2), CPU]
    found = places_of("cuda", devices)
    assert [str(found[device]) for device in devices] == ["cuda:0", "cuda:1", "cuda:0", "cpu"]
    found = places_of({"gpu:0": "cuda", "gpu:1": "cuda:1", "gpu:2": "meta"}, devices)
    assert [str(found[device]) for device in devices] == ["cuda:1", "cuda:1", "meta", "cpu"]
    with pytest.raises(SessionError, match="there is no cuda:2 here"):
        places_of({"gpu:0": "cuda:2"}, [gpu(0)])


def test_auto_is_cuda_where_there_is_any(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = [gpu(0), gpu(1), CPU]
    assert set(map(str, places_of("auto", devices).values())) == {"cpu"}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert list(map(str, places_of("auto", devices).values())) == ["cuda:0", "cuda:0", "cpu"]
    assert set(map(str, places_of("auto", devices, host_only=True).values())) == {"cpu"}
    assert list(map(str, places_of("auto", [CPU]).values())) == ["cpu"]


@pytest.mark.parametrize("executor", ["serial", "threads", "adversarial"])
def test_auto_is_the_host_for_its_executors(executor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = models.mlp()
    program = captured(made)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with Session(passes.emit(program), program.state, executor=executor) as session:
        assert session.step(*made.inputs, *made.targets)[0].device.type == "cpu"


def test_a_binding_is_on_cuda_whatever_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_on_cuda("cuda") and is_on_cuda({"gpu:0": "cpu", "gpu:1": "cuda:1"}) and is_on_cuda({"gpu:0": 0})
    assert not is_on_cuda("cpu") and not is_on_cuda({"gpu:0": "cpu"})
    for count in (0, 2):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        assert is_on_cuda("auto") == (count > 0) and not is_on_cuda("auto", host_only=True)


def test_threads_run_on_the_host_only() -> None:
    program = captured(models.mlp())
    with pytest.raises(SessionError, match="'threads' runs on the host only"):
        Session(passes.emit(program), program.state, binding={"gpu:0": "meta"}, executor="threads")


def test_all_devices_on_the_host_by_name() -> None:
    made = models.mlp()
    program = captured(made)
    plan = passes.emit(spread(program, share=False))
    with (
        Session(plan, program.state) as one,
        Session(plan, program.state, binding=dict.fromkeys(("gpu:0", "gpu:1", "gpu:2", "gpu:3"), "cpu")) as other,
    ):
        (ours, _), (theirs, _) = (session.step(*made.inputs, *made.targets) for session in (one, other))
        assert torch.equal(ours, theirs)
        assert_same_bits(one.state_dict(), other.state_dict(), "state")


@pytest.mark.cuda
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("example", EXAMPLES)
def test_a_step_captured_on_the_host_trains_on_cuda(example: str, fused: bool) -> None:
    """Logical devices share one CUDA device; shifted and unshifted have the same bits, and eager is near, but for what
    TF32 makes of another algorithm."""
    made = EXAMPLES[example]()
    program = captured(made, fused)
    eager = copy.deepcopy(made.model).cuda()
    optimizer = torch.optim.AdamW(eager.parameters(), lr=0.01, fused=fused)
    batch = [tensor.cuda() for tensor in (*made.inputs, *made.targets)]
    count = len(made.inputs)
    with (
        torch.backends.cudnn.flags(
            enabled=None, benchmark=None, benchmark_limit=None, deterministic=None, allow_tf32=False
        ),
        Session(passes.emit(program), program.state, binding="cuda") as plain,
        Session(
            passes.emit(passes.inject_copies(shifted_one(program))),
            program.state,
            binding={"gpu:0": "cuda:0", "gpu:1": "cuda:0"},
        ) as moved,
    ):
        for _ in range(3):
            optimizer.zero_grad()
            loss = made.loss(eager(*batch[:count]), *batch[count:])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(eager.parameters(), 1.0)
            optimizer.step()
            (ours, _), (theirs, _) = plain.step(*batch), moved.step(*batch)
            assert ours.is_cuda and torch.equal(ours, theirs)
            torch.testing.assert_close(ours, loss.detach(), rtol=1e-3, atol=1e-4)
        assert_same_bits(plain.state_dict(), moved.state_dict(), "shifted")


def shifted_one(program: Program) -> Program:
    placed = passes.replicate(program, [0])
    acts = passes.find_activations(placed)
    return passes.shift_activations(placed, acts[len(acts) // 2 :], shifts={0: 1})


@pytest.mark.cuda
def test_a_model_on_cuda_is_captured_and_runs_on_the_host() -> None:
    made = models.gpt(layers=1)
    program = captured(made)
    there = captured(made._replace(model=copy.deepcopy(made.model).cuda(), inputs=tuple(x.cuda() for x in made.inputs)))
    with (
        Session(passes.emit(program), program.state, binding="cpu") as one,
        Session(passes.emit(there), there.state, binding="cpu") as other,
    ):
        (ours, _), (theirs, _) = (session.step(*made.inputs, *made.targets) for session in (one, other))
        assert torch.equal(ours, theirs)
