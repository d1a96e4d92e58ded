"""What crosses where modules of the zoo are moved, beside the least that has to."""

from __future__ import annotations

from collections.abc import Iterator

from minimum_cut import copied, cuts, fewest_bytes
from mutations.subjects import zoo_names, zoo_program

__all__ = ["rows"]

PARTS = (0.25, 0.5, 0.75)


def rows() -> Iterator[str]:
    """A row for the cuts that send the least, and one for each that sends more."""
    equal, programs, more = 0, set(), []
    for name in zoo_names():
        program = zoo_program(name)
        for modules in cuts(program, PARTS):
            programs.add(name)
            ours, least = copied(program, modules), fewest_bytes(program, modules)
            equal += ours == least
            if ours != least:
                more.append(f"| {name}, from `{modules[0]}` on | 1 | {ours:,} | {least:,} |")
    yield "| programs | cuts | bytes that cross | the least |"
    yield "| --- | ---: | ---: | ---: |"
    yield f"| {len(programs)} programs of the zoo | {equal} | the least | |"
    yield from more
