"""Synchronised batch norm over replicas is batch norm of one device on the whole batch, to 1e-6 in double precision."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from zoo.zoo_rows import library

import graphir
from graphir import parallel

pytestmark = pytest.mark.usefixtures("one_thread")

KINDS: dict[int, tuple[type[nn.Module], type[nn.Module], tuple[int, ...]]] = {
    0: (nn.BatchNorm1d, parallel.SynchronizedBatchNorm1d, ()),
    1: (nn.BatchNorm1d, parallel.SynchronizedBatchNorm1d, (5,)),
    2: (nn.BatchNorm2d, parallel.SynchronizedBatchNorm2d, (3, 2)),
    3: (nn.BatchNorm3d, parallel.SynchronizedBatchNorm3d, (2, 3, 2)),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "not affine": {"affine": False},
    "without running statistics": {"track_running_stats": False},
    "cumulative": {"momentum": None},
    "another momentum and eps": {"momentum": 0.3, "eps": 1e-3},
}
TOLERANCE = {"rtol": 1e-6, "atol": 1e-6}


def filled(module: nn.Module) -> nn.Module:
    """With weights that are not all one."""
    torch.manual_seed(1)
    for parameter in module.parameters():
        nn.init.uniform_(parameter, 0.5, 2.0)
    return module


def batch(rows: int, *sizes: int, channels: int = 4) -> Tensor:
    torch.manual_seed(rows)
    return torch.randn(rows, channels, *sizes, dtype=torch.float64) * 3 + 10


def assert_trains_alike(
    wrapped: nn.Module, ours: nn.Module, plain: nn.Module, batches: list[Tensor], lr: float = 0.1
) -> None:
    """Outputs, gradients, parameters and buffers, through several steps."""
    sgd = [torch.optim.SGD(m.parameters(), lr=lr) if list(m.parameters()) else None for m in (ours, plain)]
    for data in batches:
        inputs = [data.clone().requires_grad_(data.is_floating_point()) for _ in range(2)]
        outputs = [wrapped(inputs[0]), plain(inputs[1])]
        torch.testing.assert_close(outputs[0], outputs[1], **TOLERANCE)
        for y in outputs:
            (y * torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view_as(y)).square().sum().backward()
        torch.testing.assert_close(inputs[0].grad, inputs[1].grad, **TOLERANCE)
        slopes = [(mine.grad, other.grad) for mine, other in zip(ours.parameters(), plain.parameters(), strict=True)]
        largest = max([float(slope.abs().max()) for _, slope in slopes], default=0.0)
        for mine, other in slopes:
            torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-6 * largest)
        for optimizer in sgd:
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
        for mine, other in zip(ours.buffers(), plain.buffers(), strict=True):
            torch.testing.assert_close(mine, other, **TOLERANCE)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dims", KINDS)
def test_it_trains_as_one_device_does_on_the_whole_batch(dims: int, options: str) -> None:
    plain_kind, kind, sizes = KINDS[dims]
    plain = filled(plain_kind(4, **OPTIONS[options]).double())
    ours = kind(4, **OPTIONS[options]).double()
    ours.load_state_dict(plain.state_dict())
    wrapped = graphir.DataParallel(ours, [0, 1, 2])
    assert_trains_alike(wrapped, ours, plain, [batch(rows, *sizes) for rows in (6, 8, 7)], lr=1e-4)


@pytest.mark.parametrize("rows", [2, 3, 5])
def test_uneven_shares_and_single_rows(rows: int) -> None:
    plain = nn.BatchNorm1d(4).double()
    ours = parallel.convert_sync_batch_norm(copy.deepcopy(plain))
    assert_trains_alike(graphir.DataParallel(ours, [0, 1, 2]), ours, plain, [batch(rows)], lr=1e-4)


def test_shares_of_any_length() -> None:
    """As a wrapper that splits by itself gives them: one row, and four."""
    norm = parallel.SynchronizedBatchNorm1d(4).double()
    data = batch(5)
    copies = parallel.replicate(norm, [torch.device("cpu")] * 2)
    outputs = parallel.parallel_apply(copies, list(data.split([1, 4])))
    torch.testing.assert_close(torch.cat(outputs), nn.BatchNorm1d(4).double()(data), **TOLERANCE)


def test_running_statistics_are_equal_on_all_replicas() -> None:
    norm = parallel.SynchronizedBatchNorm2d(4).double()
    copies = parallel.replicate(norm, [torch.device("cpu")] * 3)
    parallel.parallel_apply(copies, list(batch(6, 3, 2).split([1, 2, 3])))
    first = list(copies[0].buffers())
    assert all(torch.equal(a, b) for other in copies[1:] for a, b in zip(first, other.buffers(), strict=True))
    assert torch.equal(first[0], norm.running_mean)  # type: ignore[arg-type]


def test_a_mean_far_from_zero_loses_no_variance() -> None:
    """Where a sum of squares in single precision would have nothing left."""
    data = torch.randn(64, 4, generator=torch.Generator().manual_seed(0)) + 1e4
    y = graphir.DataParallel(parallel.SynchronizedBatchNorm1d(4), [0, 1])(data)
    torch.testing.assert_close(y, nn.BatchNorm1d(4)(data), rtol=1e-2, atol=1e-2)


def test_evaluation_is_torch_s_bit_for_bit() -> None:
    ours = parallel.SynchronizedBatchNorm1d(4)
    graphir.DataParallel(ours, [0, 1])(torch.randn(8, 4))
    plain = nn.BatchNorm1d(4)
    plain.load_state_dict(ours.state_dict())
    data = torch.randn(5, 4)
    assert torch.equal(graphir.DataParallel(ours.eval(), [0, 1])(data), plain.eval()(data))


def test_evaluation_without_running_statistics_is_over_the_whole_batch() -> None:
    ours = parallel.SynchronizedBatchNorm1d(4, track_running_stats=False).double().eval()
    data = batch(5)
    plain = nn.BatchNorm1d(4, track_running_stats=False).double().eval()
    torch.testing.assert_close(graphir.DataParallel(ours, [0, 1])(data), plain(data), **TOLERANCE)


def test_without_replicas_it_is_torch_s_bit_for_bit() -> None:
    data = torch.randn(5, 4)
    ours, plain = parallel.SynchronizedBatchNorm1d(4), nn.BatchNorm1d(4)
    assert torch.equal(ours(data), plain(data))
    assert all(torch.equal(a, b) for a, b in zip(ours.buffers(), plain.buffers(), strict=True))


def test_a_batch_for_one_replica_is_not_synchronised() -> None:
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        graphir.DataParallel(parallel.SynchronizedBatchNorm1d(4), [0, 1])(torch.randn(1, 4))


def test_two_runs_give_equal_bits() -> None:
    """In a net where a value's gradients come from several sides, so that the order of adding shows."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.norms = nn.ModuleList([parallel.SynchronizedBatchNorm1d(4) for _ in range(3)])

        def forward(self, x: Tensor) -> Tensor:
            y = self.fc(x)
            for norm in self.norms:
                y = y + norm(y) * y + norm(y.tanh())
            return y

    torch.manual_seed(0)
    module, data = Net(), torch.randn(7, 4)
    found = []
    for _ in range(4):
        module.zero_grad()
        graphir.DataParallel(module, [0, 1, 2])(data).square().sum().backward()
        found.append([p.grad.clone() for p in module.parameters()])  # type: ignore[union-attr]
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_gradients_of_gradients() -> None:
    plain = filled(nn.BatchNorm1d(4).double())
    ours = parallel.convert_sync_batch_norm(copy.deepcopy(plain))
    found = []
    for module in (graphir.DataParallel(ours, [0, 1]), plain):
        x = batch(5).requires_grad_()
        (slope,) = torch.autograd.grad(module(x).pow(3).sum(), x, create_graph=True)
        slope.square().sum().backward()
        found.append(x.grad)
    torch.testing.assert_close(found[0], found[1], **TOLERANCE)


