"""Where two programs part: the first value that differs when their steps are executed one after the other."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, NamedTuple, NoReturn

from ..errors import EquivalenceError, after_last
from ..ir.net import Net
from ..ir.operator import Operator
from ..ir.program import Program
from ..ir.text import operator_text
from .induction import Induction
from .values import Made, Numbering, Run, lasting

__all__ = ["place_of", "refuse"]

_WINDOW: Final = 5
"""Operators of a derivation that are printed."""


class _Difference(NamedTuple):
    """A compared value that differs: of an output after a step, or of a state after it."""

    kind: str
    name: str
    step: int


class _Unrolled:
    """What one program computes in its first steps: the values of outputs and states after each of them."""

    def __init__(self, table: Numbering, program: Program, outputs: Collection[str], *, record: bool = False) -> None:
        self.program, self.wanted = program, outputs
        self.run = Run(table, program, record)
        self.run.net(program.init, -1)

    def step(self, number: int) -> dict[str, dict[str, int]]:
        """Execute the next step."""
        self.run.net(self.program.step, number)
        return {"output": self.run.values(self.wanted), "state": self.run.values(lasting(self.program.step))}


def _first_difference(a: Program, b: Program, outputs: Collection[str], steps: int) -> _Difference | None:
    """The first output that differs when so many steps are executed; without one, the first state that does."""
    table = Numbering()
    ours, theirs = _Unrolled(table, a, outputs), _Unrolled(table, b, outputs)
    found = None
    for step in range(steps):
        mine, its = ours.step(step), theirs.step(step)
        for kind in ("output", "state"):
            name = next((name for name, value in mine[kind].items() if its[kind].get(name) != value), None)
            if name is not None and kind == "output":
                return _Difference(kind, name, step)
            if name is not None and found is None:
                found = _Difference(kind, name, step)
    return found


class _Derivations:
    """Every value that one program made, and the values that it was made from."""

    def __init__(self, program: Program, table: Numbering, steps: int) -> None:
        self.program = program
        unrolled = _Unrolled(table, program, (), record=True)
        for step in range(steps):
            unrolled.step(step)
        self.made = unrolled.run.made
        self.sources: list[tuple[int, ...]] = []
        self.by_key: dict[tuple[int, str, int], int] = {}
        last: dict[str, int] = {}
        position = (-2, -1)
        reads: tuple[int, ...] = ()
        for index, made in enumerate(self.made):
            if (made.step, made.position) != position:
                position = (made.step, made.position)
                reads = tuple(last[name] for name in self.op(made).inputs if name in last)
            self.sources.append(reads)
            self.by_key[made.step, made.name, made.version] = last[made.name] = index

    def net(self, step: int) -> Net:
        return self.program.init if step < 0 else self.program.step

    def op(self, made: Made) -> Operator:
        return self.net(made.step).ops[made.position]

    def last(self, difference: _Difference) -> int | None:
        """The last value given to the blob by the end of the step."""
        found = [i for i, m in enumerate(self.made) if m.name == difference.name and m.step <= difference.step]
        return found[-1] if found else None

    def ancestors(self, index: int) -> set[int]:
        seen, open_ = {index}, [index]
        while open_:
            fresh = [source for source in self.sources[open_.pop()] if source not in seen]
            seen.update(fresh)
            open_ += fresh
        return seen

    def window(self, index: int | None) -> list[str]:
        """The operator that made a value, after the nearest ones that it follows from."""
        if index is None:
            return ["(nothing makes it)"]
        near, open_ = {index}, [index]
        shown = {(self.made[index].step, self.made[index].position)}
        while open_ and len(shown) < _WINDOW:
            for source in self.sources[open_.pop(0)]:
                operator = (self.made[source].step, self.made[source].position)
                if source not in near and len(shown) < _WINDOW:
                    near.add(source)
                    open_.append(source)
                    shown.add(operator)
        lines = []
        for step, position in sorted(shown):
            net = self.net(step)
            when = "init  " if step < 0 else f"step {step}"
            lines.append(f"{when}  {operator_text(net.ops[position], net)}")
        return lines


def place_of(program: Program) -> str:
    """How errors name a program."""
    return f"program {program.name!r}" + after_last(program.history)


def refuse(before: Program, after: Program, outputs: Collection[str], proof: Induction) -> NoReturn:
    """Raise the error that shows where two programs part, of which *proof* says that they do."""
    where = place_of(after)
    difference = _first_difference(before, after, outputs, proof.rounds + 1)
    if difference is None:
        raise EquivalenceError(
            f"no proof was found: after {proof.rounds} steps there still are states that part from each other",
            where=where,
            fix="compare the programs by running them, or keep the names of states, by which proofs are short",
        )
    table = Numbering()
    ours, theirs = (_Derivations(program, table, difference.step + 1) for program in (before, after))
    index, other = ours.last(difference), theirs.last(difference)
    if index is not None:
        for candidate in sorted(ours.ancestors(index)):
            made = ours.made[candidate]
            match = theirs.by_key.get((made.step, made.name, made.version))
            if match is not None and theirs.made[match].value != made.value:
                index, other = candidate, match
                break
    name = ours.made[index].name if index is not None else difference.name
    result = f"{difference.kind} {difference.name!r} differs after step {difference.step}"
    what = f"blob {name!r} has another value" + (f", so that {result}" if name != difference.name else f": {result}")
    near, far = ours.window(index), theirs.window(other)
    if near == far:
        near = [*near, "from a storage in one state"]
        far = [*far, "from a storage in another state: one that was written over in between"]
    lines = ["before:", *(f"  {line}" for line in near), "after:", *(f"  {line}" for line in far)]
    raise EquivalenceError(what, at="\n       ".join(lines), where=where, fix="compare the two derivations above")
