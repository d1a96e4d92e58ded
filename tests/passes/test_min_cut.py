"""The minimum cut that moves least: beside that of networkx, on seeded graphs."""

from __future__ import annotations

import random

import networkx as nx
import pytest
from graphir.passes.min_cut import Graph


@pytest.mark.parametrize("seed", range(30))
def test_it_is_the_one_with_the_fewest_nodes_at_the_sink(seed: int) -> None:
    draw = random.Random(seed)
    count = draw.randint(2, 30)
    ours, theirs = Graph(0, 1), nx.DiGraph()
    theirs.add_nodes_from([0, 1])
    pairs = {(draw.randrange(count), draw.randrange(count)) for _ in range(draw.randint(0, 5 * count))}
    for a, b in sorted(pairs):
        if a == b:
            continue
        if {a, b}.isdisjoint({0, 1}) and draw.random() < 0.3:
            ours.add(a, b)
            theirs.add_edge(a, b)
        else:
            capacity = draw.choice([1, 2, 5, 2**60 + 1])
            ours.add(a, b, capacity)
            theirs.add_edge(a, b, capacity=capacity)
    _, (_, moves) = nx.minimum_cut(theirs, 0, 1)
    assert set(ours.cut()) == moves


def test_many_paths_of_one_length_take_one_phase() -> None:
    graph = Graph("source", "sink")
    for i in range(1000):
        graph.add("source", i, 1)
        graph.add(i, ("behind", i))
        graph.add(("behind", i), "sink", 2)
    graph.saturate(graph.distances())
    assert graph.distances()[0] < 0
