"""Optimizers: groups, learning rates, state taken over, and what is refused."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
from direct import matches_eager

import graphir
from graphir import passes, runtime
from graphir.capturing.capture import capture
from graphir.errors import CaptureError
from graphir.ir.program import Program


def captured(example: models.Example, optimizer: torch.optim.Optimizer) -> Program:
    return capture(example.model, example.inputs, targets=example.targets, loss=example.loss, optimizer=optimizer)


def test_groups_have_learning_rates_and_options_of_their_own() -> None:
    def make(params: Any) -> torch.optim.Optimizer:
        first, *rest = params
        groups = [{"params": [first], "lr": 0.5, "momentum": 0.0}, {"params": rest, "weight_decay": 0.1}]
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9)

    example = models.mlp()
    program = captured(example, make(example.model.parameters()))
    one, two = program.interface.param_groups
    assert (one.lr, two.lr) == ("lr", "lr_1")
    assert one.params == ("fc1.weight",) and two.params == ("fc1.bias", "fc2.weight", "fc2.bias")
    assert (one.options["lr"], two.options["lr"]) == (0.5, 0.1)
    assert "fc1.weight" not in program.interface.optimizer_state
    assert program.step.blobs["lr_1"][1:5] == ((), "f64", "cpu:0", "input")
    updates = {op.inputs[0]: op for op in program.step.ops if op.phase == "update"}
    assert updates["fc1.weight"].operands == "tt_t" and updates["fc1.weight"].inputs[-1] == "lr"
    assert updates["fc2.bias"].inputs[-3:] == ("lr_1", "momentum", "weight_decay")
    assert updates["fc2.bias"].operands == "tttt_tt" and not updates["fc2.bias"].args
    assert (one.numbers, two.numbers) == ({}, {"momentum": "momentum", "weight_decay": "weight_decay"})
    matches_eager(program, example, make)


@pytest.mark.parametrize("fused", [False, True])
def test_the_step_of_adam_is_where_torch_has_it(fused: bool) -> None:
    example = models.mlp()
    program = captured(example, torch.optim.AdamW(example.model.parameters(), fused=fused))
    blob = program.step.blobs["fc1.weight.step"]
    assert blob.device == ("gpu:0" if fused else "cpu:0") and blob.dtype == "f32" and blob.role == "state"


def test_momentum_starts_at_minus_zero() -> None:
    example = models.mlp()
    program = captured(example, torch.optim.SGD(example.model.parameters(), lr=0.1, momentum=0.9))
    start = program.state["fc1.bias.momentum_buffer"]
    assert torch.equal(start, torch.zeros_like(start)) and torch.signbit(start).all()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_state_of_a_running_optimizer_is_taken_over(kind: Callable[..., torch.optim.Optimizer]) -> None:
    example = models.mlp()
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    optimizer = kind(example.model.parameters(), lr=0.1, **options)
    example.loss(example.model(*example.inputs), *example.targets).backward()
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    program = captured(example, optimizer)
    for (name, entries), state in zip(program.interface.optimizer_state.items(), optimizer.state.values(), strict=True):
        assert entries.keys() == state.keys(), name
        for key, blob in entries.items():
            assert torch.equal(program.state[blob], state[key])
            assert program.state[blob].data_ptr() != state[key].data_ptr()
    assert str(optimizer.state_dict()) == str(before)


def test_unused_and_frozen_parameters_are_state_without_update() -> None:
    example = models.mlp()
    example.model.unused = torch.nn.Linear(2, 2)
    example.model.fc1.bias.requires_grad_(False)
    optimizer = torch.optim.SGD(example.model.parameters(), lr=0.1, momentum=0.9)
    program = captured(example, optimizer)
    assert {"unused.weight", "unused.bias", "fc1.bias"} <= program.step.blobs.keys()
    assert {op.inputs[0] for op in program.step.ops if op.phase == "update"} == {"fc1.weight", "fc2.weight", "fc2.bias"}
    assert "unused.weight" not in program.interface.optimizer_state
    assert "fc1.bias_grad" not in program.step.blobs
    matches_eager(program, example, lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9))


def refused(text: str, make: Callable[[Any], Any]) -> None:
    example = models.mlp()
    with pytest.raises(CaptureError, match=re.escape(text)):
        captured(example, make(example.model.parameters()))


def test_other_optimizers() -> None:
    text = "optimizer LBFGS is not supported\n  fix  supported: SGD, Adam, AdamW, Adagrad, RMSprop"
    refused(text, torch.optim.LBFGS)
    refused(
        "foreach=True of Adadelta is not supported\n  in   parameter group 0 of Adadelta\n  fix  set foreach=False",
        lambda params: torch.optim.Adadelta(params, foreach=True),
    )


FOR_LOOPS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adadelta": lambda params: torch.optim.Adadelta(params, lr=0.5, weight_decay=0.01, maximize=True),
    "adamax": lambda params: torch.optim.Adamax(params, weight_decay=0.01),
    "nadam": lambda params: torch.optim.NAdam(params, weight_decay=0.1, decoupled_weight_decay=True),
    "radam": lambda params: torch.optim.RAdam(params, lr=0.1, weight_decay=0.1),
    "asgd": lambda params: torch.optim.ASGD(params, lr=0.1, t0=2, weight_decay=0.1),
    "rprop": lambda params: torch.optim.Rprop(params, lr=0.1, etas=(0.4, 1.3)),
    "adafactor": lambda params: torch.optim.Adafactor(params, weight_decay=0.1, eps=(1e-7, 1e-2)),
    "muon": lambda params: torch.optim.Muon([p for p in params if p.dim() == 2], lr=0.1),
}


@pytest.mark.parametrize("name", FOR_LOOPS)
def test_for_loops_of_torch(name: str) -> None:
    """Seven steps from the start, and from a state that torch has left; the state comes back as torch has it."""
    example, eager = models.mlp(), models.mlp()
    optimizer, theirs = FOR_LOOPS[name](example.model.parameters()), FOR_LOOPS[name](eager.model.parameters())
    scheduler, of_theirs = (torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in (optimizer, theirs))

    def step() -> torch.Tensor:
        theirs.zero_grad()
        loss: torch.Tensor = eager.loss(eager.model(*eager.inputs), *eager.targets)
        loss.backward()
        theirs.step()
        of_theirs.step()
        return loss

    for _ in range(2):
        program = captured(example, optimizer)
        plan = passes.emit(program)
        with runtime.Session(plan, program.state, binding="cpu", optimizer=optimizer) as session:
            for _ in range(4):
                assert torch.equal(session.step(*example.inputs, *example.targets), step())
                scheduler.step()
            found, expected = session.optimizer_state_dict(), theirs.state_dict()
            assert found["state"].keys() == expected["state"].keys()
            for index, kept in expected["state"].items():
                assert all(torch.equal(found["state"][index][key], tensor) for key, tensor in kept.items())
            example.model.load_state_dict(session.state_dict())
            optimizer.load_state_dict(found)
    assert all(map(torch.equal, example.model.parameters(), eager.model.parameters()))


def test_tables_whose_update_computes_with_all_of_a_matrix_are_not_split() -> None:
    model = torch.nn.Sequential(torch.nn.EmbeddingBag(6, 4), torch.nn.Linear(4, 2, bias=False))
    bags = torch.tensor([[0, 1], [2, 3], [4, 5]])
    optimizer = torch.optim.Muon(model.parameters())
    program = graphir.capture(model, (bags,), loss=lambda out: out.square().sum(), optimizer=optimizer)
    with pytest.raises(graphir.PassError, match=r"graphir\.muon reads it, its gradient"):
        passes.shard(program, {"0": ("rows", [0, 1])}, [0, 1])


def test_subclasses_of_optimizers() -> None:
    class Mine(torch.optim.SGD):
        pass

    refused("optimizer Mine is not supported", Mine)


def test_dampening_is_state_since_torch_starts_it_at_the_second_step() -> None:
    example = models.mlp()
    optimizer = torch.optim.SGD(example.model.parameters(), lr=0.1, momentum=0.9, dampening=0.1)
    program = captured(example, optimizer)
    blob = program.step.blobs["fc1.bias.next_dampening"]
    assert (blob.shape, blob.dtype, blob.device, blob.role) == ((), "f64", "cpu:0", "state")
    assert program.state["fc1.bias.next_dampening"] == 0.0
    example.loss(example.model(*example.inputs), *example.targets).backward()
    optimizer.step()
    assert captured(example, optimizer).state["fc1.bias.next_dampening"] == 0.1


def test_dampening_without_momentum_does_nothing() -> None:
    example = models.mlp()
    program = captured(example, torch.optim.SGD(example.model.parameters(), lr=0.1, dampening=0.1))
    (op, *_) = [op for op in program.step.ops if op.phase == "update"]
    assert (op.type, dict(op.args)) == ("graphir.sgd", {})


def test_foreach_in_a_type_that_rounds_between_its_operators() -> None:
    example = models.mlp()
    example.model.bfloat16()
    example = example._replace(inputs=(example.inputs[0].bfloat16(),))
    program = captured(example, torch.optim.RMSprop(example.model.parameters(), foreach=True))
    assert {op.args["form"] for op in program.step.ops if op.phase == "update"} == {"foreach"}
    matches_eager(program, example, lambda params: torch.optim.RMSprop(params, foreach=True))


@pytest.mark.parametrize(("make", "form"), [(torch.optim.Adagrad, None), (torch.optim.SGD, "foreach")])
def test_updates_beside_a_sparse_gradient(make: Callable[..., torch.optim.Optimizer], form: str | None) -> None:
    """torch's Adagrad makes all updates of a list one by one then, its SGD that of the sparse gradient alone."""
    model = torch.nn.Sequential(torch.nn.EmbeddingBag(5, 4, sparse=True), torch.nn.Linear(4, 2))
    other = torch.nn.Linear(4, 2)
    model.append(torch.nn.Sequential(torch.nn.Linear(2, 4), other))
    groups = [{"params": list(other.parameters())}, {"params": [p for p in model.parameters() if p.shape[0] != 2]}]
    optimizer = make(groups, lr=0.1, foreach=True)
    ids = torch.arange(6).view(2, 3) % 5
    program = capture(model, (ids,), loss=torch.sum, optimizer=optimizer)
    forms = {op.inputs[0]: op.args.get("form") for op in program.step.ops if op.phase == "update"}
    assert forms == {
        "2.1.weight": "foreach",
        "2.1.bias": "foreach",
        "0.weight": None,
        "2.0.weight": form,
        "2.0.bias": form,
    }


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fused_sgd_of_16_bit_parameters_is_refused_where_they_are_trained(momentum: float) -> None:
    example = models.mlp()
    example.model.bfloat16()
    example = example._replace(inputs=(example.inputs[0].bfloat16(),))
    optimizer = torch.optim.SGD(example.model.parameters(), lr=0.1, momentum=momentum, fused=True)
    with pytest.raises(CaptureError, match=r"fused=True is not supported for 'fc1.weight' of type bfloat16"):
        captured(example, optimizer)
    for name, param in example.model.named_parameters():
        if name.startswith("fc1"):
            param.requires_grad_(False)
        else:
            param.data = param.data.float()
    example.model.fc1.register_forward_hook(lambda module, args, out: out.float())
    assert [op.phase for op in captured(example, optimizer).step.ops].count("update") == 2


