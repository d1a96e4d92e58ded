"""How arguments and results map to blobs, and what capture leaves as it was."""

from __future__ import annotations

from typing import Any, NamedTuple

import models
import pytest
import torch
import torch.nn.functional as F
from direct import evaluate, matches_eager
from eager import assert_same_bits
from graphir.passes import emit, replicate
from graphir.runtime import Session
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import graphir
from graphir import RunError, passes
from graphir.capturing.capture import capture
from graphir.errors import CaptureError
from graphir.ir.program import Slot
from graphir.ir.text import parse
from graphir.ir.verify import verify


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)
        self.scale = torch.tensor([1.0, 2.0, 3.0])

    def forward(
        self, batch: dict[str, Any], pair: tuple[Tensor, Tensor], *, flag: bool, mask: Tensor | None = None
    ) -> dict[str, Tensor]:
        a = self.fc(batch["a"]["b"]) * self.scale + pair[0]
        return {"sum": a + torch.tensor([1.0, 0.0, 2.0]) if flag else a, "pair": pair[1]}


def test_nested_arguments_are_named_by_path() -> None:
    model, x, y = Nested(), torch.randn(5, 4), torch.randn(5, 3)
    program = capture(model, ({"a": {"b": x}, "n": 3}, (y, y)), kwargs={"flag": True, "mask": None})
    verify(program)
    feeds = program.interface.feeds
    assert [(f.blob, f.batch_dim, f.value) for f in feeds] == [
        ("batch.a.b", 0, None),
        (None, None, 3),
        ("pair.0", 0, None),
        ("pair.0", 0, None),
        (None, None, True),
        (None, None, None),
    ]
    args = ({"a": {"b": x}, "n": 3}, (y, y)), {"flag": True, "mask": None}
    assert pytree.treespec_loads(program.interface.arguments) == pytree.tree_structure(args)
    assert program.interface.results is not None
    assert pytree.treespec_loads(program.interface.results) == pytree.tree_structure({"sum": 0, "pair": 0})
    assert program.interface.fetches == (Slot("add_1", 0), Slot("pair.0", 0))
    assert program.step.external_outputs == ("add_1", "pair.0")
    assert program.step.blobs["scale"].role == program.step.blobs["constant"].role == "constant"
    values = evaluate(program, dict(program.state), {"batch.a.b": x, "pair.0": y})
    assert torch.equal(values["add_1"], model({"a": {"b": x}}, (y, y), flag=True)["sum"])


def test_names_of_arguments() -> None:
    class Positional(nn.Module):
        def forward(self, first: Tensor, /, *rest: Tensor) -> Tensor:
            return first + rest[0] * rest[1]["a/b"]

    class Any(nn.Module):
        def forward(self, *tensors: Tensor) -> Tensor:
            return tensors[0] * 2

    x = torch.randn(4, 3)
    program = capture(Positional(), (x, x + 1, {"a/b": x + 2}))
    assert [feed.blob for feed in program.interface.feeds] == ["first", "input_1", "input_2.a_b"]
    assert [feed.blob for feed in capture(Any(), (x,)).interface.feeds] == ["input"]


def test_without_loss_there_is_no_backward() -> None:
    example = models.resnet(blocks=1)
    with torch.no_grad():
        program = capture(example.model, example.inputs)
    verify(program)
    assert {op.phase for op in program.step.ops} == {"forward"} and not program.step.gradients
    assert program.interface.loss is None and program.interface.fetches == (Slot("fc", 0),)
    assert program.step.blobs["fc"].role == "output"


def test_without_optimizer_gradients_are_outputs() -> None:
    example = models.mlp()
    program = capture(example.model, example.inputs, targets=example.targets, loss=example.loss)
    grads = ("fc1.weight_grad", "fc1.bias_grad", "fc2.weight_grad", "fc2.bias_grad")
    assert program.step.external_outputs == ("loss", *grads)
    matches_eager(program, example)


def test_a_dict_of_losses_is_summed() -> None:
    def losses(out: Tensor, target: Tensor) -> dict[str, Tensor]:
        return {"class": F.cross_entropy(out, target), "norm": out.square().mean()}

    example = models.mlp()
    program = capture(example.model, example.inputs, targets=example.targets, loss=losses)
    matches_eager(program, example._replace(loss=lambda out, target: sum(losses(out, target).values())))


