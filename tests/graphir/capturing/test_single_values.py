"""One value a channel, which torch refuses to normalise: recorded where others' values are normalised with it."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import graphir
from graphir.capturing.record.single_values import REFUSAL, single_values_allowed
from graphir.errors import CoverageError


def norm_one_row() -> None:
    F.batch_norm(torch.randn(1, 3), None, None, training=True)


def test_this_thread_alone_may_have_one_value() -> None:
    refused: list[str] = []

    def other() -> None:
        try:
            norm_one_row()
        except ValueError as e:
            refused.append(str(e))

    with single_values_allowed():
        norm_one_row()
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert len(refused) == 1 and refused[0].startswith(REFUSAL)
    with pytest.raises(ValueError, match=REFUSAL):
        norm_one_row()


def test_what_stands_there_comes_back_after_an_error() -> None:
    before = F._verify_batch_size  # type: ignore[attr-defined]
    with pytest.raises(KeyError), single_values_allowed():
        raise KeyError
    assert F._verify_batch_size is before  # type: ignore[attr-defined]


def test_a_witness_records_one_row() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    options = {"loss": lambda out: out.square().sum(), "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    program = graphir.capture(model, (torch.randn(6, 4),), **options)
    other = graphir.capture(model, (torch.randn(6, 4),), **options)
    assert program.witness is not None and other.witness is not None
    with single_values_allowed():
        program.witness({"batch": 1})
    with pytest.raises(CoverageError, match=REFUSAL):
        other.witness({"batch": 1})
