"""Tables split by rows and by columns train as they do on one device with the whole batch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from idioms import loss_of
from tables import OPTIMIZERS, Bags, Joined, Last, Sequences, Weighted, batch_of, captured
from torch import nn
from torch.utils.checkpoint import checkpoint

import graphir
from graphir import Program, passes, runtime
from graphir.demo.dlrm import Config, Dlrm, batch_dims, clicks, loss

KINDS = ("rows", "columns")


def assert_close(ours: torch.Tensor, theirs: torch.Tensor, rtol: float, what: str) -> None:
    scale = max(theirs.abs().max().item(), 1e-3)
    assert (ours - theirs).abs().max().item() <= rtol * scale, what


def sharded(program: Program, placement: Mapping[str, Any], devices: Sequence[int]) -> Program:
    found = passes.inject_copies(passes.shard(program, placement, devices))
    assert graphir.parse(str(found)) == found
    return found


def assert_trains_as_one_device(
    make: Callable[[], nn.Module],
    kind: str,
    devices: Sequence[int],
    rows: Sequence[int],
    *,
    optimizer: str = "sgd",
    over: Sequence[int] | None = None,
    **options: Any,
) -> None:
    """Losses, parameters and the optimizer's state after steps with so many rows each."""
    torch.manual_seed(1)
    model = make().double()
    theirs = copy.deepcopy(model)
    held, eager = OPTIMIZERS[optimizer](model.parameters()), OPTIMIZERS[optimizer](theirs.parameters())
    program = sharded(captured(model, held, **options), {"table": (kind, over or devices)}, devices)
    with runtime.Session(passes.emit(program), program.state, binding="cpu") as session:
        for step, count in enumerate(rows):
            batch = batch_of(model, count, step + 1)
            ours = loss_of(session.step(*batch.inputs, batch.target))
            eager.zero_grad()
            whole = nn.functional.mse_loss(theirs(*batch.inputs), batch.target)
            whole.backward()
            if "clip_grad_norm" in options:
                nn.utils.clip_grad_norm_(theirs.parameters(), options["clip_grad_norm"])
            if "clip_grad_value" in options:
                nn.utils.clip_grad_value_(theirs.parameters(), options["clip_grad_value"])
            eager.step()
            assert_close(ours, whole.detach(), 1e-10, f"loss of step {step}")
        for name, value in theirs.state_dict().items():
            assert_close(session.state_dict()[name], value, 1e-10, name)
        kept, expected = session.optimizer_state_dict()["state"], eager.state_dict()["state"]
        assert kept.keys() == expected.keys()
        for index, own in expected.items():
            for name, value in own.items():
                if value is not None:
                    assert_close(torch.as_tensor(kept[index][name]), torch.as_tensor(value), 1e-10, f"{index}.{name}")


UNEVEN = [8, 7, 9, 16]