def test_half_precision_keeps_its_element_type() -> None:
    data = torch.randn(8, 4).bfloat16()
    ours = parallel.SynchronizedBatchNorm1d(4)
    y = graphir.DataParallel(ours, [0, 1])(data)
    assert y.dtype is torch.bfloat16
    torch.testing.assert_close(y, nn.BatchNorm1d(4)(data), rtol=2e-2, atol=2e-2)


def test_without_gradients_statistics_follow() -> None:
    ours, plain = parallel.SynchronizedBatchNorm1d(4).double(), nn.BatchNorm1d(4).double()
    with torch.no_grad():
        graphir.DataParallel(ours, [0, 1])(batch(5))
        plain(batch(5))
    torch.testing.assert_close(ours.running_var, plain.running_var, **TOLERANCE)


class Skipping(nn.Module):
    """Leaves out its norm in the shorter share, or fails there."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.norm = parallel.SynchronizedBatchNorm1d(4)
        self.error = error

    def forward(self, x: Tensor) -> Tensor:
        if len(x) == 2:
            return self.norm(x)
        if self.error is not None:
            raise self.error
        return x


def test_a_replica_that_does_not_come_leaves_nobody_hanging() -> None:
    told = r"module 'norm', .*Norm1d\(4.*\) waits for replica 1, which is done or has failed"
    with pytest.raises(RuntimeError, match=told) as caught:
        graphir.DataParallel(Skipping(), [0, 1])(torch.randn(3, 4))
    assert "in replica 0" in str(caught.value) and "fix  let each replica run the same modules" in str(caught.value)


class Repeating(nn.Module):
    """Calls its norm once for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), parallel.SynchronizedBatchNorm1d(4))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(len(x)):
            x = self.inner(x)
        return x


