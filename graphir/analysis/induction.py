"""States that are equal after any number of steps.

A step hands its state to the next one, so two programs are equal for ever only if some relation between their states
holds after ``init`` and every step preserves it. The largest one is found by refining a partition. At first, states of
one layout are in one block if ``init`` gives them one value. A step is then executed on symbols, one for each block;
states of a block that do not get one value by it are parted, and so on, until no block is parted::

    after init       {w, w_gpu_1}  {m1, m2}          two momenta that start from zero
    a step parts     {w, w_gpu_1}  {m1}  {m2}        since they take in two gradients
    a step keeps     {w, w_gpu_1}  {m1}  {m2}        so that this holds after every step

Nearly always, what has one name in both programs is equal, and nothing else has to be: so the blocks by name are tried
first, which one step confirms.

Source: partition refinement as for bisimulation, P. Kanellakis and S. Smolka, "CCS expressions, finite state processes,
and three problems of equivalence", Information and Computation 86 (1990).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from ..ir.operator import Operator
from ..ir.program import Program
from .values import Numbering, Run, lasting

__all__ = ["Induction", "by_induction"]

_MOST_ROUNDS: Final = 100
"""Steps after which states that still part are given up. A round costs a step of both programs, and states part late
only where values are handed down from state to state."""

_Blocks: TypeAlias = dict[str, int]
"""The block of each storage that holds state of one program."""


class Induction(NamedTuple):
    """What an arbitrary step of two programs makes, from states of which those of a block are equal.

    Attributes:
        outputs: of each program the values of the outputs that were asked for.
        states: of each program the values of its states after the step.
        starts: of each program, in which block each of its states is; so of equal ones, for ever.
        rounds: how many steps it took.
        settled: the last of them parted no block.
        unwritten: of each program, the blobs that are read where they may not have been written.
        calls: of each program what its operators are made to compute, init's included, and the last one that is.
    """

    outputs: tuple[dict[str, int], ...]
    states: tuple[dict[str, int], ...]
    starts: tuple[dict[str, int], ...]
    rounds: int
    settled: bool
    unwritten: tuple[frozenset[str], ...]
    calls: tuple[dict[int, Operator], ...]

    @property
    def holds(self) -> bool:
        """Whether both programs give the same outputs, and all states of the first are those of the second."""
        if not self.settled or self.outputs[0] != self.outputs[1]:
            return False
        return all(b.get(name) == value for a, b in (self.states, self.starts) for name, value in a.items())


def by_induction(programs: Sequence[Program], outputs: Sequence[Sequence[str]]) -> Induction:
    """What two programs compute in any step.

    Args:
        programs: both of them, well-formed.
        outputs: the blobs that are wanted of each.
    """
    table = Numbering()
    sides = [_Side(table, program, wanted) for program, wanted in zip(programs, outputs, strict=True)]
    named = [{storage: (*start, storage) for storage, start in side.starts.items()} for side in sides]
    found = _refined(sides, named, most=1)
    if found.holds:
        return found
    return _refined(sides, [side.starts for side in sides], most=_MOST_ROUNDS, first=1)


def _refined(sides: Sequence[_Side], keys: Sequence[Mapping[str, Any]], most: int, first: int = 0) -> Induction:
    """Part the blocks that *keys* give, by at most so many steps; *first* is the number of the first one."""
    number: dict[Any, int] = {}
    blocks: list[_Blocks] = [{s: number.setdefault(key, len(number)) for s, key in each.items()} for each in keys]
    rounds = 0
    while True:
        after = [side.step(block, first + rounds) for side, block in zip(sides, blocks, strict=True)]
        rounds += 1
        parts: dict[tuple[int, int], int] = {}
        finer = [
            {s: parts.setdefault((block[s], values[s]), len(parts)) for s in block}
            for block, values in zip(blocks, after, strict=True)
        ]
        settled = len(parts) == len(set().union(*[block.values() for block in blocks]))
        if settled or rounds >= most:
            return Induction(
                tuple([side.outputs() for side in sides]),
                tuple([side.states() for side in sides]),
                tuple([side.starts_in(block) for side, block in zip(sides, blocks, strict=True)]),
                rounds,
                settled,
                tuple([frozenset(side.run.unwritten) for side in sides]),
                tuple([{**side.filling, **side.run.calls} for side in sides]),
            )
        blocks = finer


class _Side:
    """One of the programs.

    Attributes:
        run: its storages, after ``init`` or after a step.
        lasting: the blobs that hold its state.
        starts: for each of their storages the value that ``init`` gives it, and its layout.
        filling: what operators of ``init`` compute.
    """

    def __init__(self, table: Numbering, program: Program, outputs: Sequence[str]) -> None:
        self.program, self.wanted = program, outputs
        self.run = Run(table, program)
        self.lasting = lasting(program.step)
        self.run.net(program.init, -1)
        self.filling = dict(self.run.calls)
        self.run.declare(program.step)
        self.run.begin(program.step.external_inputs, 0)
        storages = dict.fromkeys(map(self.storage, self.lasting))
        self.starts = {s: (self.run.roots[s][0], self.run.geometries[s]) for s in storages}
        self.blank = {s for s, (root, _) in self.starts.items() if root in table.unwritten}

    def storage(self, name: str) -> str:
        return self.program.step.blobs[name].storage

    def step(self, blocks: _Blocks, round: int) -> _Blocks:
        """Execute a step on the symbols of *blocks*: the value of each state's storage after it."""
        run, step = self.run, self.program.step
        run.unwritten.clear()
        run.calls.clear()
        run.declare(step)
        run.world = run.table.number(("world", "step"))
        for storage, block in blocks.items():
            run.start(storage, ("state", round, block))
            if storage in self.blank:
                run.table.unwritten[run.roots[storage][0]] = storage
        run.begin(step.external_inputs, 0)
        for op in step.ops:
            run.execute(op, 0)
        run.use(self.wanted)
        return {storage: run.roots[storage][0] for storage in blocks}

    def starts_in(self, blocks: _Blocks) -> dict[str, int]:
        """The block of each state before the step."""
        return {name: blocks[self.storage(name)] for name in self.lasting}

    def outputs(self) -> dict[str, int]:
        return self.run.values(self.wanted)

    def states(self) -> dict[str, int]:
        return self.run.values(self.lasting)
