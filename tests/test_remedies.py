"""Remedies name a way that works: what is refused, what is said, and the way itself."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import torch
import torch.nn.functional as F
from pydantic import field_validator
from runnable import captured, sgd
from small import two_layers
from torch import Tensor, nn

import graphir
from graphir import Program, passes, runtime
from graphir.errors import CaptureError, FileError, GraphirError, PassError, PassWarning, RecaptureWarning

X, Y = torch.arange(12.0).view(4, 3), torch.arange(8.0).view(4, 2)


def said(call: Callable[[], object]) -> GraphirError:
    """The refusal of a call."""
    with pytest.raises(GraphirError) as refusal:
        call()
    return refusal.value


@pytest.fixture(scope="module")
def program() -> Program:
    example = models.mlp()
    return captured(example, sgd(example.model.parameters()))


# Errors of graphir inside of a step


class Outer(nn.Module):
    """A model, a part of which is something else."""

    def __init__(self, features: nn.Module) -> None:
        super().__init__()
        self.features, self.head = features, nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.features(x))


def test_a_data_parallel_in_a_model_says_what_to_put_in_its_place() -> None:
    model = Outer(graphir.DataParallel(nn.Linear(3, 2), [0, 1], binding="cpu"))
    error = said(lambda: graphir.capture(model, (X,), loss=torch.mean))
    assert type(error) is CaptureError and error.what == "a DataParallel cannot be captured"
    assert error.where.startswith("module 'features', at ")
    assert error.fix.startswith("put the module in it, `.module`, in its place")
    model.features = model.features.module
    assert graphir.capture(model, (X,), loss=torch.mean).step.ops


def test_an_error_of_graphir_in_a_step_keeps_its_remedy() -> None:
    class Saves(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            passes.Pipeline("nothing")
            return x

    error = said(lambda: graphir.capture(Outer(Saves()), (X,), loss=torch.mean))
    assert error.what == "unknown pass 'nothing'" and error.fix.startswith("passes: ")
    assert error.where.startswith(f"module 'features', at {Path(__file__).name}:")


# Of limits and options


def test_devices_of_limits_and_of_options_are_told_apart(program: Program) -> None:
    for given, devices, option in (
        ({"gpu:0": 10**9, "cuda:9": 1}, [], "limits"),
        ({"gpu:0": 10**9}, [9], "devices"),
    ):
        error = said(lambda: passes.balance(program, given, devices=devices, topology="h200x8"))  # noqa: B023
        assert error.what == f"balance: {option} names gpu:9, which topology 'h200x8' does not have"
        assert error.fix.startswith(f"{option} can name gpu:0, gpu:1, ")
        assert error.fix.endswith("; or give a topology that has gpu:9")


def test_callers_of_balance_say_what_their_callers_can_do(program: Program) -> None:
    least = passes.build(passes.Balance, limits={0: 10}, topology="h200x8", pin={"": 0}, evaluations=2)
    assert said(lambda: least(program)).fix.endswith(
        "; or name more devices in limits, pin less, let updates run on the host, with the bits of its kernels "
        "('updates' among options)"
    )
    assert said(lambda: least.balanced(program, remedy="use less")).fix.endswith("; or use less")


def test_a_validator_keeps_its_remedy() -> None:
    class Scale(passes.Pass):
        name = "scale"
        by: int = 1
        to: passes.base.Placed = "cpu"

        @field_validator("by")
        @classmethod
        def _positive(cls, by: int) -> int:
            if by < 1:
                raise passes.base.OptionError(f"{by} scales by nothing", fix="give a number from 1 up")
            if by == 13:
                raise GraphirError("by: 13 is no luck", fix="give 12")
            return by

    assert str(said(lambda: passes.build(Scale, by=0))) == (
        "scale: by: 0 scales by nothing\n  fix  give a number from 1 up"
    )
    both = said(lambda: passes.build(Scale, by=0, to="disk", of=3))
    assert both.what.startswith("scale: by: 0 scales by nothing; to: 'disk' is not a device: ")
    assert both.what.endswith("; of: no such option")
    assert both.fix == (
        "give a number from 1 up; write 'cpu', the memory of the host, or name a gpu; options of scale: by, to"
    )
    error = said(lambda: passes.build(Scale, by=13))
    assert (error.what, error.fix) == ("scale: by: 13 is no luck", "give 12")
    error = said(lambda: passes.shift_activations(two_layers(), ["relu"], {0: 1, 1: 2}))
    assert error.what.endswith("device 1 is both a source and a target")
    assert error.fix == "shift in two calls, targets first"


# Of analyses


def test_a_program_is_no_plan_and_how_one_is_made(program: Program) -> None:
    for call in (graphir.estimate, graphir.overlap, runtime.check):
        error = said(lambda: call(program))  # type: ignore[operator]  # noqa: B023
        assert error.what.endswith(" takes a Plan, not Program")
        assert error.fix == "passes.emit makes a plan of a program"
        call(passes.emit(program))  # type: ignore[operator]


ANALYSES: dict[str, Callable[[Any], object]] = {
    "memory": lambda x: graphir.memory(x).peak,
    "estimate": lambda x: graphir.estimate(x, "h200x8").seconds,
    "overlap": lambda x: str(graphir.overlap(x)),
    "traffic": lambda x: str(graphir.traffic(x)),
    "placed": lambda x: str(graphir.placed(x)),
    "diff": lambda x: str(graphir.diff(x, x)),
    "certify": lambda x: str(graphir.certify(x, x)),
    "check": runtime.check,
    "verify": graphir.verify,
}


def test_analyses_take_sessions_and_compiled_steps(program: Program) -> None:
    example = models.mlp()
    session = runtime.Session(passes.emit(program), program.state, binding="cpu")
    compiled = graphir.compile(example.model, example.inputs, targets=example.targets, loss=example.loss)
    for running in (session, compiled):
        with running:
            for name, analysis in ANALYSES.items():
                assert analysis(running) == analysis(running.plan), name
            kind = type(running).__name__
            error = said(lambda: graphir.save(running, "x"))  # type: ignore[arg-type]  # noqa: B023
            assert error.what == f"save takes a Net, Program or Plan, not {kind}"
            assert error.fix == f"give the plan, {kind.lower()}.plan"
            error = said(lambda: passes.inject_copies(running))  # type: ignore[call-overload]  # noqa: B023
            assert error.fix == "give the program that the plan was emitted from"


# Of files


@pytest.mark.parametrize("archive", [True, False])
def test_a_checkpoint_is_called_that(archive: bool, tmp_path: Path) -> None:
    torch.save(nn.Linear(3, 2).state_dict(), path := tmp_path / "a.pt", _use_new_zipfile_serialization=archive)
    for call in (graphir.load, graphir.Topology.load):
        error = said(lambda: call(path))  # noqa: B023
        assert (type(error), error.what) == (FileError, "the file is a checkpoint, as torch.save writes it")
        assert error.fix.startswith("read it by torch.load(path, weights_only=True)")


def test_a_file_of_tensors_is_called_that(program: Program, tmp_path: Path) -> None:
    program.save(tmp_path / "p.json", state=True)
    error = said(lambda: graphir.load(tmp_path / "p.json.safetensors"))
    assert error.what == "the file holds tensors, as safetensors writes them"
    assert error.fix.endswith("of a program saved with its state, load the other file")


# Of captures


def test_other_optimizers_step_by_the_gradients_that_a_step_hands_back() -> None:
    model, loss = nn.Linear(3, 2), F.mse_loss
    lbfgs = torch.optim.LBFGS(model.parameters())
    error = said(lambda: graphir.capture(model, (X,), targets=(Y,), loss=loss, optimizer=lbfgs))
    assert error.fix.endswith(
        "; or capture without an optimizer: any optimizer can take the gradients that gradients() returns after "
        "each step"
    )
    with graphir.compile(model, (X,), targets=(Y,), loss=loss) as step:
        step.step(X, Y)
        found = step.gradients()
    loss(model(X), Y).backward()
    assert all(torch.equal(found[name], p.grad) for name, p in model.named_parameters())


class Contrast(nn.Module):
    """Compares each row with all others."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.reduction = reduction

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        logits = a @ b.T
        return F.cross_entropy(logits, torch.arange(logits.shape[0]), reduction=self.reduction)