def test_a_loss_that_is_a_module() -> None:
    class Smoothed(nn.CrossEntropyLoss):
        def forward(self, scores: Tensor, labels: Tensor) -> Tensor:
            return super().forward(scores, labels)

    example = models.mlp()._replace(loss=Smoothed(label_smoothing=0.1))
    program = capture(example.model, example.inputs, targets=example.targets, loss=example.loss)
    assert [feed.blob for feed in program.interface.feeds] == ["x", "labels"]
    matches_eager(program, example, batches=(3,))


def test_a_loss_without_a_signature() -> None:
    program = capture(nn.Linear(3, 2), (torch.randn(4, 3),), targets=(torch.randn(4, 2),), loss=torch.dist)
    assert [feed.blob for feed in program.interface.feeds] == ["input", "target"]


def test_a_model_that_returns_its_loss() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = models.MLP(4, 8, 3)
            self.criterion = nn.CrossEntropyLoss()

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            return self.criterion(self.body(x), labels)

    inputs = torch.randn(5, 4), torch.randint(3, (5,))
    example = models.Example(Own(), inputs, (), lambda out: out)
    program = capture(example.model, example.inputs, loss=example.loss)
    assert program.interface.loss == "loss" and "criterion" not in program.step.blobs
    matches_eager(program, example)


def test_init_loads_every_state_blob_from_the_snapshot() -> None:
    example = models.resnet(blocks=1)
    optimizer = torch.optim.Adam(example.model.parameters())
    program = capture(example.model, example.inputs, targets=example.targets, loss=example.loss, optimizer=optimizer)
    loads = {op.outputs[0]: op for op in program.init.ops}
    state = {n for n, b in program.step.blobs.items() if b.role in ("param", "buffer", "state") and not b.is_view}
    assert loads.keys() == state and program.state.keys() == state | {"step"}
    assert all(op.type == "graphir.load" and op.args == {"key": name} for name, op in loads.items())
    for name, tensor in example.model.state_dict(keep_vars=True).items():
        kept = program.state[program.interface.module_state[name]]
        assert torch.equal(kept, tensor) and kept.stride() == tensor.stride()
        assert kept.data_ptr() != tensor.data_ptr() and not kept.requires_grad
    assert program.module is example.model


