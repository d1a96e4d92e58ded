"""A sharded step in micro-batches is the step of eager PyTorch: placed modules on all rows, replicas on theirs."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from eager import assert_same_bits
from hybrid import Hybrid, Mixed, Ranker, Ranking, mixed, ranking
from idioms import loss_of
from mutations.campaign import VERDICTS, Verdict, trials
from mutations.operands import OPERANDS
from mutations.subjects import Subject
from parking import EXECUTORS, bits_of
from tables import OPTIMIZERS
from torch import Tensor, nn

import graphir
from graphir import Program, passes, runtime

mse = nn.functional.mse_loss


def squares(out: Tensor, target: Tensor) -> Tensor:
    return mse(out, target, reduction="sum")


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def captured(
    model: Ranker | Mixed,
    parts: int,
    batch: Ranking,
    optimizer: torch.optim.Optimizer | None = None,
    loss: Callable[..., Tensor] = mse,
    **options: Any,
) -> Program:
    dims = ({0: "batch"}, {model.rows_of_lookups: "batch"}), {}, ({0: "batch"},)
    return graphir.capture(
        model,
        batch[:2],
        targets=(batch.target,),
        loss=loss,
        optimizer=optimizer or momentum(model),
        accumulate=parts,
        batch_dims=dims,
        **options,
    )


def ranker(parts: int, loss: Callable[..., Tensor] = mse) -> tuple[Ranker, Program]:
    """A model of its own, and the program of its step, which all tests share."""
    torch.manual_seed(0)
    return Ranker(), program_of_ranker(parts, loss)


@cache
def program_of_ranker(parts: int, loss: Callable[..., Tensor]) -> Program:
    torch.manual_seed(0)
    return captured(Ranker(), parts, ranking(4 * parts, 0), loss=loss)


def placed(program: Program, placement: Mapping[str, Any], devices: Sequence[int], **options: Any) -> Program:
    found = passes.inject_copies(passes.shard(program, placement, devices, **options))
    assert graphir.parse(str(found)) == found
    return found


ROWS = {1: [4, 3, 5], 2: [8, 7, 5], 3: [12, 11, 8, 4]}
"""By the number of replicas, those of a micro-batch of all replicas; of the last ones a replica has none."""


@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_bits_are_those_of_eager_pytorch(replicas: int, parts: int, mean: bool) -> None:
    """Batch norms included, of a placed module over all rows of a micro-batch; and dropout of each replica."""
    assert_bits(parts, ROWS[replicas], [1] * replicas, mean=mean)


def test_bits_of_unlike_shares_are_those_of_eager_pytorch() -> None:
    """In one step the last replica has no rows."""
    assert_bits(2, [12, 15, 4, 10], [2, 2, 1], mean=True)


def assert_bits(parts: int, steps: Sequence[int], shares: Sequence[int], *, mean: bool) -> None:
    """A session takes the steps of eager PyTorch, of so many rows of a micro-batch of all replicas."""
    loss = mse if mean else squares
    model, program = ranker(parts, loss=loss)
    eager = Hybrid(model, loss, momentum, len(shares), parts, mean=mean, unlike=shares)
    devices, reduction = list(range(len(shares))), "mean" if mean else "sum"
    plan = passes.emit(placed(program, {"tables.*": "round_robin"}, devices, reduction=reduction, shares=shares))
    assert not runtime.check(plan)
    with runtime.Session(plan, program.state, binding="cpu") as session:
        for step, rows in enumerate(steps):
            batch = ranking(rows * parts, step + 1)
            ours, theirs = loss_of(session.step(*batch)), eager.step(batch)
            if mean:
                assert torch.equal(ours, theirs)
            else:  # made a mean before it is handed back as a sum
                assert torch.allclose(ours, theirs, rtol=1e-6)
            for replica in devices:
                assert_same_bits(session.state_dict(replica), eager.state_dict(replica), f"step {step}, {replica}")


@pytest.mark.parametrize("parts", [2, 3, 5])
def test_one_replica_is_the_program_itself(parts: int) -> None:
    _, program = ranker(parts)
    sharded = placed(program, {"tables.*": 3, "top": 3}, [3])
    batches = [(ranking(rows * parts, rows), {}) for rows in (4, 7, 2)]
    for ours, theirs in zip(bits_of(sharded, batches, "threads"), bits_of(program, batches, "reference"), strict=True):
        assert torch.equal(ours, theirs)


def assert_close(ours: Tensor, theirs: Tensor, rtol: float, what: str) -> None:
    scale = max(theirs.abs().max().item(), 1e-3)
    assert (ours - theirs).abs().max().item() <= rtol * scale, what


def assert_trains_as_one_device(
    model: Mixed,
    placement: Mapping[str, Any],
    devices: Sequence[int],
    parts: int,
    rows: Sequence[int],
    *,
    optimizer: str = "sgd",
    loss: Callable[..., Tensor] = mse,
    **options: Any,
) -> None:
    """Losses, parameters and the optimizer's state after steps in micro-batches of so many rows."""
    model = model.double()
    theirs, mean = copy.deepcopy(model), loss is mse
    held, eager = OPTIMIZERS[optimizer](model.parameters()), OPTIMIZERS[optimizer](theirs.parameters())
    program = captured(model, parts, mixed(4 * parts, 0), held, loss, **options)
    sharded = placed(program, placement, devices, reduction="mean" if mean else "sum")
    rtol = 1e-7 if optimizer in ("adam", "adagrad", "rmsprop") else 1e-9  # they divide by roots of small numbers
    with runtime.Session(passes.emit(sharded), program.state, binding="cpu") as session:
        for step, count in enumerate(rows):
            batch = mixed(count * parts, step + 1)
            ours = loss_of(session.step(*batch))
            eager.zero_grad()
            whole = loss(theirs(*batch[:2]), batch.target) / (1 if mean else parts)
            whole.backward()
            if "clip_grad_norm" in options:
                nn.utils.clip_grad_norm_(theirs.parameters(), options["clip_grad_norm"])
            eager.step()
            assert_close(ours, whole.detach(), 1e-9, f"loss of step {step}")
        for name, value in theirs.state_dict().items():
            assert_close(session.state_dict()[name], value, rtol, name)
        kept, expected = session.optimizer_state_dict()["state"], eager.state_dict()["state"]
        for index, own in expected.items():
            for name, value in own.items():
                if value is not None:
                    assert_close(torch.as_tensor(kept[index][name]), torch.as_tensor(value), rtol, f"{index}.{name}")


