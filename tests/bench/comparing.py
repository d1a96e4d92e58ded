"""What steps of the way from a module to a trained one take, beside another checkout, such as a worktree of a commit.

Each side is a process of its own, which imports its checkout and that checkout's models, and makes one kind of step. A
second process of the other checkout takes turns with them: how far it is from the first says what a ratio is worth.
"""

from __future__ import annotations

import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import Final, TypeAlias

import models
import nets
import torch
from apart import apart, serve
from limits import limited
from timing import in_turn

import graphir
from graphir import passes, runtime

__all__ = ["compared", "rows"]

ROUNDS = 9
SECONDS = 0.1
"""At least, of what is timed at once."""

ALLOWED = 0.05
"""A step may take longer by this part, or by as much as the other checkout differs from itself."""

Step: TypeAlias = Callable[[], object]

RESNET: Final = partial(models.resnet50, batch=2, image=64)
GPT: Final = partial(models.gpt, layers=12)


@cache
def _captured(make: Callable[[], models.Example]) -> graphir.Program:
    example = make()
    optimizer = torch.optim.SGD(example.model.parameters(), lr=0.1, momentum=0.9)
    return graphir.capture(
        example.model, inputs=example.inputs, targets=example.targets, loss=example.loss, optimizer=optimizer
    )


def _passes(make: Callable[[], models.Example], replicas: int) -> list[passes.Pass]:
    """Replicating, shifting half of the activations, and injecting copies."""
    chosen = passes.find_activations(_captured(make))
    shifts = {replica: replicas + replica for replica in range(replicas)}
    return [
        passes.Replicate(devices=tuple(range(replicas))),
        passes.ShiftActivations(activations=tuple(chosen[len(chosen) // 2 :]), shifts=shifts),
        passes.InjectCopies(),
    ]


@cache
def _programs(make: Callable[[], models.Example], replicas: int) -> list[graphir.Program]:
    """As captured, and after each of these passes."""
    found = [_captured(make)]
    for step in _passes(make, replicas):
        found.append(step.recorded(found[-1]))
    return found


def _placed(make: Callable[[], models.Example], replicas: int) -> graphir.Program:
    return _programs(make, replicas)[-1]


def _capture(make: Callable[[], models.Example]) -> Step:
    return lambda: (_captured.cache_clear(), _captured(make))


def _pass(position: int) -> Step:
    return partial(_passes(RESNET, 8)[position].recorded, _programs(RESNET, 8)[position])


def _certify(make: Callable[[], models.Example], replicas: int) -> Step:
    return partial(graphir.certify, _programs(make, replicas)[1], _placed(make, replicas))


def _random() -> Step:
    program = nets.random_program(1, ops=400)
    return partial(graphir.certify, program, passes.share_storage(program))


def _file() -> Path:
    return Path(tempfile.mkdtemp()) / "program.json"


def _load() -> Step:
    path = _file()
    _placed(RESNET, 8).save(path)
    return partial(graphir.load, path)


def _session(make: Callable[[], models.Example]) -> runtime.Session:
    program = _captured(make)
    return runtime.Session(passes.emit(program), program.state, binding="cpu", executor="serial", threads=1)


def _step() -> Step:
    example = models.gpt(batch=8)
    return partial(_session(partial(models.gpt, batch=8)).step, *example.inputs, *example.targets)


STEPS: Mapping[str, Callable[[], Step]] = {
    "capture an MLP": lambda: _capture(models.mlp),
    "capture ResNet-50": lambda: _capture(RESNET),
    "capture a GPT of 12 layers": lambda: _capture(GPT),
    "replicate ResNet-50, 8 replicas": lambda: _pass(0),
    "shift half of its activations": lambda: _pass(1),
    "inject copies": lambda: _pass(2),
    "verify the program": lambda: partial(graphir.verify, _placed(RESNET, 8)),
    "emit": lambda: partial(passes.emit, _placed(RESNET, 8)),
    "verify the plan": lambda: partial(graphir.verify, passes.emit(_placed(RESNET, 8))),
    "check the plan": lambda: partial(runtime.check, passes.emit(_placed(RESNET, 8))),
    "certify, ResNet-50, 8 replicas": lambda: _certify(RESNET, 8),
    "certify, GPT, 4 replicas": lambda: _certify(GPT, 4),
    "certify, random operators": _random,
    "save the program": lambda: partial(_placed(RESNET, 8).save, _file()),
    "load it": _load,
    "start a session of ResNet-50": lambda: lambda: _session(RESNET).close(),
    "a step of a small GPT": _step,
}
"""What is timed, by name: how it is made."""


def rows() -> Iterator[str]:
    """The table of processor time beside the checkout that the environment names as ``OTHER``; of the steps whose names
    the regular expression ``STEPS`` finds, if there is one."""
    other = os.environ.get("OTHER", "")
    if not other:
        yield "`OTHER` names no other checkout to compare with."
        return
    yield "| step | ms | ms, other checkout | ratio | at most | the other against itself, quartiles |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: |"
    for name in STEPS:
        if re.search(os.environ.get("STEPS", ""), name):
            with ExitStack() as stack:
                sides = {"ours": None, "theirs": Path(other), "again": Path(other)}
                runs = {
                    side: stack.enter_context(apart(Path(__file__).name, [[name]], checkout=checkout))
                    for side, checkout in sides.items()
                }
                yield compared(name, in_turn({side: partial(run, 1) for side, run in runs.items()}, ROUNDS))


def compared(name: str, taken: Mapping[str, list[float]]) -> str:
    """A row, of rounds of ours, of theirs and of theirs again: marked where ours takes longer than noise explains."""
    ours, theirs, again = taken.values()
    ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    low, _, high = statistics.quantiles([a / b for a, b in zip(again, theirs, strict=True)], n=4)
    most = f"{1 + max(ALLOWED, high - 1, 1 - low):.2f}"
    mine, its = (f"{statistics.median(side) * 1e3:.2f}" for side in (ours, theirs))
    marked = limited(f"{ratio:.2f}", at_most=float(most))
    return f"| {name} | {mine} | {its} | {marked} | {most} | {low:.2f} to {high:.2f} |"


def main(name: str) -> None:
    """Serve a step, so often at once that its time says something; the seconds are those of this process alone."""
    torch.set_num_threads(1)
    step = STEPS[name]()

    def timed(times: int) -> float:
        start = time.process_time()
        for _ in range(times):
            step()
        return (time.process_time() - start) / times

    inner = max(int(SECONDS / max(min(timed(1) for _ in range(2)), 1e-6)), 1)
    serve(lambda times: timed(times * inner))


if __name__ == "__main__":
    main(sys.argv[1])
