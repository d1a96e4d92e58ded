"""When tasks run that share workers, links and cores, and what is held meanwhile; against a slower simulation."""

import random

import pytest

from graphir.analysis.simulation import ISSUED, NOTHING, WORKER, Sharing, Tasks, shared, simulate


def random_tasks(seed, count=200, workers=4, links=3):
    rng = random.Random(seed)
    after = [tuple(rng.sample(range(i), min(i, rng.randrange(3)))) for i in range(count)]
    crossed = [tuple(rng.sample(range(links), rng.randrange(2))) for _ in range(count)]
    seconds = [rng.choice([0.0, rng.random()]) for _ in range(count)]
    return Tasks([rng.randrange(workers) for _ in range(count)], seconds, after, crossed)


def by_events(tasks):
    """Ends of tasks, found by going from one event to the next: whatever is ready is begun, in issue order."""
    count = len(tasks.workers)
    ends: dict[int, float] = {}
    begun: set[int] = set()
    now = 0.0
    while len(ends) < count or now < max(ends.values()):
        for i in range(count):
            done = [j for j, end in ends.items() if end <= now]
            earlier = [
                j for j in range(i) if tasks.workers[j] == tasks.workers[i] or set(tasks.links[j]) & set(tasks.links[i])
            ]
            if i not in begun and {*earlier, *tasks.after[i]} <= set(done):
                begun.add(i)
                ends[i] = now + tasks.seconds[i]
        later = [end for end in ends.values() if end > now]
        if not later:
            break
        now = min(later)
    return [ends[i] for i in range(count)]


@pytest.mark.parametrize("seed", range(5))
def test_a_sweep_finds_what_events_find(seed):
    tasks = random_tasks(seed, count=60)
    assert list(simulate(tasks).ends) == by_events(tasks)


@pytest.mark.parametrize("seed", range(5))
def test_causes_end_where_their_tasks_begin(seed):
    tasks = random_tasks(seed)
    times = simulate(tasks)
    for i, cause in enumerate(times.causes):
        if cause >= 0:
            assert times.ends[cause] == times.starts[i] and cause < i
        else:
            assert cause in (WORKER, NOTHING) and times.starts[i] == times.free[i]
    assert times.seconds == max(times.ends)


def test_copies_on_one_link_queue_in_issue_order():
    times = simulate(Tasks([0, 1, 2], [2.0, 3.0, 1.0], [(), (), ()], [(0,), (0,), (1,)]))
    assert (list(times.starts), list(times.causes)) == ([0.0, 2.0, 0.0], [NOTHING, 0, NOTHING])


def test_a_worker_that_sleeps_is_woken_and_one_that_looks_is_not():
    tasks = Tasks([0, 1, 1], [2.0, 0.5, 1.0], [(), (), (0,)], [(), (), ()])
    assert simulate(tasks, wake=0.25).starts[2] == 2.25
    assert simulate(tasks, wake=0.25, patience=1.6).starts[2] == 2.0
    assert simulate(tasks._replace(workers=[0, 0, 0]), wake=0.25).starts[2] == 2.5


def test_a_host_thread_issues_one_after_the_other():
    times = simulate(Tasks([0, 1, 2], [0.5, 0.0, 0.5], [()] * 3, [()] * 3), issue=[1.0, 0.5, 1.0])
    assert (list(times.starts), list(times.causes)) == ([1.0, 0.0, 2.5], [ISSUED, NOTHING, ISSUED])


def test_nothing_takes_no_time():
    assert simulate(Tasks([], [], [], [])).seconds == 0.0


def test_what_runs_at_once_takes_longer_by_what_overlaps():
    tasks = Tasks([0, 1, 1], [4.0, 2.0, 4.0], [()] * 3, [()] * 3)
    times = simulate(tasks)
    alone = Sharing(2, [1.0] * 3, [0.0] * 3)
    assert shared(tasks, times, alone) == [4.0, 2.0, 4.0]
    assert shared(tasks, times, alone._replace(slowdown=[1.5] * 3)) == [6.0, 3.0, 5.0]
    assert shared(tasks, times, alone._replace(slowdown=[1.5, 1.0, 2.0])) == [6.0, 2.0, 6.0]
    assert shared(tasks, times, alone._replace(lock=[1.0] * 3)) == [5.0, 3.0, 4.5]
    assert shared(tasks, times, alone._replace(slowdown=[1.5, 1.1, 2.0], lock=[1.0] * 3)) == [6.0, 3.0, 6.0]
    assert shared(tasks, times, alone._replace(cores=1)) == [8.0, 4.0, 6.0]
