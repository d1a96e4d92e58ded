"""Calls of operators, as generated code makes them: their time, and what they allocate.

Generated code makes one call of updates that follow each other, and of reductions that do: a short one takes most of
its time for being called. So short ones are timed several at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from statistics import fmean
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from graphir.analysis.profiles import Measured
from graphir.errors import GraphirError
from graphir.ir.blob import Blob
from graphir.ir.calls import arrange, evaluate, filled, flatten
from graphir.ir.operator import Operator
from graphir.ir.plan import issued_as
from graphir.ir.size import Dims

from ..kernels.bindings import fastest
from ..kernels.communication import all_reduce_each, copy, reduction
from ..kernels.optimizers import UPDATES, operands_of, updater
from ..machine.calibration import cores
from ..machine.capacity import free_memory
from ..machine.surroundings import neutral
from .allocations import Allocated, recorded
from .operands import geometries, variants
from .timing import Timed, Timing, times
from .warming import bring

__all__ = ["Subject", "Use", "call_of", "check_room", "measured", "sets_at_once", "summed"]

_HOST: Final = torch.device("cpu")
_MOST_AT_ONCE: Final = 1 << 28
"""Bytes of operands that are timed in turn: many times those of any cache. Others have their turns after them."""

_TOGETHER: Final = 8
"""How many short updates or reductions are timed in one call; a step makes one call of dozens."""

_SHORT: Final = 1 << 18
"""Bytes that the operands of all of them have at most."""

_RATE: Final = 1e-4
"""A learning rate: the smaller, the less repeated updates change."""


class Use(NamedTuple):
    """One of the calls of a subject that a step makes.

    Attributes:
        position: in the step.
        reuse: how many bytes a step has touched since it last touched each input; None where it never does.
    """

    position: int
    reuse: tuple[int | None, ...] = ()


class Subject(NamedTuple):
    """An operator of a net, to be called at these sizes.

    Attributes:
        op: the operator.
        blobs: of the net.
        dims: the value of each dimension.
        uses: the calls that are timed, in the order of the step.
    """

    op: Operator
    blobs: Mapping[str, Blob]
    dims: Dims
    uses: Sequence[Use] = (Use(0),)

    @property
    def is_update(self) -> bool:
        """Whether generated code makes one call of it and other updates that follow."""
        return self.op.type in UPDATES

    @property
    def is_reduction(self) -> bool:
        """Whether it sums what participants have."""
        return issued_as(self.op) == "collective"

    @property
    def is_called_with_others(self) -> bool:
        """Whether generated code makes one call of several that follow each other."""
        return self.is_update or self.is_reduction

    def operands(self) -> Iterator[list[Tensor]]:
        """Its operands, see :func:`.operands.variants`."""
        return variants(self.op, self.blobs, self.dims)


Turn: TypeAlias = tuple[str, Use]
"""The name of a subject, and the use of it that is timed then."""


def measured(subjects: Mapping[str, Subject], threads: int) -> tuple[dict[str, Measured], dict[str, str]]:
    """What the call of each subject takes where kernels use so many threads; and of those that fail, why.

    Args:
        subjects: by any name.
        threads: of a kernel.

    Raises:
        GraphirError: a profiler of PyTorch's is running.
    """
    timings: dict[str, list[Timing]] = {}
    failed: dict[str, str] = {}
    with neutral(threads), torch.inference_mode():
        for turns in _groups(subjects):
            for (name, _), timing in _timings(subjects, turns, threads, failed).items():
                timings.setdefault(name, []).append(timing)
        taken = {name: _mean(of_uses) for name, of_uses in timings.items()}
        numbers: list[tuple[str, int]] = []
        with recorded() as (watch, figures):
            for name in taken:
                for inputs in subjects[name].operands():
                    with suppress(Exception):  # not all values fit, and those of before did
                        numbers.append((name, watch(call_of(subjects[name], [inputs]))))
    found: dict[str, list[Allocated]] = {}
    for name, number in numbers:
        found.setdefault(name, []).append(figures[number])
    made = {name: summed(subjects[name], found[name], taken[name]) for name in found}
    return made, {name: why for name, why in failed.items() if name not in taken}


def _groups(subjects: Mapping[str, Subject]) -> Iterator[list[Turn]]:
    """The uses of subjects in the order of the step, as many as are timed in turn: their operands are in memory at
    once."""
    turns: list[Turn] = []
    taken = 0
    every = [(name, use) for name, subject in subjects.items() for use in subject.uses]
    for name, use in sorted(every, key=lambda turn: turn[1].position):
        nbytes = _operand_bytes(subjects[name], subjects[name].op.inputs)
        if turns and taken + nbytes > _MOST_AT_ONCE:
            yield turns
            turns, taken = [], 0
        turns.append((name, use))
        taken += nbytes
    yield turns


def _timings(
    subjects: Mapping[str, Subject], turns: Sequence[Turn], threads: int, failed: dict[str, str]
) -> dict[Turn, Timing]:
    """What the calls of some uses take. Those that fail are left out, and why is added to *failed*."""

    def note(turn: Turn, error: Exception) -> None:
        """Whatever a kernel may raise about values that are made up."""
        failed[turn[0]] = f"{type(error).__name__}: {error}".partition("\n")[0]

    calls: dict[Turn, Timed] = {}
    others: dict[Turn, Timed] = {}
    for turn in turns:
        subject, use = subjects[turn[0]], turn[1]
        try:
            check_room(subject, 1, free_memory())
            calls[turn] = _timed(subject, use)
        except Exception as e:
            note(turn, e)
            continue
        if cores() >= 2 * threads:
            with suppress(Exception):
                check_room(subject, 2, free_memory())
                others[turn] = _timed(subject, use)
    return times(calls, others, threads, note)


def _mean(timings: Sequence[Timing]) -> Timing:
    """What a call takes on average, if some of them were timed beside another, by those."""
    beside = [timing for timing in timings if timing.beside is not None]
    alone = fmean([timing.alone for timing in beside or timings])
    return Timing(alone, fmean([timing.beside or 0.0 for timing in beside]) if beside else None)


def _timed(subject: Subject, use: Use) -> Timed:
    """A call of a subject as it is timed."""
    count = sets_at_once(subject)
    sets = [next(subject.operands()) for _ in range(count)]
    far = use.reuse or (None,) * len(subject.op.inputs)
    touched = [(at, tensor) for inputs in sets for at, tensor in zip(far, inputs, strict=True) if at is not None]
    return Timed(call_of(subject, sets), partial(bring, touched), count)


def sets_at_once(subject: Subject) -> int:
    """How many operators' work one call does that is timed: short updates and reductions are called several at once."""
    nbytes = max(_operand_bytes(subject, subject.op.inputs), 1)
    return min(max(_SHORT // nbytes, 1), _TOGETHER) if subject.is_called_with_others else 1


def check_room(subject: Subject, threads: int, free: int | None) -> None:
    """Refuse calls of so many threads at once that a machine with so many *free* bytes may not survive.

    Raises:
        GraphirError: operands and results, and as much again inside, do not fit into the memory that is left.
    """
    taken = 2 * threads * _operand_bytes(subject, (*subject.op.inputs, *subject.op.outputs))
    if free is not None and taken > free:
        raise GraphirError(f"it may take {taken} bytes, and {free} are left")


def _operand_bytes(subject: Subject, names: Iterable[str]) -> int:
    """Bytes of these operands and results, each once."""
    return sum(subject.blobs[name].nbytes(subject.dims) for name in set(names))


def summed(subject: Subject, figures: Sequence[Allocated], taken: Timing) -> Measured:
    """What calls took, of whose allocations these are the figures."""
    own = _own_results(subject)
    names = [subject.op.outputs[i] for i in own]
    expected = sum(g.elements * g.dtype.itemsize for g in geometries(names, subject.blobs, subject.dims))
    scratch = [figure.peak - figure.left for figure in figures]
    kept = [figure.left - expected for figure in figures]
    bound = len(set(zip(scratch, kept, strict=True))) > 1
    return Measured(max(scratch), max(kept), taken.alone, bound, taken.beside)


def _own_results(subject: Subject) -> list[int]:
    """The results that have memory of their own and that one call makes: a part of a collective makes one."""
    if subject.is_reduction:
        return [0]
    effects = subject.op.effects
    shared = {output for output, _ in (*effects.writes, *effects.views)}
    return [i for i in range(len(subject.op.outputs)) if i not in shared]


def call_of(subject: Subject, sets: Sequence[Sequence[Tensor]], place: torch.device = _HOST) -> Callable[[], Any]:
    """The call on these operands, which are at a *place*, and on several sets of them where generated code makes one
    call of several. It returns the results that the operator names, and lets go of all others.

    Raises:
        GraphirError: nothing executes the operator's type.
    """
    op, dims = subject.op, subject.dims
    if subject.is_reduction:
        operands, scaling = list(zip(*sets, strict=True)), reduction(op, dims)
        return lambda: all_reduce_each(operands, *scaling)
    call, generator = arrange(op), torch.Generator(place)
    given = [filled(call, inputs, lambda arg: evaluate(arg, dims), place, lambda: generator) for inputs in sets]
    positional, keyword = given[0]
    if op.type in UPDATES:
        update = updater(op.type, keyword)
        updates = [operands_of(op.type, positional) for positional, _ in given]
        lists = list(map(list, zip(*[each.tensors for each in updates], strict=True)))
        numbers = {name: float(number) for name, number in updates[0].numbers.items() if number is not None}
        return lambda: update(lists[0], lists[1], *lists[2:], _RATE, **numbers)
    function = copy if op.kind == "copy" else fastest(op.type)

    def run() -> Any:
        return flatten(call, function(*positional, **keyword))

    return run
