"""Observed steps: an executor with the probes that a session wants."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

from torch import Tensor

from graphir.ir.size import Dims

from ..executor import Feedable, OnDevices, Setting
from .finite import FiniteWatch
from .measurement import Measurement
from .probes import Observable, Probe, Probes

__all__ = ["Observed"]


class Observed:
    """An executor of observed steps.

    Args:
        executor: what executes them.
        setting: its own.
        watch: what looks for NaN.
        measurement: what takes times and bytes.
    """

    def __init__(
        self,
        executor: Observable,
        setting: Setting,
        watch: FiniteWatch | None = None,
        measurement: Measurement | None = None,
    ) -> None:
        self.executor, self.setting, self.watch, self.measurement = executor, setting, watch, measurement

    def run(self, dims: Dims, inputs: Sequence[Feedable], step: int) -> Sequence[Tensor]:
        """One step; see :class:`.executor.Executor`."""
        given = dict(zip(self.setting.inputs, inputs, strict=True))
        probes: list[Probe] = []
        if self.watch is not None:
            with self.executor.aside() if isinstance(self.executor, OnDevices) else nullcontext():
                self.watch.start(step, self.setting.state, given)
            probes.append(self.watch)
        if self.measurement is not None:
            probes += self.measurement.start(dims, given)
        outputs = self.executor.run_observed(dims, inputs, step, probes[0] if len(probes) == 1 else Probes(probes))
        if self.measurement is not None:
            self.measurement.finish()
        return outputs
