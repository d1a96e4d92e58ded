"""A sharded DLRM trains as it does on one device with the whole batch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import parking
import pytest
import torch
from idioms import loss_of
from tables import Sequences, batch_of
from tables import captured as table_captured
from torch import nn

import graphir
from graphir import Program, passes, runtime
from graphir.demo.dlrm import KAGGLE, Config, Dlrm, batch_dims, clicks, loss

OPTIMIZERS: Mapping[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.05),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "row-wise adagrad": lambda params: graphir.optim.RowWiseAdagrad(params, lr=0.05, eps=1e-6),
}


def captured(config: Config, model: nn.Module, optimizer: torch.optim.Optimizer | None, **options: Any) -> Program:
    batch = clicks(config, 4, 0, next(model.parameters()).dtype)
    return graphir.capture(
        model,
        batch.inputs,
        targets=(batch.target,),
        loss=loss,
        optimizer=optimizer,
        batch_dims=batch_dims(config),
        **options,
    )


def assert_close(ours: torch.Tensor, theirs: torch.Tensor, rtol: float, what: str) -> None:
    scale = max(theirs.abs().max().item(), 1e-3)
    assert (ours - theirs).abs().max().item() <= rtol * scale, what


def assert_trains_as_one_device(
    config: Config,
    placement: Mapping[str, Any],
    devices: list[int],
    rows: list[int],
    *,
    optimizer: str = "sgd",
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> None:
    """Losses and parameters of steps with so many rows each are those of the whole batch, to 1e-5."""
    torch.manual_seed(1)
    model = Dlrm(config).to(dtype)
    theirs = copy.deepcopy(model)
    held, eager = OPTIMIZERS[optimizer](model.parameters()), OPTIMIZERS[optimizer](theirs.parameters())
    program = passes.inject_copies(passes.shard(captured(config, model, held, **options), placement, devices))
    assert graphir.parse(str(program)) == program
    with runtime.Session(passes.emit(program), program.state, binding="cpu") as session:
        for step, count in enumerate(rows):
            batch = clicks(config, count, step + 1, dtype)
            ours = loss_of(session.step(*batch.inputs, batch.target))
            eager.zero_grad()
            whole = loss(theirs(*batch.inputs), batch.target)
            whole.backward()
            if "clip_grad_norm" in options:
                nn.utils.clip_grad_norm_(theirs.parameters(), options["clip_grad_norm"])
            eager.step()
            assert_close(ours, whole.detach(), 1e-5, f"loss of step {step}")
        if dtype == torch.float64:
            for name, value in theirs.state_dict().items():
                assert_close(session.state_dict()[name], value, 1e-5, name)


@pytest.mark.parametrize("replicas", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("interaction", ["dot", "cat"])
def test_shares_of_every_size(replicas: int, interaction: Any) -> None:
    config = Config(interaction=interaction)
    fewer = max(replicas // 2, 1)
    rows = [4 * replicas, 4 * replicas - 1, fewer, 16 * replicas + 5, 1] * 4
    assert_trains_as_one_device(config, {"emb_l.*": "round_robin"}, list(range(replicas)), rows)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("sparse", [False, True])
def test_optimizers(optimizer: str, sparse: bool) -> None:
    if sparse and optimizer in ("momentum", "adam"):
        pytest.skip("torch has no sparse gradients for it")
    assert_trains_as_one_device(
        Config(sparse=sparse), {"emb_l.*": "balanced"}, [0, 1, 2], [8, 7, 1, 9, 2, 4], optimizer=optimizer
    )


@pytest.mark.parametrize(
    "options", [{"clip_grad_norm": 0.05}, {"loss_scale": 64.0}, {"loss_scale": torch.amp.GradScaler("cpu")}]
)
def test_what_the_update_reads_of_all_devices(options: dict[str, Any]) -> None:
    assert_trains_as_one_device(Config(), {"emb_l.*": "round_robin"}, [0, 1, 2], [9, 8, 2, 10, 1, 9], **options)


def test_the_kaggle_configuration_in_single_precision() -> None:
    rows = [128, 100, 3, 128]
    assert_trains_as_one_device(KAGGLE, {"emb_l.*": "balanced"}, [0, 1, 2, 3], rows, dtype=torch.float32)


@pytest.mark.parametrize("seed", range(6))
def test_random_configurations(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    width, replicas = draw(2, 9), draw(2, 5)
    config = Config(
        dense=draw(1, 9),
        bottom=(*(draw(2, 12) for _ in range(draw(0, 3))), width),
        tables=tuple(draw(1, 40) for _ in range(draw(1, 7))),
        top=(*(draw(2, 12) for _ in range(draw(0, 3))), 1),
        interaction="dot" if draw(0, 2) else "cat",
        lookups=draw(2, 6),
    )
    placement = {f"emb_l.{k}": draw(0, replicas) for k in range(len(config.tables))}
    assert_trains_as_one_device(
        config, placement, list(range(replicas)), [draw(4, 9) * replicas, 1, draw(1, replicas + 2), 9]
    )


@pytest.mark.parametrize(
    "placement",
    [{"bot_l": 1, "emb_l.*": 0}, {"top_l": 0, "emb_l.*": 1}, {"bot_l.0": 1, "emb_l": 0}, {"top_l": 1, "emb_l": 1}],
)
def test_any_module_may_be_placed(placement: dict[str, Any]) -> None:
    assert_trains_as_one_device(Config(), placement, [0, 1], [8, 7, 1, 9])


class Experts(nn.Module):
    """Experts whose outputs a gate mixes: what they read is read beside them, too, and has a gradient from each."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.bottom, self.gate, self.top = nn.Linear(2, 3), nn.Linear(3, experts), nn.Linear(3, 1)
        self.experts = nn.ModuleList(
            [nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)) for _ in range(experts)]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.bottom(x)
        shares = self.gate(hidden).softmax(1)
        mixed = [shares[:, k : k + 1] * expert(hidden) for k, expert in enumerate(self.experts)]
        return self.top(sum(mixed))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("experts", "placement"),
    [
        (1, {"experts": 0}),
        (2, {"experts": 1}),
        (3, {"experts.*": "round_robin"}),
        (3, {"experts.1": 0}),
        (2, {"gate": 0, "experts.0": 1}),
        (2, {"bottom": 0, "gate": 1}),
    ],
)
def test_summands_of_a_gradient_count_by_their_shares(experts: int, placement: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Experts(experts).double()
    theirs, mse = copy.deepcopy(model), nn.functional.mse_loss

    def drawn(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(rows, 2, dtype=torch.float64), torch.rand(rows, 1, dtype=torch.float64)

    x, target = drawn(4)
    program = graphir.capture(model, (x,), targets=(target,), loss=mse)
    plan = passes.emit(passes.inject_copies(passes.shard(program, placement, [0, 1])))
    with runtime.Session(plan, program.state, binding="cpu") as session:
        for rows in (8, 7, 1):
            x, target = drawn(rows)
            session.step(x, target)
            theirs.zero_grad()
            mse(theirs(x), target).backward()
            for name, param in theirs.named_parameters():
                assert param.grad is not None
                assert_close(session.gradients()[name], param.grad, 1e-10, name)


def test_steps_are_counted_where_the_table_is() -> None:
    """Adam's count of steps is on the host, and corrects its bias: each table has its own, whoever asks for it."""
    program = passes.inject_copies(
        passes.shard(
            captured(Config(), model := Dlrm(Config()), torch.optim.Adam(model.parameters())),
            {"emb_l.*": "round_robin"},
            [0, 1],
        )
    )
    with runtime.Session(passes.emit(program), program.state, binding="cpu") as session:
        for step in range(3):
            batch = clicks(Config(), 8, step)
            session.step(*batch.inputs, batch.target)
        for replica in (0, 1):
            state = session.optimizer_state_dict(replica)["state"]
            assert {float(own["step"]) for own in state.values()} == {3.0}


def test_an_overflow_in_one_table_makes_every_device_skip() -> None:
    config = Config(bottom=(4,), tables=(5, 5), top=(1,), interaction="cat")
    torch.manual_seed(0)
    model = Dlrm(config)
    with torch.no_grad():
        for name, param in model.top_l.named_parameters():
            if name.endswith("weight"):
                param[:, 4:8] = 1e30  # the gradients of the first table, and of nothing else
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**60)
    held = torch.optim.SGD(model.parameters(), lr=0.1)
    program = captured(config, model, held, loss_scale=scaler)
    program = passes.inject_copies(passes.shard(program, {"emb_l.*": "round_robin"}, [0, 1]))
    batch = clicks(config, 8, 1)
    with torch.no_grad():
        model.emb_l[0].weight.zero_()  # type: ignore[union-attr]
    state = {**program.state, "emb_l.0.weight": torch.zeros(5, 4)}
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with runtime.Session(passes.emit(program), state, binding="cpu") as session:
        session.step(*batch.inputs, batch.target)
        for replica in (0, 1):
            for name, value in session.state_dict(replica).items():
                assert torch.equal(value, before[name]), name
        assert session.loss_scaler_state_dict()["scale"] == 2.0**59


@pytest.mark.parametrize("sparse", [False, True])
def test_an_embedding_whose_rows_are_flattened_behind_it(sparse: bool) -> None:
    """Views of what a placed module hands on are made again at each replica; the values of its sparse gradient are
    rows that the replicas hand back."""
    torch.manual_seed(0)
    model = Sequences(sparse=sparse).double()
    theirs = copy.deepcopy(model)
    eager = torch.optim.SGD(theirs.parameters(), lr=0.1)
    program = table_captured(model, torch.optim.SGD(model.parameters(), lr=0.1))
    plan = passes.emit(passes.inject_copies(passes.shard(program, {"table": 1}, [0, 1])))
    with runtime.Session(plan, program.state, binding="cpu") as session:
        for step, rows in enumerate((8, 7, 9)):
            batch = batch_of(model, rows, step + 1)
            ours = session.step(*batch.inputs, batch.target)
            eager.zero_grad()
            whole = nn.functional.mse_loss(theirs(*batch.inputs), batch.target)
            whole.backward()
            eager.step()
            assert_close(ours, whole.detach(), 1e-10, f"loss of step {step}")
        for name, value in theirs.state_dict().items():
            assert_close(session.state_dict()[name], value, 1e-10, name)


def test_sharded_steps_park_and_recompute() -> None:
    """A bottom MLP that is computed again, a top MLP that each replica parks on a device of its own."""
    config = Config()
    torch.manual_seed(1)
    model = Dlrm(config)
    program = passes.shard(
        captured(config, model, OPTIMIZERS["momentum"](model.parameters())), {"emb_l.*": "balanced"}, [0, 1]
    )
    made = passes.park(passes.recompute(program, "bot_l"), "top_l", {0: 2, 1: 3})
    placed = passes.inject_copies(made)
    assert graphir.certify(program, placed).holds
    batches = [clicks(config, 8, step, torch.float32) for step in range(2)]
    given = [((*batch.inputs, batch.target), {}) for batch in batches]
    parking.assert_runs_the_same(passes.inject_copies(program), placed, given, ["threads", "adversarial"])
