"""What a session gives and takes, and what it refuses."""

import copy
import gc
import weakref

import models
import pytest
import torch
from graphir.runtime import Session
from runnable import batch_of, captured, eager_step, forward_plan, sgd, spread
from small import program_of

import graphir
from graphir import passes
from graphir.errors import SessionError, VerifyError
from graphir.ir.plan import Plan

EXECUTORS = ["reference", "threads"]


def mlp_session(executor="auto", **options):
    example = models.mlp()
    optimizer = sgd(example.model.parameters(), **options)
    program = captured(example, optimizer)
    return example, optimizer, Session(passes.emit(program), program.state, executor=executor)


@pytest.fixture
def mlp():
    example, optimizer, session = mlp_session()
    with session:
        yield example, optimizer, session


# -- results


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_step_is_a_step_of_eager_pytorch(executor):
    example, optimizer, session = mlp_session(executor, weight_decay=1e-2)
    with session:
        for step in range(5):
            assert torch.equal(session.step(*batch_of(example)), eager_step(example, optimizer, step))
        for name, tensor in example.model.state_dict().items():
            assert torch.equal(session.state_dict()[name], tensor)


def test_the_loss_is_a_normal_tensor(mlp):
    example, _, session = mlp
    loss = session.step(*batch_of(example))
    assert loss.shape == ()
    assert not loss.is_inference()


def test_the_loss_of_unequal_shares_is_weighted():
    example = models.mlp(batch=7)
    program = captured(example, sgd(example.model.parameters()))
    x, y = batch_of(example)
    losses = [example.loss(example.model(a), b) for a, b in zip(x.chunk(2), y.chunk(2), strict=True)]
    with Session(passes.emit(passes.replicate(program, devices=[0, 1])), program.state) as session:
        expected = (losses[0].mul(4 * 2 / 7) + losses[1].mul(3 * 2 / 7)).div(2)
        assert torch.equal(session.step(x, y), expected.detach())


def test_a_forward_only_program_gives_the_outputs_gathered_in_their_structure():
    model, (x,), *_ = models.mlp(batch=7)

    class Named(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            out = self.inner(x)
            return {"logits": out, "pair": (out.relu(), self.inner.fc2.bias)}

    module = Named()
    program = graphir.capture(module, inputs=(x,))
    with Session(passes.emit(passes.replicate(program, devices=[0, 1])), program.state) as session, torch.no_grad():
        result = session.step(x)
        parts = [module(part) for part in x.chunk(2)]
        assert torch.equal(result["logits"], torch.cat([part["logits"] for part in parts]))
        assert torch.equal(result["pair"][0], torch.cat([part["pair"][0] for part in parts]))
        assert torch.equal(result["pair"][1], model.fc2.bias)


def test_an_output_that_is_state_is_a_copy():
    plan = forward_plan(
        """
        buffer s : f32[2] @gpu:0
        input x : f32[2] @gpu:0
        s;1 = aten.add_.Tensor(s, x) {writes=[0:0]}
        """,
        "x",
        output="s",
        state={"s": torch.zeros(2)},
    )
    with Session(plan, {"s": torch.zeros(2)}) as session:
        first = session.step(torch.ones(2))
        session.step(torch.ones(2))
        assert first.tolist() == [1, 1]


@pytest.mark.parametrize("executor", EXECUTORS)
def test_an_input_that_the_step_overwrites_is_not_the_callers(executor):
    plan = forward_plan(
        """
        input x : f32[2] @gpu:0
        x;1 = aten.mul_.Tensor(x, other=2) {writes=[0:0]}
        y : f32[2] @gpu:0 = aten.neg(x;1)
        """,
        "x",
        output="y",
    )
    x = torch.ones(2)
    with Session(plan, {}, executor=executor) as session:
        assert session.step(x).tolist() == [-2, -2]
        assert x.tolist() == [1, 1]


def test_a_program_without_optimizer_gives_gradients():
    example = models.mlp()
    program = captured(example)
    example.loss(example.model(*example.inputs), *example.targets).backward()
    with Session(passes.emit(program), program.state) as session:
        with pytest.raises(SessionError, match="no step was done yet"):
            session.gradients()
        session.step(*batch_of(example))
        found = session.gradients()
        assert found.keys() == dict(example.model.named_parameters()).keys()
        for name, param in example.model.named_parameters():
            assert torch.equal(found[name], param.grad)


def test_a_program_with_an_optimizer_has_no_gradients_to_give(mlp):
    with pytest.raises(SessionError, match="hands back no gradients"):
        mlp[2].gradients()


# -- random numbers


def test_random_numbers_are_those_of_the_step():
    example = models.resnet(dropout=0.5)
    optimizer = sgd(example.model.parameters())
    program = captured(example, optimizer)
    with Session(passes.emit(program), program.state) as session:
        losses = [session.step(*batch_of(example)) for _ in range(3)]
    assert [torch.equal(loss, eager_step(example, optimizer, i)) for i, loss in enumerate(losses)] == [True] * 3


def test_a_session_goes_on_from_the_state_of_another():
    example = models.resnet(dropout=0.5)
    program = captured(example, sgd(example.model.parameters()))
    plan = passes.emit(program)
    with Session(plan, program.state) as session:
        session.step(*batch_of(example))
        state = session.state()
        expected = session.step(*batch_of(example))
    with Session(plan, state) as session:
        assert session.steps_done == 1
        assert torch.equal(session.step(*batch_of(example)), expected)


# -- state


def test_state_is_copied_in_and_out(mlp):
    example, _, session = mlp
    before = copy.deepcopy(session.plan.program.state)
    taken = session.state_dict()
    session.step(*batch_of(example))
    assert not torch.equal(taken["fc1.weight"], session.state_dict()["fc1.weight"])
    assert all(torch.equal(tensor, session.plan.program.state[name]) for name, tensor in before.items())
    assert not taken["fc1.weight"].is_inference()
    taken["fc1.weight"].requires_grad_().sum().backward()


def test_the_module_takes_the_state(mlp):
    example, _, session = mlp
    session.step(*batch_of(example))
    example.model.load_state_dict(session.state_dict())
    assert torch.equal(example.model.fc1.weight, session.state_dict()["fc1.weight"])


def test_tied_names_share_a_tensor():
    example = models.gpt()
    program = captured(example, sgd(example.model.parameters()))
    with Session(passes.emit(program), program.state) as session:
        state = session.state_dict()
    theirs = example.model.state_dict()
    assert list(state) == list(theirs)
    for a in theirs:
        for b in theirs:
            tied = theirs[a].data_ptr() == theirs[b].data_ptr()
            assert (state[a].data_ptr() == state[b].data_ptr()) == tied


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.Adam, sgd])
def test_the_optimizer_takes_its_state(make):
    example = models.mlp()
    optimizer = make(example.model.parameters())
    program = captured(example, optimizer)
    fresh = make(copy.deepcopy(example.model).parameters())
    with Session(passes.emit(program), program.state) as session:
        for step in range(3):
            session.step(*batch_of(example))
            eager_step(example, optimizer, step)
        fresh.load_state_dict(session.optimizer_state_dict())
    ours, theirs = fresh.state_dict(), optimizer.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for index, entries in theirs["state"].items():
        assert all(torch.equal(value, ours["state"][index][name]) for name, value in entries.items())


