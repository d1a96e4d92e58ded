"""Replication callbacks: which are called, in which order, with what."""

from __future__ import annotations

import copy
import pickle
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch_on_host import on_host
from torch_on_host import wrap as wrap_torchs

import graphir
from graphir import parallel


class Told(nn.Module):
    """Notes each callback: of which module, with which context, of which copy."""

    calls: ClassVar[list[tuple[str, Any, int]]] = []

    def __init__(self, name: str, *children: nn.Module) -> None:
        super().__init__()
        self.name = name
        self.children_ = nn.ModuleList(children)
        self.fc = nn.Linear(2, 2)

    def __data_parallel_replicate__(self, ctx: Any, copy_id: int) -> None:
        Told.calls.append((self.name, ctx, copy_id))
        self.copy_id = copy_id
        ctx.copies = getattr(ctx, "copies", 0) + 1

    def forward(self, x: Tensor) -> Tensor:
        for child in self.children_:
            x = child(x)
        return self.fc(x) + 0 * self.copy_id


@pytest.fixture(autouse=True)
def _no_calls() -> None:
    Told.calls = []


def net() -> Told:
    return Told("root", Told("first", Told("deep")), nn.Sequential(Told("second")))


ORDER = ["root", "first", "deep", "second"]


def x(n: int = 4) -> Tensor:
    return torch.ones(n, 2)


def test_every_callback_of_the_master_comes_before_any_other_copy_s() -> None:
    graphir.ReplicationCallbackDataParallel(net(), [0, 1, 2])(x(3))
    assert [(name, copy_id) for name, _, copy_id in Told.calls] == [(n, c) for c in range(3) for n in ORDER]


def test_a_context_is_shared_by_the_copies_of_a_module_and_by_nothing_else() -> None:
    wrapped = graphir.ReplicationCallbackDataParallel(net(), [0, 1])
    wrapped(x())
    of = {name: {id(ctx) for other, ctx, _ in Told.calls if other == name} for name in ORDER}
    assert all(len(ids) == 1 for ids in of.values()) and len(set.union(*of.values())) == len(ORDER)
    assert all(type(ctx) is parallel.CallbackContext and ctx.copies == 2 for _, ctx, _ in Told.calls)
    before = {id(ctx) for _, ctx, _ in Told.calls}
    kept, Told.calls = Told.calls, []
    wrapped(x())
    assert kept and not before & {id(ctx) for _, ctx, _ in Told.calls}


def test_containers_have_contexts_too() -> None:
    """A callback on a container, set on its class, counts as any other."""

    class Container(nn.Sequential):
        def __data_parallel_replicate__(self, ctx: Any, copy_id: int) -> None:
            Told.calls.append(("container", ctx, copy_id))

    graphir.ReplicationCallbackDataParallel(Container(nn.ModuleList(), Told("inner")), [0, 1])
    module = Container(Told("inner"))
    graphir.ReplicationCallbackDataParallel(module, [0, 1])(x())
    assert [name for name, _, _ in Told.calls] == ["container", "inner"] * 2


def test_what_a_callback_sets_stays_with_its_copy() -> None:
    module = net()
    graphir.ReplicationCallbackDataParallel(module, [0, 1])(x())
    assert not hasattr(module, "copy_id")


def test_a_module_used_twice_is_called_once() -> None:
    told = Told("twice")
    graphir.ReplicationCallbackDataParallel(nn.Sequential(told, told), [0, 1])(x())
    assert [(name, copy_id) for name, _, copy_id in Told.calls] == [("twice", 0), ("twice", 1)]


def test_fewer_replicas_have_fewer_callbacks() -> None:
    graphir.ReplicationCallbackDataParallel(Told("root"), [0, 1, 2])(x(2))
    assert [copy_id for _, _, copy_id in Told.calls] == [0, 1]


class Own(graphir.DataParallel):
    def replicate(self, module: Any, device_ids: Any) -> Any:
        Told.calls.append(("own", None, -1))
        return super().replicate(module, device_ids)


@pytest.mark.parametrize("kind", [graphir.DataParallel, Own])
def test_a_wrapper_is_patched(kind: type[graphir.DataParallel]) -> None:
    wrapped = kind(Told("root"), [0, 1])
    graphir.patch_replication_callback(wrapped)
    graphir.patch_replication_callback(wrapped)
    y = wrapped(x())
    assert [c for name, _, c in Told.calls if name == "root"] == [0, 1]
    assert len([1 for name, _, _ in Told.calls if name == "own"]) == (kind is Own)
    y.sum().backward()


