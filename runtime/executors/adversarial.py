"""The adversarial executor, for tests: the plan's lanes interleaved as badly as its events allow.

One thread takes the lanes' instructions in random bursts. Each lane keeps its order, a wait holds its lane back until
the event is recorded, and nothing else orders them, as on real streams and threads.

In each step one lane is the *laggard*: it gets one instruction done only when no other lane can go on. So of two
instructions that no chain of events orders, the one on another lane comes before the laggard's: whatever it needs of
the laggard's lane lies before, and has been done. Each lane has its turn, so that in as many steps as there are lanes,
whatever the seed, each of the two comes first at least once.

The instructions are executed as by the reference executor: a value that was not made yet, was freed or overwritten
when it is reached raises. Copies fill receive buffers, which are kept from step to step; so does a value whose buffer
was filled again. The memory of what is freed is filled with NaN, or with integers beyond every index, for
whoever still sees it through a view that the plan does not know of.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from random import Random
from typing import Final

import torch
from torch import Tensor

from graphir.errors import PlanError
from graphir.ir.device import Device
from graphir.ir.operator import Operator
from graphir.ir.plan import Event
from graphir.ir.size import Dims
from graphir.ir.text import instruction_text

from ..executor import Feedable, Kept, Setting
from ..kernels.buffers import Buffer, Buffers, buffer_on, bytes_of
from ..kernels.communication import copy
from ..observing.probes import Probe
from .reference import Interpretation, Reference

__all__ = ["Adversarial"]

_BURSTS: Final = (1, 3, 10, 1000)

_NAN: Final = 0xFF
"""Ones in every bit of a floating-point number."""
_FAR: Final = 0x7F
"""A byte that makes any integer larger than what can be an index; -1 would stand for a slot without a gradient."""


class Adversarial(Reference):
    """See :mod:`graphir.runtime.executors.adversarial`.

    Args:
        setting: what to run.
        threads: how many threads one kernel may use; None: as many as in the thread that makes the executor.
        seed: equal seeds give each step equal interleavings.
    """

    def __init__(self, setting: Setting, threads: int | None = None, seed: int = 0) -> None:
        super().__init__(setting, threads)
        self.seed = seed
        self.buffers: Buffers = {}
        self.sizes: dict[tuple[int, ...], Dims] = {}
        self.lanes: dict[str, list[int]] = {}
        self.record_of: dict[int, int | None] = {}
        recorded: dict[Event | None, int] = {}
        for position, instruction in enumerate(setting.plan.instructions):
            self.lanes.setdefault(instruction.lane, []).append(position)
            if instruction.kind == "record":
                recorded[instruction.event] = position
            elif instruction.kind == "wait":
                self.record_of[position] = recorded.get(instruction.event)
        self.laggards = list(self.lanes)
        Random(seed).shuffle(self.laggards)

    def interpretation(self, dims: Dims, inputs: Sequence[Feedable], step: int) -> Interpretation:
        """What executes the step's instructions, on inputs that may be overwritten."""
        self.sizes[tuple(dims.values())] = dict(dims)
        owned = [copy(value) if isinstance(value, Tensor) else value for value in inputs]
        return _Poisoning(self.setting, dims, owned, step, self.buffers)

    def interpret(self, dims: Dims, inputs: Sequence[Feedable], step: int, probe: Probe | None) -> Sequence[Tensor]:
        """One step, with a probe where one is given; where it fails, receive buffers start anew."""
        try:
            return super().interpret(dims, inputs, step, probe)
        except BaseException:
            self.buffers.clear()
            self.sizes.clear()
            raise

    def kept(self) -> Kept:
        """See :class:`.observing.probes.Observable`."""
        return Kept(self.setting.plan.buffers, bytes_of(self.buffers), list(self.sizes.values()))

    def order(self, step: int) -> Iterator[int]:
        """The positions of the plan's instructions; each is executed before the next one is asked for.

        Raises:
            PlanError: no lane can go on.
        """
        random = Random(f"{self.seed} {step}")
        laggard = self.laggards[step % len(self.laggards)] if self.laggards else ""
        lanes = {lane: deque(positions) for lane, positions in self.lanes.items()}
        done: set[int] = set()
        while ready := [lane for lane, rest in lanes.items() if self.is_ready(rest, done)]:
            leading = [lane for lane in ready if lane != laggard]
            rest = lanes[random.choice(leading or ready)]
            for _ in range(random.choice(_BURSTS) if leading else 1):
                done.add(rest[0])
                yield rest.popleft()
                if not self.is_ready(rest, done):
                    break
        if any(lanes.values()):
            raise self.deadlock([rest[0] for rest in lanes.values() if rest])

    def is_ready(self, rest: Sequence[int], done: Collection[int]) -> bool:
        """Whether a lane can go on with the first of its instructions that are left."""
        return bool(rest) and (rest[0] not in self.record_of or self.record_of[rest[0]] in done)

    def deadlock(self, waits: Sequence[int]) -> PlanError:
        """The error where every lane is kept back by one of these waits."""
        plan = self.setting.plan
        texts = [instruction_text(plan, plan.instructions[position]) for position in waits]
        return PlanError(
            "a deadlock: nothing records what these lanes wait for",
            at="; ".join(texts),
            where=f"plan {plan.name!r}",
            fix="emit the plan again",
        )


