"""Cards and links by name, from public figures, to plan for what one does not have.

Arithmetic is dense, without sparsity, in TFLOP/s: the plain units for f64 and f32, tensor cores for TF32, and for bf16
and f16 with sums in f32 (which GeForce cards do at half of the rate of sums in f16). Figures are peaks, which no kernel
reaches quite. Sources are NVIDIA's and AMD's data sheets and architecture white papers: Pascal (P100), Volta (V100),
Turing (T4, RTX 2080 Ti), Ampere (A100; GA102: RTX 30, A10, A40, RTX A5000, A6000), Ada (RTX 40, L4, L40S, RTX 6000
Ada), Hopper (H100, H200), Blackwell (RTX 50, B200), CDNA 3 (MI300X).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import permutations
from typing import Final, NamedTuple

from ..errors import GraphirError, nearest
from .topology import Link, Speed, Topology

__all__ = ["CARDS", "LINKS", "CardFigures", "Lanes", "topology_of"]


class CardFigures(NamedTuple):
    """Public figures of a card.

    Attributes:
        memory: 10^9 bytes.
        bandwidth: of its memory, in GB/s.
        f64, f32, tf32, bf16, f16: TFLOP/s; 0 where the card has no units for that.
    """

    memory: float
    bandwidth: float
    f64: float
    f32: float
    tf32: float
    bf16: float
    f16: float


CARDS: Final[Mapping[str, CardFigures]] = {
    # consumer
    "rtx2080ti": CardFigures(11, 616, 0.42, 13.4, 0, 0, 53.8),
    "rtx3060": CardFigures(12, 360, 0.2, 12.7, 12.7, 25.4, 25.4),
    "rtx3080": CardFigures(10, 760, 0.47, 29.8, 29.8, 59.5, 59.5),
    "rtx3090": CardFigures(24, 936, 0.56, 35.6, 35.6, 71, 71),
    "rtx4070": CardFigures(12, 504, 0.46, 29.1, 29.1, 58.3, 58.3),
    "rtx4080": CardFigures(16, 717, 0.76, 48.7, 48.7, 97.5, 97.5),
    "rtx4090": CardFigures(24, 1008, 1.29, 82.6, 82.6, 165.2, 165.2),
    "rtx5090": CardFigures(32, 1792, 1.64, 104.8, 104.8, 209.5, 209.5),
    # workstation
    "rtxa5000": CardFigures(24, 768, 0.43, 27.8, 55.6, 111.1, 111.1),
    "rtxa6000": CardFigures(48, 768, 0.6, 38.7, 77.4, 154.8, 154.8),
    "rtx6000ada": CardFigures(48, 960, 1.42, 91.1, 182.1, 364.2, 364.2),
    # data centre
    "p100": CardFigures(16, 732, 5.3, 10.6, 0, 0, 21.2),
    "v100": CardFigures(32, 900, 7.8, 15.7, 0, 0, 125),
    "t4": CardFigures(16, 320, 0.25, 8.1, 0, 0, 65),
    "a10": CardFigures(24, 600, 0.49, 31.2, 62.5, 125, 125),
    "a30": CardFigures(24, 933, 5.2, 10.3, 82, 165, 165),
    "a40": CardFigures(48, 696, 0.58, 37.4, 74.8, 149.7, 149.7),
    "a100-40gb": CardFigures(40, 1555, 9.7, 19.5, 156, 312, 312),
    "a100": CardFigures(80, 2039, 9.7, 19.5, 156, 312, 312),
    "l4": CardFigures(24, 300, 0.47, 30.3, 60, 121, 121),
    "l40s": CardFigures(48, 864, 1.43, 91.6, 183, 362, 362),
    "h100pcie": CardFigures(80, 2000, 26, 51, 378, 756, 756),
    "h100": CardFigures(80, 3350, 34, 67, 494, 989, 989),
    "h200": CardFigures(141, 4800, 34, 67, 494, 989, 989),
    "b200": CardFigures(180, 8000, 40, 80, 1100, 2250, 2250),
    "mi300x": CardFigures(192, 5300, 81.7, 163.4, 653.7, 1307, 1307),
}


class Lanes(NamedTuple):
    """A kind of link: GB/s in each direction, and whether cards reach each other's memory by it."""

    gigabytes_per_second: float
    peer: bool


