"""Named dimensions: one program at any batch and any length, bit for bit; and what ``batch_dims`` refuses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import models
import pytest
import torch
import torch.nn.functional as F
from eager import ShareByShare, assert_same_bits
from graphir.passes import emit, find_activations, inject_copies, replicate, shift_activations
from graphir.runtime import Session
from models import Applied
from torch import Tensor, nn

from graphir.capturing.capture import capture
from graphir.errors import CaptureError, SessionError
from graphir.ir.program import Program
from graphir.ir.size import dimension, parse_size
from graphir.ir.text import parse
from graphir.ir.verify import verify

TOKENS = {0: "batch", 1: "length"}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def runs_as_eager(
    program: Program, loss: Callable[..., Tensor], steps: Sequence[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]
) -> None:
    """Train on inputs and targets of several sizes; each named ``batch`` is the first dimension."""
    assert program.module is not None
    replicas = len(program.replicas)
    eager = ShareByShare(program.module, loss, sgd, replicas)
    with Session(emit(program), program.state) as session:
        for inputs, targets in steps:
            parts = [[t.chunk(replicas) for t in given] for given in (inputs, targets)]
            shares = [tuple(tuple(t[r] for t in given) for given in parts) for r in range(replicas)]
            expected = eager.step_on([(*share, {}) for share in shares])  # type: ignore[misc]
            assert_same_bits({"loss": session.step(*inputs, *targets)}, {"loss": expected}, "step")
        for replica, model in enumerate(eager.models):
            assert_same_bits(session.state_dict(replica), model.state_dict(), f"replica {replica}")


def tokens(batch: int, length: int) -> tuple[tuple[Tensor], tuple[Tensor]]:
    return (torch.randint(17, (batch, length)),), (torch.randint(17, (batch, length)),)


def test_a_transformer_at_any_batch_and_length() -> None:
    model = models.GPT(vocabulary=17, length=16, width=12, heads=2, layers=1, dropout=0.1)

    def loss(out: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(out.flatten(0, 1), target.flatten())

    inputs, targets = tokens(4, 16)
    program = capture(model, inputs, targets=targets, loss=loss, optimizer=sgd(model), batch_dims=TOKENS)
    assert program.covers.fixed == "" and program.dims == {"batch": 4, "length": 16}
    sizes = {size for blob in program.step.blobs.values() for size in blob.shape or ()}
    assert parse_size("batch*length") in sizes
    verify(program.with_(dims={"batch": 3, "length": 5}))
    sizes_of_steps = [(4, 16), (5, 9), (1, 2), (3, 1)]
    runs_as_eager(program, loss, [tokens(*size) for size in sizes_of_steps])

    placed = replicate(program, [0, 1])
    activations = find_activations(placed)
    placed = inject_copies(shift_activations(placed, activations[len(activations) // 2 :], shifts={0: 2, 1: 3}))
    plan = emit(placed, dims={"batch": 2, "length": 3})
    assert plan.dims == {"gpu_0/batch": 2, "gpu_0/length": 3, "gpu_1/batch": 2, "gpu_1/length": 3}
    runs_as_eager(placed, loss, [tokens(*size) for size in [(5, 16), (4, 7), (3, 10)]])


class Bags(nn.Module):
    """A recommendation model: a bag of lookups for each sample, and dense features."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(50, 6, mode="sum")
        self.top = nn.Linear(6 + 3, 1)

    def forward(self, dense: Tensor, lookups: Tensor, offsets: Tensor | None = None) -> Tensor:
        return self.top(torch.cat([dense, self.bag(lookups, offsets)], 1)).squeeze(1)


def bags(batch: int, lookups: int) -> tuple[tuple[Tensor, ...], tuple[Tensor]]:
    offsets = torch.sort(torch.randint(lookups + 1, (batch,))).values
    offsets[0] = 0
    return (torch.randn(batch, 3), torch.randint(50, (lookups,)), offsets), (torch.rand(batch),)


