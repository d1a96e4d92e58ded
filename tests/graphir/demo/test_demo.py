"""graphir demo: the main job, as a user runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import graphir
from graphir import runtime
from graphir.demo.digits import load_digits
from graphir.demo.model import DigitsNet
from graphir.facade.cli import main

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What a short demo prints into a pipe that takes no Unicode, and the folder that it wrote."""
    out = tmp_path_factory.mktemp("demo") / "made [/b]" / "here"
    command = [sys.executable, "-m", "graphir", "demo", "--epochs", "2", "--out", str(out)]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "LC_ALL": "C"}
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, encoding="ascii", env=environment, timeout=300, check=False
    )
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


def test_it_says_whole_where_it_saved(demo: tuple[str, Path]) -> None:
    text, out = demo
    assert [line.split("  ")[-1].strip() for line in text.splitlines() if "made" in line] == [
        str(out / name) for name in ("digits.plan.json", "digits.plan.txt", "digits.json", "digits.json.safetensors")
    ]


def test_it_reports_loss_and_accuracy(demo: tuple[str, Path]) -> None:
    lines = [line for line in demo[0].splitlines() if "test accuracy" in line]
    assert [line.split()[1] for line in lines] == ["1/2", "2/2"]
    assert float(lines[-1].split()[-1].rstrip("%")) > 80


def test_training_goes_on_from_what_it_saved(demo: tuple[str, Path]) -> None:
    _, out = demo
    plan = graphir.load(out / "digits.plan.json")
    assert graphir.parse((out / "digits.plan.txt").read_text(encoding="utf-8")) == plan
    assert [str(device) for device in plan.devices] == ["gpu:0", "gpu:1", "gpu:2", "gpu:3", "cpu:0"]
    program = graphir.load(out / "digits.json")
    assert program.state["step"] == 48
    model = DigitsNet()
    with runtime.Session(plan, program.state) as session:
        model.load_state_dict(session.state_dict())
        images, labels = load_digits()
        assert session.step(images[:64], labels[:64]) < 1
    right = model.eval()(images).argmax(1) == labels
    assert right.float().mean() > 0.8


def run(monkeypatch: pytest.MonkeyPatch, *options: str | Path) -> int:
    """What ``graphir demo`` ends with, in this process."""
    monkeypatch.setattr(sys, "argv", ["graphir", "demo", *map(str, options)])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_bad_options_are_refused_in_one_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--seed", "99999999999999999999") == 2
    errors = capsys.readouterr().err
    assert "--seed" in errors
    assert "Traceback" not in errors


def test_a_folder_that_cannot_be_made_is_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert run(monkeypatch, "--epochs", "1", "--out", tmp_path / "file" / "x") == 1
    errors = capsys.readouterr().err
    assert errors.startswith("graphir: ") and errors.count("\n") == 1
