"""Where a model could be cut so that a device holds less: which modules to move, and what that costs in copies.

Modules are taken in the order in which they run, and a cut is between two of them: those behind it move, with their
parameters, activations and gradients. So what crosses is what the modules before it hand to those behind, and the
gradients of that::

    conv1   layer1   layer2 │ layer3   layer4   fc   loss
                     1.5 MiB ──▶
                     ◀── 1.5 MiB

A module that holds much is taken apart into those inside of it. Operators that belong to none of these, such as a
container's additions, go with the module that runs before them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, groupby
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from graphir.analysis.memory import Memory, StorageUse, live_bytes
from graphir.ir.blob import STATE_ROLES, dense_nbytes
from graphir.ir.device import Device
from graphir.ir.operator import Operator
from graphir.ir.plan import Plan
from graphir.ir.size import Dims

__all__ = ["Cut", "cheapest_cut"]

_PARTS: Final = 16
"""A module that holds more than this part of a device's peak is taken apart."""

_LEAST: Final = 0.05
"""A cut that lowers the peak by less than this part of it is not taken."""

_LOSS: Final = "loss"
"""The module of what the loss runs, which is none of the model's."""


class Cut(NamedTuple):
    """Modules to move.

    Attributes:
        modules: patterns of them, as ``shift_modules`` takes them.
        before: the most bytes that the device holds.
        after: the same without these modules.
        copied: what crosses in a step, then.
    """

    modules: tuple[str, ...]
    before: int
    after: int
    copied: int


def cheapest_cut(plan: Plan, device: Device, target: Sequence[StorageUse], predicted: Memory, room: int) -> Cut | None:
    """The cut by which the higher peak of two devices falls most for each byte that crosses; None where none helps.

    Args:
        plan: what was executed.
        device: which holds too much.
        target: what is held already by the device to which the modules would go.
        predicted: what the plan holds.
        room: bytes that a device has. Cuts after which one of the two holds more are taken only if there are no others.
    """
    held = [use for use in predicted.uses if use.device == device]
    model = _Model(plan, device, held, predicted)
    if len(model.modules) < 2:
        return None
    count = len(model.modules)
    crossing = model.crossing(predicted.dims)
    here = live_bytes(held, predicted.positions)
    there = live_bytes(target, predicted.positions)
    before = int(here.max())
    best: tuple[tuple[float, float], Cut] | None = None
    for first in range(count - 1, 0, -1):
        moved: NDArray[np.int64] = live_bytes(model.uses[first], predicted.positions)
        here, there = here - moved, there + moved
        back = crossing[first] // 2
        after, other = int(here.max()) + back, int(there.max()) + back
        fall = before - max(after, other)
        if fall < _LEAST * before:
            continue
        rank = (float(max(after, other) <= room), fall / max(crossing[first], 1))
        if best is None or rank > best[0]:
            best = rank, Cut(tuple(model.patterns(first)), before, after, crossing[first])
    return best[1] if best else None


