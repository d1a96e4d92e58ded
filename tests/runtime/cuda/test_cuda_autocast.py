"""Programs that were captured on the host for CUDA, on a GPU, against eager PyTorch's autocast there."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from graphir.runtime import Session
from torch import Tensor, nn

from graphir import passes
from graphir.capturing.capture import capture

pytestmark = pytest.mark.cuda


class Block(nn.Module):
    """A block of a transformer. Attention is written out: which kernel of it runs, nothing says beforehand."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.first(x)).chunk(3, -1)
        x = x + self.out(F.softmax(query @ key.transpose(1, 2) * 0.2, -1) @ value)
        return x + self.down(F.gelu(self.up(self.second(x))))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.blocks, self.head = nn.Embedding(50, 32), nn.Sequential(Block(), Block()), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.tokens(x)).mean(1))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norm(self.conv(x)))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 10))


def resnet() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), Residual(), Residual(), nn.Flatten(), nn.Linear(8 * 6 * 6, 10))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (mlp, lambda: torch.randn(16, 32)),
    "transformer": (Transformer, lambda: torch.randint(50, (16, 12))),
    "resnet": (resnet, lambda: torch.randn(16, 3, 8, 8)),
}


class Cast(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return F.cross_entropy(self.model(x), y)


@pytest.fixture(autouse=True)
def without_cudnn() -> Iterator[None]:
    """cuDNN's batch norm and convolutions are no operators of a program."""
    with torch.backends.cudnn.flags(enabled=False):
        yield


def example(name: str) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    make, data = MODELS[name]
    return Cast(make()), (data(), torch.randint(10, (16,)))


@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients_are_eager_s(name: str) -> None:
    model, batch = example(name)
    program = capture(model, batch, loss=lambda loss: loss)
    eager, placed = copy.deepcopy(model).cuda(), [tensor.cuda() for tensor in batch]
    loss = eager(*placed)
    loss.backward()
    with Session(passes.emit(program), program.state, binding="cuda") as session:
        assert torch.equal(session.step(*placed), loss)
        for key, gradient in session.gradients().items():
            assert torch.equal(gradient.cuda(), eager.get_parameter(key).grad), key


@pytest.mark.parametrize("name", MODELS)
def test_adamw_as_it_comes_trains_as_eager(name: str) -> None:
    model, batch = example(name)
    program = capture(model, batch, loss=lambda loss: loss, optimizer=torch.optim.AdamW(model.parameters()))
    assert {op.args["form"] for op in program.step.ops if op.phase == "update"} == {"foreach"}
    eager, placed = copy.deepcopy(model).cuda(), [tensor.cuda() for tensor in batch]
    optimizer = torch.optim.AdamW(eager.parameters())
    with Session(passes.emit(program), program.state, binding="cuda") as session:
        for _ in range(5):
            optimizer.zero_grad()
            loss = eager(*placed)
            loss.backward()
            optimizer.step()
            assert torch.equal(session.step(*placed), loss.detach())
        state = session.state_dict()
    for key, tensor in eager.state_dict().items():
        assert torch.equal(state[key].cuda(), tensor), key
