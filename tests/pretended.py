"""Machines with cards that are not there: probes, and what is asked of this machine answered by one of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from unittest import mock

from graphir.runtime.machine.probe import Card

from graphir import Topology
from graphir.analysis.topology import Link

__all__ = ["MACHINES", "Pretended", "machine", "pretended"]


class Pretended:
    """A machine with cards, and how often one of them is measured.

    Args:
        cards: by number.
        figures: of the cards and links; else some that suffice.
        peers: whether cards reach each other's memory, without *figures*.
        driver: what figures hold for.
        lacks: element types that no card multiplies.
        issues: seconds that the host takes to issue a kernel.
    """

    def __init__(
        self,
        *cards: Card,
        figures: Topology | None = None,
        peers: bool = False,
        driver: str = "driver 13000",
        lacks: tuple[str, ...] = (),
        issues: float = 5e-6,
    ) -> None:
        self.there, self.figures, self.peers, self.named, self.lacks = list(cards), figures, peers, driver, lacks
        self.issues, self.measured = issues, 0

    def cards(self, free: bool) -> list[Card]:
        return self.there if free else [card._replace(free=None) for card in self.there]

    def driver(self) -> str:
        return self.named

    def flops_per_second(self, index: int) -> Mapping[str, float]:
        self.measured += 1
        found: Mapping[str, float] = {"f32": 1e12 * (index + 1), "bf16": 2e12}
        if self.figures is not None:
            found = self.figures.speed(f"gpu:{index}").flops_per_second
        return {dtype: rate for dtype, rate in found.items() if dtype not in self.lacks}

    def bytes_per_second(self, index: int) -> float:
        return 5e11 if self.figures is None else self.figures.speed(f"gpu:{index}").bytes_per_second

    def seconds_per_call(self, index: int) -> float:
        return 2e-6

    def seconds_to_issue(self) -> float:
        return self.issues

    def link(self, source: str, destination: str) -> Link:
        if self.figures is not None:
            return self.figures.link(source, destination)
        peer = self.peers and "cpu" not in source + destination
        return Link(source=source, destination=destination, bytes_per_second=1e10, latency=2e-5, peer=peer)


def machine(*names: str, link: str) -> Pretended:
    """The machine of cards by public figures, of which a sixteenth is held by others."""
    figures, cards = Topology.of(*names, link=link), []
    for index, name in enumerate(names):
        memory = figures.speed(f"gpu:{index}").memory
        assert memory is not None
        cards.append(Card(name, memory, memory - memory // 16))
    return Pretended(*cards, figures=figures)


MACHINES: Mapping[str, Pretended] = {
    "24 and 12 GB over PCIe": machine("rtx3090", "rtx3060", link="pcie4x8"),
    "2 x 80 GB with NVLink": machine("a100", "a100", link="nvlink3"),
    "a card and a host": machine("rtx4090", link="pcie4x16"),
}


@contextmanager
def pretended(probe: Pretended) -> Iterator[Pretended]:
    """Let predictions find that machine, without a file of its figures."""
    with (
        mock.patch("graphir.runtime.machine.here.Cards", lambda: probe),
        mock.patch("graphir.runtime.machine.here._measured", {}),
        mock.patch.dict("os.environ", {"GRAPHIR_MACHINE": ""}),
    ):
        yield probe
