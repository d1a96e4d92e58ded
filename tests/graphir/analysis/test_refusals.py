"""What none of graphir's values is, is refused in graphir's words."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
from torch import nn

import graphir
from graphir import caffe2, passes
from graphir.errors import CaptureError, FileError, GraphirError, ParseError, PassError

TINY = tiny.program()

CALLS: dict[str, tuple[Callable[[], object], type[GraphirError], str]] = {
    "verify": (lambda: graphir.verify(None), GraphirError, "verify takes a Program, Plan or Net, not NoneType"),
    "memory": (lambda: graphir.memory(None), GraphirError, "memory takes a Program or Plan, not NoneType"),
    "memory of a net": (lambda: graphir.memory(TINY.step), GraphirError, "memory takes a Program or Plan, not Net"),
    "certify": (lambda: graphir.certify(TINY, None), GraphirError, "certify takes a Program or Plan, not NoneType"),
    "diff": (lambda: graphir.diff(TINY, "x"), GraphirError, "diff takes a Program, Plan or Net, not str"),
    "show": (lambda: graphir.show(3), GraphirError, "show takes a Program, Plan or Net, not int"),
    "traffic": (lambda: graphir.traffic(None), GraphirError, "traffic takes a Program, Plan or Net, not NoneType"),
    "traffic of no dims": (lambda: graphir.traffic(TINY, 3), GraphirError, "dims is a int, not a mapping"),
    "traffic of other dims": (
        lambda: graphir.traffic(TINY, {"bach": 3}),
        GraphirError,
        "dims has 'bach', which no size of 'tiny' follows; did you mean 'batch'?",
    ),
    "load": (lambda: graphir.load(3), FileError, "a path was expected, not int"),
    "parse": (lambda: graphir.parse(None), ParseError, "text was expected, not NoneType"),
    "save": (lambda: TINY.save(None), FileError, "a path was expected, not NoneType"),
    "save state": (lambda: TINY.save(None, state=True), FileError, "a path was expected, not NoneType"),
    "memory of no dims": (lambda: graphir.memory(TINY, 3), GraphirError, "dims is a int, not a mapping"),
    "memory after no dims": (
        lambda: graphir.memory(TINY, earlier=[{}, 3]),
        GraphirError,
        "one of earlier is a int, not a mapping",
    ),
    "memory of other dims": (
        lambda: graphir.memory(TINY, {"bach": 3}),
        GraphirError,
        "dims has 'bach', which no size of 'tiny' follows; did you mean 'batch'?",
    ),
    "memory after other dims": (
        lambda: graphir.memory(tiny.plan(TINY), earlier=[{"gpu_0/x": 3}]),
        GraphirError,
        "one of earlier has 'gpu_0/x', which no size of 'tiny' follows",
    ),
    "memory of half a size": (lambda: graphir.memory(TINY, {"batch": 8.0}), GraphirError, "dims has 'batch' at 8.0"),
    "memory after a text": (
        lambda: graphir.memory(TINY, earlier=[{"batch": "8"}]),
        GraphirError,
        "one of earlier has 'batch' at '8'",
    ),
    "largest": (lambda: graphir.memory(TINY).largest("gpu:0", "3"), GraphirError, "n='3' is no number of storages"),
    "largest of -1": (lambda: graphir.memory(TINY).largest("gpu:0", -1), GraphirError, "n=-1 is no number of storages"),
    "with": (
        lambda: TINY.with_(reduktion=()),
        GraphirError,
        "program 'tiny' has no attribute 'reduktion'; did you mean 'reduction'?",
    ),
    "net with": (lambda: TINY.step.with_(by=()), GraphirError, "net 'tiny.step' has no attribute 'by'"),
    "plan with": (lambda: tiny.plan(TINY).with_(step=TINY.step), GraphirError, "plan 'tiny' has no attribute 'step'"),
    "emit at no name": (lambda: passes.emit(TINY, {3: 2}), PassError, "program 'tiny' has no dimension 3"),
    "emit at 3": (lambda: passes.emit(TINY, 3), PassError, "dims is a int, not a mapping"),
    "blob": (lambda: TINY.step.blob(3), GraphirError, f"no blob 3 in net {TINY.step.name!r}"),
    "pipeline": (lambda: passes.Pipeline(3), PassError, "a pipeline is made of passes"),
    "compile": (lambda: graphir.compile(None, ()), CaptureError, "compile takes an nn.Module, not None"),
    "compile by 3": (lambda: graphir.compile(nn.ReLU(), (), passes=3), PassError, "passes is a int"),
    "load bytes": (lambda: graphir.load(b"x"), FileError, "a path was expected, not bytes"),
    "load a NUL": (lambda: graphir.load("a\0b"), FileError, r"no file can have the path 'a\x00b'"),
    "save a NUL": (lambda: TINY.save("a\0b"), FileError, r"no file can have the path 'a\x00b'"),
    "save state to a NUL": (lambda: TINY.save("a\0b", state=True), FileError, r"no file can have the path 'a\x00b'"),
    "load a surrogate": (lambda: graphir.load("\ud800"), FileError, r"no file can have the path '\ud800'"),
    "save nowhere": (lambda: TINY.save(""), FileError, "no file can have the path ''"),
    "load a net": (lambda: caffe2.load_net("a\0b"), FileError, r"no file can have the path 'a\x00b'"),
    "load a program": (lambda: caffe2.load_program("a\0b", "c"), FileError, r"no file can have the path 'a\x00b'"),
    "save a plan": (lambda: tiny.plan(TINY).save(None), FileError, "a path was expected, not NoneType"),
}


@pytest.mark.parametrize(("call", "error", "what"), CALLS.values(), ids=CALLS)
def test_other_values_are_refused(call: Callable[[], object], error: type[GraphirError], what: str) -> None:
    with pytest.raises(GraphirError, match=f"^{re.escape(what)}\n  fix ") as e:
        call()
    assert type(e.value) is error


@pytest.mark.parametrize(
    ("device", "category", "what"), [("gpu:9", None, "device 'gpu:9'"), ("gpu:0", "x", "category 'x'")]
)
def test_memory_knows_its_devices_and_categories(device: str, category: str | None, what: str) -> None:
    memory = graphir.memory(TINY)
    with pytest.raises(GraphirError, match=f"no {what}\n  in   memory of 'tiny'\n  fix  there are: "):
        memory.timeline(device, category)
    if category is None:
        for refused in (memory.largest, memory.largest_text, memory.peak_position, memory.peak_of_storages):
            with pytest.raises(GraphirError, match=f"no {what}"):
                refused(device)


@pytest.mark.parametrize("path", ["plan/x", "x" * 300])
def test_what_cannot_be_written_is_said(path: str, tmp_path: Path) -> None:
    (tmp_path / "plan").touch()
    with pytest.raises(FileError, match=r"the file cannot be written: (Not a directory|File name too long)"):
        TINY.save(tmp_path / path)
    assert [found.name for found in tmp_path.iterdir()] == ["plan"]
