"""Sessions beside each other, which train and see one state."""

import copy

import models
import pytest
import torch
from graphir.runtime import Session
from runnable import batch_of, captured, sgd, spread

import graphir
from graphir import passes
from graphir.errors import SessionError


def test_sessions_beside_each_other_train_one_state():
    example = models.mlp()
    program = captured(example, sgd(example.model.parameters()))
    batch = [torch.cat([tensor] * 2) for tensor in batch_of(example)]
    plain = passes.emit(passes.replicate(program, devices=[0, 1]))
    with (
        Session(plain, program.state) as alone,
        Session(plain, program.state) as one,
        Session(passes.emit(spread(program)), program.state, beside=one) as other,
    ):
        for session in (one, other, one, other):
            assert torch.equal(session.step(*batch), alone.step(*batch))
        for session in (one, other):
            assert all(torch.equal(session.state()[name], tensor) for name, tensor in alone.state().items())


@pytest.mark.parametrize("devices", [[0], [0, 1]])
def test_an_evaluation_beside_the_training_sees_its_state(devices):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(), torch.nn.Linear(4, 2)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = torch.randn(8, 3), torch.randn(8, 2)
    program = captured(models.Example(model, (x,), (y,), torch.nn.functional.mse_loss), optimizer)
    model.eval()
    forward = graphir.capture(model, (x,))
    model.train()
    plan, seen = (passes.emit(passes.replicate(p, devices=devices)) for p in (program, forward))
    with (
        Session(plan, program.state) as alone,
        Session(plan, program.state) as session,
        Session(seen, forward.state, beside=session) as evaluation,
        Session(seen, forward.state, beside=evaluation) as another,
    ):
        for _ in range(3):
            assert torch.equal(session.step(x, y), alone.step(x, y))
            trained = copy.deepcopy(model).eval()
            trained.load_state_dict(session.state_dict())
            shares = x.chunk(len(devices))
            outputs = [evaluation.step(x), another.step(x)]
            assert torch.equal(outputs[0][: len(shares[0])], trained(shares[0])) and torch.equal(*outputs)
        assert (session.steps_done, evaluation.steps_done) == (3, 3)
        assert evaluation.param_groups == []
        for name, tensor in session.state_dict().items():
            assert torch.equal(evaluation.state_dict()[name], tensor), name
        evaluation.load_state_dict(model.state_dict())
        assert session.state_dict()["1.num_batches_tracked"] == 0


@pytest.mark.parametrize(("devices", "others"), [([0, 1], None), (None, [0, 1]), ([0], [0, 1]), ([0, 1], [0])])
def test_sessions_of_other_replicas_share_no_state(devices, others):
    example = models.mlp()
    program = captured(example, sgd(example.model.parameters()))
    one, other = (passes.emit(passes.replicate(program, d) if d else program) for d in (devices, others))
    with (
        Session(one, program.state) as session,
        pytest.raises(SessionError, match=r"the replicas are .*, those of the session beside are"),
    ):
        Session(other, program.state, beside=session)


def test_sessions_of_other_models_share_no_state():
    programs = [captured(e, sgd(e.model.parameters())) for e in (models.mlp(), models.resnet())]
    with (
        Session(passes.emit(programs[0]), programs[0].state) as session,
        pytest.raises(SessionError, match="another model, in program 'mlp'"),
    ):
        Session(passes.emit(programs[1]), programs[1].state, beside=session)


def test_a_closed_session_shares_no_state():
    example = models.mlp()
    program = captured(example, sgd(example.model.parameters()))
    plan = passes.emit(program)
    with Session(plan, program.state) as session:
        pass
    with pytest.raises(SessionError, match="the session is closed"):
        Session(plan, program.state, beside=session)


def test_sessions_of_optimizers_of_other_parameters_share_no_state():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    example = models.Example(model, (torch.randn(8, 3),), (torch.randn(8, 2),), torch.nn.functional.mse_loss)
    first, last = [*model[0].parameters()], [*model[1].parameters()]
    ours, *others = [captured(example, sgd(parameters)) for parameters in (first, last, [*first, *last])]
    with Session(passes.emit(ours), ours.state) as session:
        for program, text in (
            (others[0], "parameter 0 in group 0 of the optimizer is '1.weight' in this program, '0.weight' in the one"),
            (others[1], "parameter 2 in group 0 of the optimizer is '1.weight' in this program, None in the one"),
        ):
            with pytest.raises(SessionError, match=text):
                Session(passes.emit(program), program.state, beside=session)


def test_a_session_that_is_refused_leaves_those_beside_it_as_they_were():
    model = torch.nn.Linear(3, 4)
    forward = graphir.capture(model, (torch.randn(8, 3),))
    example = models.Example(model, (torch.randn(8, 3),), (torch.randn(8, 4),), torch.nn.functional.mse_loss)
    program = captured(example, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    with Session(passes.emit(forward), forward.state) as session:
        before = session.state().keys()
        with pytest.raises(SessionError, match="'step' in the state is -1"):
            Session(passes.emit(program), {**program.state, "step": torch.tensor(-1)}, beside=session)
        assert session.state().keys() == before
