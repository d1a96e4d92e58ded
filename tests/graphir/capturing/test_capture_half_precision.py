"""Steps in half precision: normalisation, whose parameters may be of single precision, has the bits of eager."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from direct import matches_eager
from models import Example
from runnable import sgd
from torch import Tensor, nn

from graphir.capturing.capture import capture

NORMS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.BatchNorm1d(4),
    "group norm": lambda: nn.GroupNorm(2, 4),
    "layer norm": lambda: nn.LayerNorm((4, 3)),
    "plain layer norm": lambda: nn.LayerNorm(3, elementwise_affine=False),
}


def squared_error(out: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(out.float(), target)


@pytest.mark.parametrize(("dtype", "mixed"), [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float16, True)])
@pytest.mark.parametrize("norm", NORMS)
def test_normalisation_has_the_bits_of_eager(norm: str, dtype: torch.dtype, mixed: bool) -> None:
    torch.manual_seed(0)
    layer = NORMS[norm]()
    model = nn.Sequential(nn.Conv1d(4, 4, 1).to(dtype), layer if mixed else layer.to(dtype))
    example = Example(model, (torch.randn(6, 4, 3).to(dtype),), (torch.randn(6, 4, 3),), squared_error)
    program = capture(
        model, example.inputs, targets=example.targets, loss=squared_error, optimizer=sgd(model.parameters())
    )
    matches_eager(program, example, sgd)
    statistics = layer.weight.dtype if layer.weight is not None else dtype
    made = next(op for op in program.step.ops if "_norm.default" in op.type)
    declared = [program.step.blobs[name].dtype for name in made.outputs[1:3]]
    assert declared == [{"torch.float32": "f32", "torch.bfloat16": "bf16", "torch.float16": "f16"}[str(statistics)]] * 2
