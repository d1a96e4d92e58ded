"""Topologies: by hand, by name, from files; and what they refuse."""

import json
import math
import re

import pytest

from graphir.analysis.cards import CARDS, LINKS
from graphir.analysis.topology import MOST_BYTES, Host, Link, Speed, Topology
from graphir.errors import FileError, GraphirError

SPEED = {"flops_per_second": {"f32": 1e12}, "bytes_per_second": 1e11}


def small(**changes):
    links = [Link(source="gpu:0", destination="gpu:1", bytes_per_second=1e9, latency=1e-6)]
    return Topology(**{"name": "small", "devices": {"gpu:0": SPEED, "gpu:1": SPEED}, "links": links, **changes})


@pytest.mark.parametrize(("name", "flops", "bandwidth"), [("h200x8", 989e12, 450e9), ("a100x8", 312e12, 300e9)])
def test_named_machines_have_their_makers_figures(name, flops, bandwidth):
    machine = Topology.named(name)
    assert len(machine.devices) == 9 and len(machine.links) == 8 * 7 + 16
    assert machine.speed("gpu:7").flops_per_second["bf16"] == flops
    assert machine.link("gpu:3", "gpu:4").bytes_per_second == bandwidth
    assert machine.link("gpu:3", "cpu:0").bytes_per_second < bandwidth
    assert machine.host is None


def test_the_host_by_name_shares_its_cores():
    assert Topology.named("cpu").host == Host(cores=8)


def test_a_copy_takes_its_latency_and_its_bytes():
    assert small().link("gpu:0", "gpu:1").seconds(1000) == pytest.approx(2e-6)


def test_devices_are_named_as_in_programs():
    assert list(Topology(name="", devices={"cpu": SPEED}).devices) == ["cpu:0"]


def test_a_file_keeps_all(tmp_path):
    for machine in (small(), small(host=Host(cores=2, slowdown=1.5), machine="a"), Topology.named("h200x8")):
        machine.save(tmp_path / "machine.json")
        assert Topology.load(tmp_path / "machine.json") == machine


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: Topology.named("h200"), "no topology has the name 'h200'; did you mean 'h200x8'"),
        (lambda: Topology.named(8), "no topology has the name 8"),
        (lambda: small(devices={}), "no topology: Dictionary should have at least 1 item"),
        (lambda: small(devices={"gpu0": SPEED}), "no topology: 'gpu0' is not a device"),
        (lambda: small(devices={"cpu": SPEED, "cpu:0": SPEED}, links=()), "no topology: a device is named twice"),
        (lambda: small(devices={"gpu:0": SPEED}), "a link leads from gpu:0 to gpu:1, and there is no gpu:1"),
        (lambda: small(links=[*small().links, *small().links]), "two links lead from gpu:0 to gpu:1"),
        (lambda: small(bandwidth=3), "no topology: Extra inputs are not permitted"),
        (lambda: Speed(**{**SPEED, "bytes_per_second": 0}), "no speed: Input should be greater than 0"),
        (lambda: Speed(**{**SPEED, "bytes_per_second": math.nan}), "no speed: Input should be"),
        (lambda: Speed(**{**SPEED, "bytes_per_second": math.inf}), "no speed: Input should be"),
        (lambda: Speed(**{**SPEED, "memory": -1}), "no speed: -1 is not a number of bytes"),
        (lambda: Speed(flops_per_second={"f32": -1}, bytes_per_second=1), "no speed: Input should be greater than 0"),
        (lambda: Speed(flops_per_second={"f64": 1}, bytes_per_second=1), "no speed: the figure of f32 is missing"),
        (
            lambda: Speed(flops_per_second={"f32": 1, "f33": 1}, bytes_per_second=1),
            "no speed: 'f33' is no element type; did you mean 'f32'",
        ),
        (lambda: Link(source="gpu:0", destination="gpu:0", bytes_per_second=1), "a link leads from gpu:0 to itself"),
        (lambda: Link(source="gpu:0", destination="gpu:1", bytes_per_second=1, latency=-1), "no link: Input should be"),
        (lambda: Host(cores=0), "no host: Input should be greater than or equal to 1"),
        (lambda: Host(cores=1, slowdown=0.5), "no host: Input should be greater than or equal to 1"),
        (lambda: small().speed("gpu:2"), "topology 'small' has no device gpu:2; did you mean 'gpu:"),
        (lambda: small().link("gpu:1", "gpu:0"), "topology 'small' has no link from gpu:1 to gpu:0"),
        (lambda: small().link("gpu:1", "gpu:4"), "topology 'small' has no device gpu:4"),
    ],
)
def test_nonsense_is_refused(make, error):
    with pytest.raises(GraphirError) as raised:
        make()
    assert error in raised.value.what
    assert raised.value.fix


