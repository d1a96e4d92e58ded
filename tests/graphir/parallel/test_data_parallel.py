"""What is ours: how devices are named and bound, the function, what replicas leave behind."""

from __future__ import annotations

import pickle
import weakref
from typing import Any

import pytest
import torch
from eager_only import EagerOnly
from torch import Tensor, nn

import graphir
from graphir import parallel


def x(n: int = 5) -> Tensor:
    return torch.randn(n, 4, generator=torch.Generator().manual_seed(n))


NAMED: list[tuple[list[Any], list[int]]] = [
    ([0, 1], [0, 1]),
    (["gpu:1", "gpu:0"], [1, 0]),
    (["cuda:0", "cuda:3"], [0, 3]),
    ([torch.device("cuda:2"), torch.device("cuda:0")], [2, 0]),
    (["cpu:0", torch.device("cpu:1")], [0, 1]),
    ((3, "gpu:5"), [3, 5]),  # type: ignore[list-item]
]


@pytest.mark.parametrize(("given", "ids"), NAMED)
def test_devices_are_numbers_devices_or_texts(given: Any, ids: list[int]) -> None:
    wrapped = graphir.DataParallel(nn.Linear(4, 3), given)
    assert wrapped.device_ids == ids and wrapped.output_device == ids[0]
    assert wrapped(x()).shape == (5, 3)


@pytest.mark.parametrize(
    ("given", "number"), [(1, 1), (-1, -1), ("cpu", -1), ("gpu:7", 7), (torch.device("cuda:0"), 0)]
)
def test_output_devices(given: Any, number: int) -> None:
    wrapped = graphir.DataParallel(nn.Linear(4, 3), [0, 1], given)
    assert wrapped.output_device == number
    assert wrapped(x()).device == torch.device("cpu")


@pytest.mark.parametrize("binding", ["auto", "cpu"])
def test_without_ids_and_gpus_the_module_itself_runs(binding: Any) -> None:
    seen = []
    module = nn.Linear(4, 3)
    module.register_forward_hook(lambda m, args, y: seen.append((m, len(y))))
    wrapped = graphir.DataParallel(module, binding=binding)
    assert wrapped.device_ids == [] and wrapped(x()).shape == (5, 3)
    assert seen == [(module, 5)]


def test_a_binding_names_the_devices() -> None:
    wrapped = graphir.DataParallel(nn.Linear(4, 3), binding={"gpu:0": "cpu", "gpu:1": "cpu"})
    assert wrapped.device_ids == [0, 1]
    assert torch.equal(wrapped(x()), graphir.DataParallel(wrapped.module, [0, 1])(x()))


def test_the_host_may_be_asked_for_beside_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    wrapped = graphir.DataParallel(nn.Linear(4, 3), [0, 1], binding="cpu")
    assert set(wrapped.places.values()) == {torch.device("cpu")}


def test_gpus_are_those_of_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    wrapped = graphir.DataParallel(nn.Linear(4, 3), [3, 1])
    assert [str(wrapped.places[i]) for i in (3, 1, -1)] == ["cuda:3", "cuda:1", "cpu"]
    assert wrapped.src_device_obj == torch.device("cuda:3")
    assert graphir.DataParallel(nn.Linear(4, 3)).device_ids == [0, 1, 2, 3]


def test_a_gpu_is_shared_by_a_binding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    shared = [{"gpu:0": "cuda:0", "gpu:1": "cuda:0"}, "cuda"]
    for binding in shared:
        wrapped = graphir.DataParallel(nn.Linear(4, 3), [0, 1], binding=binding)  # type: ignore[arg-type]
        assert {str(wrapped.places[i]) for i in (0, 1)} == {"cuda:0"}


def test_the_function_is_the_class() -> None:
    module = nn.Linear(4, 3)
    wanted = graphir.DataParallel(module, [0, 1])(x())
    assert torch.equal(graphir.data_parallel(module, x(), [0, 1]), wanted)
    assert torch.equal(graphir.data_parallel(module, (x(),), ["gpu:0", "gpu:1"], -1, 0), wanted)
    assert torch.equal(graphir.data_parallel(module, None, [0, 1], module_kwargs={"input": x()}), wanted)
    assert torch.equal(graphir.data_parallel(module, x()), module(x()))
    assert torch.equal(graphir.data_parallel(module, x(), [1]), module(x()))
    assert torch.equal(graphir.data_parallel(module, x(), [0, 1], binding="cpu"), wanted)


def test_the_function_sums_gradients_into_the_module() -> None:
    module = nn.Linear(4, 3)
    graphir.data_parallel(module, x(), [0, 1]).square().sum().backward()
    found = [p.grad for p in module.parameters()]
    module.zero_grad()
    graphir.DataParallel(module, [0, 1])(x()).square().sum().backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(found, module.parameters(), strict=True))  # type: ignore[arg-type]


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x += 1
        with torch.no_grad():
            self.fc.weight.mul_(2)
        return self.fc(x)


def test_what_replicas_write_into_shares_the_caller_does_not_see() -> None:
    data = x()
    before = data.clone()
    graphir.DataParallel(InPlace(), [0, 1])(data)
    assert torch.equal(data, before)


def test_of_what_replicas_write_into_parameters_the_first_one_s_stays() -> None:
    module = InPlace()
    before = module.fc.weight.detach().clone()
    graphir.DataParallel(module, [0, 1])(x())
    assert torch.equal(module.fc.weight, 2 * before)


def test_hooks_that_replicas_register_are_theirs() -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            self.fc.register_forward_hook(lambda module, args, y: y + 1)
            return self.fc(x)

    module = Late()
    wrapped = graphir.DataParallel(module, [0, 1, 2])
    wrapped(x())
    assert torch.equal(wrapped(x()), torch.cat([module.fc(share) + 1 for share in x().chunk(3)]))
    assert not module.fc._forward_hooks


def test_replicas_do_not_outlive_their_forward() -> None:
    replicas = []

    class Noted(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            replicas.append(weakref.ref(self))
            return super().forward(x)

    y = EagerOnly(Noted(4, 3), [0, 1])(x())
    import gc

    gc.collect()
    assert y.requires_grad and len(replicas) == 2 and not any(ref() for ref in replicas)


def test_a_pickled_wrapper_keeps_its_binding() -> None:
    wrapped = graphir.DataParallel(nn.Linear(4, 3), [0, 1], dim=1, binding={0: "cpu", 1: "cpu"})
    other = pickle.loads(pickle.dumps(wrapped))
    assert (other.device_ids, other.dim, other.binding) == ([0, 1], 1, {0: "cpu", 1: "cpu"})


def test_steps_by_hand_are_the_forward() -> None:
    module = nn.Linear(4, 3)
    places = [torch.device("cpu")] * 2
    args, kwargs = parallel.scatter_kwargs((x(),), {}, places)
    outputs = parallel.parallel_apply(parallel.replicate(module, places), args, kwargs, [0, 1])
    assert torch.equal(parallel.gather(outputs, places[0]), graphir.DataParallel(module, [0, 1])(x()))
    assert [len(share) for share in parallel.scatter(x(), places)] == [3, 2]


def test_gathered_gradients_come_in_participant_order() -> None:
    parts = [torch.full((2,), float(i), requires_grad=True) for i in range(3)]
    gathered = parallel.all_gather(parts)
    assert all(torch.equal(whole, torch.stack(parts)) for whole in gathered)
    (gathered[0].sum() + 10 * gathered[2].sum()).backward()
    assert all(torch.equal(part.grad, torch.full((2,), 11.0)) for part in parts)  # type: ignore[arg-type]