class _Model:
    """The modules of a model that run on a device, in order, and what each holds.

    Attributes:
        modules: their paths.
        uses: what each holds, by its position among them.
    """

    def __init__(self, plan: Plan, device: Device, held: Sequence[StorageUse], predicted: Memory) -> None:
        self.plan, self.device = plan, device
        self.ran = [op for op in plan.step.ops if op.phase == "forward" and op.device == device]
        state = {use.module for use in held if use.category == "parameters"}
        paths = dict.fromkeys([op.module for op in self.ran if op.module and (op.module != _LOSS or _LOSS in state)])
        self.children: dict[str, dict[str, None]] = {}
        for path in paths:
            parts = path.split(".")
            for depth in range(len(parts)):
                self.children.setdefault(".".join(parts[:depth]), {})[".".join(parts[: depth + 1])] = None
        at = predicted.peak_position(device)
        weights: dict[str, int] = {}
        for use in held:
            if use.start <= at < use.end:
                for path in _enclosing(use.module):
                    weights[path] = weights.get(path, 0) + use.nbytes
        self.modules = list(self.taken_apart("", weights, max(predicted.peak[device] // _PARTS, 1)))
        self.index = {path: i for i, path in enumerate(self.modules)}
        self.makers = self.made_in()
        self.uses: list[list[StorageUse]] = [[] for _ in self.modules]
        for use in held:
            i = self.makers.get(use.blob, self.of(use.module))
            if i is not None and use.category not in ("inputs", "receive buffers", "copies"):
                self.uses[i].append(use)

    def taken_apart(self, path: str, weights: Mapping[str, int], most: int) -> Iterator[str]:
        """The modules inside of one, in the order in which they run, each small or without modules inside."""
        for child in self.children.get(path, ()):
            if weights.get(child, 0) > most and child in self.children:
                yield from self.taken_apart(child, weights, most)
            else:
                yield child

    def of(self, module: str) -> int | None:
        """The position of the module that *module* is, or is in."""
        return next((self.index[path] for path in _enclosing(module) if path in self.index), None)

    def operators(self) -> Iterator[tuple[Operator, int]]:
        """The operators on the device, each with its module: without one, that of the operator before it. None where
        all of them are the model's own."""
        if not self.modules:
            return
        latest = {"forward": 0, "backward": len(self.modules) - 1}
        for op in self.plan.step.ops:
            if op.device == self.device:
                i = self.of(op.module)
                i = latest.get(op.phase, 0) if i is None else i
                latest[op.phase] = i
                yield op, i

    def made_in(self) -> dict[str, int]:
        """The module that makes each storage."""
        blobs = self.plan.step.blobs
        found: dict[str, int] = {}
        for op, i in self.operators():
            for name in op.outputs:
                if name not in self.plan.step.external_inputs:
                    found.setdefault(blobs[name].storage, i)
        return found

    def crossing(self, dims: Dims) -> list[int]:
        """For each module, what would cross if it and all behind it moved."""
        blobs = self.plan.step.blobs
        returned = {blobs[name].storage for name in self.plan.step.gradients}
        last: dict[str, int] = {}
        for op, i in self.operators():
            for name in op.inputs if op.phase in ("forward", "backward") else ():
                storage = blobs[name].storage
                last[storage] = max(last.get(storage, 0), i)
        modules = {name: op.module for op in self.plan.init.ops for name in op.outputs}
        change = [0] * (len(self.modules) + 1)
        for storage, reader in last.items():
            blob = blobs[storage]
            kept = blob.role in STATE_ROLES
            maker = self.of(modules.get(storage, "")) if kept else self.makers.get(storage)
            if blob.device == self.device and maker is not None and maker < reader:
                nbytes = dense_nbytes(blob, dims) * (2 if kept or storage in returned else 1)
                change[maker + 1] += nbytes
                change[reader + 1] -= nbytes
        return list(accumulate(change))[:-1]

    def patterns(self, first: int) -> Iterator[str]:
        """As few patterns as possible that name the modules from position *first* on."""
        moved = set(self.modules[first:])
        whole = self.whole("", moved)
        for (parent, numbered), alike in groupby(whole, _siblings):
            paths = list(alike)
            numbers = [int(path.rpartition(".")[2]) for path in paths] if numbered else []
            if len(numbers) > 1 and numbers == list(range(numbers[0], numbers[-1] + 1)):
                yield f"{parent}[{numbers[0]}:{numbers[-1] + 1}]"
            else:
                yield from paths

    def whole(self, path: str, moved: set[str]) -> Iterator[str]:
        """Those modules inside of one that move as a whole."""
        for child in self.children.get(path, ()):
            parts = [child] if child in self.index else [m for m in self.modules if m.startswith(f"{child}.")]
            if moved.issuperset(parts):
                yield child
            elif child not in self.index:
                yield from self.whole(child, moved)


def _siblings(path: str) -> tuple[str, bool]:
    """The part of a module's path that it shares with others if one range of indices may name them, and whether it has
    an index."""
    parent, _, name = path.rpartition(".")
    return (parent, True) if name.isdecimal() else (path, False)


def _enclosing(module: str) -> Iterable[str]:
    """A module's path, and those of the modules that it is in, the inner ones first."""
    parts = module.split(".") if module else []
    return [".".join(parts[:depth]) for depth in range(len(parts), 0, -1)]
