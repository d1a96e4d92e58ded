"""Batches with fewer rows than replicas: those without a share are left out, and take the update."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import models
import pytest
import torch
import torch.nn.functional as F
from eager import ShareByShare, assert_same_bits, optimizer_tensors
from fake_cuda import watched
from graphir.runtime import Session
from idioms import Idioms, loss_of
from idioms import captured as captured_with
from runnable import batch_of, captured, threads_of_sessions
from torch import Tensor, nn

import graphir
from graphir import RunError, SessionError, memory, passes
from graphir.analysis.short_batch import short_batch
from graphir.ir.program import Program

EXECUTORS = ["reference", "serial", "threads", "adversarial"]

REPLICAS = 4

ROWS = [8, 5, 1, 4, 2, 3, 9, 6]
"""Of steps, of which some leave one, two or three of four replicas without rows."""


class Keeper(nn.Module):
    """State that its forward writes, with and without the rows; a parameter that has a gradient without them."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(7, 4, mode="sum", sparse=True)
        self.renormed = nn.Embedding(7, 4, max_norm=0.5)
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
        self.alone = nn.Parameter(torch.randn(3))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.calls.add_(1)
        return self.spectral(self.bag(x) + self.renormed(x).sum(1)), self.alone.pow(2).sum()


def keeper(rows: int) -> models.Example:
    torch.manual_seed(0)
    return models.Example(
        Keeper(),
        (torch.randint(0, 7, (rows, 3)),),
        (torch.rand(rows),),
        lambda out, y: F.mse_loss(out[0].sum(1), y) + 0.1 * out[1],
    )


def resnet(rows: int) -> models.Example:
    return models.resnet(rows, blocks=1, dropout=0.3)


MODELS = {"resnet": resnet, "keeper": keeper}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    sparse = any(getattr(module, "sparse", False) for module in model.modules())
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.0 if sparse else 0.9)


