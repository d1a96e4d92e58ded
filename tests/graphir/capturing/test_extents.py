"""What Python asks of sizes, and the guards that follow: against the questions themselves, asked at every size."""

from __future__ import annotations

import copy
import math
import operator
import pickle
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch

from graphir.capturing.record.extents import Axis, Extents, plain
from graphir.capturing.record.values import Value
from graphir.capturing.sizes.guards import guards_of, simplified
from graphir.ir.fitting import NotPolynomial
from graphir.ir.guard import Guard, parse_guard
from graphir.ir.size import Size, parse_size


class Asked:
    """A function of a size, asked once through extents and guarded for others.

    Attributes:
        outcome: what it returned.
        guards: what the size ``n`` must satisfy.
    """

    def __init__(self, ask: Callable[..., Any], at: Mapping[str, int], further: tuple[Mapping[str, int], ...]) -> None:
        extents = Extents(lambda: "here")
        extents.seen = True
        value = Value(0, torch.empty(list(at.values())), "x", "", "forward")
        arguments = [extents.axis(value, dim, size) for dim, size in enumerate(at.values())]
        self.outcome = ask(*arguments)
        names = list(at)

        def axis(found: Axis) -> Size:
            return parse_size(names[found.dim])

        self.guards = simplified(guards_of(extents, axis, [at, *further]))

    def texts(self) -> list[str]:
        return [str(guard) for guard in self.guards]

    def covers(self, **dims: int) -> bool:
        return all(guard.holds(dims) for guard in self.guards)


