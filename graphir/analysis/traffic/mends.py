"""What to type so that something no longer crosses for nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

from ...ir.device import Device
from ...ir.names import base_name, prefix_of
from ...ir.operator import Operator
from ...ir.program import Program

__all__ = ["Mends", "Misplaced"]


class Misplaced(NamedTuple):
    """Operators that had better run elsewhere.

    Attributes:
        operators: of one replica.
        source: where they are.
        target: where they should be.
    """

    operators: tuple[Operator, ...]
    source: Device
    target: Device


class Mends:
    """Calls that move operators of one program.

    Args:
        program: with its copies.
        computing: its operators that are neither copies nor views.
    """

    def __init__(self, program: Program, computing: Iterable[Operator]) -> None:
        self.program, self.net, self.computing = program, program.step, computing

    def call(self, misplaced: Sequence[Misplaced], *, whole: bool) -> str:
        """The call that moves them all, for the program before ``inject_copies``; empty where there is none.

        Args:
            misplaced: no device is a source of some and a target of others.
            whole: the modules of the operators are to be moved, whatever else is in them.
        """
        operators = [op for one in misplaced for op in one.operators]
        modular = not self.net.dialect.workspace and whole and all(op.module for op in operators)
        if operators and (modular or all(self._are_modules(one.operators) for one in misplaced)):
            return self._shift_modules(misplaced)
        names = [n for op in operators for n in op.outputs if op.phase == "forward" and n in self._activations]
        if names and all(device.kind == "gpu" for one in misplaced for device in (one.source, one.target)):
            bare = list(dict.fromkeys(map(base_name, names)))
            shifts = {one.source.index: one.target.index for one in misplaced}
            return f"passes.shift_activations(program, {bare}, shifts={shifts})"
        return ""

    def _shift_modules(self, misplaced: Sequence[Misplaced]) -> str:
        """The call that moves the modules of the operators."""
        moves: dict[str, dict[Device, Device]] = {}
        for one in misplaced:
            for op in one.operators:
                moves.setdefault(op.module, {})[one.source] = one.target
        if len(self.program.replicas) == 1:
            everywhere = {module: str(next(iter(to.values()))) for module, to in moves.items()}
            return f"passes.shift_modules(program, {everywhere})"
        numbers = {m: {_named(source): _named(target) for source, target in to.items()} for m, to in moves.items()}
        return f"passes.shift_modules(program, {numbers})"

    def _are_modules(self, operators: tuple[Operator, ...]) -> bool:
        """Whether these are all operators of their modules, which have none inside."""
        if not operators or not operators[0].outputs:
            return False
        prefix, modules = prefix_of(operators[0].outputs[0]), {op.module for op in operators}
        whole = all(module and module not in self._containers for module in modules)
        return whole and len(operators) == sum(self._counts[prefix, module] for module in modules)

    @cached_property
    def _counts(self) -> Counter[tuple[str, str]]:
        """How many operators compute in each module of each replica."""
        return Counter((prefix_of(op.outputs[0]), op.module) for op in self.computing if op.outputs)

    @cached_property
    def _containers(self) -> set[str]:
        """The modules that have others inside."""
        paths = {op.module for op in self.net.ops}
        return {path[:i] for path in paths for i, char in enumerate(path) if char == "."}

    @cached_property
    def _activations(self) -> Collection[str]:
        """What ``shift_activations`` takes, with prefixes."""
        if self.net.gradients or self.net.dialect.workspace:
            return self.net.gradients or self.net.blobs
        return {name for name, blob in self.net.blobs.items() if blob.role == "activation" and not blob.is_view}


def _named(device: Device) -> str | int:
    """A device as it is typed."""
    return device.index if device.kind == "gpu" else str(device)
