"""``graphir show`` and ``graphir check``: what files hold, whether a plan is sound, errors that are no tracebacks."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import models
import pytest

import graphir
from graphir import passes, runtime
from graphir.facade import cli
from graphir.facade.cli import main
from graphir.ir.files import save

ROOT = Path(__file__).resolve().parents[2]

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs ``graphir …`` on what stands in standard input: the exit status, and what it prints."""

    def run(*arguments: str | Path, given: bytes = b"") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["graphir", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given)))
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        return int(ended.value.code or 0), printed.out, printed.err

    return run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of a program, its net and its plan."""
    made = tmp_path_factory.mktemp("files")
    example = models.mlp()
    program = graphir.capture(example.model, example.inputs, targets=example.targets, loss=example.loss)
    program.save(made / "program.json", state=True)
    passes.emit(program).save(made / "plan.json")
    return made


def test_it_prints_what_a_file_holds(run: Run, folder: Path) -> None:
    for name in ("program", "plan"):
        held = graphir.load(folder / f"{name}.json")
        assert run("show", folder / f"{name}.json") == (0, graphir.show(held) + "\n", "")


def test_it_prints_source_lines_on_request(run: Run, folder: Path) -> None:
    status, text, errors = run("show", folder / "plan.json", "--source")
    assert status == 0 and not errors
    assert text == graphir.show(graphir.load(folder / "plan.json"), source=True) + "\n"
    assert "# 384 B, models.py:" in text


def test_it_prints_json_and_reads_standard_input(run: Run, folder: Path) -> None:
    given = (folder / "program.json").read_bytes()
    status, text, errors = run("show", "-", "--json", given=given)
    assert status == 0 and not errors
    shown, whole = json.loads(text), json.loads(given)
    del whole["program"]["state"]
    assert shown == whole and text.startswith('{\n  "format"')


def test_a_closed_standard_input_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["graphir", "check", "-"])
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(SystemExit, match="1"):
        main()
    assert capsys.readouterr().err.startswith("graphir: standard input is closed\n  fix ")


def test_what_the_system_refuses_is_said_in_words(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(cli, "app", fail)
    assert run() == (1, "", f"graphir: {os.strerror(errno.ENOSPC)}\n")


def test_help_is_plain(run: Run) -> None:
    status, text, _ = run("--help")
    assert status == 0
    assert "  --version  Print the version.\n" in text and text.isascii()
    assert "  check     Prove that a plan runs right, or print what can go wrong.\n" in text
    assert "  estimate  Predict how long a step takes, and what it goes into.\n" in text
    assert "  profile   Measure what the operators of a step take on this machine.\n" in text
    assert "  traffic   Print what a step copies between devices, and why.\n" in text


@pytest.mark.parametrize(
    ("arguments", "given", "error"),
    [
        (("missing.json",), b"", "graphir: the file cannot be read: No such file or directory"),
        ((ROOT / "README.md",), b"", "graphir: the file is damaged"),
        (("-",), b"{", "standard input"),
        ((), b"", "Missing argument 'file'"),
    ],
)
def test_errors_are_told_without_a_traceback(run: Run, arguments: tuple[str, ...], given: bytes, error: str) -> None:
    status, text, errors = run("show", *arguments, given=given)
    assert status != 0 and not text
    assert error in errors and "Traceback" not in errors


def test_a_reader_that_has_seen_enough_is_no_error(folder: Path) -> None:
    command = f"{sys.executable} -m graphir show {folder / 'program.json'} --json | head -n 1"
    done = subprocess.run(command, cwd=ROOT, shell=True, capture_output=True, timeout=300, check=False)
    assert done.stdout == b"{\n" and not done.stderr


def test_it_checks_a_plan(run: Run, folder: Path, tmp_path: Path) -> None:
    plan = graphir.load(folder / "plan.json")
    assert run("check", folder / "plan.json") == (0, f"plan {plan.name!r} is sound\n", "")
    assert run("check", "-", "--json", given=(folder / "plan.json").read_bytes()) == (0, "[]\n", "")
    frees = [i for i, instruction in enumerate(plan.instructions) if instruction.kind == "free"]
    leaking = plan.with_(instructions=plan.instructions[: frees[0]] + plan.instructions[frees[0] + 1 :])
    leaking.save(tmp_path / "leaking.json")
    (finding,) = runtime.check(leaking)
    assert run("check", tmp_path / "leaking.json") == (1, f"{finding}\n", "")
    status, text, errors = run("check", tmp_path / "leaking.json", "--json")
    assert (status, json.loads(text), errors) == (1, [finding.to_json()], "")


def test_it_checks_plans_only(run: Run, folder: Path) -> None:
    status, text, errors = run("check", folder / "program.json")
    assert (status, text) == (1, "")
    assert errors.startswith("graphir: check takes a plan, not a program\n")


def test_it_prints_the_traffic_of_a_program_and_of_a_plan(run: Run, folder: Path, tmp_path: Path) -> None:
    program = passes.shift_activations(graphir.load(folder / "program.json"), ["relu"], shifts={0: 1})
    program.save(tmp_path / "shifted.json")
    status, text, errors = run("traffic", tmp_path / "shifted.json")
    assert (status, text) == (1, "") and errors.startswith("graphir: ") and "have no copies yet" in errors
    placed = passes.inject_copies(program)
    found = graphir.traffic(placed)
    assert found.copies
    placed.save(tmp_path / "placed.json")
    passes.emit(placed).save(tmp_path / "plan.json")
    for name in ("placed", "plan"):
        assert run("traffic", tmp_path / f"{name}.json") == (0, f"{found}\n", "")
        assert run("traffic", tmp_path / f"{name}.json", "--json") == (0, f"{found.to_json()}\n", "")


def test_profile_measures_and_predicts(run: Run, tmp_path: Path) -> None:
    example = models.mlp(batch=2, features=4, hidden=4)
    program = graphir.capture(example.model, inputs=example.inputs)
    program.save(tmp_path / "mlp.json")
    path = tmp_path / "profile.json"
    status, text, _ = run("profile", tmp_path / "mlp.json", "--path", path, "--threads", "1")
    calls = len(graphir.Profile.load(path).calls)
    assert status == 0 and text.startswith(f"profile of {calls} calls on ")
    assert "memory of 'mlp'" in text and f"scratch of {calls} operators: {calls} measured" in text
    status, text, _ = run("profile", tmp_path / "mlp.json", "--path", path, "--threads", "1", "--json")
    found = json.loads(text)
    assert (found["calls"], found["failed"], found["sources"]["measured"]) == (calls, {}, calls)
    assert found["peak"] == graphir.memory(program, threads=1).peak


def test_profile_wants_a_program_or_a_plan(run: Run, tmp_path: Path) -> None:
    example = models.mlp(batch=2, features=4, hidden=4)
    save(graphir.capture(example.model, inputs=example.inputs).step, tmp_path / "net.json")
    status, _, error = run("profile", tmp_path / "net.json")
    assert status == 1 and error.startswith("graphir: profile takes a program or a plan, not a net")


def test_estimate_predicts(run: Run, tmp_path: Path) -> None:
    example = models.mlp(batch=2, features=4, hidden=4)
    program = graphir.capture(example.model, inputs=example.inputs)
    plan = passes.emit(passes.replicate(program, [0, 1]))
    plan.save(tmp_path / "plan.json")
    status, text, _ = run("estimate", tmp_path / "plan.json", "--topology", "a100x8")
    assert status == 0 and text.startswith("on a100x8, by its makers' figures:\nestimate of 'mlp': ")
    graphir.Topology.named("a100x8").save(tmp_path / "machine.json")
    status, text, _ = run("estimate", tmp_path / "plan.json", "--topology", tmp_path / "machine.json", "--json")
    assert status == 0
    assert text.strip() == graphir.estimate(plan, graphir.Topology.named("a100x8")).to_json()


def test_estimate_wants_a_plan_and_a_topology(run: Run, tmp_path: Path) -> None:
    example = models.mlp(batch=2, features=4, hidden=4)
    program = graphir.capture(example.model, inputs=example.inputs)
    program.save(tmp_path / "mlp.json")
    passes.emit(program).save(tmp_path / "plan.json")
    status, _, error = run("estimate", tmp_path / "mlp.json")
    assert status == 1 and error.startswith("graphir: estimate takes a plan, not a program")
    status, _, error = run("estimate", tmp_path / "plan.json", "--topology", "h200")
    assert status == 1 and error.startswith("graphir: no topology has the name 'h200'; did you mean 'h200x8'")
    status, _, error = run("estimate", tmp_path / "plan.json", "--topology", "plan.json")
    assert status == 1 and error.startswith("graphir: the file cannot be read")
    status, _, error = run("estimate", tmp_path / "plan.json", "--executor", "thread")
    assert status == 1 and error.startswith("graphir: no executor 'thread'; did you mean 'threads'?")
