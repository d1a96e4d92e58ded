"""What a choice comes to: bytes that are held are counted once, and copies follow each other as their readers do."""

from __future__ import annotations

from graphir.passes.choice.outcome import Outcomes
from graphir.passes.choice.problem import AGAIN, KEEP, Choice, Group, Problem, Task, Value


def problem(groups: list[Group], tasks: list[Task], values: list[Value], devices: int = 2) -> Problem:
    """Copies take a second a byte, to and from the host a hundred."""
    count, host = devices + 1, devices
    pace = [[0.0 if a == b else 100.0 if host in (a, b) else 1.0 for b in range(count)] for a in range(count)]
    return Problem(
        devices=(*[f"gpu:{d}" for d in range(devices)], "cpu:0"),
        limits=(None,) * count,
        held=(0,) * count,
        latency=((0.0,) * count,) * count,
        pace=tuple(map(tuple, pace)),
        groups=tuple(groups),
        tasks=tuple(tasks),
        values=tuple(values),
    )


def task(group: int, seconds: float = 1.0, calls: int = 1, touched: int = 1) -> Task:
    return Task(group, (seconds,) * 4, 0, calls, touched)


def group(name: str, **given: object) -> Group:
    return Group(name, 0, (0, 1, 2), (KEEP, AGAIN, 0, 1, 2, 3), **given)  # type: ignore[arg-type]


def test_what_lingers_at_home_after_the_last_copy_is_held_once() -> None:
    given = problem([group("a"), group("b")], [task(0), task(1), task(0), task(0)], [Value(100, 0, (1,), 1, 0)])
    assert Outcomes(given)(Choice((0, 1), (KEEP, KEEP))).peaks == (100, 100, 0)


def test_what_lingers_is_what_the_copy_brought_that_was_issued_last() -> None:
    """Both copies stand before the third group's task; the first group's value, of 10 bytes, is made first."""
    tasks = [task(0), task(1), task(2), task(0), task(1), task(0), task(1)]
    read = [Value(10, 0, (2,), 1, 0), Value(100, 1, (2,), 1, 1)]
    given = problem(
        [group("a"), group("b"), group("c")],
        tasks,
        [*read, Value(7, 3, (5,), 0, 0), Value(7, 4, (6,), 0, 1)],
        devices=3,
    )
    outcomes = Outcomes(given)
    one, other = (outcomes(Choice(devices, (KEEP,) * 3)) for devices in ((0, 1, 2), (1, 0, 2)))
    assert one.peaks[0] == other.peaks[1] == 10
    assert one.peaks[1] == other.peaks[0] == 100 + 7


def test_copies_home_before_one_task_follow_each_other_as_they_are_needed() -> None:
    """Both come back as soon as they have left; passes.park, too, puts what is needed first before the other."""
    tasks = [task(0), task(1), task(0, 1.0, touched=0), task(0, 1.0, touched=0)]
    values = [Value(3, 0, (3,), 0, 0, parks=True), Value(2, 0, (2,), 0, 0, parks=True)]
    given = problem([group("a"), group("b")], tasks, values)
    found = Outcomes(given)(Choice((0, 1), (1, KEEP)))
    # Out until 1 + 3 and 4 + 2; home until 6 + 2, when the first reader begins, and 8 + 3, when the second one does.
    assert found.seconds == 12.0


def test_what_another_group_computes_again_from_is_held_until_then() -> None:
    groups = [group("a"), group("b", again=(1.0,) * 4, again_at=3)]
    tasks = [task(0), task(1), task(0), task(1)]
    values = [Value(100, 0, (1,), 1, 0, rebuilds=(1,)), Value(30, 1, (3,), 0, 1, again=True), Value(50, 2, (3,), 0, 0)]
    given = problem(groups, tasks, values)
    outcomes = Outcomes(given)
    assert outcomes(Choice((0, 0), (KEEP, AGAIN))).peaks[0] == 100 + 50 + 30
    assert outcomes(Choice((0, 0), (KEEP, KEEP))).peaks[0] == 100 + 30
