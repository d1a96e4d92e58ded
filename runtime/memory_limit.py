"""What a plan may take of the memory of each device, real or logical: more is refused before a step runs.

Where a step needs more memory than there is, the operating system may end this process, or another one, without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, Literal, NamedTuple, TypeAlias

import numpy as np
import torch

from graphir.analysis.memory import Memory, memory
from graphir.analysis.profiles import Profile
from graphir.errors import CoverageError, GraphirError, SessionError
from graphir.ir.device import Device
from graphir.ir.plan import Plan
from graphir.ir.size import Dims
from graphir.ir.text import nbytes_of, nbytes_text

from .machine.capacity import capacity

__all__ = ["MemoryLimit", "Most", "PlanLimits", "most_of"]

Most: TypeAlias = "int | str | None"
"""Bytes of each real device, as a number or as text like ``40 GiB``; ``machine`` for as many as it has, None for any
number."""

_FIX: Final = (
    "give smaller sizes, or bind devices to memory of their own; Session(..., memory_limit=None) runs it all the same"
)
_HOST: Final = torch.device("cpu")


def most_of(given: object) -> int | Literal["machine"] | None:
    """A limit as callers write it, its bytes as a number.

    Raises:
        SessionError: it is none.
    """
    if given is None:
        return None
    if given == "machine":
        return "machine"
    try:
        return nbytes_of(given)
    except GraphirError as e:
        fix = f"{e.fix}; or give 'machine' for what each device has, or None for no limit"
        raise SessionError(f"memory_limit: {e.what}", where="Session(...)", fix=fix) from None


class PlanLimits(NamedTuple):
    """What a plan may hold on its logical devices, by which it was placed.

    Attributes:
        nbytes: by device, the most.
        threads: how many threads one kernel may use.
        profile: what was measured of the operators' calls.
    """

    nbytes: Mapping[str, int]
    threads: int
    profile: Profile | None

    def over(self, plan: Plan, dims: Dims) -> str:
        """The devices on which a plan holds more than it may, and how much; empty where it does not.

        Raises:
            GraphirError: more bytes than can be counted.
        """
        peak = memory(plan, dims, threads=self.threads, profile=self.profile).peak
        return "; ".join(
            f"{nbytes_text(peak[device])} on {device}, whose limit is {nbytes_text(most)}"
            for device, most in self.nbytes.items()
            if peak.get(device, 0) > most
        )

    def check_of(self, plan: Plan) -> Callable[[Dims], None]:
        """What raises a CoverageError at values of the dimensions above the plan's own at which it holds more; at its
        own it was placed within the limits."""
        admitted = plan.dims

        def check(dims: Dims) -> None:
            nonlocal admitted
            if dims == admitted or all(value <= plan.dims.get(dim, 0) for dim, value in dims.items()):
                return
            sizes = ", ".join(f"{dim}={value}" for dim, value in dims.items())
            where = f"plan {plan.name!r}"
            try:
                over = self.over(plan, dims)
            except GraphirError as e:
                raise SessionError(e.what, where=where, fix="give smaller sizes") from None
            if over:
                fix = "give smaller sizes, or capture the model at these and balance it"
                raise CoverageError(f"at {sizes} the plan would hold {over}", where=where, fix=fix)
            admitted = dims

        return check


class MemoryLimit:
    """Refuses a plan at sizes at which it takes more than *most*, as :func:`graphir.memory` predicts it by formulas.

    What is not known of a plan's bytes is not counted.

    Args:
        plan: that was verified.
        places: the real device of each logical one; those that share one are counted together.
        threads: how many threads one kernel may use.
        most: of each real device, as :func:`most_of` reads it.

    Raises:
        SessionError: it takes more at its own sizes, or to be filled.
    """

    def __init__(self, plan: Plan, places: Mapping[Device, torch.device], threads: int, most: Most) -> None:
        self.plan, self.places, self.threads = plan, places, threads
        self.most: dict[torch.device, int] = {}
        given = most_of(most)
        for place in {_HOST, *places.values()} if given is not None else ():
            bound = capacity(place) if given == "machine" else given
            if bound is not None:
                self.most[place] = bound
        self.admitted: Dims | None = None
        self.check_init()
        self.check(plan.dims)

    def check_init(self) -> None:
        """Refuse what takes too much while state is filled, on the host, where all of it stays until the end."""
        blobs, most = self.plan.init.blobs, self.most.get(_HOST)
        made = {blobs[name].storage for op in self.plan.init.ops if op.type != "graphir.load" for name in op.outputs}
        nbytes = sum(blobs[storage].nbytes(self.plan.dims) for storage in made)
        if most is not None and nbytes > most:
            raise self.refusal(f"filling the plan's state takes {nbytes_text(nbytes)}", _HOST, most, self.plan.dims)

    def check(self, dims: Dims) -> None:
        """Refuse these values of the dimensions, if the plan takes too much at them.

        Raises:
            SessionError: it does; the error has the numbers.
        """
        if not self.most or dims == self.admitted:
            return
        try:
            predicted = memory(self.plan, dims, threads=self.threads, profile=None)
        except GraphirError as e:  # more bytes than can be counted
            raise SessionError(e.what, where=f"plan {self.plan.name!r}", fix=_FIX) from None
        for place, most in self.most.items():
            devices = [device for device in predicted.peak if self.places.get(Device.parse(device), _HOST) == place]
            if sum(predicted.peak[device] for device in devices) > most:
                nbytes = _together(predicted, devices)
                if nbytes > most:
                    at_least = "at least " if any(predicted.sources(device)["unknown"] for device in devices) else ""
                    what = f"a step of the plan takes {at_least}{nbytes_text(nbytes)}"
                    raise self.refusal(f"{what} on {', '.join(devices)}", place, most, dims)
        self.admitted = dims

    def refusal(self, what: str, place: torch.device, most: int, dims: Dims) -> SessionError:
        """The error for what takes too much of a real device."""
        sizes = ", ".join(f"{dim}={value}" for dim, value in dims.items())
        where = f"plan {self.plan.name!r}" + (f" at {sizes}" if 0 < len(sizes) <= 60 else "")
        return SessionError(f"{what}; the limit of {place} is {nbytes_text(most)}", where=where, fix=_FIX)


def _together(predicted: Memory, devices: list[str]) -> int:
    """The most bytes that are live at once on devices that share a memory."""
    return int(np.sum([predicted.timeline(device) for device in devices], axis=0).max())
