"""A parameter that the forward itself overwrites is trained like any other, from its latest value."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from direct import matches_eager
from eager import ShareByShare, assert_same_bits
from graphir.runtime.options import ExecutorName
from models import Example
from torch import Tensor, nn

from graphir import passes, runtime
from graphir.capturing.capture import capture
from graphir.ir.program import Program
from graphir.ir.verify import verify


class Written(nn.Module):
    """A linear layer, ``h``, whose weight *write* may change before or after it is used."""

    def __init__(self, write: Callable[[nn.Linear, Tensor], Tensor]) -> None:
        super().__init__()
        self.h = nn.Linear(6, 8)
        self.out = nn.Linear(8, 3)
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.write(self.h, x))


class Words(nn.Module):
    """Word vectors whose norm the forward bounds."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 6, max_norm=1.0)
        self.out = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.words(x).sum(1))


def clamped(h: nn.Linear, x: Tensor) -> Tensor:
    with torch.no_grad():
        h.weight.clamp_(-0.2, 0.2)
    return h(x)


def scaled(h: nn.Linear, x: Tensor) -> Tensor:
    h.weight.data.mul_(0.9)
    return h(x)


def row_cleared(h: nn.Linear, x: Tensor) -> Tensor:
    with torch.no_grad():
        h.weight[1].zero_()
    return h(x)


def used_before_and_after(h: nn.Linear, x: Tensor) -> Tensor:
    before = x.sum() + h.bias
    with torch.no_grad():
        h.bias.mul_(0.5).add_(1)
    return before * h(x)


def written_afterwards(h: nn.Linear, x: Tensor) -> Tensor:
    out = x @ h.weight.t().clone() + h.bias
    with torch.no_grad():
        h.bias.clamp_(-0.01, 0.01)
    return out


def loss(y: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(y, target)


def momentum(params: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=1e-3)  # type: ignore[arg-type]


def trained(example: Example) -> Program:
    optimizer = momentum(example.model.parameters())
    return capture(example.model, example.inputs, targets=example.targets, loss=example.loss, optimizer=optimizer)


def written(write: Callable[[nn.Linear, Tensor], Tensor]) -> Example:
    torch.manual_seed(0)
    return Example(Written(write), (torch.randn(4, 6),), (torch.randint(3, (4,)),), loss)


WRITES = [clamped, scaled, row_cleared, used_before_and_after, written_afterwards]


@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_training_has_the_bits_of_eager(write: Callable[[nn.Linear, Tensor], Tensor]) -> None:
    example = written(write)
    program = trained(example)
    verify(program)
    assert set(program.interface.optimizer_state) == {name for name, _ in example.model.named_parameters()}
    matches_eager(program, example, momentum, batches=(6,), steps=3)


def test_an_embedding_with_bounded_norm_has_the_bits_of_eager() -> None:
    torch.manual_seed(0)
    example = Example(Words(), (torch.randint(7, (4, 2)),), (torch.randint(3, (4,)),), loss)
    with torch.no_grad():
        example.model.words.weight.mul_(5)
    program = trained(example)
    verify(program)
    assert "words.weight" in program.interface.optimizer_state
    matches_eager(program, example, momentum, batches=(6,), steps=3)


def test_the_update_follows_the_last_version() -> None:
    program = trained(written(used_before_and_after))
    (update,) = [op for op in program.step.ops if op.phase == "update" and op.inputs[0] == "h.bias"]
    assert update.input_versions is not None and update.input_versions[0] == 2
    assert update.output_versions is not None and update.output_versions[0] == 3


def test_the_gradient_is_an_output_without_an_optimizer() -> None:
    example = written(clamped)
    program = capture(example.model, example.inputs, targets=example.targets, loss=example.loss)
    outputs = [name for name in program.step.external_outputs if name.endswith("_grad")]
    assert sorted(outputs) == ["h.bias_grad", "h.weight_grad", "out.bias_grad", "out.weight_grad"]


def words() -> Example:
    """Rows 0 to 6 with norms far above the bound; each share of a batch reads, and so bounds, others of them."""
    torch.manual_seed(0)
    example = Example(Words(), (torch.randint(7, (6, 2)),), (torch.randint(3, (6,)),), loss)
    with torch.no_grad():
        example.model.words.weight.mul_(5)
    return example


@pytest.mark.parametrize("executor", ["reference", "threads"])
@pytest.mark.parametrize("make", [words, *[partial(written, write) for write in WRITES]])
def test_each_replica_overwrites_its_own(make: Callable[[], Example], executor: ExecutorName) -> None:
    example = make()
    program = passes.replicate(trained(example), devices=[0, 1])
    eager = ShareByShare(example.model, loss, lambda model: momentum(model.parameters()), replicas=2)
    plan, state = passes.emit(program), program.state
    for _ in range(3):
        with runtime.Session(plan, state, executor=executor) as session:
            session.step(*example.inputs, *example.targets)
            eager.step(*example.inputs, *example.targets)
            for replica, model in enumerate(eager.models):
                assert_same_bits(session.state_dict(replica), dict(model.state_dict()), f"replica {replica}")
            state = session.state()
