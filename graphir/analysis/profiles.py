"""Profiles: what calls of operators took where they were measured, by signature."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

import torch

from ..errors import counted
from ..ir.blob import Blob
from ..ir.operator import Operator
from ..ir.size import Dims
from ..version import __version__
from .signatures import signature

__all__ = ["Machine", "Measured", "Profile", "machine"]

_MOST_PRINTED: Final = 10


class Machine(NamedTuple):
    """Where figures hold: they may be others elsewhere.

    Attributes:
        device: the processor, and what torch makes of it.
        torch: the version of torch.
        graphir: the version of graphir, whose kernels are measured too.
    """

    device: str
    torch: str
    graphir: str

    def __str__(self) -> str:
        return f"{self.device}, torch {self.torch}, graphir {self.graphir}"


class Measured(NamedTuple):
    """What one call took.

    Attributes:
        scratch: bytes that it held at most at once, beside its operands and what its results keep.
        kept: bytes that its results keep beyond those of their geometry, as long as they live.
        seconds: how long it took; of an update or a part of a reduction its share of a call that makes several.
        bound: that bytes depend on the operands' values, and these are the most that were found.
        beside: how long it took while another thread made the same call: both share caches and memory. None where that
            was not measured.
    """

    scratch: int
    kept: int
    seconds: float
    bound: bool = False
    beside: float | None = None

    @property
    def slowdown(self) -> float | None:
        """How many times as long it took beside another one."""
        return None if self.beside is None or not self.seconds else max(self.beside / self.seconds, 1.0)


@dataclass(frozen=True)
class Profile:
    """What operators took on a machine.

    Attributes:
        machine: where they were measured.
        calls: by signature and threads of a kernel, as :meth:`key` has them.
        failed: the signatures that could not be measured, and why; a file does not keep them.
    """

    machine: Machine
    calls: Mapping[str, Measured] = field(repr=False)
    failed: Mapping[str, str] = field(default_factory=dict, repr=False)

    @staticmethod
    def key(op: Operator, blobs: Mapping[str, Blob], dims: Dims, threads: int) -> str | None:
        """What a call is found by; None where something about its operands is not known."""
        found = signature(op, blobs, dims)
        return None if found is None else f"{counted(threads, 'thread')}: {found}"

    def find(self, op: Operator, blobs: Mapping[str, Blob], dims: Dims, threads: int) -> Measured | None:
        """What the call of *op* took, if it was measured."""
        found = self.key(op, blobs, dims, threads) if self.calls else None
        return None if found is None else self.calls.get(found)

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read a profile, of whatever machine.

        Raises:
            FileError: the file is missing, too large, damaged, of another kind or of a newer format.
        """
        from .profile_files import read_profile

        return read_profile(path)

    def __str__(self) -> str:
        lines = [f"profile of {counted(len(self.calls), 'call')} on {self.machine}"]
        lines += [f"  not measured: {name}: {why}" for name, why in list(self.failed.items())[:_MOST_PRINTED]]
        if len(self.failed) > _MOST_PRINTED:
            lines.append(f"  and {len(self.failed) - _MOST_PRINTED} more")
        return "\n".join(lines)


@cache
def _processor() -> str:
    """The processor's model, and the vector instructions that torch and oneDNN use of it."""
    model = platform.processor() or platform.machine()
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    if found := re.search(r"^model name\s*:\s*(.+)$", text, re.M):
        model = found[1].strip()
    chosen = [f"{name}={os.environ[name]}" for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA") if name in os.environ]
    return " ".join([model, torch.backends.cpu.get_cpu_capability(), *chosen])


def machine() -> Machine:
    """This machine, with what of the process's settings picks other kernels."""
    settings = [
        (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled, "without oneDNN", False),
        (torch.are_deterministic_algorithms_enabled(), "deterministic", True),
    ]
    said = [text for found, text, odd in settings if found is odd]
    return Machine(", ".join([_processor(), *said]), str(torch.__version__), __version__)