@pytest.mark.parametrize("devices", [2, 3, 4, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_twenty_steps_on_devices_of_every_number(kind: str, devices: int) -> None:
    rows = [4 * devices, 4 * devices - 1, 3 * devices, 7 * devices + 3] * 5
    columns = 8 if devices != 3 else 7
    assert_trains_as_one_device(lambda: Bags(columns=columns), kind, range(devices), rows)


MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "sum": lambda: Bags(mode="sum"),
    "mean": lambda: Bags(mode="mean"),
    "padded sum": lambda: Bags(mode="sum", padding_idx=0),
    "padded mean": lambda: Bags(mode="mean", padding_idx=1),
    "last offset": lambda: Last(mode="sum"),
    "mean, last offset": lambda: Last(mode="mean", padding_idx=0),
    "weighted": Weighted,
    "weighted, padded": lambda: Weighted(padding_idx=0),
    "embedding": Sequences,
    "padded embedding": lambda: Sequences(padding_idx=0),
    "padding of another block": lambda: Sequences(padding_idx=-1),
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kind", KINDS)
def test_lookups_of_every_kind(kind: str, model: str) -> None:
    assert_trains_as_one_device(MODELS[model], kind, [0, 1, 2], UNEVEN, optimizer="momentum")


BY_COLUMNS: Mapping[str, Callable[[], nn.Module]] = {
    "max": lambda: Bags(mode="max"),
    "by frequency": lambda: Bags(mode="mean", scale_grad_by_freq=True),
    "embedding by frequency": lambda: Sequences(scale_grad_by_freq=True),
}


@pytest.mark.parametrize("model", BY_COLUMNS)
def test_lookups_that_columns_alone_have(model: str) -> None:
    assert_trains_as_one_device(BY_COLUMNS[model], "columns", [0, 1, 2], UNEVEN)


SPARSE: Mapping[str, Callable[[], nn.Module]] = {
    "sum": lambda: Bags(mode="sum", sparse=True),
    "mean": lambda: Bags(mode="mean", sparse=True),
    "padded mean": lambda: Bags(mode="mean", sparse=True, padding_idx=1),
    "weighted": lambda: Weighted(sparse=True),
    "embedding": lambda: Sequences(sparse=True),
}


@pytest.mark.parametrize("model", SPARSE)
@pytest.mark.parametrize("kind", KINDS)
def test_sparse_gradients(kind: str, model: str) -> None:
    assert_trains_as_one_device(SPARSE[model], kind, [0, 1, 2], UNEVEN, optimizer="adagrad")


@pytest.mark.parametrize("kind", KINDS)
def test_sparse_gradients_whose_rows_lie_apart(kind: str) -> None:
    """Where a single row does not, a program takes two rows a share, and more."""
    assert_trains_as_one_device(lambda: Joined(sparse=True), kind, [0, 1, 2], [8, 6, 9, 16], optimizer="adagrad")


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_made_that_nobody_reads(kind: str) -> None:
    model = Joined(sparse=True)
    step = sharded(captured(model, torch.optim.SGD(model.parameters(), lr=0.1)), {"table": (kind, [0, 1])}, [0, 1]).step
    read = {*step.external_outputs, *[name for op in step.ops for name in op.inputs]}
    read |= {step.blobs[name].storage for name in read}
    made = [op for op in step.ops if op.phase == "backward" and not op.effects.shows]
    assert not [op.outputs for op in made if read.isdisjoint(op.outputs)]


@pytest.mark.parametrize(
    ("optimizer", "sparse", "kind"),
    [
        (name, sparse, kind)
        for name in OPTIMIZERS
        for sparse in (False, True)
        for kind in KINDS
        if not (sparse and name in ("momentum", "adam", "fused adam", "rmsprop"))
        and not (kind == "columns" and name == "row-wise adagrad")
        and name != "sparse adam"
    ],
)
def test_optimizers(optimizer: str, sparse: bool, kind: str) -> None:
    assert_trains_as_one_device(lambda: Bags(sparse=sparse, mode="mean"), kind, [0, 1], UNEVEN, optimizer=optimizer)


@pytest.mark.parametrize(
    "options",
    [
        {"clip_grad_norm": 0.05},
        {"clip_grad_value": 0.01},
        {"loss_scale": 64.0},
        {"loss_scale": torch.amp.GradScaler("cpu")},
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_what_the_update_reads_of_all_blocks(kind: str, options: dict[str, Any]) -> None:
    assert_trains_as_one_device(Bags, kind, [0, 1, 2], UNEVEN, **options)


@pytest.mark.parametrize("over", [[1], [2, 0], [1, 2, 0]])
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_go_to_any_of_the_devices(kind: str, over: list[int]) -> None:
    assert_trains_as_one_device(Weighted, kind, [0, 1, 2], UNEVEN, over=over)


@pytest.mark.parametrize("kind", KINDS)
def test_one_replica(kind: str) -> None:
    assert_trains_as_one_device(Sequences, kind, [2], UNEVEN)


@pytest.mark.parametrize("seed", range(8))
def test_random_splits_of_several_tables(seed: int) -> None:
    """Each table whole, by rows or by columns, on any of the devices."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    width, replicas = draw(4, 10), draw(2, 6)
    config = Config(
        bottom=(5, width), tables=tuple(draw(6, 40) for _ in range(4)), lookups=draw(2, 6), sparse=seed % 2 > 0
    )
    placement: dict[str, Any] = {}
    for table in range(3):
        among = torch.randperm(replicas, generator=generator)[: draw(1, min(replicas, 3) + 1)].tolist()
        placement[f"emb_l.{table}"] = (("rows", among), ("columns", among[:2]), among[0])[draw(0, 3)]
    torch.manual_seed(seed)
    model = Dlrm(config).double()
    theirs = copy.deepcopy(model)
    first = clicks(config, 4, 0, torch.float64)
    held, eager = (torch.optim.Adagrad(each.parameters(), lr=0.05) for each in (model, theirs))
    options = {"targets": (first.target,), "loss": loss, "optimizer": held, "batch_dims": batch_dims(config)}
    program = sharded(
        graphir.capture(model, first.inputs, **options), {**placement, "emb_l.3": "balanced"}, range(replicas)
    )
    with runtime.Session(passes.emit(program), program.state, binding="cpu") as session:
        for step in range(4):
            batch = clicks(config, draw(4, 9) * replicas, step + 1, torch.float64)
            ours = session.step(*batch.inputs, batch.target)
            eager.zero_grad()
            whole = loss(theirs(*batch.inputs), batch.target)
            whole.backward()
            eager.step()
            assert_close(ours, whole.detach(), 1e-10, f"loss of step {step}")
        for name, value in theirs.state_dict().items():
            assert_close(session.state_dict()[name], value, 1e-10, name)


class Checkpointed(Bags):
    """A table whose lookups the backward repeats."""

    def found(self, *lookups: torch.Tensor) -> torch.Tensor:
        def scaled(*given: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.table(*given)) ** 2

        return checkpoint(scaled, *lookups, use_reentrant=False)  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", KINDS)
def test_lookups_that_the_backward_repeats(kind: str) -> None:
    assert_trains_as_one_device(lambda: Checkpointed(mode="mean"), kind, [0, 1], UNEVEN)
