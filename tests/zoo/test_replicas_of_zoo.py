"""Modules of public libraries in parallel: as the module run on each share, bit for bit.

Where each row's result depends on no other row, also as the module run on the whole batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from zoo_rows import Row
from zoo_text import TEXT
from zoo_timm import TIMM
from zoo_vision import VISION

import graphir

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS: dict[str, Row] = {**VISION, **TIMM, **TEXT}

PICTURES = ["densenet", "resnet", "vision transformer", "timm levit_128s"]
IN_EVALUATION = ["resnet", "swin", "timm levit_128s"]
"""Modules with batch norms, layer norms, attention, shifted windows, and what is made once for evaluation."""

TEXTS = ["gpt2", "llama tied", "mixtral", "lstm"]
"""Modules with shared weights, checkpoints, routed rows, and a recurrent net."""


def made(row: Row) -> nn.Module:
    torch.manual_seed(0)
    return row.model().train()


def tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def total(output: Any) -> Tensor:
    return sum(((t.float() - 0.5).square().sum() for t in tensors(output) if t.requires_grad), torch.zeros(()))


def slopes(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None and p.grad.any()}


def shares_of(batch: Any, n: int) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    args, kwargs = graphir.parallel.scatter_kwargs(batch.inputs, batch.kwargs, [torch.device("cpu")] * n)
    return list(zip(args, kwargs, strict=True))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*PICTURES, *TEXTS])
def test_it_is_the_module_on_each_share(name: str) -> None:
    row = ROWS[name]
    module = made(row)
    plain = [copy.deepcopy(module) for _ in range(2)]
    torch.manual_seed(1)
    batch = row.data(5)
    torch.manual_seed(2)
    output = graphir.DataParallel(module, [0, 1])(*batch.inputs, **batch.kwargs)
    total(output).backward()

    torch.manual_seed(2)
    step = int(torch.randint(2**62, ()))
    outputs = []
    for replica, (share, one) in enumerate(zip(shares_of(batch, 2), plain, strict=True)):
        with graphir.seeded(step, replica):
            outputs.append(one(*share[0], **share[1]))
    gathered = graphir.parallel.gather(outputs, torch.device("cpu"))
    total(gathered).backward()

    assert type(output) is type(gathered)
    for ours, theirs in zip(tensors(output), tensors(gathered), strict=True):
        assert torch.equal(ours, theirs)
    wanted = [slopes(one) for one in plain]
    found = slopes(module)
    assert found.keys() == wanted[0].keys() | wanted[1].keys()
    for key, slope in found.items():
        parts = [one[key] for one in wanted if key in one]
        assert torch.equal(slope, sum(parts[1:], parts[0])), key
    for ours, theirs in zip(module.buffers(), plain[0].buffers(), strict=True):
        assert torch.equal(ours, theirs)


def whole(make: Callable[[], nn.Module], batch: Any) -> None:
    module = make().double().eval()
    plain = copy.deepcopy(module)
    inputs = [t.double() if t.is_floating_point() else t for t in batch.inputs]
    output = graphir.DataParallel(module, [0, 1])(*inputs)
    expected = plain(*inputs)
    for ours, theirs in zip(tensors(output), tensors(expected), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    total(output).backward()
    total(expected).backward()
    found, wanted = slopes(module), slopes(plain)
    largest = max(float(slope.abs().max()) for slope in wanted.values())
    for key, slope in wanted.items():
        torch.testing.assert_close(found[key], slope, rtol=1e-6, atol=1e-9 * largest)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", IN_EVALUATION)
def test_in_evaluation_it_is_the_module_on_the_whole_batch(name: str) -> None:
    row = ROWS[name]
    torch.manual_seed(1)
    batch = row.data(5)
    whole(lambda: made(row), batch)
