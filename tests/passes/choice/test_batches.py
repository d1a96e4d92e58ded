"""Which batches a program takes, and at which one a placement is full."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import models
import pytest
from graphir.passes.choice.batches import Batches
from graphir.passes.choice.largest import last_within
from runnable import captured

from graphir import passes
from graphir.errors import PassError
from graphir.ir.covers import Covers
from graphir.ir.guard import parse_guard
from graphir.ir.program import Program
from graphir.ir.size import LARGEST


@pytest.fixture(scope="module")
def program() -> Program:
    return captured(models.mlp(batch=6))


def guarded(program: Program, *guards: str) -> Program:
    return program.with_(covers=Covers(tuple([parse_guard(text, "another branch") for text in guards])))


@pytest.mark.parametrize(
    ("guards", "taken"),
    [
        ((), [1, 2, 3, 4, 5, 6, 7, 8]),
        (("batch<=20",), [*range(1, 21)]),
        (("batch>=4", "batch<=8"), [4, 5, 6, 7, 8]),
        (("batch%3==0", "batch<=20"), [3, 6, 9, 12, 15, 18]),
        (("batch!=5", "batch!=7", "2*batch<=19"), [1, 2, 3, 4, 6, 8, 9]),
        (("batch%2==0", "batch%3!=2", "batch<=14"), [4, 6, 10, 12]),
        (("batch==6",), [6]),
    ],
)
def test_batches_are_those_that_guards_take(program: Program, guards: tuple[str, ...], taken: list[int]) -> None:
    batches = Batches(guarded(program, *guards))
    found = [batches.after(0)]
    while len(found) < len(taken) and found[-1]:
        found.append(batches.after(found[-1]))
    assert found == taken
    if guards:
        assert batches.after(taken[-1]) == 0
    assert [batches.up_to(number) for number in taken] == taken
    for first, second in pairwise(taken):
        assert {batches.up_to(number) for number in range(first, second)} == {first}
    assert batches.up_to(taken[0] - 1) == 0


def test_what_ends_the_batches_is_named(program: Program) -> None:
    assert Batches(guarded(program, "batch<=20")).end == "batch=21 does not meet batch<=20: another branch"
    assert Batches(program).end.endswith("rows are more than any machine holds")
    assert 1 << 30 < Batches(program).most < LARGEST


def test_each_replica_has_its_share_of_each_micro_batch() -> None:
    program = passes.replicate(captured(models.mlp(batch=12), accumulate=2), devices=[0, 1], shares=[3, 1])
    batches = Batches(program)
    assert batches.unit == 8 and batches.rows(5) == 40
    assert batches.dims(5) == {"gpu_0/batch": 15, "gpu_1/batch": 5}
    assert batches.others == {}


def test_sizes_outside_of_guards_are_refused(program: Program) -> None:
    with pytest.raises(PassError, match=r"largest_batch: batch=6 does not meet batch<=5: another branch"):
        Batches(guarded(program, "batch<=5"))


def test_the_last_number_within_is_found_in_few_looks() -> None:
    """Of straight lines in five; of any other excess that grows, sooner than by halving everything."""
    random = Random(0)
    for _ in range(300):
        least, most = random.randint(1, 3), random.choice([40, 5000, 1 << 40])
        last, bend = random.randint(least - 1, min(most, 3000)), random.choice([1.0, 1.0, 0.6, 1.7])
        looks: list[int] = []

        def excess(number: int, last: int = last, bend: float = bend, looks: list[int] = looks) -> int:
            looks.append(number)
            return round((number**bend - (last + 0.5) ** bend) * 1000)

        start = random.randint(least, min(most, 4000))
        assert last_within(excess, start, least, most) == last
        assert least <= min(looks) and max(looks) <= most
        assert len(looks) <= (5 if bend == 1 else 32) and len(set(looks)) == len(looks)