def test_the_number_of_lookups_beside_the_batch() -> None:
    model = Bags()
    loss = F.binary_cross_entropy_with_logits
    inputs, targets = bags(6, 20)
    dims = ((0, {0: "lookups"}, 0), {}, (0,))
    batch_dims = (({0: "batch"}, {0: "lookups"}, {0: "batch"}), {}, 0)
    for named in (dims, batch_dims):
        program = capture(model, inputs, targets=targets, loss=loss, optimizer=sgd(model), batch_dims=named)
        assert program.covers.fixed == "" and program.dims == {"batch": 6, "lookups": 20}
    assert [feed.batch_dim for feed in program.interface.feeds] == [0, None, 0, 0]
    runs_as_eager(program, loss, [bags(*size) for size in [(6, 20), (3, 31), (9, 4), (1, 1)]])


def test_bags_of_any_length_over_replicas() -> None:
    model = Bags()
    loss = F.binary_cross_entropy_with_logits

    def given(batch: int, lookups: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor]]:
        return (torch.randn(batch, 3), torch.randint(50, (batch, lookups))), (torch.rand(batch),)

    inputs, targets = given(4, 9)
    dims = ((0, {0: "batch", 1: "lookups"}), {}, 0)
    program = capture(model, inputs, targets=targets, loss=loss, optimizer=sgd(model), batch_dims=dims)
    sizes = {size for blob in program.step.blobs.values() for size in blob.shape or ()}
    assert program.covers.fixed == "" and parse_size("batch*lookups") in sizes
    runs_as_eager(replicate(program, [0, 1]), loss, [given(*size) for size in [(4, 9), (7, 2), (3, 12)]])


class Pictures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.conv2 = nn.Conv2d(4, 4, 3)
        self.fc = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv2(F.relu(self.norm(self.conv1(x)), inplace=True))
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))


def test_pictures_of_any_height_and_width() -> None:
    def given(batch: int, height: int, width: int) -> tuple[tuple[Tensor], tuple[Tensor]]:
        return (torch.randn(batch, 3, height, width),), (torch.randint(5, (batch,)),)

    model = Pictures()
    inputs, targets = given(4, 9, 8)
    dims = ({0: "batch", 2: "height", 3: "width"}, {}, 0)
    program = capture(model, inputs, targets=targets, loss=F.cross_entropy, optimizer=sgd(model), batch_dims=dims)
    assert program.covers.fixed == "" and program.dims == {"batch": 4, "height": 9, "width": 8}
    height, width = parse_size("height-2"), parse_size("width-2")
    assert program.step.blobs["conv2"].shape == (dimension("batch"), 4, height, width)
    steps = [given(*size) for size in [(4, 9, 8), (5, 6, 12), (2, 3, 3)]]
    runs_as_eager(program, F.cross_entropy, steps)
    runs_as_eager(replicate(program, [0, 1]), F.cross_entropy, steps)


# Dimensions that sizes don't follow


class Along(nn.Module):
    """Does something with the length of sequences."""

    def __init__(self, body: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.fc(x))


def along(body: Callable[[Tensor], Tensor], length: int = 8) -> Program:
    return capture(Along(body), (torch.randn(4, length, 3),), loss=lambda out: out.sum(), batch_dims=TOKENS)


FIXED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "half": (
        lambda h: h[:, : h.shape[1] // 2],
        "length is fixed at 8: a size of the value made by aten.slice.Tensor: 4, 3, 3, 2 at length 8, 7, 6, 5 is not "
        "quadratic",
    ),
    "root": (lambda h: h * h.shape[1] ** -0.5, "length is fixed at 8: argument other of aten.mul.Tensor: 0.35355"),
    "branch": (
        lambda h: h * 2 if h.shape[1] == 8 else h,
        "length is fixed at 8: operator 4 is aten.mul.Tensor at length 8, but aten.sum.default at length 7",
    ),
    "whole": (lambda h: h.view(-1, 8, 3), "length is fixed at 8: at length 7: the step failed while it was recorded"),
    "cube": (
        lambda h: h / h.shape[1] ** 3,
        "length is fixed at 8: argument other of aten.div.Tensor: 512, 343, 216, 125 at length 8, 7, 6, 5 is not "
        "quadratic",
    ),
}


