"""Topology.here: machines that are pretended, and this one."""

from __future__ import annotations

from pathlib import Path

import pytest
from graphir.runtime.machine.here import here
from graphir.runtime.machine.probe import Card
from pretended import Pretended

import graphir
from graphir import GraphirError, Topology
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
    assert here(probe=other) == first and not other.measured
    here(refresh=True, probe=other)
    assert other.measured == 2


def test_another_driver_is_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRAPHIR_MACHINE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("graphir.runtime.machine.here._measured", {})
    here(probe=pcie())
    newer = Pretended(*pcie().there, driver="driver 14000")
    assert here(probe=newer).machine.endswith("14000") and newer.measured
    assert len(list((tmp_path / "graphir").glob("machine-*.json"))) == 2


def test_a_damaged_file_is_measured_anew(file: Path) -> None:
    file.parent.mkdir()
    file.write_text("{}")
    probe = pcie()
    with pytest.warns(graphir.ProfileWarning, match="measured anew"):
        here(probe=probe)
    assert probe.measured and Topology.load(file).name == "the machine (RTX 3090 + RTX 3060)"


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