class _Poisoning(Interpretation):
    """One step in progress, in which freed memory holds nothing of use, and copies share receive buffers.

    Attributes:
        buffers: the memory; those that are missing are added.
        filled: for each buffer, the storage that it holds, and the copy that filled it.
        refilled: for each storage whose buffer holds another one by now, the copy that filled it.
    """

    def __init__(self, setting: Setting, dims: Dims, inputs: Sequence[Feedable], step: int, buffers: Buffers) -> None:
        self.buffers = buffers
        self.filled: dict[tuple[Device, int], tuple[str, int]] = {}
        self.refilled: dict[str, int] = {}
        super().__init__(setting, dims, inputs, step)

    def call(self, op: Operator) -> None:
        """Execute an operator; a copy into its receive buffer, if it has one."""
        super().call(op)
        if op.kind == "copy" and op.outputs[0] in self.setting.plan.buffers:
            (made,) = op.makes
            value = self.values[made]
            assert isinstance(value, Tensor)
            self.values[made] = self.fill(op.outputs[0]).receive(value)

    def fill(self, storage: str) -> Buffer:
        """The receive buffer of a storage, which holds nothing else from now on."""
        device = self.net.blob(storage).device
        key = device, self.setting.plan.buffers[storage]
        before, position = self.filled.get(key, (storage, -1))
        if position > self.position:
            what = f"the receive buffer of {storage!r} is filled when it already holds {before!r}, which comes later"
            raise self.unsound(what, position)
        if before != storage:
            self.refilled[before] = self.position
        self.filled[key] = storage, self.position
        return self.buffers.setdefault(key, buffer_on(self.setting.binding[device]))

    def read(self, name: str, version: int) -> Feedable:
        """See :class:`.reference.Interpretation`; a value whose receive buffer was filled again is no longer there."""
        value = super().read(name, version)
        storage = self.net.blob(name).storage
        if storage in self.refilled:
            what = f"{name!r} is read after the receive buffer of its storage {storage!r} was filled again"
            raise self.unsound(what, self.refilled[storage])
        return value

    def free(self, storage: str) -> list[Feedable]:
        """Drop the values of a storage, and fill its memory, unless it holds another one by now."""
        values = super().free(storage)
        if not values:
            raise self.unsound(f"storage {storage!r} is freed before it is made")
        for value in values:
            if isinstance(value, Tensor) and storage not in self.refilled:
                poison = _NAN if value.is_floating_point() else _FAR
                torch.empty(0, dtype=torch.uint8, device=value.device).set_(value.untyped_storage()).fill_(poison)
        return values
