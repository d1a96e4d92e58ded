"""The machine at hand is what predictions are of where nobody names another one: shown on pretended machines."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import linked
import pytest
import torch
from graphir.passes.limits import free_limits
from graphir.runtime.machine import calibration
from graphir.runtime.machine.here import here
from graphir.runtime.machine.probe import Card
from pretended import MACHINES, Pretended, machine, pretended
from runnable import short_searches
from torch import nn
from torch.nn import functional as F

import graphir
from graphir import Program, Topology, passes
from graphir.analysis.cost import Rates
from graphir.errors import GraphirError, PassError
from graphir.facade.cli import app

pytestmark = pytest.mark.usefixtures("one_thread")

PCIE = "24 and 12 GB over PCIe"
ON_PCIE = "this machine (rtx3090 + rtx3060), measured "
MISSING = "this machine has no gpu:2: it has 2 CUDA cards"


@pytest.fixture
def pcie() -> Iterator[Pretended]:
    """Two unlike cards without peers."""
    with pretended(MACHINES[PCIE]) as probe:
        yield probe


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    short_searches(monkeypatch, 20)


def layers(count: int = 6, **options: Any) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(count) for layer in (nn.Linear(64, 64, **options), nn.Tanh())])
    return model, torch.randn(256, 64, **options)


def trained(**options: Any) -> Program:
    model, x = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return graphir.capture(model, (x,), targets=(x,), loss=F.mse_loss, optimizer=optimizer, **options)


def across(program: Program, device: str = "gpu:1") -> Program:
    """The program with its second half on another device, and its copies."""
    return passes.inject_copies(passes.shift_modules(program, {"[6:12]": device}))


def half(x: torch.Tensor) -> Program:
    """A step that multiplies bf16."""
    return graphir.capture(nn.Linear(8, 8, dtype=torch.bfloat16), (x.to(torch.bfloat16),))


@pytest.mark.parametrize(
    ("name", "model", "share"),
    [
        (PCIE, "transformer", 0.7),
        (PCIE, "mixture of MLPs", 0.7),
        ("2 x 80 GB with NVLink", "GPT-2", 0.7),
        ("2 x 80 GB with NVLink", "ResNet", 0.8),
        ("a card and a host", "convolutions", 1.1),
        ("a card and a host", "U-Net", 1.1),
    ],
)
def test_the_placement_by_default_is_as_fast_as_that_for_the_machine(name: str, model: str, share: float) -> None:
    with pretended(MACHINES[name]) as probe:
        program = linked.captured(model, 2)
        limits = linked.limits(program, len(probe.there), share)
        found = [passes.balance(program, limits, topology=t, evaluations=25) for t in (None, Topology.here())]
        assert found[0].machine.startswith("this machine (") and found[0].measured
        plans = [passes.emit(passes.Pipeline(one.then)(one.program)) for one in found]
        by_default, named = (graphir.estimate(plan) for plan in plans)
        assert by_default.seconds / named.seconds == 1.0 and by_default.machine == found[0].machine
        assert by_default == graphir.estimate(plans[0], Topology.here())


def test_a_placement_for_another_machine_is_slower_on_this_one(pcie: Pretended) -> None:
    program = linked.captured("transformer", 2)
    limits = linked.limits(program, 2, 0.7)
    seconds = []
    for topology in (None, "h200x8"):
        found = passes.balance(program, limits, topology=topology, evaluations=25)
        seconds.append(graphir.estimate(passes.emit(passes.Pipeline(found.then)(found.program))).seconds)
    assert seconds[1] > 1.1 * seconds[0]


def test_micro_batches_are_ordered_for_the_machine(pcie: Pretended) -> None:
    program = across(trained(accumulate=4))
    found = passes.pipeline(program)
    assert str(found.step) == str(passes.pipeline(program, topology=Topology.here()).step)
    assert str(found.step) != str(passes.pipeline(program, topology="cpu").step)
    assert found.history[-1] == "pipeline"


def test_compile_places_for_the_machine(pcie: Pretended, short: None) -> None:
    need = graphir.memory(trained(), threads=1, profile=None).peak["gpu:0"]
    model, x = layers()
    options: dict[str, Any] = {"targets": (x,), "loss": F.mse_loss, "limits": dict.fromkeys([0, 1], int(1.1 * need))}
    options["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)
    with graphir.compile(model, (x,), **options) as step:
        assert step.balanced is not None and step.balanced.machine.startswith(ON_PCIE)
        assert step.balanced.machine in repr(step)
        assert all(step.balanced.limits[f"gpu:{i}"] == int(1.1 * need) for i in range(2))
    with graphir.compile(model, (x,), topology="h200x8", **options) as step:
        assert step.balanced is not None and step.balanced.machine.startswith("h200x8, ")
    with graphir.compile(model, (x,), session={"executor": "threads"}, **options) as step:
        assert step.balanced is not None and step.balanced.machine.startswith("this host (")


def test_a_topology_without_limits_is_refused() -> None:
    model, x = layers()
    with pytest.raises(PassError, match="nothing is placed without limits"):
        graphir.compile(model, (x,), topology="h200x8")


def test_more_gpus_than_cards_are_refused_with_what_to_name(pcie: Pretended) -> None:
    program = trained()
    model, x = layers()
    calls: list[Callable[[], object]] = [
        lambda: graphir.estimate(passes.emit(across(program, "gpu:2"))),
        lambda: passes.balance(program, {0: "1 GiB", 2: "1 GiB"}, evaluations=1),
        lambda: passes.balance(program, {0: "1 GiB"}, devices=[2], evaluations=1),
        lambda: passes.pipeline(across(trained(accumulate=2), "gpu:2")),
        lambda: graphir.compile(model, (x,), targets=(x,), loss=F.mse_loss, limits={0: "1 GiB", 2: "1 GiB"}),
    ]
    for call in calls:
        with pytest.raises(GraphirError) as refusal:
            call()
        assert MISSING in refusal.value.what
        for named in ("topology='h200x8'", "Topology.of('h100', …)", "Topology.load(path)"):
            assert named in str(refusal.value.fix)
    assert graphir.estimate(passes.emit(across(program, "gpu:2")), executor="threads").topology.startswith("this host")


# Limits of what is free


def test_limits_are_what_is_free_on_all_cards_less_a_twentieth(pcie: Pretended) -> None:
    found = passes.balance(trained(), "auto", evaluations=5)
    for index, card in enumerate(pcie.there):
        assert found.limits[f"gpu:{index}"] == int(0.95 * card.free)
    assert found.limits["cpu:0"] > 0 and "gpu:1" in str(found)
    assert json.loads(found.to_json())["limits"] == found.limits
    alone = passes.balance(trained(), "auto", devices=[0], evaluations=5)
    assert sorted(alone.limits) == ["cpu:0", "gpu:0"]


def test_logical_devices_share_what_the_host_has_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "free_memory", lambda: 100 << 30)
    found = passes.balance(trained(), "auto", devices=[0, 1, 2, 3], evaluations=5)
    assert sum(found.limits.values()) <= 100 << 30
    assert {found.limits[f"gpu:{i}"] for i in range(4)} == {int(0.95 * (25 << 30))}


def test_limits_of_the_host_are_of_the_memory_that_its_logical_devices_share() -> None:
    program, whole = trained(), sum([Topology.here([0, 1]).speed(f"gpu:{i}").memory or 0 for i in range(2)])
    given = {"gpu:0": "1 GiB", "gpu:1": "1 GiB"}
    assert passes.balance(program, {**given, "cpu": whole // 2}, evaluations=5).limits["cpu:0"] == whole // 2
    with pytest.raises(PassError, match="limits lets cpu:0 hold"):
        passes.balance(program, {**given, "cpu": 2 * whole}, evaluations=5)


@pytest.mark.parametrize(("topology", "held"), [("h200x8", 141_000_000_000), ("a100x8", 80_000_000_000)])
def test_of_a_machine_elsewhere_limits_are_its_memory(topology: str, held: int) -> None:
    found = passes.balance(trained(), "auto", topology=topology, evaluations=5)
    assert {found.limits[f"gpu:{i}"] for i in range(8)} == {int(0.95 * held)}


def test_a_device_without_memory_has_no_limit_to_find() -> None:
    speed = {"flops_per_second": {"f32": 1e12}, "bytes_per_second": 1e12}
    bare = Topology(name="bare", devices={"gpu:0": speed, "cpu:0": speed})
    with pytest.raises(PassError, match="'bare' does not say how much memory gpu:0 has") as refusal:
        passes.balance(trained(), "auto", topology=bare)
    assert "'memory'" in str(refusal.value.fix) and "{'gpu:0': '20 GiB'}" in str(refusal.value.fix)
    with pytest.raises(PassError, match="has no device gpu:3") as refusal:
        free_limits(bare, ["gpu:3"])
    assert "it has gpu:0, cpu:0" in str(refusal.value.fix)


def test_compile_prints_what_was_free_once(pcie: Pretended, short: None, capsys: pytest.CaptureFixture[str]) -> None:
    model, x = layers(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"targets": (x,), "loss": F.mse_loss, "optimizer": optimizer}
    with graphir.compile(model, (x,), limits="auto", **options) as step:
        step.step(x, x)
        assert step.balanced is not None and step.balanced.limits["gpu:1"] == int(0.95 * pcie.there[1].free)
    printed = capsys.readouterr().err
    assert printed.count("limits of ") == 1 and f" on {ON_PCIE}" in printed and ": gpu:0 19.9 GiB, gpu:1 " in printed


def test_only_automatic_limits_ask_cards_for_free_bytes(
    pcie: Pretended, short: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA makes a context on each card that is asked."""
    asked: list[bool] = []
    monkeypatch.setattr(pcie, "cards", lambda free: asked.append(free) or Pretended.cards(pcie, free))
    graphir.estimate(passes.emit(across(trained())))
    model, x = layers(2)
    graphir.compile(model, (x,), limits={"gpu:0": "1 GiB"}, loss=torch.sum).close()
    assert asked and not any(asked)
    asked.clear()
    graphir.compile(model, (x,), limits="auto", loss=torch.sum).close()
    assert asked[0]


