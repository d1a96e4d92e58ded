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
from graphir.passes import emit
from graphir.runtime import Session
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.modules import module as module_hooks

import graphir
from graphir.capturing.capture import capture
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


def test_torchs_random_numbers_of_other_threads_neither_refuse_a_step_nor_come_again() -> None:
    model, x = Captured(lambda: time.sleep(0.002)), torch.randn(4, 8)
    drawn: list[float] = []
    over = threading.Event()

    def draw() -> None:
        torch.manual_seed(5)
        while not over.is_set():
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


@pytest.mark.parametrize("draws", [1, 10**9], ids=["once", "all the time"])
def test_draws_of_another_thread_are_its_own_once_and_refuse_a_step_if_they_go_on(draws: int) -> None:
    """Nobody can tell who draws. A step that draws itself is refused in test_capture_refusals.py."""
    drawn = 0

    class Slow(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            nonlocal drawn
            if drawn < draws:
                thread = threading.Thread(target=random.random)
                thread.start()
                ended(thread)
                drawn += 1
            return x.exp()

    if draws == 1:
        capture(Slow(), (torch.randn(3),))
        return
    with pytest.raises(CaptureError, match="draws from Python's random") as error:
        capture(Slow(), (torch.randn(3),))
    assert "let no other thread draw during a capture" in error.value.fix


def test_other_threads_that_read_the_module_see_no_fake() -> None:
    torch.manual_seed(0)
    model, x = Captured().eval(), torch.randn(4, 8)
    alone = captured(model, x)

    def read() -> list[bool]:
        plain = [type(p) is nn.Parameter for p in model.parameters()]
        state = [type(t) is Tensor for t in model.state_dict().values()]
        copied = [type(p) is nn.Parameter for p in copy.deepcopy(model.layers).parameters()]
        shown = [type(model.out.weight) is nn.Parameter, len(model.out._parameters) == 2]
        return [all(plain), all(state), all(copied), *shown]

    model.pause[0] = lambda: time.sleep(0.001)
    with Others({"read": read}) as others:
        found = [captured(model, x) for _ in range(4)]
    assert not others.wrong, others.wrong[:3]
    assert found == [alone] * 4 and all(others.done.values())
    assert all(others.expected["read"])


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
    with pytest.raises(CaptureError, match="'weight' was replaced by another tensor during the capture"):
        capture(Waits(), (torch.randn(3, 8),))
    ended(thread)
    assert model.weight is new and type(model.late) is Tensor and type(model._parameters) is dict
    capture(Waits(), (torch.randn(3, 8),))


ANOTHER = "another thread runs the module {} while it is captured\n"


def test_a_call_that_has_begun_in_another_thread_refuses_a_capture() -> None:
    inside, go_on = threading.Event(), threading.Event()

    class Waits(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if threading.current_thread() is not threading.main_thread():
                inside.set()
                assert go_on.wait(60)
            return x.relu()

    model = Waits()
    thread = threading.Thread(target=model, args=(torch.ones(2),))
    thread.start()
    assert inside.wait(60)
    with pytest.raises(CaptureError, match=ANOTHER.format("Waits")) as error:
        capture(model, (torch.ones(2),))
    assert "hold a lock around the capture and around each call of the module" in error.value.fix
    go_on.set()
    ended(thread)
    capture(model, (torch.ones(2),))


@pytest.mark.parametrize("part", [False, True], ids=["the module", "a part"])
def test_a_call_in_another_thread_meanwhile_gives_its_result_and_refuses_the_capture(part: bool) -> None:
    results: list[Tensor] = []
    model, x = Captured().eval(), torch.randn(4, 8)
    called = model.layers[0] if part else model
    expected = called(x)

    def once() -> None:
        if not results and threading.current_thread() is threading.main_thread():
            thread = threading.Thread(target=lambda: results.append(called(x)))
            thread.start()
            ended(thread)

    model.pause[0] = once
    with pytest.raises(CaptureError, match=ANOTHER.format("Captured")):
        captured(model, x)
    assert torch.equal(results[0], expected)
    captured(model, x)


def test_a_witness_that_another_thread_disturbs_asks_again() -> None:
    disturbed: list[bool] = []
    model, x = Captured().eval(), torch.randn(4, 8)
    program = capture(model, (x,))

    def once() -> None:
        if disturbed:
            thread = threading.Thread(target=model.layers[0], args=(x,))
            disturbed.clear()
            thread.start()
            ended(thread)

    model.pause[0] = once
    with Session(emit(program), program.state, witness=program) as session:
        disturbed.append(True)
        with pytest.raises(CaptureError, match=ANOTHER.format("Captured")):
            session.step(torch.randn(9, 8))
        session.step(torch.randn(9, 8))


class Spread(nn.Module):
    """Runs a part of itself in a thread of its own."""

    def __init__(self, given: bool) -> None:
        super().__init__()
        self.fc, self.given = nn.Linear(2, 2), given

    def forward(self, x: Tensor) -> Tensor:
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(self.fc(x if self.given else torch.ones(3, 2))))
        thread.start()
        ended(thread)
        return found[0]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("given", [True, False], ids=["with its tensors", "with others"])
def test_a_step_that_runs_a_part_of_itself_in_another_thread_is_refused(given: bool) -> None:
    with pytest.raises(CaptureError, match=ANOTHER.format("Spread")) as error:
        capture(Spread(given), (torch.ones(3, 2),))
    assert "let the forward of the module run its submodules in one thread" in error.value.fix


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
