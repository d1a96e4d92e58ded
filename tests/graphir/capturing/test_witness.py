"""Witnesses: the captured step is recorded once more at sizes that no recording had, and compared with its program."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import models
import numpy
import pytest
import torch
import torch.nn.functional as F
from eager import assert_same_bits
from graphir.passes import emit, inject_copies, replicate, shift_activations
from graphir.runtime import Session
from runnable import captured
from torch import Tensor, nn

import graphir
from graphir import capture
from graphir.errors import CoverageError, RecaptureWarning, SessionError

pytestmark = pytest.mark.usefixtures("few_objects")

TABLE = {128: 2.0}
Body = Callable[[Tensor], Any]


class Layer(nn.Module):
    """A layer, and *body* on what it gives."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.fc, self.body = nn.Linear(3, 3), body

    def forward(self, x: Tensor) -> Any:
        return self.body(self.fc(x))


def large(h: Tensor) -> bool:
    """Whether a tensor has many rows, which nobody is told who asks."""
    return int(h.shape[0]) > 100


UNSEEN: dict[str, tuple[Body, str]] = {
    "int": (lambda h: h.sin() if large(h) else h.cos(), r"the step calls aten.sin.default\n  at   .*aten.cos"),
    "numpy": (lambda h: h * float(numpy.int64(h.shape[0]) > 100), "argument other is 1.0, in the program 0.0"),
    "a table": (lambda h: h * TABLE.get(h.shape[0], 1.0), "argument other is 2.0, in the program 1.0"),
    "numel": (lambda h: h.sum(int(h.shape.numel() > 300)), "argument dim is "),
    "a constant": (lambda h: h + torch.tensor(1.0 + large(h)), "the constant 'constant' has other values"),
    "more": (lambda h: h.sin().sin() if large(h) else h.sin(), "the step calls 4 operators, the program 3"),
    "fewer": (lambda h: h.sin() if large(h) else h.sin().sin(), "the step calls 3 operators, the program 4"),
    "other operands": (lambda h: h.sin() - h if large(h) else h - h.sin(), "the operator reads other values"),
    "other results": (
        lambda h: (h.sin(), h)[:: -1 if large(h) else 1],
        "the difference is in the results of the model",
    ),
    "another layout": (
        lambda h: h.clone(memory_format=torch.preserve_format if large(h) else None),
        "argument memory_format is",
    ),
    "a shape": (lambda h: h.new_ones(3 if large(h) else 2), "argument size is "),
    "a refusal": (lambda h: h * h.sum().item() if large(h) else h.sin(), "the step can't be recorded: aten._local"),
}
"""By what Python makes of a size: a step that differs at 128 rows, and how the witness says so."""


def session_of(program: graphir.Program, devices: list[int] | None = None, **options: Any) -> Session:
    placed = program if devices is None else replicate(program, devices)
    return Session(emit(placed), program.state, **options)


@pytest.mark.parametrize("devices", [None, [0, 1]], ids=["captured", "two replicas"])
@pytest.mark.parametrize("name", list(UNSEEN))
def test_a_step_that_is_another_one_at_a_size_that_was_not_recorded(name: str, devices: list[int] | None) -> None:
    body, how = UNSEEN[name]
    model, copies = Layer(body), len(devices or [0])
    program = capture(model, (torch.randn(8, 3),))
    assert not program.covers.fixed and not program.covers.guards
    x, more = torch.randn(10 * copies, 3), torch.randn(128 * copies, 3)
    with session_of(program, devices, witness=program) as session:
        session.step(x)
        for _ in range(2):  # the second time without recording it again
            with pytest.raises(CoverageError, match=rf"(?s)the step differs from the program at batch 128: {how}"):
                session.step(more)
        session.step(x)
        assert session.steps_done == 2
    with session_of(program, devices) as trusting:
        trusting.step(more)
        assert trusting.steps_done == 1


@pytest.mark.parametrize("name", [name for name in UNSEEN if name != "a refusal"])
def test_compile_captures_it_anew(name: str) -> None:
    model = Layer(UNSEEN[name][0])
    with graphir.compile(model, (torch.randn(8, 3),)) as step, warnings.catch_warnings():
        warnings.simplefilter("ignore", RecaptureWarning)
        for batch in (8, 128, 50, 8, 101, 128, 1, 2):
            x = torch.randn(batch, 3)
            found, expected = (value if isinstance(value, tuple) else (value,) for value in (step.step(x), model(x)))
            for ours, theirs in zip(found, expected, strict=True):
                assert torch.equal(ours, theirs), batch
        assert len(step.plans) > 1


def test_compile_without_witness_trusts_the_plan() -> None:
    model = Layer(UNSEEN["int"][0])
    with graphir.compile(model, (torch.randn(8, 3),), witness=False) as step:
        x = torch.randn(128, 3)
        assert torch.equal(step.step(x), model.fc(x).cos())
        assert len(step.plans) == 1


def recordings_of(model: nn.Module) -> list[int]:
    """How often the forward was run so far, in one number."""
    count = [0]
    model.register_forward_pre_hook(lambda module, args: count.__setitem__(0, count[0] + 1))
    return count


