"""Sizes follow the batch where they are affine; where they aren't, the program says why."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from direct import evaluate
from eager import assert_same_bits
from graphir.passes import emit, replicate
from graphir.runtime import Session
from torch import Tensor, nn

from graphir import load
from graphir.capturing.capture import capture
from graphir.errors import CoverageError, PassError
from graphir.ir.program import Program
from graphir.ir.size import Polynomial, dimension
from graphir.ir.text import parse

BATCH = dimension("batch")


class Model(nn.Module):
    def __init__(self, body: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.body = body
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.fc(x))


def captured(body: Callable[[Tensor], Tensor], batch: int = 6) -> Program:
    return capture(Model(body), (torch.randn(batch, 4),), loss=lambda out: out.sum())


def test_shapes_strides_and_arguments() -> None:
    program = captured(lambda h: torch.cat([h.t()[1:], h.t()]).sum(0))
    assert program.dims == {"batch": 6} and program.covers.fixed == ""
    blobs = program.step.blobs
    assert blobs["x"].shape == (BATCH, 4) and blobs["x"].strides is None
    assert blobs["cat"].shape == (7, BATCH) and blobs["cat"].strides is None
    assert blobs["t"].strides == (1, 4)
    expanded = [op.args["size"] for op in program.step.ops if op.type == "aten.expand.default"]
    assert (7, BATCH) in expanded


def test_a_divisor_that_is_a_size_follows_the_batch() -> None:
    mean = captured(lambda h: h.mean())
    divisors = [op.args["other"] for op in mean.step.ops if op.type.startswith("aten.div")]
    assert divisors == [Polynomial.of({("batch",): 4})]
    as_float = captured(lambda h: h / float(len(h)))
    divisors = [op.args["other"] for op in as_float.step.ops if op.type == "aten.div.Tensor" and "other" in op.args]
    assert divisors and set(divisors) == {BATCH}


def test_offsets_follow_the_batch() -> None:
    program = captured(lambda h: h.t().contiguous()[2])
    view = next(b for b in program.step.blobs.values() if b.name == "select")
    assert view.offset == Polynomial.of({("batch",): 2}) and view.shape == (BATCH,)


FIXED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "parity": (lambda h: h if int(h.shape[0]) % 2 else h * 2, "operator 2 is aten.mul.Tensor at batch 6, but"),
    "a quarter": (lambda h: h[: h.shape[0] // 4], "made by aten.slice.Tensor: 1, 3, 1 at batch 6, 15, 7 is not affine"),
    "pieces": (
        lambda h: torch.cat(h.split(2)),
        "(aten.split.Tensor) returns 3 tensors at batch 6 and 8 at batch 15",
    ),
    "operand": (lambda h: [h.sin(), h.cos()][len(h) % 2] * 2, "(aten.mul.Tensor) reads other values at batch"),
    "root": (lambda h: h / len(h) ** 0.5, "argument other of aten.div.Tensor: 2.449489742783178"),
    "literal": (lambda h: h / torch.tensor(float(len(h))), "a constant made in the model depends on the batch size"),
    "hard-coded": (
        lambda h: h.view(6, 2, 2),
        "at batch 15: the step failed while it was recorded: RuntimeError: shape",
    ),
    "threshold": (lambda h: h if int(h.shape[0]) < 10 else h * 2, "at batch 15"),
}


@pytest.mark.parametrize("case", FIXED)
def test_fixed_sizes_say_why(case: str) -> None:
    body, text = FIXED[case]
    program = captured(body)
    assert text in program.covers.fixed
    assert program.dims == {} and program.step.blobs["x"].shape == (6, 4)
    x = torch.randn(6, 4)
    model = program.module
    assert model is not None
    values = evaluate(program, dict(program.state), {"x": x})
    assert torch.equal(values["loss"], model(x).sum())


PARTS: dict[str, tuple[int, Callable[[Tensor], Tensor]]] = {
    "chunk": (2, lambda h: torch.cat([part * k for k, part in enumerate(h.chunk(2))])),
    "split": (3, lambda h: torch.cat([part * k for k, part in enumerate(h.split(h.shape[0] // 3))])),
    "slices": (3, lambda h: torch.cat([h[i * k : (i + 1) * k] * i for k in [h.shape[0] // 3] for i in range(3)])),
    "view": (2, lambda h: h.view(2, -1, 4) * torch.arange(2)[:, None, None]),
    "chunks of two numbers": (6, lambda h: torch.cat([part * k for n in (2, 3) for k, part in enumerate(h.chunk(n))])),
}


@pytest.mark.parametrize("case", PARTS)
def test_sizes_follow_the_parts_of_a_batch(case: str) -> None:
    parts, body = PARTS[case]
    program = captured(body)
    assert program.covers.fixed == "" and program.dims == {"batch": 6 // parts}
    assert program.step.blobs["x"].shape == (Polynomial.of({("batch",): parts}), 4)
    session = Session(emit(program), program.state, binding="cpu", witness=program)
    two = replicate(program, [0, 1])
    double = Session(emit(two), two.state, binding="cpu")
    model = program.module
    assert model is not None
    for rows in (6, 18, 24):
        x = torch.randn(rows, 4)
        assert torch.equal(session.step(x), model(x).sum())
        if rows % (2 * parts) == 0:
            assert torch.equal(double.step(x), (model(x[: rows // 2]).sum() + model(x[rows // 2 :]).sum()) / 2)
    with pytest.raises(
        CoverageError, match=f"has 7 rows along dimension 0, and the program cuts a share into {parts} eq"
    ):
        session.step(torch.randn(7, 4))
    with pytest.raises(CoverageError, match=rf"has {parts} rows .*, in shares of \d, \d, and the program cuts"):
        double.step(torch.randn(parts, 4))


def test_a_batch_of_one_follows_the_batch() -> None:
    example = models.resnet(batch=1, blocks=1, image=16)
    program = capture(example.model, example.inputs, targets=example.targets, loss=example.loss)
    assert program.covers.fixed == "" and program.dims == {"batch": 1}


def test_no_batch_dimension() -> None:
    program = capture(
        Model(lambda h: h), (torch.randn(6, 4),), loss=lambda out: out.sum(), batch_dims=((None,), {}, ())
    )
    assert program.dims == {} and program.covers.fixed == "no argument has a batch dimension"
    assert program.step.blobs["x"].shape == (6, 4)


def test_the_batch_can_be_another_dimension() -> None:
    class Last(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.t() * 2

    program = capture(Last(), (torch.randn(4, 6),), batch_dims=1)
    assert program.step.blobs["x"].shape == (4, BATCH)
    assert program.interface.feeds[0].batch_dim == 1 and program.interface.fetches[0].batch_dim == 0


def test_tensors_of_another_length_are_passed_whole() -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
            return x * scale + offset

    program = capture(Scaled(), (torch.randn(6, 4), torch.randn(4), torch.tensor(1.0)))
    assert [feed.batch_dim for feed in program.interface.feeds] == [0, None, None]


def test_outputs_of_fixed_sizes_have_a_batch_dimension() -> None:
    class Halves(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return torch.cat(x.split(2)).t(), x.sum()

    program = capture(Halves(), (torch.randn(6, 4),))
    assert "returns 3 tensors at batch 6" in program.covers.fixed
    assert [fetch.batch_dim for fetch in program.interface.fetches] == [1, None]


class AtMost(nn.Module):
    """Takes no more than so many rows, and no fewer."""

    def __init__(self, fewest: int, most: int) -> None:
        super().__init__()
        self.fewest, self.most = fewest, most

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if not self.fewest <= int(x.shape[0]) <= self.most:  # a plain number, so that no guard tells it
            raise ValueError("too many rows, or too few")
        return (x * 2).t(), x.sum()


def test_outputs_of_a_step_that_takes_no_larger_batch_have_a_batch_dimension() -> None:
    program = capture(AtMost(1, 6), (torch.randn(6, 4),))
    assert "too many rows" in program.covers.fixed and not program.interface.one_replica
    assert [fetch.batch_dim for fetch in program.interface.fetches] == [1, None]


def test_results_that_could_be_recorded_at_one_batch_only_are_not_gathered(tmp_path: Path) -> None:
    program = capture(AtMost(6, 6), (torch.randn(6, 4),))
    assert program.interface.one_replica
    program.save(tmp_path / "program.json")
    assert parse(str(program)) == program == load(tmp_path / "program.json")
    assert replicate(program, [1]).replicas == ("gpu_1/",)
    with pytest.raises(PassError, match=r"results of 2 replicas of program 'atmost' can't be put together.*too many"):
        replicate(program, [0, 1])


class NotANumber(nn.Module):
    """Takes and returns numbers that are not equal to themselves, and makes a tensor of one."""

    def forward(self, x: Tensor, factor: float) -> tuple[Tensor, float]:
        return (x * factor).where(x > 0, torch.tensor(math.nan)), math.nan


@pytest.mark.parametrize("factor", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_come_back_and_do_not_fix_sizes(factor: float, tmp_path: Path) -> None:
    program = capture(NotANumber(), (torch.randn(6, 4), factor))
    assert program.covers.fixed == ""
    program.save(tmp_path / "program.json")
    loaded = load(tmp_path / "program.json")
    assert str(parse(str(program))) == str(loaded) == str(program)
    with Session(emit(loaded), program.state) as session:
        out, number = session.step(torch.ones(3, 4), float(str(factor)))
        assert math.isnan(number)
        assert_same_bits({"out": out}, {"out": torch.full((3, 4), factor)}, "scaled")
        with pytest.raises(CoverageError, match=r"argument 1 was -?(nan|inf) when the program was captured, now 2.0"):
            session.step(torch.ones(3, 4), 2.0)


class Distances(nn.Module):
    def __init__(self, **options: str) -> None:
        super().__init__()
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        return torch.cdist(x, x[:2], **self.options)


@pytest.mark.parametrize("rows", [3, 30])
def test_distances_whose_way_depends_on_the_rows_fix_them(rows: int) -> None:
    program = capture(Distances(), (torch.randn(rows, 4),))
    assert "torch.cdist uses another algorithm from 26 rows on" in program.covers.fixed and program.dims == {}
    for mode in ("use_mm_for_euclid_dist", "donot_use_mm_for_euclid_dist"):
        assert not capture(Distances(compute_mode=mode), (torch.randn(rows, 4),)).covers.fixed


RESULTS: dict[str, Callable[[Tensor], Any]] = {
    "how many": lambda x: [x.sin()] * x.shape[0],
    "which first": lambda x: (x.sin(), x.cos())[:: 1 if int(x.shape[0]) > 6 else -1],
    "names": lambda x: {f"of {x.shape[0]} rows": x.sin()},
}


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("name", list(RESULTS))
def test_results_whose_structure_follows_the_batch(name: str, batch: int) -> None:
    program = capture(models.Applied(RESULTS[name]), (torch.randn(batch, 3),))
    if name == "which first" and batch == 1:  # it is one at 1 and at 6, where it is recorded: the witness tells it
        assert program.dims == {"batch": 1} and program.witness is not None
        with pytest.raises(CoverageError, match="the difference is in the results of the model"):
            program.witness({"batch": 7})
    else:
        how = r"the step differs in the results of the model between batch \d+ and batch \d+$"
        assert not program.dims and re.search(how, program.covers.fixed)
