"""Shares of a batch that balance chooses, by speed and by memory: how good they are, and what else they change."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import product
from math import gcd
from typing import Any

import pytest
import torch
from eager import ShareByShare, assert_same_bits, rows_by
from graphir.passes.choice import by_shares
from torch import nn
from torch.nn import functional as F

import graphir
from graphir import Program, Topology, passes, runtime
from graphir.errors import PassError
from graphir.ir.covers import Covers

pytestmark = pytest.mark.usefixtures("one_thread")

ALL = ("shift", "park", "recompute", "share_storage", "shares")


def unlike(*speeds: float) -> Topology:
    """The machine of all figures, with cards so slow that launches take no time beside them."""
    named = Topology.named("h200x8")
    devices = dict(named.devices)
    for i, speed in enumerate(speeds):
        card = devices[f"gpu:{i}"]
        slower = {dtype: 1e-5 * speed * rate for dtype, rate in card.flops_per_second.items()}
        rates = {"flops_per_second": slower, "bytes_per_second": 1e-3 * speed * card.bytes_per_second}
        devices[f"gpu:{i}"] = card.model_copy(update=rates)
    return named.model_copy(update={"name": "unlike", "devices": devices})


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.Tanh())])


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def captured(rows: int = 60, model: nn.Module | None = None) -> Program:
    model = network() if model is None else model
    x = torch.randn(rows, 64)
    return graphir.capture(model, (x,), targets=(x,), loss=F.mse_loss, optimizer=sgd(model))


def replicated(replicas: int, rows: int = 60, model: nn.Module | None = None, **options: Any) -> Program:
    return passes.replicate(captured(rows, model), devices=range(replicas), **options)


def peaks(program: Program) -> dict[str, int]:
    held = graphir.memory(passes.emit(passes.inject_copies(program)), threads=1, profile=None).peak
    return {device: nbytes for device, nbytes in held.items() if device != "cpu:0"}


def ample(program: Program) -> dict[str, int]:
    return dict.fromkeys(peaks(program), 1 << 30)


balance = partial(passes.balance, evaluations=40)


def small_shares(replicas: int, most: int) -> Iterator[tuple[int, ...]]:
    for shares in product(range(1, most), repeat=replicas):
        if sum(shares) <= most and gcd(*shares) == 1:
            yield shares


def seconds(program: Program, machine: Topology, several: Iterable[Sequence[int]]) -> list[float]:
    """What a step takes by shares as it is, without a placement."""
    plan = passes.emit(passes.inject_copies(program))
    sizes = [dict(zip(plan.dims, rows_by(shares, sum(plan.dims.values())), strict=True)) for shares in several]
    return [graphir.estimate(plan, machine, dims=dims, threads=1, profile=None).seconds for dims in sizes]


@pytest.mark.parametrize("speeds", [(1.0, 0.5), (0.3, 1.0), (1.0, 0.8), (1.0, 0.6, 0.25)])
def test_chosen_shares_are_as_fast_as_the_best_small_ones(speeds: tuple[float, ...]) -> None:
    program, machine = replicated(len(speeds)), unlike(*speeds)
    equal, *steps = seconds(program, machine, [[1] * len(speeds), *small_shares(len(speeds), 8)])
    found = balance(program, ample(program), topology=machine, options=["shares"])
    assert found.after <= 1.01 * min(steps)
    assert found.after < 0.95 * found.before
    assert found.before == pytest.approx(equal)


def test_the_report_says_shares_and_reads_back() -> None:
    program, machine = replicated(2), unlike(1, 0.5)
    found = balance(program, ample(program), topology=machine, options=["shares"])
    assert (found.shares, found.pipeline) == ((2, 1), "replicate{devices=[0, 1], shares=[2, 1]}")
    assert passes.Pipeline(found.pipeline)(program) == found.program
    assert found.program.with_(history=()) == passes.replicate(captured(), [0, 1], shares=[2, 1]).with_(history=())
    assert "\n  rows of the replicas: 80, 40; other shares give other means, and so other bits\n" in str(found)
    assert '"shares": [2, 1]' in found.to_json()
    kept = balance(program, ample(program), topology=machine, options=[])
    assert (kept.pipeline, kept.shares, kept.program) == ("", (), program)
    assert [use[:3] for use in found.devices] == [use[:3] for use in kept.devices]
    assert [use[4] for use in found.devices] == pytest.approx([use[4] for use in kept.devices])
    assert found.before == kept.before


def test_equal_devices_keep_equal_shares() -> None:
    program = replicated(2)
    found = balance(program, ample(program), topology=unlike(1, 1), options=["shares"])
    assert (found.pipeline, found.shares, found.program) == ("", (), program)


def test_memory_that_equal_shares_exceed_is_kept_by_unlike_ones() -> None:
    """What the chosen plan does has the bits of eager PyTorch share by share, and is not certified as the same."""
    program, machine = replicated(2, rows=600), unlike(1, 1)
    held = peaks(program)
    limits = {"gpu:0": int(1.4 * held["gpu:0"]), "gpu:1": int(0.75 * held["gpu:1"])}
    with pytest.raises(PassError, match="gpu:1 lacks") as refusal:
        balance(program, limits, topology=machine, options=["share_storage"])
    assert ", allow more options, let replicas have unlike shares ('shares' among options)" in refusal.value.fix
    found = balance(program, limits, topology=machine, options=["share_storage", "shares"])
    assert found.shares[0] > found.shares[1] and found.pipeline.startswith("replicate{devices=[0, 1], shares=")
    assert all(use.after <= limits[use.device] for use in found.devices if use.limit)

    again = passes.replicate(program, devices=[0, 1], shares=found.shares)
    placed = passes.Pipeline(found.then)(found.program)
    assert graphir.certify(again, placed).holds
    with pytest.raises(graphir.EquivalenceError, match="shares of the batch differ"):
        graphir.certify(program, placed)
    eager = ShareByShare(network(), F.mse_loss, sgd, 2)
    with runtime.Session(passes.emit(placed), program.state, binding="cpu") as session:
        for rows in (40, 13):
            x = torch.randn(rows, 64)
            parts = x.split(rows_by(found.shares, rows))
            expected = eager.step_on([((part,), (part,), {}) for part in parts])
            assert_same_bits({"loss": session.step(x, x)}, {"loss": expected}, f"{rows} rows")
        assert_same_bits(session.state_dict(), eager.models[0].state_dict(), "parameters")


def test_shares_come_before_what_is_moved_and_computed_again() -> None:
    blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3)]
    program, machine = replicated(2, rows=600, model=nn.Sequential(*blocks)), unlike(1, 0.5)
    limits = {device: int(0.8 * nbytes) for device, nbytes in peaks(program).items()}
    without = balance(program, limits, topology=machine)
    found = balance(program, limits, topology=machine, options=ALL)
    first, *others = passes.Pipeline(found.pipeline).passes
    assert (first.name, found.shares) == ("replicate", found.program.shares) and others
    assert passes.Pipeline(found.pipeline)(program) == found.program
    assert all(use.after <= limits[use.device] for use in found.devices if use.limit)
    assert found.after < 0.9 * without.after and found.before == without.before


def test_shares_that_were_given_change_where_options_say_so() -> None:
    program, machine = replicated(2, shares=[1, 3]), unlike(1, 0.5)
    assert balance(program, ample(program), topology=machine).program.shares == (1, 3)
    found = balance(program, ample(program), topology=machine, options=["shares"])
    assert found.shares == found.program.shares == (2, 1)


@pytest.mark.parametrize(("rows", "shares"), [(2, ()), (5, (3, 1))])
def test_each_replica_keeps_the_rows_that_the_program_takes(rows: int, shares: tuple[int, ...]) -> None:
    """A batch norm takes two rows or more: of ten, 8 and 2."""
    program = replicated(2, rows=rows, model=nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)))
    assert program.covers.guards
    found = balance(program, ample(program), topology=unlike(1, 0.05), options=["shares"])
    assert found.shares == shares


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_program_that_takes_no_other_shares_is_refused(replicas: int) -> None:
    program = replicated(replicas)
    message = "has one replica, which takes all of the batch\n  fix  replicate it over several devices, or leave shares"
    if replicas > 1:
        program = program.with_(dims={}, covers=Covers(fixed="a view"))
        message = "takes the same sizes, so that shares cannot differ: a view\n  fix  .* leave shares out of options"
    with pytest.raises(PassError, match=f"^balance: .*{message}"):
        balance(program, {"gpu:0": "1 GiB"}, topology="h200x8", options=["shares"])


def test_a_refusal_says_by_which_shares_its_limits_work() -> None:
    program, machine = replicated(2, rows=600), unlike(1, 1)
    held = peaks(program)
    limits = {"gpu:0": int(0.9 * held["gpu:0"]), "gpu:1": int(0.5 * held["gpu:1"])}
    with pytest.raises(PassError, match=r"no placement within the limits was found by shares=\[\d+, \d+\]: ") as error:
        balance(program, limits, topology=machine, options=["shares"])
    said = error.value
    shares = [int(text) for text in said.what.partition("by shares=[")[2].partition("]")[0].split(", ")]
    works = dict(part.split("': ") for part in said.fix.partition("{'")[2].partition("}")[0].split(", '"))
    assert f"works by shares={shares} (" in said.fix
    again = passes.replicate(program, devices=[0, 1], shares=shares)
    balance(again, {device: int(nbytes) for device, nbytes in works.items()}, topology=machine, options=[])
    assert shares[0] > shares[1] and "or name more devices in limits, allow more options" in said.fix


def test_ctrl_c_ends_all_of_it_with_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    program, made = replicated(2), list[Program]()

    class Interrupted(by_shares.Balancing):
        def run(self) -> passes.Balanced:
            made.append(self.program)
            if len(made) == 2:
                raise KeyboardInterrupt
            return super().run()

    monkeypatch.setattr(by_shares, "Balancing", Interrupted)
    found = balance(program, ample(program), topology=unlike(1, 0.5), options=["shares"])
    assert (found.program, len(made)) == (program, 2)
