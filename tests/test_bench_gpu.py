"""``python tests/bench gpu`` without a GPU: every section on a pretended card, and the recorder around them."""

from __future__ import annotations

import gzip
import importlib
import inspect
import json
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock, create_autospec

import pytest
import torch
from runnable import captured

from graphir import passes

BENCH = Path(__file__).resolve().parent / "bench"
Import = Callable[[str], ModuleType]


@pytest.fixture(scope="module")
def module() -> Iterator[Import]:
    """Modules of the benchmarks, which have no package."""
    with pytest.MonkeyPatch.context() as patch:
        for folder in ("zoo", "bench"):
            patch.syspath_prepend(BENCH.parent / folder)
        yield importlib.import_module


SOME: dict[str, set[tuple[str, ...]]] = {
    "machine": {(), ("ResNet-50's step",)},
    "steps": {("BERT with dropout, 16 of 256", "bf16 autocast, default")},
    "memory": {
        ("ResNet-50, batch 32", "", "eager"),
        ("ResNet-50, batch 32", "2.0", "ours"),
        ("GPT of GPT-2's sizes, 8 of 512", "0.7", "checkpoint"),
        ("ResNet-50, batch 32", "0.7", "save_on_cpu"),
    },
    "logical": {("GPT", "2"), ("GPT", "4")},
    "trace": {("GPT", "4")},
    "several": {
        ("copy from 0 to 1, 256 MiB",),
        ("GPT, 2 replicas, 16 rows",),
        ("GPT, 2 stages, 2 micro-batches",),
    },
    "compiled": {("MLP of 8 narrow layers, batch 8", "f32, fused")},
    "budgets": {("GPT of GPT-2's sizes, 8 of 512", "2.0", "activation_memory_budget")},
}
"""Which groups of rows are measured here, by section: each way that a row is made."""


@pytest.mark.parametrize("name", SOME)
def test_every_section_makes_its_rows(
    module: Import, monkeypatch: pytest.MonkeyPatch, name: str, one_thread: None
) -> None:
    on_gpu, card = module("on_gpu"), module("gpu_card").Pretended()
    monkeypatch.setattr(module("gpu_memory"), "SHARES", (0.7, 2.0))  # twice the need is kept at once
    if name == "budgets":  # the other section compiles, which takes a second
        monkeypatch.setattr(module("gpu_card").Pretended, "compiled", lambda card, function, mode: function)
    section = on_gpu.SECTIONS[name](card, 60.0)
    chosen = [task for task in section.tasks if tuple(map(str, task.key)) in SOME[name]]
    assert len(chosen) == len(SOME[name])
    first, *said = on_gpu.said(card, section._replace(tasks=chosen))
    assert first["columns"] == section.columns and len(first["planned"]) == len(chosen)
    rows = [found["row"] for found in said if "row" in found]
    assert [found["done"] for found in said if "done" in found] == [*range(len(chosen))]
    assert len(rows) >= len(chosen)
    for row in rows:
        assert len(row) <= len(section.columns) and "Error" not in "".join(row), row
        assert len(row) == len(section.columns) or row[-1].startswith("more, with all") or name == "several", row
    files = [found["file"] for found in said if "file" in found]
    assert [file["format"] for file in files] == ["graphir.allocations"] * (name == "trace")


def test_a_llama_like_model_is_captured_with_eagers_bits(module: Import) -> None:
    cases, card = module("gpu_cases"), module("gpu_card").Pretended()
    case, way = cases.CASES["LLaMA-like, 4 of 512"](True), cases.Way(False, True)
    theirs = module("gpu_memory")._trained(cases.eager(card, case, way), 2)
    program = captured(case.example, way.optimizer(case.model))
    with card.session(passes.emit(program), program.state) as session:
        losses = [session.step(*case.inputs, *case.targets) for _ in range(2)]
        held = module("exactness").everything(session.state_dict(), session.optimizer_state_dict())
    assert module("exactness").different(theirs, [*losses, *held]) == 0


