"""No single change of a plan's waits, records, frees, copies and receive buffers goes unnoticed.

``python tests/bench mutants`` makes all of them, in more plans.
"""

from collections import Counter

import mutants
import nets
import pytest
from graphir.runtime import check
from runnable import spread

from graphir import passes


@pytest.fixture(scope="module")
def plan():
    return passes.emit(spread(nets.random_program(4, ops=12)))


def test_no_mutant_is_missed_and_none_that_is_as_good_accused(plan):
    found = mutants.counts(plan, share=0.1)
    total = sum(found.values(), Counter())
    assert {total["missed"], total["accused wrongly"]} == {0}
    assert all(
        total[verdict] > 5 for verdict in ("refused by verify", "found by check", "of them by running", "equivalent")
    )


def test_no_wait_of_a_plan_is_implied_by_the_others(plan):
    trial = mutants.Trial(plan)
    dropped = [m.plan for m in mutants.mutants(plan) if (m.kind, m.change) == ("wait", "dropped")]
    assert len(dropped) > 20
    assert not any(map(trial.oracle, dropped))
    assert trial.oracle(plan)


def test_check_running_and_the_oracle_agree_on_every_two_storages_that_get_one_buffer():
    harmless, verdicts = Counter(), Counter()
    for seed in range(16):
        plan = mutants.to_and_fro(seed)
        trial = mutants.Trial(plan)
        for mutant in [mutant for mutant in mutants.mutants(plan) if mutant.kind == "buffer"]:
            verdicts.update(mutants.verdicts(trial, mutant))
            sound = trial.oracle(mutant.plan)
            assert bool(check(mutant.plan)) == trial.running(mutant.plan) == (not sound), mutant.what
            harmless[sound] += 1
    assert min(harmless[True], harmless[False], verdicts["found by check"]) > 3
    assert {verdicts["missed"], verdicts["accused wrongly"]} == {0}