@pytest.mark.parametrize("case", FIXED)
def test_only_the_dimension_that_is_not_followed_is_fixed(case: str) -> None:
    body, reason = FIXED[case]
    program = along(body)
    assert program.covers.fixed.startswith(reason)
    assert program.dims == {"batch": 4} and program.step.blobs["x"].shape == (dimension("batch"), 8, 3)
    with Session(emit(program), program.state) as session:
        x = torch.randn(5, 8, 3)
        assert program.module is not None
        assert_same_bits({"loss": session.step(x)}, {"loss": program.module(x).sum().detach()}, case)
        with pytest.raises(SessionError) as caught:
            session.step(torch.randn(5, 7, 3))
    assert "('x') has shape [5, 7, 3], the program takes [batch, 8, 3]" in caught.value.what
    assert reason in (caught.value.fix or "")


def test_a_batch_that_is_not_followed_leaves_the_length() -> None:
    program = along(lambda h: h if int(h.shape[0]) % 2 else h * 2)
    assert program.covers.fixed.startswith("batch is fixed at 4: operator 4 is aten.mul.Tensor at batch 4, but")
    assert program.dims == {"length": 8} and program.step.blobs["x"].shape == (4, dimension("length"), 3)


def test_dimensions_that_are_followed_one_by_one_only() -> None:
    program = along(lambda h: h * 2 if int(h.shape[0]) > 10 and h.shape[1] < 8 else h)
    assert program.covers.fixed.startswith(
        "all but batch are fixed: operator 4 is aten.sum.default in loss at batch 4, length 8, but"
    )
    assert program.dims == {"batch": 4}


def test_short_sequences_are_recorded_at_longer_ones() -> None:
    program = along(lambda h: h / h.shape[1], length=2)
    assert program.covers.fixed == "" and program.dims == {"batch": 4, "length": 2}
    divisors = [op.args["other"] for op in program.step.ops if op.type == "aten.div.Tensor" and op.args]
    assert dimension("length") in divisors


# What is refused


@pytest.mark.parametrize(
    ("batch_dims", "what"),
    [
        ({0: "batch", 1: 3}, "batch_dims does not fit the arguments"),
        ("batch", "batch_dims does not fit the arguments"),
        (True, "batch_dims does not fit the arguments"),
        (((0,), {}), "batch_dims does not fit the arguments"),
        ({"0": "batch"}, "batch_dims has the key '0' for argument 'x'"),
        ({0: "batch", 3: "length"}, "batch_dims names dimension 3 of a tensor that has 3 dimensions"),
        ({0: "batch", -4: "length"}, "batch_dims names dimension -4 of a tensor that has 3 dimensions"),
        (
            {0: "batch", 1: "my length"},
            "batch_dims names a dimension of 'x' 'my length', which is not an ASCII identifier",
        ),
        ({0: "batch", 1: "länge"}, "batch_dims names a dimension of 'x' 'länge', which is not an ASCII identifier"),
        ({0: "batch", 1: ""}, "batch_dims names a dimension of 'x' '', which is not an ASCII identifier"),
        ({1: "length"}, "batch_dims names length, but no dimension 'batch'"),
        ({0: "batch", 1: "n", 2: "n"}, "the dimensions 'n' differ in size (x: 8, x along 2: 3)"),
        ({0: "batch", 1: "batch"}, "batch_dims names two dimensions of 'x' 'batch', or names one dimension twice"),
        ({0: "batch", -3: "length"}, "batch_dims names two dimensions of 'x' 'batch', or names one dimension twice"),
    ],
)
def test_names_that_cannot_be(batch_dims: Any, what: str) -> None:
    with pytest.raises(CaptureError) as caught:
        capture(Along(torch.relu), (torch.randn(4, 8, 3),), batch_dims=batch_dims)
    assert caught.value.what == what and caught.value.fix


