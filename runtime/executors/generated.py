"""The generated functions of a plan: bound to sizes, and asked which instruction failed."""

from __future__ import annotations

import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Final

from torch import Tensor

from graphir.errors import RunError
from graphir.ir.size import Dims

from ..codegen.writer import ThreadCode
from ..executor import Feedable, Kept, Setting
from ..failures.faults import fault, writes_state
from ..kernels.buffers import Buffers, bytes_of
from ..observing.probes import Clock, HostClock, Probe

__all__ = ["Generated", "OnHost", "Stopped", "sizes_of", "start_anew"]

_KEPT_SIZES: Final = 64
"""For how many sizes the bound functions are kept."""


class Stopped(BaseException):
    """Raised in a thread once another one has failed."""


class Generated:
    """The functions of all threads of a plan, and what they are bound to for recent sizes.

    Args:
        setting: what they run.
        threads: the code of each.

    Attributes:
        sizes: those of all steps since the last one that failed, by the values of their dimensions.
    """

    def __init__(self, setting: Setting, threads: Sequence[ThreadCode]) -> None:
        self.setting, self.threads = setting, threads
        self.bound: dict[tuple[int, ...], list[Callable[..., tuple[Tensor, ...]]]] = {}
        self.sizes: dict[tuple[int, ...], Dims] = {}

    def functions(self, dims: Dims) -> list[Callable[..., tuple[Tensor, ...]]]:
        """Each thread's function for these sizes."""
        functions = self.bound.get(key := tuple(dims.values()))
        if functions is None:
            if len(self.bound) >= _KEPT_SIZES:
                del self.bound[next(iter(self.bound))]
            functions = self.bound[key] = [code.bind(dims) for code in self.threads]
            self.sizes[key] = dict(dims)
        return functions

    def forget(self) -> None:
        """Forget all sizes."""
        self.bound.clear()
        self.sizes.clear()

    def blame(self, errors: Sequence[BaseException | None], dims: Dims, step: int) -> RunError:
        """The error for what threads raised; the first failure is to blame for those that it stopped."""
        plan = self.setting.plan
        failed = [(i, e) for i, e in enumerate(errors) if e is not None and not isinstance(e, Stopped)]
        if not failed:
            return RunError(
                "the threads of the session were ended during a step",
                where=f"plan {plan.name!r}, step {step}",
                fix="before the program ends, join the thread that makes steps",
            )
        thread, cause = failed[0]
        line = _failed_at(self.threads[thread], cause)
        position = -1 if line is None else self.threads[thread].instructions[line]
        error = fault(
            plan,
            plan.instructions[position] if position >= 0 else None,
            step,
            cause,
            dims=dims,
            binding=self.setting.binding,
            usable=not any(self.wrote(code, e) for code, e in zip(self.threads, errors, strict=True)),
        )
        error.__cause__ = cause
        return error

    def wrote(self, code: ThreadCode, error: BaseException | None) -> bool:
        """Whether a thread may have written state before it ended."""
        line = None if error is None else _failed_at(code, error)
        executed = code.instructions if line is None else code.instructions[: line + 1]
        plan = self.setting.plan
        return any(writes_state(plan, plan.instructions[position]) for position in executed if position >= 0)


def _failed_at(code: ThreadCode, error: BaseException) -> int | None:
    """The line of a thread's function that raised, None where none did."""
    for frame, line in traceback.walk_tb(error.__traceback__):
        if frame.f_code is code.code:
            return line
    return None


class OnHost(ABC):
    """An executor of generated code on the host; the variant that calls a probe is written when first asked for.

    Attributes:
        setting: what to run.
        generate: writes the code of each thread.
        plain: the code without a probe.
        buffers: what copies receive into, whether with a probe or without.
    """

    setting: Setting
    generate: Callable[..., Sequence[ThreadCode]]
    plain: Generated

    def __init__(self) -> None:
        self.clock: Clock = HostClock()
        self.observed: Generated | None = None
        self.buffers: Buffers = {}

    def run(self, dims: Dims, inputs: Sequence[Feedable], step: int) -> Sequence[Tensor]:
        """One step; see :class:`.executor.Executor`."""
        return self.attempt(self.plain, dims, inputs, (step,))

    def run_observed(self, dims: Dims, inputs: Sequence[Feedable], step: int, probe: Probe) -> Sequence[Tensor]:
        """One step with a probe; see :class:`.observing.probes.Observable`."""
        if self.observed is None:
            self.observed = Generated(self.setting, self.generate(observed=True))
        return self.attempt(self.observed, dims, inputs, (step, probe.begin, probe.end))

    def attempt(
        self, generated: Generated, dims: Dims, inputs: Sequence[Feedable], first: tuple[Any, ...]
    ) -> Sequence[Tensor]:
        """One step; where it fails, receive buffers start anew."""
        try:
            return self.execute(generated, dims, inputs, first)
        except BaseException:
            start_anew(self.buffers, self.plain, self.observed)
            raise

    def kept(self) -> Kept:
        """See :class:`.observing.probes.Observable`."""
        return Kept(self.setting.plan.buffers, bytes_of(self.buffers), sizes_of(self.plain, self.observed))

    @abstractmethod
    def execute(
        self, generated: Generated, dims: Dims, inputs: Sequence[Feedable], first: tuple[Any, ...]
    ) -> Sequence[Tensor]:
        """One step of this code, whose functions take *first* before their inputs: the number of steps done, …"""

    @abstractmethod
    def close(self) -> None:
        """End what it has started."""


def start_anew(buffers: Buffers, *variants: Generated | None) -> None:
    """Give receive buffers back after a step that failed, and forget the sizes of all steps: this one may have filled
    some of the buffers, or memory may have run out while one was taken."""
    for buffer in buffers.values():
        buffer.let_go()
    for code in variants:
        if code is not None:
            code.forget()


def sizes_of(*variants: Generated | None) -> list[Dims]:
    """The sizes of all steps that variants of one plan's code have made since one failed, each once."""
    return list({key: dims for code in variants if code is not None for key, dims in code.sizes.items()}.values())
