"""Sparse gradients of embeddings: the bits of eager PyTorch, alone, over replicas, and after a shift."""

from __future__ import annotations

import copy
import gc
import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from eager import ShareByShare, assert_same_bits
from torch import Tensor, nn

import graphir
from graphir import passes, runtime
from graphir.capturing.isolate.recorded import is_recorded
from graphir.errors import CaptureError
from graphir.ir.program import Program

ROWS, WIDTH, LOOKUPS = 7, 4, 3

EXECUTORS = ["reference", "threads", "adversarial"]


class Recommender(nn.Module):
    """Two bags of categories, one of them weighted, an embedding that is looked up twice, and dense layers (a DLRM)."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(ROWS, WIDTH, mode="mean", sparse=True)
        self.weighted = nn.EmbeddingBag(ROWS, WIDTH, mode="sum", sparse=True)
        self.user = nn.Embedding(ROWS, WIDTH, sparse=True)
        self.bottom = nn.Linear(2, WIDTH)
        self.top = nn.Linear(4 * WIDTH, 1)

    def forward(self, features: Tensor, categories: Tensor) -> Tensor:
        offsets = torch.arange(0, categories.numel(), LOOKUPS)
        weights = torch.ones_like(categories, dtype=torch.float32) / 3
        dense = F.relu(self.bottom(features))
        parts = [self.bag(categories.flatten(), offsets), self.weighted(categories, per_sample_weights=weights)]
        parts += [self.user(categories[:, 0]) * self.user(categories[:, 1]), dense]
        return self.top(torch.cat(parts, 1)).flatten()


def batch(size: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    categories = torch.randint(0, ROWS, (size, LOOKUPS), generator=generator)
    return torch.randn(size, 2, generator=generator), categories, torch.rand(size, generator=generator)


Make = Callable[[nn.Module], torch.optim.Optimizer]


def of_all(make: Callable[[Iterable[Any]], torch.optim.Optimizer]) -> Make:
    """An optimizer of all of a model's parameters."""
    return lambda model: make(model.parameters())


OPTIMIZERS: dict[str, Make] = {
    "sgd": of_all(lambda params: torch.optim.SGD(params, lr=0.1)),
    "foreach sgd": of_all(lambda params: torch.optim.SGD(params, lr=0.1, maximize=True, foreach=True)),
    "adagrad": of_all(lambda params: torch.optim.Adagrad(params, lr=0.1, lr_decay=0.1)),
    "row-wise adagrad": of_all(lambda params: graphir.optim.RowWiseAdagrad(params, lr=0.1, eps=1e-6)),
    "foreach adagrad": of_all(lambda params: torch.optim.Adagrad(params, lr=0.1, maximize=True, foreach=True)),
}


def captured(make: Make, model: nn.Module | None = None, size: int = 4) -> tuple[Program, nn.Module]:
    torch.manual_seed(0)
    model = model or Recommender()
    features, categories, clicks = batch(size, 0)
    program = graphir.capture(model, (features, categories), targets=(clicks,), loss=F.mse_loss, optimizer=make(model))
    assert not program.covers.fixed
    return program, model


def train(program: Program, model: nn.Module, make: Make, executor: Any, sizes: Iterable[int] = (4, 4, 5)) -> None:
    """Assert that the program trains the model to the bits of eager PyTorch."""
    model = copy.deepcopy(model)
    optimizer = make(model)
    with runtime.Session(passes.emit(program), program.state, executor=executor) as session:
        for step, size in enumerate(sizes):
            *inputs, clicks = batch(size, step)
            optimizer.zero_grad()
            loss = F.mse_loss(model(*inputs), clicks)
            loss.backward()
            optimizer.step()
            assert_same_bits({"loss": session.step(*inputs, clicks)}, {"loss": loss.detach()}, f"step {step}")
        assert_same_bits(session.state_dict(), dict(model.state_dict()), "model")
        ours = session.optimizer_state_dict()["state"]
        for index, entries in optimizer.state_dict()["state"].items():
            for key, value in entries.items():
                assert value is None or torch.equal(torch.as_tensor(ours[index][key]), torch.as_tensor(value)), key


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_has_the_bits_of_torch(name: str, executor: str) -> None:
    program, model = captured(OPTIMIZERS[name])
    train(program, model, OPTIMIZERS[name], executor)


