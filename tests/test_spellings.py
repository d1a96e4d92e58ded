"""Devices and numbers of bytes in the spellings of Accelerate and torch, wherever callers write them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from runnable import captured, sgd

import graphir
from graphir import Program, passes, runtime
from graphir.analysis.topology import Link, Speed
from graphir.errors import GraphirError, SessionError
from graphir.facade.cli import app
from graphir.ir.text import nbytes_of

pytestmark = pytest.mark.usefixtures("one_thread")

SECOND = [1, "gpu:1", "cuda:1", torch.device("cuda:1"), torch.device("cuda", 1)]
HOST = ["cpu", "cpu:0", torch.device("cpu")]
FAST: dict[str, Any] = {"flops_per_second": {"f32": 1e12}, "bytes_per_second": 1e12}


@pytest.fixture(scope="module")
def program() -> Program:
    example = models.mlp()
    return captured(example, sgd(example.model.parameters()))


def moved(program: Program) -> Program:
    """The program with a layer elsewhere, and its copies."""
    return passes.inject_copies(passes.shift_modules(program, {"fc2": 1}))


PLACES: dict[str, Callable[[Program, Any], object]] = {
    "shift_modules": lambda program, device: passes.shift_modules(program, {"fc2": device}),
    "shift_modules from": lambda program, device: passes.shift_modules(
        passes.shift_modules(program, {"fc2": 1}), {"fc2": {device: 2}}
    ),
    "shift_activations": lambda program, device: passes.shift_activations(program, ["fc2"], {0: device}),
    "park": lambda program, device: passes.park(program, ["relu"], device),
    "park by device": lambda program, device: passes.park(program, ["relu"], {torch.device("cuda:0"): device}),
    "replicate": lambda program, device: passes.replicate(program, [0, device]),
    "shard": lambda program, device: passes.shard(program, {"fc1": device}, ["cuda:0", device]),
    "balance": lambda program, device: (
        passes.balance(
            program, {0: "1GB"}, devices=[device], pin={"fc1": device, "fc2": device}, topology="h200x8", evaluations=5
        ).program
    ),
    "limits": lambda program, device: (
        passes.balance(program, {0: "1GB", device: "1 GiB"}, pin={"fc2": 0}, topology="h200x8", evaluations=5).program
    ),
    "limits of pipeline": lambda program, device: passes.build(passes.PipelineSchedule, limits={device: 1}),
    "link": lambda program, device: Link(source=0, destination=device, bytes_per_second=1),
    "topology": lambda program, device: graphir.Topology(name="small", devices={device: Speed(**FAST)}),
    "binding": lambda program, device: runtime.Session(
        passes.emit(moved(program)), program.state, binding={0: "cpu", device: torch.device("cpu")}
    ).close(),
    "DataParallel": lambda program, device: (
        graphir.DataParallel(torch.nn.Linear(2, 2), [0, device], device, binding="cpu").device_ids
    ),
}


@pytest.mark.parametrize("where", PLACES)
def test_a_gpu_is_named_in_any_spelling(program: Program, where: str) -> None:
    found = [PLACES[where](program, spelling) for spelling in SECOND]
    assert all(one == found[0] for one in found)


@pytest.mark.parametrize("where", ["shift_modules", "park", "link", "topology", "limits"])
def test_the_host_is_named_in_any_spelling(program: Program, where: str) -> None:
    found = [PLACES[where](program, spelling) for spelling in HOST]
    assert all(one == found[0] for one in found)


@pytest.mark.parametrize("where", [where for where in PLACES if where not in ("DataParallel", "balance")])
def test_the_disk_is_refused_by_name(program: Program, where: str) -> None:
    with pytest.raises(GraphirError, match="'disk' is not a device: a step keeps all that it uses in memory"):
        PLACES[where](program, "disk")


@pytest.mark.parametrize(
    ("given", "nbytes"),
    [
        (1, 1),
        ("1 B", 1),
        ("40MB", 40 * 10**6),
        ("40 MB", 40 * 10**6),
        ("40MiB", 40 << 20),
        ("40  mib", 40 << 20),
        (" 0.5 GiB ", 1 << 29),
        ("2.01 GB", 2_010_000_000),  # as floats 2,009,999,999
        ("2kB", 2000),
        ("1TB", 10**12),
        ("1TiB", 1 << 40),
    ],
)
def test_numbers_of_bytes_are_accelerates(given: Any, nbytes: int) -> None:
    assert nbytes_of(given) == nbytes
    assert nbytes_of(graphir.ir.text.nbytes_text(1 << 30)) == 1 << 30


@pytest.mark.parametrize(
    ("given", "message"),
    [
        *[
            (given, f"{given!r} is not a number of bytes\n  fix  write a whole number from 1 up, or text such as")
            for given in ("40 XB", "40", "MB", "-40MB", "1e3 MB", "", 0, -1, True, 1e9, float("nan"), None, ["1 GiB"])
        ],
        ("40Mb", "'40Mb' ends in 'b', which stands for bits\n  fix  write '40 MB'"),
        ("40gb", "'40gb' ends in 'b', which stands for bits\n  fix  write '40 GB'"),
        ("0.5 B", "'0.5 B' is less than a byte"),
    ],
)
def test_what_is_no_number_of_bytes_is_refused(given: Any, message: str) -> None:
    with pytest.raises(GraphirError) as refusal:
        nbytes_of(given)
    assert str(refusal.value).startswith(message)


def test_every_limit_is_read_alike(program: Program) -> None:
    plan = passes.emit(program)
    for given in (1500, "1500 B", "1.5KB", "1.5 kB"):
        assert passes.Balance(limits={0: given}) == passes.Balance(limits={"gpu:0": 1500})
        assert passes.PipelineSchedule(limits={0: given}) == passes.PipelineSchedule(limits={"gpu:0": 1500})
        assert Speed(**FAST, memory=given).memory == 1500
        with pytest.raises(SessionError, match=r"the limit of cpu is 1\.5 KiB"):
            runtime.Session(plan, program.state, binding="cpu", memory_limit=given)


def test_every_limit_is_refused_alike(program: Program, tmp_path: Path) -> None:
    example, plan = models.mlp(), passes.emit(program)
    call = {"targets": example.targets, "loss": example.loss}
    graphir.save(program, file := tmp_path / "program.json")
    calls: list[Callable[[], object]] = [
        lambda: passes.balance(program, {"cuda:0": "1 XB"}),
        lambda: passes.pipeline(program, limits={"cuda:0": "1 XB"}),
        lambda: graphir.compile(example.model, example.inputs, limits={"cuda:0": "1 XB"}, **call),
        lambda: runtime.Session(plan, program.state, binding="cpu", memory_limit="1 XB"),
        lambda: app(["balance", str(file), "--limit=cuda:0=1 XB"], standalone_mode=False),
    ]
    for limited in calls:
        with pytest.raises(GraphirError, match=r"(limits\.cuda:0|memory_limit): '1 XB' is not a number of bytes"):
            limited()
    app(
        [
            "balance",
            str(file),
            "--topology=h200x8",
            "--evaluations=5",
            "--limit=cuda:0=2 GB",
            "--limit=gpu:1=2000000000",
        ],
        standalone_mode=False,
    )
