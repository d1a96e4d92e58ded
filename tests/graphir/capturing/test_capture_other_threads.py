"""Other threads while a step is captured: their calls give what they give alone, and so does the capture."""

from __future__ import annotations

import builtins
import copy
import functools
import hashlib
import io
import os
import pickle
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.modules import module as module_hooks

import graphir
from graphir.capturing.capture import capture
from graphir.capturing.isolate import gate as gates
from graphir.errors import CaptureError


class Own:
    def __len__(self) -> int:
        return 7


class Captured(nn.Module):
    """Sets an attribute, draws, tests its sizes and reads its buffers; *pause* is called between its lines."""

    def __init__(self, pause: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()) for _ in range(4)])
        self.out, self.pause = nn.Linear(8, 2), [pause]
        self.seen: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            self.pause[0]()
            x = layer(x)
            self.seen = x
        if x.shape[0] > 100:
            x = x.relu()
        self.pause[0]()
        return self.out(x)


class Hooked(nn.Module):
    """Another module with hooks of its own, on itself and on gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.fc = nn.Linear(3, 3)
        self.fc.register_forward_hook(lambda *args: self.calls.append("forward"))
        self.fc.register_full_backward_hook(lambda *args: self.calls.append("backward"))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x).tanh()


def forward_backward() -> tuple[str, list[str]]:
    generator = torch.Generator().manual_seed(1)
    model = Hooked()
    x = torch.randn(5, 3, generator=generator, requires_grad=True)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator))
    model(x).square().sum().backward()
    digest = hashlib.sha256(b"".join(p.grad.numpy().tobytes() for p in (x, *model.parameters())))
    return digest.hexdigest(), model.calls


def fakes() -> tuple[Any, ...]:
    with FakeTensorMode():
        x = torch.zeros(3, 4)
        made = (x[1:] @ x.T).split(1)
        sizes = [(tuple(t.shape), type(t.shape[0]), t.stride(), type(t) is FakeTensor) for t in made]
    return sizes, len(x), torch.numel(x), isinstance(x, torch._subclasses.FakeTensor)


@functools.cache
def table(length: int) -> Tensor:
    return torch.arange(length) * 2


def formatted() -> str:
    return traceback.format_list(traceback.extract_stack()[-1:])[0].partition("\n")[2].strip()


def own_numbers() -> list[float]:
    mine = random.Random(3)
    return [mine.random() for _ in range(3)]


TABLE = table(5)
WHAT_THEY_DO: dict[str, Callable[[], Any]] = {
    "pickle of a range": lambda: pickle.dumps(range(3)),
    "len": lambda: (len(Own()), len([1]), type(range(2)), isinstance(range(2), range)),
    "range": lambda: list(range(2, 9, 3)),
    "forward and backward": forward_backward,
    "fakes": fakes,
    "cache": lambda: (table(5) is TABLE, table(5).tolist()),
    "numbers": lambda: (torch.ones(3).tolist(), torch.ones(2).numpy().sum(), f"{torch.ones(()):.2f}"),
    "moves": lambda: (torch.ones(2).to("meta").device.type, torch.ones(2).to(torch.float64).dtype),
    "singular values": lambda: torch.linalg.svdvals(torch.eye(3) * 2).tolist(),
    "saved": lambda: torch.load(io.BytesIO(saved()), weights_only=True)["w"].tolist(),
    "copied": lambda: copy.deepcopy(nn.Linear(2, 2)).weight.shape,
    "converted": lambda: nn.Linear(2, 2).half().weight.dtype,
    "own numbers": own_numbers,
    "stack": formatted,
    "names": lambda: pickle.dumps([torch.get_rng_state, torch.numel, nn.Module._apply]),
    "anomalies": lambda: torch.is_anomaly_enabled(),
    "settings": lambda: (torch.get_default_dtype(), torch.is_grad_enabled(), sys.getswitchinterval()),
}


def saved() -> bytes:
    file = io.BytesIO()
    torch.save({"w": torch.ones(2)}, file)
    return file.getvalue()


class Others:
    """Threads that call functions over and over while something else runs, and compare the results."""

    def __init__(self, calls: dict[str, Callable[[], Any]]) -> None:
        self.expected = {name: call() for name, call in calls.items()}
        self.wrong: list[str] = []
        self.done = dict.fromkeys(calls, 0)
        self._calls, self._over = calls, threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(seed,), daemon=True) for seed in range(3)]

    def _run(self, seed: int) -> None:
        order = random.Random(seed)
        while not self._over.is_set():
            name = order.choice(list(self._calls))
            try:
                result = self._calls[name]()
            except Exception as e:
                result = e
            self.done[name] += 1
            if isinstance(result, Exception) or result != self.expected[name]:
                self.wrong.append(f"{name}: {result!r}, not {self.expected[name]!r}")

    def __enter__(self) -> Others:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        ended(*self._threads)


def ended(*threads: threading.Thread) -> None:
    """Wait for threads, which end."""
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def captured(model: nn.Module, x: Tensor) -> str:
    loss = nn.functional.mse_loss
    return graphir.show(capture(model, (x,), targets=(torch.zeros(len(x), 2),), loss=loss), source=True)


def test_what_other_threads_call_gives_what_it_gives_alone() -> None:
    torch.manual_seed(0)
    order = random.Random(0)
    model, x = Captured(), torch.randn(4, 8)
    alone = captured(model, x)
    model.pause[0] = lambda: time.sleep(order.choice([0, 0, 0.001]))
    with Others(WHAT_THEY_DO) as others:
        found = [captured(model, x) for _ in range(3)]
    assert not others.wrong, others.wrong[:3]
    assert found == [alone] * 3
    assert sum(count > 0 for count in others.done.values()) > len(others.done) // 2


def test_random_numbers_of_other_threads_neither_refuse_a_step_nor_come_again() -> None:
    model, x = Captured(lambda: time.sleep(0.002)), torch.randn(4, 8)
    drawn: list[float] = []
    over = threading.Event()

    def draw() -> None:
        torch.manual_seed(5)
        while not over.is_set():
            random.random()
            drawn.extend(torch.rand(2).tolist())

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        for _ in range(2):
            captured(model, x)
    finally:
        over.set()
        ended(thread)
    assert drawn
    torch.manual_seed(5)
    expected = [number for _ in range(len(drawn) // 2) for number in torch.rand(2).tolist()]
    assert drawn == expected


@pytest.mark.parametrize("others_draw", [False, True], ids=["idle", "drawing"])
def test_a_step_that_draws_is_refused_beside_other_threads_too(others_draw: bool) -> None:
    class Draws(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.exp() * random.random()  # here

    over = threading.Event()

    def other() -> None:
        while not over.wait(0 if others_draw else 0.01):
            random.random()

    thread = threading.Thread(target=other)
    thread.start()
    try:
        with pytest.raises(CaptureError, match="draws from Python's random") as error:
            capture(Draws(), (torch.randn(3),))
    finally:
        over.set()
        ended(thread)
    assert "test_capture_other_threads.py:" in error.value.where


def test_the_module_in_other_threads_waits_and_sees_no_fake() -> None:
    torch.manual_seed(0)
    model, x = Captured().eval(), torch.randn(4, 8)
    alone = captured(model, x)
    for _ in range(3):
        model(x)

    def run() -> list[bool]:
        result = model(x)
        return [torch.equal(result, expected), type(result) is Tensor, type(model.seen) is Tensor]

    def read() -> list[bool]:
        plain = [type(p) is nn.Parameter for p in model.parameters()]
        state = [type(t) is Tensor for t in model.state_dict().values()]
        return [all(plain), all(state), type(model.out.weight) is nn.Parameter, len(model.out._parameters) == 2]

    expected = model(x).detach()
    calls: dict[str, Callable[[], Any]] = {"run": run, "part": lambda: type(model.layers[0](x)) is Tensor, "read": read}
    model.pause[0] = lambda: time.sleep(0.001)
    with Others(calls) as others:
        found = [captured(model, x) for _ in range(4)]
    assert not others.wrong, others.wrong[:3]
    assert found == [alone] * 4 and all(others.done.values())
    assert all(others.expected["run"]) and all(others.expected["read"])


def test_what_other_threads_write_into_the_module_stays() -> None:
    model = nn.Linear(8, 2)
    new, inside, go_on = nn.Parameter(torch.ones(2, 8)), threading.Event(), threading.Event()

    class Waits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = model

        def forward(self, x: Tensor) -> Tensor:
            inside.set()
            assert go_on.wait(60)
            return self.fc(x)

    def write() -> None:
        assert inside.wait(60)
        model.weight = new
        model.register_buffer("late", torch.ones(1))
        go_on.set()

    thread = threading.Thread(target=write)
    thread.start()
    with pytest.raises(CaptureError, match="another tensor has taken the place of 'weight'"):
        capture(Waits(), (torch.randn(3, 8),))
    ended(thread)
    assert model.weight is new and type(model.late) is Tensor and type(model._parameters) is dict
    capture(Waits(), (torch.randn(3, 8),))


def test_a_capture_waits_for_a_call_that_has_begun() -> None:
    inside, go_on, order = threading.Event(), threading.Event(), []

    class Waits(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if threading.current_thread() is not threading.main_thread():
                inside.set()
                assert go_on.wait(60)
                order.append("call ends")
            return x.relu()

    model = Waits()
    thread = threading.Thread(target=model, args=(torch.ones(2),))
    thread.start()
    assert inside.wait(60)
    threading.Timer(0.2, go_on.set).start()
    capture(model, (torch.ones(2),))
    order.append("captured")
    ended(thread)
    assert order == ["call ends", "captured"]


def test_a_call_that_does_not_end_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "PATIENCE_SECONDS", 0.1)
    inside, go_on = threading.Event(), threading.Event()

    class Waits(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            inside.set()
            assert go_on.wait(60)
            return x.relu()

    model = Waits()
    thread = threading.Thread(target=model, args=(torch.ones(2),))
    thread.start()
    assert inside.wait(60)
    with pytest.raises(CaptureError, match="another thread has been running the module Waits for"):
        capture(model, (torch.ones(2),))
    go_on.set()
    ended(thread)


class Spread(nn.Module):
    """Runs a part of itself in a thread of its own."""

    def __init__(self, given: bool) -> None:
        super().__init__()
        self.fc, self.given = nn.Linear(2, 2), given

    def forward(self, x: Tensor) -> Tensor:
        found: list[Any] = []

        def run() -> None:
            try:
                found.append(self.fc(x if self.given else torch.ones(3, 2)))
            except CaptureError as e:
                found.append(e)

        thread = threading.Thread(target=run)
        thread.start()
        ended(thread)
        if isinstance(found[0], CaptureError):
            raise found[0]
        return found[0]


@pytest.mark.parametrize("given", [True, False], ids=["with its tensors", "with others"])
def test_a_step_that_waits_for_another_thread_of_its_own_is_refused(
    given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gates, "STUCK_SECONDS", 0.3)
    with pytest.raises(CaptureError, match="the module Spread is being captured in another thread, and it"):
        capture(Spread(given), (torch.ones(3, 2),))


def everything() -> dict[str, dict[str, Any]]:
    """What torch's modules and classes, and Python's, hold; a thread sees by it what others have replaced."""
    owners = {
        "builtins": builtins, "torch": torch, "torch.random": torch.random, "torch.linalg": torch.linalg,
        "random": random, "hooks": module_hooks, "torch._subclasses": torch._subclasses, "os": os,
    }  # fmt: skip
    classes = (torch.Tensor, FakeTensor, nn.Module, nn.Parameter)
    found = {name: {key: getattr(owner, key, None) for key in dir(owner)} for name, owner in owners.items()}
    found |= {kind.__name__: {key: getattr(kind, key, None) for key in dir(kind)} for kind in classes}
    found["hooks"] = {key: dict(value) for key, value in found["hooks"].items() if isinstance(value, dict)}
    del found["hooks"]["__builtins__"]
    return found


def test_another_thread_finds_every_attribute_as_it_was() -> None:
    before, seen = everything(), []

    def look() -> None:
        seen.append(everything())

    class Looked(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            thread = threading.Thread(target=look)
            thread.start()
            ended(thread)
            return torch.utils.checkpoint.checkpoint(torch.tanh, x * 2, use_reentrant=False)

    capture(Looked(), (torch.ones(3, requires_grad=True),), targets=(), loss=lambda out: out.sum())
    assert seen[0]["builtins"].pop("print").__wrapped__ is print and before["builtins"].pop("print") is print
    for found in (*seen, everything()):
        for owner, attributes in before.items():
            for key, value in attributes.items():
                now = found[owner].get(key)
                same = now is value or now == value or key in _BOUND or key in _COUNTERS
                assert same, f"{owner}.{key}"


_COUNTERS = {"_global_hook_id", "environ"}
_BOUND = {"__dict__", "__weakref__", "__doc__", "__subclasshook__", "__init_subclass__", "__class__"}