KINDS = ("sum", "mean", "max", "weighted", "sequence", "column")


@pytest.mark.parametrize(
    ("kind", "target"),
    [
        (kind, target)
        for kind in KINDS
        for target in (1, ("rows", [1, 0]), ("columns", [0, 1, 2]))
        if (kind, target) != ("max", ("rows", [1, 0]))  # which cannot be added up
    ],
)
def test_tables_of_every_kind(kind: str, target: Any) -> None:
    torch.manual_seed(0)
    assert_trains_as_one_device(Mixed((kind, "sum")), {"tables.0": target, "tables.1": 0}, [0, 1, 2], 3, [12, 11, 2, 1])


@pytest.mark.parametrize("optimizer", ["momentum", "adagrad", "adam", "rmsprop", "row-wise adagrad"])
def test_optimizers(optimizer: str) -> None:
    torch.manual_seed(0)
    rows = ("rows", [0, 1])
    assert_trains_as_one_device(Mixed(("sum", "column")), {"tables.*": rows}, [0, 1], 2, [8, 7, 3], optimizer=optimizer)


@pytest.mark.parametrize(
    "options",
    [{"clip_grad_norm": 0.05}, {"loss_scale": 64.0}, {"loss_scale": torch.amp.GradScaler("cpu")}, {"loss": squares}],
    ids=["clipping", "scale", "scaler", "loss"],
)
def test_what_the_update_reads_of_all_micro_batches(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    placement = {"tables.0": ("columns", [0, 1]), "tables.1": 2, "middle.0": 0}
    assert_trains_as_one_device(Mixed(("sum", "weighted")), placement, [0, 1, 2], 2, [9, 8, 2, 1], **options)


@pytest.mark.parametrize("seed", range(12))
def test_random_models_in_random_places(seed: int) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    model = Mixed(draw.choices(KINDS, k=draw.randint(1, 4)), draw.choice([4, 5, 8]))
    devices, parts = draw.sample(range(6), draw.randint(1, 4)), draw.randint(2, 4)
    placement: dict[str, Any] = {}
    for k, kind in enumerate(model.kinds):
        blocks = draw.sample(devices, draw.randint(1, len(devices)))
        by = "columns" if kind == "max" else draw.choice(["rows", "columns"])
        fits = by == "rows" or -(-model.width // -(-model.width // len(blocks))) == len(blocks)
        placement[f"tables.{k}"] = (by, blocks) if fits and draw.random() < 0.5 else draw.choice(devices)
    for module in ("bottom", "weights", "middle.0", "middle.1", "top"):
        if draw.random() < 0.2:
            placement[module] = draw.choice(devices)
    rows = [draw.choice([4 * len(devices), 3 * len(devices) - 1, len(devices) + 1, 1]) for _ in range(3)]
    assert_trains_as_one_device(model, placement, devices, parts, rows, optimizer=draw.choice(["momentum", "adam"]))


# Other passes


def arranged(program: Program, seed: int) -> Program:
    """The program with modules moved, parked and computed again, as a number has it."""
    draw = random.Random(seed)
    moved = passes.shift_modules(program, {"tables.1": 2, "top": {0: 2, 1: 3}} if draw.random() < 0.7 else {"top": 2})
    if draw.random() < 0.5:
        moved = passes.recompute(moved, "bottom")
    if draw.random() < 0.5:
        moved = passes.park(moved, "bottom" if moved.history[-1].startswith("shift") else "top.1", "cpu")
    return passes.inject_copies(moved)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble"])
@pytest.mark.parametrize("seed", range(3))
def test_they_flow_on_every_executor(seed: int, schedule: Any) -> None:
    _, program = ranker(3)
    sharded = passes.shard(program, {"tables.0": ("rows", [0, 1]), "tables[1:3]": "round_robin"}, [0, 1])
    batches = [(ranking(rows, rows), {}) for rows in (24, 21)]
    expected = bits_of(passes.inject_copies(sharded), batches, "reference")
    serial = arranged(sharded, seed)
    free, one = passes.pipeline(serial, schedule=schedule), passes.pipeline(serial, schedule=schedule, in_flight=1)
    most, least = (graphir.memory(passes.emit(p)).peak for p in (free, one))
    limits = {device: (max(most[device], least[device]) + least[device]) // 2 for device in least if device != "cpu:0"}
    flowing = serial, free, one, passes.pipeline(serial, schedule=schedule, limits=limits)
    for k, program in enumerate(flowing):
        shared = passes.share_storage(program)
        assert graphir.certify(sharded, shared).holds
        executor = EXECUTORS[(seed + k) % len(EXECUTORS)]
        for ours, theirs in zip(bits_of(shared, batches, executor), expected, strict=True):
            assert torch.equal(ours, theirs), (executor, program.history)


class Counting(nn.Module):
    """A table that overwrites its buffer between reads of it, once more in each micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 4)
        self.register_buffer("count", torch.ones(()))
        self.count: Tensor

    def forward(self, i: Tensor) -> Tensor:
        before = self.table(i) * self.count.clone()
        self.count.add_(1)
        return before + self.table(i) * self.count.clone()


class Counted(nn.Module):
    """Replicated layers on both sides of it."""

    def __init__(self) -> None:
        super().__init__()
        self.counting, self.layer = Counting(), nn.Linear(4, 4)

    def forward(self, i: Tensor, x: Tensor) -> Tensor:
        first = self.layer(x + self.counting(i))
        return self.layer(first * self.counting(i)).sum(1)


def test_what_micro_batches_overwrite_they_do_in_their_order() -> None:
    torch.manual_seed(0)
    model = Counted()
    i, x, y = torch.randint(20, (12,)), torch.randn(12, 4), torch.randn(12)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    program = graphir.capture(model, (i[:6], x[:6]), targets=(y[:6],), loss=mse, optimizer=optimizer, accumulate=3)
    flowing = passes.pipeline(placed(program, {"counting": 1}, [0, 1]))
    with runtime.Session(passes.emit(flowing), program.state, binding="cpu", executor="adversarial") as session:
        for _ in range(3):
            ours, theirs = session.step(i, x, y), torch.zeros(())
            optimizer.zero_grad()
            for k in range(3):  # rows 2k to 2k+2 of each replica's six
                own = torch.tensor([2 * k, 2 * k + 1, 2 * k + 6, 2 * k + 7])
                loss = mse(model(i[own], x[own]), y[own]) / 3
                loss.backward()
                theirs += loss.detach()
            optimizer.step()
            assert torch.allclose(ours, theirs, rtol=1e-5)
        assert session.state_dict()["counting.count"] == model.counting.count == 1 + 3 * 3 * 2
        assert torch.allclose(session.state_dict()["layer.weight"], model.layer.weight, rtol=1e-4)


def test_dropout_of_placed_modules_is_their_own() -> None:
    """The same on every executor and in every order, another one in each micro-batch and step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 64, bias=False), nn.Dropout(0.5)), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x = torch.ones(6, 4)
    program = graphir.capture(model, (x,), loss=lambda out: out.square().mean(), optimizer=optimizer, accumulate=3)
    serial = placed(program, {"[0]": 1}, [0, 1])
    batches = [((torch.ones(12, 4),), {})] * 2
    expected = bits_of(serial, batches, "reference")
    assert not torch.equal(expected[0], expected[1])
    for ours, theirs in zip(bits_of(passes.pipeline(serial), batches, "adversarial"), expected, strict=True):
        assert torch.equal(ours, theirs)
    seeds = [op.seed for op in serial.step.ops if op.seed is not None]
    assert len(seeds) == len(set(seeds)) == 3


@pytest.mark.usefixtures("one_thread")
def test_no_mutant_that_differs_is_certified() -> None:
    def make() -> Program:
        return passes.pipeline(placed(ranker(2)[1], {"tables.*": "round_robin"}, [0, 1]))

    subject = Subject("ranker, sharded", "spread", make, lambda rows, step: (tuple(ranking(rows, step)), {}), (16, 14))
    found = [v for v in trials(subject, 0.01, kinds=OPERANDS) if isinstance(v, Verdict)]
    assert [v for v in found if v.verdict == VERDICTS[2] or v.error] == []
    assert VERDICTS[1] in [v.verdict for v in found]


def test_state_goes_anywhere(tmp_path: Path) -> None:
    """From two replicas in micro-batches to three, to none, and to a step of one micro-batch."""
    model, program = ranker(2)
    batch = ranking(24, 1)
    plans = [
        passes.emit(placed(program, {"tables.*": "round_robin"}, [0, 1])),
        passes.emit(placed(program, {"tables.0": ("columns", [2, 0]), "tables[1:3]": 1}, [0, 1, 2])),
        passes.emit(program),
        passes.emit(placed(captured(model, 1, ranking(4, 0)), {"tables.*": 1}, [0, 1])),
    ]
    state: Any = program.state
    for plan in plans:
        plan.save(tmp_path / "plan.json")
        assert graphir.load(tmp_path / "plan.json") == plan
        with runtime.Session(plan, state, binding="cpu") as session:
            session.step(*batch)
            state = session.state()
            expected = session.step(*batch)
        with runtime.Session(plan, state, binding="cpu") as session:
            assert torch.equal(session.step(*batch), expected)


def test_batch_norms_are_synchronised_over_replicas() -> None:
    """As those of a replicated step are; what sees the whole micro-batch needs no replicas' statistics."""
    _, program = ranker(3)
    both = [
        passes.sync_batch_norm(passes.shard(program, {"tables.*": "round_robin"}, [0, 1])),
        passes.sync_batch_norm(passes.replicate(program, [0, 1])),
    ]
    ours, theirs = (bits_of(passes.inject_copies(p), [(ranking(24, 1), {})], "reference") for p in both)
    assert_close(ours[0], theirs[0], 1e-6, "loss")