def test_capture_leaves_the_model_as_it_was() -> None:
    example = models.resnet(blocks=1, dropout=0.5)
    model = example.model
    model.fc.weight.grad = torch.ones_like(model.fc.weight)
    params = [dict(m._parameters) for m in model.modules()]
    values = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random_state = torch.get_rng_state()
    optimizer = torch.optim.Adam(model.parameters())
    capture(model, example.inputs, targets=example.targets, loss=example.loss, optimizer=optimizer)
    assert [dict(m._parameters) for m in model.modules()] == params
    assert all(torch.equal(tensor, values[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert [p.grad is None for p in model.parameters()].count(False) == 1
    assert not optimizer.state and model.training


def test_a_surrounding_no_grad_does_not_matter() -> None:
    example = models.mlp()
    plain = capture(example.model, example.inputs, targets=example.targets, loss=example.loss)
    for around in (torch.no_grad(), torch.inference_mode()):
        with around:
            program = capture(example.model, example.inputs, targets=example.targets, loss=example.loss)
        assert program.step == plain.step and program.interface == plain.interface


def test_a_forward_is_captured_in_the_gradient_mode_of_the_call() -> None:
    """Without gradients an encoder's layer is one operator, which rounds otherwise than its parts."""
    layer, x = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(), torch.randn(3, 5, 8)
    types = {}
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            program = capture(layer, (x,))
            expected = layer(x)
            assert torch.is_grad_enabled() is (mode is torch.enable_grad)
        values = evaluate(program, dict(program.state), {"src": x})
        assert torch.equal(values[program.step.external_outputs[0]], expected)
        types[mode] = {op.type for op in program.step.ops}
    assert types[torch.no_grad] == types[torch.inference_mode] != types[torch.enable_grad]


def test_two_captures_are_equal() -> None:
    one, two = (
        capture(e.model, e.inputs, targets=e.targets, loss=e.loss) for e in (models.gpt(layers=1, dropout=0.1),) * 2
    )
    assert one == two


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def block(self, x: Tensor) -> Tensor:
        return F.dropout(torch.tanh(self.fc2(F.dropout(x, 0.3))), 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc3(F.dropout(checkpoint(self.block, self.fc1(x), use_reentrant=False), 0.2))


def test_a_checkpoint_draws_the_same_numbers_again() -> None:
    inputs, targets = (torch.randn(5, 6),), (torch.randint(3, (5,)),)
    example = models.Example(Checkpointed(), inputs, targets, F.cross_entropy)
    program = capture(example.model, example.inputs, targets=example.targets, loss=example.loss)
    seeds = [(op.phase, op.seed) for op in program.step.ops if op.seed is not None]
    assert [s for s in seeds if s[0] == "forward"] == [("forward", 0), ("forward", 1), ("forward", 2)]
    assert [s for s in seeds if s[0] == "backward"] == [("backward", 0), ("backward", 1)]
    matches_eager(program, example, batches=(3,))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return grad * 2 + x * 0.1


class Odd(nn.Module):
    """A custom function, a weight norm, an expanded gradient, a view saved for the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.utils.parametrizations.weight_norm(nn.Linear(6, 4))
        self.bias = nn.Parameter(torch.zeros(()))
        self.offset = nn.Parameter(torch.zeros(4, 6).t())
        self.shift = nn.Parameter(torch.zeros(2, 3).t())

    def forward(self, x: Tensor) -> Tensor:
        return Doubled.apply(self.fc(x)) + self.bias + self.offset.sum() + self.shift.sum() + (x @ self.offset)  # type: ignore[no-any-return]


def test_odd_gradients_have_the_bits_and_strides_of_eager() -> None:
    example = models.Example(Odd(), (torch.randn(5, 6),), (), lambda out: out.square().mean())
    program = capture(example.model, example.inputs, loss=example.loss)
    verify(program)
    matches_eager(program, example, batches=(3,))


class Point(NamedTuple):
    x: Tensor
    y: Tensor


def test_structures_that_json_can_not_hold_are_refused() -> None:
    class Sum(nn.Module):
        def forward(self, point: Point) -> Tensor:
            return point.x + point.y

    with pytest.raises(CaptureError, match="the structure of the arguments can't be serialized"):
        capture(Sum(), (Point(torch.randn(3), torch.randn(3)),))


class Solves(nn.Module):
    """Solves a system of equations, which torch checks for a solution."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.linalg.solve(a, b)


@pytest.mark.parametrize("executor", ["reference", "threads"])
def test_what_torch_checks_in_the_data_is_checked_in_each_step(executor: str) -> None:
    a, b = torch.randn(3, 4, 4), torch.randn(3, 4)
    program = capture(Solves(), (a, b))
    assert graphir.parse(str(program)) == program
    check = next(op for op in program.step.ops if op.type == "aten._linalg_check_errors.default")
    assert check.outputs == ()
    with Session(passes.emit(passes.replicate(program, [0])), program.state, executor=executor) as session:
        assert torch.equal(session.step(a, b), torch.linalg.solve(a, b))
        with pytest.raises(RunError, match="singular"):
            session.step(torch.zeros(3, 4, 4), b)


class Positive(nn.Module):
    """The logarithm of what it makes sure to be positive."""

    def forward(self, x: Tensor) -> Tensor:
        torch._assert_async((x > 0).all(), "not positive")  # type: ignore[call-overload]
        return x.log()


def test_what_a_model_asserts_of_its_data_is_asserted_in_each_step() -> None:
    x = torch.rand(4, 3) + 1
    program = capture(Positive(), (x,))
    with Session(passes.emit(program), program.state, executor="reference") as session:
        assert torch.equal(session.step(x), x.log())
        with pytest.raises(RunError, match="not positive"):
            session.step(-x)


def test_forward_mode_derivatives_are_refused() -> None:
    class Tangent(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.func.jvp(lambda y: y @ torch.ones(4) + 1, (x,), (x.cos(),))[1]

    with pytest.raises(CaptureError, match="forward-mode") as error:
        capture(Tangent(), (torch.randn(5, 4),))
    assert "torch.func.vjp" in error.value.fix


class Tied(nn.Module):
    """Has tied, parametrized, frozen and unused parameters, and two that share one gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.b.weight = self.a.weight
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
        self.left, self.right = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.normed(self.b(self.a(x).relu())) + self.frozen(x) + (self.left + self.right)


@pytest.mark.parametrize("devices", [(0,), (0, 1)], ids=["one", "two"])
def test_gradients_have_the_names_of_parameters(devices: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model, x = Tied(), torch.randn(6, 3)
    program = capture(model, (x[:3],), loss=lambda out: out.sum())
    assert parse(str(program)) == program
    with Session(emit(replicate(program, devices)), program.state) as session:
        session.step(x)
        found = session.gradients(len(devices) - 1)
    for share in x.chunk(len(devices)):
        (model(share).sum() / len(devices)).backward()
    eager = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert_same_bits(found, eager, "gradients")
