"""What capture sees of torch's functions: under any name, within other modes, wherever the step's own lines run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from eager import assert_same_bits
from graphir.passes import emit
from graphir.runtime import Session
from models import Applied
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from graphir.capturing.capture import capture
from graphir.errors import CaptureError

pytestmark = pytest.mark.usefixtures("few_objects")
ADDRESS = "the step asks for the address of a tensor's data"
address = Tensor.data_ptr


class Layer(nn.Module):
    """A linear layer before a function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fc, self.function = nn.Linear(4, 4), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.fc(x))


class Doubles(TorchFunctionMode):
    """Has ``torch.sin`` compute twice the sine."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.sin else result


class Twice(torch.autograd.Function):
    """Looks at an address in its backward, if it is told to."""

    looks = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.cuda() * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.to("cuda") * (2 + (grad.data_ptr() if Twice.looks else 0))


def penalty(h: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(Twice.apply(h).sum(), h, create_graph=True)
    return h * gradient


def in_a_mode(h: Tensor) -> Tensor:
    with Doubles():
        return torch.sin(h.cuda())


def in_a_context(h: Tensor) -> Tensor:
    with torch.device("cpu"):
        return h.cuda() + torch.ones(4)


def distant(h: Tensor) -> Tensor:
    def distance(a: Tensor, b: Tensor) -> Tensor:
        return (a.to("cuda") - b).norm(dim=1)

    return nn.functional.triplet_margin_with_distance_loss(h, h * 2, h * 3, distance_function=distance)


SEEN: dict[str, Callable[[Tensor], Tensor]] = {
    "a function of autograd": Twice.apply,
    "a gradient within the step": penalty,
    "a checkpoint": lambda h: checkpoint(lambda x: x.cuda().sin(), h, use_reentrant=False),
    "a map": lambda h: torch.vmap(lambda row: row.cuda() * 2)(h),
    "a transform": lambda h: torch.func.grad(lambda x: (x.cuda() * x).sum())(h),
    "a mode": in_a_mode,
    "a context": in_a_context,
    "a function that is given one": distant,
}


def on_host(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """*function*, with moves to CUDA that do nothing."""

    def run(x: Tensor) -> Tensor:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Tensor, "cuda", lambda tensor: tensor)
            to = Tensor.to
            patched.setattr(Tensor, "to", lambda tensor, place: to(tensor, "cpu"))
            return function(x)

    return run


@pytest.mark.parametrize("name", SEEN)
def test_moves_are_seen_wherever_the_steps_lines_run(name: str) -> None:
    model, x = Layer(SEEN[name]), torch.randn(3, 4)
    program = capture(model, (x,), loss=torch.sum)
    with Session(emit(program), program.state) as session:
        found = session.step(x)
        expected = on_host(lambda x: model(x).sum())(x)
        assert_same_bits({"loss": found}, {"loss": expected.detach()}, name)


def checkpointed(h: Tensor) -> Tensor:
    runs = []

    def body(x: Tensor) -> Tensor:
        runs.append(x)
        return (x * (x.data_ptr() if len(runs) > 1 else 1)).sin()

    return checkpoint(body, h, use_reentrant=False)  # type: ignore[no-any-return]


LOOKS: dict[str, Callable[[Tensor], Tensor]] = {
    "a function of autograd": Twice.apply,
    "a gradient within the step": penalty,
    "a checkpoint that runs again": checkpointed,
    "another name": lambda h: h * address(h),
    "a map": lambda h: torch.vmap(lambda row: row * row.data_ptr())(h),
}


@pytest.mark.parametrize("name", LOOKS)
def test_escapes_are_seen_wherever_the_steps_lines_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Twice, "looks", True)
    with pytest.raises(CaptureError, match=ADDRESS):
        capture(Layer(LOOKS[name]), (torch.randn(3, 4),), loss=torch.sum)


def test_modules_take_the_kernel_that_they_take_without_a_mode() -> None:
    """``nn.TransformerEncoderLayer`` has one kernel for evaluation, unless a mode of functions is on."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval().requires_grad_(False)

    def within_a_mode(x: Tensor) -> Tensor:
        with Doubles():
            return layer(x)  # type: ignore[no-any-return]

    x = torch.randn(2, 3, 8)
    for model, fused in ((layer, True), (Applied(within_a_mode), False)):
        program = capture(model, (x,))
        assert any("transformer_encoder_layer" in op.type for op in program.step.ops) == fused
        with Session(emit(program), program.state) as session:
            assert_same_bits({"out": session.step(x)}, {"out": model(x)}, "layer")
    assert vars(torch.overrides)["has_torch_function"] is torch.overrides.has_torch_function
