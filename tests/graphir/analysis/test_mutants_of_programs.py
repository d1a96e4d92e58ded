"""A small slice of the campaign of ``tests/bench certificates``: no program that differs is certified."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Collection
from dataclasses import replace

import mutations.campaign as campaign
import pytest
from graphir.runtime import Session
from graphir.runtime.interface.gather import Gather
from mutations.campaign import KINDS, VERDICTS, Verdict, imported_trials, trials
from mutations.judging import Trial, change_rates
from mutations.nets_of_caffe2 import Imported, imported
from mutations.placing import PLACING
from mutations.running import Running
from mutations.state import INTERFACE, STATE
from mutations.subjects import subjects
from mutations.workers import verdicts

from graphir import passes
from graphir.ir.tensor import same_bits

pytestmark = pytest.mark.usefixtures("one_thread")

SUBJECTS = {subject.name: subject for subject in subjects()}
NETS = {net.name: net for net in imported()}
ACCEPTED = VERDICTS[2]
SHARE = 0.01
"""At least one mutant of each kind."""


@pytest.mark.parametrize(
    ("name", "kinds"),
    [("vae, forward", KINDS), ("dlrm", (*STATE, *INTERFACE, "update dropped")), ("diffusion, spread", PLACING)],
)
def test_no_mutant_that_differs_is_certified(name: str, kinds: Collection[str]) -> None:
    found = [v for v in trials(SUBJECTS[name], SHARE, seed=1, kinds=kinds) if isinstance(v, Verdict)]
    assert [v for v in found if v.verdict == ACCEPTED or v.error] == []
    assert Counter(v.verdict for v in found)[VERDICTS[1]] >= 3


@pytest.mark.parametrize("name", ["joined, imported", "If with nets, imported", "edge_stale_copy, imported"])
def test_no_net_that_differs_is_certified(name: str) -> None:
    net: Imported = NETS[name]
    found = [v for v in imported_trials(net, SHARE, seed=1) if isinstance(v, Verdict)]
    assert [v for v in found if v.verdict == ACCEPTED or v.error] == []
    assert Counter(v.verdict for v in found)[VERDICTS[1]] > 2


def test_a_proof_that_accepts_everything_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaign, "certified", lambda before, after: (True, ""))
    kinds = ("operand: another alike", "operator dropped", "results", "chain of states")
    found = [v for v in trials(SUBJECTS["vae, forward"], 0.5, kinds=kinds) if isinstance(v, Verdict)]
    assert {v.kind for v in found if v.verdict == ACCEPTED} == set(kinds)


def test_what_runs_mutants_has_the_bits_of_a_session() -> None:
    subject = SUBJECTS["diffusion, spread"]
    program, size = subject.program, subject.sizes[1]
    given = Trial(subject).given[size]
    running, gather = Running(program, program.state), Gather(program)
    with Session(passes.emit(program), program.state, executor="reference") as session:
        for step in range(2):
            args, kwargs = subject.batch(size, step)
            result = session.step(*args, **kwargs)
            change_rates(session.param_groups)
            found = running.step(*given[step], step)
            handed = gather.result([found[name] for name in program.step.external_outputs], given[step][0])
            assert same_bits(handed, result), step
            for replica, prefix in enumerate(program.replicas):
                for name, tensor in session.state_dict(replica).items():
                    blob = prefix + program.interface.module_state[name]
                    assert same_bits(found[f"state {blob}"], tensor), (step, name)


def test_a_trial_sees_a_difference_in_the_interface_alone() -> None:
    subject = SUBJECTS["dlrm, forward"]
    program = subject.program
    held = program.interface.module_state
    first, second = [n for n in held if n.endswith("bias")][:2]
    swapped = {**held, first: held[second], second: held[first]}
    trial = Trial(subject)
    assert trial.differs(program.with_(interface=replace(program.interface, module_state=swapped)))
    assert not trial.differs(program.with_(name="another"))


def test_what_fails_while_it_judges_is_a_fault_that_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = verdicts(["joined, imported"], share=math.nan, processes=1)
    assert found.verdict not in VERDICTS
    assert found.error == "the process ended with 1: ValueError: cannot convert float NaN to integer"
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(FileNotFoundError, match="/nowhere/python"):
        list(verdicts(["joined, imported"]))


def test_every_kind_is_documented() -> None:
    assert all(make.__doc__ for make in KINDS.values())