CASES: dict[str, tuple[Callable[[Any], Any], list[str]]] = {
    "less": (lambda n: n < 100, ["n<=99"]),
    "reflected": (lambda n: n < 100, ["n<=99"]),
    "not less": (lambda n: n < 3, ["n>=3"]),
    "least": (lambda n: max(n, 3), ["n>=3"]),
    "most": (lambda n: min(n, 300), ["n<=300"]),
    "several": (lambda n: 2 * n + 1 > 7 and n - 1 < 50, ["n>=4", "n<=50"]),
    "negative": (lambda n: 100 - 3 * n > 0, ["n<=33"]),
    "negated": (lambda n: -n < -2, ["n>=3"]),
    "unlike": (lambda n: n == 12, ["n!=12"]),
    "true": (lambda n: bool(n - 4), ["n!=4"]),
    "multiple": (lambda n: n % 8 == 0, ["n%8!=0"]),
    "remainder": (lambda n: bool((n + 4) % 8), ["n%8!=4"]),
    "positive remainder": (lambda n: n % 8 > 0, ["n%8!=0"]),
    "equal quotient": (lambda n: n // 32 == 0, ["n<=31"]),
    "unlike quotient": (lambda n: n // 32 != 0, ["n<=31"]),
    "rounded up by floors": (lambda n: -(-n // 32) > 1, ["n<=32"]),
    "remainder in one period": (lambda n: n % 32 > 4, ["n>=5", "n<=31"]),
    "to the next multiple": (lambda n: (32 - n % 32) % 32 == 0, ["n<=31"]),
    "exact quotient": (lambda n: 6 * n // 2 > 310, ["n<=103"]),
    "square": (lambda n: n * n > 900, ["n*n<=900"]),
    "a float": (lambda n: n > 30.5, ["n<=30"]),
    "a whole float": (lambda n: n <= 30.0, ["n<=30"]),
    "infinite": (lambda n: n < math.inf, []),
    "of no float": (lambda n: n == 2.5, []),
    "of nothing": (lambda n: n is None or n == "n", []),
    "always": (lambda n: n >= 1 and n > 0 and n != 0 and 3 * n != 1, []),
    "above one": (lambda n: n == 1, ["n>=2"]),
    "above two": (lambda n: n == 1 or n == 2, ["n>=3"]),
    "in": (lambda n: n in (12, 20), ["n!=12", "n!=20"]),
    "divided": (lambda n: n % 5 == 3, ["n%5!=3"]),
    "no size": (lambda n: n - n + 3 > 2, []),
    "power": (lambda n: n**2 > 900, ["n*n<=900"]),
    "negative remainder": (lambda n: -n % 8 == 4, ["n%8!=4"]),
    "doubled": (lambda n: 2 * n == 40 or 2 * n == 41, ["n!=20"]),
}
"""Of a size that was recorded as 6, 7 and 21."""


@pytest.mark.parametrize("name", CASES)
def test_a_test_becomes_the_guard_that_says_the_same(name: str) -> None:
    ask, guards = CASES[name]
    asked = Asked(ask, {"n": 6}, ({"n": 7}, {"n": 21}))
    assert asked.texts() == guards
    for n in range(1, 500):
        if asked.covers(n=n):
            assert bool(ask(n)) == bool(asked.outcome)


DIVIDED: dict[str, tuple[Callable[[Any], Any], list[str]]] = {
    "quotient": (lambda n: n // 4 > 10, ["n<=40", "n%4==0"]),
    "with a remainder": (lambda n: (n + 3) // 4 > 10, ["n<=40", "n%4==0"]),
    "float": (lambda n: n / 4 > 10, ["n<=40", "n%4==0"]),
    "part of a sum": (lambda n: n // 4 + 3 * n > 139, ["n<=42", "n%4==0"]),
    "multiplied again": (lambda n: n // 4 * 4 > 40, ["n<=40", "n%4==0"]),
    "sum of quotients": (lambda n: n // 4 + n // 8 > 15, ["n<=40", "n%4==0", "n%8==0"]),
    "rounded": (lambda n: math.ceil(n / 4) > 10, ["n<=40", "n%4==0"]),
    "two quotients": (lambda n: n // 2 - n // 4 > 10, ["n<=40", "n%2==0", "n%4==0"]),
    "remainder": (lambda n: n % 4 == 0, ["n%4==0"]),
}
"""Of a size that was recorded as 8, 16 and 24: its quotient by a number that divides all of these."""


@pytest.mark.parametrize("name", DIVIDED)
def test_a_quotient_without_remainder_is_exact(name: str) -> None:
    ask, guards = DIVIDED[name]
    asked = Asked(ask, {"n": 8}, ({"n": 16}, {"n": 24}))
    assert sorted(asked.texts()) == sorted(guards)
    for n in range(1, 500):
        if asked.covers(n=n):
            assert bool(ask(n)) == bool(asked.outcome)


def test_two_sizes() -> None:
    asked = Asked(lambda n, m: n > m, {"n": 3, "m": 5}, ())
    assert asked.texts() == ["m-n>=0"]
    assert asked.covers(n=4, m=4) and not asked.covers(n=5, m=4)


def test_the_quotient_of_a_multiple_of_a_size_is_a_size() -> None:
    at, further = {"n": 3, "m": 5}, ({"n": 7, "m": 6}, {"n": 7, "m": 17})
    for ask, guards in (
        (lambda n, m: 2 * n * m // n > 120, ["m<=60"]),
        (lambda n, m: (n * m + n) // n > 80, ["m<=79"]),
        (lambda n, m: 6 * n * m // (2 * n) % 8 == 0, ["3*m%8!=0"]),
        (lambda n, m: 2 * n * m // -n < -120, ["m<=60"]),
        (lambda n, m: 3 * n % n > 0 or -(-4 * n // n) > 4, []),
    ):
        assert Asked(ask, at, further).texts() == guards
    with pytest.raises(NotPolynomial):
        Asked(lambda n, m: (n * m + 1) // n > 12, at, further)


UNSAID: dict[str, Callable[[Any], Any]] = {
    "bits": lambda n: n & 6,
    "last bits": lambda n: n & 7,
    "unlike bits": lambda n: n ^ 3,
    "shifted": lambda n: n >> 4,
    "number of bits": lambda n: n.bit_length(),
    "power": lambda n: 2**n,
    "root": lambda n: n**0.5,
    "half": lambda n: n / 2,
    "reciprocal": lambda n: 1 / n,
    "a tenth": lambda n: n * 0.1,
    "magnitude": lambda n: abs(-n),
    "rounded up": lambda n: math.ceil(n / 4),
    "quotient": lambda n: n // 4,
    "quotient of a quotient": lambda n: n // 32 // 2 + n // 4 // 4,
    "negative divisor": lambda n: n % -5,
    "remainder of a remainder": lambda n: n % 5 % 2,
    "compared remainder": lambda n: n % 5 > 2,
    "sum of a remainder": lambda n: n % 5 + 1 > 2,
    "two remainders": lambda n: n % 5 == n % 4,
}


@pytest.mark.parametrize("name", UNSAID)
def test_what_no_guard_can_say_is_refused(name: str) -> None:
    """Also where nothing tests the number: the step may hold it, and nobody sees that."""
    with pytest.raises(NotPolynomial, match="here"):
        Asked(UNSAID[name], {"n": 6}, ({"n": 7}, {"n": 21}))


def questions(rng: random.Random) -> Callable[[Any, Any], list[bool]]:
    """A function that makes numbers of two sizes, and asks about each."""
    steps = [
        (rng.choice([operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod]), rng.random() < 0.3,
         rng.randint(1, 9))
        for _ in range(rng.randint(1, 3))
    ]  # fmt: skip
    tests = [
        (
            rng.choice([operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne]),
            rng.randint(-5, 60),
        )
        for _ in range(3)
    ]

    def ask(n: Any, m: Any) -> list[bool]:
        number = n
        for operation, other, constant in steps:
            number = operation(number, m if other and operation in _LINEAR else constant)
        return [holds(number, bound) for holds, bound in tests]

    return ask


_LINEAR = (operator.add, operator.sub, operator.mul)


def random_questions() -> Iterator[tuple[int, Callable[[Any, Any], list[bool]]]]:
    for seed in range(300):
        yield seed, questions(random.Random(seed))


def test_where_the_guards_hold_every_test_comes_out_as_it_did() -> None:
    told = 0
    for seed, ask in random_questions():
        rng = random.Random(seed)
        at = {"n": rng.randint(2, 40), "m": rng.randint(2, 9)}
        try:
            asked = Asked(ask, at, ())
        except NotPolynomial:
            continue
        told += 1
        assert asked.outcome == ask(*at.values()) and asked.covers(**at)
        for n in range(1, 60):
            for m in (1, 2, 3, 7, 20):
                if asked.covers(n=n, m=m):
                    assert ask(n, m) == asked.outcome, (seed, asked.texts(), n, m)
    assert told > 150


def test_guards_are_exact_for_sums_of_one_size() -> None:
    """Not stricter than the tests: where these come out as they did, the guards hold."""
    for seed in range(100):
        rng = random.Random(seed)
        factor, constant, bound = rng.choice([-3, -2, -1, 1, 2, 5]), rng.randint(-9, 9), rng.randint(-40, 90)
        holds = rng.choice([operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne])
        if holds(6 * factor + constant, bound) and holds is operator.eq:
            continue
        asked = Asked(lambda n: holds(factor * n + constant, bound), {"n": 6}, ())  # noqa: B023
        for n in range(1, 99):
            assert asked.covers(n=n) == (holds(factor * n + constant, bound) == asked.outcome)


def test_guards_that_others_imply_are_left_out() -> None:
    texts = ["a>=2", "a>=5", "a!=3", "a!=5", "a!=7", "a<=9", "a<=20", "a!=11", "b%4!=0", "b%4!=0", "a-b>=0", "a-b>=-1"]
    found = simplified([parse_guard(text, text) for text in texts])
    assert [str(guard) for guard in found] == ["a>=6", "a<=9", "a!=7", "b%4!=0", "a-b>=0"]
    assert found[0].reason == "a!=5" and isinstance(found[0], Guard)


def test_an_extent_is_the_integer_that_it_stands_for() -> None:
    def ask(n: Any) -> None:
        assert isinstance(n, int) and {6: "six"}[n] == "six" and hash(n) == hash(6) and f"{n:03}" == "006"
        assert list(range(n)) == list(range(6)) and [0] * n == [0] * 6 and divmod(20, n) == (3, 2)
        assert (n + 1, 1 - n, n // 4, n**2, n / 4, n << 1, -n, abs(-n), round(n), math.ceil(n / 4)) == (
            *(7, -5, 1, 36, 1.5, 12, -6, 6, 6, 2),
        )
        assert type(n) == int and type(n) in (str, int) and {int: 3}[type(n)] == 3 and type(n) != float  # noqa: E721
        assert type(n / 4) == float and type(n / 4) != int and type(n) != type(n / 4)  # noqa: E721
        assert n + 0.5 == 6.5 and type(plain(n + 0.5)) is float and type(plain(n)) is int
        assert math.prod([n, n]) == 36 and sum([n, n]) == 12 and type(plain(sum([n, n]))) is int
        assert copy.deepcopy([n])[0] == n and type(pickle.loads(pickle.dumps(n))) is int
        assert torch.zeros(n, 2).shape == (6, 2) and torch.zeros(2).expand(n, 2).shape == (6, 2)
        assert (torch.ones(2) * n).tolist() == [6.0, 6.0] and torch.tensor([n]).dtype == torch.int64
        with pytest.raises(ZeroDivisionError):
            n // (n - n)

    with pytest.raises(NotPolynomial):  # of 20 % n
        Asked(ask, {"n": 6}, ())


def test_extents_of_a_recording_that_is_over_are_plain_numbers() -> None:
    kept: list[Any] = []
    Asked(kept.append, {"n": 6}, ())
    extents = kept[0].origin[0]
    extents.release()
    assert type(kept[0] + 1) is int and kept[0] > 3 and extents.tests == [] and extents.symbols == {}
