"""Calls of operators, as generated code makes them: their time, and what they allocate.

They are timed in turn, as in a step: each finds the caches as the calls of all others have left them. Called again and
again, an operator finds its operands there and takes less than in a step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from graphir.analysis.profiles import Measured
from graphir.errors import GraphirError
from graphir.ir.blob import Blob
from graphir.ir.calls import arrange, evaluate, filled, flatten
from graphir.ir.operator import Operator
from graphir.ir.size import Dims

from ..kernels.bindings import fastest
from ..kernels.communication import copy
from ..kernels.optimizers import UPDATES, updater
from ..machine.capacity import free_memory
from ..machine.surroundings import neutral
from .allocations import Allocated, recorded
from .operands import geometries, variants

__all__ = ["Subject", "measured"]

_HOST: Final = torch.device("cpu")
_RUNS: Final = 5
_ENOUGH: Final = 0.1
"""Seconds after which a call is not repeated."""

_MOST_AT_ONCE: Final = 1 << 28
"""Bytes of operands that are timed in turn: many times those of any cache. Others have their turns after them."""

_RATE: Final = 1e-4
"""A learning rate: the smaller, the less repeated updates change."""


class Subject(NamedTuple):
    """An operator of a net, to be called at these sizes."""

    op: Operator
    blobs: Mapping[str, Blob]
    dims: Dims


def measured(subjects: Mapping[str, Subject], threads: int) -> tuple[dict[str, Measured], dict[str, str]]:
    """What the call of each subject takes where kernels use so many threads; and of those that fail, why.

    Args:
        subjects: by any name.
        threads: of a kernel.

    Raises:
        GraphirError: a profiler of PyTorch's is running.
    """
    seconds: dict[str, float] = {}
    failed: dict[str, str] = {}
    with neutral(threads), torch.inference_mode():
        for names in _groups(subjects):
            seconds.update(_in_turn({name: subjects[name] for name in names}, failed))
        numbers: list[tuple[str, int]] = []
        with recorded() as (watch, figures):
            for name in seconds:
                for inputs in variants(*subjects[name]):
                    with suppress(Exception):  # not all values fit, and those of before did
                        numbers.append((name, watch(_call(subjects[name], inputs))))
    found: dict[str, list[Allocated]] = {}
    for name, number in numbers:
        found.setdefault(name, []).append(figures[number])
    return {name: _summed(subjects[name], found[name], seconds[name]) for name in found}, failed


def _groups(subjects: Mapping[str, Subject]) -> Iterator[list[str]]:
    """The names of subjects that are timed in turn, whose operands are in memory at once."""
    names: list[str] = []
    taken = 0
    for name, subject in subjects.items():
        nbytes = _operand_bytes(subject, subject.op.inputs)
        if names and taken + nbytes > _MOST_AT_ONCE:
            yield names
            names, taken = [], 0
        names.append(name)
        taken += nbytes
    yield names


def _in_turn(subjects: Mapping[str, Subject], failed: dict[str, str]) -> dict[str, float]:
    """The median seconds of each subject's calls, one after the other, round by round, after a first one, which pays
    for what is made on demand. Those that fail are left out, and why is added to *failed*."""
    calls: dict[str, Callable[[], Any]] = {}
    times: dict[str, list[float]] = {}
    for name, subject in subjects.items():
        with _noted(failed, name):
            _check_room(subject)
            calls[name] = _call(subject, next(iter(variants(*subject))))
            calls[name]()
            times[name] = []
    for _ in range(_RUNS):
        for name in times:
            if name not in failed and sum(times[name]) < _ENOUGH:
                with _noted(failed, name):
                    start = time.perf_counter()
                    calls[name]()
                    times[name].append(time.perf_counter() - start)
    return {name: statistics.median(taken) for name, taken in times.items() if name not in failed}


@contextmanager
def _noted(failed: dict[str, str], name: str) -> Iterator[None]:
    """Note why a call fails: whatever a kernel may raise about values that are made up."""
    try:
        yield
    except Exception as e:
        failed[name] = f"{type(e).__name__}: {e}".partition("\n")[0]


def _check_room(subject: Subject) -> None:
    """Refuse a call that this machine may not survive.

    Raises:
        GraphirError: operands and results, and as much again inside, do not fit into the memory that is left.
    """
    taken = 2 * _operand_bytes(subject, (*subject.op.inputs, *subject.op.outputs))
    free = free_memory()
    if free is not None and taken > free:
        raise GraphirError(f"it may take {taken} bytes, and {free} are left")


def _operand_bytes(subject: Subject, names: Iterable[str]) -> int:
    """Bytes of these operands and results, each once."""
    return sum(subject.blobs[name].nbytes(subject.dims) for name in set(names))


def _summed(subject: Subject, figures: Sequence[Allocated], seconds: float) -> Measured:
    own = _own_results(subject)
    expected = sum(
        g.elements * g.dtype.itemsize for g in geometries([subject.op.outputs[i] for i in own], *subject[1:])
    )
    scratch = [figure.peak - figure.left for figure in figures]
    kept = [figure.left - expected for figure in figures]
    bound = len(set(zip(scratch, kept, strict=True))) > 1
    return Measured(max(scratch), max(kept), seconds, bound)


def _own_results(subject: Subject) -> list[int]:
    """The results that have memory of their own."""
    effects = subject.op.effects
    shared = {output for output, _ in (*effects.writes, *effects.views)}
    return [i for i in range(len(subject.op.outputs)) if i not in shared]


def _call(subject: Subject, inputs: Sequence[Tensor]) -> Callable[[], Any]:
    """The call on these operands. It returns the results that the operator names, and lets go of all others.

    Raises:
        GraphirError: nothing executes the operator's type.
    """
    op, _, dims = subject
    call = arrange(op)
    generator = torch.Generator()

    positional, keyword = filled(call, inputs, lambda arg: evaluate(arg, dims), _HOST, lambda: generator)
    if op.type in UPDATES:
        *tensors, _, _ = positional
        update = updater(op.type, keyword)
        lists = [[tensor] for tensor in tensors]
        return lambda: update(*lists, _RATE)
    function = copy if op.type == "Copy" else fastest(op.type)

    def run() -> Any:
        return flatten(call, function(*positional, **keyword))

    return run
