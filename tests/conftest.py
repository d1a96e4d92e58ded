"""What every test can use: ``import nets`` from anywhere, and golden texts."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# Read as torch is loaded. Several processes share the cores here: a thread of one that waits in a loop for the end of a
# kernel takes a core from the others, and tests of whole steps then take ten times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

TESTS = Path(__file__).resolve().parent
sys.path.insert(0, str(TESTS))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden; read the diff by eye")


def pytest_configure(config: pytest.Config) -> None:
    """GPUs are for ``-m cuda``: all other tests are of the host, and their processes see no GPU on any machine.

    Tests interrupt themselves, also where pytest runs in the background: a shell has that ignore SIGINT.
    """
    if config.getoption("markexpr") != "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # read by torch at the first question about devices
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked ``cuda`` are skipped where no CUDA device is seen."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and to be asked for by -m cuda"))


@pytest.fixture(autouse=True)
def _without_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Predictions are those of formulas, whatever this machine's profile has."""
    monkeypatch.setenv("GRAPHIR_PROFILE", "")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compare a text with ``tests/golden/<name>.txt``: ``golden("mlp.shifted", str(program))``."""

    def check(name: str, text: str) -> None:
        path = TESTS / "golden" / f"{name}.txt"
        text = text.rstrip("\n") + "\n"
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        if not path.is_file():
            pytest.fail(f"{path} does not exist; pytest --update-golden writes it")
        assert text == path.read_text(encoding="utf-8"), f"{path.name} differs; --update-golden rewrites it"

    return check


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Kernels run in one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def few_objects() -> Iterator[None]:
    """The collector lists what a module's tests make, and not what was there before: modules, the other tests.

    A capture that refuses, or reads a tensor from elsewhere, looks for caches among all objects. Those that test files
    define are not found here.
    """
    gc.freeze()
    yield
    gc.unfreeze()