class Strided(nn.Module):
    """An embedding whose gradient is columns of a wider one, or lies in memory column by column."""

    def __init__(self, transposed: bool) -> None:
        super().__init__()
        self.transposed = transposed
        self.user, self.top = nn.Embedding(ROWS, WIDTH, sparse=True), nn.Linear(WIDTH + 2, 1)

    def forward(self, features: Tensor, categories: Tensor) -> Tensor:
        looked_up = self.user(categories[:, 0])
        if self.transposed:
            looked_up = looked_up.t().clone(memory_format=torch.contiguous_format).tanh().t()
        return self.top(torch.cat([looked_up, features], 1)).flatten()


@pytest.mark.parametrize("devices", [[], [0, 1]], ids=["alone", "replicas"])
@pytest.mark.parametrize("transposed", [False, True], ids=["columns", "transposed"])
@pytest.mark.parametrize("name", ["sgd", "adagrad"])
def test_gradients_with_gaps_are_added_as_autograd_leaves_them(name: str, transposed: bool, devices: list[int]) -> None:
    make = OPTIMIZERS[name]
    program, model = captured(make, Strided(transposed))
    if not devices:
        train(program, model, make, "reference", (4, 12, 9))
        return
    reference = ShareByShare(model, F.mse_loss, make, 2)
    plan = passes.emit(passes.replicate(program, devices))
    with runtime.Session(plan, program.state, executor="reference") as session:
        for step, size in enumerate((8, 24, 13)):
            features, categories, clicks = batch(size, step)
            shares = zip(features.chunk(2), categories.chunk(2), clicks.chunk(2), strict=True)
            loss = reference.step_on([((f, c), (y,), {}) for f, c, y in shares])
            assert_same_bits({"loss": session.step(features, categories, clicks)}, {"loss": loss}, f"step {step}")
        assert_same_bits(session.state_dict(), reference.models[0].state_dict(), "model")