def test_a_full_device_is_said_to_be_full() -> None:
    probe = machine("rtx3090", link="pcie4x16")
    probe.there[0] = probe.there[0]._replace(free=1000)
    with pretended(probe), pytest.raises(PassError) as refusal:
        passes.balance(trained(), "auto", evaluations=5)
    assert "of 22.4 GiB on gpu:0 1000 B are free (nvidia-smi lists what holds the rest)" in refusal.value.what


def test_a_refusal_names_what_the_machine_has() -> None:
    """No card that is not there, and no limit without a word that is larger than its card."""
    with pretended(machine("rtx3060", link="pcie4x16")):
        program = trained()
        with pytest.raises(PassError) as refusal:
            passes.balance(program, {0: "1 KiB"}, options=["park"], evaluations=5)
        assert "; or allow more options" in str(refusal.value.fix)
        with pytest.raises(PassError) as refusal:
            passes.balance(program, {0: "1 KiB"}, evaluations=5)
        assert str(refusal.value.fix).endswith("; or take smaller batches") and "gpu:0 has" not in str(refusal.value)
    small = machine("rtx3060", "rtx3060", link="pcie4x16")
    assert small.figures is not None
    speeds = {name: speed.model_copy(update={"memory": 4096}) for name, speed in small.figures.devices.items()}
    tiny = small.figures.model_copy(update={"devices": speeds})
    with pytest.raises(PassError, match=r"; gpu:0 has 4.0 KiB\); or name more devices in limits$"):
        passes.balance(program, {0: "1 KiB"}, topology=tiny, evaluations=5)


