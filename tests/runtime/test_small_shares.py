"""Batches whose shares a program does not take: over fewer replicas, or by a recording of their own."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from eager import ShareByShare, assert_same_bits, optimizer_tensors
from graphir.runtime import Session
from idioms import Idioms, loss_of
from models import Example
from torch import Tensor, nn

import graphir
from graphir import CoverageError, passes
from graphir.ir.program import Program

REPLICAS = 4

ROWS = [8, 7, 1, 3, 6]

pytestmark = pytest.mark.usefixtures("one_thread")


class Attention(nn.Module):
    """PyTorch computes one row of it otherwise than several; it draws random numbers and keeps running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(11, 8), nn.Parameter(torch.randn(1, 5, 8))
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
        self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        found = self.layer(self.token(x) + self.place)
        return self.head(self.norm(found.transpose(1, 2)).mean(2))


def drawn(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 11, (rows, 5), generator=generator), torch.randint(0, 3, (rows,), generator=generator)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def attention() -> Example:
    torch.manual_seed(0)
    x, y = drawn(4, 0)
    return Example(Attention(), (x,), (y,), F.cross_entropy)


def of(example: Example, **options: Any) -> Program:
    return graphir.capture(example.model, example.inputs, targets=example.targets, loss=example.loss, **options)


@cache
def programs() -> tuple[Example, Program, dict[str, Program]]:
    example = attention()
    program = of(example, optimizer=adam(example.model))
    assert [str(guard) for guard in program.covers.guards] == ["batch>=2"]
    replicated = passes.replicate(program, [2, 0, 1, 3])
    activations = passes.find_activations(replicated)
    moved = passes.shift_activations(replicated, activations[len(activations) // 2 :], shifts={2: 4, 0: 5, 1: 4, 3: 5})
    shifted = passes.share_storage(passes.inject_copies(moved))
    parked = passes.park(replicated, "**.exp_avg", "cpu")
    return example, program, {"replicated": replicated, "shifted": shifted, "state on the host": parked}


def shares_of(rows: int, least: int = 2) -> list[int]:
    """Those of torch.chunk for as many replicas as have at least so many rows each; one takes any batch."""
    for count in range(REPLICAS, 1, -1):
        shares = [len(share) for share in torch.arange(rows).chunk(count)]
        if len(shares) == count and min(shares) >= least:
            return shares
    return [rows]


def stepped(eager: ShareByShare, x: Tensor, y: Tensor, shares: Sequence[int]) -> Tensor:
    pairs = zip(x.split(list(shares)), y.split(list(shares)), strict=True)
    return eager.step_on([((mine,), (targets,), {}) for mine, targets in pairs])


def assert_alike(session: Any, eager: ShareByShare, what: str) -> None:
    for replica, (model, held) in enumerate(zip(eager.models, eager.optimizers, strict=True)):
        assert_same_bits(session.state_dict(replica), model.state_dict(), f"{what}, replica {replica}")
        ours = optimizer_tensors(session.optimizer_state_dict(replica))
        assert_same_bits(ours, optimizer_tensors(held.state_dict()), f"{what}, replica {replica}")


def test_shares_are_those_that_the_docs_name() -> None:
    assert {rows: shares_of(rows) for rows in range(1, 10)} == {
        1: [1],
        2: [2],
        3: [3],
        4: [2, 2],
        5: [3, 2],
        6: [2, 2, 2],
        7: [4, 3],
        8: [2, 2, 2, 2],
        9: [3, 3, 3],
    }


@pytest.mark.parametrize(
    ("placed", "executor"), [("replicated", "serial"), ("shifted", "threads"), ("state on the host", "serial")]
)
def test_steps_have_the_bits_of_eager_share_by_share(placed: str, executor: Any) -> None:
    example, program, all_placed = programs()
    eager = ShareByShare(example.model, example.loss, adam, REPLICAS)
    with Session(passes.emit(all_placed[placed]), program.state, binding="cpu", executor=executor) as session:
        for step, rows in enumerate(ROWS):
            x, y = drawn(rows, step)
            expected = stepped(eager, x, y, shares_of(rows))
            assert_same_bits({"loss": session.step(x, y)}, {"loss": expected}, f"{rows} rows")
        assert_alike(session, eager, "at the end")
    assert [int(model.norm.num_batches_tracked) for model in eager.models] == [5, 3, 2, 1]  # type: ignore[union-attr,arg-type]


def test_the_last_batch_of_an_epoch_may_have_one_row() -> None:
    example, program, all_placed = programs()
    eager = ShareByShare(example.model, example.loss, adam, REPLICAS)
    x, y = drawn(17, 0)
    batches = list(zip(x.split(8), y.split(8), strict=True))
    with Session(passes.emit(all_placed["replicated"]), program.state, binding="cpu") as session:
        losses = session.run(batches, progress=False)
        expected = [stepped(eager, *batch, shares_of(len(batch[0]))) for batch in batches]
        assert [float(loss) for loss in losses] == [float(loss) for loss in expected]
        assert_alike(session, eager, "after the epoch")


def test_one_row_of_a_sharded_program() -> None:
    example, program, _ = programs()
    eager = ShareByShare(example.model, example.loss, adam, 1)
    sharded = passes.inject_copies(passes.shard(program, {"token": 1, "layer": 2}, range(REPLICAS)))
    with Session(passes.emit(sharded), program.state, binding="cpu") as session:
        for step in range(2):
            x, y = drawn(1, step)
            assert_same_bits({"loss": session.step(x, y)}, {"loss": stepped(eager, x, y, [1])}, f"step {step}")
        for replica in range(REPLICAS):
            params = {name: session.state_dict(replica)[name] for name, _ in example.model.named_parameters()}
            assert_same_bits(params, dict(eager.models[0].named_parameters()), f"replica {replica}")  # type: ignore[arg-type]
        session.step(*drawn(7, 7))


OPTIONS: list[dict[str, Any]] = [
    {"accumulate": 2, "clip_grad_norm": 0.05, "loss_scale": {"init_scale": 64.0, "growth_interval": 2}},
    {"loss_scale": {"init_scale": 2.0**127}},
]


def test_one_row_of_a_program_with_synchronised_norms() -> None:
    """The statistics of the whole batch are those of the row; a replica without rows keeps its buffers."""

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attended = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
            self.norm = nn.BatchNorm1d(8)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.norm(self.attended(x).transpose(1, 2))
            return out

    torch.manual_seed(0)
    model, x = Normed().double(), torch.randn(8, 3, 8, dtype=torch.float64)
    eager = copy.deepcopy(model)
    optimizer = torch.optim.SGD(eager.parameters(), lr=0.1)
    program = graphir.capture(
        model, (x,), loss=lambda y: y.pow(3).mean(), optimizer=torch.optim.SGD(model.parameters(), lr=0.1)
    )
    together = passes.sync_batch_norm(passes.replicate(program, [0, 1]))
    with Session(passes.emit(together), program.state, binding="cpu") as session:
        for rows in (8, 1, 7, 1):
            session.step(x[:rows])
            optimizer.zero_grad()
            eager(x[:rows]).pow(3).mean().backward()
            optimizer.step()
            for name, value in session.state_dict().items():
                torch.testing.assert_close(value, eager.state_dict()[name], rtol=1e-9, atol=1e-9, msg=name)
        ours, theirs = session.state_dict(), session.state_dict(1)
        assert all(torch.equal(ours[name], theirs[name]) for name, _ in eager.named_parameters())


class Bags(nn.Module):
    """A table beside attention, which is another step at one row."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(20, 8, mode="sum")
        self.attended = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)

    def forward(self, i: Tensor) -> Tensor:
        out: Tensor = self.attended(self.table(i)[:, None].expand(-1, 3, -1))
        return out


@pytest.mark.parametrize("kind", ["rows", "columns"])
def test_gradients_of_one_row_of_a_split_table(kind: str) -> None:
    torch.manual_seed(0)
    model, i = Bags(), torch.randint(20, (8, 3))
    program = graphir.capture(model, (i,), loss=lambda y: y.square().mean())
    split = passes.inject_copies(passes.shard(program, {"table": (kind, [0, 1])}, [0, 1]))
    model(i[:1]).square().mean().backward()
    expected = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    with Session(passes.emit(split), program.state, binding="cpu") as session:
        session.step(i[:1])
        for replica in (0, 1):
            assert_same_bits(session.gradients(replica), expected, f"replica {replica}")


@pytest.mark.parametrize("kind", ["rows", "columns"])
@pytest.mark.parametrize(
    "make", [lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), torch.optim.Adam], ids=["SGD", "Adam"]
)
def test_one_row_of_a_program_with_a_split_table(kind: str, make: Any) -> None:
    """The table is joined, and divided again: from the state that is there, one row has the bits of eager PyTorch."""
    torch.manual_seed(0)
    model, i = Bags(), torch.randint(20, (8, 3))
    eager = copy.deepcopy(model)
    program = graphir.capture(model, (i,), loss=lambda y: y.square().mean(), optimizer=make(model.parameters()))
    split = passes.inject_copies(passes.shard(program, {"table": (kind, [0, 1])}, [0, 1]))
    with Session(passes.emit(split), program.state, binding="cpu") as session:
        for rows in (8, 1, 5, 1):
            optimizer = make(eager.parameters())
            eager.zero_grad()
            eager.load_state_dict(session.state_dict())
            optimizer.load_state_dict(session.optimizer_state_dict())
            loss = session.step(i[:rows])
            if rows == 1:
                expected = eager(i[:1]).square().mean()
                expected.backward()
                optimizer.step()
                assert torch.equal(loss, expected.detach())
                assert_same_bits(session.state_dict(), eager.state_dict(), "one row")
                assert_same_bits(session.state_dict(1), session.state_dict(0), "replicas")


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options_of_capture(options: dict[str, Any]) -> None:
    example = attention()
    given = dict(options)
    if isinstance(given.get("loss_scale"), dict):
        given["loss_scale"] = torch.amp.GradScaler("cpu", **given["loss_scale"])
    program = of(example, optimizer=adam(example.model), **given)
    reference, parts = Idioms(example, adam, 1, **options), options.get("accumulate", 1)
    plan = passes.emit(passes.replicate(program, [0, 1]))
    with Session(plan, program.state, binding="cpu") as session:
        for step in range(2):  # one row in each micro-batch
            x, y = drawn(parts, step)
            assert_same_bits({"loss": loss_of(session.step(x, y))}, {"loss": reference.step(x, y)}, f"step {step}")
        params = dict(reference.models[0].named_parameters())
        for replica in range(2):
            ours = {name: session.state_dict(replica)[name] for name in params}
            assert_same_bits(ours, params, f"replica {replica}")  # type: ignore[arg-type]


def test_gradients_are_handed_back_for_every_replica() -> None:
    example = attention()
    program = passes.replicate(of(example), [0, 1, 2])
    x, y = drawn(1, 0)
    model = copy.deepcopy(example.model)
    with graphir.seeded(0):
        example.loss(model(x), y).backward()
    with Session(passes.emit(program), program.state, binding="cpu") as session:
        session.step(x, y)
        wanted = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
        for replica in range(3):
            assert_same_bits(session.gradients(replica), wanted, f"replica {replica}")


class Doubled(nn.Module):
    """Python asks for the number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.factor = nn.Linear(3, 2), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * (2 if len(x) >= 2 else self.factor)


def test_outputs_are_gathered_from_fewer_replicas() -> None:
    model = Doubled()
    program = graphir.capture(model, (torch.randn(6, 3),))
    assert [str(guard) for guard in program.covers.guards] == ["batch>=2"]
    with torch.no_grad(), Session(passes.emit(passes.replicate(program, range(4))), program.state) as session:
        for rows in range(1, 10):
            x = torch.randn(rows, 3)
            assert torch.equal(session.step(x), torch.cat([model(share) for share in x.split(shares_of(rows))]))


def test_a_branch_for_few_rows_is_for_another_capture() -> None:
    class Tripled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * (3 if x.shape[0] >= 3 else 1)

    program = graphir.capture(Tripled(), (torch.randn(6, 3),))
    x = torch.randn(8, 3)
    with Session(passes.emit(passes.replicate(program, range(4))), program.state) as session:
        assert torch.equal(session.step(torch.cat([x, x])), 3 * torch.cat([x, x]))
        with pytest.raises(CoverageError, match=r"batch is 2 in a replica's share, the program takes batch>=3"):
            session.step(x)
    compiled = graphir.compile(Tripled(), (torch.cat([x, x]),), devices=range(4))
    with compiled, pytest.warns(graphir.RecaptureWarning):
        assert torch.equal(compiled.step(x), x)  # shares of two rows


def test_a_module_that_has_changed_is_not_recorded_instead() -> None:
    model = Doubled()
    program = graphir.capture(model, (torch.randn(6, 3),))
    with Session(passes.emit(program), program.state) as session:
        x = torch.randn(1, 3)
        kept = session.step(x)
        model.fc.register_forward_hook(lambda module, args, output: output + 1)
        assert torch.equal(session.step(x), kept)  # a session stays as captured
    with Session(passes.emit(program), program.state) as session:
        with pytest.raises(
            CoverageError, match=r"takes batch>=2: .*; the step differs from the program at batch 6: the"
        ):
            session.step(x)
        assert session.usable and session.steps_done == 0


def test_a_plan_from_a_file_takes_fewer_replicas_and_refuses_one_row(tmp_path: Path) -> None:
    example, program, all_placed = programs()
    passes.emit(all_placed["replicated"]).save(tmp_path / "plan.json")
    eager = ShareByShare(example.model, example.loss, adam, REPLICAS)
    with Session(graphir.load(tmp_path / "plan.json"), program.state, binding="cpu") as session:
        for step, rows in enumerate((7, 3)):
            expected = stepped(eager, *drawn(rows, step), shares_of(rows))
            assert torch.equal(session.step(*drawn(rows, step)), expected)
        with pytest.raises(CoverageError, match=r"batch is 1 in a replica's share, the program takes batch>=2") as e:
            session.step(*drawn(1, 0))
        assert e.value.fix.startswith("give more rows, or make the plan in the process that captures the model")


def test_one_value_per_channel_is_refused_as_torch_refuses_it() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
    y = torch.zeros(0, 4)
    program = graphir.capture(
        model, (torch.randn(4, 6),), targets=(y.new_zeros(4, 4),), loss=F.mse_loss, optimizer=adam(model)
    )
    eager = ShareByShare(model, F.mse_loss, adam, REPLICAS)
    with Session(passes.emit(passes.replicate(program, range(REPLICAS))), program.state, binding="cpu") as session:
        for rows in (5, 2, 7, 3):
            x, y = torch.randn(rows, 6), torch.randn(rows, 4)
            assert torch.equal(session.step(x, y), stepped(eager, x, y, shares_of(rows)))
        with pytest.raises(CoverageError, match="Expected more than 1 value per channel when training") as e:
            session.step(x[:1], y[:1])
        assert e.value.what.count("Expected more") == 1


class Rooted(nn.Module):
    """Its sizes are fixed: a root is no polynomial."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) / len(x) ** 0.5


def test_compile_takes_batches_that_fixed_sizes_cannot_share() -> None:
    torch.manual_seed(0)
    model = Rooted()
    x, y = torch.randn(8, 3), torch.randint(0, 2, (8,))
    eager = ShareByShare(model, F.cross_entropy, adam, REPLICAS)
    with graphir.compile(
        model, (x,), targets=(y,), loss=F.cross_entropy, optimizer=adam(model), devices=range(REPLICAS)
    ) as compiled:
        for rows, shares in ((8, [2] * 4), (7, [7]), (6, [6]), (4, [1] * 4), (8, [2] * 4), (7, [7])):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", graphir.RecaptureWarning)
                loss = compiled.step(x[:rows], y[:rows])
            assert_same_bits({"loss": loss}, {"loss": stepped(eager, x[:rows], y[:rows], shares)}, f"{rows} rows")
        assert len(compiled.plans) == 4 and compiled.steps_done == 6
        for replica, one in enumerate(eager.models):
            assert_same_bits(compiled.state_dict(replica), one.state_dict(), f"replica {replica}")


def test_compile_needs_no_other_plan_for_one_row() -> None:
    example, _, _ = programs()
    model = copy.deepcopy(example.model)
    eager = ShareByShare(model, example.loss, adam, REPLICAS)
    x, y = drawn(8, 0)
    with graphir.compile(
        model, (x,), targets=(y,), loss=example.loss, optimizer=adam(model), devices=range(REPLICAS)
    ) as compiled:
        for rows in (8, 1, 5):
            loss = compiled.step(x[:rows], y[:rows])
            assert torch.equal(loss, stepped(eager, x[:rows], y[:rows], shares_of(rows)))
        assert len(compiled.plans) == 1