def batch(name: str, rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Rows of different batches."""
    generator = torch.Generator().manual_seed(seed)
    if name == "keeper":
        return torch.randint(0, 7, (rows, 3), generator=generator), torch.rand(rows, generator=generator)
    shape = resnet(1).inputs[0].shape[1:]
    return torch.randn(rows, *shape, generator=generator), torch.randint(0, 4, (rows,), generator=generator)


@cache
def programs(name: str) -> tuple[models.Example, Program, dict[str, Program]]:
    """A model's program on four replicas, and the same with the second halves on two devices, each of two replicas."""
    example = MODELS[name](4)
    program = captured(example, sgd(example.model))
    replicated = passes.replicate(program, devices=[2, 0, 1, 3])
    activations = passes.find_activations(replicated)
    moved = passes.shift_activations(replicated, activations[len(activations) // 2 :], shifts={2: 4, 0: 5, 1: 4, 3: 5})
    return example, program, {"replicated": replicated, "shifted": passes.share_storage(passes.inject_copies(moved))}


@pytest.mark.parametrize(
    ("placed", "executors"),
    [("replicated", ["serial"]), ("shifted", ["reference", "threads", "adversarial"])],
    ids=["replicated", "shifted"],
)
@pytest.mark.parametrize("name", MODELS)
def test_steps_have_the_bits_of_eager_share_by_share(name: str, placed: str, executors: list[Any]) -> None:
    example, program, all_placed = programs(name)
    eager = ShareByShare(example.model, example.loss, sgd, REPLICAS)
    plan, options = passes.emit(all_placed[placed]), {"check_finite": True, "witness": program}
    with ExitStack() as opened:
        sessions = {
            executor: opened.enter_context(Session(plan, program.state, binding="cpu", executor=executor, **options))
            for executor in executors
        }
        for step, rows in enumerate(ROWS):
            x, y = batch(name, rows, step)
            shares = zip(x.chunk(REPLICAS), y.chunk(REPLICAS), strict=True)
            expected = eager.step_on([((mine,), (targets,), {}) for mine, targets in shares])
            for executor, session in sessions.items():
                assert_same_bits({"loss": session.step(x, y)}, {"loss": expected}, f"step {step}, {executor}")
                for replica, (model, held) in enumerate(zip(eager.models, eager.optimizers, strict=True)):
                    what = f"step {step}, replica {replica}, {executor}"
                    assert_same_bits(session.state_dict(replica), model.state_dict(), what)
                    ours = optimizer_tensors(session.optimizer_state_dict(replica))
                    assert_same_bits(ours, optimizer_tensors(held.state_dict()), what)
        assert {session.steps_done for session in sessions.values()} == {len(ROWS)}
    if name == "keeper":
        assert [int(model.get_buffer("calls")) for model in eager.models] == [8, 7, 6, 2]


@pytest.mark.parametrize("placed", ["replicated", "shifted"])
def test_streams_have_the_bits_of_the_reference_and_no_race(placed: str) -> None:
    _, program, all_placed = programs("resnet")
    whole = passes.emit(all_placed[placed])
    for count in (1, 2, 3):
        plan = short_batch(whole, count)
        session, machine = watched(plan, program.state, {f"gpu:{i}": f"cuda:{i % 2}" for i in range(6)})
        with session, Session(whole, program.state, executor="reference", binding="cpu") as reference:
            for step in range(2):
                x, y = batch("resnet", count, step)
                assert torch.equal(session.step(x, y), reference.step(x, y))
            ours, theirs = session.state(), reference.state()
            assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
            assert not machine.races


OPTIONS: list[dict[str, Any]] = [
    {"accumulate": 2},
    {"clip_grad_norm": 0.05, "loss_scale": {"init_scale": 64.0, "growth_interval": 2}},
    {"clip_grad_value": 0.01, "accumulate": 2},
    {"loss_scale": {"init_scale": 2.0**127}},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options_of_capture(options: dict[str, Any]) -> None:
    example = models.mlp(4)
    program = passes.replicate(captured_with(example, sgd, **options), devices=[0, 1, 2])
    reference = Idioms(example, sgd, 3, **options)
    parts = options.get("accumulate", 1)
    with Session(passes.emit(program), program.state, binding="cpu") as session:
        for step, units in enumerate((6, 1, 4, 2, 3)):
            made = models.mlp(parts * units)
            x, y = made.inputs[0] + step, made.targets[0].roll(step)
            assert_same_bits({"loss": loss_of(session.step(x, y))}, {"loss": reference.step(x, y)}, f"step {step}")
            for replica, model in enumerate(reference.models):
                assert_same_bits(session.state_dict(replica), model.state_dict(), f"step {step}, replica {replica}")
        if reference.scalers:
            ours, theirs = session.loss_scaler_state_dict(), reference.scalers[0].state_dict()
            assert {name: float(ours[name]) for name in theirs} == {name: float(theirs[name]) for name in theirs}


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_gradients_are_handed_back_for_every_replica(reduction: Any) -> None:
    example = models.mlp(4)
    program = passes.replicate(captured(example), devices=[0, 1, 2], reduction=reduction)
    params = dict(example.model.named_parameters())
    with Session(passes.emit(program), program.state, binding="cpu") as session:
        for rows in (6, 4, 1, 2, 6):
            made = models.mlp(rows)
            session.step(*batch_of(made))
            sums: dict[str, Tensor] = {}
            shares = list(zip(made.inputs[0].chunk(3), made.targets[0].chunk(3), strict=True))
            for x, y in shares:
                loss = example.loss(example.model(x), y)
                for name, grad in zip(params, torch.autograd.grad(loss, list(params.values())), strict=True):
                    sums[name] = sums[name] + grad if name in sums else grad
            if reduction == "mean":
                sums = {name: total / len(shares) for name, total in sums.items()}
            for replica in range(3):
                assert_same_bits(session.gradients(replica), sums, f"{rows} rows, replica {replica}")


class Outputs(nn.Module):
    """One output has rows, one has none."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.fc(x), self.fc(x).sum()


@pytest.mark.parametrize("executor", EXECUTORS)
def test_outputs_are_those_of_the_replicas_that_have_rows(executor: Any) -> None:
    model = Outputs()
    program = passes.replicate(graphir.capture(model, (torch.randn(4, 5),)), devices=[0, 1, 2, 3])
    with torch.no_grad(), Session(passes.emit(program), program.state, binding="cpu", executor=executor) as session:
        for rows in (8, 5, 1, 2):
            x = torch.randn(rows, 5)
            outputs, total = session.step(x)
            shares = x.chunk(4)
            assert torch.equal(outputs, torch.cat([model.fc(share) for share in shares]))
            assert torch.equal(total, model.fc(shares[0]).sum())


def measured(executor: str, rows: Sequence[int], path: Path) -> tuple[Any, Any]:
    _, program, placed = programs("resnet")
    plan = passes.emit(placed["replicated"])
    with Session(plan, program.state, binding="cpu", executor=executor) as session:  # type: ignore[arg-type]
        with session.measured():
            for step, count in enumerate(rows):
                session.step(*batch("resnet", count, step))
        session.step(*batch("resnet", 1, 0))
        session.trace(path)
        return session.report(), json.loads(path.read_text())


@pytest.mark.parametrize("executor", ["reference", "threads"])
def test_short_steps_are_measured_apart(executor: str, tmp_path: Path) -> None:
    whole, trace = measured(executor, [8, 8, 1, 8], tmp_path / "trace.json")
    short, short_trace = measured(executor, [1, 1, 1, 1], tmp_path / "short.json")
    assert (whole.steps, short.steps) == (2, 3)  # behind the one that counts bytes
    assert {entry.device for entry in whole.devices} == {entry.device for entry in short.devices}
    for entry in (*whole.devices, *short.devices):
        assert (entry.peak, entry.state) == (entry.predicted_peak, entry.predicted_state)
    assert sum(o.calls for o in whole.operators) > sum(o.calls for o in short.operators)
    executed, short_executed = (
        [event for event in found["traceEvents"] if event["ph"] == "X" and event["name"] != "wait"]
        for found in (trace, short_trace)
    )
    assert len(executed) > len(short_executed) > 0


def test_a_step_is_held_to_the_memory_that_it_takes_itself() -> None:
    class Wide(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.repeat(1, 4096).relu()

    program = passes.replicate(graphir.capture(Wide(), (torch.randn(4, 8),)), devices=[0, 1, 2, 3])
    plan = passes.emit(program, dims={"batch": 1})
    most = sum(memory(plan).peak.values())
    x = torch.randn(9, 8)
    with Session(plan, program.state, binding="cpu", memory_limit=most) as session:
        session.step(x[:3])
        with pytest.raises(SessionError, match=r"a step of the plan takes [\d.]+ MiB on gpu:0, gpu:1, gpu:2; "):
            session.step(x)  # 3, 3 and 3
        session.step(x[:1])
        assert session.steps_done == 2


def test_what_is_not_finite_is_found_in_the_rows_that_there_are() -> None:
    example = models.mlp(4)
    program = passes.replicate(captured(example, sgd(example.model)), devices=[0, 1, 2])
    x, y = (tensor[:2].clone() for tensor in batch_of(example))
    x[1] = float("nan")
    with Session(passes.emit(program), program.state, binding="cpu", check_finite=True) as session:
        session.step(torch.zeros_like(x), y)
        with pytest.raises(RunError, match=r"NaN.*gpu_1/"):
            session.step(x, y)


def test_an_evaluation_beside_a_training_takes_short_batches() -> None:
    example = models.mlp(4)
    program = passes.replicate(captured(example, sgd(example.model)), devices=[0, 1, 2])
    forward = passes.replicate(graphir.capture(example.model, example.inputs), devices=[0, 1, 2])
    x, y = batch_of(example)
    with (
        Session(passes.emit(program), program.state, binding="cpu") as training,
        Session(passes.emit(forward), forward.state, binding="cpu", beside=training) as evaluation,
    ):
        training.step(x[:1], y[:1])
        example.model.load_state_dict(training.state_dict(2))
        with torch.no_grad():
            assert torch.equal(evaluation.step(x[:2]), torch.cat([example.model(x[:1]), example.model(x[1:2])]))
        assert training.steps_done == evaluation.steps_done == 1


def test_the_whole_way_in_one_call() -> None:
    example = models.mlp(2)
    eager = ShareByShare(example.model, example.loss, sgd, 3)
    with graphir.compile(
        example.model,
        example.inputs,
        targets=example.targets,
        loss=example.loss,
        optimizer=sgd(example.model),
        devices=[0, 1, 2],
    ) as compiled:
        for rows in (2, 6, 1):
            x, y = batch_of(models.mlp(rows))
            assert_same_bits({"loss": compiled.step(x, y)}, {"loss": eager.step(x, y)}, f"{rows} rows")
        assert len(compiled.plans) == 1


def test_all_threads_end_with_the_session() -> None:
    _, program, placed = programs("resnet")
    before = len(threads_of_sessions())
    session = Session(passes.emit(placed["replicated"]), program.state, binding="cpu", executor="threads")
    for rows in (8, 1, 2, 1):
        session.step(*batch("resnet", rows, 0))
    assert len(threads_of_sessions()) > before
    session.close()
    assert len(threads_of_sessions()) == before


def test_a_short_step_that_fails_says_so() -> None:
    example = models.mlp(4)
    program = passes.replicate(captured(example, sgd(example.model)), devices=[0, 1, 2])
    x, y = batch_of(example)
    with Session(passes.emit(program), program.state, binding="cpu") as session:
        with pytest.raises(RunError, match=r"aten\.nll_loss_forward\.default failed: IndexError: Target 9"):
            session.step(x[:1], torch.full_like(y[:1], 9))
        assert session.usable
        session.step(x[:1], y[:1])


def refused(text: str, program: Program, *batch: Tensor) -> SessionError:
    with Session(passes.emit(program), program.state, binding="cpu") as session:
        before = session.state()
        with pytest.raises(SessionError, match=text) as caught:
            session.step(*batch)
        assert session.usable and session.steps_done == 0
        assert_same_bits(session.state(), before, "state")
    return caught.value


def test_no_rows_at_all_are_refused() -> None:
    example = models.mlp(4)
    program = passes.replicate(captured(example, sgd(example.model)), devices=[0, 1, 2])
    x, y = batch_of(example)
    text = r"argument 0 \('x'\) has 0 rows along dimension 0, too few for 3 replicas: torch\.chunk makes 0 shares"
    assert refused(text, program, x[:0], y[:0]).fix == "give at least 1 row"


def test_fixed_sizes_need_all_their_rows() -> None:
    class Rooted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x) / len(x) ** 0.5  # no polynomial

    x, y = torch.randn(4, 3), torch.randint(0, 2, (4,))
    model = Rooted()
    program = graphir.capture(model, (x,), targets=(y,), loss=F.cross_entropy, optimizer=sgd(model))
    assert program.covers.fixed
    text = r"has 4 rows along dimension 0, too few for 3 replicas: torch\.chunk makes 2 shares of at most 2"
    fix = refused(text, passes.replicate(program, [0, 1, 2]), x, y).fix
    assert fix.startswith("give at least 3 rows")