def test_replicas_keep_their_own_buffers_and_equal_parameters():
    example = models.resnet()
    program = captured(example, sgd(example.model.parameters()))
    with Session(passes.emit(passes.replicate(program, devices=[0, 1])), program.state) as session:
        session.step(*batch_of(example))
        first, second = session.state_dict(0), session.state_dict(1)
        assert torch.equal(first["fc.weight"], second["fc.weight"])
        assert not torch.equal(first["bn1.running_mean"], second["bn1.running_mean"])
        with pytest.raises(SessionError, match=r"no replica 2(.|\n)*0 to 1"):
            session.state_dict(2)
        with pytest.raises(SessionError, match=r"'gpu_1/bn1\.running_mean' in the state has shape \[3\]"):
            Session(session.plan, {**session.state(), "gpu_1/bn1.running_mean": torch.ones(3)})


def test_loaded_state_is_that_of_every_replica():
    example = models.resnet()
    program = captured(example, sgd(example.model.parameters()))
    state = {name: torch.full_like(tensor, 2) for name, tensor in example.model.state_dict().items()}
    with Session(passes.emit(passes.replicate(program, devices=[0, 1])), program.state) as session:
        session.load_state_dict(state)
        for replica in (0, 1):
            assert all(torch.equal(tensor, state[name]) for name, tensor in session.state_dict(replica).items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("fc1.weight"), "the state has no 'fc1.weight'"),
        (lambda s: s.update({"fc1.weigth": s["fc1.weight"]}), "the module has no 'fc1.weigth'; did you mean 'fc1.wei"),
        (lambda s: s.update({"fc1.bias": torch.ones(3)}), r"'fc1.bias' in the state has shape \[3\], .* takes \[16\]"),
        (lambda s: s.update({"fc1.bias": s["fc1.bias"].double()}), "'fc1.bias' in the state has dtype torch.float64"),
        (lambda s: s.update({"fc2.bias": s["fc2.bias"].to("meta")}), "'fc2.bias' in the state is on meta"),
        (lambda s: s.update({"fc2.bias": s["fc2.bias"].to_sparse()}), "'fc2.bias' in the state is a torch.sparse_coo"),
    ],
    ids=["missing", "unknown", "shape", "dtype", "device", "layout"],
)
def test_state_that_does_not_fit_changes_nothing(mlp, change, message):
    session = mlp[2]
    before, state = session.state_dict(), {n: torch.zeros_like(t) for n, t in session.state_dict().items()}
    change(state)
    with pytest.raises(SessionError, match=message):
        session.load_state_dict(state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in session.state_dict().items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("fc2.bias"), "the state has no 'fc2.bias'"),
        (lambda s: [s.pop("fc1.bias"), s.pop("fc2.bias")], r"the state has no 'fc1.bias' \(and 1 more are missing\)"),
        (lambda s: s.clear(), "the state is empty"),
        (lambda s: s.update({"fc1.bias": torch.ones(3)}), "'fc1.bias' in the state has shape"),
        (lambda s: s.update({"fc1.bias": [1.0]}), "'fc1.bias' in the state is of type list, not a tensor"),
        (lambda s: s.update({"fc1.bias": s["fc1.bias"].to("meta")}), "'fc1.bias' in the state is on meta"),
        (lambda s: s.update({"step": torch.tensor(0.5)}), "'step' in the state has dtype torch.float32"),
        (lambda s: s.update({"step": torch.tensor(-1)}), "'step' in the state is -1"),
        (lambda s: s.update({"lr": torch.tensor(-1.0)}), "is no learning rate"),
    ],
    ids=["missing", "two missing", "empty", "shape", "type", "device", "step", "negative step", "learning rate"],
)
def test_a_session_is_not_made_with_state_that_does_not_fit(mlp, change, message):
    program = mlp[2].plan.program
    example = mlp[0]
    state = dict(captured(example, sgd(example.model.parameters())).state)
    change(state)
    with pytest.raises(SessionError, match=message):
        Session(passes.emit(program), state)