class Pairs(nn.Module):
    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.one, self.other, self.contrast = nn.Linear(3, 4), nn.Linear(2, 4), Contrast(reduction)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.contrast(self.one(a), self.other(b))


def test_a_loss_of_all_rows_is_placed_row_by_row() -> None:
    pairs = graphir.capture(Pairs("mean"), (X, Y), loss=lambda loss: loss)
    error = said(lambda: passes.shard(pairs, {"contrast": 0}, [0, 1]))
    assert error.what == "the loss cannot be placed: each replica has its own"
    assert "returns a value for each" in error.fix.replace("can return", "returns")
    rows = graphir.capture(Pairs("none"), (X, Y), loss=torch.mean)
    assert passes.shard(rows, {"contrast": 0}, [0, 1]).replicas == ("gpu_0/", "gpu_1/")


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)

    def forward(self, x: Tensor, beta: Any) -> Tensor:
        return self.fc(x).square().mean() * beta


def test_a_number_that_changes_is_a_tensor() -> None:
    with (
        graphir.compile(Weighted(), (X, 0.5), loss=lambda loss: loss) as step,
        pytest.warns(RecaptureWarning, match=r"pass a number that changes as a tensor, torch\.tensor\(0\.25\), or"),
    ):
        step.step(X, 0.25)
    with graphir.compile(Weighted(), (X, torch.tensor(0.5)), loss=lambda loss: loss) as step:
        step.step(X, torch.tensor(0.25))
        assert len(step.plans) == 1


