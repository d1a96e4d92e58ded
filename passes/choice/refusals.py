"""What a refusal says: what is missing where, limits that work, and what else there is to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from graphir.analysis.topology import Topology
from graphir.errors import PassError
from graphir.ir.device import Device
from graphir.ir.names import base_name
from graphir.ir.program import Program
from graphir.ir.size import BATCH
from graphir.ir.text import nbytes_text, operator_text

from .asked import OPTIONS, Asked
from .plans import Plans
from .proven import needed
from .step import Step

__all__ = ["Refused", "missing_of", "refusal"]

_USED_UP: Final = 0.9
"""Of a device on which less is free than this share of its memory, a refusal of ``limits="auto"`` says so."""

_MORE: Final = 1.005
"""What limits have to be multiplied by at least so that it is said."""


class Refused(Exception):
    """Nothing within the limits was found.

    Attributes:
        program: that was to be placed, by the shares that come nearest.
        missing: what is missing, by device, and what fills the fullest one, as text.
        at: the operator that runs where that one is fullest, as text.
        given: the limits, those of the topology, too.
        nearest: limits within which plans that were found keep.
        placed: the programs of these plans, before copies are put in.
        proven: what limits have to be multiplied by, at least, for any placement.
        reckoned: the same for any placement of the groups, as these are reckoned.
        interrupted: whether the user has had enough of it.
        emitted: how many plans were judged.
    """

    def __init__(
        self,
        program: Program,
        missing: str,
        at: str,
        given: Mapping[str, int],
        nearest: Sequence[Mapping[str, int]],
        placed: Sequence[Program],
        proven: float,
        reckoned: float,
        interrupted: bool,
        emitted: int,
    ) -> None:
        self.program, self.missing, self.at = program, missing, at
        self.given, self.nearest, self.placed = given, nearest, placed
        self.proven, self.reckoned, self.interrupted, self.emitted = proven, reckoned, interrupted, emitted

    def times(self, limits: Mapping[str, int]) -> float:
        """How many times the limits others are."""
        return max([nbytes / self.given[device] for device, nbytes in limits.items()], default=1.0)


def missing_of(plans: Plans, peaks: Mapping[str, int], made: Program | None) -> tuple[str, str]:
    """What is missing where devices exceed their limits, and what fills the fullest of them; and the operator that runs
    there at its peak. Both as text.

    Args:
        plans: of the program, with the limits.
        peaks: by device, the most bytes.
        made: what was emitted; None where nothing was.
    """
    excess = plans.over(peaks)
    missing = [f"{name} lacks {nbytes_text(more)} of {nbytes_text(peaks[name])}" for name, more in excess.items()]
    if made is None or not excess:
        return "; ".join(missing), ""
    limits = plans.rooms
    device = max(excess, key=lambda name: peaks[name] / limits[name])
    found = plans.filled(made, device)
    held = " and ".join([f"{nbytes_text(nbytes)} of {category}" for category, nbytes in found.held[:2]])
    text, at = f"at its peak {device} holds {held}", ""
    if found.operator is not None:
        at = operator_text(found.operator, found.program.step)
        alone = needed(found.operator, found.program)
        if alone > limits[device]:
            text += f"; one operator reads and makes {nbytes_text(alone)} there, which no option divides"
    return "; ".join([*missing, text]), at


def refusal(
    asked: Asked, refused: Refused, limits: Mapping[str, int], *, works: bool, of_free: bool, remedy: str
) -> PassError:
    """The error that says what is missing, and limits.

    Args:
        asked: what a caller asked.
        refused: what is missing.
        limits: the nearest.
        works: whether there is a placement within these.
        of_free: whether the limits that were given are of what is free.
        remedy: what there is to do beside giving more; empty: what a caller of a balance can do.
    """
    given = ", ".join(f"{device!r}: {nbytes}" for device, nbytes in limits.items())
    said = [f"{refused.times(limits):,.2f} times these"]
    if refused.proven >= _MORE:
        said.append(f"less than {refused.proven:,.2f} times cannot")
    if refused.reckoned >= max(_MORE, refused.proven):
        said.append(f"no placement of these groups is reckoned to keep less than {refused.reckoned:,.2f} times")
    shares = refused.program.shares
    by = "" if shares == asked.program.shares else f" by shares={list(shares)}"
    full = _full(asked.topology, refused.given) if of_free else ""
    error = PassError(
        f"balance: no placement within the limits was found{by}: {refused.missing}{full}",
        at=refused.at,
        fix=f"limits={{{given}}} {f'works{by}' if works else 'is the nearest that was found'} "
        f"({'; '.join(said)}{_beyond(asked.topology, limits)}); or {remedy or _ways(asked, refused)}",
    )
    error.limits = limits
    return error


def _ways(asked: Asked, refused: Refused) -> str:
    """What there is to do beside giving more."""
    place = asked.topology
    spare = any(d not in refused.given and not Device.parse(d).is_host for d in place.devices)
    spare = spare or place.host is not None
    found = ["name more devices in limits"] * spare
    found += ["allow more options"] * (not {*OPTIONS} <= {*asked.options})
    found += ["pin less"] * bool(asked.pin)
    found += ["let replicas have unlike shares ('shares' among options)"] * asked.may_divide()
    if "updates" not in asked.options and Step(asked.program, None, 1).updated.any():
        found.append("let updates run on the host, with the bits of its kernels ('updates' among options)")
    batches = [size for dim, size in asked.program.dims.items() if base_name(dim) == BATCH]
    smaller = "a smaller model, or devices that hold more" if set(batches) == {1} else "smaller batches"
    return ", ".join(found or [f"take {smaller}"])


def _beyond(place: Topology, limits: Mapping[str, int]) -> str:
    """Which devices have less memory than limits that a refusal names, as an error says it."""
    held = {device: place.speed(device).memory for device in limits}
    less = [f"{d} has {nbytes_text(n)}" for d, n in held.items() if n is not None and n < limits[d]]
    return f"; {', '.join(less)}" if less else ""


def _full(place: Topology, limits: Mapping[str, int]) -> str:
    """Which of the devices others hold much of, as an error says it."""
    found = []
    for device in limits:
        if Device.parse(device).is_host:
            continue
        free, memory = place.speed(device).free, place.speed(device).memory
        if free is not None and memory is not None and free < _USED_UP * memory:
            found.append(f"of {nbytes_text(memory)} on {device} {nbytes_text(free)} are free")
    listed = "" if place.host is not None else " (nvidia-smi lists what holds the rest)"
    return f"; {', '.join(found)}{listed}" if found else ""
