"""What makes two runs on CUDA give the same bits; the settings are the process's, so they are shown without a GPU."""

from __future__ import annotations

import os
import threading
import time
from contextlib import ExitStack, contextmanager
from typing import Any

import models
import pytest
import torch
from graphir.runtime import Session
from graphir.runtime.cuda.streams import TorchCuda
from graphir.runtime.kernels import repeatable as kernels
from graphir.runtime.kernels.bindings import fastest
from graphir.runtime.kernels.repeatable import REPEATABLE, repeatable, unrepeatable
from graphir.runtime.machine.openmp import in_threads
from graphir.runtime.machine.surroundings import neutral
from runnable import captured
from small import program_of
from torch import Tensor

from graphir import passes
from graphir.ir.device import gpu
from graphir.ir.opset import overload, signature


def settings() -> tuple[Any, ...]:
    memory: Any = torch.utils.deterministic
    cudnn = torch._C._get_cudnn_deterministic(), torch._C._get_cudnn_benchmark()
    return torch.get_deterministic_debug_mode(), memory.fill_uninitialized_memory, *cudnn


def test_the_mode_is_on_within_and_as_it_was_afterwards() -> None:
    before = settings()
    with pytest.raises(KeyError), repeatable():
        assert settings()[:2] == (1, False)
        raise KeyError
    assert settings() == before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_process_forked_meanwhile_has_the_settings_of_before() -> None:
    before, within, leave = settings(), threading.Event(), threading.Event()

    def use() -> None:
        with repeatable():
            within.set()
            leave.wait(20)

    thread = threading.Thread(target=use)
    thread.start()
    within.wait()
    child = os.fork()
    if child == 0:
        if settings() != before:
            os._exit(2)
        with repeatable():
            os._exit(0 if settings()[0] == 1 else 1)
    leave.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_two_threads_leave_the_mode_as_it_was() -> None:
    before, inside, leave = settings(), threading.Event(), threading.Event()

    def first() -> None:
        with repeatable():
            inside.set()
            leave.wait()

    def second() -> None:
        with repeatable():
            last.wait(0.2)

    last = threading.Event()
    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    threads[0].start()
    inside.wait()
    threads[1].start()
    last.wait(0.05)  # the second one comes upon the first one's mode
    leave.set()
    threads[0].join()
    last.set()
    threads[1].join()
    assert settings() == before


def test_a_stricter_mode_of_the_users_stays() -> None:
    torch.set_deterministic_debug_mode("error")
    try:
        with repeatable():
            assert settings()[:2] == (2, False)
    finally:
        torch.set_deterministic_debug_mode("default")


