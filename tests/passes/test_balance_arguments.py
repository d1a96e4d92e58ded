"""What ``balance`` and those that hand on limits refuse, and how."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import models
import pytest
from runnable import captured, sgd

import graphir
from graphir import passes
from graphir.analysis.topology import Speed
from graphir.errors import GraphirError, PassError, VerifyError
from graphir.facade.cli import app
from graphir.ir.program import Program

pytestmark = pytest.mark.usefixtures("one_thread")

balance = partial(passes.balance, topology="h200x8")
FAST = Speed(flops_per_second={"f32": 1e12}, bytes_per_second=1e12)
HOSTLESS = graphir.Topology(name="hostless", devices={"gpu:0": FAST}, links=())


@pytest.fixture(scope="module")
def program() -> Program:
    example = models.mlp()
    return captured(example, sgd(example.model.parameters()))


@pytest.mark.parametrize(
    ("make", "kind", "fix"),
    [
        (passes.emit, "Plan", "give the program that the plan was emitted from"),
        (lambda program: program.step, "Net", "graphir.capture makes one"),
        (lambda program: None, "NoneType", "graphir.capture makes one"),
    ],
    ids=["plan", "net", "none"],
)
def test_what_is_no_program_is_refused(program: Program, make: Callable[[Program], Any], kind: str, fix: str) -> None:
    with pytest.raises(PassError, match=f"^balance takes a Program, not {kind}") as refusal:
        balance(make(program), {"gpu:0": 10**9})
    assert refusal.value.fix == fix


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"profile": 3}, "balance: profile is a int, not a Profile"),
        ({"profile": "stored"}, "balance: profile is a str, not a Profile"),
        ({"threads": 0}, "balance: threads=0: a kernel needs at least one thread"),
        ({"topology": HOSTLESS}, "balance: topology 'hostless' has no device cpu:0"),
        ({"topology": {"name": "x"}}, "balance: topology: no topology: Field required"),
        ({"limits": "1 GiB"}, "balance: limits: expected a dict, not '1 GiB'"),
        ({"seconds": math.inf}, "balance: seconds: Input should be a finite number"),
        ({"seconds": math.nan}, "balance: seconds: Input should be a finite number"),
        ({"pin": {"fc1": "disk"}}, "balance: pin.fc1: no module is put on 'disk'"),
        ({"pin": {"": 5}}, "balance: '' is pinned to gpu:5, which no limit names"),
        (
            {"pin": {"fc*": 0, "f*": 1}, "devices": [1]},
            "module 'fc1' is named by two patterns that are equally close, 'fc*' and 'f*'",
        ),
        ({"pin": {"fc1": None}}, "balance: pin: 'fc1' goes to None"),
        ({"pin": ["fc1"]}, "balance: pin: expected a dict, not ('fc1',)"),
        ({"limits": [("gpu:0", 10**9)]}, "balance: limits: expected a dict, not (('gpu:0', 1000000000),)"),
    ],
)
def test_options_that_are_none_are_refused(program: Program, options: dict[str, Any], message: str) -> None:
    with pytest.raises(PassError) as refusal:
        balance(program, **{"limits": {"gpu:0": 10**9}, "evaluations": 10, **options})
    assert refusal.value.what.startswith(message)


def test_this_machines_profile_says_nothing_of_another_one(program: Program) -> None:
    need = {"gpu:0": 10**9}
    plain = balance(program, need, evaluations=10)
    assert str(balance(program, need, evaluations=10, profile="cached")) == str(plain)


@pytest.mark.parametrize("limits", ["1 GiB", [("gpu:0", 10**9)]], ids=["text", "pairs"])
def test_compile_takes_limits_by_device_alone(limits: Any) -> None:
    example = models.mlp()
    with pytest.raises(PassError, match="limits: expected a dict, not"):
        graphir.compile(example.model, example.inputs, targets=example.targets, loss=example.loss, limits=limits)


TWICE = "limits: a device is given twice: {}, as {} and {}"


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({0: 1000, "gpu:0": "80 GiB"}, TWICE.format("gpu:0", 0, "'gpu:0'")),
        ({"gpu:0": 10**9, "cpu": 1000, "cpu:0": 2000}, TWICE.format("cpu:0", "'cpu'", "'cpu:0'")),
    ],
    ids=["gpu", "cpu"],
)
def test_a_device_has_one_limit(program: Program, limits: dict[str | int, int | str], message: str) -> None:
    example = models.mlp()
    calls: dict[str, Callable[[], Any]] = {
        "balance": lambda: balance(program, limits),
        "pipeline": lambda: passes.pipeline(program, limits=limits),
        "compile": lambda: graphir.compile(
            example.model, example.inputs, targets=example.targets, loss=example.loss, limits=limits
        ),
    }
    for call in calls.values():
        with pytest.raises(PassError) as refusal:
            call()
        assert message in refusal.value.what


def test_the_command_line_takes_one_limit_a_device(program: Program, tmp_path: Path) -> None:
    graphir.save(program, tmp_path / "program.json")
    for first, second, message in (
        ("gpu:0", "gpu:0", "--limit names gpu:0 twice"),
        ("cpu", "cpu:0", "balance: limits: a device is given twice: cpu:0, as 'cpu' and 'cpu:0'"),
    ):
        arguments = ["balance", str(tmp_path / "program.json"), f"--limit={first}=1", f"--limit={second}=2000000000"]
        with pytest.raises(GraphirError) as refusal:
            app(arguments, standalone_mode=False)
        assert refusal.value.what.startswith(message)


def test_the_command_line_takes_a_finite_number_of_seconds(program: Program, tmp_path: Path) -> None:
    graphir.save(program, tmp_path / "program.json")
    with pytest.raises(GraphirError, match="balance: seconds: Input should be a finite number"):
        app(
            ["balance", str(tmp_path / "program.json"), "--limit=gpu:0=2000000000", "--seconds=inf"],
            standalone_mode=False,
        )


@pytest.mark.parametrize("given", ["40 XB", "1 PiB", "1024K", "1.5", "-1 MB", "nan", -1, 0, True, 1.5, math.nan])
def test_limits_that_are_no_bytes_are_refused_with_the_units(program: Program, given: Any) -> None:
    with pytest.raises(PassError) as refusal:
        balance(program, {"gpu:0": given})
    assert refusal.value.what == f"balance: limits.gpu:0: {given!r} is not a number of bytes"
    assert refusal.value.fix == (
        "write a whole number from 1 up, or text such as '24 MiB' or '24 MB': "
        "KiB, MiB, GiB, TiB are powers of 1024, KB, MB, GB, TB of 1000"
    )


def test_a_program_that_is_not_well_formed_is_told_so(program: Program) -> None:
    """What balance looked up in it raised a bare KeyError."""
    first, *others = program.step.ops
    broken = program.with_(step=program.step.with_(ops=(first._replace(inputs=("nowhere",)), *others)))
    with pytest.raises(VerifyError, match="blob 'nowhere' is not declared"):
        balance(broken, {"gpu:0": "1 GiB", "gpu:1": "1 GiB"}, evaluations=10)
