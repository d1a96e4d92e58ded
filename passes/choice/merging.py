"""Few groups of many units: neighbours between which the most bytes cross are one group."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from graphir.ir.device import Device

from .tails import CUT_OFF
from .units import Unit, Units

__all__ = ["Merging"]


class Merging:
    """Merges the units of a program.

    Args:
        units: of the program.
        most: how many groups there are to be, at most.
        pins: by module, the device where it has to be: what has to be on different devices is not merged.
        whole: by module, which module it is in that a caller wants as a whole: what is in one is merged.
    """

    def __init__(self, units: Units, most: int, pins: Mapping[str, Device], whole: Mapping[str, str]) -> None:
        self.units, self.net, self.at, self.most = units, units.net, units.at, most
        self.pins, self.whole = pins, whole

    def run(self) -> tuple[dict[Unit, int], list[list[Unit]]]:
        """The number of each unit's group, and the units of each group: no more groups than are wanted.

        Neighbours on one device are merged where the most bytes cross, as long as what they save together is a small
        part of all; never where a caller wants them on different devices, always where a caller wants them as a whole.
        """
        at = self.at
        crossing, saved = self.crossing()
        apart = bool(self.pins) or bool(self.units.cut_off)
        chains = [[unit for unit in at if unit[0] == d] for d in dict.fromkeys(unit[0] for unit in at)]
        share = max(self.most // len(chains), 2)
        groups: list[list[Unit]] = []
        for chain in chains:
            total = sum(saved[at[unit]] for unit in chain)
            long = len(chain) > 8 * share
            merged = self.joined(chain, saved, total / (4 * share)) if long else self.gathered(chain, saved, total)
            sizes = [sum(saved[at[unit]] for unit in group) for group in merged]
            while len(merged) > 1:
                pairs = [i for i in range(len(merged) - 1) if not apart or self.may_merge(merged[i], merged[i + 1])]
                whole = [i for i in pairs if self.whole and self.is_whole(merged[i], merged[i + 1])]
                if not whole and (len(merged) <= share or not pairs):
                    break
                ranked = [
                    (_rank(sizes[i] + sizes[i + 1], 1.5 * total / share, crossing[at[merged[i][-1]]]), i) for i in pairs
                ]
                best = whole[0] if whole else max(ranked)[1]
                merged[best : best + 2] = [merged[best] + merged[best + 1]]
                sizes[best : best + 2] = [sizes[best] + sizes[best + 1]]
            groups += merged
        return {unit: number for number, group in enumerate(groups) for unit in group}, groups

    def joined(self, chain: Sequence[Unit], saved: Sequence[int], most: float) -> list[list[Unit]]:
        """Neighbours of a long chain together, as long as they save at most so much: what is left can be compared
        pair by pair."""
        units = len(chain) / (8 * self.most)
        return self.together(chain, saved, most, lambda group, _: len(group) < units)

    def gathered(self, chain: Sequence[Unit], saved: Sequence[int], total: int) -> list[list[Unit]]:
        """The units of a chain; of those that were cut off, neighbours together that save little."""
        cut = self.units.cut_off
        return self.together(chain, saved, total * CUT_OFF / 3, lambda group, unit: unit in cut and group[-1] in cut)

    def together(
        self, chain: Sequence[Unit], saved: Sequence[int], most: float, joins: Callable[[list[Unit], Unit], bool]
    ) -> list[list[Unit]]:
        """Each unit with those before it, where it *joins* them and they save at most so much with it."""
        found: list[list[Unit]] = []
        nbytes = 0
        for unit in chain:
            more = saved[self.at[unit]]
            if found and nbytes + more <= most and joins(found[-1], unit) and self.may_merge(found[-1], [unit]):
                found[-1].append(unit)
                nbytes += more
            else:
                found.append([unit])
                nbytes = more
        return found

    def crossing(self) -> tuple[list[int], list[int]]:
        """By unit, in order, the bytes that later units of the forward read of what it and earlier ones make; and the
        bytes that it makes and that are touched after the forward."""
        step, rank = self.units.step, self.units.rank
        change, saved = np.zeros(len(self.at) + 1, np.int64), np.zeros(len(self.at), np.int64)
        placed = rank >= 0
        np.add.at(saved, rank[placed], step.saved[placed])
        last = np.full(len(step.names), -1, np.int64)
        reads = ~step.makes & (step.forward & placed)[step.op]
        np.maximum.at(last, step.storage[reads], rank[step.op[reads]])
        maker = np.where(step.made >= 0, rank[step.made], -1)
        handed = (maker >= 0) & (maker < last)
        np.add.at(change, maker[handed], step.nbytes[handed])
        np.subtract.at(change, last[handed], step.nbytes[handed])
        return change.cumsum().tolist(), saved.tolist()

    def may_merge(self, a: Sequence[Unit], b: Sequence[Unit]) -> bool:
        alike = a[-1].moves == b[0].moves or self.is_whole(a, b)
        return alike and self.pins.get(a[0][1]) == self.pins.get(b[0][1])

    def is_whole(self, a: Sequence[Unit], b: Sequence[Unit]) -> bool:
        last = a[-1][1]
        return last in self.whole and self.whole[last] == self.whole.get(b[0][1])


def _rank(nbytes: int, most: float, crossing: int) -> tuple[bool, float, int]:
    """How good it is to merge two groups that save so many bytes together, where so many cross between them."""
    return (True, crossing, -nbytes) if nbytes <= most else (False, -nbytes, 0)
