"""Caffe2's updates of rows: a call of many slots is as many calls of one slot, one after the other.

To the last bit without roots: of those, libraries round the last bit by where in a vector a number stands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphir.runtime.kernels.bindings import OWN_KERNELS
from torch import Tensor

ROWS, WIDTH = 5, 3


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def number(value: float) -> Tensor:
    return torch.tensor(value)


TYPES: dict[str, tuple[Callable[[int], list[Tensor]], list[Tensor], dict[str, Any]]] = {
    "adagrad": (lambda s: [drawn(s, ROWS, WIDTH).abs()], [number(-0.1)], {"epsilon": 1e-3}),
    "adagrad by rows": (lambda s: [drawn(s, ROWS).abs()], [number(-0.1)], {"by_rows": True}),
    "adam": (lambda s: [drawn(s, ROWS, WIDTH), drawn(s, ROWS, WIDTH).abs()], [number(-0.1), number(0.5)], {}),
    "adam by rows": (
        lambda s: [drawn(s, ROWS, WIDTH), drawn(s, ROWS).abs()],
        [number(-0.1), number(0.5)],
        {"by_rows": True, "adapted": True},
    ),
    "momentum_sgd": (lambda s: [drawn(s, ROWS, WIDTH)], [number(0.1)], {"momentum": 0.9, "nesterov": True}),
    "ftrl": (lambda s: [drawn(s, ROWS, WIDTH, 2).abs()], [number(10.0)], {"lambda1": 0.5}),
    "adadelta": (lambda s: [drawn(s, ROWS, WIDTH).abs(), drawn(s + 1, ROWS, WIDTH).abs()], [number(-0.1)], {}),
    "storm": (lambda s: [drawn(s, ROWS, WIDTH)], [number(-0.1), number(0.8)], {}),
}
"""By name, what makes the state, the other operands, and the options."""


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("seed", range(8))
def test_slots_come_one_after_the_other(name: str, seed: int) -> None:
    begin, rest, options = TYPES[name]
    kernel = OWN_KERNELS[f"graphir.caffe2_sparse_{name.split(maxsplit=1)[0]}"]
    count = (0, 1, 2, 7, 12, 12, 12, 12)[seed]
    indices = torch.randint(-1, ROWS - 1, (1, count), generator=torch.Generator().manual_seed(seed))
    values = drawn(seed + 50, count, WIDTH)
    together, apart = [[drawn(seed, ROWS, WIDTH), *begin(seed + 1)] for _ in range(2)]
    found = kernel(*together, indices, values, *rest, **options)
    given = [kernel(*apart, indices[:, k : k + 1], values[k : k + 1], *rest, **options) for k in range(count)]
    pairs = list(zip(together, apart, strict=True))
    if found is not None and count:
        pairs.append((found, torch.cat(given)))
    tolerance = 0.0 if name in ("momentum_sgd", "storm") else 2e-6
    for mine, theirs in pairs:
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)
    assert torch.equal(together[0][ROWS - 1], drawn(seed, ROWS, WIDTH)[ROWS - 1]), "nobody names the last row"


def test_what_an_empty_slot_returns_is_nothing() -> None:
    param, buffer, values = drawn(1, ROWS, WIDTH), drawn(2, ROWS, WIDTH), drawn(3, 2, WIDTH)
    kernel = OWN_KERNELS["graphir.caffe2_sparse_momentum_sgd"]
    step = kernel(param, buffer, torch.tensor([[-1, 2]]), values, number(0.1))
    assert not step[0].any() and step[1].any()


@pytest.mark.parametrize("index", [ROWS, -2, 2**40])
def test_an_index_of_no_row_changes_nothing(index: int) -> None:
    param, moment = drawn(1, ROWS, WIDTH), drawn(2, ROWS, WIDTH).abs()
    before = param.clone(), moment.clone()
    with pytest.raises(IndexError, match=f"the sparse index {index} is out of bounds for {ROWS} rows"):
        kernel = OWN_KERNELS["graphir.caffe2_sparse_adagrad"]
        kernel(param, moment, torch.tensor([[0, index]]), drawn(3, 2, WIDTH), number(0.1))
    assert torch.equal(param, before[0]) and torch.equal(moment, before[1])