class Lookups(nn.Module):
    """Nothing but an embedding."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.user = nn.Embedding(ROWS, WIDTH, sparse=True, **options)

    def forward(self, features: Tensor, categories: Tensor) -> Tensor:
        return self.user(categories).sum((1, 2))


@pytest.mark.parametrize(("executor", "maximize"), [("reference", False), ("threads", True)])
def test_sparse_adam_has_the_bits_of_torch(executor: str, maximize: bool) -> None:
    make = of_all(lambda params: torch.optim.SparseAdam(params, lr=0.1, betas=(0.8, 0.9), maximize=maximize))
    program, model = captured(make, Lookups())
    train(program, model, make, executor, (4, 2, 4, 9))


def test_training_by_sparse_adam_goes_back_and_forth() -> None:
    make = of_all(lambda params: torch.optim.SparseAdam(params, lr=0.1))
    alone = Lookups()
    traveller = copy.deepcopy(alone)
    optimizer, other = make(alone), make(traveller)
    for step in range(6):
        features, categories, clicks = batch(4, step)
        optimizer.zero_grad()
        F.mse_loss(alone(features, categories), clicks).backward()
        optimizer.step()
        if step % 2:
            other.zero_grad()
            F.mse_loss(traveller(features, categories), clicks).backward()
            other.step()
            continue
        program = graphir.capture(
            traveller, (features, categories), targets=(clicks,), loss=F.mse_loss, optimizer=other
        )
        with runtime.Session(passes.emit(program), program.state) as session:
            session.step(features, categories, clicks)
            traveller.load_state_dict(session.state_dict())
            other.load_state_dict(session.optimizer_state_dict())
    assert_same_bits(dict(traveller.state_dict()), dict(alone.state_dict()), "model")
    assert other.state_dict()["state"][0]["step"] == 6


def test_padding_of_a_bag_leaves_slots_empty() -> None:
    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = nn.EmbeddingBag(ROWS, WIDTH, mode="sum", sparse=True, padding_idx=2)

        def forward(self, features: Tensor, categories: Tensor) -> Tensor:
            return self.bag(categories).sum(1)

    program, model = captured(OPTIMIZERS["adagrad"], Padded())
    train(program, model, OPTIMIZERS["adagrad"], "threads")


def test_a_sparse_gradient_is_two_blobs_whose_sizes_follow_the_lookups() -> None:
    program, _ = captured(OPTIMIZERS["sgd"])
    indices, values = (program.step.blobs[f"bag.weight_grad.{part}"] for part in ("indices", "values"))
    assert (str(indices.shape[1]), indices.dtype, indices.role) == ("3*batch", "i64", "gradient")
    assert [str(size) for size in values.shape] == ["3*batch", "4"]
    update = next(op for op in program.step.ops if op.type == "graphir.sparse_sgd")
    assert update.inputs == ("bag.weight", "bag.weight_grad.indices", "bag.weight_grad.values", "lr")


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("name", ["sgd", "adagrad"])
@pytest.mark.parametrize("sizes", [(8, 8, 8), (8, 7, 5)], ids=["equal shares", "uneven shares"])
def test_two_replicas_have_the_bits_of_eager_share_by_share(name: str, executor: Any, sizes: tuple[int, ...]) -> None:
    program, model = captured(OPTIMIZERS[name])
    placed = passes.replicate(program, devices=[0, 1])
    activations = passes.find_activations(placed)
    shifted = passes.shift_activations(placed, activations[len(activations) // 2 :], shifts={0: 2, 1: 3})
    shifted = passes.share_storage(passes.inject_copies(shifted))
    graphir.certify(placed, shifted)
    eager = ShareByShare(model, F.mse_loss, OPTIMIZERS[name], 2)
    sessions = [runtime.Session(passes.emit(p), p.state, executor=executor) for p in (placed, shifted)]
    for step, size in enumerate(sizes):
        shares = zip(*[tensor.chunk(2) for tensor in batch(size, step)], strict=True)
        loss = eager.step_on([(inputs, (clicks,), {}) for *inputs, clicks in shares])
        for session in sessions:
            assert_same_bits({"loss": session.step(*batch(size, step))}, {"loss": loss}, f"step {step}")
    for session in sessions:
        assert_same_bits(session.state_dict(0), dict(eager.models[0].state_dict()), "replica 0")
        assert_same_bits(session.state_dict(1), dict(eager.models[1].state_dict()), "replica 1")
        session.close()


@pytest.mark.usefixtures("few_objects")
def test_a_capture_leaves_no_tensor_for_the_collector() -> None:
    """What was left would be searched for in every cache of the process."""
    gc.disable()
    try:
        captured(OPTIMIZERS["sgd"])
        assert not [found for found in gc.get_objects() if is_recorded(found)]
    finally:
        gc.enable()


def test_updates_stay_with_their_parameters_in_a_shift() -> None:
    program, _ = captured(OPTIMIZERS["adagrad"])
    placed = passes.replicate(program, devices=[0, 1])
    shifted = passes.shift_activations(placed, ["bag", "weighted"], shifts={0: 2, 1: 3})
    blobs = shifted.step.blobs
    for op in shifted.step.ops:
        if op.type == "graphir.sparse_adagrad":
            assert all(blobs[name].device == op.device for name in op.inputs if name not in ("lr", op.inputs[4])), op
        if op.phase == "reduce" and op.type != "AllReduce":
            param = op.outputs[0].partition("_grad")[0]
            owner = param if op.type == "graphir.sparse_sum" else f"gpu_{op.outputs[0][-1]}{param[5:]}"
            assert op.device == blobs[owner].device == blobs[op.outputs[0]].device, op
    assert {blobs[f"gpu_{r}/bag.weight"].device for r in (0, 1)} == {"gpu:2", "gpu:3"}


@pytest.mark.parametrize(
    ("to", "crossing"),
    [
        ({"user": {1: 0}}, [("gpu_1/", "gpu:0")]),
        ({"user": 2}, [("gpu_0/", "gpu:2"), ("gpu_1/", "gpu:2")]),
        ({"**": 0}, []),
        ({}, [("gpu_0/", "gpu:1"), ("gpu_1/", "gpu:0")]),
    ],
)
def test_gradients_of_a_table_cross_once_to_each_device(to: dict[str, Any], crossing: list[tuple[str, str]]) -> None:
    program, _ = captured(OPTIMIZERS["sgd"], Strided(False))
    replicated = passes.replicate(program, devices=[0, 1])
    result = passes.inject_copies(passes.shift_modules(replicated, to) if to else replicated)
    graphir.certify(replicated, result)
    blobs = result.step.blobs
    copies = [(blobs[op.inputs[0]], op.device) for op in result.step.ops if op.type == "Copy"]
    assert not [source.name for source, device in copies if source.device == device]
    rows = [(s.name[:6], str(to)) for s, to in copies if s.role == "gradient" and s.dtype == "f32"]
    assert sorted(rows) == crossing
    assert passes.inject_copies(result).step == result.step


def refused(text: str, model: nn.Module, make: Make | None) -> None:
    features, categories, clicks = batch(4, 0)
    optimizer = None if make is None else make(model)
    with pytest.raises(CaptureError, match=re.escape(text)):
        graphir.capture(model, (features, categories), targets=(clicks,), loss=F.mse_loss, optimizer=optimizer)


@pytest.mark.parametrize(
    ("text", "make"),
    [
        ("momentum=0.9", lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)),
        ("weight_decay=0.1", lambda m: torch.optim.SGD(m.parameters(), lr=0.1, weight_decay=0.1)),
        ("form='fused'", lambda m: torch.optim.SGD(m.parameters(), lr=0.1, fused=True)),
        ("weight_decay=0.1", lambda m: torch.optim.Adagrad(m.parameters(), weight_decay=0.1)),
        ("form='fused'", lambda m: torch.optim.Adagrad(m.parameters(), fused=True)),
        ("graphir.adam", lambda m: torch.optim.Adam(m.parameters())),
        ("graphir.rmsprop", lambda m: torch.optim.RMSprop(m.parameters())),
    ],
)
def test_what_torch_does_not_do_by_a_sparse_gradient(text: str, make: Make) -> None:
    refused(f"{text} does not support the sparse gradient of 'user.weight'\n", Lookups(), make)


def test_sparse_adam_takes_no_dense_gradient() -> None:
    model = nn.Sequential()
    model.user = Lookups()
    model.forward = lambda x, y: x.sum(1) * model.scale + model.user(x, y)  # type: ignore[method-assign,operator]
    model.scale = nn.Parameter(torch.ones(()))
    refused(
        "SparseAdam does not take the dense gradient of 'scale'", model, of_all(lambda p: torch.optim.SparseAdam(p))
    )


def test_a_sparse_gradient_needs_an_optimizer() -> None:
    refused("'user.weight' has a sparse gradient, which a program can't return", Lookups(), None)


def test_padding_of_an_embedding_depends_on_data() -> None:
    refused("the rows of padding, whose number depends on data\n  in   module 'user'", Lookups(padding_idx=1), None)


def test_a_weight_with_a_dense_gradient_too() -> None:
    class Tied(Lookups):
        def forward(self, features: Tensor, categories: Tensor) -> Tensor:
            return super().forward(features, categories) + self.user.weight.sum()

    refused("aten.add.Tensor takes a sparse tensor", Tied(), OPTIMIZERS["sgd"])


def test_a_weight_that_was_computed() -> None:
    class Scaled(Lookups):
        def forward(self, features: Tensor, categories: Tensor) -> Tensor:
            return F.embedding(categories, self.user.weight * 2, sparse=True).sum((1, 2))

    refused("aten.mul.Tensor takes a sparse tensor", Scaled(), OPTIMIZERS["sgd"])


@pytest.mark.parametrize(
    "loss",
    [lambda out: out.sum(), lambda out: out.square().sum(), lambda out: out.t().contiguous().square().sum()],
    ids=["one number shown everywhere", "dense", "transposed"],
)
def test_the_sum_over_replicas_depends_on_the_layout_of_values_as_in_torch(loss: Callable[[Tensor], Tensor]) -> None:
    model, make = nn.Embedding(ROWS, WIDTH, sparse=True), OPTIMIZERS["sgd"]
    program = graphir.capture(model, (torch.arange(6),), loss=loss, optimizer=make(model))
    program = passes.replicate(program, devices=[0, 1])
    eager = ShareByShare(model, loss, make, 2)
    generator = torch.Generator().manual_seed(0)
    with runtime.Session(passes.emit(program), program.state) as session:
        for _ in range(3):
            lookups = torch.randint(0, ROWS, (12,), generator=generator)
            eager.step_on([((share,), (), {}) for share in lookups.chunk(2)])
            session.step(lookups)
        assert_same_bits(session.state_dict(), dict(eager.models[0].state_dict()), "model")
