"""Models without memory for their weights: built under a FakeTensorMode or on meta, they are captured all the same."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import models
import pytest
import torch
import torch.nn.functional as F
from eager import assert_same_bits
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import graphir
from graphir import passes, runtime
from graphir.errors import GraphirError, SessionError
from graphir.ir.program import Program


class Net(nn.Module):
    """Parameters, buffers, a plain tensor, and tensors made in the forward."""

    offset: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.bn, self.table = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Embedding(10, 6)
        self.offset = torch.arange(6.0)

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        return self.bn(self.fc(x)) + self.table(index) + self.offset * torch.arange(6)  # type: ignore[no-any-return]


def _arguments() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(5, 4), torch.randint(10, (5,)), torch.randn(5, 6)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def _capture(
    model: nn.Module,
    arguments: tuple[Tensor, ...],
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = _adamw,
) -> Program:
    *inputs, target = arguments
    return graphir.capture(model, inputs, targets=(target,), loss=F.mse_loss, optimizer=optimizer(model))


_MODE = FakeTensorMode()
_PLACES: dict[str, Callable[[], Any]] = {"fake": lambda: _MODE, "meta": lambda: torch.device("meta")}


@pytest.mark.parametrize(
    ("model", "arguments", "inside"),
    [
        *((model, arguments, False) for model in _PLACES for arguments in ("real", *_PLACES)),
        *((place, place, True) for place in _PLACES),
    ],
)
def test_the_program_is_that_of_the_model_with_data(model: str, arguments: str, inside: bool) -> None:
    expected = _capture(Net(), _arguments())
    with _PLACES[model]():
        net = Net()
    with _PLACES[arguments]() if arguments != "real" else nullcontext():
        given = _arguments()
    with _PLACES[model]() if inside else nullcontext():
        program = _capture(net, given)
    assert (str(program.step), str(program.init)) == (str(expected.step), str(expected.init))
    assert program.interface.param_groups == expected.interface.param_groups
    assert program.state == {}


@pytest.mark.parametrize("place", ["fake", "meta"])
def test_arguments_without_data_leave_the_state_as_it_is(place: str) -> None:
    net = Net()
    with _PLACES[place]():
        given = _arguments()
    program = _capture(net, given)
    assert torch.equal(program.state["fc.weight"], net.fc.weight)


@pytest.mark.parametrize("part", ["a parameter", "a constant"])
def test_where_a_part_has_no_data_there_is_no_state_at_all(part: str) -> None:
    net = Net()
    if part == "a parameter":
        net.fc.to("meta")
    else:
        net.offset = net.offset.to("meta")
    program = _capture(net, _arguments())
    assert str(program.step) == str(_capture(Net(), _arguments()).step)
    assert program.state == {}


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, dampening=0.1),
    "adam": lambda m: torch.optim.Adam(m.parameters(), amsgrad=True),
    "adamw fused": lambda m: torch.optim.AdamW(m.parameters(), fused=True),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), momentum=0.9, centered=True),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_neither_weights_nor_the_state_of_optimizers_are_allocated(optimizer: Any) -> None:
    with torch.device("meta"):
        vast = nn.Linear(2**21, 2**21)
        x = torch.empty(3, 2**21)
    program = graphir.capture(vast, (x,), loss=lambda out: out.mean(), optimizer=optimizer(vast))
    assert graphir.memory(program).peak["gpu:0"] > 2**44
    assert [g.options["lr"] for g in program.interface.param_groups] == [optimizer(vast).param_groups[0]["lr"]]


def test_an_optimizer_that_stepped_without_data() -> None:
    with _MODE:
        net, given = Net(), _arguments()
        optimizer = _adamw(net)
        F.mse_loss(net(*given[:2]), given[2]).backward()
        optimizer.step()
    program = _capture(net, given, lambda _: optimizer)
    assert str(program.step) == str(_capture(Net(), _arguments()).step)


def _placed(program: Program) -> graphir.Plan:
    chosen = passes.find_activations(program)
    program = passes.replicate(program, devices=[0, 1])
    program = passes.shift_activations(program, chosen[len(chosen) // 2 :], shifts={0: 2, 1: 3})
    return passes.emit(passes.inject_copies(program))


def test_planned_saved_and_run_once_there_is_state(tmp_path: Any) -> None:
    net, arguments = Net(), _arguments()
    with torch.device("meta"):
        program = _capture(Net(), _arguments())
    expected = _capture(net, arguments)
    plan = _placed(program)
    assert graphir.memory(plan).peak == graphir.memory(_placed(expected)).peak
    program.save(tmp_path / "net.json")
    loaded = graphir.load(tmp_path / "net.json")
    assert isinstance(loaded, Program)
    assert str(loaded) == str(program)
    with pytest.raises(GraphirError, match="has no state to save"):
        program.save(tmp_path / "net.json", state=True)

    with pytest.raises(SessionError, match="the state is empty") as error:
        runtime.Session(plan, program.state)
    assert "pass program.state of a capture of the model with its weights" in str(error.value)
    with runtime.Session(plan, expected.state) as ours, runtime.Session(_placed(expected), expected.state) as theirs:
        assert torch.equal(ours.step(*arguments), theirs.step(*arguments))
        assert_same_bits(ours.state_dict(), theirs.state_dict(), "state given by hand")


def test_a_large_model_is_planned_for_eight_devices_without_its_weights() -> None:
    with FakeTensorMode():
        example = models.gpt(batch=2, length=64, width=8192, heads=64, layers=2, vocabulary=32000)
    program = graphir.capture(
        example.model, example.inputs, targets=example.targets, loss=example.loss, optimizer=_adamw(example.model)
    )
    assert not program.covers.fixed
    chosen = passes.find_activations(program)
    pipeline = passes.Pipeline([
        passes.Replicate(devices=(0, 1, 2, 3)),
        passes.ShiftActivations(activations=tuple(chosen[len(chosen) // 2 :]), shifts={r: 4 + r for r in range(4)}),
        passes.InjectCopies(),
    ])  # fmt: skip
    report = graphir.memory(passes.emit(pipeline.run(program).program))
    assert sum(report.peak.values()) > 100 * 2**30
    assert len([device for device in report.peak if device.startswith("gpu")]) == 8


def test_initial_state_of_optimizers_takes_no_memory() -> None:
    program = _capture(Net(), _arguments())
    moment = program.state["fc.weight.exp_avg"]
    assert moment.shape == (6, 4)
    assert moment.untyped_storage().nbytes() == moment.itemsize
