"""What capture returns, it has verified."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
from direct import evaluate
from torch import nn

from graphir.capturing.capture import capture
from graphir.errors import VerifyError
from graphir.ir.program import Program


def test_a_broken_program_is_reported_not_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules[capture.__module__]
    build = vars(module)["build_program"]

    def reversed_step(*args: Any, **kwargs: Any) -> tuple[Program, Any]:
        program, outline = build(*args, **kwargs)
        return program.with_(step=program.step.with_(ops=program.step.ops[::-1])), outline

    monkeypatch.setattr(module, "build_program", reversed_step)
    example = models.mlp()
    with pytest.raises(VerifyError, match="before"):
        capture(example.model, example.inputs, targets=example.targets, loss=example.loss)


def test_pixels_shuffled_channels_last_are_verified() -> None:
    """The CPU keeps the layout, the meta device does not."""

    class Shuffle(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.pixel_shuffle(x, 2)

    x = torch.randn(3, 8, 3, 3).to(memory_format=torch.channels_last)
    assert capture(Shuffle(), (x,)).covers.fixed == ""


@pytest.mark.parametrize(
    "factorised",
    [torch.linalg.svdvals, lambda x: torch.linalg.eigvals(x).abs(), lambda x: torch.fft.irfft2(torch.fft.rfft2(x))],
    ids=["svd", "eig", "fft"],
)
def test_what_a_library_lays_out_on_the_cpu_is_verified(factorised: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """The meta device lays it out as a GPU's library does."""

    class Factorised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.rand(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return factorised(x * self.scale)

    model, x = Factorised(), torch.randn(3, 4, 4)
    program = capture(model, (x,))
    assert program.covers.fixed == ""
    (fetch,) = program.interface.fetches
    assert fetch.blob is not None
    assert torch.equal(evaluate(program, dict(program.state), {"x": x})[fetch.blob], model(x))
