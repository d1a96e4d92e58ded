"""Modules that are pinned to the host, as Accelerate's maps pin them. They move there before anything is chosen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from graphir.errors import PassError
from graphir.ir.device import CPU
from graphir.ir.module_patterns import lineage
from graphir.ir.program import Program

from ..base import build
from ..module_patterns import claims, roots
from ..shift_modules import ShiftModules

__all__ = ["on_host"]

Pins: TypeAlias = "Mapping[str, str | None]"
"""By pattern of modules, or by name of state, where it has to be; None of what is left out."""


def on_host(program: Program, pin: Pins, may_shift: bool) -> tuple[Program, Pins]:
    """The program with modules on the host that are pinned there, and the other pins.

    Args:
        program: captured, replicated or sharded.
        pin: of which some are to the host.
        may_shift: whether modules may move.

    Raises:
        PassError: they may not, and one has to; or one is inside of a module that is pinned elsewhere and that is
            inside of one on the host.
    """
    state = {text for text in pin if any(prefix + text in program.step.blobs for prefix in program.replicas)}
    patterns = {text: to for text, to in pin.items() if text not in state - program.module_paths.keys() or to == CPU}
    claimed = claims(program, patterns)
    hosted = {module for module, text in claimed.items() if pin[text] == CPU}
    inside = [path for path in program.module_paths if path not in hosted and not hosted.isdisjoint(_around(path))]
    left = set(roots(dict.fromkeys(inside, "")).values())
    for module in sorted(hosted):
        if between := left.intersection(_around(module)):
            raise PassError(
                f"balance: {module!r} is pinned to {CPU}, and {min(between)!r}, which it is in, is not",
                fix=f"move it before: shift_modules(program, {{{module!r}: 'cpu'}})",
            )
    moves = next((op for op in program.step.ops if op.module in hosted and not op.device.is_host), None)
    if moves is not None and not may_shift:
        raise PassError(
            f"balance: {moves.module!r} is pinned to {CPU}, and options do not allow to shift it from {moves.device}",
            fix="add 'shift' to options, or pin it where it is",
        )
    others = {text: to for text, to in pin.items() if to not in (None, CPU)}
    elsewhere = claims(program, [text for text in others if text in patterns])
    out = [
        text for text, to in patterns.items() if to is None and claims(program, [text[1:]]).keys() & elsewhere.keys()
    ]
    rest = {**others, **dict.fromkeys(out)}
    if moves is None:
        return program, rest
    there = {text: str(CPU) for text in dict.fromkeys(claimed.values()) if pin[text] == CPU}
    return build(ShiftModules, modules={**there, **{f"!{path}": None for path in left}})(program), rest


def _around(path: str) -> tuple[str, ...]:
    """A module, and those that it is in."""
    return "", *lineage(path)
