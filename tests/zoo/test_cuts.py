"""Moved modules send the fewest bytes: what crosses is compared with a minimum cut found without our passes."""

from __future__ import annotations

import pytest
from minimum_cut import copied, cuts, fewest_bytes
from mutations.subjects import zoo_program

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS = (
    *("autoencoder", "mixture of experts", "recurrent cells", "u-net", "vae", "densenet, checkpointed", "resnet"),
    *("vision transformer", "gpt2"),
)
"""A row of each kind of net; ``python tests/bench cuts`` compares all."""


@pytest.mark.parametrize("name", ROWS)
def test_a_cut_sends_the_fewest_bytes(name: str) -> None:
    program = zoo_program(name)
    for modules in cuts(program, (0.25, 0.5, 0.75)):
        assert copied(program, modules) == fewest_bytes(program, modules), modules


@pytest.mark.parametrize("name", ["dlrm", "albert"])
def test_some_cuts_send_more_for_a_reason(name: str) -> None:
    """The page docs/design/backward-follows-forward.md says why, of each."""
    program = zoo_program(name)
    sent = [(copied(program, modules), fewest_bytes(program, modules)) for modules in cuts(program, (0.25, 0.5, 0.75))]
    assert [ours > least for ours, least in sent] == [False, True, False]
