"""Who computes which value of a step, who reads it, and where it is copied, for questions about placement.

A value is what a storage holds from one write to the next. Views are no values of their own: who reads one, reads what
its storage holds.
"""

from __future__ import annotations

from ...ir.net import Net
from ...ir.operator import Operator
from ...ir.placement import same_memory
from .crossings import is_copy, only_views

__all__ = ["Flow"]


class Flow:
    """The values of a net, numbered in the order in which they come to be.

    Attributes:
        storage: of each value, what holds it.
        maker: of each value, the position of the operator that made it; -1: it is there before the first.
        source: of each value that a copy made from one in another memory, that value; else -1.
        readers: of each value, how many operators compute with it; being handed back, or being there for the next step,
            counts as one.
        copies: of each value that is copied to another memory, what the copies make.
        reads: of each operator that computes, the values that it reads, each once.
        makes: of each operator that computes, the values that it makes.
    """

    def __init__(self, net: Net) -> None:
        self.net = net
        self.storage: list[str] = []
        self.maker: list[int] = []
        self.source: list[int] = []
        self.readers: list[int] = []
        self.copies: dict[int, list[int]] = {}
        self.reads: dict[int, tuple[int, ...]] = {}
        self.makes: dict[int, tuple[int, ...]] = {}
        self.held: dict[str, int] = {}
        for position, op in enumerate(net.ops):
            if self.crosses(op):
                self.copy(position, op)
            elif op.type != "Free" and not only_views(op):
                self.compute(position, op)
        blobs = net.blobs
        for name in dict.fromkeys([*net.external_outputs, *net.external_inputs]):
            self.readers[self.value(blobs[name].storage)] += 1

    def crosses(self, op: Operator) -> bool:
        """Whether the operator copies from one memory to another."""
        blobs = self.net.blobs
        return is_copy(op, self.net.dialect) and not same_memory(
            blobs[op.inputs[0]].device, blobs[op.outputs[0]].device
        )

    def value(self, storage: str) -> int:
        """What a storage holds now."""
        held = self.held.get(storage)
        return self.new(storage, -1) if held is None else held

    def new(self, storage: str, maker: int, source: int = -1) -> int:
        """A new value of a storage."""
        number = self.held[storage] = len(self.storage)
        self.storage.append(storage)
        self.maker.append(maker)
        self.source.append(source)
        self.readers.append(0)
        return number

    def copy(self, position: int, op: Operator) -> None:
        """Note a copy."""
        source = self.value(self.net.blobs[op.inputs[0]].storage)
        made = self.new(self.net.blobs[op.outputs[0]].storage, position, source)
        self.copies.setdefault(source, []).append(made)

    def compute(self, position: int, op: Operator) -> None:
        """Note an operator that computes."""
        blobs, names = self.net.blobs, op.inputs
        if self.net.dialect.workspace:
            names += tuple([name for name in self.net.dialect.nested(op) if name in blobs])
        reads = tuple(dict.fromkeys([self.value(blobs[name].storage) for name in names]))
        for value in reads:
            self.readers[value] += 1
        viewed = op.effects.viewing if op.effects.views else ()
        self.reads[position] = reads
        self.makes[position] = tuple([
            self.new(blobs[name].storage, position) for k, name in enumerate(op.outputs) if k not in viewed
        ])  # fmt: skip
