"""Profiles of CUDA cards: pretended ones, whose calls are made on the host, and a real one."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import models
import pytest
import torch
from graphir.runtime import Session
from graphir.runtime.profiling.allocations import Allocated
from graphir.runtime.profiling.calls import Subject
from graphir.runtime.profiling.cards import TorchCard, measured_on
from runnable import captured, sgd
from small import program_of
from torch.utils._pytree import tree_leaves

import graphir
from graphir import Profile, Topology, passes
from graphir.analysis.profile_files import at_hand, default_path
from graphir.analysis.profiles import Machine, card, machine
from graphir.analysis.scratch import is_called
from graphir.analysis.topology import Speed
from graphir.errors import FileError, GraphirError

pytestmark = pytest.mark.usefixtures("one_thread")

DRIVER = "driver 13000"
H200, RTX = card("NVIDIA H200", DRIVER), card("RTX 3090", DRIVER)


class Pretended:
    """A card whose calls take a second for each of its number, launch two kernels, and hold three bytes inside."""

    there: tuple[Machine, ...] = ()
    room = 1 << 40

    def __init__(self, place: torch.device) -> None:
        self.number, self.place = place.index, torch.device("cpu")

    def machine(self) -> Machine:
        return self.there[self.number]

    def current(self) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()

    def free(self) -> int:
        return self.room

    def cache(self) -> int:
        return 1 << 20

    def seconds(self, call: Callable[[], object], *, cold: bool) -> float:
        call()
        return self.number + 1.0

    def issue(self, call: Callable[[], object]) -> float:
        return 0.25

    def launches(self, call: Callable[[], object]) -> int | None:
        return 2

    def allocated(self, call: Callable[[], object]) -> Allocated:
        left = sum(t.untyped_storage().nbytes() for t in tree_leaves(call()) if isinstance(t, torch.Tensor))
        return Allocated(left + 3, left)


@pytest.fixture
def cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Says which cards the process sees."""

    def seen(*there: Machine) -> None:
        monkeypatch.setattr(Pretended, "there", there)
        monkeypatch.setattr(sys.modules["graphir.facade.profile"], "TorchCard", Pretended)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(there))
        monkeypatch.setattr("graphir.analysis.profile_files.cards", lambda: list(there))

    monkeypatch.delenv("GRAPHIR_PROFILE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    yield seen


def plan_on(*devices: int) -> graphir.Plan:
    example = models.mlp()
    program = captured(example, sgd(example.model.parameters()))
    return passes.emit(passes.inject_copies(passes.replicate(program, devices)) if len(devices) > 1 else program)


def topology_of(*there: Machine) -> Topology:
    """As ``Topology.here()`` has these cards."""
    speed = Speed(flops_per_second={"f32": 1e12}, bytes_per_second=1e12)
    speeds = {f"gpu:{i}": speed.model_copy(update={"machine": str(each)}) for i, each in enumerate(there)}
    links = [{"source": a, "destination": b, "bytes_per_second": 1e10} for a in speeds for b in speeds if a != b]
    return Topology(name="here", devices={**speeds, "cpu:0": speed}, links=links)


def test_operators_are_measured_on_the_card_of_their_devices_number(cards: Callable[..., None]) -> None:
    cards(H200, H200)
    plan = plan_on(0, 1)
    found = graphir.profile(plan)
    assert (found.machine, found.failed, found.devices) == (H200, {}, {})
    assert str(found).endswith("on NVIDIA H200, driver 13000, graphir " + H200.graphir)
    assert all("thread" not in key and not key.startswith("AllReduce") for key in found.calls)
    updates = {key for key in found.calls if key.startswith("graphir.sgd")}
    for key, call in found.calls.items():
        seconds, launches = (1.0, 2) if key not in updates else (call.seconds, None)
        assert (call.scratch, call.kept, call.seconds, call.launches) == (3, 0, seconds, launches), key
        assert 0.25 / 8 <= call.issue <= 0.25 and call.beside is None
    assert Profile.load(default_path(H200)).calls == found.calls, "its own file"
    assert default_path(H200) != default_path() and at_hand().devices["gpu:1"].calls == found.calls


def test_predictions_are_by_the_profile_of_each_devices_card(cards: Callable[..., None]) -> None:
    cards(H200, RTX)
    plan = plan_on(0, 1)
    found = graphir.profile(plan)
    assert [found.devices[f"gpu:{i}"].machine for i in range(2)] == [H200, RTX]
    assert str(found).count("profile of ") == 2
    plain = graphir.estimate(plan, topology_of(H200, RTX), profile=None)
    for given in ("cached", found):
        estimated = graphir.estimate(plan, topology_of(H200, RTX), profile=given)
        of_mm = [o.seconds for o in estimated.operators if o.type == "aten.mm.default" and o.source == "profile"]
        assert of_mm.count(1.0) == of_mm.count(2.0) == len(of_mm) // 2 > 0
        runs = [plan.step.ops[i.op] for i in plan.instructions if i.kind == "run"]
        measured = sum(is_called(op) and op.phase != "update" for op in runs)
        assert estimated.issue.kernels == plain.issue.kernels + measured, "two each, and not one"
        assert estimated.issue.seconds > 0.25 * measured > plain.issue.seconds
    assert graphir.memory(plan).sources()["measured"] == graphir.memory(plan, profile=found).sources()["measured"] > 0
    cards(RTX, RTX)
    assert {
        o.source for o in graphir.estimate(plan, topology_of(H200, RTX)).operators if o.type == "aten.mm.default"
    } > {"roofline"}, "a topology of a card that is not here"


def test_where_no_card_is_seen_the_host_is_measured(cards: Callable[..., None]) -> None:
    cards()
    found = graphir.profile(plan_on(0))
    assert found.machine == machine() and all(call.launches is None for call in found.calls.values())


def test_a_device_that_is_named_measures_all(cards: Callable[..., None], tmp_path: Path) -> None:
    cards(H200, RTX)
    plan, path = plan_on(0, 1), tmp_path / "p.json"
    found = graphir.profile(plan, device="cuda:1", path=path)
    assert found.machine == RTX and not found.devices and {c.seconds for c in found.calls.values() if c.launches} == {2}
    assert graphir.profile(plan, device="cpu").machine == machine()
    with pytest.raises(FileError, match=r"another machine or version: RTX 3090, .*; this is NVIDIA H200, driver 13000"):
        graphir.profile(plan, device="cuda:0", path=path)


def test_a_session_says_where_its_devices_are(cards: Callable[..., None]) -> None:
    example = models.mlp()
    program = captured(example, sgd(example.model.parameters()))
    with Session(passes.emit(program), program.state, binding="cpu") as session:
        cards(H200, RTX)
        assert graphir.profile(session).machine == machine()
        session._places = {device: torch.device("cuda:1") for device in session.plan.devices}
        assert graphir.profile(session).machine == RTX


def test_what_does_not_fit_on_a_full_card_or_fails_is_said(
    cards: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    cards(H200)
    two = program_of("input x : f32[1000] @gpu:0\n a : f32[1000] @gpu:0 = aten.relu(x)\n output a")
    monkeypatch.setattr(Pretended, "room", 1000)
    assert [*graphir.profile(two).failed.values()] == ["GraphirError: it may take 16000 bytes, and 1000 are left"]
    monkeypatch.setattr(Pretended, "room", 1 << 40)

    def full(self: Pretended, call: Callable[[], object], *, cold: bool) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory.\nAnd more.")

    monkeypatch.setattr(Pretended, "seconds", full)
    found = graphir.profile(two)
    assert ([*found.failed.values()], found.calls) == (["OutOfMemoryError: CUDA out of memory."], {})


def test_counts_of_steps_stay_on_the_host(cards: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    cards(H200)
    example, brought = models.mlp(), list[torch.Tensor]()
    program = captured(example, torch.optim.AdamW(example.model.parameters()))
    op = next(op for op in program.step.ops if op.type == "graphir.adamw")

    def noted(tensor: torch.Tensor, place: torch.device) -> torch.Tensor:
        brought.append(tensor)
        return tensor

    monkeypatch.setattr("graphir.runtime.profiling.cards.copy", noted)
    found, failed = measured_on(
        Pretended(torch.device("cuda:0")), {"it": Subject(op, program.step.blobs, program.dims)}
    )
    assert found and not failed and brought and all(tensor.dim() for tensor in brought)


def test_one_file_is_of_one_machine(cards: Callable[..., None], tmp_path: Path) -> None:
    cards(H200, RTX)
    with pytest.raises(GraphirError, match="the step runs on several machines") as e:
        graphir.profile(plan_on(0, 1), path=tmp_path / "p.json")
    assert e.value.fix.startswith("say which, as device='cuda:0'")


@pytest.mark.parametrize("device", ["cuda:2", "hip:0"])
def test_a_device_that_is_not_there_is_refused(cards: Callable[..., None], device: str) -> None:
    cards(H200, RTX)
    with pytest.raises(GraphirError, match=f"device '{device}' is not there: this process sees 2 CUDA cards"):
        graphir.profile(plan_on(0), device=device)


def test_the_file_that_the_environment_names_is_the_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHIR_PROFILE", str(tmp_path / "mine.json"))
    assert default_path() == tmp_path / "mine.json"
    assert default_path(H200) not in (default_path(RTX), default_path())
    assert str(default_path(H200)).startswith(str(tmp_path / "mine.json."))


def test_files_of_before_are_read(tmp_path: Path) -> None:
    """They have neither launches nor seconds of issuing."""
    path = tmp_path / "p.json"
    of = {"device": "abacus", "torch": "1.0", "graphir": "0.1"}
    calls = {"1 thread: aten.relu.default(f32[4])": {"scratch": 0, "seconds": 0.5}}
    path.write_text(json.dumps({"format": "graphir.profile", "version": 1, "machine": of, "calls": calls}))
    found = Profile.load(path)
    (call,) = found.calls.values()
    assert (found.machine.driver, call.launches, call.issue) == ("", None, None)


@pytest.mark.cuda
def test_a_real_card(tmp_path: Path) -> None:
    example = models.mlp(batch=4096, features=1024, hidden=1024)
    plan = passes.emit(captured(example, sgd(example.model.parameters(), fused=True)))
    found = graphir.profile(plan, path=tmp_path / "p.json", device="cuda:0")
    assert not found.failed and found.machine == TorchCard(torch.device("cuda:0")).machine()
    assert torch.cuda.get_device_name(0) in str(found)
    products = [call for key, call in found.calls.items() if key.startswith(("aten.addmm", "aten.mm"))]
    assert all(1e-7 < call.seconds < 1e-2 and 1e-6 < call.issue < 1e-2 for call in products)
    assert all(call.launches is None or call.launches >= 1 for call in products)
    assert graphir.memory(plan, profile=found).sources()["unknown"] == 0
