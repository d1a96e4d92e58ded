"""In-place calls whose operands share memory: kernels read what they have just written where views overlap in part."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from graphir.runtime import Session
from torch import Tensor, nn

from graphir import passes
from graphir.capturing.capture import capture
from graphir.capturing.record.operands import have_common_bytes
from graphir.errors import CaptureError
from graphir.ir.geometry import geometry_of


class Written(nn.Module):
    """A function of a buffer and of an activation, which overwrites one of them."""

    def __init__(self, body: Callable[[Tensor, Tensor], object]) -> None:
        super().__init__()
        self.body = body
        self.register_buffer("q", torch.arange(16.0).reshape(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        self.body(self.q, y)
        return y @ self.q


def shifted(q: Tensor, y: Tensor) -> None:
    q[:, 1:] = q[:, :-1]


def shifted_rows(q: Tensor, y: Tensor) -> None:
    q[1:] = q[:-1]


def summed(q: Tensor, y: Tensor) -> None:
    y[:, 1:].add_(y[:, :-1])


def transposed(q: Tensor, y: Tensor) -> None:
    q.add_(q.t())


def transposed_view(q: Tensor, y: Tensor) -> None:
    q[:3, :3].mul_(q[:3, :3].t())


def broadcast(q: Tensor, y: Tensor) -> None:
    y.sub_(y[:, :1])


def second_operand(q: Tensor, y: Tensor) -> None:
    y[:, 1:].addcmul_(torch.ones(3), y[:, :-1])


@pytest.mark.parametrize(
    "body", [shifted, shifted_rows, summed, transposed, transposed_view, broadcast, second_operand]
)
def test_an_operand_that_shares_a_part_of_what_is_overwritten_is_refused(
    body: Callable[[Tensor, Tensor], object],
) -> None:
    line = body.__code__.co_firstlineno + 1
    with pytest.raises(CaptureError, match="overlaps this view in memory") as error:
        capture(Written(body), (torch.ones(5, 4),))
    assert error.value.where == f"the model, at {Path(__file__).name}:{line}"
    assert "clone() the operand that is read" in error.value.fix


def test_a_target_that_overlaps_itself_is_refused() -> None:
    """Torch itself refuses expanded ones only, and adds 1 to some elements of this one twice."""
    with pytest.raises(CaptureError, match=r"add_.*several elements of which share one address"):
        capture(Written(lambda q, y: y.unfold(1, 2, 1).add_(1)), (torch.ones(5, 4),))


@pytest.mark.parametrize(
    "body",
    [
        lambda q, y: y.add_(y),
        lambda q, y: q.add_(q),
        lambda q, y: y[:, 1:].add_(y[:, 1:]),
        lambda q, y: q[0].add_(q[1]),
        lambda q, y: q[:, 0].add_(q[:, 1]),
        lambda q, y: q[:, ::2].copy_(q[:, 1::2]),
        lambda q, y: q[:2, :2].add_(q[2:, 2:]),
        lambda q, y: q[:, :2].add_(q[:, 2:]),
        lambda q, y: q[:, 1:].copy_(q[:, :-1].clone()),
        lambda q, y: q[:, 4:].add_(q[:, :0]),
    ],
)
def test_the_same_view_and_views_apart_are_captured(body: Callable[[Tensor, Tensor], object]) -> None:
    model, x = Written(body), torch.randn(5, 4)
    program = capture(model, (x,))
    with Session(passes.emit(program), program.state) as session:
        for _ in range(2):
            assert torch.equal(session.step(x), model(x))


def touched(view: Tensor) -> set[int]:
    """The bytes of a view, one by one."""
    width = view.itemsize
    starts = [
        view.storage_offset() + sum(i * s for i, s in zip(index, view.stride(), strict=True))
        for index in itertools.product(*map(range, view.shape))
    ]
    return {start * width + byte for start in starts for byte in range(width)}


def test_common_bytes_are_those_that_counting_finds() -> None:
    draw = random.Random(0)
    answers = []
    for _ in range(3000):
        views = []
        for _ in range(2):
            dtype = draw.choice([torch.uint8, torch.float32, torch.complex64])
            shape = [draw.choice([0, 1, 2, 2, 3, 3, 4, 4]) for _ in range(draw.randrange(1, 4))]
            strides = [draw.choice([0, 1, 2, 3, 5, 8, 24]) for _ in shape]
            views.append(torch.zeros(256, dtype=dtype).as_strided(shape, strides, draw.randrange(16)))
        a, b = views
        answers.append(bool(touched(a) & touched(b)))
        assert have_common_bytes(geometry_of(a), geometry_of(b)) == answers[-1]
    assert 500 < sum(answers) < 2500


def test_large_views_are_told_apart_without_counting() -> None:
    x = torch.empty(2**14, 2**10, 2**10, device="meta")
    assert not have_common_bytes(geometry_of(x[..., 0]), geometry_of(x[..., 1]))
    assert not have_common_bytes(geometry_of(x[:, ::2]), geometry_of(x[:, 1::2]))
    assert have_common_bytes(geometry_of(x[:, 1:]), geometry_of(x[:, :-1]))


def test_what_would_take_long_to_find_out_counts_as_common() -> None:
    x = torch.empty(10**9, device="meta")
    a, b = x.as_strided((20000, 20000), (6, 10)), x.as_strided((20000, 20000), (14, 22), 1)
    assert have_common_bytes(geometry_of(a), geometry_of(b))
