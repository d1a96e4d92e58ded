"""Which operators and storages are connected by what may run on several devices, and the devices around these.

::

    conv @gpu:0 ──▶ relu, free ──▶ max_pool, free ──▶ layer @gpu:1      connected with two devices, which contend
    fc @gpu:1 ──▶ tanh, free ──▶ view, which goes with tanh             connected with gpu:1 alone, and goes there

What is connected is counted in nodes, with numbers: devices come first, then operators, then blobs.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Generic, TypeAlias, TypeVar

import numpy as np

from graphir.ir.device import Device
from graphir.ir.opset import ACCUMULATES
from graphir.ir.program import Program
from graphir.ir.touches import Flags, Numbers

__all__ = ["Connected", "Connections", "Free", "Unit"]

Free: TypeAlias = int | str
"""What goes to one side as a whole: an operator by its position, with what follows it, or an external input."""

Unit: TypeAlias = Free | Device
"""The same, or all that is on a device already."""

T = TypeVar("T", bound=Hashable)


class Connected(Generic[T]):
    """Which of all that were joined are connected: a union-find."""

    def __init__(self) -> None:
        self.above: dict[T, T] = {}

    def top(self, one: T) -> T:
        """What stands for everything that is connected with *one*."""
        above = self.above
        while (other := above.setdefault(one, one)) != one:
            above[one] = one = above[other]
        return one

    def tops(self) -> dict[T, T]:
        """What stands for each of them."""
        return {one: self.top(one) for one in list(self.above)}

    def join(self, one: T, others: Iterable[T]) -> None:
        """Connect *one* with each of the others."""
        top = self.top(one)
        for other in others:
            self.above[self.top(other)] = top


class Connections:
    """What is connected in a step.

    Args:
        program: captured, or replicated.
        placed: by position, the devices of forward operators that are not free.
        homes: the devices of the external inputs that are not free.
        free: the positions of the free forward operators.

    Attributes:
        unit: by operator, the node of what it goes with; -1 of reductions.
        made: by blob that is a storage, the node of the unit that makes it, or where it lives; -1 where nothing says.
        settled: by free unit that is connected with one device alone, that device.
        loose: by blob, whether it is a storage for which several devices contend.
    """

    def __init__(
        self, program: Program, placed: Mapping[int, Device], homes: Mapping[str, Device], free: Mapping[int, None]
    ) -> None:
        self.net, self.touches = program.step, program.step.touches
        self.own = self.touches.makes & (self.touches.stored == self.touches.blob)
        self.devices = list(dict.fromkeys([*self.net.devices, *placed.values(), *homes.values()]))
        self.node = {device: node for node, device in enumerate(self.devices)}
        self.ops_from = len(self.devices)
        self.blobs_from = self.ops_from + len(self.net.ops)
        self.unit: Numbers = np.full(len(self.net.ops), -1, np.int64)
        self.unit[list(free)] = [self.ops_from + i for i in free]
        self.unit[list(placed)] = [self.node[device] for device in placed.values()]
        self.made = self.made_early(homes)
        self.place_rest()
        self.settled: dict[Unit, Device] = {}
        self.loose: Flags = np.zeros(len(self.made), np.bool_)
        self.settle()

    def named(self, node: int) -> Unit:
        """The unit that a node stands for."""
        if node < self.ops_from:
            return self.devices[node]
        return node - self.ops_from if node < self.blobs_from else self.touches.names[node - self.blobs_from]

    def made_early(self, homes: Mapping[str, Device]) -> Numbers:
        """What makes storages, as far as the forward and the external inputs say: what a function's operators hand on
        goes with its result, which comes after them."""
        number, early = self.touches.number, self.own & (self.unit[self.touches.op] >= 0)
        found: Numbers = np.full(len(number), -1, np.int64)
        found[self.touches.blob[early]] = self.unit[self.touches.op[early]]
        for name in self.net.external_inputs:
            blob = number[name]
            found[blob] = self.node[homes[name]] if name in homes else self.blobs_from + blob
        return found

    def place_rest(self) -> None:
        """The units of the operators that are neither free nor placed, and what these make."""
        touches, unit, made = self.touches, self.unit.tolist(), self.made.tolist()
        begins, ends, inputs = touches.begin.tolist(), touches.end.tolist(), touches.inputs.tolist()
        storage, own, owner = touches.stored.tolist(), self.own.tolist(), touches.storage.tolist()
        ops, number, node, ops_from = self.net.ops, touches.number, self.node, self.ops_from
        for i in np.flatnonzero(self.unit < 0).tolist():
            op = ops[i]
            phase, begin, beside = op.phase, begins[i], -1
            if phase == "reduce":
                continue
            if phase == "update" or op.effects.shows:
                beside = made[storage[begin]] if inputs[i] else -1
            elif op.of:
                of = number[op.of]
                # What adds gradients up, or computes that of a view, may run elsewhere than what it belongs to.
                beside = ops_from + i if op.type == ACCUMULATES or owner[of] != of else made[owner[of]]
            unit[i] = beside = beside if beside >= 0 else node[op.device]
            for touch in range(begin + inputs[i], ends[i]):
                if own[touch] and made[storage[touch]] < 0:
                    made[storage[touch]] = beside
        self.unit, self.made = np.array(unit, np.int64), np.array(made, np.int64)

    def joined(self) -> dict[int, int]:
        """What stands for all that is connected with a node: for free units, and the storages that these make or
        read."""
        found, blobs_from = Connected[int](), self.blobs_from
        for name in self.net.external_inputs:
            blob = self.touches.number[name]
            if self.made[blob] == blobs_from + blob:
                found.join(blobs_from + blob, ())
        nodes = (self.touches.stored + blobs_from).tolist()
        for i in np.flatnonzero(self.unit >= self.ops_from).tolist():
            found.join(int(self.unit[i]), nodes[self.touches.begin[i] : self.touches.end[i]])
        return found.tops()

    def settle(self) -> None:
        """Tell what is connected with one device alone from that for which several contend."""
        tops, made, blobs_from = self.joined(), self.made, self.blobs_from
        top = np.full(blobs_from + len(made), -1, np.int64)
        top[list(tops)] = list(tops.values())
        of_blob = top[blobs_from + self.touches.storage]
        around = self.around(of_blob)
        count, only = around.sum(1), around.argmax(1).tolist()
        alone = (count == 1).tolist()
        for node, one in tops.items():
            if alone[one] and (node < blobs_from or made[node - blobs_from] == node):
                self.settled[self.named(node)] = self.devices[only[one]]
        self.loose[self.touches.storage[(of_blob >= 0) & (count > 1)[of_blob]]] = True

    def around(self, top: Numbers) -> Flags:
        """By node that stands for what is connected, and device, whether that makes or reads some of it.

        Args:
            top: by blob, the node that stands for what its storage is connected with; -1 where there is none.
        """
        touches, made = self.touches, self.made.copy()
        names = touches.names
        found: Flags = np.zeros((self.blobs_from + len(made), self.ops_from), np.bool_)
        storages = np.flatnonzero((top >= 0) & (touches.storage == np.arange(len(made))))
        unknown = storages[made[storages] < 0]
        made[unknown] = [self.node[self.net.blobs[names[blob]].device] for blob in unknown.tolist()]
        fixed = storages[made[storages] < self.ops_from]
        found[top[fixed], made[fixed]] = True
        unit = self.unit[touches.op]  # what an operator overwrites or shows it reads, and what it makes was looked at
        reads = ~touches.makes & (unit >= 0) & (unit < self.ops_from) & (top[touches.blob] >= 0)
        found[top[touches.blob[reads]], unit[reads]] = True
        return found
