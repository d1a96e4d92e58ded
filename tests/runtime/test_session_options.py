"""What a session reads from the optimizer it follows, and hands on to the session that goes on from its state."""

import models
import pytest
import torch
from graphir.runtime import Session
from runnable import batch_of, captured, eager_step, sgd

from graphir import passes
from graphir.errors import SessionError


def session_of(example, optimizer):
    program = captured(example, optimizer)
    return Session(passes.emit(program), program.state)


@pytest.mark.filterwarnings("error")
def test_a_scheduler_takes_a_sessions_step_for_one_of_its_optimizer():
    example = models.mlp()
    optimizer = sgd(example.model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    with session_of(example, optimizer) as session:
        session.follow(optimizer)
        session.step(*batch_of(example))
        scheduler.step()  # warns where no step was made


def test_options_are_read_again_after_the_optimizer_was_loaded():
    example = models.mlp()
    optimizer = torch.optim.Adam(example.model.parameters())
    with session_of(example, optimizer) as session:
        session.follow(optimizer)
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.param_groups[0]["lr"] = 0.5
        session.step(*batch_of(example))
        assert session.param_groups[0]["lr"] == 0.5
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
        with pytest.raises(SessionError, match="of the optimizer have other parameters than when it was followed"):
            session.step(*batch_of(example))


def test_the_optimizers_state_has_the_followed_options_of_now():
    example = models.mlp()
    optimizer = sgd(example.model.parameters())
    with session_of(example, optimizer) as session:
        session.follow(optimizer)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        session.step(*batch_of(example))
        eager_step(example, optimizer)
        scheduler.step()
        theirs, ours = optimizer.state_dict(), session.optimizer_state_dict()
        assert ours["param_groups"] == theirs["param_groups"]
        assert "initial_lr" in session.param_groups[0]


@pytest.mark.parametrize("value", [None, "x", torch.ones(2), True, float("nan"), -0.1, float("inf")], ids=str)
def test_what_is_no_learning_rate_is_refused(value):
    example = models.mlp()
    with session_of(example, sgd(example.model.parameters())) as session:
        with pytest.raises(SessionError, match=r"learning rate(.|\n)*in   parameter group 0"):
            session.param_groups[0]["lr"] = value
        assert session.param_groups[0]["lr"] == 0.1


def test_a_session_goes_on_with_every_replicas_buffers_and_the_learning_rate():
    example = models.resnet()
    program = captured(example, sgd(example.model.parameters()))
    plan = passes.emit(passes.replicate(program, devices=[0, 1]))
    with Session(plan, program.state) as first:
        first.step(*batch_of(example))
        first.param_groups[0]["lr"] = 0.025
        with Session(plan, first.state()) as second:
            assert second.param_groups[0]["lr"] == 0.025
            assert torch.equal(first.step(*batch_of(example)), second.step(*batch_of(example)))
            for replica in (0, 1):
                ours, theirs = second.state_dict(replica), first.state_dict(replica)
                assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
                kept = [session.optimizer_state_dict(replica)["state"] for session in (first, second)]
                assert all(torch.equal(t, kept[1][i][n]) for i, entry in kept[0].items() for n, t in entry.items())
        assert not [name for name in first.state(replica=1) if name.startswith("gpu_")]


def test_a_session_takes_a_plan_and_a_mapping():
    example = models.mlp()
    program = captured(example, sgd(example.model.parameters()))
    with pytest.raises(SessionError, match=r"is a program, not a plan(.|\n)*passes.emit\(program\) makes a plan"):
        Session(program, program.state)
    with pytest.raises(SessionError, match="a session takes a plan, not a NoneType"):
        Session(None, program.state)
    with pytest.raises(SessionError, match="the state is of type NoneType, not a mapping"):
        Session(passes.emit(program), None)