def test_a_process_of_data_parallel_says_how_long_a_step_takes(module: Import, tmp_path: Path) -> None:
    ddp, card = module("gpu_ddp"), module("gpu_card").Pretended()
    try:
        assert ddp.step_seconds(card, 0, 1, str(tmp_path / "store"), "gloo") > 0
    finally:
        torch.distributed.destroy_process_group()


def test_each_kind_of_step_comes_with_one_model_before_any_comes_with_all(module: Import) -> None:
    on_gpu, card = module("on_gpu"), module("gpu_card").Pretended()
    ways = set(module("gpu_cases").WAYS)
    keys = [task.key for task in on_gpu.SECTIONS["steps"](card, 60.0).tasks]
    assert {way for _, way in keys[: len(ways)]} == ways and len({name for name, _ in keys[: len(ways)]}) == len(ways)
    assert len(set(keys)) == len(keys) == len(ways) * len(module("gpu_cases").CASES)
    compiled = [task.key for task in on_gpu.SECTIONS["compiled"](card, 60.0).tasks]
    assert set(compiled) == set(keys) and compiled[0][0].startswith("MLP")


def test_sections_have_a_table_each_and_end_with_the_time(module: Import) -> None:
    sections = module("gpu").SECTIONS
    assert [section.name for section in sections] == list(module("on_gpu").SECTIONS)
    ends = [section.by for section in sections]
    assert ends == sorted(ends) and ends[-1] == 1.0


def test_events_of_the_allocator_are_numbered(module: Import) -> None:
    event = module("gpu_card").Event
    events = [
        event("segment_alloc", 0x7F00, 2 << 20, 0),
        event("alloc", 0x7F00, 600, 0),
        event("alloc", 0x7F99, 100, 0xAA),
        event("free_completed", 0x7F00, 600, 0),
        event("alloc", 0x7F00, 512, 0),
    ]
    found = module("gpu_devices").compact(events)
    assert found["actions"] == ["segment_alloc", "alloc", "free_completed"]
    assert found["events"] == [[0, 0, 2 << 20, 0], [1, 0, 600, 0], [1, 1, 100, 1], [2, 0, 600, 0], [1, 0, 512, 0]]