def test_a_name_that_is_none_of_the_programs_is_missed_where_it_belongs(mlp):
    state = dict(mlp[2].state())
    state["fc1.weigth"] = state.pop("fc1.weight")
    with pytest.raises(SessionError, match=r"the state has no 'fc1.weight'; did you mean .*'fc1.weigth'"):
        Session(mlp[2].plan, state)


def test_a_program_without_optimizer_goes_on_from_the_state_of_a_training_one(mlp):
    example, _, training = mlp
    training.step(*batch_of(example))
    forward = graphir.capture(example.model, inputs=example.inputs)
    with Session(passes.emit(forward), training.state()) as session:
        example.model.load_state_dict(training.state_dict())
        assert torch.equal(session.step(*example.inputs), example.model(*example.inputs))


# -- learning rates


def test_a_learning_rate_can_be_set(mlp):
    example, optimizer, session = mlp
    session.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"] = 0.01
    session.step(*batch_of(example))
    eager_step(example, optimizer)
    assert torch.equal(session.state_dict()["fc1.weight"], example.model.fc1.weight)
    with pytest.raises(SessionError, match=r"'weight_decay' cannot be set(.|\n)*with a weight_decay that is not 0"):
        session.param_groups[0]["weight_decay"] = 0.5
    with pytest.raises(SessionError, match=r"'nesterov' cannot be set(.|\n)*with another optimizer"):
        session.param_groups[0]["nesterov"] = True


def test_a_followed_optimizers_scheduler_works(mlp):
    example, optimizer, session = mlp
    session.follow(optimizer)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for step in range(4):
        session.step(*batch_of(example))
        eager_step(example, optimizer, step)
        scheduler.step()
    assert session.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] == 0.1 * 0.5**4
    assert torch.equal(session.state_dict()["fc1.weight"], example.model.fc1.weight)


def test_another_optimizer_is_not_followed(mlp):
    example, _, session = mlp
    params = list(example.model.parameters())
    with pytest.raises(SessionError, match="2 parameter groups, the program 1"):
        session.follow(sgd([{"params": params[:1]}, {"params": params[1:]}]))
    with pytest.raises(SessionError, match=r"group 0 of the optimizer has dampening=0.5, the program has 0"):
        session.follow(sgd(params, dampening=0.5))
    with pytest.raises(SessionError, match="the optimizer is Adam, the program's SGD"):
        session.follow(torch.optim.Adam(params))
    with pytest.raises(SessionError, match="not a NoneType"):
        session.follow(None)
    with pytest.raises(SessionError, match="differ in their number of parameters: 3 and 4"):
        session.follow(sgd(params[:3]))
    with pytest.raises(SessionError, match=r"a parameter of shape \[\d+.*in the place of 'fc\d"):
        session.follow(sgd(params[::-1]))
    lacking = sgd(params)
    del lacking.param_groups[0]["nesterov"]
    with pytest.raises(SessionError, match="has no 'nesterov', the program has False"):
        session.follow(lacking)


