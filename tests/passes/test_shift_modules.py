"""passes.shift_modules: what moves with a module, and what crosses."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import models
import pytest
import torch
from eager import assert_same_bits
from runnable import batch_of, step_of, trained
from torch import nn

import graphir
from graphir import Program, passes, runtime
from graphir.errors import PassError
from graphir.ir.blob import dense_nbytes
from graphir.ir.device import Device, gpu

MIB = 2**20


def shifted(program: Program, modules: Mapping[str, Any]) -> Program:
    """The program with modules shifted and the copies in it, proved to compute the same."""
    result = passes.inject_copies(passes.shift_modules(program, modules))
    assert graphir.certify(program, result).holds
    return result


def copies(program: Program) -> list[tuple[str, str, str]]:
    """What is copied, from where, to where."""
    blobs = program.step.blobs
    return [
        (op.inputs[0], str(blobs[op.inputs[0]].device), str(op.device)) for op in program.step.ops if op.type == "Copy"
    ]


def copied(program: Program) -> int:
    """Bytes that are copied a step."""
    return sum(dense_nbytes(program.step.blobs[name], program.dims) for name, _, _ in copies(program))


def places(program: Program, module: str) -> set[Device]:
    """Where the operators of a module, and of what is inside of it, run: what computes, and adds no gradients up."""
    return {
        op.device
        for op in program.step.ops
        if f"{op.module}.".startswith(f"{module}.")
        and not op.effects.views
        and not (op.phase == "backward" and op.type == "aten.add.Tensor")
    }


def test_everything_of_a_module_moves() -> None:
    program = shifted(trained(models.mlp), {"fc2": "gpu:1"})
    assert places(program, "fc2") == {"gpu:1"}
    assert places(program, "fc1") == {"gpu:0"}
    blobs = program.step.blobs
    for name in ("fc2.weight", "fc2.weight.momentum_buffer", "fc2.weight_grad", "fc2.bias", "fc2"):
        assert blobs[name].device == "gpu:1", name
    assert {op.device for op in program.init.ops if op.module == "fc2"} == {"gpu:1"}


def test_the_loss_and_its_targets_go_along_behind_the_last_module() -> None:
    program = shifted(trained(models.mlp), {"fc2": "gpu:1"})
    assert places(program, "loss") == {"gpu:1"}
    assert program.step.blobs["target"].device == "gpu:1"
    assert copies(program) == [("relu", "gpu:0", "gpu:1"), ("relu_grad", "gpu:1", "gpu:0")]


def test_layer4_of_a_resnet50() -> None:
    program = shifted(trained(models.resnet50, batch=8, image=64), {"layer4": "gpu:1"})
    assert places(program, "layer4") == {"gpu:1"}
    assert places(program, "layer3") == {"gpu:0"}
    assert copied(program) <= 2 * MIB
    assert not [name for name, _, _ in copies(program) if name.endswith(("weight", "weight_grad"))]


def test_the_later_blocks_of_a_transformer_cross_once_and_come_back_once() -> None:
    example = models.gpt(layers=4)
    example.model.head.weight = nn.Parameter(example.model.head.weight.detach().clone())  # type: ignore[union-attr]
    program = step_of(example)
    stream = dense_nbytes(program.step.blobs["layers.1"], program.dims)
    later = shifted(program, {"layers[2:]": 1, "norm": 1, "head": 1})
    assert [(a, b) for _, a, b in copies(later)] == [("gpu:0", "gpu:1"), ("gpu:1", "gpu:0")]
    assert copied(later) == 2 * stream


def test_each_replica_has_its_own_target() -> None:
    program = passes.replicate(trained(models.mlp), devices=[0, 1])
    result = shifted(program, {"fc2": {0: 2, "gpu:1": "gpu:3"}})
    blobs = result.step.blobs
    assert (blobs["gpu_0/fc2.weight"].device, blobs["gpu_1/fc2.weight"].device) == ("gpu:2", "gpu:3")
    assert (blobs["gpu_0/fc1.weight"].device, blobs["gpu_1/fc1.weight"].device) == ("gpu:0", "gpu:1")
    one = shifted(program, {"fc2": {1: 3}})
    assert one.step.blobs["gpu_0/fc2.weight"].device == "gpu:0"
    both = shifted(program, {"fc2": 2})
    assert {both.step.blobs[f"gpu_{r}/fc2.weight"].device for r in (0, 1)} == {"gpu:2"}


def test_several_targets_in_one_call() -> None:
    program = shifted(trained(models.gpt, layers=4), {"layers[1]": 1, "layers[2]": "gpu:2", "layers[3]": 3})
    for i in range(4):
        assert places(program, f"layers.{i}") == {f"gpu:{i}"}


class Joined(nn.Module):
    """Layers whose results are joined at random by operators of the model, which belong to no layer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw, self.seed = random.Random(seed), seed
        self.first = nn.ModuleList([nn.Linear(4, draw.randint(1, 9)) for _ in range(4)])
        self.last = nn.ModuleList([nn.LazyLinear(2) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        draw = random.Random(self.seed + 1)
        values = [layer(x) for layer in self.first]
        for _ in range(6):
            both = torch.cat(draw.sample(values, 2), 1)
            values.append(both.unfold(1, 2, 2).amax(2) if both.shape[1] > 12 else both.relu())
        return [layer(torch.cat(draw.sample(values, 2), 1)) for layer in self.last]


def moved_alone(program: Program) -> Iterator[Program]:
    """The program with one operator of the model itself on another of four devices, each in turn."""
    step = program.step
    for op in step.ops:
        if op.module or op.effects.shows:
            continue
        shown = [name for name, blob in step.blobs.items() if blob.storage in op.outputs]
        along = [other for other in step.ops if other is op or (other.effects.shows and other.outputs[0] in shown)]
        for device in map(gpu, range(4)):
            ops = tuple(other.on(device, "") if other in along else other for other in step.ops)
            blobs = {**step.blobs, **{name: step.blobs[name].on(device) for name in shown}}
            yield program.with_(step=step.with_(ops=ops, blobs=blobs))


@pytest.mark.parametrize("seed", [3, 5, 13, 21])
def test_among_four_devices_no_operator_is_better_placed_alone(seed: int) -> None:
    """In each of these, cutting one device after the other from the rest leaves one that is."""
    model = Joined(seed)
    model(torch.randn(3, 4))
    program = graphir.capture(model, (torch.randn(3, 4),))
    targets = {f"{layers}[{i}]": i for layers in ("first", "last") for i in (1, 2, 3)}
    placed = passes.shift_modules(program, targets)
    least = copied(passes.inject_copies(placed))
    assert all(copied(passes.inject_copies(other)) >= least for other in moved_alone(placed))


class Averaged(nn.Module):
    """A buffer of the model itself, which several of its own operators overwrite."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 128), nn.Linear(128, 128), nn.Linear(128, 128)
        self.register_buffer("mean", torch.zeros(128))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps.add_(1)
        hidden = self.a(x)
        self.mean.mul_(hidden.detach().mean(0))
        self.mean.add_(hidden.detach().bfloat16().amax(0))
        out = self.c(self.b(hidden))
        self.mean.add_(out.detach().mean(0))
        return out - self.mean  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("modules", "home", "beside"),
    [
        ({"c": 1}, "gpu:1", {"mean_1", "amax"}),  # 768 B cross to the buffer, not 512 B of it there and back
        ({"b": 1, "c": 1}, "gpu:1", set()),
        ({"b": 1}, "gpu:0", set()),
        ({"b": 1, "c": 2}, "gpu:2", {"mean_1", "amax"}),
    ],
)
def test_what_overwrites_a_buffer_of_the_model_runs_where_it_lives(
    modules: dict[str, int], home: str, beside: set[str]
) -> None:
    program = graphir.capture(Averaged(), (torch.randn(4, 8),), loss=lambda out: out.sum())
    result = shifted(program, modules)
    writers = [op.device for op in result.step.ops if "mean" in op.outputs]
    assert [result.step.blobs["mean"].device, *writers] == [home] * 4
    assert result.step.blobs["steps"].device == "gpu:0"
    names = {name for name, _, _ in copies(result)}
    assert names - {"a", "b", "a_grad", "b_grad"} == beside


def test_a_buffer_of_a_layer_stays_with_the_layer() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.a.register_buffer("seen", torch.zeros(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.b(self.a(x))
            self.a.seen.mul_(x.detach().mean(0))  # type: ignore[operator, union-attr]
            return x

    program = graphir.capture(Net(), (torch.randn(3, 4),), loss=lambda out: out.sum())
    result = shifted(program, {"b": 1})
    assert result.step.blobs["a.seen"].device == "gpu:0"


def test_a_cast_goes_where_fewer_bytes_cross() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.second(self.first(x).float().tanh())  # type: ignore[no-any-return]

    program = graphir.capture(Mixed(), (torch.randn(4, 8),), loss=lambda out: out.float().sum())
    result = shifted(program, {"second": 1})
    there = [result.step.blobs[name].dtype for name, _, to in copies(result) if to == "gpu:1"]
    assert there == ["bf16"]


def test_pooling_before_a_cut_runs_before_it() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(4), nn.Flatten(), nn.Linear(36, 5))
    program = graphir.capture(model, (torch.randn(2, 3, 14, 14),), loss=lambda out: out.sum())
    result = shifted(program, {"4": 1})
    assert {op.device for op in result.step.ops if op.type.startswith("aten.max_pool2d_with_indices")} == {"gpu:0"}
    assert copied(result) == 2 * 2 * 36 * 4


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.fc, self.head = nn.Embedding(11, 6), nn.Linear(6, 6), nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.fc(self.embed(x)).tanh())  # type: ignore[no-any-return]


def test_a_tied_parameter_lives_with_its_first_module() -> None:
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randint(0, 11, (3, 5))
    program = graphir.capture(model, (x,), loss=lambda out: out.sum(), optimizer=optimizer)
    result = shifted(program, {"fc": 1, "head": 1})
    assert result.step.blobs["embed.weight"].device == "gpu:0"
    assert copied(result) == 2 * 11 * 6 * 4 + 2 * 3 * 5 * 6 * 4  # the weight and its gradient, the stream and its own


class Doubled(torch.autograd.Function):
    """A function of several operators, with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        return x.exp().mul(2).sin()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return grad * (x.exp() * 2).cos() * 2 * x.exp()


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(Doubled.apply(self.a(x)))  # type: ignore[no-any-return, no-untyped-call]


def test_a_function_is_one_unit() -> None:
    program = graphir.capture(Functional(), (torch.randn(2, 4),), loss=lambda out: out.sum())
    acts = passes.find_activations(program)
    for i in range(len(acts)):
        result = passes.shift_activations(program, acts[i:], shifts={0: 1})
        own = [op for op in result.step.ops if op.type in ("aten.exp.default", "aten.sin.default", "aten.cos.default")]
        assert len({op.device for op in own}) == 1


class Pair(torch.autograd.Function):
    """A function of two results, both of which are activations."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor, h: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return 2 * g + 3 * h


@pytest.mark.parametrize("name", ["mul", "mul_1"])
def test_any_result_of_a_function_moves_all_of_it(name: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y, z = Pair.apply(self.a(x))  # type: ignore[no-untyped-call]
            return self.b(y) + z  # type: ignore[no-any-return]

    program = graphir.capture(Net(), (torch.randn(2, 4),), loss=lambda out: out.sum())
    assert name in passes.find_activations(program)
    moved = passes.shift_activations(program, [name], {0: 1})
    assert {"mul", "mul_1"} <= {op.outputs[0] for op in moved.step.ops if op.device == "gpu:1"}


def test_a_function_goes_where_fewer_bytes_cross() -> None:
    """Its operators belong to its result, which comes after them."""

    class Summed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return (torch.cat([x, x], 1) * 2).sum(1, keepdim=True)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return (4 * grad).expand(-1, 64)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 64), nn.Linear(1, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.c(Summed.apply(self.b(self.a(x))))  # type: ignore[no-any-return, no-untyped-call]

    program = graphir.capture(Net(), (torch.randn(32, 8),), loss=lambda out: out.sum())
    result = shifted(program, {"b": 1, "c": 1})
    assert copied(result) == 2 * 32 * 8 * 4


def test_what_a_checkpoint_repeats_runs_where_it_ran() -> None:
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(3)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x

    program = graphir.capture(Checkpointed(), (torch.randn(2, 4),), loss=lambda out: out.sum())
    result = shifted(program, {"blocks[1:]": 1})
    for i, device in enumerate(("gpu:0", "gpu:1", "gpu:1")):
        assert places(result, f"blocks.{i}") == {device}
    assert len(copies(result)) == 2


def test_a_penalty_on_gradients_follows_what_it_differentiates() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.detach().requires_grad_()
            out = self.b(self.a(x).tanh()).tanh().sum()
            (grad,) = torch.autograd.grad(out, x, create_graph=True)
            return out + grad.square().sum()

    program = graphir.capture(Net(), (torch.randn(2, 4),), loss=lambda out: out)
    result = shifted(program, {"b": 1})
    weights = {name for name, _, _ in copies(result) if "weight" in name}
    assert not weights


@pytest.mark.parametrize(
    ("example", "modules"),
    [
        (models.mlp, {"fc2": 1}),
        (models.mlp, {"fc1": "cpu"}),
        (models.resnet, {"blocks[1:]": 1}),
        (models.gpt, {"layers[1:]": 1, "head": 2}),
        (models.gpt, {"**.attention": 1}),
    ],
)
def test_sessions_give_the_same_bits(example: Callable[[], models.Example], modules: dict[str, Any]) -> None:
    def state_after(place: Callable[[Program], Program]) -> dict[str, torch.Tensor]:
        case, program = example(), trained(example)
        with runtime.Session(passes.emit(place(program)), program.state, binding="cpu") as session:
            for _ in range(2):
                session.step(*batch_of(case))
            return session.state_dict()

    assert_same_bits(state_after(lambda p: shifted(p, modules)), state_after(lambda p: p), str(modules))


def test_moved_modules_can_move_again() -> None:
    program = trained(models.mlp)
    once = passes.shift_modules(program, {"fc2": 1})
    assert passes.shift_modules(once, {"fc2": 0}).step.blobs["fc2.weight"].device == "gpu:0"
    twice = shifted(once, {"fc2": {1: 2}})
    assert places(twice, "fc2") == {"gpu:2"}


def test_the_text_of_a_pass_is_read_back() -> None:
    program = trained(models.gpt, layers=4)
    moved = passes.shift_modules(program, {"layers[2:4]": 1, "head": {0: 2}})
    (text,) = moved.history
    assert text == 'shift_modules{modules={"layers[2:4]": gpu:1, head: {gpu:0: gpu:2}}}'
    assert passes.Pipeline(text)(program).step == moved.step


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ({"fc2": "gpu:x"}, "modules.fc2: 'gpu:x' is not a device\n  fix  write 'gpu:0', 'cuda:0' or 0 for a gpu"),
        ({"fc2": -1}, "modules.fc2: -1 is not a device"),
        ({"fc2": 1.5}, "modules.fc2: 1.5 is not a device"),
        ({"fc2": True}, "modules.fc2: True is not a device"),
        ({"fc2": {0: "gpu"}}, "modules.fc2: 'gpu' is not a device"),
        ({"fc2": {0: 1, "gpu:0": 2}}, "modules.fc2: a device is given twice"),
        ({"fc2": {0: 1, 7: 2}}, "nothing of 'fc2' is on gpu:7\n  fix  sources can be gpu:0"),
        (["fc2"], "modules: expected a dict, not"),
        ({2: 1}, "modules.2: expected text"),
    ],
)
def test_what_is_no_target_is_refused(modules: Any, message: str) -> None:
    program = trained(models.mlp)
    before = str(program)
    with pytest.raises(PassError, match=message):
        passes.shift_modules(program, modules)
    assert str(program) == before
