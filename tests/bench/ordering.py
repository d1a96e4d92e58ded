"""Passes in every order: what is equal to eager PyTorch, what is refused, and what is neither."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from limits import limited
from orders import SUBJECTS, Fault, pairs, random_orders, verdict

__all__ = ["rows"]

RANDOM = 300


def rows() -> Iterator[str]:
    """A row for each program: all ordered pairs of passes, and longer orders; as they are, and stripped."""
    yield "| program | orders | passes that ran | refused, by an order that works | neither | at most |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: |"
    longer = random_orders(RANDOM, seed=0)
    for name in SUBJECTS:
        mine = [order for subject, order in longer if subject == name]
        yield _row(name, [*pairs(), *mine])


def _row(name: str, orders: Sequence[Sequence[str]]) -> str:
    ran, refused, faults = 0, 0, list[str]()
    for strip in (False, True):
        for order in orders:
            try:
                done, left_out = verdict(name, order, strip)
            except Fault as fault:
                faults.append(str(fault))
            else:
                ran, refused = ran + done, refused + left_out
    print(*faults, sep="\n", end="\n" if faults else "")
    return f"| {name} | {2 * len(orders):,} | {ran:,} | {refused:,} | {limited(str(len(faults)), at_most=0)} | 0 |"
