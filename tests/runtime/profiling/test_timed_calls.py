"""Which calls of a step are timed, in which order, and what becomes of their times."""

import sys

import models
import pytest
import torch
from graphir.runtime.profiling import calls
from graphir.runtime.profiling.calls import Subject, Use, measured
from graphir.runtime.profiling.timing import Timing
from runnable import captured, sgd
from single_calls import subject_of

import graphir
from graphir import passes


def test_calls_are_timed_in_the_order_of_the_step_and_count_for_their_average(monkeypatch):
    """Of those of a key that were timed beside another call, where some were not."""
    order = []
    of_use = {3: Timing(1.0, 2.0), 5: Timing(4.0, 4.0), 7: Timing(3.0, 6.0), 9: Timing(9.0)}

    def times(timed, others, threads, failed):
        order.extend(timed)
        return {turn: of_use[turn[1].position] for turn in timed}

    monkeypatch.setattr(calls, "times", times)
    x = torch.ones(4)
    neg = subject_of("aten.neg.default", [x], {})._replace(uses=(Use(3), Use(7), Use(9)))
    absolute = subject_of("aten.abs.default", [x], {})._replace(uses=(Use(5),))
    found, failed = measured({"neg": neg, "abs": absolute}, 1)
    assert [(name, use.position) for name, use in order] == [("neg", 3), ("abs", 5), ("neg", 7), ("neg", 9)]
    assert [(found[name].seconds, found[name].beside) for name in ("neg", "abs")] == [(2.0, 4.0), (4.0, 4.0)]
    assert not failed


def test_a_call_that_succeeds_once_is_measured(monkeypatch):
    def times(timed, others, threads, failed):
        first, second = timed
        failed(first, ValueError("no"))
        return {second: Timing(1.0)}

    monkeypatch.setattr(calls, "times", times)
    found, failed = measured(
        {"neg": subject_of("aten.neg.default", [torch.ones(4)], {})._replace(uses=(Use(0), Use(1)))}, 1
    )
    assert found["neg"].seconds == 1.0 and not failed


@pytest.mark.parametrize("replicas", [1, 2])
def test_the_first_calls_of_a_key_on_one_device_are_timed_and_one_of_updates(replicas, monkeypatch, tmp_path):
    given = {}
    monkeypatch.setattr(
        sys.modules["graphir.facade.profile"], "measured", lambda subjects, threads: (given.update(subjects) or {}, {})
    )
    example = models.gpt(layers=6)
    program = passes.replicate(captured(example, sgd(example.model.parameters())), range(replicas))
    step = program.step
    of_one, updates = 0, 0
    graphir.profile(program, threads=1, path=tmp_path / "profile.json")
    for subject in given.values():
        ops = [step.ops[use.position] for use in subject.uses]
        assert {op.type for op in ops} == {subject.op.type}
        assert len({step.blobs[op.outputs[0]].device for op in ops}) == 1
        assert [use.position for use in subject.uses] == sorted({use.position for use in subject.uses})
        assert len(ops) <= 4
        if subject.is_called_with_others:
            assert len(ops) == 1
            updates += subject.op.type == "graphir.sgd"
        of_one += len(ops) == 4
    assert of_one > 5 and updates


def test_an_update_is_measured_with_the_numbers_that_it_is_given():
    """By momentum, which Nesterov's adds to the gradient: a tensor more."""
    example = models.mlp()
    program = captured(example, sgd(example.model.parameters(), nesterov=True))
    op = next(op for op in program.step.ops if op.type == "graphir.sgd")
    found, failed = measured({"update": Subject(op, program.step.blobs, program.dims)}, 1)
    assert not failed and found["update"].scratch == program.step.blobs[op.inputs[0]].nbytes({})
