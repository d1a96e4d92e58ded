"""Random nets that ask about sizes: at each size a session refuses, or has the bits of eager PyTorch."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from graphir.runtime import Session
from torch import Tensor, nn

import graphir
from graphir import CoverageError, capture, passes
from graphir.ir.covers import Covers
from graphir.ir.guard import parse_guard
from graphir.ir.program import Program

Part = Callable[[Tensor, Any, Any], Tensor]
"""What a net does to a tensor, given two of its sizes."""


def pad(x: Tensor, to: int) -> Tensor:
    missing = -x.shape[1] % to
    return nn.functional.pad(x, (0, 0, 0, missing)) if missing else x


def comparison(rng: random.Random) -> Part:
    a, b, c, most = rng.randint(-2, 3), rng.randint(-1, 2), rng.randint(-4, 4), rng.randint(2, 40)
    return lambda x, n, m: x.tanh() if a * n + b * m + c > most else x.sigmoid()


def remainder(rng: random.Random) -> Part:
    c, k, r = rng.randint(-3, 5), rng.randint(2, 9), rng.randint(0, 4)
    return rng.choice(
        [
            lambda x, n, m: x.tanh() if (n + c) % k == r else x.sigmoid(),
            lambda x, n, m: x.tanh() if (n * m - c) % k else x.sigmoid(),
            lambda x, n, m: x * (n % k),
            lambda x, n, m: x + (m - m % k),
            lambda x, n, m: x / (1 + (n + c) % k),
            lambda x, n, m: pad(x, k).mean(1, keepdim=True) + x,
        ]
    )


def quotient(rng: random.Random) -> Part:
    c, k, most = rng.randint(-3, 5), rng.randint(2, 9), rng.randint(0, 4)
    return rng.choice(
        [
            lambda x, n, m: x.tanh() if (n + c) // k > most else x.sigmoid(),
            lambda x, n, m: x * (n // k),
            lambda x, n, m: x + m // k * k,
            lambda x, n, m: x.tanh() if n % k == 0 and n // k > most else x.sigmoid(),
            lambda x, n, m: x.tanh() if n / k > most else x.sigmoid(),
            lambda x, n, m: x + n * m // n,
        ]
    )


def bounded(rng: random.Random) -> Part:
    k = rng.randint(2, 20)
    return rng.choice(
        [
            lambda x, n, m: x / max(n, k),
            lambda x, n, m: x / max(k, n),
            lambda x, n, m: x * min(m, k),
            lambda x, n, m: x + max(n, m, k),
            lambda x, n, m: x[:, :k].mean(1, keepdim=True) + x,
            lambda x, n, m: sum(part.mean() for part in x.split(k)) + x,
            lambda x, n, m: x.tanh() if n > k and n != k + 4 else x.sigmoid() if n == k - 1 else x.tanh(),
        ]
    )


def table(rng: random.Random) -> Part:
    """Numbers by sizes: no guard sees which one is taken."""
    numbers = [rng.randint(1, 2) for _ in range(100)]
    some = dict.fromkeys(rng.sample(range(40), 8), 2)
    k = rng.randint(2, 9)
    return rng.choice(
        [
            lambda x, n, m: x * numbers[n],
            lambda x, n, m: x * numbers[m % k],
            lambda x, n, m: x * some.get(n, 1),
            lambda x, n, m: x.tanh() if int(n) > 3 * k else x.sigmoid(),
        ]
    )


SEEN: Final = (comparison, remainder, quotient, bounded)


class Net(nn.Module):
    def __init__(self, rng: random.Random, kinds: tuple[Callable[[random.Random], Part], ...]) -> None:
        super().__init__()
        self.parts = [rng.choice(kinds)(rng) for _ in range(rng.randint(1, 3))]

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x, x.shape[0], x.shape[1])
        return x


def captured(seed: int, *kinds: Callable[[random.Random], Part]) -> tuple[Net, Program]:
    rng = random.Random(seed)
    net = Net(rng, kinds)
    x = torch.randn(rng.randint(1, 24), rng.randint(1, 24), 2)
    return net, capture(net, (x,), batch_dims={0: "batch", 1: "length"} if seed % 2 else 0)


def sizes(program: Program, seed: int) -> list[tuple[int, int]]:
    """Sizes to run: of what is fixed, the captured one alone."""
    shape = program.step.blobs["x"].shape
    assert shape is not None
    follow = [not isinstance(size, int) for size in shape[:2]]
    rng, captured = (
        random.Random(seed),
        [program.dims.get(d, size) for d, size in zip(("batch", "length"), shape[:2], strict=True)],
    )
    found = [(n, captured[1]) for n in range(1, 45)] if follow[0] else []
    found += [(captured[0], m) for m in range(1, 45)] if follow[1] else []
    return found + [(rng.randint(1, 44), rng.randint(1, 44)) for _ in range(20)] if all(follow) else found


def runs(session: Session, net: Net, program: Program, seed: int) -> list[bool]:
    """At which of the sizes it runs; asserts that it has the bits of eager PyTorch there."""
    found = []
    for n, m in sizes(program, seed):
        x = torch.randn(n, m, 2)
        try:
            result = session.step(x)
        except CoverageError:
            found.append(False)
        else:
            assert torch.equal(result, net(x)), (seed, n, m, str(program.covers))
            found.append(True)
    return found


@pytest.mark.parametrize("seeds", [range(start, start + 20) for start in range(0, 60, 20)], ids=str)
def test_a_plan_from_a_file_refuses_or_has_the_bits_of_eager(seeds: range, tmp_path: Path) -> None:
    ran = []
    for seed in seeds:
        net, program = captured(seed, *SEEN)
        program.save(tmp_path / "p.json", state=True)
        loaded = graphir.load(tmp_path / "p.json")
        assert isinstance(loaded, Program)
        with Session(passes.emit(loaded), loaded.state, executor="reference") as session:
            ran += runs(session, net, loaded, seed)
    assert any(ran) and not all(ran)


@pytest.mark.parametrize("seeds", [range(start, start + 5) for start in range(0, 10, 5)], ids=str)
def test_a_session_with_a_witness_refuses_or_has_the_bits_of_eager(seeds: range) -> None:
    """Whatever Python makes of sizes, tables of plain numbers too."""
    ran = []
    for seed in seeds:
        net, program = captured(seed, *SEEN, table)
        with Session(passes.emit(program), program.state, executor="reference", witness=program) as session:
            ran += runs(session, net, program, seed)
    assert any(ran) and not all(ran)


def test_covers_says_what_it_covers() -> None:
    guards = (parse_guard("batch<=8", "a test"), parse_guard("length%4==0", "another"))
    assert str(Covers()) == "all sizes"
    assert str(Covers(fixed="a view")) == "fixed: a view"
    assert str(Covers(guards, recorded=({"batch": 9, "length": 8},))) == (
        "batch<=8 (a test)\nlength%4==0 (another)\nand recorded: batch 9, length 8"
    )
    many = tuple([{"batch": n} for n in range(1, 8)])
    assert str(Covers(only="a test", recorded=many)) == (
        "recorded sizes alone: batch 1; batch 2; batch 3; batch 4; 3 more\na test"
    )


def test_a_size_is_covered_where_each_replica_has_a_recorded_one() -> None:
    covers = Covers(only="a test", recorded=({"batch": 2, "length": 8}, {"batch": 3, "length": 8}))
    assert not covers.unknown({"gpu_0/batch": 3, "gpu_0/length": 8, "gpu_1/batch": 2, "gpu_1/length": 8})
    assert covers.unknown({"gpu_0/batch": 3, "gpu_0/length": 8, "gpu_1/batch": 1, "gpu_1/length": 8})
    assert covers.unknown({"batch": 2, "length": 9})
    guarded = Covers((parse_guard("batch>=2", "a test"),), recorded=({"batch": 1},))
    assert guarded.broken({"batch": 1}) is None and guarded.broken({"batch": 0}) == guarded.guards[0]
