"""A minimum cut of a graph whose cuts are cheap beside its size: Dinic's algorithm (1970).

Each phase saturates all shortest paths, so there are as many phases as paths have lengths: few where two devices are
close to one another at all of the places where they meet.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Final

__all__ = ["Graph"]

_SOURCE: Final = 0
_SINK: Final = 1


class Graph:
    """A directed graph with capacities, between two ends.

    Args:
        source, sink: the two ends.
    """

    def __init__(self, source: Hashable, sink: Hashable) -> None:
        self.numbers: dict[Hashable, int] = {source: _SOURCE, sink: _SINK}
        self.edges: list[list[int]] = [[], []]  # of each node; an edge is followed by the one back
        self.to: list[int] = []
        self.left: list[float] = []

    def add(self, a: Hashable, b: Hashable, capacity: float = float("inf")) -> None:
        """Add an edge, without a limit by default."""
        for node, other, nbytes in ((a, b, capacity), (b, a, 0)):
            number = self.number(node)
            self.edges[number].append(len(self.to))
            self.to.append(self.number(other))
            self.left.append(nbytes)

    def number(self, node: Hashable) -> int:
        found = self.numbers.get(node)
        if found is None:
            found = self.numbers[node] = len(self.edges)
            self.edges.append([])
        return found

    def cut(self) -> Iterable[Hashable]:
        """The nodes on the sink's side of the minimum cut that has the fewest there. Nothing is left of the capacities
        that the cut takes."""
        while (distance := self.distances())[_SOURCE] >= 0:
            self.saturate(distance)
        return [node for node, number in self.numbers.items() if distance[number] >= 0]

    def distances(self) -> list[int]:
        """How many edges with something left lead from each node to the sink; -1 where none do."""
        edges, to, left = self.edges, self.to, self.left
        found = [-1] * len(edges)
        found[_SINK] = 0
        reached = [_SINK]
        for node in reached:
            further = found[node] + 1
            for edge in edges[node]:
                other = to[edge]
                if found[other] < 0 and left[edge ^ 1]:
                    found[other] = further
                    reached.append(other)
        return found

    def saturate(self, distance: list[int]) -> None:
        """Send along shortest paths what they have left, until none has."""
        edges, to, left = self.edges, self.to, self.left
        tried = [0] * len(edges)
        path: list[int] = []
        node = _SOURCE
        while True:
            if node == _SINK:
                least = min([left[edge] for edge in path])
                for edge in path:
                    left[edge] -= least
                    left[edge ^ 1] += least
                full = next(k for k, edge in enumerate(path) if not left[edge])
                node = to[path[full] ^ 1]
                del path[full:]
                continue
            own = edges[node]
            nearer = distance[node] - 1
            while tried[node] < len(own):
                edge = own[tried[node]]
                if left[edge] and distance[to[edge]] == nearer:
                    path.append(edge)
                    node = to[edge]
                    break
                tried[node] += 1
            else:
                if not path:
                    return
                edge = path.pop()
                node = to[edge ^ 1]
                tried[node] += 1
