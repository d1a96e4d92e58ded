"""Pack values into as few bytes of storage as possible, where a storage holds one value at a time.

Whole storages are shared, as a Caffe2 blob is, not ranges of one arena: a storage is as large as the largest value that
it ever holds. The least sum of sizes is NP-hard to find; of three greedy plans the best is taken. No plan needs less
than the values that are live at once; once a plan is near that, no other one is tried.

The plan by size is that of TensorFlow Lite's shared objects (Pisarchyk and Lee, "Efficient Memory Management for Deep
Neural Net Inference", 2020).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import accumulate
from typing import Final, NamedTuple

__all__ = ["Span", "pack"]

_MOST_TRIED: Final = 1_000_000
"""Storages that the plan by size may look at in all: about a second."""

_NEAR: Final = 1.001


class Span(NamedTuple):
    """A value of *nbytes* that is live at the positions ``start <= position <= end``."""

    start: int
    end: int
    nbytes: int


def pack(spans: Sequence[Span]) -> list[int]:
    """The number of the storage of each span, such that the spans of one storage do not overlap. Deterministic."""
    least = _most_live(spans)
    best: list[int] = []
    fewest = -1
    for plan in (_in_order, _in_reverse, _by_size):
        found = plan(spans)
        nbytes = _total(spans, found)
        if fewest < 0 or nbytes < fewest:
            best, fewest = found, nbytes
        if fewest <= least * _NEAR:
            break
    return best


def _most_live(spans: Sequence[Span]) -> int:
    """The most bytes that are live at one position: no plan needs less."""
    change: dict[int, int] = {}
    for start, end, nbytes in spans:
        change[start] = change.get(start, 0) + nbytes
        change[end + 1] = change.get(end + 1, 0) - nbytes
    return max(accumulate(change[position] for position in sorted(change)), default=0)


def _total(spans: Sequence[Span], storages: Sequence[int]) -> int:
    sizes: dict[int, int] = {}
    for span, storage in zip(spans, storages, strict=True):
        sizes[storage] = max(sizes.get(storage, 0), span.nbytes)
    return sum(sizes.values())


def _in_order(spans: Sequence[Span]) -> list[int]:
    """As values are made: each takes the smallest free storage that is large enough; else the largest, which grows."""
    found = [0] * len(spans)
    sizes: list[int] = []
    free: list[tuple[int, int]] = []
    live: list[tuple[int, int]] = []
    for i in sorted(range(len(spans)), key=lambda i: (spans[i].start, -spans[i].nbytes)):
        start, end, nbytes = spans[i]
        while live and live[0][0] < start:
            ended = heappop(live)[1]
            insort(free, (sizes[ended], ended))
        at = bisect_left(free, (nbytes, 0))
        if free:
            storage = free.pop(min(at, len(free) - 1))[1]
            sizes[storage] = max(sizes[storage], nbytes)
        else:
            storage = len(sizes)
            sizes.append(nbytes)
        found[i] = storage
        heappush(live, (end, storage))
    return found


def _in_reverse(spans: Sequence[Span]) -> list[int]:
    """The same from the last position to the first."""
    return _in_order([Span(-span.end, -span.start, span.nbytes) for span in spans])


def _by_size(spans: Sequence[Span]) -> list[int]:
    """From the largest value to the smallest: each takes the storage nearest in size that is free all the while."""
    found = [0] * len(spans)
    held: list[list[tuple[int, int]]] = []
    tries = max(_MOST_TRIED // max(len(spans), 1), 1)
    for i in sorted(range(len(spans)), key=lambda i: (-spans[i].nbytes, spans[i].start)):
        start, end, _ = spans[i]
        for storage in range(len(held) - 1, max(len(held) - 1 - tries, -1), -1):
            others = held[storage]
            at = bisect_left(others, (start, end))
            if (at == 0 or others[at - 1][1] < start) and (at == len(others) or others[at][0] > end):
                others.insert(at, (start, end))
                break
        else:
            storage = len(held)
            held.append([(start, end)])
        found[i] = storage
    return found