def two(x: Tensor, y: Tensor, batch_dims: Any) -> Program:
    class Two(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x.sum() + y.sum()

    return capture(Two(), (x, y), batch_dims=batch_dims)


def test_sizes_of_one_name_that_differ() -> None:
    with pytest.raises(CaptureError, match=r"the dimensions 'length' differ in size \(x: 8, y: 7\)"):
        two(torch.zeros(4, 8), torch.zeros(4, 7), TOKENS)


def test_an_empty_dimension() -> None:
    with pytest.raises(CaptureError, match="the dimension 'length' is empty: 'x' has no samples"):
        two(torch.zeros(4, 0), torch.zeros(4, 0), TOKENS)


def test_many_names_are_terms_by_themselves() -> None:
    names = ["batch", *"abcde"]
    dims = ([{0: name} for name in names],), {}, ()
    tensors = [torch.zeros(n + 2) for n in range(len(names))]

    class Together(nn.Module):
        def forward(self, xs: list[torch.Tensor]) -> torch.Tensor:
            return torch.cat([x.exp() for x in xs])

    program = capture(Together(), (tensors,), batch_dims=dims)
    assert str(program.step.blobs[program.step.external_outputs[0]].shape[0]) == "a+b+batch+c+d+e"

    class Multiplied(nn.Module):
        def forward(self, xs: list[torch.Tensor]) -> torch.Tensor:
            return (xs[1][:, None] * xs[2]).flatten()

    assert "is no polynomial" in capture(Multiplied(), (tensors,), batch_dims=dims).covers.fixed


def test_too_many_names() -> None:
    dims = ([{0: name} for name in ["batch", *(f"d{i}" for i in range(64))]],), {}, ()
    with pytest.raises(CaptureError, match=r"batch_dims names 65 dimensions: batch, d0, d1"):
        capture(nn.Identity(), ([torch.zeros(2)] * 65,), batch_dims=dims)


def test_one_tensor_has_one_set_of_names() -> None:
    x = torch.zeros(4, 8)
    with pytest.raises(CaptureError, match="'x' and 'y' are one tensor, but batch_dims names its dimensions diff"):
        two(x, x, ((TOKENS, 0), {}, ()))
    assert two(x, x, TOKENS).dims == {"batch": 4, "length": 8}


def test_a_dimension_may_count_from_the_end() -> None:
    assert along(torch.relu).dims == {"batch": 4, "length": 8}
    program = two(torch.zeros(4, 8), torch.zeros(8, 4), ((TOKENS, {-1: "batch", 0: "length"}), {}, ()))
    assert program.step.blobs["y"].shape == (dimension("length"), dimension("batch"))


MADE_OF_NUMBERS = {
    "range": lambda x: x + torch.arange(float(x.shape[1]))[:, None],
    "full": lambda x: x + torch.full((x.shape[1], 1), float(x.shape[1])),
}


@pytest.mark.parametrize("case", MADE_OF_NUMBERS)
def test_a_size_as_a_float_makes_a_tensor(case: str) -> None:
    model = Applied(MADE_OF_NUMBERS[case])
    program = capture(model, (torch.randn(3, 8, 6),), batch_dims={0: "batch", 1: "length"})
    assert program.dims == {"batch": 3, "length": 8}
    with Session(emit(program), program.state) as session:
        for length in (8, 30, 1):
            x = torch.randn(4, length, 6)
            assert torch.equal(session.step(x), model(x))


def test_a_size_as_a_float_that_makes_the_result_floating_is_fixed() -> None:
    model = Applied(lambda x: x + torch.arange(6) * float(x.shape[1]))
    program = capture(model, (torch.randn(3, 8, 6),), batch_dims={0: "batch", 1: "length"})
    assert "length is fixed at 8: argument" in program.covers.fixed and "8.0, 7.0" in program.covers.fixed
    assert program.dims == {"batch": 3}


def test_arguments_that_are_not_numbers_equal_themselves() -> None:
    model = Applied(lambda x: x.masked_fill(x > 1, float("nan")).nan_to_num(0.5))
    program = capture(model, (torch.randn(3, 8, 6),))
    assert not program.covers.fixed and parse(str(program)) == program
    with Session(emit(program), program.state) as session:
        x = torch.randn(5, 8, 6)
        assert torch.equal(session.step(x), model(x))
