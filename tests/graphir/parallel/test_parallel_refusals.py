"""What cannot be done in parallel is refused: of torch's type, and saying what, where and what to do."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphir
from graphir import parallel


class Of(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def x(n: int = 4) -> Tensor:
    return torch.ones(n, 2)


def gathered(make: Callable[[Tensor], Any], **options: Any) -> Any:
    """The output of a module on three rows, two in replica 0 and one in replica 1."""
    return graphir.DataParallel(Of(make), [0, 1], **options)(x(3))


REFUSED: dict[str, tuple[type[Exception], Callable[[], Any], str]] = {
    "no devices": (IndexError, lambda: graphir.DataParallel(nn.Linear(2, 2), []), r"device_ids is empty\n.*\n  fix"),
    "no devices, as a ValueError": (ValueError, lambda: graphir.DataParallel(nn.Linear(2, 2), []), "is empty"),
    "no module": (
        TypeError,
        lambda: graphir.DataParallel([nn.Linear(2, 2)], [0, 1]),  # type: ignore[arg-type]
        r"the module is a list, not an nn.Module\n  in   DataParallel\(...\)",
    ),
    "a device twice": (
        ValueError,
        lambda: graphir.DataParallel(nn.Linear(2, 2), [0, 1, 0]),
        r"device_ids: 0 is named twice\n  in   DataParallel\(...\)\n  fix  give distinct devices",
    ),
    "a device twice, written differently": (
        ValueError,
        lambda: graphir.DataParallel(nn.Linear(2, 2), [1, "gpu:1"]),
        "1 is named twice",
    ),
    "a number that no device has": (
        ValueError,
        lambda: graphir.DataParallel(nn.Linear(2, 2), [0, 10**20]),
        r"'gpu:100000000000000000000' is not a device\n  in   DataParallel\(...\)\n  fix  give distinct devices",
    ),
    "the host as a replica's device": (
        ValueError,
        lambda: graphir.DataParallel(nn.Linear(2, 2), [0, -1]),
        "device_ids: -1 is no device for a replica",
    ),
    "one device, not in a list": (
        ValueError,
        lambda: graphir.DataParallel(nn.Linear(2, 2), 1),
        r"device_ids is 1, not a list\n.*\n  fix  write \[1\]",
    ),
    "no device": (ValueError, lambda: graphir.DataParallel(nn.Linear(2, 2), ["tpu:1"]), "'tpu:1' is no device"),
    "a boolean": (ValueError, lambda: graphir.DataParallel(nn.Linear(2, 2), [True]), "True is no device"),
    "an output device that is none": (
        ValueError,
        lambda: graphir.DataParallel(nn.Linear(2, 2), [0, 1], "here"),
        "output_device: 'here' is no device",
    ),
    "an unknown binding": (
        ValueError,
        lambda: graphir.DataParallel(nn.Linear(2, 2), [0, 1], binding="tpu"),
        r"binding 'tpu' is not supported\n  in   DataParallel",
    ),
    "a binding of another device": (
        ValueError,
        lambda: graphir.DataParallel(nn.Linear(2, 2), [0, 1], binding={0: "cpu", 1: "cpu", 5: "cpu"}),
        r"binding: 5 is none of the devices\n.*\n  fix  device_ids: gpu:0, gpu:1",
    ),
    "a binding without a device": (
        ValueError,
        lambda: graphir.DataParallel(nn.Linear(2, 2), [0, 1], binding={0: "cpu"}),
        "gpu:1 has no place",
    ),
    "GPUs where there are none": (
        ValueError,
        lambda: graphir.DataParallel(nn.Linear(2, 2), [0, 1], binding="cuda"),
        "there is no CUDA device here",
    ),
    "a parameter elsewhere": (
        RuntimeError,
        lambda: graphir.DataParallel(nn.Linear(2, 2, device="meta"), [0, 1])(x()),
        r"on device cpu \(device_ids\[0\]\) but found .* on device: meta\n  in   .*forward, weight\n  fix  .*to\(",
    ),
    "an input without data": (
        RuntimeError,
        lambda: graphir.DataParallel(nn.Linear(2, 2), [0, 1])(x().to("meta")),
        r"a tensor without data cannot be split: \(4, 2\) torch.float32 on meta",
    ),
    "an input without dimensions": (
        RuntimeError,
        lambda: graphir.DataParallel(nn.Linear(2, 2), [0, 1])(torch.tensor(1.0)),
        r"a tensor without dimensions cannot be split: \(\) torch.float32 on cpu",
    ),
    "an input without the dimension": (
        IndexError,
        lambda: graphir.DataParallel(nn.Linear(2, 2), [0, 1], dim=2)(x()),
        r"a tensor has no dimension 2 to split: \(4, 2\)",
    ),
    "a number as output": (
        TypeError,
        lambda: gathered(lambda x: {"loss": [3]}),
        r"output\['loss'\]\[0\] is of type int, which cannot be gathered",
    ),
    "outputs of other structure": (
        TypeError,
        lambda: gathered(lambda x: x if len(x) == 2 else None),
        "output is a tensor in replica 0 and of type NoneType in replica 1",
    ),
    "outputs of other length": (
        ValueError,
        lambda: gathered(lambda x: (x,) * len(x)),
        "output has length 2 in replica 0 and 1 in replica 1",
    ),
    "outputs with other keys": (
        ValueError,
        lambda: gathered(lambda x: {str(len(x)): x}),
        r"output: all dicts must have the same keys, but replica 0 has \[\"'2'\"\] and replica 1 \[\"'1'\"\]",
    ),
    "outputs of other shapes": (
        RuntimeError,
        lambda: gathered(lambda x: (x.t(),)),
        r"output\[0\] cannot be put together along dimension 0: \(2, 2\), \(2, 1\)",
    ),
    "scalars along another dimension": (
        IndexError,
        lambda: graphir.DataParallel(Of(lambda x: x.sum()), [0, 1], dim=1)(x(2)),
        r"output has no dimension 1 to be gathered along: \(\), \(\)",
    ),
    "a ScriptModule": (
        RuntimeError,
        lambda: graphir.DataParallel(nn.Sequential(torch.jit.script(nn.Linear(2, 2))), [0, 1])(x()),
        "cannot replicate a ScriptModule: 0\n",
    ),
    "a lazy module": (
        RuntimeError,
        lambda: graphir.DataParallel(nn.LazyLinear(2), [0, 1])(x()),
        "cannot replicate weight, which has no shape yet",
    ),
    "keyword arguments for fewer replicas": (
        AssertionError,
        lambda: graphir.DataParallel(Of(lambda x, y=0: x + y), [0, 1])(x(), y=x(1)),
        "there are 2 modules and 1 kwargs",
    ),
    "a capture": (
        Exception,
        lambda: graphir.capture(graphir.DataParallel(nn.Linear(2, 2), [0, 1]), (x(),)),
        "a DataParallel cannot be captured",
    ),
    "no DataParallel to patch": (
        TypeError,
        lambda: graphir.patch_replication_callback(nn.Linear(2, 2)),  # type: ignore[arg-type]
        "Linear is no torch.nn.DataParallel",
    ),
    "copies of different modules": (
        ValueError,
        lambda: graphir.exec_data_parallel_replication_callback([nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))]),
        "copy 0 has 1 module and copy 1 has 2",
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused(name: str) -> None:
    kind, call, text = REFUSED[name]
    with pytest.raises(kind, match=text) as caught:
        call()
    assert isinstance(caught.value, graphir.GraphirError)
    assert "\n  fix  " in str(caught.value)


@pytest.mark.filterwarnings("ignore")
def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(
        RuntimeError, match=r"there is no GPU 2 here\n.*GPUs: 2\n  fix  binding=\{'gpu:2': 'cuda:0'"
    ) as e:
        graphir.DataParallel(nn.Linear(2, 2), [0, 2])
    assert isinstance(e.value, graphir.ReplicationError)


def test_left_over_rows_are_told() -> None:
    wrapped = graphir.DataParallel(Of(lambda x, y: x + y), [0, 1])
    with pytest.warns(UserWarning, match="split into 1 share along dimension 0, others into 2"):
        assert wrapped(x(), x(1)).shape == (2, 2)


def failing(error: BaseException) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        if len(x) == 1:
            raise error
        return x

    return forward


def test_an_exception_of_a_replica_names_it_and_is_the_cause() -> None:
    error = ZeroDivisionError("here")
    with pytest.raises(ZeroDivisionError, match=re.escape("in replica 1 on device gpu:4 (cpu)")) as caught:
        graphir.DataParallel(Of(failing(error)), [3, 4])(x(3))
    assert caught.value.__cause__ is error
    assert "in forward" in str(caught.value)


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_exceptions_that_end_programs_are_raised_too(kind: type[BaseException]) -> None:
    with pytest.raises(kind):
        graphir.DataParallel(Of(failing(kind("stop"))), [0, 1])(x(3))


def test_of_a_replica_that_fails_and_one_that_waits_for_it_the_first_is_told() -> None:
    norm = parallel.SynchronizedBatchNorm1d(2)

    def forward(module: Any, x: Tensor) -> Tensor:
        if len(x) == 2:
            return module.norm(x)
        raise LookupError("no such row")

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = norm

        def forward(self, x: Tensor) -> Tensor:
            return forward(self, x)

    with pytest.raises(LookupError, match="no such row"):
        graphir.DataParallel(Net(), [0, 1])(x(3))


def test_an_interrupt_sends_waiting_replicas_home() -> None:
    norm = parallel.SynchronizedBatchNorm1d(2)
    interrupted = threading.Event()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = norm

        def forward(self, x: Tensor) -> Tensor:
            if len(x) == 1:
                os.kill(os.getpid(), signal.SIGINT)
                assert interrupted.wait(60)  # until the calling thread is in its handler
            return self.norm(x)

    def handler(*args: Any) -> None:
        interrupted.set()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            graphir.DataParallel(Net(), [0, 1])(x(3))
    finally:
        signal.signal(signal.SIGINT, before)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("graphir replica")]
