"""Where an installed library's line is refused, the remedy is none that edits it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from graphir.passes import emit
from graphir.runtime import Session
from torch import Tensor, nn

from graphir.capturing.capture import capture
from graphir.errors import CaptureError

SOURCE = """
import random
import torch
from torch import nn

class Checks(nn.Module):
    def forward(self, x):
        if x.max() > 100:
            raise ValueError("too large")
        return x

class Shows(nn.Module):
    def forward(self, x):
        return x * float(f"{x.sum()}")

class Selects(nn.Module):
    def forward(self, x):
        return x[x > 0].sum()

class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layerdrop = 0.1

    def forward(self, x):
        dropout_probability = torch.rand([])
        return x if dropout_probability < self.layerdrop else 2 * x

class RandomEncoder(Encoder):
    def forward(self, x):
        return x if random.random() < self.layerdrop else 2 * x

class Counts(nn.Module):
    calls = 0
    def forward(self, x):
        self.calls += 1
        return x
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    installed = tmp_path / "site-packages"
    (installed / "strangers").mkdir(parents=True)
    (installed / "strangers" / "__init__.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(installed))
    yield importlib.import_module("strangers")
    del sys.modules["strangers"]


def refused(model: nn.Module) -> CaptureError:
    with pytest.raises(CaptureError) as error:
        capture(nn.Sequential(model), (torch.randn(4, 3),))
    return error.value


@pytest.mark.parametrize("name", ["Checks", "Shows", "Selects"])
def test_what_avoids_the_line_is_named(library: ModuleType, name: str) -> None:
    error = refused(getattr(library, name)())
    fix = error.fix
    assert "strangers/__init__.py:" in error.where
    assert fix.startswith("this line belongs to strangers")
    assert all(
        words in fix for words in ("pass loss=, and no labels", "configuration", "DataParallel and the loss out")
    )


@pytest.mark.parametrize("name", ["Encoder", "RandomEncoder"])
def test_the_switch_of_layer_drop_is_named(library: ModuleType, name: str) -> None:
    fix = refused(getattr(library, name)()).fix
    assert all(
        words in fix
        for words in ("layerdrop=0.0", "encoder_layerdrop=0.0", "set the attribute layerdrop", "DataParallel")
    )


def test_remedies_that_edit_nothing_stay(library: ModuleType) -> None:
    assert "allow_changes=('0.calls',)" in refused(library.Counts()).fix


def test_a_line_of_ones_own_is_told_how_to_write_it() -> None:
    class Own(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * x.max().item()

    with pytest.raises(CaptureError, match=r"fix  compute with the tensor instead of its number"):
        capture(Own(), (torch.randn(4, 3),))


def test_torchs_own_lines_are_a_librarys_too() -> None:
    with pytest.raises(CaptureError, match="this line belongs to torch"):
        capture(nn.AdaptiveLogSoftmaxWithLoss(4, 6, [2]), (torch.randn(5, 4), torch.tensor([0, 1, 2, 3, 5])))


class WithoutTheKernel(nn.Module):
    """What the remedy says."""

    def __init__(self, lstm: nn.LSTM) -> None:
        super().__init__()
        self.lstm = lstm

    def forward(self, x: Tensor) -> Tensor:
        with torch.backends.mkldnn.flags(enabled=False):
            output: Tensor = self.lstm(x)[0]
        return output


def test_an_lstm_that_torch_calls_has_the_remedy_of_one_that_the_user_calls() -> None:
    model, x = nn.Sequential(nn.LSTM(4, 4)), torch.randn(2, 3, 4)
    with pytest.raises(CaptureError, match="fused CPU kernel of LSTM") as refused:
        capture(model, (x,))
    assert "in a forward of your own" in refused.value.fix and "mkldnn.flags(enabled=False)" in refused.value.fix
    wrapped = WithoutTheKernel(nn.LSTM(4, 4))
    program = capture(wrapped, (x,))
    with Session(emit(program), program.state) as session:
        assert torch.equal(session.step(x), wrapped(x))
