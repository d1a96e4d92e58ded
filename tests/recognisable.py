"""Names that users recognise, or not."""

from __future__ import annotations

import re

from graphir.ir.program import Program

__all__ = ["numbers_upon_numbers"]


def numbers_upon_numbers(program: Program) -> list[str]:
    """What operators make under a name with a number upon a number, those of the module's path left out."""
    found = []
    for op in program.step.ops:
        for name in op.outputs:
            if re.search(r"_\d+[._]\d+", name.removeprefix(op.module)):
                found.append(name)
    return found