def test_a_card_calls_torch_as_it_is(module: Import, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each function of ``torch.cuda`` is replaced by one that takes the same arguments."""
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, create_autospec(getattr(torch.cuda, name)))
    for name in ("graph", "stream", "Stream", "CUDAGraph"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    stats = {"requested_bytes.all.peak": 7, "allocated_bytes.all.peak": 8, "reserved_bytes.all.peak": 9}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: {**stats, "allocated_bytes.all.current": 3})
    history: Any = torch.cuda.memory
    signature = inspect.signature(history._record_memory_history_impl)
    asked = []
    monkeypatch.setattr(history, "_record_memory_history", lambda *a, **k: asked.append(signature.bind(*a, **k)))
    entries = [
        {"action": "alloc", "addr": 64, "size": 512, "stream": 0},
        {"action": "oom", "size": 9, "stream": 0},
    ]
    snapshot = create_autospec(history._snapshot, return_value={"device_traces": [entries]})
    monkeypatch.setattr(history, "_snapshot", snapshot)

    card, steps = module("gpu_card").Card(), []
    assert card.peak(lambda: steps.append(1)) == (7, 8, 9) and card.held() == (0, 3, 0) and len(steps) == 2
    replay = card.graphed(lambda: steps.append(1))
    assert len(steps) == 6
    replay()
    torch.cuda.CUDAGraph.return_value.replay.assert_called_once_with()
    assert card.traced(lambda: steps.append(1)) == [("alloc", 64, 512, 0), ("oom", 0, 9, 0)]
    assert [bound.arguments["enabled"] for bound in asked] == ["all", None]
    card.block_seconds = 0.0
    assert card.taken(lambda: steps.append(1)).done > 0


FAKE = """
import json, subprocess, sys, time
name, seconds, *pretend = sys.argv[1:]
def say(**found): print(json.dumps(found), flush=True)
assert pretend == ["--pretend"]
if name == "steps":
    sys.exit(3)
if name == "several":
    time.sleep(600)
say(columns=["what", "figure"], planned=[["one"], ["two"], ["three"]])
say(row=["one", "{file}"])
if name == "trace":
    say(file={"events": [1, 2]})
say(done=0)
if name == "machine":
    print(subprocess.Popen(["sleep", "600"], start_new_session=True).pid, file=open(__file__ + ".pid", "w"), flush=True)
    say(row=["two", "half"])
    time.sleep(600)
if name == "memory":
    say(done=1)
    sys.exit(4)
say(row=["two", "2"]); say(done=1); say(row=["three", "3"]); say(done=2)
"""


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_recording_names_what_it_did_not_reach_and_leaves_no_process(
    module: Import, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gpu = module("gpu")
    script = tmp_path / "tests" / "bench" / "on_gpu.py"
    script.parent.mkdir(parents=True)
    script.write_text(FAKE, encoding="utf-8")
    names = {"tests": 0.8, "steps": 0.8, "memory": 0.8, "trace": 0.8, "machine": 0.9, "several": 1.0, "late": 0.0}
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    monkeypatch.setattr(gpu, "SECTIONS", [gpu.Section(name, f"The {name}", by) for name, by in names.items()])
    monkeypatch.setattr(gpu, "_LEAST", 0.1)
    path = tmp_path / "gpu.json"
    for seconds in (1.5, 6.0, 24.0):  # a loaded machine may take some to start processes
        printed = list(gpu.record(seconds, path, pretend=True))
        found = json.loads(path.read_text(encoding="utf-8"))
        if len(found["sections"]["machine"]["rows"]) == 5 and len(found["sections"]["trace"]["rows"]) == 4:
            break
    assert (found["format"], found["version"], found["pretended"]) == ("graphir.gpu", 2, True)
    rows = {name: section["rows"] for name, section in found["sections"].items()}
    assert rows["tests"][1:] == [["one", "gpu.tests.json.gz"], ["two", "2"], ["three", "3"]]
    assert rows["machine"][2] == ["two", "half"]
    (again, late), (last, later) = rows["machine"][3:]
    assert (again, last) == ("two", "three")
    assert late.startswith("not reached in the section's") and late.endswith("but for the rows above")
    assert later.startswith("not reached in the section's") and later.endswith(" s")
    assert rows["steps"] == [["ended with status 3"]]
    assert len(rows["several"]) == 1 and rows["several"][0][0].startswith("not reached in the section's")
    assert rows["memory"][2:] == [["three", "ended with status 4"]]
    assert rows["late"] == [["not reached: the time was over"]]
    assert json.loads(gzip.decompress((tmp_path / "gpu.trace.json.gz").read_bytes())) == {"events": [1, 2]}
    assert "| two | 2 |" in printed and "\n**The late.**\n" in printed
    assert not _lives(int(Path(f"{script}.pid").read_text(encoding="utf-8")))


SUITE = """
import os, pathlib, signal, subprocess, time
here = pathlib.Path(__file__).parent
def test_passes(): pass
def test_hangs():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen(["sh", "-c", "trap '' TERM; sleep 600 & wait"], start_new_session=True)
    (here / "pids").write_text(f"{os.getpid()} {child.pid}")
    time.sleep(600)
"""


def test_no_process_of_a_suite_that_hangs_is_left(module: Import, tmp_path: Path) -> None:
    """Neither a worker that ignores SIGTERM nor what it has started in a session of its own."""
    (tmp_path / "test_suite.py").write_text(SUITE, encoding="utf-8")
    for seconds in (1.0, 4.0, 16.0):  # pytest may take some to begin
        found = module("gpu_tests").outcome([], seconds, root=tmp_path)
        if (tmp_path / "pids").exists():
            break
    assert found == f"in {seconds:.0f} s: 1 passed, 0 failed, 0 errors"
    worker, child = map(int, (tmp_path / "pids").read_text(encoding="utf-8").split())
    assert not _lives(worker) and not _lives(child)


def test_the_tests_of_gpus_are_found_and_collected_alone(module: Import) -> None:
    found = module("gpu_tests").marked()
    assert found[0] == "tests/runtime/cuda/test_cuda_hardware.py"
    root = BENCH.parents[1]
    assert all("mark.cuda" in (root / path).read_text(encoding="utf-8") for path in found)


CARD = {"date": "2026-11-28", "gpu": "1 x NVIDIA H200", "driver": "580"}


@pytest.mark.parametrize(
    ("recorded", "shown"),
    [
        ({"version": 2, "machine": CARD, "sections": {}}, ["Measured on 2026-11-28: 1 x NVIDIA H200, driver 580."]),
        (
            {"machine": CARD, "sections": {"machine": [["what", "figure"], ["gpu:0", "1 GB/s"], ["a | b", ""]]}},
            ["| what | figure |", "| --- | --- |", "| gpu:0 | 1 GB/s |", "| a \\| b |  |"],
        ),
        (
            {
                "version": 2,
                "machine": {**CARD, "gpu": "no GPU"},
                "sections": {"steps": {"clocks": "Meanwhile: W 70 to 690.", "rows": [["model", "ms"], ["MLP"]]}},
            },
            ["Measured on 2026-11-28: no GPU, driver 580.", "| MLP |  |", "Meanwhile: W 70 to 690."],
        ),
        ({"version": 2, "machine": CARD, "sections": {"steps": {"clocks": "", "rows": []}}}, []),
    ],
    ids=["without sections", "of version 1", "without a card", "without rows"],
)
def test_tables_of_recordings(module: Import, tmp_path: Path, recorded: dict[str, Any], shown: list[str]) -> None:
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps({"format": "graphir.gpu", **recorded}), encoding="utf-8")
    lines = module("gpu").tables(path)
    assert [line for line in lines if line in shown] == shown
    missing = sum(line == "| not reached |" for line in lines)
    measured = any(len(held if isinstance(held, list) else held["rows"]) > 0 for held in recorded["sections"].values())
    assert missing == len(module("gpu").SECTIONS) - measured


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "FileNotFoundError"),
        ("", "JSONDecodeError"),
        ("[]", "TypeError"),
        ('{"format": "graphir.plan"}', "KeyError: 'format'"),
        ('{"format": "graphir.gpu", "version": 3}', "version 3 of its format; this one reads up to 2"),
        ('{"format": "graphir.gpu", "version": 2, "pretended": true}', "the host stood in for a card"),
        ('{"format": "graphir.gpu", "machine": {}}', "KeyError: 'date'"),
    ],
)
def test_what_is_no_recording_is_refused(module: Import, tmp_path: Path, text: str | None, why: str) -> None:
    path = tmp_path / "gpu.json"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(SystemExit, match="is no recording of a GPU") as refused:
        module("gpu").tables(path)
    assert why in str(refused.value) and str(refused.value).endswith("bench gpu --json writes one")


@pytest.mark.parametrize(
    ("arguments", "missing", "why"),
    [
        ([], "", "torch sees no CUDA device here; with --json FILE --write a recording goes into the page"),
        (["--write"], "", "--write needs --json FILE, a recording"),
        (["--pretend", "--seconds=nan"], "", "--seconds nan is no time"),
        (["--pretend", "--json=/dev/null/gpu.json"], "", "/dev/null/gpu.json cannot be written: Not a directory"),
        ([], "limits", "limits is not installed here; docs/contributing.md says what a machine with a GPU needs"),
    ],
    ids=["no card", "no file", "no time", "no folder", "no package"],
)
def test_the_command_says_what_it_lacks(
    module: Import, monkeypatch: pytest.MonkeyPatch, arguments: list[str], missing: str, why: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "gpu", *arguments])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if missing:
        monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(BENCH), run_name="__main__")
    assert str(ended.value).startswith(why)
