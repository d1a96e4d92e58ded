"""What batch norms over replicas allocate inside: formulas against the events of PyTorch's profiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from allocations import measured_peak
from graphir.runtime.kernels.batch_norm import BATCH_NORM
from single_calls import blob
from torch import Tensor

from graphir.analysis.formulas.scratch import SCRATCH
from graphir.ir.device import gpu
from graphir.ir.operator import Operator
from graphir.ir.optypes.sized import SizedOperator

CHANNELS = 64
LAYOUTS: dict[str, Callable[[torch.dtype], Tensor]] = {
    "rows": lambda dtype: torch.randn(32, CHANNELS, dtype=dtype),
    "pictures": lambda dtype: torch.randn(8, CHANNELS, 4, 4, dtype=dtype),
    "channels last": lambda dtype: torch.randn(8, CHANNELS, 4, 4, dtype=dtype).to(memory_format=torch.channels_last),
    "permuted": lambda dtype: torch.randn(5, CHANNELS, 8, dtype=dtype).permute(2, 1, 0),
}


def predicted(type: str, given: list[Tensor | None], threads: int) -> int | None:
    tensors = [tensor for tensor in given if tensor is not None]
    names = [f"x{k}" for k in range(len(tensors))]
    pattern = "".join("_" if tensor is None else "t" for tensor in given)
    op = Operator(type, tuple(names), (), {}, gpu(0), operands=pattern)
    blobs = {name: blob(name, tensor) for name, tensor in zip(names, tensors, strict=True)}
    return SCRATCH[type](SizedOperator(op, blobs, {}, threads))


def measured(type: str, given: list[Tensor | None], args: dict[str, Any]) -> int:
    """Beside its results."""
    kernel = BATCH_NORM[type]
    made = kernel(*given, **args)
    results = sum(tensor.nbytes for tensor in (made if isinstance(made, tuple) else (made,)))
    return measured_peak(lambda: kernel(*given, **args)) - results


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_kernels(layout: str, dtype: torch.dtype, affine: bool, threads: int) -> None:
    x = LAYOUTS[layout](dtype)
    numbers = torch.rand(CHANNELS, dtype=dtype) + 0.5
    weight = numbers if affine else None
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        one = {"participant": 0, "participants": 2}
        moments = BATCH_NORM["graphir.batch_norm_moments"](x, **one)
        calls: list[tuple[str, list[Tensor | None], dict[str, Any]]] = [
            ("graphir.batch_norm_moments", [x], one),
            (
                "graphir.cumulative_batch_norm",
                [x, weight, weight, numbers.clone(), numbers.clone(), torch.tensor(2)],
                {"eps": 1e-5},
            ),
            (
                "graphir.synchronised_batch_norm",
                [x, moments, weight, weight, numbers.clone(), numbers.clone()],
                {"momentum": 0.1, "eps": 1e-5},
            ),
            (
                "graphir.synchronised_batch_norm_backward",
                [x, x, moments, weight, numbers, numbers, numbers, numbers],
                {},
            ),
        ]
        for type, given, args in calls:
            assert predicted(type, given, threads) == pytest.approx(measured(type, given, args), abs=64), type
    finally:
        torch.set_num_threads(before)


def test_half_precision_is_not_known() -> None:
    x = torch.randn(8, CHANNELS, 4, 4, dtype=torch.bfloat16)
    assert predicted("graphir.batch_norm_moments", [x], 1) is None