def test_state_that_lacks_what_the_options_need() -> None:
    example = models.mlp()
    optimizer = torch.optim.Adam(example.model.parameters())
    example.loss(example.model(*example.inputs), *example.targets).backward()
    optimizer.step()
    optimizer.param_groups[0]["amsgrad"] = True
    text = "the optimizer's state of parameter 'fc1.weight' has no 'max_exp_avg_sq'"
    with pytest.raises(CaptureError, match=text):
        captured(example, optimizer)


def test_state_of_another_type_than_its_parameter() -> None:
    example = models.mlp()
    optimizer = torch.optim.SGD(example.model.parameters(), lr=0.1, momentum=0.9)
    example.loss(example.model(*example.inputs), *example.targets).backward()
    optimizer.step()
    example.model.double()
    example = example._replace(inputs=(example.inputs[0].double(),))
    with pytest.raises(CaptureError, match="'momentum_buffer' of parameter 'fc1"):
        captured(example, optimizer)


@pytest.mark.parametrize(
    ("key", "value", "what"),
    [
        ("exp_avg", torch.zeros(3), "not a dense tensor of the expected shape and type"),
        ("exp_avg", 0.0, "not a dense tensor of the expected shape and type"),
        ("step", torch.zeros(3), "no number"),
        ("step", "one", "no number"),
    ],
)
def test_state_of_another_shape_or_kind(key: str, value: object, what: str) -> None:
    example = models.mlp()
    optimizer = torch.optim.Adam(example.model.parameters())
    example.loss(example.model(*example.inputs), *example.targets).backward()
    optimizer.step()
    optimizer.state[example.model.fc1.weight][key] = value
    with pytest.raises(CaptureError, match=f"'{key}' of parameter 'fc1.weight' is {what}"):
        captured(example, optimizer)


