"""What runs behind a module with parameters, or in front of the first, and has none itself: units of its own, where it
saves much.

::

    conv, relu                       a unit: what relu saves is a small part
    conv, pool1, pool2, …, tanh, …   a unit conv, one for each layer behind it, and one for each result of a function
    mul, tanh, …, linear             the same in front of linear; mul stays, if it reads a parameter of the model's own

Layers are units by their paths, as modules with parameters are. What functions compute, and what a layer computes that
is called several times or saves much by itself, is a unit by the first result of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from copy import copy
from functools import cached_property
from typing import Final

import numpy as np

from graphir.ir.blob import STATE_ROLES
from graphir.ir.device import Device
from graphir.ir.names import base_name, micro_batch_of, prefix_of

from ..activations import find_activations
from .units import Unit, Units

__all__ = ["CUT_OFF", "with_tails"]

CUT_OFF: Final = 1 / 8
"""What a tail saves, of all that its device saves, is cut off where it is more. With a twelfth, nets with a large stem,
as Inception-v3, are searched twice for nothing."""


def with_tails(units: Units) -> Units | None:
    """The units with those tails cut off that save much; None where there are none."""
    found = copy(units)
    found.of_op = [unit if early else None for unit, early in zip(units.of_op, units.step.forward, strict=True)]
    tails = _Tails(found)
    ahead, behind = tails.ahead, tails.behind
    if not ahead and not behind:
        return None
    found.cut_off = frozenset([unit for cut in (ahead, behind) for tail in cut.values() for unit in tail])
    order = [u for unit in units.at for u in (*ahead.get(unit, ()), unit, *behind.get(unit, ()))]
    found.at = {unit: i for i, unit in enumerate(order)}
    found.place_rest()
    found.rank = found.ranked()
    return found


class _Tails:
    """What is cut off from units.

    Args:
        units: of a program. The operators of the forward get the new ones.

    Attributes:
        least: by device, the bytes that a tail saves at least that is cut off.
        ahead, behind: by unit, those that were cut off from it, in order: in front of its module, and behind it.
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
        self.ahead: dict[Unit, list[Unit]] = {}
        self.behind: dict[Unit, list[Unit]] = {}
        pairs = zip(units.at, tails.tolist(), strict=True)
        large = [unit for unit, nbytes in pairs if nbytes > self.least[unit.device]]
        if large:
            self.cut(large)

    def cut(self, large: Sequence[Unit]) -> None:
        """Cut the tails of some units off."""
        wanted = set(large)
        heads: dict[tuple[Unit, int], list[int]] = {}
        tails: dict[tuple[Unit, int], list[int]] = {}
        calls = Counter[tuple[Device, str, int]]()
        ops, part = self.net.ops, 0
        for i, op in enumerate(ops):
            unit = self.units.of_op[i]
            if op.phase != "forward" or unit is None:
                continue
            part = next((own for name in op.outputs if (own := micro_batch_of(name)) is not None), part)
            calls[op.device, op.module, part] += 1
            if unit not in wanted:
                continue
            if op.module in self.weighted:
                heads.setdefault((unit, part), tails.get((unit, part), []))
                tails[unit, part] = []
            elif (unit, part) in heads and self.reads_state(i):
                tails[unit, part] = []
            else:
                tails.setdefault((unit, part), []).append(i)
        paths = self.units.program.module_paths
        leaves = paths.keys() - {path.rpartition(".")[0] for path in paths}
        for cut, found in ((heads, self.ahead), (tails, self.behind)):
            for (unit, part), tail in cut.items():
                one = len({prefix_of(ops[i].outputs[0]) for i in tail if ops[i].outputs}) == 1
                if not one or self.bytes_saved(tail) <= self.least[unit.device] / self.units.parts:
                    continue
                for number, run in enumerate(self.runs(tail)):
                    known = found.setdefault(unit, [])
                    if number == len(known):
                        module = ops[run[0]].module
                        alone = module in leaves and calls[unit.device, module, part] == len(run)
                        piece = "" if alone else self.name(run)
                        stays = cut is heads and self.stays(run, piece)
                        known.append(Unit(unit.device, module, 0, piece, stays))
                    for i in run:
                        self.units.of_op[i] = known[number]

    def stays(self, run: Sequence[int], piece: str) -> bool:
        """Whether operators of a head stay where they are: they read state, which would have to come along, or make
        what no pass moves by its name, as from what has no gradient."""
        return any(map(self.reads_state, run)) or (piece != "" and piece not in self.movable)

    @cached_property
    def movable(self) -> frozenset[str]:
        """What can be moved by name."""
        return frozenset(find_activations(self.units.program))

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
