"""graphir demo: the main job, as a user runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import graphir
from graphir.demo.model import DigitsNet

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What a short demo prints into a pipe, and the folder that it wrote."""
    out = tmp_path_factory.mktemp("demo") / "made" / "here"
    command = [sys.executable, "-m", "graphir", "demo", "--epochs", "2", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return done.stdout, out


def test_it_says_that_every_check_held(demo: tuple[str, Path]) -> None:
    text, _ = demo
    assert "shifted plan = unshifted plan                 equal" in text
    assert "shifted plan = eager PyTorch, share by share  equal" in text
    assert "every check held" in text


def test_it_is_readable_in_a_pipe_of_100_columns(demo: tuple[str, Path]) -> None:
    text, out = demo
    assert "\x1b" not in text
    assert "\r" not in text
    assert max(len(line) for line in text.splitlines() if str(out)[:20] not in line) <= 100


def test_it_reports_loss_and_accuracy(demo: tuple[str, Path]) -> None:
    lines = [line for line in demo[0].splitlines() if "accuracy" in line]
    assert [line.split()[1] for line in lines] == ["1/2", "2/2"]
    assert float(lines[-1].split()[-1].rstrip("%")) > 80


def test_what_it_saved_can_be_read(demo: tuple[str, Path]) -> None:
    _, out = demo
    plan = graphir.load(out / "digits.plan.json")
    assert graphir.parse((out / "digits.plan.txt").read_text(encoding="utf-8")) == plan
    assert [str(device) for device in plan.devices] == ["gpu:0", "gpu:1", "gpu:2", "gpu:3", "cpu:0"]
    model = DigitsNet()
    model.load_state_dict(load_file(out / "digits.safetensors"))
    assert torch.isfinite(model(torch.rand(2, 1, 8, 8))).all()


def test_a_folder_that_cannot_be_made_is_said_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    command = [sys.executable, "-m", "graphir", "demo", "--epochs", "1", "--out", str(tmp_path / "file" / "x")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("graphir: ")
    assert "Traceback" not in done.stderr
