"""A sample of ``python tests/bench orders``: each order is equal to eager PyTorch, or its passes are refused."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import orders
import pytest

pytestmark = pytest.mark.usefixtures("one_thread")

PAIRS = Random(0).sample(list(orders.pairs()), 12)
LONGER = orders.random_orders(21, seed=1)
"""Other orders than those of the benchmark."""


@pytest.mark.parametrize("name", orders.SUBJECTS)
def test_pairs_of_passes(name: str) -> None:
    for number, pair in enumerate(PAIRS):
        orders.verdict(name, pair, strip=number % 2 == 1)


@pytest.mark.parametrize("strip", [False, True], ids=["", "stripped"])
@pytest.mark.parametrize("name", orders.SUBJECTS)
def test_longer_orders(name: str, strip: bool) -> None:
    mine: list[Sequence[str]] = [order for subject, order in LONGER if subject == name]
    for order in mine[strip::2]:
        orders.verdict(name, order, strip)


def test_an_order_with_another_result_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """The judge: a pass that changes a value, a raw error, and a dump of what is broken."""
    found = orders.run_pass

    def spoilt(name: str, step: str, given: object) -> object:
        if step == "replicate":
            return orders.passes.replicate(given, [0, 1], reduction="sum")
        if step == "shard":
            raise KeyError("a")
        if step == "park":
            raise orders.PassError("2 invariants are broken", fix="none")
        return found(name, step, given)

    monkeypatch.setattr(orders, "run_pass", spoilt)
    for step, what in (("replicate", "is another|the loss is"), ("shard", "KeyError"), ("park", "invariants")):
        with pytest.raises(orders.Fault, match=what):
            orders.verdict("tied weights", [step])
