"""What :func:`.check.check` finds wrong with a plan."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from graphir.ir.plan import Plan
from graphir.ir.text import instruction_text

__all__ = ["Finding", "FindingKind"]

FindingKind: TypeAlias = Literal[
    "race",
    "early free",
    "wrong free",
    "never freed",
    "use after free",
    "never written",
    "wrong order",
    "buffer reuse",
    "unsatisfied wait",
    "cycle",
    "foreign record",
    "collective order",
    "wrong value",
]


@dataclass(frozen=True)
class Finding:
    """One thing that can go wrong when a plan runs.

    Attributes:
        kind: ``race``: two uses of a storage, one of them a write, that no chain of events orders. ``early free``: a
            storage may be dropped before a use. ``wrong free``: of what is dropped already, was never made, or is
            needed after the step. ``never freed``. ``use after free``. ``never written``: read, but nothing wrote it.
            ``wrong order``: two uses are issued in another order than the program's. ``buffer reuse``: a receive buffer
            is filled again while its content is needed. ``unsatisfied wait``: nothing records its event before it.
            ``cycle``: lanes that wait for each other. ``foreign record``: of another lane's event. ``collective
            order``: two lanes take part in two collectives in different orders. ``wrong value``: an output or state
            does not have the value that emit promised.
        what: the same in words, one line.
        storage: the storage that it is about; of a wrong value the blob, of events their blob.
        first: position in ``plan.instructions`` of the instruction that has to come first, -1 where there is none.
        second: position of the one that has to come after it, -1 where there is none.
        missing: the edge that would order them, or what else is missing.
    """

    kind: FindingKind
    what: str
    storage: str
    first: int
    second: int
    missing: str
    plan: Plan = field(repr=False, compare=False)

    def instruction(self, position: int) -> str:
        """An instruction as text, its position before it."""
        return f"#{position} {instruction_text(self.plan, self.plan.instructions[position])}"

    def to_json(self) -> dict[str, Any]:
        """The finding as JSON; instructions are objects of ``position`` and ``text``."""
        found = [
            {"position": position, "text": instruction_text(self.plan, self.plan.instructions[position])}
            for position in (self.first, self.second)
            if position >= 0
        ]
        kept = {"kind": self.kind, "what": self.what, "storage": self.storage}
        return {**kept, "instructions": found, "missing": self.missing}

    def __str__(self) -> str:
        lines = [f"{self.kind}: {self.what}"]
        lines += [f"  {self.instruction(position)}" for position in (self.first, self.second) if position >= 0]
        return "\n".join([*lines, f"  missing: {self.missing}"])