@pytest.mark.parametrize("rows", [3, 5])
@pytest.mark.parametrize("wrap", [graphir.DataParallel, graphir.ReplicationCallbackDataParallel])
def test_norms_that_replicas_call_unequally_often_are_counted(rows: int, wrap: Any) -> None:
    first, second = (rows + 1) // 2, rows // 2
    told = rf"module 'inner\.1', .* called {first} times by replica 0, {second} times? by replica 1\n"
    with pytest.raises(graphir.ReplicationError, match=told):
        wrap(Repeating(), [0, 1])(torch.randn(rows, 4))


def test_a_replica_that_fails_leaves_nobody_hanging() -> None:
    before = threading.active_count()
    with pytest.raises(ZeroDivisionError, match="in replica 1"):
        graphir.DataParallel(Skipping(ZeroDivisionError("here")), [0, 1])(torch.randn(3, 4))
    assert threading.active_count() <= before


def test_replicas_in_another_order_are_told_so() -> None:
    class Crossed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = parallel.SynchronizedBatchNorm1d(4), parallel.SynchronizedBatchNorm1d(4, eps=0.1)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x)) if len(x) == 2 else self.a(self.b(x))

    told = r"the replicas wait for each other: replica 0 at .*eps=1e-05.*, replica 1 at .*eps=0\.1"
    with pytest.raises(RuntimeError, match=told):
        graphir.DataParallel(Crossed(), [0, 1])(torch.randn(3, 4))


def test_channels_that_differ_leave_nobody_hanging() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = parallel.SynchronizedBatchNorm1d(4, affine=False, track_running_stats=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x if len(x) == 2 else x[:, :3])

    with pytest.raises(RuntimeError, match="replica"):
        graphir.DataParallel(Wide(), [0, 1])(torch.randn(3, 4))


def test_a_copy_outside_of_a_forward_is_refused() -> None:
    copies = parallel.replicate(parallel.SynchronizedBatchNorm1d(4), [torch.device("cpu")] * 2)
    with pytest.raises(RuntimeError, match=r"is a copy and cannot meet the others\n.*\n  fix  wrap the module"):
        copies[0](torch.randn(3, 4))


def test_one_value_in_all_is_refused() -> None:
    copies = parallel.replicate(parallel.SynchronizedBatchNorm1d(4), [torch.device("cpu")] * 2)
    with pytest.raises(ValueError, match=r"more than 1 value per channel when training, got input size \(1, 4\)"):
        parallel.parallel_apply(copies, [torch.randn(1, 4), torch.randn(0, 4)])


def test_shapes_are_checked_as_torch_does() -> None:
    with pytest.raises(ValueError, match="expected 4D input"):
        graphir.DataParallel(parallel.SynchronizedBatchNorm2d(4), [0, 1])(torch.randn(3, 4))


