"""capture(..., backward=True): a step that is given the gradients of its outputs, without a loss."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import graphir
from graphir import passes, runtime
from graphir.errors import CaptureError


class Pair(nn.Module):
    """Two outputs, of which one is used by the other, and one that needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        hidden = self.fc1(x).tanh()
        made = self.fc2(hidden)
        return {"made": made if y is None else made * y, "hidden": hidden, "sign": made.detach().sign()}


def batch(*shape: int, requires_grad: bool = False) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).requires_grad_(requires_grad)


def step(program: graphir.Program, *args: Any) -> tuple[Any, dict[str, Tensor], dict[str, Tensor]]:
    """The outputs, and the gradients of inputs and of parameters."""
    with runtime.Session(passes.emit(program), program.state, executor="reference") as session:
        outputs, of_inputs = session.step(*args)
        return outputs, of_inputs, session.gradients()


def test_text(golden: Callable[[str, str], None]) -> None:
    torch.manual_seed(0)
    program = graphir.capture(Pair(), inputs=(batch(2, 4, requires_grad=True),), backward=True)
    golden("output_gradients", str(program))
    assert graphir.parse(str(program)) == program


def test_gradients_are_those_of_autograd() -> None:
    model, x, y = Pair(), batch(6, 4, requires_grad=True), batch(6, 3, requires_grad=True)
    program = graphir.capture(model, inputs=(x, y), backward=True)
    made = model(x, y)
    grads = torch.randn(6, 3), torch.randn(6, 5)
    wanted = torch.autograd.grad([made["made"], made["hidden"]], [x, y, *model.parameters()], grads)
    outputs, of_inputs, of_params = step(program, x.detach(), y.detach(), grads)
    assert all(torch.equal(outputs[name], made[name]) for name in made)
    assert list(of_inputs) == ["x", "y"]
    assert list(of_params) == [name for name, _ in model.named_parameters()]
    for ours, theirs in zip([*of_inputs.values(), *of_params.values()], wanted, strict=True):
        assert torch.equal(ours, theirs)


def test_gradients_of_some_outputs_alone() -> None:
    """What only the others depend on has no gradient, and is not computed."""
    model, x = Pair(), batch(6, 4)
    program = graphir.capture(model, inputs=(x,), backward=[1])
    grad = torch.randn(6, 5)
    wanted = torch.autograd.grad(model(x)["hidden"], list(model.fc1.parameters()), grad)
    outputs, of_inputs, of_params = step(program, x, (grad,))
    assert list(outputs) == ["made", "hidden", "sign"]
    assert of_inputs == {}
    assert list(of_params) == ["fc1.weight", "fc1.bias"]
    assert all(map(torch.equal, of_params.values(), wanted))


@pytest.mark.parametrize("make", [models.mlp, models.resnet, models.gpt])
def test_models_at_other_sizes_and_on_replicas(make: Callable[..., models.Example]) -> None:
    """Gradients of parameters are added up in replica order, those of inputs put together."""
    example = make(4)
    program = graphir.capture(example.model, inputs=example.inputs, backward=True)
    program = passes.replicate(program, [0, 1], reduction="sum")
    given = make(6).inputs
    whole = torch.randn_like(example.model(*given))
    gradients = []
    for replica in range(2):
        model = make(4).model  # whose buffers are those of the captured one
        made = model(*(x.chunk(2)[replica] for x in given))
        gradients.append(torch.autograd.grad(made, list(model.parameters()), whole.chunk(2)[replica]))
    _, _, ours = step(program, *given, (whole,))
    assert all(torch.equal(a, b + c) for a, b, c in zip(ours.values(), *gradients, strict=True))


def test_a_parameters_gradient_that_is_the_outputs_own_is_reduced() -> None:
    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(3, 4))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.bias

    program = graphir.capture(Shift(), inputs=(batch(3, 4, requires_grad=True),), batch_dims=None, backward=True)
    names = [program.interface.gradients["bias"], program.interface.fetches[1].blob]
    assert len({program.step.blobs[str(name)].storage for name in names} | {"add_grad"}) == 3
    _, of_inputs, of_params = step(program, torch.ones(3, 4), (torch.full((3, 4), 2.0),))
    assert torch.equal(of_inputs["x"], of_params["bias"])


