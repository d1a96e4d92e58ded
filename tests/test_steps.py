"""Six of the steps that people write; `python tests/bench steps` has all of them."""

from __future__ import annotations

import pytest
from steps import STEPS, as_eager, replicated

SOME = [
    "GAN with spectral norm",
    "WGAN with a gradient penalty",
    "soft actor-critic",
    "gradient norms of tasks",
    "accumulation, clipping, scaler",
    "layer decay, OneCycleLR",
]


@pytest.mark.parametrize("name", SOME)
def test_steps_have_the_bits_of_eager(name: str) -> None:
    assert as_eager(STEPS[name]) == ""
    assert replicated(STEPS[name]) == ""
