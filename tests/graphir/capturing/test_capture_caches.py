"""A step that keeps tensors in a ``functools.cache``: they are neither baked in nor left there without data."""

from __future__ import annotations

import dataclasses
import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from eager import assert_same_bits
from torch import Tensor, nn

from graphir import passes, runtime
from graphir.capturing.capture import capture
from graphir.errors import CaptureError


def make_positions(length: int) -> Tensor:
    return torch.arange(length, dtype=torch.float32)


def make_waves(length: int, width: int) -> tuple[Tensor, dict[str, Tensor]]:
    angles = torch.arange(length)[:, None] / torch.arange(1.0, width + 1)
    return angles.sin(), {"cos": angles.cos()}


positions, waves = functools.cache(make_positions), functools.lru_cache(maxsize=2)(make_waves)


KEPT: dict[int, Tensor] = {}


def kept(length: int) -> Tensor:
    """A cache made by hand."""
    if length not in KEPT:
        KEPT[length] = torch.arange(length, dtype=torch.float32)
    return KEPT[length]


class Placed(nn.Module):
    """Adds to its features what *place* makes of the batch and of the number of features."""

    def __init__(self, place: Callable[[int], Any]) -> None:
        super().__init__()
        self.fc, self.place = nn.Linear(3, 4), place

    def forward(self, x: Tensor) -> Tensor:
        rows, columns = self.place(len(x)), self.place(4)
        return (self.fc(x) * columns + rows[:, None]).square().mean()


def counted(length: int) -> Tensor:
    return positions(length)


def sine(length: int) -> Tensor:
    first, others = waves(length, 4)
    return (first + others["cos"]).sum(1)


@pytest.fixture(autouse=True, scope="module")
def caches(few_objects: None) -> None:
    """The two caches are made anew, since a capture finds none that was there before ``few_objects``."""
    global positions, waves
    positions, waves = functools.cache(make_positions), functools.lru_cache(maxsize=2)(make_waves)


@pytest.fixture(autouse=True)
def nothing_cached() -> Iterator[None]:
    yield
    positions.cache_clear()
    waves.cache_clear()
    KEPT.clear()


@pytest.mark.parametrize("warm", [False, True], ids=["empty", "filled"])
@pytest.mark.parametrize("place", [counted, sine], ids=["positions", "sine"])
def test_what_a_cache_holds_is_computed_by_the_program(place: Callable[[int], Tensor], warm: bool) -> None:
    """Sizes follow the batch, whatever an eager step has left, and eager steps and captures go on as before."""
    torch.manual_seed(0)
    model = Placed(place)
    x = torch.randn(3, 3)
    if warm:
        model(x)
    program = capture(model, (x,), loss=lambda out: out)
    assert not program.covers.fixed
    assert not [blob for blob in program.step.blobs.values() if blob.role == "constant"]
    again = capture(model, (x,), loss=lambda out: out)
    assert [op.type for op in again.step.ops] == [op.type for op in program.step.ops]
    with runtime.Session(passes.emit(program), program.state) as session:
        for rows in (3, 7, 1, 4):
            x = torch.randn(rows, 3)
            assert_same_bits({"loss": session.step(x)}, {"loss": model(x).detach()}, f"{rows} rows")


def test_entries_of_others_stay() -> None:
    """Also in the caches that the step reads and fills, and the very tensors that it reads."""
    mine, own, other = positions(3), positions(4), positions(50)
    table, recent = functools.cache(torch.ones), functools.lru_cache(maxsize=2)(torch.zeros)
    elsewhere, lately = table(5), recent(5)
    for place in (counted, sine):
        capture(Placed(place), (torch.randn(3, 3),), loss=lambda out: out)
        assert positions(50) is other and positions(3) is mine and positions(4) is own
        assert table(5) is elsewhere and recent(5) is lately
    assert all(type(tensor) is Tensor for length in range(1, 12) for tensor in (positions(length), waves(length, 4)[0]))


def test_a_step_that_fails_leaves_nothing_in_a_cache() -> None:
    def failing(length: int) -> Tensor:
        return positions(length) * positions(length).add(torch.rand(length)).sum().item()

    with pytest.raises(CaptureError, match="reads a number out of a tensor"):
        capture(Placed(failing), (torch.randn(3, 3),), loss=lambda out: out)
    assert type(positions(3)) is Tensor


def test_what_is_kept_by_hand_is_refused() -> None:
    for _ in range(2):
        with pytest.raises(
            CaptureError,
            match="an earlier recording of the step, in this capture or another, kept outside of the model",
        ) as error:
            capture(Placed(kept), (torch.randn(3, 3),), loss=lambda out: out)
        assert "test_capture_caches.py:" in error.value.where


def test_what_is_kept_by_hand_for_others_is_refused() -> None:
    def first(length: int) -> Tensor:
        made = torch.arange(length, dtype=torch.float32)
        KEPT.setdefault(0, made)
        return made

    with pytest.raises(CaptureError, match=r"keeps a result of aten\.arange\.default outside of") as error:
        capture(Placed(first), (torch.randn(3, 3),), loss=lambda out: out)
    assert error.value.where.startswith("test_capture_caches.py:")


HISTORY: list[Tensor] = []


@dataclasses.dataclass(slots=True)
class Slot:
    last: Tensor | None = None


@pytest.mark.parametrize("where", ["a list", "a slot"])
def test_a_result_that_is_kept_where_no_capture_looks_is_refused(where: str) -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.slot = Slot()

        def forward(self, x: Tensor) -> Tensor:
            y = x.exp()
            if where == "a list":
                HISTORY.append(y)
            else:
                self.slot.last = y
            return y * 2

    HISTORY.clear()
    with pytest.raises(CaptureError, match=r"keeps a result of aten\.exp\.default outside of") as error:
        capture(Keeps(), (torch.randn(3, 3),))
    assert "keep a result in an attribute of the module" in error.value.fix
    HISTORY.clear()


def test_the_collector_looks_through_young_objects_alone() -> None:
    seen: list[int] = []

    def look(phase: str, info: dict[str, int]) -> None:
        seen.append(info["generation"])

    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    gc.callbacks.append(look)
    try:
        capture(model, (torch.randn(3, 4),), loss=lambda y: y.square().mean())
    finally:
        gc.callbacks.remove(look)
    assert 2 not in seen
