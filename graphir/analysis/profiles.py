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

__all__ = ["Machine", "Measured", "Profile", "card", "cards", "driver", "machine"]

_MOST_PRINTED: Final = 10


class Machine(NamedTuple):
    """Where figures hold: they may be others elsewhere.

    Attributes:
        device: the processor, and what torch makes of it; or the name of a CUDA card.
        torch: the version of torch.
        graphir: the version of graphir, whose kernels are measured too.
        driver: of a card, its driver and what torch makes of it; empty for a host.
    """

    device: str
    torch: str
    graphir: str
    driver: str = ""

    def __str__(self) -> str:
        torch = self.driver or f"torch {self.torch}"  # a driver's text has the version of torch
        return f"{self.device}, {torch}, graphir {self.graphir}"


class Measured(NamedTuple):
    """What one call took.

    Attributes:
        scratch: bytes that it held at most at once, beside its operands and what its results keep.
        kept: bytes that its results keep beyond those of their geometry, as long as they live.
        seconds: how long it took; of an update or a part of a reduction its share of a call that makes several.
        bound: that bytes depend on the operands' values, and these are the most that were found.
        beside: how long it took while another thread made the same call: both share caches and memory. None where that
            was not measured.
        launches: how many kernels it launched on a card; None where that was not measured.
        issue: seconds until the host thread that issued it to a card could go on; None where that was not measured.
    """

    scratch: int
    kept: int
    seconds: float
    bound: bool = False
    beside: float | None = None
    launches: int | None = None
    issue: float | None = None

    @property
    def slowdown(self) -> float | None:
        """How many times as long it took beside another one."""
        return None if self.beside is None or not self.seconds else max(self.beside / self.seconds, 1.0)


@dataclass(frozen=True)
class Profile:
    """What operators took on a machine.

    Attributes:
        machine: where they were measured.
        calls: by signature, and on a host by threads of a kernel, as :meth:`key` has them.
        failed: the signatures that could not be measured, and why; a file does not keep them.
        devices: what was measured on other machines, by the logical devices that these stand for, such as the cards
            beside a host; a file does not keep them.
    """

    machine: Machine
    calls: Mapping[str, Measured] = field(repr=False)
    failed: Mapping[str, str] = field(default_factory=dict, repr=False)
    devices: Mapping[str, Profile] = field(default_factory=dict, repr=False)

    @staticmethod
    def key(op: Operator, blobs: Mapping[str, Blob], dims: Dims, threads: int | None) -> str | None:
        """What a call is found by; None where something about its operands is not known. On a card no threads count."""
        found = signature(op, blobs, dims)
        return found if found is None or threads is None else f"{counted(threads, 'thread')}: {found}"

    def find(self, op: Operator, blobs: Mapping[str, Blob], dims: Dims, threads: int) -> Measured | None:
        """What the call of *op* took on its device, if it was measured."""
        of = self.devices.get(op.device, self) if self.devices else self
        found = self.key(op, blobs, dims, None if of.machine.driver else threads) if of.calls else None
        return None if found is None else of.calls.get(found)

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read a profile, of whatever machine.

        Raises:
            FileError: the file is missing, too large, damaged, of another kind or of a newer format.
        """
        from .profile_files import read_profile

        return read_profile(path)

    def __str__(self) -> str:
        each = {profile.machine: profile for profile in (self, *self.devices.values())}
        lines = [f"profile of {counted(len(p.calls), 'call')} on {machine}" for machine, p in each.items()]
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
    """This machine's host, with what of the process's settings picks other kernels."""
    plain = torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled
    said = [] if plain else ["without oneDNN"]
    return Machine(", ".join([_processor(), *said, *_deterministic()]), str(torch.__version__), __version__)


def card(name: str, driver: str) -> Machine:
    """A CUDA card of this machine, with what of the process's settings picks other kernels."""
    return Machine(", ".join([name, *_deterministic()]), str(torch.__version__), __version__, driver)


def _deterministic() -> list[str]:
    return ["deterministic"] if torch.are_deterministic_algorithms_enabled() else []


def cards() -> list[Machine]:
    """The CUDA cards that this process sees, in the order in which CUDA counts them."""
    if torch.cuda._is_in_bad_fork():  # CUDA cannot be asked there
        return []
    count = torch.cuda.device_count()
    return [card(torch.cuda.get_device_name(index), driver()) for index in range(count)]


def driver() -> str:
    """The driver of this machine's cards, and what torch makes of them."""
    version = getattr(torch._C, "_cuda_getDriverVersion", lambda: 0)()
    tf32 = "TF32" if torch.backends.cuda.matmul.allow_tf32 else "no TF32"
    return f"driver {version}, CUDA {torch.version.cuda}, torch {torch.__version__}, {tf32}"
