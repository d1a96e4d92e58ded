"""runtime.Function: a plan on tensors that it is handed, over state that others hold."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from allocations import measured_peak
from torch import Tensor, nn

import graphir
from graphir import passes, runtime
from graphir.errors import PlanError, RunError, SessionError


def made(replicas: int = 1) -> tuple[nn.Module, graphir.Program]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    program = graphir.capture(model, inputs=(torch.randn(5, 4),))
    return model, passes.replicate(program, range(replicas)) if replicas > 1 else program


def lent(model: nn.Module, program: graphir.Program) -> dict[str, Tensor]:
    """The module's own tensors; the replicas have one together."""
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {op.outputs[0]: own[str(op.args["key"])].detach() for op in program.init.ops}


@pytest.mark.parametrize("executor", ["reference", "serial", "threads"])
def test_it_reads_and_writes_the_tensors_of_its_caller(executor: str) -> None:
    model, program = made()
    theirs = copy.deepcopy(model)
    function = runtime.Function(passes.emit(program), lent(model, program), executor=executor)
    assert function.inputs == ("input",)
    for _ in range(2):
        x = torch.randn(7, 4)
        (out,) = function({"batch": 7}, [x])
        assert torch.equal(out, theirs(x))
        assert not out.is_inference()
        assert not out.requires_grad
        with torch.no_grad():
            for ours, other in zip(model.parameters(), theirs.parameters(), strict=True):
                ours.mul_(0.5)
                other.mul_(0.5)
    for ours, other in zip(model.buffers(), theirs.buffers(), strict=True):
        assert torch.equal(ours, other)


def test_outputs_belong_to_one_call_alone() -> None:
    model, program = made()
    function = runtime.Function(passes.emit(program), lent(model.eval(), program))
    (first,) = function({"batch": 5}, [torch.ones(5, 4)])
    kept = first.clone()
    function({"batch": 5}, [torch.zeros(5, 4)])
    assert torch.equal(first, kept)
    first.add_(1).requires_grad_()


def test_an_operator_that_fails_is_named() -> None:
    program = graphir.capture(nn.Embedding(3, 2), inputs=(torch.tensor([0, 1]),))
    function = runtime.Function(passes.emit(program), {"weight": torch.zeros(3, 2)})
    with pytest.raises(RunError, match=r"aten.embedding.default failed: IndexError"):
        function({"batch": 2}, [torch.tensor([0, 7])])
    (out,) = function({"batch": 2}, [torch.tensor([0, 1])])
    assert torch.equal(out, torch.zeros(2, 2))


def test_state_that_does_not_fit_is_refused() -> None:
    model, program = made()
    plan, state = passes.emit(program), lent(model, program)
    with pytest.raises(SessionError) as caught:
        runtime.Function(plan, {name: t for name, t in state.items() if name != "0.bias"})
    assert str(caught.value) == (
        "the state has no '0.bias'\n  in   plan 'sequential'\n  fix  give a tensor for each blob of the plan's state"
    )
    with pytest.raises(SessionError) as caught:
        runtime.Function(plan, {**state, "0.weight": torch.zeros(4, 3).t()})
    assert str(caught.value) == (
        "'0.weight' in the state is torch.float32 [3, 4] with strides [1, 3] on cpu, the plan takes torch.float32 "
        "[3, 4] with strides [4, 1] on cpu\n"
        "  in   plan 'sequential'\n"
        "  fix  give a tensor that fits"
    )


def test_options_are_a_sessions() -> None:
    model, program = made()
    plan, state = passes.emit(program), lent(model, program)
    with pytest.raises(SessionError, match="executor 'fast' is not supported"):
        runtime.Function(plan, state, executor="fast")  # type: ignore[arg-type]
    with pytest.raises(SessionError, match="binding 'here' is not supported"):
        runtime.Function(plan, state, binding="here")  # type: ignore[arg-type]


def test_an_unsound_plan_is_refused() -> None:
    model, program = made(2)
    plan = passes.emit(passes.replicate(graphir.capture(model, inputs=(torch.randn(5, 4),)), [0, 1]))
    broken = plan.with_(instructions=plan.instructions[:-1])
    with pytest.raises((PlanError, graphir.VerifyError)):
        runtime.Function(broken, lent(model, program))


def test_it_is_neither_copied_nor_pickled() -> None:
    model, program = made()
    function = runtime.Function(passes.emit(program), lent(model, program))
    for attempt in (copy.copy, pickle.dumps):
        with pytest.raises(SessionError, match="a function has threads of its own, and cannot be copied or pickled"):
            attempt(function)
    assert repr(function) == "<function of plan 'sequential': executor serial>"
    function.close()


@pytest.mark.parametrize("executor", ["reference", "serial", "threads"])
def test_consumed_inputs_are_taken_and_freed(executor: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.ReLU())])
    x, gradient = torch.randn(256, 64), torch.randn(256, 64)
    program = graphir.capture(model, inputs=(x,), backward=True)
    halves = passes.split_backward(program)
    state = lent(model, program)
    forward = runtime.Function(passes.emit(halves.forward), state)
    plan = passes.emit(halves.backward)
    hidden = [name for name in halves.saved if name in forward.outputs and name != "11"]
    backward = runtime.Function(plan, state, executor=executor, consumed=hidden)
    whole = runtime.Function(plan, state, executor=executor)

    def given() -> list[Tensor]:
        values = {"input": x, **dict(zip(forward.outputs, forward(program.dims, [x]), strict=True))}
        return [values.get(name, gradient) for name in backward.inputs]

    expected, inputs = whole(program.dims, given()), given()
    backward(program.dims, inputs)
    taken = dict(zip(backward.inputs, inputs, strict=True))
    assert [name for name, tensor in taken.items() if tensor is None] == hidden and taken["input"] is x
    for ours, theirs in zip(backward(program.dims, given()), expected, strict=True):
        assert torch.equal(ours, theirs)
    # The backward holds the most, beside what the caller has: two inputs.
    found = graphir.memory(plan, profile=None, threads=1, consumed=hidden)
    predicted = found.peak["gpu:0"] - found.state["gpu:0"] - x.nbytes - gradient.nbytes
    most = measured_peak(lambda: backward(program.dims, given()))
    assert most == predicted if executor != "reference" else most > predicted
    assert measured_peak(lambda: whole(program.dims, given())) > predicted