def test_a_layout_that_is_not_contiguous_is_the_gradients_too() -> None:
    program = graphir.capture(
        models.Applied(lambda x: x.t() * 2), inputs=(batch(4, 3, requires_grad=True),), backward=True
    )
    (feed,) = program.interface.feeds[1:]
    output = program.interface.fetches[0].blob
    assert program.step.blobs[str(feed.blob)].strides == program.step.blobs[str(output)].strides is not None


def test_files_and_witness(tmp_path: Path) -> None:
    program = graphir.capture(Pair(), inputs=(batch(2, 4, requires_grad=True),), backward=True)
    program.save(tmp_path / "pair.json")
    assert graphir.load(tmp_path / "pair.json") == program
    assert program.interface.differentiable == (0, 1)
    assert program.witness is not None
    program.witness({"batch": 11})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"backward": True, "loss": lambda out: out.sum()},
            "backward and loss are both given, but the backward of a step with a loss starts from the loss\n"
            "  fix  leave backward out; or leave loss out, and give the gradients of the outputs to the step",
        ),
        (
            {"backward": "yes"},
            "backward='yes' is neither a bool nor positions of outputs\n"
            "  fix  give True, False, or positions of outputs such as [0]",
        ),
        ({"backward": [-1]}, "backward=[-1] is neither a bool nor positions of outputs\n"),
        ({"backward": []}, "backward=[] is neither a bool nor positions of outputs\n"),
        ({"backward": [0, 2]}, "backward names output 2, which needs no gradient\n"),
        ({"backward": True, "accumulate": 2}, "accumulate is given, but no loss, so that there are no gradients\n"),
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises(CaptureError) as caught:
        graphir.capture(Pair(), inputs=(batch(2, 4),), **options)
    assert str(caught.value).startswith(message)


def test_outputs_that_need_no_gradient_are_refused() -> None:
    with pytest.raises(CaptureError) as caught:
        graphir.capture(models.Applied(torch.relu), inputs=(batch(2, 4),), backward=True)
    assert str(caught.value) == (
        "no output of the model needs a gradient, so there is no backward\n"
        "  in   the model\n"
        "  fix  leave backward out, or capture the model with parameters or inputs that require a gradient"
    )


class Present:
    """A container that leaves out what is None, as caches of transformers do."""

    def __init__(self, *parts: Any) -> None:
        self.parts = [part for part in parts if part is not None]


pytree.register_pytree_node(
    Present,
    lambda present: (present.parts, None),
    lambda parts, _: Present(*parts),
    serialized_type_name="test_output_gradients.Present",
)


def test_containers_that_leave_out_what_is_none() -> None:
    class Kept(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 2)

        def forward(self, given: Present) -> Any:
            return self.fc(given.parts[0]), Present(given.parts[0] * 2, given.parts[1].tanh())

    model, x = Kept(), batch(4, 3, requires_grad=True)
    program = graphir.capture(model, inputs=(Present(x, batch(4, 2)),), backward=True)
    halves = passes.split_backward(program)
    assert halves.outputs == (0, 1)
    assert [len(half.interface.fetches) for half in (halves.forward, halves.backward)] == [3, 1]
    made, kept = model(Present(x, batch(4, 2)))
    grads = torch.ones(4, 2), torch.full((4, 3), 3.0)
    wanted = torch.autograd.grad([made, kept.parts[0]], [x, *model.parameters()], grads)
    (ours, ours_kept), of_inputs, of_params = step(program, Present(x.detach(), batch(4, 2)), grads)
    assert torch.equal(ours, made) and all(map(torch.equal, ours_kept.parts, kept.parts))
    assert all(map(torch.equal, [*of_inputs.values(), *of_params.values()], wanted))