LINKS: Final[Mapping[str, Lanes]] = {
    "pcie3x8": Lanes(7.9, False),
    "pcie3x16": Lanes(15.8, False),
    "pcie4x4": Lanes(7.9, False),
    "pcie4x8": Lanes(15.8, False),
    "pcie4x16": Lanes(31.5, False),
    "pcie5x8": Lanes(31.5, False),
    "pcie5x16": Lanes(63, False),
    "nvlink-bridge": Lanes(56.25, True),  # RTX 3090 and RTX A6000, in pairs
    "nvlink2": Lanes(150, True),  # V100
    "nvlink3": Lanes(300, True),  # A100
    "nvlink4": Lanes(450, True),  # H100, H200
    "nvlink5": Lanes(900, True),  # B200
    "infinity-fabric": Lanes(448, True),  # MI300X: seven links of 64 GB/s
}
"""PCI Express after its encoding (PCI-SIG's base specifications), NVLink and Infinity Fabric as their makers say. Cards
on PCI Express exchange through the host's memory: consumer drivers have no peers there."""

_TO_HOST: Final = {"nvlink-bridge": "pcie4x16", "nvlink2": "pcie3x16", "nvlink3": "pcie4x16"}
"""How cards with links of their own reach the host; all others by PCI Express 5."""

_NAMED: Final = 5
"""Kinds of cards of which the name of a machine says each."""

_HOST: Final = "cpu:0"
_KERNEL: Final = 2e-6
_COPY: Final = 10e-6
_STAGED: Final = 20e-6
"""Seconds of a small copy through the host."""

_SERVER: Final = Speed(
    flops_per_second={"f32": 1e12, "f64": 5e11}, bytes_per_second=50e9, memory=128 * 10**9, seconds_per_call=5e-6
)
"""A host with two channels of DDR5 and 16 cores. Nothing but a few scalars is computed there."""


def topology_of(cards: Sequence[str], link: str, *, tf32: bool = False) -> Topology:
    """See :meth:`.Topology.of`."""
    if not cards:
        raise GraphirError("a machine has one card at least", fix=f"cards: {', '.join(CARDS)}")
    for name in cards:
        if not isinstance(name, str) or name not in CARDS:
            raise GraphirError(
                f"no card has the name {name!r}{nearest(_short(name), CARDS)}",
                fix=f"cards: {', '.join(CARDS)}; or build a Topology by hand",
            )
    if link not in LINKS:
        raise GraphirError(f"no link has the name {link!r}{nearest(link, LINKS)}", fix=f"links: {', '.join(LINKS)}")
    devices = {f"gpu:{index}": _speed(CARDS[name], tf32) for index, name in enumerate(cards)}
    between = LINKS[link]
    host = LINKS[_TO_HOST.get(link, "pcie5x16")] if between.peer else between
    latency = _COPY if between.peer else _STAGED
    links = [_link(a, b, between, latency) for a, b in permutations(devices, 2)]
    for device in devices:
        links += [_link(device, _HOST, host, _COPY), _link(_HOST, device, host, _COPY)]
    counts = [f"{count} x {name}" if count > 1 else name for name, count in Counter(cards).items()]
    named = " + ".join(counts) if len(counts) < _NAMED else f"{len(cards)} cards"
    return Topology(
        name=f"{named} over {link}",
        devices={**devices, _HOST: _SERVER},
        links=tuple(links),
        source="by public figures",
    )


def _short(name: object) -> object:
    """A card as it is named here, where torch or people call it ``NVIDIA GeForce RTX 3090``."""
    return re.sub("nvidia|amd|geforce|[ -]", "", name.lower()) if isinstance(name, str) else name


def _speed(card: CardFigures, tf32: bool) -> Speed:
    f32 = card.tf32 if tf32 and card.tf32 else card.f32
    teraflops = {"f64": card.f64, "f32": f32, "bf16": card.bf16, "f16": card.f16}
    return Speed(
        flops_per_second={dtype: rate * 1e12 for dtype, rate in teraflops.items() if rate},
        bytes_per_second=card.bandwidth * 1e9,
        memory=int(card.memory * 1e9),
        seconds_per_call=_KERNEL,
    )


def _link(source: str, destination: str, lanes: Lanes, latency: float) -> Link:
    rate = lanes.gigabytes_per_second * 1e9
    peer = lanes.peer and _HOST not in (source, destination)
    return Link(source=source, destination=destination, bytes_per_second=rate, latency=latency, peer=peer)