# -- refusals


def test_a_refused_step_changes_nothing(mlp):
    example, _, session = mlp
    x, y = batch_of(example)
    before = session.state_dict()
    for wrong in ((x,), (x, y, y), (x.double(), y), (x[:, :3], y), (x[:3], y)):
        with pytest.raises(SessionError):
            session.step(*wrong)
    assert session.steps_done == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in session.state_dict().items())
    session.step(x, y)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"binding": "gpu"}, "binding 'gpu' is not supported(.|\n)*supported: auto, cpu, cuda"),
        (
            {"executor": "fast"},
            "executor 'fast' is not supported(.|\n)*supported: auto, reference, serial, threads, cu",
        ),
        ({"threads": 0}, "threads=0: a kernel needs at least one thread"),
        ({"threads": 1.5}, "threads=1.5: a kernel needs at least one thread"),
        ({"threads": "2"}, "threads='2': a kernel needs at least one thread"),
    ],
    ids=str,
)
def test_unknown_options_are_refused(mlp, options, message):
    with pytest.raises(SessionError, match=message):
        Session(mlp[2].plan, {}, **options)


def test_use_after_close_is_refused(mlp):
    example, optimizer, session = mlp
    session.close()
    session.close()
    uses = (
        lambda: session.step(*batch_of(example)),
        session.state_dict,
        session.optimizer_state_dict,
        session.state,
        session.gradients,
        lambda: session.load_state_dict({}),
        lambda: session.follow(optimizer),
        session.__enter__,
    )
    for use in uses:
        with pytest.raises(SessionError, match="the session is closed"):
            use()


def test_an_unsound_plan_is_refused(mlp):
    plan = mlp[2].plan
    with pytest.raises(VerifyError):
        Session(plan.with_(instructions=plan.instructions[1:]), {})


def test_a_type_that_no_kernel_exists_for_is_refused():
    program = program_of('input x : f32[2] @gpu:0\ny : f32[2] @gpu:0 = Relu(x)\noutput y\nproto ""')
    with pytest.raises(SessionError, match=r"operators of type 'Relu' cannot be run(.|\n)*at .*= Relu\(x\)") as refused:
        Session(passes.emit(program), {})
    assert refused.value.fix.endswith("; caffe2.lower(program) translates Caffe2's to them")


def test_a_shifted_plan_runs_from_its_file(tmp_path):
    example = models.mlp()
    program = captured(example, sgd(example.model.parameters()))
    plan = passes.emit(spread(program))
    plan.save(tmp_path / "step.plan.json")
    loaded = graphir.load(tmp_path / "step.plan.json")
    assert isinstance(loaded, Plan)
    with Session(plan, program.state) as a, Session(loaded, program.state) as b:
        assert torch.equal(a.step(*batch_of(example)), b.step(*batch_of(example)))


def test_an_expanded_buffer_stays_one_row_in_memory():
    model = torch.nn.BatchNorm1d(3).eval()
    model.running_mean = torch.tensor([2.0]).expand(3)
    program = graphir.capture(model, (torch.randn(4, 3),))
    x, changed = torch.randn(5, 3), torch.tensor([0.5]).expand(3)
    with Session(passes.emit(program), program.state) as session:
        assert torch.equal(session.step(x), model(x))
        session.load_state_dict({**session.state_dict(), "running_mean": changed.clone()})
        uneven = {**session.state_dict(), "weight": torch.zeros(3), "running_mean": torch.tensor([0.5, 0.5, 1.0])}
        with pytest.raises(SessionError, match=r"'running_mean' in the state has values of its own along a dimension"):
            session.load_state_dict(uneven)
        model.running_mean = changed
        assert torch.equal(session.step(x), model(x))
        with Session(session.plan, session.state()) as other:
            assert torch.equal(other.step(x), model(x))
    with pytest.raises(SessionError, match="captured expanded"):
        Session(session.plan, {**program.state, "running_mean": torch.arange(3.0)})


@pytest.mark.parametrize("executor", ["serial", "threads"])
def test_state_goes_with_its_session_and_needs_no_collector(executor):
    example = models.mlp()
    program = captured(example, sgd(example.model.parameters()))
    gc.disable()
    try:
        with Session(passes.emit(spread(program)), program.state, executor=executor) as session:
            session.step(*batch_of(example))
            held = weakref.ref(next(iter(session._setting.state.values())))
        del session
        assert held() is None
    finally:
        gc.enable()
