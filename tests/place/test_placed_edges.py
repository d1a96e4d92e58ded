"""What autograd and users do at the edges of a placed module: outputs that are one tensor, hooks, writes, layouts."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from placed_nets import deep, same
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import graphir
from graphir.errors import CaptureError, EagerWarning, PassError, PassWarning

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


class Of(nn.Module):
    """A linear layer, and what a function makes of its input and its result."""

    def __init__(self, made: Callable[..., Any]) -> None:
        super().__init__()
        self.layer, self.made = nn.Linear(8, 8), made

    def forward(self, x: Tensor, *others: Tensor) -> Any:
        return self.made(x, self.layer(x), *others)


def pair(made: Callable[..., Any]) -> tuple[nn.Module, nn.Module]:
    """A module, and the same one placed."""
    torch.manual_seed(0)
    eager = Of(made)
    model = copy.deepcopy(eager)
    graphir.place(model, (X,))
    return eager, model


@pytest.mark.parametrize(
    ("made", "loss"),
    [
        (lambda x, h: {"last": h, "states": (x, h)}, lambda out: (out["last"] * out["states"][1]).sum()),
        (lambda x, h: (h, h.contiguous(), h.float()), lambda out: sum(o.square().sum() for o in out)),
        (lambda x, h: (h, h.detach()), lambda out: (out[0] * out[1]).sum()),
        (lambda x, h: (h.detach(), h), lambda out: (out[0] * out[1]).sum()),
        (lambda x, h: h.chunk(2, -1), lambda out: (out[0] * out[1]).sum()),
    ],
)
def test_outputs_that_are_one_tensor(made: Callable[..., Any], loss: Callable[[Any], Tensor]) -> None:
    eager, model = pair(made)
    for _ in range(2):
        for net in (eager, model):
            loss(net(X)).backward()
        assert same(model, eager)
    flat = [torch.utils._pytree.tree_leaves(net(X)) for net in (model, eager)]
    assert [tensor.requires_grad for tensor in flat[0]] == [tensor.requires_grad for tensor in flat[1]]


@pytest.mark.parametrize("made", [lambda x, h: h.view(2, 2, 8), lambda x, h: h[:, :4], lambda x, h: h.t()])
def test_an_output_that_is_a_view_can_be_overwritten(made: Callable[..., Any]) -> None:
    eager, model = pair(made)
    for net in (eager, model):
        output = net(X)
        output += 1
        output.mul_(2).square().sum().backward()
    assert same(model, eager)


def test_an_overwritten_view_that_the_backward_reads_is_told() -> None:
    _, model = pair(lambda x, h: h.exp().view(2, 2, 8))
    output = model(X)
    output.detach().add_(1)
    output = model(X)
    loss = output.sum()
    with torch.no_grad():
        output.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_hooks_of_inputs_run_once() -> None:
    eager, model = pair(lambda x, h: (h, 2 * x))
    found = []
    for net in (eager, model):
        x = X.clone().requires_grad_()
        between = x * 1
        between.register_hook(lambda gradient: 5 * gradient)
        between.retain_grad()
        net(between)[0].square().sum().backward()  # not the outputs that were expected: the module runs once more
        found.append((x.grad, between.grad))
    assert all(map(torch.equal, *found))


def test_what_forward_leaves_or_overwrites_is_refused() -> None:
    class Leaving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.aux = nn.Linear(8, 8), torch.tensor(0.0)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layer(x)
            self.aux = out.square().sum()
            return out

    with pytest.raises(CaptureError, match="leaves 'aux' on the model"):
        graphir.place(Leaving(), (X,))
    graphir.place(Leaving(), (X,), allow_changes=["aux"])
    for made in (lambda x, h: h + x.relu_(), lambda x, h: h + x[:, 0].add_(1).sum()):
        with pytest.raises(CaptureError, match="overwrites an argument"):
            graphir.place(Of(made), (X.clone(),))


def test_a_checkpoint_around_the_model() -> None:
    eager, model = pair(lambda x, h: h.tanh())
    checkpoint(eager, X.clone().requires_grad_(), use_reentrant=False).sum().backward()
    with pytest.warns(graphir.EagerWarning, match="saved tensors have hooks"):
        checkpoint(model, X.clone().requires_grad_(), use_reentrant=False).sum().backward()
    assert same(model, eager)


def test_another_layout_of_an_argument_has_plans_of_its_own() -> None:
    torch.manual_seed(0)
    eager = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
    model = copy.deepcopy(eager)
    x = torch.randn(2, 3, 8, 8)
    graphir.place(model, (x,))
    last = x.contiguous(memory_format=torch.channels_last)
    found, expected = model(last), eager(last)
    assert torch.equal(found, expected) and found.stride() == expected.stride()


def test_arguments_are_let_go_by_the_backward() -> None:
    model = graphir.place(deep(), (X,))
    x = torch.randn(100, 8)
    gone = weakref.ref(x)
    loss = model(x).sum()
    loss.backward()
    del x
    gc.collect()
    assert gone() is None and loss.grad_fn is not None


def test_fully_shard_is_refused() -> None:
    dist = torch.distributed
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = graphir.place(deep(), (X,))
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(CaptureError, match="cannot be sharded by fully_shard"):
            model(X)
    finally:
        dist.destroy_process_group()


def test_a_call_while_another_thread_runs_the_model_is_captured_later() -> None:
    torch.manual_seed(0)
    began, ends = threading.Event(), threading.Event()
    waits = [True]

    class Waiting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            if waits and threading.current_thread() is not threading.main_thread():
                began.set()
                ends.wait(60)
            return self.layer(x)  # type: ignore[no-any-return]

    inner = Waiting()
    model = nn.Sequential(inner, nn.Linear(8, 4))
    graphir.place(model, (X,))
    thread = threading.Thread(target=inner, args=(X,))
    thread.start()
    began.wait(60)
    with pytest.warns(EagerWarning, match="another thread runs the module"):
        assert model(torch.randn(2, 3, 8)).shape == (2, 3, 4)
    before = len(model.placement.plans)
    ends.set()
    thread.join()
    model(torch.randn(2, 3, 8))
    assert len(model.placement.plans) == before + 2


class Own(nn.Linear):
    def __deepcopy__(self, memo: dict[int, Any]) -> Own:
        return Own(self.in_features, self.out_features)


def test_a_class_that_copies_itself() -> None:
    model = graphir.place(Own(8, 8), (X,))
    with pytest.warns(EagerWarning, match="Own copies itself: the copy is not placed"):
        assert type(copy.deepcopy(model)) is Own


def test_a_gradient_that_forward_asks_for_is_refused() -> None:
    model = Of(lambda x, y: (x.requires_grad_(), y)[1])
    with pytest.raises(CaptureError, match=r"sets requires_grad of input 'x', whose gradient nobody would get"):
        graphir.place(model, (X,))
    graphir.place(model, (X.clone().requires_grad_(),))
    x = X.clone().requires_grad_()
    model(x).sum().backward()
    assert x.grad is not None


class OwnTensors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.ones(8))
        self.register_buffer("scale", torch.full((8,), 2.0))
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.first(x + self.token) * self.scale)
        return found


def test_a_map_of_accelerate_names_tensors_too() -> None:
    model = OwnTensors()
    twin, x = copy.deepcopy(model), torch.randn(3, 8)
    with pytest.warns(PassWarning, match="'scale' is on gpu:0, where its module is, and not on gpu:1"):
        graphir.place(twin, (x,), device_map={"token": 0, "first": 0, "scale": 1, "last": 1})
    assert twin.placement.device_map == {"token": 0, "first": 0, "scale": 0, "last": 1}
    for net in (model, twin):
        net(x).sum().backward()
    assert torch.equal(model(x), twin(x))
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), twin.parameters(), strict=True))  # type: ignore[arg-type]
    with pytest.raises(PassError, match="is named by 'tokens'"):
        graphir.place(copy.deepcopy(model), (x,), device_map={"tokens": 0, "last": 1})


class CheckpointedNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.0), nn.BatchNorm1d(8))
        self.last = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(checkpoint(self.first, x, use_reentrant=False))
        return found


def test_statistics_that_a_checkpoint_updates_in_the_backward_too() -> None:
    torch.manual_seed(0)
    model = CheckpointedNorm()
    twin = copy.deepcopy(model)
    graphir.place(twin, (torch.randn(6, 8),), device_map={"first": 0, "last": 1})
    for rows in (6, 5, 6):
        x, y = torch.randn(rows, 8), torch.randn(4, 8)
        for net in (model, twin):
            net.zero_grad()
            one, other = net(x), net(y)  # both before a backward
            one.square().sum().backward()
            other.square().sum().backward()
        assert all(map(torch.equal, twin.state_dict().values(), model.state_dict().values()))
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), twin.parameters(), strict=True))  # type: ignore[arg-type]
    assert model.first[2].num_batches_tracked == 12