@pytest.mark.parametrize("type", REPEATABLE)
def test_kernels_are_called_so_on_cuda_and_some_on_the_host_in_one_thread(
    type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert signature(type)  # this torch has it
    seen: list[tuple[str, int, int]] = []
    called = lambda name: lambda *_, **__: seen.append((name, settings()[0], torch.get_num_threads()))  # noqa: E731
    monkeypatch.setattr(kernels, "overload", called)
    tensor, puts = torch.ones(3), "index_put" in type
    with in_threads(2):
        fastest(type)(tensor, [], tensor, False)
        inner = "aten.index_put_.default" if puts else type
        assert seen.pop() == (inner, 0, 1 if puts else 2)
        monkeypatch.setattr(Tensor, "is_cuda", True)
        fastest(type)(tensor, [], tensor, False)
        assert seen.pop() == (type, 1, 2)
        fastest(type)(tensor, [], tensor, True)
        assert seen.pop() == (type, 0 if puts else 1, 2)  # what accumulates is sorted there in any case


@pytest.mark.parametrize("type", ["index_put", "_unsafe_index_put", "index_put_"])
@pytest.mark.parametrize("accumulate", [True, False])
def test_the_bits_on_the_host_are_those_of_torchs_deterministic_mode(type: str, accumulate: bool) -> None:
    random = torch.Generator().manual_seed(0)
    table, rows = torch.randn(7, 33, generator=random), torch.randint(7, (64 * 128,), generator=random)
    values, name = torch.randn(64 * 128, 33, generator=random), f"aten.{type}.default"
    torch.use_deterministic_algorithms(True)
    try:
        expected = overload(name)(table.clone(), [rows], values, accumulate)
    finally:
        torch.use_deterministic_algorithms(False)
    given = table.clone()
    with in_threads(2):
        found = fastest(name)(given, [rows], values, accumulate)
    assert torch.equal(found, expected)
    assert torch.equal(given, found if type.endswith("_") else table)


def test_an_operator_of_another_thread_is_not_refused_meanwhile() -> None:
    """It is warned of at most: the debug mode that refuses is never set."""
    modes: list[int] = []
    stop = threading.Event()

    def watch() -> None:
        while not stop.is_set():
            modes.append(torch.get_deterministic_debug_mode())

    thread = threading.Thread(target=watch)
    thread.start()
    end = time.monotonic() + 20
    while modes.count(1) < 20 and time.monotonic() < end:
        with repeatable():
            time.sleep(0)
    stop.set()
    thread.join(20)
    assert set(modes) == {0, 1}


@pytest.mark.parametrize("executor", ["reference", "serial"])
def test_two_runs_on_the_host_have_the_same_bits(executor: Any) -> None:
    """Eager PyTorch's do not where several threads add into the same rows."""
    torch.manual_seed(0)
    table, rows = torch.nn.Parameter(torch.randn(7, 33)), torch.randint(7, (64, 128))

    class Rows(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = table

        def forward(self, x: Tensor) -> Tensor:
            return self.table[x]

    example = models.Example(Rows(), (rows,), (torch.randn(64, 128, 33),), torch.nn.functional.mse_loss)
    program = captured(example)
    plan = passes.emit(program)
    with Session(plan, program.state, binding="cpu", executor=executor, threads=2) as session:
        found = []
        for _ in range(20):
            session.step(*example.inputs, *example.targets)
            found.append(session.gradients()["table"])
    assert all(torch.equal(found[0], other) for other in found)


def test_steps_of_two_threads_leave_cudnn_as_it_was() -> None:
    """Each saw the other's, and put that back."""
    before = settings()
    with ExitStack() as one, ExitStack() as other:
        one.enter_context(neutral(1, ("cuda",)))
        thread = threading.Thread(target=lambda: other.enter_context(neutral(1, ("cuda",))))
        thread.start()
        thread.join(20)
        assert not thread.is_alive()  # equal settings overlap
        one.close()
        assert settings()[2:] == (True, False)
    assert settings() == before


def test_convolutions_are_the_same_in_each_run_where_devices_are_cuda() -> None:
    before = settings()
    with neutral(1, ("cpu",)):
        assert settings() == before
    with neutral(1, ("cpu", "cuda")):
        assert settings()[2:] == (True, False)
    assert settings() == before


def test_what_stays_open() -> None:
    net = program_of(
        """
        input x : f32[3] @gpu:0
        a : f32[3] @gpu:0 = aten.cumsum.default(x, dim=0)
        output a
        """
    ).step
    assert unrepeatable(net, {gpu(0): torch.device("cuda:0")}) == ["aten.cumsum.default"]
    assert unrepeatable(net, {gpu(0): torch.device("cpu")}) == []


@pytest.mark.parametrize("finds", [False, True])
def test_what_a_graph_has_of_generators_is_for_any_mode(finds: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch keeps the memory of a seed for all graphs of a generator, and others fill it outside of inference."""
    seen: list[tuple[str, bool]] = []

    class Graph:
        def register_generator_state(self, generator: object) -> None:
            seen.append(("register", torch.is_inference_mode_enabled()))

    @contextmanager
    def graph(captured: Graph, **options: Any) -> Any:
        assert options == {"stream": "gate", "capture_error_mode": "thread_local"}
        seen.append(("begin", torch.is_inference_mode_enabled()))
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr("graphir.runtime.cuda.streams._FINDS_GENERATORS", "0" if finds else "99")  # versions of torch
    with torch.inference_mode(), TorchCuda().capture("gate", [torch.Generator()]):  # type: ignore[arg-type]
        seen.append(("captured", torch.is_inference_mode_enabled()))
    registered = [] if finds else [("register", False)]
    assert seen == [*registered, ("begin", False), ("captured", True)]