def test_torch_s_wrapper_is_patched() -> None:
    module = nn.Sequential(Told("root"), parallel.SynchronizedBatchNorm1d(2))
    with on_host():
        wrapped = wrap_torchs(module)
        graphir.patch_replication_callback(wrapped)
        data = torch.randn(5, 2)
        y = wrapped(data)
    assert [copy_id for _, _, copy_id in Told.calls] == [0, 1]
    assert torch.allclose(y.mean(0), torch.zeros(2), atol=1e-6)


def test_torch_s_wrapper_without_gpus_runs_the_module() -> None:
    wrapped = nn.DataParallel(nn.Linear(2, 2), device_ids=[0, 1])
    graphir.patch_replication_callback(wrapped)
    assert wrapped(x()).shape == (4, 2)


def test_another_replicate_that_the_object_had_is_kept() -> None:
    wrapped = graphir.DataParallel(Told("root"), [0, 1])
    inner, calls = wrapped.replicate, []
    wrapped.replicate = lambda module, ids: (calls.append(len(ids)), inner(module, ids))[1]  # type: ignore[method-assign]
    graphir.patch_replication_callback(wrapped)
    wrapped(x())
    assert calls == [2] and len(Told.calls) == 2


def test_a_subclass_of_ours_that_calls_callbacks_is_not_patched_again() -> None:
    wrapped = graphir.ReplicationCallbackDataParallel(Told("root"), [0, 1])
    graphir.patch_replication_callback(wrapped)
    wrapped(x())
    assert len(Told.calls) == 2


@pytest.mark.parametrize("again", [copy.deepcopy, lambda wrapped: pickle.loads(pickle.dumps(wrapped))])
def test_a_patched_wrapper_is_copied_and_pickled(again: Any) -> None:
    wrapped = graphir.DataParallel(Told("root"), [0, 1])
    graphir.patch_replication_callback(wrapped)
    other = again(wrapped)
    assert other.replicate.owner is other
    other(x())
    assert len(Told.calls) == 2


class Failing(nn.Module):
    def __data_parallel_replicate__(self, ctx: Any, copy_id: int) -> None:
        if copy_id == 1:
            raise LookupError("nothing there")

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_a_callback_that_raises_is_named_and_leaves_the_module_as_it_was() -> None:
    module = nn.Sequential(Told("root"), nn.Sequential(Failing()))
    before = {name: dict(vars(part)) for name, part in module.named_modules()}
    wrapped = graphir.ReplicationCallbackDataParallel(module, [0, 1])
    with pytest.raises(ValueError, match="a replication callback failed: LookupError: nothing there") as caught:
        wrapped(x())
    assert "module 1.0 of type Failing, copy 1" in str(caught.value)
    assert isinstance(caught.value.__cause__, LookupError)
    assert {name: dict(vars(part)) for name, part in module.named_modules()} == before


def test_copies_of_one_s_own() -> None:
    module = nn.Sequential(Told("root"), parallel.SynchronizedBatchNorm1d(2))
    copies = parallel.replicate(module, [torch.device("cpu")] * 2)
    graphir.exec_data_parallel_replication_callback(copies)
    data = torch.randn(5, 2)
    outputs = parallel.parallel_apply(copies, list(data.split([3, 2])))
    assert [copy_id for _, _, copy_id in Told.calls] == [0, 1]
    assert torch.allclose(torch.cat(outputs).mean(0), torch.zeros(2), atol=1e-6)


def test_no_copies() -> None:
    graphir.exec_data_parallel_replication_callback([])


def test_the_example_of_the_interface_s_origin() -> None:
    from graphir.parallel import ReplicationCallbackDataParallel, SynchronizedBatchNorm1d

    sync_bn = SynchronizedBatchNorm1d(10, eps=1e-5, affine=False)
    sync_bn = ReplicationCallbackDataParallel(sync_bn, device_ids=[0, 1])
    data = torch.rand(16, 10, dtype=torch.float64)
    plain = nn.BatchNorm1d(10, eps=1e-5, affine=False).double()
    assert torch.allclose(sync_bn.double()(data), plain(data), atol=1e-12)
