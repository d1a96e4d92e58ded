"""Shares of a batch: which rows go to which replica."""

from __future__ import annotations

import random

import pytest
import torch

from graphir.errors import GraphirError
from graphir.ir.shares import divided, read_shares


def test_equal_shares_are_those_of_torchs_chunk() -> None:
    for replicas in range(1, 9):
        for rows in range(1, 40):
            chunks = [len(chunk) for chunk in torch.empty(rows).chunk(replicas)]
            assert divided(rows, [1] * replicas) == chunks + [0] * (replicas - len(chunks))


@pytest.mark.parametrize(
    ("rows", "shares", "expected"),
    [
        (8, (3, 1), [6, 2]),
        (10, (3, 1), [8, 2]),
        (10, (1, 3), [3, 7]),
        (3, (3, 1), [3, 0]),
        (1, (1, 3), [1, 0]),
        (0, (3, 1), [0, 0]),
        (5, (1, 4, 1), [1, 4, 0]),
        (100, (30, 11), [74, 26]),
    ],
)
def test_rows_go_to_the_first_replicas_first(rows: int, shares: tuple[int, ...], expected: list[int]) -> None:
    assert divided(rows, shares) == expected


def test_every_row_goes_to_a_replica_and_those_without_rows_are_the_last() -> None:
    draw = random.Random(0)
    for _ in range(300):
        shares, rows = [draw.randint(1, 9) for _ in range(draw.randint(1, 6))], draw.randint(0, 50)
        found = divided(rows, shares)
        assert sum(found) == rows and len(found) == len(shares)
        assert found == sorted(found, key=lambda count: count == 0)  # stable: only zeros go last
        assert all(count <= -(-rows * share // sum(shares)) for count, share in zip(found, shares, strict=True))
        assert rows % sum(shares) or found == [rows * share // sum(shares) for share in shares]
        assert divided(rows, [3 * share for share in shares]) == found


@pytest.mark.parametrize(
    ("given", "expected"), [(None, ()), ([5, 5], ()), ((6, 2), (3, 1)), ([3, 1], (3, 1)), ([1, 10**9], (1, 10**9))]
)
def test_shares_are_read_in_lowest_terms_and_equal_ones_are_none(given: object, expected: tuple[int, ...]) -> None:
    assert read_shares(given, 2) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([3, 1, 1], "3 shares for 2 devices"),
        ([3], "1 share for 2 devices"),
        ([], "0 shares for 2 devices"),
        ([3, 0], "a share cannot be 0"),
        ([3, -1], "a share cannot be -1"),
        ([3, 1.0], r"a share cannot be 1\.0"),
        ([3, True], "a share cannot be True"),
        ([3, "1"], "a share cannot be '1'"),
        ([1, 10**30], "a share cannot be 1000000"),
        ("31", "'31' is not a list of shares"),
        (3, "3 is not a list of shares"),
    ],
)
def test_what_is_no_share_is_refused(given: object, message: str) -> None:
    with pytest.raises(GraphirError, match=message) as refused:
        read_shares(given, 2)
    assert refused.value.fix.startswith("give each device a positive whole number, such as shares=[3, 1]")