class Graph(nn.Module):
    """A product with a sparse matrix, whole or in parts."""

    def forward(self, x: Tensor, *parts: Tensor) -> Tensor:
        if len(parts) == 1:
            return torch.sparse.mm(parts[0], x)
        indices, values = parts
        return torch.zeros_like(x).index_add(0, indices[0], values[:, None] * x[indices[1]])


def test_a_sparse_argument_is_passed_in_parts() -> None:
    matrix = torch.eye(4).to_sparse()
    error = said(lambda: graphir.capture(Graph(), (X, matrix)))
    assert "pass the dense parts of the tensor" in error.fix and "index_add(0, indices[0]" in error.fix
    parts = matrix.coalesce().indices(), matrix.coalesce().values()
    found = graphir.capture(Graph(), (X, *parts))
    with runtime.Session(passes.emit(found), found.state, binding="cpu") as session:
        assert torch.equal(session.step(X, *parts), Graph()(X, matrix))


class Complex(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x if x.is_complex() else torch.view_as_complex(x)).abs()


def test_a_complex_argument_is_passed_as_a_real_one() -> None:
    x = torch.complex(X, X + 1)
    assert said(lambda: graphir.capture(Complex(), (x,))).fix.startswith("pass torch.view_as_real(tensor)")
    found = graphir.capture(Complex(), (torch.view_as_real(x),))
    with runtime.Session(passes.emit(found), found.state, binding="cpu") as session:
        assert torch.equal(session.step(torch.view_as_real(x)), Complex()(x))


# Warnings


def test_a_warning_of_eager_replicas_is_at_the_line_that_called_them() -> None:
    model = nn.Linear(3, 2)
    model.register_forward_hook(lambda *_: None)
    within = nn.Sequential(graphir.DataParallel(model, [0, 1], binding="cpu"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        within(X)
    assert [(str(w.message)[:35], w.filename) for w in caught] == [("the replicas of Linear run eagerly:", __file__)]


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(F.gelu(self.a(x)))


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stack, self.block = nn.Sequential(Residual(), Residual()), Residual()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.stack(x))


@pytest.mark.parametrize(
    ("name", "module"), [("stack.0", "stack[0]"), ("stack.1", "stack[1]"), ("block", "**.block"), ("block.a", "")]
)
def test_a_name_of_an_activation_and_a_module_says_which_it_means(name: str, module: str) -> None:
    """``block.a`` saves its output alone, which is the activation."""
    step = graphir.capture(Named(), (X,), loss=lambda out: out.square().mean())
    for by, call in (("recompute", passes.recompute), ("park", lambda p, what: passes.park(p, what, 1))):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            activation = call(step, [name])
            both = call(step, [module, name] if module else [name])
        told = f"{by}: {name!r} means the activation of this name, not the module; write {module!r} for the module"
        meant = [text for w in caught if (text := str(w.message)).startswith(f"{by}: ")]  # not what a park saves
        assert meant == ([told, told] if module else [])
        assert all(w.category is PassWarning and w.filename == __file__ for w in caught)
        assert (both == activation) is not bool(module)
        assert passes.Pipeline(activation.history[-1])(step) == activation


def test_a_refused_name_says_how_the_module_is_written() -> None:
    step = graphir.capture(Named(), (X,))
    error = said(lambda: passes.recompute(step, "stack.0"))
    assert isinstance(error, PassError) and error.fix.endswith(", or write 'stack[0]' for the module")


def test_the_statistics_of_a_batch_norm_are_no_reason_to_warn() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 1, 1))
    step = graphir.capture(model, (torch.rand(2, 3, 4, 4),), loss=torch.mean)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        passes.park(step, ["1"], "cpu")