def test_differentiable() -> None:
    refused("differentiable=True is not supported", lambda params: torch.optim.Adam(params, differentiable=True))


def test_learning_rates_that_are_tensors() -> None:
    refused("lr is a tensor\n  in   parameter group 0", lambda params: torch.optim.SGD(params, lr=torch.tensor(0.1)))


def test_parameters_of_another_model() -> None:
    def make(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([*params, torch.nn.Parameter(torch.zeros(3))], lr=0.1)

    refused("parameter 4 (shape [3]) does not belong to the model", make)


def test_step_hooks() -> None:
    def make(params: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(params, lr=0.1)
        optimizer.register_step_pre_hook(lambda *_: None)
        return optimizer

    refused("the optimizer has step hooks", make)


def test_an_optimizer_without_a_loss() -> None:
    example = models.mlp()
    optimizer = torch.optim.SGD(example.model.parameters(), lr=0.1)
    with pytest.raises(CaptureError, match="an optimizer is given, but no loss"):
        capture(example.model, example.inputs, optimizer=optimizer)


def test_sparse_gradients() -> None:
    model = torch.nn.Embedding(5, 2, sparse=True)
    with pytest.raises(CaptureError, match="sparse=False"):
        capture(model, (torch.tensor([0, 1]),), loss=lambda out: out.sum())
