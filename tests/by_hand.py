"""Programs of a few blocks in a row, and the plans that a person writes for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from random import Random
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphir
from graphir import Program, passes
from graphir.errors import PassError

__all__ = ["KINDS", "Kind", "Where", "blocks", "every_placement", "held", "placed", "units", "unlike", "whats"]

Kind: TypeAlias = Literal["convolutional", "mlp", "transformer"]
KINDS: tuple[Kind, ...] = ("convolutional", "mlp", "transformer")


class Convolutions(nn.Module):
    def __init__(self, width: int = 8, hidden: int = 8) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, width)
        self.first, self.second = nn.Conv2d(width, hidden, 3, padding=1), nn.Conv2d(hidden, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.gelu(self.first(self.norm(x))))


class Attention(nn.Module):
    def __init__(self, width: int = 32, hidden: int = 128) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = [t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1)]
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Residual(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def blocks(kind: Kind, count: int, accumulate: int = 1) -> Program:
    """A training step of so many equal blocks in a row."""
    with torch.device("meta"):
        if kind == "convolutional":
            ends = nn.Conv2d(3, 8, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
            model = nn.Sequential(ends[0], *[Convolutions() for _ in range(count)], *ends[1:])
            x, y = torch.empty(32, 3, 32, 32), torch.empty(32, 4)
        elif kind == "mlp":
            layers = [nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32), nn.GELU()) for _ in range(count)]
            model, x, y = nn.Sequential(*layers), torch.empty(1024, 32), torch.empty(1024, 32)
        else:
            model = nn.Sequential(*[Attention() for _ in range(count)])
            x, y = torch.empty(16, 64, 32), torch.empty(16, 64, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return graphir.capture(model, (x,), targets=(y,), loss=F.mse_loss, optimizer=optimizer, accumulate=accumulate)


def whats(program: Program) -> Iterator[str]:
    """What a person may recompute of a model that is a row: each run of its parts, and each module inside of a part, by
    the name that its result may have as well. Of more than 8 parts, which are alike, runs that begin at the first or
    second one or end at the last one, and modules of the first and the last parts."""
    parts = sum("." not in path and path.isdecimal() for path in program.module_paths)
    runs = [(i, j) for i in range(parts) for j in range(i + 1, parts + 1) if parts <= 8 or i < 2 or j == parts]
    yield from [f"[{i}:{j}]" for i, j in runs]
    ends = {*range(8), parts - 2, parts - 1}
    yield from [path for path in program.module_paths if "." in path and int(path.partition(".")[0]) in ends]


class Where(NamedTuple):
    """What becomes of a unit: its device, and what is done with what it saves."""

    device: int
    saved: Literal["kept", "parked", "recomputed"]


def units(rng: Random, count: int, accumulate: int = 1) -> Program:
    """A training step of so many unlike blocks."""
    return unlike("mlp", rng, count, accumulate)


def unlike(kind: Kind, rng: Random, count: int, accumulate: int = 1) -> Program:
    """A training step of so many unlike blocks of one kind, large enough to keep an H200 busy."""
    width = rng.choice([64, 256, 1024])
    hidden = [rng.choice([width // 2, width, 2 * width, 4 * width]) for _ in range(count)]
    block = {"convolutional": Convolutions, "mlp": Residual, "transformer": Attention}[kind]
    with torch.device("meta"):
        model = nn.Sequential(*[block(width, size) for size in hidden])
        rows = rng.choice([1024, 4096])
        shape = {
            "convolutional": (64, width, 14, rows // 64),
            "mlp": (rows, width),
            "transformer": (16, rows // 8, width),
        }
        x = torch.empty(shape[kind])
    optimizer = rng.choice([torch.optim.SGD, torch.optim.Adam])(model.parameters(), lr=0.1)
    return graphir.capture(model, (x,), targets=(x,), loss=F.mse_loss, optimizer=optimizer, accumulate=accumulate)


def placed(program: Program, wheres: Sequence[Where]) -> Program | None:
    """A program of units with each where a person wants it; None where a pass refuses that."""
    moved = {f"[{i}]": 1 for i, where in enumerate(wheres) if where.device}
    again = [f"[{i}]" for i, where in enumerate(wheres) if where.saved == "recomputed"]
    try:
        found = passes.shift_modules(program, moved) if moved else program
        found = passes.recompute(found, again) if again else found
        for device in range(2):
            parked = [f"[{i}]" for i, where in enumerate(wheres) if where == (device, "parked")]
            found = passes.park(found, parked, f"gpu:{1 - device}") if parked else found
    except PassError:
        return None
    return found


def every_placement(program: Program, count: int) -> Iterator[Program]:
    """Every placement of so many units on two devices."""
    one = [Where(device, saved) for device in range(2) for saved in ("kept", "parked", "recomputed")]
    for wheres in product(one, repeat=count):
        if (found := placed(program, wheres)) is not None:
            yield found


def held(program: Program) -> Mapping[str, int]:
    """By gpu, what the plan of a placed program holds."""
    peaks = graphir.memory(passes.emit(passes.inject_copies(program)), threads=1, profile=None).peak
    return {device: nbytes for device, nbytes in peaks.items() if device.startswith("gpu")}
