"""Linear programs, and what they prove.

A solver's optimum is right up to its tolerances. What is proven here does not depend on these: from any multipliers of
the rows, and bounds of all variables, a lower bound of the optimum follows by weak duality (Neumaier and Shcherbina,
Safe bounds in linear and mixed-integer programming, 2004), which the solver's multipliers make a tight one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

import numpy as np

__all__ = ["Linear", "Solved"]

_ROUNDING: Final = 1e-9
"""By what part of the largest term a proven bound is lowered, for the rounding of its own sum."""

_SOLVED: Final = 0
_INFEASIBLE: Final = 2
"""What scipy's ``linprog`` says."""

_MANY: Final = 2000
"""Rows of which the interior point method is quicker than the simplex method."""


class Solved(NamedTuple):
    """What is known of an optimum.

    Attributes:
        is_feasible: whether there is a solution, as far as the solver can tell.
        least: no solution is less; infinite if there is none.
    """

    is_feasible: bool
    least: float


class Linear:
    """A linear program that grows variable by variable and row by row: rows are sums that are at most something."""

    def __init__(self) -> None:
        self.bounds: list[tuple[float, float]] = []
        self._row: list[int] = []
        self._column: list[int] = []
        self._weight: list[float] = []
        self._most: list[float] = []

    def variable(self, least: float = 0.0, most: float = 1.0) -> int:
        """A new variable, between two bounds."""
        self.bounds.append((least, most))
        return len(self.bounds) - 1

    def at_most(self, terms: Mapping[int, float], most: float) -> None:
        """A row: the sum of variables times weights is at most so much."""
        row = len(self._most)
        for column, weight in terms.items():
            if weight:
                self._row.append(row)
                self._column.append(column)
                self._weight.append(weight)
        self._most.append(most)

    def equal(self, terms: Mapping[int, float], to: float) -> None:
        """Two rows: the sum is so much."""
        self.at_most(terms, to)
        self.at_most({column: -weight for column, weight in terms.items()}, -to)

    def least(self, variable: int) -> Solved:
        """The least that a variable can be."""
        from scipy.optimize import linprog
        from scipy.sparse import csr_matrix

        cost = np.zeros(len(self.bounds))
        cost[variable] = 1.0
        most = np.array(self._most)
        matrix = csr_matrix((self._weight, (self._row, self._column)), (len(most), len(cost)))
        for method in ("highs-ipm", "highs-ds") if len(most) > _MANY else ("highs-ds",):
            found = linprog(cost, A_ub=matrix, b_ub=most, bounds=self.bounds, method=method)
            if found.status in (_SOLVED, _INFEASIBLE):
                break
        if found.status != _SOLVED:
            infeasible = found.status == _INFEASIBLE
            return Solved(not infeasible, float("inf") if infeasible else self.bounds[variable][0])
        multipliers = np.minimum(found.ineqlin.marginals, 0.0)
        left = cost - matrix.T @ multipliers
        low, high = np.array(self.bounds).T
        terms = np.concatenate([most * multipliers, np.minimum(left * low, left * high)])
        proven = float(terms.sum()) - _ROUNDING * float(np.abs(terms).max(initial=0.0))
        return Solved(True, proven)
