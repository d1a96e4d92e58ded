"""Topology.here: machines that are pretended, and this one."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from graphir.runtime.machine import calibration
from graphir.runtime.machine.here import here
from graphir.runtime.machine.probe import Card
from pretended import Pretended

import graphir
from graphir import FileError, GraphirError, Topology
from graphir.analysis.profiles import card, machine


def pcie() -> Pretended:
    """Two unlike cards without peers."""
    return Pretended(Card("RTX 3090", 24 << 30, 20 << 30), Card("RTX 3060", 12 << 30, 11 << 30))


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of this machine's figures."""
    monkeypatch.setenv("GRAPHIR_MACHINE", str(tmp_path / "folder" / "machine.json"))
    monkeypatch.setattr("graphir.runtime.machine.here._measured", {})
    return tmp_path / "folder" / "machine.json"


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of this user's caches, without another file that the environment names."""
    monkeypatch.delenv("GRAPHIR_MACHINE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("graphir.runtime.machine.here._measured", {})
    return tmp_path / "graphir"


def test_cards_links_and_the_host_are_there(file: Path) -> None:
    found = here(probe=pcie())
    assert list(found.devices) == ["gpu:0", "gpu:1", "cpu:0"]
    assert [found.speed(name).free for name in ("gpu:0", "gpu:1")] == [20 << 30, 11 << 30]
    assert found.speed("gpu:1").flops_per_second["f32"] == 2e12
    assert len(found.links) == 6 and not any(link.peer for link in found.links)
    assert found.host is None and found.name == "this machine (RTX 3090 + RTX 3060)"
    assert found.measured and found.machine == "RTX 3090, RTX 3060; driver 13000"
    machines = [found.speed(name).machine for name in ("gpu:1", "cpu:0")]
    assert machines == [str(card("RTX 3060", "driver 13000")), str(machine())], "as profiles name them"


def test_a_machine_is_measured_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, and in another one that reads the file; free bytes are asked anew."""
    probe = pcie()
    first = here(probe=probe)
    probe.there[0] = probe.there[0]._replace(free=1 << 30)
    again = here(probe=probe)
    assert probe.measured == 2 and again.speed("gpu:0").free == 1 << 30
    monkeypatch.setattr("graphir.runtime.machine.here._measured", {})
    other = pcie()
    kept = here(probe=other)
    assert kept.links == first.links and not other.measured
    assert {name: kept.speed(name).bytes_per_second for name in kept.devices} == {
        name: first.speed(name).bytes_per_second for name in first.devices
    }  # what is free of the host's memory may differ from one moment to the next
    here(refresh=True, probe=other)
    assert other.measured == 2


def test_cards_are_asked_for_free_bytes_only_where_these_are_wanted(file: Path) -> None:
    whole, bare = here(probe=pcie()), here(probe=pcie(), free=False)
    assert whole.speed("gpu:1").free == 11 << 30 and whole.links == bare.links
    assert [bare.speed(name).free for name in ("gpu:0", "gpu:1")] == [None, None]


def test_another_driver_is_another_machine(caches: Path) -> None:
    here(probe=pcie())
    newer = Pretended(*pcie().there, driver="driver 14000")
    assert here(probe=newer).machine.endswith("14000") and newer.measured
    assert len(list(caches.glob("machine-*.json"))) == 2


def test_other_cards_of_equal_names_are_another_machine(caches: Path) -> None:
    """As CUDA_VISIBLE_DEVICES chooses them: the links between these need not be equal."""
    card = Card("RTX 3090", 24 << 30, 20 << 30)
    for pair in ("ab", "ac", "ab"):
        here(probe=Pretended(*[card._replace(uuid=uuid * 36) for uuid in pair]))
    assert len(list(caches.glob("machine-*.json"))) == 2


def test_many_cards_of_long_names(file: Path) -> None:
    probe = Pretended(
        *[Card(f"NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition, {i}", 1, 1, f"{i:08}") for i in range(16)]
    )
    found = here(probe=probe)
    assert len(found.name) < 100 and found.machine.endswith("; driver 13000")


def test_a_damaged_file_is_measured_anew(caches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here(probe=pcie())
    (file,) = caches.glob("machine-*.json")
    file.write_text("{}")
    monkeypatch.setattr("graphir.runtime.machine.here._measured", {})
    probe = pcie()
    with pytest.warns(graphir.ProfileWarning, match="measured anew"):
        here(probe=probe)
    assert probe.measured and Topology.load(file).name == "the machine (RTX 3090 + RTX 3060)"


@pytest.mark.parametrize("text", ['{"format": "graphir.program", "version": 1}', "to do: buy a card", "{}"])
@pytest.mark.parametrize("refresh", [False, True])
def test_a_file_of_the_user_that_is_no_topology_stays(file: Path, text: str, refresh: bool) -> None:
    file.parent.mkdir()
    file.write_text(text)
    with pytest.raises(FileError, match="; nothing is written there") as refusal:
        here(probe=pcie(), refresh=refresh)
    assert file.read_text() == text and "name another file" in str(refusal.value.fix)


def test_an_empty_file_is_written(file: Path) -> None:
    file.parent.mkdir()
    file.touch()
    with pytest.warns(graphir.ProfileWarning, match="measured anew"):
        here(probe=pcie())
    assert Topology.load(file).measured


def test_no_file_where_the_environment_wants_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHIR_MACHINE", "")
    monkeypatch.setattr("graphir.runtime.machine.here._measured", {})
    probe = pcie()
    here(probe=probe)
    here(probe=probe)
    assert probe.measured == 2


def test_a_card_that_is_not_there_is_refused(file: Path) -> None:
    with pytest.raises(GraphirError, match="no gpu:2: it has 2 CUDA cards") as refusal:
        here(["gpu:2"], probe=pcie())
    assert "Topology.of" in str(refusal.value.fix)


def test_a_card_without_room_is_named(file: Path) -> None:
    class Full(Pretended):
        def bytes_per_second(self, index: int) -> float:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 MiB.\nGPU 0 has …")

    class Failed(Pretended):
        def cards(self, free: bool) -> list[Card]:
            raise RuntimeError("CUDA error: out of memory")

    for probe, what in ((Full(*pcie().there), r"gpu:0 \(RTX 3090\) cannot be measured"), (Failed(), "what is free")):
        with pytest.raises(GraphirError, match=f"{what}: CUDA .*out of memory[^\n]*") as refusal:
            here(probe=probe)
        for way in ("nvidia-smi", "CUDA_VISIBLE_DEVICES", "Topology.of"):
            assert way in str(refusal.value.fix)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"threads": 0}, "threads=0: a kernel needs at least one thread"),
        ({"threads": "x"}, "threads='x'"),
        ({"devices": "gpu:0"}, "devices is 'gpu:0', not a sequence"),
        ({"devices": 3}, "devices is 3, not a sequence"),
    ],
)
def test_bad_arguments_are_refused(options: Any, said: str) -> None:
    with pytest.raises(GraphirError, match=said):
        Topology.here(**options)


def test_threads_of_a_process_measure_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHIR_MACHINE", "")
    monkeypatch.setattr("graphir.runtime.machine.here._measured", {})
    monkeypatch.setattr("graphir.runtime.machine.here.free_memory", lambda: 1 << 30)  # equal for all threads
    probe = pcie()
    monkeypatch.setattr(probe, "seconds_per_call", lambda index: time.sleep(0.02) or 2e-6)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: here(probe=probe), range(4)))
    assert probe.measured == 2 and found == found[:1] * 4


def test_a_host_is_measured_anew_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    here(probe=Pretended())
    monkeypatch.setattr(calibration, "fastest", lambda run, runs=1: 1.0)
    assert here(probe=Pretended()).speed("cpu:0").seconds_per_call < 0.001
    assert here(probe=Pretended(), refresh=True).speed("cpu:0").seconds_per_call > 0.001
    calibration.forget()


def test_a_machine_without_cards_is_its_host(file: Path) -> None:
    found = here(["gpu:0", "gpu:5"], probe=Pretended())
    assert list(found.devices) == ["gpu:0", "gpu:5", "cpu:0"] and found.host is not None
    assert not file.exists()


def test_peers_and_what_goes_through_the_host(file: Path) -> None:
    cards = [Card("H100", 80 << 30, 79 << 30)] * 2
    found = here(probe=Pretended(*cards, peers=True))
    assert found.link("gpu:0", "gpu:1").peer and not found.link("gpu:0", "cpu:0").peer


@pytest.mark.cuda
def test_this_machine(file: Path) -> None:
    found = Topology.here()
    speed = found.speed("gpu:0")
    assert speed.memory and speed.free and speed.free <= speed.memory
    assert 1e11 < speed.flops_per_second["f32"] < 1e16 and 1e10 < speed.bytes_per_second < 1e14
    up = found.link("cpu:0", "gpu:0")
    assert 1e8 < up.bytes_per_second < 1e12 and up.pageable_bytes_per_second
