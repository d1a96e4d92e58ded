"""What runs behind a module with parameters and has none itself: units of its own, where it saves much.

::

    conv, relu                       a unit: what relu saves is a small part
    conv, pool1, pool2, …, tanh, …   a unit conv, one for each layer behind it, and one for each result of a function

Layers are units by their paths, as modules with parameters are. What functions compute, and what a layer computes that
is called several times or saves much by itself, is a unit by the first result of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from copy import copy
from typing import Final

import numpy as np

from graphir.ir.blob import STATE_ROLES
from graphir.ir.device import Device
from graphir.ir.names import base_name, micro_batch_of, prefix_of

from ..module_patterns import module_paths
from .units import Unit, Units

__all__ = ["CUT_OFF", "with_tails"]

CUT_OFF: Final = 1 / 12
"""What a tail saves, of all that its device saves, is cut off where it is more. The fewest groups that there are to be
are as many."""


def with_tails(units: Units) -> Units | None:
    """The units with those tails cut off that save much; None where there are none."""
    found = copy(units)
    found.of_op = [unit if early else None for unit, early in zip(units.of_op, units.step.forward, strict=True)]
    behind = _Tails(found).behind
    if not behind:
        return None
    found.cut_off = frozenset([unit for tail in behind.values() for unit in tail])
    found.at = {u: i for i, u in enumerate([u for unit in units.at for u in (unit, *behind.get(unit, ()))])}
    found.of_state = {}
    found.place_rest()
    found.rank = found.ranked()
    return found


class _Tails:
    """What is cut off from units.

    Args:
        units: of a program. The operators of the forward get the new ones.

    Attributes:
        least: by device, the bytes that a tail saves at least that is cut off.
        behind: by unit, those that were cut off from it, in order.
    """

    def __init__(self, units: Units) -> None:
        self.units, self.net, self.weighted, step = units, units.net, units.weighted, units.step
        saved, rank = np.where(step.forward, step.saved, 0), units.rank
        own = np.array([op.module in self.weighted for op in self.net.ops], np.bool_)
        total, tails = np.zeros(len(step.devices), np.int64), np.zeros(len(units.at), np.int64)
        np.add.at(total, step.at[rank >= 0], saved[rank >= 0])
        np.add.at(tails, rank[(rank >= 0) & ~own], saved[(rank >= 0) & ~own])
        self.saved: list[int] = saved.tolist()
        self.least = {device: nbytes * CUT_OFF for device, nbytes in zip(step.devices, total.tolist(), strict=True)}
        self.behind: dict[Unit, list[Unit]] = {}
        pairs = zip(units.at, tails.tolist(), strict=True)
        large = [unit for unit, nbytes in pairs if nbytes > self.least[unit.device]]
        if large:
            self.cut(large)

    def cut(self, large: Sequence[Unit]) -> None:
        """Cut the tails of some units off."""
        tails: dict[tuple[Unit, int], list[int]] = {(unit, 0): [] for unit in large}
        calls = Counter[tuple[Device, str, int]]()
        ops, part = self.net.ops, 0
        for i, op in enumerate(ops):
            unit = self.units.of_op[i]
            if op.phase != "forward" or unit is None:
                continue
            part = next((own for name in op.outputs if (own := micro_batch_of(name)) is not None), part)
            calls[op.device, op.module, part] += 1
            if (unit, 0) not in tails:
                continue
            if op.module in self.weighted or self.reads_state(i):
                tails[unit, part] = []
            else:
                tails.setdefault((unit, part), []).append(i)
        paths = module_paths(self.units.program)
        leaves = paths.keys() - {path.rpartition(".")[0] for path in paths}
        for (unit, part), tail in tails.items():
            one = len({prefix_of(ops[i].outputs[0]) for i in tail if ops[i].outputs}) == 1
            if not one or self.bytes_saved(tail) <= self.least[unit.device] / self.units.parts:
                continue
            for number, run in enumerate(self.runs(tail)):
                known = self.behind.setdefault(unit, [])
                if number == len(known):
                    module = ops[run[0]].module
                    alone = module in leaves and calls[unit.device, module, part] == len(run)
                    known.append(unit._replace(module=module, call=0, piece="" if alone else self.name(run)))
                for i in run:
                    self.units.of_op[i] = known[number]

    def reads_state(self, i: int) -> bool:
        blobs = self.net.blobs
        return any(blobs[blobs[name].storage].role in STATE_ROLES for name in self.net.ops[i].inputs)

    def bytes_saved(self, ops: Sequence[int]) -> int:
        return sum(self.saved[i] for i in ops)

    def runs(self, tail: Sequence[int]) -> Iterator[Sequence[int]]:
        """A tail in parts: of one module each, and of one result each where a module saves much."""
        ops, begin = self.net.ops, 0
        for k in range(1, len(tail) + 1):
            if k == len(tail) or ops[tail[k]].module != ops[tail[begin]].module:
                run, begin = tail[begin:k], k
                device = ops[run[0]].device
                yield from (
                    self.results(run) if self.bytes_saved(run) > self.least[device] / self.units.parts else [run]
                )

    def results(self, run: Sequence[int]) -> Iterator[Sequence[int]]:
        """A run of operators, cut before each that makes bytes of its own and may be elsewhere than the one before."""
        net, begin = self.net, 0
        for k in range(1, len(run)):
            op, before = net.ops[run[k]], net.ops[run[k - 1]]
            inside = before.of and self.units.step.maker(net.blobs[before.of].storage) >= run[k]
            if not (op.effects.shows or op.effects.writes or inside):
                yield run[begin:k]
                begin = k
        yield run[begin:]

    def name(self, run: Sequence[int]) -> str:
        """What a unit is called by: its first result."""
        return base_name(next(name for i in run for name in self.net.ops[i].outputs))
