"""Shares of a batch: how many of its rows each replica gets."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

from ..errors import GraphirError, counted
from .size import LARGEST

__all__ = ["divided", "read_shares"]


def divided(rows: int, shares: Sequence[int]) -> list[int]:
    """The rows of each replica, in order: ``ceil(rows * share / sum(shares))`` while enough rows are left, then the
    rest, then none.

    Equal shares give ``torch.chunk``'s rule.

    Args:
        rows: of the batch.
        shares: of each replica, positive; their ratios count.
    """
    total, left, found = sum(shares), rows, []
    for share in shares:
        found.append(min(-(-rows * share // total), left))
        left -= found[-1]
    return found


def read_shares(given: object, replicas: int) -> tuple[int, ...]:
    """The given shares in lowest terms; empty if all are equal.

    Args:
        given: a positive whole number for each replica; None: all are equal.
        replicas: how many there are.

    Raises:
        GraphirError: these are not shares, or not one for each replica.
    """
    if given is None:
        return ()
    fix = "give each device a positive whole number, such as shares=[3, 1]: the ratio of their rows"
    if not isinstance(given, (tuple, list)):
        raise GraphirError(f"{given!r:.40} is not a list of shares", fix=fix)
    for share in given:
        if type(share) is not int or not 0 < share <= LARGEST:
            raise GraphirError(f"a share cannot be {share!r:.40}", fix=fix)
    if len(given) != replicas:
        raise GraphirError(f"{counted(len(given), 'share')} for {counted(replicas, 'device')}", fix=fix)
    return () if len(set(given)) == 1 else tuple([share // gcd(*given) for share in given])
