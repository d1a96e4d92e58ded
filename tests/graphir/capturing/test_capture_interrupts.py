"""Ctrl-C while a step is recorded strikes where an operator is recorded, and leaves all as it was."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from graphir.capturing.capture import capture


@pytest.fixture(autouse=True)
def ctrl_c() -> Iterator[None]:
    """Python's own handler, whatever the runner of the tests has set."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Pressed(nn.Module):
    """Somebody presses Ctrl-C while it runs."""

    def __init__(self, press: Callable[[], object], last: bool = False) -> None:
        super().__init__()
        self.inner, self.press, self.last = nn.Linear(3, 2), press, last

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        self.press()
        return y if self.last else y.relu()


@pytest.mark.parametrize("last", [False, True], ids=["an operator follows", "none follows"])
def test_ctrl_c_strikes_at_the_next_operator(last: bool) -> None:
    gone_on: list[int] = []

    def press() -> None:
        signal.raise_signal(signal.SIGINT)
        gone_on.append(1)

    model = Pressed(press, last)
    weight, x = model.inner.weight, torch.randn(4, 3)
    with pytest.raises(KeyboardInterrupt):
        capture(model, (x,))
    assert gone_on == [1]
    assert model.inner.weight is weight
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    model.press = int
    assert len(capture(model, (x,)).step.ops) == 3 - last


def test_a_second_one_strikes_at_once() -> None:
    gone_on: list[int] = []

    def press() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        gone_on.append(1)

    with pytest.raises(KeyboardInterrupt):
        capture(Pressed(press), (torch.randn(4, 3),))
    assert gone_on == []


def test_a_handler_of_the_programs_own_stays() -> None:
    told: list[int] = []

    def handle(number: int, frame: object) -> None:
        told.append(number)

    signal.signal(signal.SIGINT, handle)
    capture(Pressed(lambda: signal.raise_signal(signal.SIGINT)), (torch.randn(4, 3),))
    assert told and set(told) == {signal.SIGINT}
    assert signal.getsignal(signal.SIGINT) is handle


_PRESSED_IN_AN_IMPORT = """
import os, signal, sys
import torch
import graphir

class Presses:
    def find_spec(self, name, path, target=None):
        if name == "sympy.series" and not pressed:
            pressed.append(name)
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)

def captured():
    try:
        graphir.capture(torch.nn.Linear(3, 2), (torch.ones(4, 3),))
    except KeyboardInterrupt:
        return "interrupted"
    return "captured"

# What a first capture imports is imported in each child anew.
for times in (1, 2):
    child = os.fork()
    if child == 0:
        break
    os.waitpid(child, 0)
else:
    sys.exit()

pressed = []
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Presses())
print(times, captured(), *pressed)
print(captured())
print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_what_torch_imports_for_the_first_capture_of_a_process_is_imported_whole() -> None:
    code, root = _PRESSED_IN_AN_IMPORT, Path(__file__).parents[3]
    ran = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=120)
    assert ran.stdout.splitlines() == [
        *("1 interrupted sympy.series", "captured", "True"),
        *("2 interrupted sympy.series", "captured", "True"),
    ], ran.stderr
