"""What an executor is, and what every executor is built from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from graphir.analysis.memory import Memory, memory
from graphir.ir.device import Device
from graphir.ir.names import prefix_of
from graphir.ir.operator import Operator
from graphir.ir.plan import Plan
from graphir.ir.size import Dims

__all__ = ["Executor", "Feedable", "Held", "Kept", "OnDevices", "Setting"]

Feedable: TypeAlias = Tensor | float
"""What stands for an input blob: a tensor, or the value of a learning rate that only optimizers read."""


@dataclass(frozen=True)
class Setting:
    """A plan with what its steps run on.

    Attributes:
        plan: what to execute.
        state: the tensors of the plan's parameters, buffers, optimizer state and constants, by blob. Every step reads
            and overwrites these same tensors.
        inputs: the blobs that a step is given, in order.
        binding: the real device of each logical one.
        generators: a random generator for each logical device.
        deadline: after how many seconds without progress threads that wait for each other are stopped; None: never.
        lasting: whether the outputs are ordinary tensors, as autograd and callers hand them on; else they are those of
            inference mode, which costs a little less, and a session copies what it hands back.
        consumed: the inputs that a step is handed in a list each, and takes out of the list where the plan frees them.
    """

    plan: Plan
    state: Mapping[str, Tensor]
    inputs: tuple[str, ...]
    binding: Mapping[Device, torch.device]
    generators: Mapping[Device, torch.Generator]
    deadline: float | None = None
    lasting: bool = False
    consumed: frozenset[str] = frozenset()

    def mode(self) -> AbstractContextManager[None]:
        """What operators run in."""
        return torch.no_grad() if self.lasting else torch.inference_mode()

    def replica(self, op: Operator) -> int:
        """The replica whose random numbers *op* draws."""
        replicas = self.plan.program.replicas
        prefix = prefix_of(op.outputs[0]) if op.outputs else ""
        return replicas.index(prefix) if prefix in replicas else 0


class Executor(Protocol):
    """Executes the steps of one plan.

    What it guarantees, whatever it does at the same time (:func:`graphir.runtime.check` builds on this and on nothing
    else):

    * within a step, a lane executes its instructions in their order, and an instruction behind a wait starts after
      everything that its lane did before the last record of that event above the wait in the plan;
    * an instruction of a step starts after every instruction of the step before it, on any lane, is finished. An
      executor that leaves work in a device's queue when ``run`` returns puts all lanes of the next step behind it.
    """

    def run(self, dims: Dims, inputs: Sequence[Feedable], step: int) -> Sequence[Tensor]:
        """One step.

        Args:
            dims: the value of each dimension. An executor may keep what it has prepared for the last few.
            inputs: in the order of ``Setting.inputs``.
            step: how many steps were done before.

        Returns:
            The external outputs of the plan's step, in order.

        Raises:
            RunError: an operator failed; every lane has stopped, and state may be half updated.
        """

    def close(self) -> None:
        """End the executor's threads, if it has any."""


class Kept(NamedTuple):
    """The receive buffers that an executor keeps from step to step.

    Attributes:
        buffers: the buffer of each storage that is received in one, as in ``Plan.buffers``.
        nbytes: by device, the bytes of its buffers so far.
        sizes: the sizes of all steps so far, or since the last one that failed. A buffer is as large as the largest of
            these steps needs.
    """

    buffers: Mapping[str, int] = MappingProxyType({})
    nbytes: Mapping[Device, int] = MappingProxyType({})
    sizes: Sequence[Dims] = ()

    def predicted(self, plan: Plan, dims: Dims) -> Memory:
        """What a step of these sizes holds: the plan as it is executed, with these buffers."""
        return memory(plan.with_(buffers=self.buffers), dims, earlier=self.sizes)


class Held(NamedTuple):
    """The bytes of one logical device, and the allocator's figures of the real one that it is bound to.

    Attributes:
        place: the real device; others may share it.
        predicted: the plan's peak at the sizes of the last step, state and inputs included.
        state: of parameters, buffers, optimizer state and constants.
        received: of the buffers for incoming copies, which are kept from step to step.
        allocator: some of ``torch.cuda.memory_stats``, in bytes and counts; empty on the host.
    """

    place: torch.device
    predicted: int
    state: int
    received: int
    allocator: Mapping[str, int]


@runtime_checkable
class OnDevices(Executor, Protocol):
    """An executor that issues work to devices with memory of their own, which do it behind the host."""

    def aside(self) -> AbstractContextManager[None]:
        """What the caller does with state in this context comes after the last step and before the next one."""

    def ledger(self) -> Mapping[Device, Held]:
        """What each device holds at the sizes of the last step: the plan's own bytes, and beside them the
        allocator's."""
