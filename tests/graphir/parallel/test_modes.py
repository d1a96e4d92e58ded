"""What is set in the calling thread is set in every replica."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from eager_only import EagerOnly
from torch import Tensor, nn

SET = contextvars.ContextVar("SET", default=0)


class Of(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def asked_in_replicas(question: Callable[[], Any]) -> list[Any]:
    found = []
    EagerOnly(Of(lambda m, x: (found.append(question()), m.fc(x))[1]), [0, 1])(torch.ones(4, 4))
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_s_element_type(dtype: torch.dtype) -> None:
    module = Of(lambda m, x: m.fc(x))
    x = torch.randn(5, 4)
    with torch.autocast("cpu", dtype=dtype):
        ours = EagerOnly(module, [0, 1])(x)
        plain = torch.cat([module(share) for share in x.chunk(2)])
    assert ours.dtype is dtype and torch.equal(ours, plain)
    ours.float().sum().backward()
    assert module.fc.weight.grad is not None


def test_autocast_switched_off() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.autocast("cpu", enabled=False):
        assert asked_in_replicas(lambda: torch.is_autocast_enabled("cpu")) == [False, False]


def test_autocast_s_cache() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        assert asked_in_replicas(torch.is_autocast_cache_enabled) == [False, False]


def test_inference_mode() -> None:
    module = Of(lambda m, x: m.fc(x))
    with torch.inference_mode():
        assert asked_in_replicas(torch.is_inference_mode_enabled) == [True, True]
        y = EagerOnly(module, [0, 1])(torch.ones(4, 4))
    assert y.is_inference()


@pytest.mark.parametrize(
    "draws",
    [
        lambda x: F.dropout(x, 0.5),
        lambda x: F.rrelu(x, training=True),
        lambda x: F.dropout(x, 0.5, training=False),
        lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.5)[0],
    ],
)
def test_random_operators_in_inference_mode(draws: Callable[[Tensor], Tensor]) -> None:
    """torch shows these whole in inference mode, and does not say what they draw."""
    module, x = Of(lambda m, x: draws(x)), torch.ones(4, 4) - 2 * torch.eye(4)

    def made() -> Tensor:
        torch.manual_seed(1)
        output: Tensor = EagerOnly(module, [0, 1])(x)
        return output

    with torch.no_grad():
        wanted = made()
    with torch.inference_mode():
        assert torch.equal(made(), wanted)


def test_running_statistics_in_inference_mode() -> None:
    module = nn.BatchNorm1d(4)
    with torch.inference_mode():
        EagerOnly(module, [0, 1])(torch.ones(4, 4))
    assert module.running_mean is not None and torch.equal(module.running_mean, torch.full((4,), 0.1))


def test_grad_mode() -> None:
    with torch.no_grad():
        assert asked_in_replicas(torch.is_grad_enabled) == [False, False]
    assert asked_in_replicas(torch.is_grad_enabled) == [True, True]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_replica_s_parameters_are_of_the_kind_of_the_module_s(mode: Callable[[], Any]) -> None:
    """torch's matmul folds or not by what it is given, so its bits depend on it."""

    def asked(module: Of, x: Tensor) -> Tensor:
        found.append((module.fc.weight.requires_grad, module.fc.weight.is_inference()))
        return module.fc(x)

    found: list[tuple[bool, bool]] = []
    module = Of(asked)
    with mode():
        EagerOnly(module, [0, 1])(torch.ones(4, 4))
        module(torch.ones(4, 4))
    assert found == [(True, False)] * 3


def test_context_variables() -> None:
    token = SET.set(3)
    try:
        assert asked_in_replicas(SET.get) == [3, 3]
    finally:
        SET.reset(token)


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_of_a_kernel(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert asked_in_replicas(torch.get_num_threads) == [threads, threads]
    finally:
        torch.set_num_threads(before)


def test_replicas_run_at_the_same_time() -> None:
    barrier = threading.Barrier(3, timeout=60)
    module = Of(lambda m, x: (barrier.wait(), m.fc(x))[1])
    assert EagerOnly(module, [0, 1, 2])(torch.ones(3, 4)).shape == (3, 3)


def test_a_single_replica_runs_in_the_calling_thread() -> None:
    found = []
    module = Of(lambda m, x: (found.append(threading.current_thread()), m.fc(x))[1])
    EagerOnly(module, [0, 1])(torch.ones(1, 4))
    assert found == [threading.current_thread()]


def test_no_thread_stays() -> None:
    before = threading.active_count()
    asked_in_replicas(lambda: None)
    assert threading.active_count() == before
