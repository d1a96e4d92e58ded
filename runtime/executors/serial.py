"""The CPU executor of one thread: all lanes merged in issue order, as generated Python, in the thread that calls.

Nothing waits, so there are no events. It is what runs a plan of one device, and one whose operators are too short for
threads to pay.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from graphir.ir.size import Dims

from ..codegen.statements import generate
from ..executor import Feedable, Setting
from ..machine.surroundings import is_neutral, neutral
from .generated import Generated, OnHost

__all__ = ["Serial"]


class Serial(OnHost):
    """See :mod:`graphir.runtime.executors.serial`.

    Args:
        setting: what to run.
        threads: how many threads one kernel may use; None: as many as in the thread that makes the executor, so that
            bits equal those of eager PyTorch there.
    """

    def __init__(self, setting: Setting, threads: int | None = None) -> None:
        super().__init__()
        self.setting, self.intraop = setting, threads or torch.get_num_threads()
        self.generate = partial(generate, setting, dict.fromkeys(setting.plan.lanes, 0), buffers=self.buffers)
        self.plain = Generated(setting, self.generate())

    def execute(
        self, generated: Generated, dims: Dims, inputs: Sequence[Feedable], first: tuple[Any, ...]
    ) -> Sequence[Tensor]:
        """One step of this code, whose function takes *first* before its inputs: the number of steps done, …"""
        (function,), (code,) = generated.functions(dims), generated.threads
        given = inputs if len(code.inputs) == len(inputs) else [inputs[i] for i in code.inputs]
        try:
            if is_neutral(self.intraop):
                with self.setting.mode():
                    return function(*first, *given)
            with neutral(self.intraop), self.setting.mode():
                return function(*first, *given)
        except Exception as e:
            error = generated.blame([e], dims, first[0])
            raise error from error.__cause__

    def close(self) -> None:
        """Nothing to end."""