def written(tmp_path, document):
    path = tmp_path / "machine.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return path


FILE = {"format": "graphir.topology", "version": 1, "topology": {"name": "a", "devices": {"gpu:0": SPEED}}}


@pytest.mark.parametrize(
    ("document", "error"),
    [
        ("{", "the file is damaged: Invalid JSON"),
        ([], "the file is damaged: "),
        ({**FILE, "format": "graphir.plan"}, "the file holds a 'graphir.plan', not a topology"),
        ({**FILE, "version": 2}, "the file has version 2 of its format, this graphir reads version 1"),
        ({**FILE, "more": 1}, "the file is damaged: Extra inputs are not permitted"),
        ({**FILE, "topology": {"name": "a", "devices": {"gpu:x": SPEED}}}, "'gpu:x' is not a device"),
        ({**FILE, "topology": {"name": "a", "devices": {"gpu:0": {}}}}, "the file is damaged: "),
        ({**FILE, "topology": {"name": "a\nb", "devices": {"gpu:0": SPEED}}}, "the file is damaged: "),
        (json.dumps(FILE).replace("100000000000.0", "1e999"), "the file is damaged: "),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path, document, error):
    assert Topology.load(written(tmp_path, FILE)).name == "a"
    with pytest.raises(FileError) as raised:
        Topology.load(written(tmp_path, document))
    assert error in raised.value.what
    assert str(tmp_path) in raised.value.where and raised.value.fix


def test_a_file_that_is_too_large_is_not_read(tmp_path):
    path = tmp_path / "machine.json"
    with path.open("wb") as file:
        file.truncate(MOST_BYTES + 1)
    with pytest.raises(FileError, match="more than 16777216 are not read"):
        Topology.load(path)


def test_cards_by_name():
    pair = Topology.of("rtx3090", "rtx4090", link="pcie4x8")
    assert pair.name == "rtx3090 + rtx4090 over pcie4x8"
    assert pair.speed("gpu:1").flops_per_second["f32"] == 82.6e12 > pair.speed("gpu:0").flops_per_second["f32"]
    assert pair.link("gpu:0", "gpu:1").bytes_per_second == pair.link("cpu:0", "gpu:1").bytes_per_second == 15.8e9
    assert not pair.link("gpu:0", "gpu:1").peer
    joined = Topology.of("h100", "h100", link="nvlink4", tf32=True)
    assert joined.link("gpu:1", "gpu:0").peer and joined.speed("gpu:0").flops_per_second["f32"] == 494e12


def test_every_card_and_link_makes_a_machine():
    assert len(CARDS) >= 15 and len(LINKS) >= 10
    for link in LINKS:
        Topology.of("a100", link=link)
    found = Topology.of(*CARDS)
    assert all(speed.memory for speed in found.devices.values())
    assert "bf16" not in found.devices[f"gpu:{list(CARDS).index('v100')}"].flops_per_second


@pytest.mark.parametrize(
    ("cards", "options", "message"),
    [
        (("rtx3091",), {}, "no card has the name 'rtx3091'; did you mean 'rtx3090'"),
        ((), {}, "a machine has one card at least"),
        (("h100",), {"link": "nvlink9"}, "no link has the name 'nvlink9'; did you mean"),
        ((3,), {}, "no card has the name 3"),
    ],
)
def test_unknown_cards_and_links_are_refused(cards, options, message):
    with pytest.raises(GraphirError, match=re.escape(message)):
        Topology.of(*cards, **options)
