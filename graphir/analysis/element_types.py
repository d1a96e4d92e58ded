"""Element types that a step multiplies in, and whether devices can."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from ..errors import GraphirError
from ..ir.net import Net
from ..ir.text import operator_text
from .formulas.flops import flops_of
from .topology import Topology

__all__ = ["refuse_element_types", "without_figures"]

_MEASURED: Final = ("bf16", "f16")
"""Element types that some cards cannot multiply. Where cards were measured, one without a figure of its own cannot."""


def refuse_element_types(net: Net, topology: Topology, devices: Iterable[str]) -> None:
    """Refuse a step that multiplies in an element type that one of the *devices* cannot multiply in.

    Raises:
        GraphirError: there is one, as cards were measured. Other topologies may leave out figures: see
            :func:`without_figures`.
    """
    if not topology.measured or topology.host is not None:
        return
    of = {dtype: position for dtype, position in _multiplied(net).items() if dtype in _MEASURED}
    for device in dict.fromkeys(devices) if of else ():
        speed = topology.speed(device)
        lacking = next((dtype for dtype in of if dtype not in speed.flops_per_second), None)
        if lacking is not None and not device.startswith("cpu"):
            known = ", ".join(speed.flops_per_second)
            raise GraphirError(
                f"{device} of {topology.name} cannot multiply {lacking}",
                at=operator_text(net.ops[of[lacking]], net),
                fix=f"capture the step in another element type (it has {known}), or leave {device} out",
            )


def without_figures(net: Net, topology: Topology) -> list[str]:
    """For which devices and element types the figure of f32 is taken, as sentences."""
    found: dict[tuple[str, str], None] = {}
    for op in net.ops:
        dtype = _dtype(net, op.outputs, op.type)
        if dtype is not None and dtype not in topology.speed(op.device).flops_per_second:
            found[op.device, dtype] = None
    return [f"{topology.name} has no figure of {dtype} for {device}: that of f32 is taken" for device, dtype in found]


def _multiplied(net: Net) -> dict[str, int]:
    """The element types that a step multiplies in, and the first operator that does."""
    found: dict[str, int] = {}
    for position, op in enumerate(net.ops):
        dtype = _dtype(net, op.outputs, op.type)
        if dtype is not None:
            found.setdefault(dtype, position)
    return found


def _dtype(net: Net, outputs: tuple[str, ...], type_: str) -> str | None:
    """The element type that an operator multiplies in; None: it does not."""
    return net.blobs[outputs[0]].dtype or None if outputs and flops_of(type_) is not None else None