def test_each_size_is_recorded_once_and_recorded_ones_never() -> None:
    model = Layer(torch.sin)
    count = recordings_of(model)
    program = capture(model, (torch.randn(8, 3),))
    recorded = count[0]
    with session_of(program, [0, 1], witness=program) as session:
        for rows, further in ((16, 0), (38, 0), (16, 0), (20, 1), (20, 0), (19, 1), (21, 1)):
            before = count[0]
            session.step(torch.randn(rows, 3))
            assert count[0] - before == further, rows  # 19 rows are 10 and 9, 21 are 11 and 10
    assert recorded == 4


@pytest.mark.parametrize("make", [models.mlp, models.resnet, models.gpt])
def test_steps_that_are_the_program_s_at_any_size(make: Callable[[], models.Example]) -> None:
    example = make()
    program = captured(example, torch.optim.AdamW(example.model.parameters()), clip_grad_norm=1.0)
    assert program.witness is not None
    for batch in (2, 3, 7, 64):
        program.witness({"batch": batch})


def test_several_dimensions_and_micro_batches() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.1)
    x = torch.randn(4, 6, 8)
    names = {0: "batch", 1: "length"}
    program = capture(
        model, (x,), loss=lambda out: out.square().mean(), batch_dims=names, accumulate=2,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    )  # fmt: skip
    assert program.witness is not None and program.dims == {"batch": 2, "length": 6}
    assert [str(guard) for guard in program.covers.guards] == ["batch>=2", "length>=2"]
    for batch, length in ((5, 9), (2, 30), (16, 6)):
        program.witness({"batch": batch, "length": length})
    with session_of(program, witness=program) as session:
        session.step(torch.randn(10, 11, 8))


class Modal(nn.Module):
    """Another step in each of several modes."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.drop, self.bn = nn.Linear(3, 3), nn.Dropout(0.5), nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.bn(self.drop(self.fc(x)))
        if torch.is_grad_enabled():
            h = h.sin()
        return (h @ h.t()) * torch.zeros(())  # type: ignore[no-any-return]


@pytest.mark.parametrize("train", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("grad", [True, False], ids=["gradients", "no gradients"])
@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "no autocast"])
def test_the_step_is_recorded_in_the_modes_in_which_it_was_captured(train: bool, grad: bool, autocast: bool) -> None:
    model = Modal().train(train)
    with torch.set_grad_enabled(grad), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        program = capture(model, (torch.randn(4, 3),))
    model.train(not train)
    assert program.witness is not None
    with torch.set_grad_enabled(not grad), torch.autocast("cpu", torch.bfloat16, enabled=not autocast):
        program.witness({"batch": 40})
        assert torch.is_grad_enabled() is not grad and torch.is_autocast_enabled("cpu") is not autocast
    assert all(module.training is not train for module in model.modules())
    torch.set_default_dtype(torch.float64)
    try:
        program.witness({"batch": 41})
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_compile_captures_anew_in_the_modes_of_the_beginning() -> None:
    model = Layer(lambda h: h @ h.t() if int(h.shape[0]) < 50 else h @ h.t() + 1)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        step = graphir.compile(model, (torch.randn(8, 3),))
        x = torch.randn(64, 3)
        expected = model(x)
    with step, pytest.warns(RecaptureWarning):
        assert torch.equal(step.step(x), expected)


def test_a_module_that_has_changed_since() -> None:
    model: Any = Layer(torch.sin)
    program = capture(model, (torch.randn(8, 3),), loss=lambda out: out.sum())
    assert program.witness is not None
    model.fc.weight.requires_grad_(False)
    with pytest.raises(CoverageError, match=r"the step calls aten.sum.dim_IntList"):
        program.witness({"batch": 33})
    model.fc = nn.Linear(3, 4)
    with pytest.raises(CoverageError, match=r"param 'fc\.weight' has another shape or type"):
        program.witness({"batch": 34})


def test_nothing_is_left_of_it() -> None:
    model: Any = Layer(torch.sin)
    program = capture(model, (torch.randn(8, 3),))
    model.note = ["kept"]
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.get_rng_state()
    assert program.witness is not None
    program.witness({"batch": 40})
    assert model.note == ["kept"] and torch.equal(torch.get_rng_state(), random)
    assert_same_bits(dict(model.state_dict()), state, "state")


def test_a_witness_goes_along_with_passes_and_not_into_copies_and_files(tmp_path: Any) -> None:
    example = models.mlp()
    program = capture(example.model, example.inputs, targets=example.targets, loss=F.cross_entropy)
    shifted = inject_copies(shift_activations(replicate(program, [0]), ["relu"], shifts={0: 1}))
    assert shifted.witness is program.witness is not None
    program.save(tmp_path / "p.json")
    for other in (copy.copy(program), copy.deepcopy(program), pickle.loads(pickle.dumps(program))):
        assert other == program and other.witness is None
    loaded = graphir.load(tmp_path / "p.json")
    with pytest.raises(SessionError, match=r"has no witness: it was not captured in this process[\s\S]*trust the plan"):
        Session(emit(program), program.state, witness=loaded)  # type: ignore[arg-type]


def test_a_witness_of_another_program_is_refused() -> None:
    program, other = (capture(Layer(torch.sin), (torch.randn(8, size),)) for size in (3, 3))
    wider = capture(nn.Linear(3, 3), (torch.randn(8, 3),))
    with session_of(program, witness=other):  # of another module of the same kind: nobody can tell
        pass
    with pytest.raises(SessionError, match="the plan was not made of program 'linear'"):
        session_of(program, witness=wider)
    with pytest.raises(SessionError, match="witness is a bool, not a program"):
        session_of(program, witness=True)