class Activated(nn.BatchNorm2d):
    """As timm's, with what comes after it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


def test_conversion_keeps_everything_but_the_type() -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Sequential(Activated(4), nn.BatchNorm1d(4)))
    shared = module[1]
    module.append(shared)
    shared.eval()
    calls = []
    shared.register_forward_hook(lambda *args: calls.append(1))
    parameters, buffers = list(module.parameters()), list(module.buffers())
    assert parallel.convert_sync_batch_norm(module) is module
    assert [type(m).__name__ for m in module.modules() if "Norm" in type(m).__name__ or "Act" in type(m).__name__] == [
        "SynchronizedBatchNorm2d",
        "SynchronizedActivated",
        "SynchronizedBatchNorm1d",
    ]
    assert module[1] is module[3] and not module[1].training
    assert all(a is b for a, b in zip(parameters, module.parameters(), strict=True))
    assert all(a is b for a, b in zip(buffers, module.buffers(), strict=True))
    module[1](torch.randn(2, 4, 3, 3))
    assert calls == [1]
    again = parallel.convert_sync_batch_norm(module)
    assert again[1] is module[1]


def test_conversion_of_a_norm_itself() -> None:
    plain = nn.BatchNorm1d(4)
    ours = parallel.convert_sync_batch_norm(plain)
    assert type(ours) is parallel.SynchronizedBatchNorm1d and ours.weight is plain.weight
    assert type(plain) is nn.BatchNorm1d


def test_conversion_of_a_module_without_shape_is_refused() -> None:
    module = nn.Sequential(nn.BatchNorm1d(4), nn.LazyBatchNorm1d())
    with pytest.raises(ValueError, match=r"1 has no shape yet\n.*\n  fix  call the module once"):
        parallel.convert_sync_batch_norm(module)
    assert type(module[0]) is nn.BatchNorm1d


def test_a_subclass_s_own_forward_is_kept() -> None:
    plain = Activated(4).double()
    ours = parallel.convert_sync_batch_norm(copy.deepcopy(plain))
    assert_trains_alike(graphir.DataParallel(ours, [0, 1]), ours, plain, [batch(5, 3, 2)], lr=1e-4)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
@pytest.mark.parametrize("kind", [nn.BatchNorm2d, Activated])
def test_converted_norms_are_copied_and_pickled(kind: type[nn.BatchNorm2d], again: Any) -> None:
    ours = parallel.convert_sync_batch_norm(kind(4).double())
    other = again(ours)
    assert type(other) is type(ours)
    y = graphir.DataParallel(other, [0, 1])(batch(5, 3, 2))
    torch.testing.assert_close(y, kind(4).double()(batch(5, 3, 2)), **TOLERANCE)


def resnet() -> nn.Module:
    library("torchvision")
    from torchvision.models import resnet

    return resnet.ResNet(resnet.BasicBlock, [1, 1, 1, 1], num_classes=10, width_per_group=64)


def efficientnet() -> nn.Module:
    return library("timm").create_model("test_efficientnet", num_classes=10)  # type: ignore[no-any-return]


def volumes() -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(3, 4, 3), nn.BatchNorm3d(4), nn.ReLU(), nn.Flatten(2), nn.Conv1d(4, 6, 3), nn.BatchNorm1d(6),
        nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(6, 10),
    )  # fmt: skip


NETS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "resnet of torchvision": (resnet, (32, 32)),
    "efficientnet of timm": (efficientnet, (32, 32)),
    "1d and 3d": (volumes, (5, 5, 5)),
}


@pytest.mark.parametrize("name", NETS)
def test_nets_train_as_one_device_does(name: str) -> None:
    make, sizes = NETS[name]
    torch.manual_seed(0)
    plain = make().double().train()
    ours = parallel.convert_sync_batch_norm(copy.deepcopy(plain))
    wrapped = graphir.ReplicationCallbackDataParallel(ours, [0, 1])
    batches = [batch(rows, *sizes, channels=3) / 10 for rows in (3, 5)]
    assert_trains_alike(wrapped, ours, plain, batches, lr=1e-6)