def test_a_link_that_a_reduction_lacks_is_refused_by_the_pass() -> None:
    speed = {"flops_per_second": {"f32": 1e12}, "bytes_per_second": 1e12, "memory": "8 GiB"}
    apart = Topology(name="apart", devices=dict.fromkeys(["gpu:0", "gpu:1", "cpu:0"], speed))
    with pytest.raises(PassError, match="balance: topology 'apart' has no link") as refusal:
        passes.balance(passes.replicate(trained(), [0, 1]), {0: "1 GiB"}, topology=apart, options=["park"])
    assert "AllReduce" in str(refusal.value.at)


def test_the_command_line_takes_what_is_free(
    pcie: Pretended, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graphir.save(trained(), file := tmp_path / "program.json")
    app(["balance", str(file), "--limit=auto", "--evaluations=5"], standalone_mode=False)
    assert capsys.readouterr().out.startswith(f"on {ON_PCIE}")
    with pytest.raises(GraphirError, match="--limit 'auto' names no bytes"):
        app(["balance", str(file), "--limit=auto", "--limit=gpu:0=1GiB"], standalone_mode=False)


# Element types


def test_what_a_card_cannot_multiply_is_refused() -> None:
    program = half(torch.randn(4, 8))
    with pretended(Pretended(Card("GTX 1080", 8 << 30, 7 << 30), lacks=("bf16",))):
        for call in (
            lambda: graphir.estimate(passes.emit(program)),
            lambda: passes.balance(program, {0: "1 GiB"}, evaluations=1),
        ):
            with pytest.raises(
                GraphirError, match=r"gpu:0 of this machine \(GTX 1080\) cannot multiply bf16"
            ) as refusal:
                call()
            assert "it has f32" in str(refusal.value.fix)


def test_where_figures_are_left_out_a_report_says_whose_are_taken() -> None:
    plan = passes.emit(half(torch.randn(4, 8)))
    found = graphir.estimate(plan, Topology.of("v100"))
    assert found.caveats == ("v100 over pcie4x16 has no figure of bf16 for gpu:0: that of f32 is taken",)
    assert f"\n  but {found.caveats[0]}\n" in str(found)
    assert not graphir.estimate(plan, Topology.of("a100")).caveats


# Machines that are measured, kept and bound


def test_a_missing_link_is_named_with_who_needs_it() -> None:
    speed = {"flops_per_second": {"f32": 1e12}, "bytes_per_second": 1e12, "memory": "8 GiB"}
    apart = Topology(name="apart", devices=dict.fromkeys(["gpu:0", "gpu:1", "cpu:0"], speed))
    program = across(trained(accumulate=2))
    for call in (
        lambda: graphir.estimate(passes.emit(program), apart),
        lambda: passes.pipeline(program, topology=apart),
        lambda: passes.balance(trained(), {0: "1 GiB", 1: "1 GiB"}, topology=apart),
    ):
        with pytest.raises(GraphirError, match="topology 'apart' has no link from gpu:0 to gpu:1") as refusal:
            call()
        assert "'bytes_per_second': …" in str(refusal.value.fix)


def test_a_pass_says_its_topology_so_that_text_reads_back(pcie: Pretended) -> None:
    program = across(trained(accumulate=2))
    made = Topology.of("l4", "t4")
    for topology in ("h200x8", made):
        found = passes.pipeline(program, topology=topology)
        again = passes.Pipeline(found.history[-1])
        assert str(again(program).step) == str(found.step) and again(program).history == found.history
    assert passes.pipeline(program, topology="h200x8").history[-1] == "pipeline{topology=h200x8}"


def test_a_file_of_another_machine_is_refused_until_it_is_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graphir.runtime.machine.here._measured", {})
    monkeypatch.setenv("GRAPHIR_MACHINE", str(file := tmp_path / "machine.json"))
    here(probe=MACHINES[PCIE])
    other = MACHINES["a card and a host"]
    with pytest.raises(GraphirError, match="figures of another machine: rtx3090, rtx3060; driver 13000; this is") as e:
        here(probe=other)
    assert e.value.where == f"{file}, which GRAPHIR_MACHINE names" and "--machine" in str(e.value.fix)
    here(probe=other, refresh=True)
    assert Topology.load(file).machine == "rtx4090; driver 13000"


def test_a_saved_machine_is_no_longer_this_one(pcie: Pretended, tmp_path: Path) -> None:
    at_hand = Topology.here()
    at_hand.save(tmp_path / "machine.json")
    found = Topology.load(tmp_path / "machine.json")
    assert found.about == f"the machine (rtx3090 + rtx3060), measured {at_hand.measured}"
    assert found.speed("gpu:0").free is None and found.speed("gpu:0").memory == 24_000_000_000
    assert passes.balance(trained(), "auto", topology=found, evaluations=5).limits["gpu:0"] == int(0.95 * 24e9)


def test_devices_that_share_a_card_have_equal_parts_of_it() -> None:
    probe = MACHINES[PCIE]
    with pretended(probe):
        found = here(["gpu:0", "gpu:1", "gpu:2"], binding="cuda")
    assert found.seconds_to_issue == probe.issues
    whole = probe.figures
    assert whole is not None and list(found.devices) == ["cpu:0", "gpu:0", "gpu:1", "gpu:2"]
    assert found.speed("gpu:2").bytes_per_second == found.speed("gpu:0").bytes_per_second == 936e9 / 2
    assert found.speed("gpu:1").bytes_per_second == 360e9 and found.speed("gpu:0").memory == 12_000_000_000
    assert found.link("gpu:0", "gpu:2").bytes_per_second == 936e9 / 4 and found.link("gpu:0", "gpu:2").peer
    assert found.link("gpu:0", "gpu:1").bytes_per_second == whole.link("gpu:0", "gpu:1").bytes_per_second
    assert "gpu:2 on gpu:0" in found.name


def test_devices_on_the_host_beside_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pretended(MACHINES[PCIE]):
        found = here(["gpu:0", "gpu:1"], binding={"gpu:0": "cuda:1", "gpu:1": "cpu"})
    assert found.speed("gpu:0").bytes_per_second == 360e9
    assert found.speed("gpu:1").bytes_per_second == found.speed("cpu:0").bytes_per_second
    assert found.link("gpu:0", "gpu:1").bytes_per_second == found.link("gpu:0", "cpu:0").bytes_per_second


def test_a_busy_host_is_as_fast_as_one_thread_at_least(monkeypatch: pytest.MonkeyPatch) -> None:
    def rates(threads: int) -> Rates:
        flops = dict.fromkeys(["f32", "f64", "bf16"], 1e11 if threads == 1 else 3e8)
        return Rates(flops, 1e10 * threads, 1e-6 * threads, 1e-6)

    monkeypatch.setattr(calibration, "host_rates", rates)
    found = calibration.host_speed(1, 16)
    assert found.flops_per_second["f32"] == 1e11 and found.seconds_per_call == 1e-6
    assert found.bytes_per_second == 16e10


def test_the_command_line_measures_the_machine_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pretended(machine("rtx3090", "rtx3060", link="pcie4x8")) as probe:
        monkeypatch.setenv("GRAPHIR_MACHINE", str(file := tmp_path / "machine.json"))
        for measured in (2, 4):
            app(["profile", "--machine"], standalone_mode=False)
            assert probe.measured == measured and Topology.load(file).measured
        printed = capsys.readouterr().out
        assert printed.startswith(ON_PCIE) and "gpu:0 -> gpu:1" in printed and "bf16 TFLOP/s" in printed
        app(["profile", "--machine", "--json"], standalone_mode=False)
        file.write_text(capsys.readouterr().out)
        assert Topology.load(file).speed("gpu:1").memory == 12_000_000_000
    for arguments, said, fix in (
        (["--machine", "plan.json"], "not both", "graphir profile --machine"),
        ([], "nothing to measure", "graphir profile --machine"),
        (["--machine", "--path=machine.json"], "--path is the file of a profile", "GRAPHIR_MACHINE"),
        (["--machine", "--device=cuda:0"], "--device is where a profile", "CUDA_VISIBLE_DEVICES"),
    ):
        with pytest.raises(GraphirError, match=said) as refusal:
            app(["profile", *arguments], standalone_mode=False)
        assert fix in str(refusal.value.fix)


def test_a_slow_host_issues_more_slowly() -> None:
    program = trained()
    plan, found = passes.emit(program), {}
    for seconds in (5e-6, 20e-6):
        with pretended(Pretended(Card("L4", 24 << 30, 23 << 30), issues=seconds)):
            found[seconds] = graphir.estimate(plan)
            balanced = passes.balance(program, {"gpu:0": "1 GiB"}, evaluations=1)
            assert balanced.after == found[seconds].seconds  # what balance reckons with is the same
    assert found[5e-6].issue is not None and found[20e-6].issue is not None
    assert found[20e-6].issue.seconds == pytest.approx(4 * found[5e-6].issue.seconds)
    unknown = graphir.estimate(plan, Topology.of("l4"))
    assert unknown.issue is not None and unknown.issue.seconds == pytest.approx(found[5e-6].issue.seconds)
