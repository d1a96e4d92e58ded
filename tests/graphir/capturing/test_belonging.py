"""Operator.of: what the operators of a backward belong to."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import graphir
from graphir import Program, passes
from graphir.errors import VerifyError
from graphir.ir.verify import verify


def owners(program: Program, phase: str = "backward") -> dict[str, str]:
    """What each operator of a phase that is no view belongs to, by its first result."""
    return {op.outputs[0]: op.of for op in program.step.ops if op.phase == phase and not op.effects.views}


def capture(model: nn.Module, *shape: int, **options: int) -> Program:
    return graphir.capture(model, (torch.randn(*shape),), loss=lambda out: out.sum(), **options)


def test_gradients_of_inputs_and_weights_belong_to_their_layer() -> None:
    found = owners(capture(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)), 6, 4))
    assert found == {
        "loss_grad": "loss",
        "1_grad": "2",
        "2.backward_mm": "2",
        "2.backward_sum": "2",
        "0_grad": "1",
        "0.backward_mm": "0",
        "0.backward_sum": "0",
    }


class Branches(nn.Module):
    """One value that three layers read, so that two additions make its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        return self.a(x) * self.b(x) * self.c(x)  # type: ignore[no-any-return]


def test_sums_of_gradients_belong_to_the_value_whose_gradient_they_are() -> None:
    program = capture(Branches(), 6, 4)
    sums = [op.of for op in program.step.ops if op.phase == "backward" and op.type == "aten.add.Tensor"]
    assert sums == ["stem", "stem"]


def test_sums_over_micro_batches_belong_to_the_parameter() -> None:
    program = capture(nn.Linear(4, 3), 6, 4, accumulate=2)
    sums = {op.of for op in program.step.ops if op.type == "aten.add.Tensor" and op.phase == "backward"}
    assert sums == {"weight", "bias"}


@pytest.mark.parametrize("together", [1, 2, 4])
def test_what_a_checkpoint_repeats(together: int) -> None:
    # Equal layers: only their order tells them apart.
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for i in range(0, 4, together):
                x = checkpoint(nn.Sequential(*self.layers[i : i + together]), x, use_reentrant=False)
            return x

    found = owners(capture(Stack(), 6, 4))
    repeated = {name: of for name, of in found.items() if "recomputed" in name}
    assert len(repeated) >= 4
    for name, of in repeated.items():
        assert name.startswith(f"{of}.recomputed"), (name, of)


def test_replicas_and_texts_keep_it() -> None:
    program = passes.replicate(capture(nn.Linear(4, 3), 6, 4), devices=[0, 1])
    assert owners(program)["gpu_1/weight.t_grad" if "gpu_1/weight.t_grad" in owners(program) else "gpu_1/loss_grad"]
    assert {of.partition("/")[0] for name, of in owners(program).items() if name.startswith("gpu_1/")} == {"gpu_1"}
    assert graphir.parse(str(program)) == program


def test_a_belonging_to_nothing_is_refused() -> None:
    program = capture(nn.Linear(4, 3), 6, 4)
    ops = tuple([op._replace(of="nobody") if op.of else op for op in program.step.ops])
    with pytest.raises(VerifyError, match="blob 'nobody' is not declared"):
        verify(program.with_(step=program.step.with_(ops=ops)))
