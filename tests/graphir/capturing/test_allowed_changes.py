"""``allow_changes``: attributes that only keep books may change; a program has what they were at capture."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphir.capturing.capture import capture
from graphir.errors import CaptureError
from graphir.ir.program import Program


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.calls = 3
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(x.shape)
        self.latest = x
        return self.fc(x) * self.calls


ALL = ("calls", "seen", "latest")


def captured(model: nn.Module, names: Iterable[str]) -> Program:
    return capture(model, (torch.ones(3, 4),), loss=lambda out: out.sum(), allow_changes=names)


def test_an_allowed_attribute_has_its_value_at_capture_and_is_put_back() -> None:
    model = Counting()
    before = dict(vars(model))
    program = captured(model, ALL)
    assert vars(model) == before and model.calls == 3 and not model.seen
    (scaled,) = [op for op in program.step.ops if op.type == "aten.mul.Tensor" and op.phase == "forward"]
    assert scaled.args == {"other": 4} and not program.covers.fixed


def test_attributes_of_inner_modules_are_named_by_their_paths() -> None:
    captured(nn.Sequential(Counting()), [f"0.{name}" for name in ALL])


@pytest.mark.parametrize("missing", ALL)
def test_every_other_attribute_is_refused_by_name(missing: str) -> None:
    with pytest.raises(CaptureError, match=f"the attribute '{missing}'") as error:
        captured(nn.Sequential(Counting()), [f"0.{name}" for name in ALL if name != missing])
    assert f"pass allow_changes=('0.{missing}',)" in error.value.fix


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("0.cals", "'0.cals' is no attribute that the step could change; did you mean '0.calls'"),
        ("calls", "'calls' is no attribute that the step could change; did you mean '0.calls'"),
        ("1.calls", "'1.calls' is no attribute that the step could change; did you mean '0.calls'"),
        ("0.fc.weight", "'0.fc.weight' is no attribute that the step could change"),
    ],
)
def test_a_name_of_nothing_is_refused_as_a_slip(name: str, text: str) -> None:
    with pytest.raises(CaptureError, match=re.escape(text)) as error:
        captured(nn.Sequential(Counting()), [*(f"0.{known}" for known in ALL), name])
    assert "layers.0.counter" in error.value.fix


def test_one_name_is_no_tuple_of_letters() -> None:
    with pytest.raises(CaptureError, match=re.escape("allow_changes is a str, not a tuple")):
        captured(Counting(), "calls")
