"""Numbers of the optimizer that change from step to step: the same bits as eager PyTorch, or a refusal."""

import copy
import gc
import warnings

import pytest
import torch
from eager import ShareByShare, assert_same_bits
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, RMSprop, SparseAdam

import graphir
from graphir import passes, runtime
from graphir.errors import CoverageError, SessionError, TrainingWarning
from graphir.optim import RowWiseAdagrad

X, Y = (torch.randn(6, size, generator=torch.Generator().manual_seed(size)) for size in (4, 3))


def cost(out, y):
    return (out - y).square().mean()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.body(x).relu())


class Bag(nn.Module):
    """A table with sparse gradients."""

    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(7, 3, sparse=True)

    def forward(self, x):
        return self.bag((x * 10).long().abs() % 7)


def groups(model):
    first, *rest = model.children()
    return [{"params": first.parameters()}, {"params": [p for module in rest for p in module.parameters()]}]


def twins(make, net=Net):
    """A model and its optimizer, twice alike."""
    torch.manual_seed(0)
    model = net()
    other = copy.deepcopy(model)
    return (model, make(model)), (other, make(other))


def eager_step(model, optimizer):
    optimizer.zero_grad()
    loss = cost(model(X), Y)
    loss.backward()
    optimizer.step()
    return loss.detach()


def program_of(model, optimizer, **options):
    return graphir.capture(model, (X,), targets=(Y,), loss=cost, optimizer=optimizer, **options)


def session_of(model, optimizer, follow=True, **options):
    program = program_of(model, optimizer)
    return runtime.Session(passes.emit(program), program.state, optimizer=optimizer if follow else None, **options)


def same(session, model, optimizer):
    assert_same_bits(session.state_dict(), model.state_dict(), "module")
    ours, theirs = session.optimizer_state_dict(), optimizer.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    for index, kept in theirs["state"].items():
        assert_same_bits(
            {key: torch.as_tensor(ours["state"][index][key]) for key in kept if kept[key] is not None},
            {key: torch.as_tensor(value) for key, value in kept.items() if value is not None},
            f"state {index}",
        )


def trained_alike(make, move, steps=4, net=Net, **options):
    """Assert that a session that follows an optimizer has eager PyTorch's bits; *move(optimizer, step)* moves numbers
    after each step."""
    (model, optimizer), (other, alone) = twins(make, net)
    with session_of(model, optimizer, **options) as session:
        for step in range(steps):
            loss = session.step(X, Y)
            assert_same_bits({"loss": loss}, {"loss": eager_step(other, alone)}, f"step {step}")
            move(optimizer, step)
            move(alone, step)
        same(session, other, alone)


def by_hand(optimizer, step):
    """Numbers that begin above 0 move, and are 0 now and then."""
    for i, group in enumerate(optimizer.param_groups):
        group["lr"] = 0.1 / (2 + step + i)
        if optimizer.defaults.get("weight_decay"):
            group["weight_decay"] = (0.3, 0, 1)[(step + i) % 3]
        if optimizer.defaults.get("momentum"):
            group["momentum"] = 0.5 + 0.07 * step
        if "betas" in group:
            group["betas"] = [(0.5, 0.9), (0.0, 0.99), (0.8, 0.0)][step % 3]


OPTIMIZERS = {
    "sgd": lambda m: SGD(groups(m), lr=0.1),
    "decay": lambda m: SGD(groups(m), lr=0.1, weight_decay=0.1),
    "momentum": lambda m: SGD(groups(m), lr=0.1, momentum=0.9),
    "nesterov": lambda m: SGD(groups(m), lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True, maximize=True),
    "dampened": lambda m: SGD(groups(m), lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.1),
    "fused sgd": lambda m: SGD(groups(m), lr=0.1, momentum=0.9, weight_decay=0.1, fused=True),
    "fused dampened": lambda m: SGD(groups(m), lr=0.1, momentum=0.9, dampening=0.3, fused=True),
    "adam": lambda m: Adam(groups(m), lr=0.01, weight_decay=0.1),
    "amsgrad": lambda m: Adam(groups(m), lr=0.01, amsgrad=True),
    "fused adam": lambda m: Adam(groups(m), lr=0.01, weight_decay=0.1, fused=True),
    "adamw": lambda m: AdamW(groups(m), lr=0.01),
    "fused adamw": lambda m: AdamW(groups(m), lr=0.01, fused=True),
    "decoupled": lambda m: Adam(groups(m), lr=0.01, weight_decay=0.1, decoupled_weight_decay=True),
    "adagrad": lambda m: Adagrad(groups(m), lr=0.1, weight_decay=0.1),
    "fused adagrad": lambda m: Adagrad(groups(m), lr=0.1, weight_decay=0.1, fused=True),
    "rmsprop": lambda m: RMSprop(groups(m), lr=0.01, momentum=0.9, weight_decay=0.1),
    "centered": lambda m: RMSprop(groups(m), lr=0.01, centered=True, weight_decay=0.1),
    "rows": lambda m: RowWiseAdagrad(groups(m), lr=0.1),
}


@pytest.mark.parametrize(
    ("name", "executor"),
    [*((name, "serial") for name in OPTIMIZERS), ("nesterov", "reference"), ("fused adam", "reference")],
)
def test_numbers_set_by_hand(name, executor):
    trained_alike(OPTIMIZERS[name], by_hand, executor=executor)


@pytest.mark.parametrize("make", [lambda m: SparseAdam(m.parameters(), lr=0.1), lambda m: SGD(m.parameters(), lr=0.1)])
def test_numbers_of_sparse_updates(make):
    trained_alike(make, by_hand, net=Bag)


@pytest.mark.parametrize("name", ["momentum", "nesterov", "dampened", "fused sgd", "fused dampened", "rmsprop"])
def test_momentum_that_is_0_for_a_while(name):
    """Torch leaves the buffers as they are meanwhile."""

    def move(optimizer, step):
        for group in optimizer.param_groups:
            group["momentum"] = (0.9, 0, 0.0, 0.5)[step % 4]

    trained_alike(OPTIMIZERS[name], move, steps=8)


@pytest.mark.parametrize("name", ["momentum", "dampened", "fused dampened"])
def test_momentum_that_is_0_at_first(name):
    (model, optimizer), (other, alone) = twins(OPTIMIZERS[name])
    with session_of(model, optimizer) as session:
        for momentum in (0.0, 0.9, 0.5):
            for group in (*optimizer.param_groups, *alone.param_groups):
                group["momentum"] = momentum
            assert_same_bits({"loss": session.step(X, Y)}, {"loss": eager_step(other, alone)}, str(momentum))
        same(session, other, alone)


@pytest.mark.parametrize("name", ["momentum", "dampened", "fused sgd", "adam", "fused adamw", "rmsprop"])
@pytest.mark.parametrize("make", ["one cycle", "cyclic"])
def test_schedulers_that_cycle_momentum(make, name):
    schedulers = {}

    def scheduled(model):
        optimizer = OPTIMIZERS[name](model)
        if make == "one cycle":
            schedulers[optimizer] = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=8)
        else:
            schedulers[optimizer] = torch.optim.lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, step_size_up=3)
        return optimizer

    trained_alike(scheduled, lambda optimizer, step: schedulers[optimizer].step(), steps=7)


def test_replicas_have_the_numbers_in_common():
    (model, optimizer), (other, _) = twins(OPTIMIZERS["adamw"])
    program = passes.replicate(program_of(model, optimizer), [0, 1])
    assert {name for name in program.step.external_inputs if "beta" in name} == {"beta1", "beta2", "beta1_1", "beta2_1"}
    shares = ShareByShare(other, cost, OPTIMIZERS["adamw"], 2)
    with runtime.Session(passes.emit(program), program.state, optimizer=optimizer) as session:
        for step in range(4):
            assert_same_bits({"loss": session.step(X, Y)}, {"loss": shares.step(X, Y)}, f"step {step}")
            for each in (optimizer, *shares.optimizers):
                by_hand(each, step)
        for replica, trained in enumerate(shares.models):
            assert_same_bits(session.state_dict(replica), trained.state_dict(), f"replica {replica}")


# -- as part of a program


def test_text_and_files_have_the_numbers(tmp_path):
    (model, optimizer), _ = twins(lambda m: AdamW(groups(m), lr=0.01))
    program = program_of(model, optimizer)
    assert "group lr, beta1, beta2, weight_decay {" in str(program)
    assert "group lr_1, beta1 -> beta1_1, beta2 -> beta2_1, weight_decay -> weight_decay_1 {" in str(program)
    assert graphir.parse(str(program)) == program
    program.save(tmp_path / "p.json")
    assert graphir.load(tmp_path / "p.json") == program
    assert graphir.certify(program, graphir.load(tmp_path / "p.json")).holds


def test_numbers_that_are_0_are_no_blobs():
    (model, optimizer), _ = twins(lambda m: Adam(groups(m), lr=0.01))
    program = program_of(model, optimizer)
    assert [tuple(group.numbers) for group in program.interface.param_groups] == [("beta1", "beta2")] * 2
    (model, optimizer), _ = twins(OPTIMIZERS["sgd"])
    assert [group.numbers for group in program_of(model, optimizer).interface.param_groups] == [{}, {}]


def test_a_state_has_the_numbers():
    (model, optimizer), _ = twins(lambda m: Adam(m.parameters(), lr=0.01))
    with session_of(model, optimizer) as first:
        optimizer.param_groups[0].update(lr=0.5, betas=(0.25, 0.75))
        state = first.state()
        assert [state[name].item() for name in ("lr", "beta1", "beta2")] == [0.5, 0.25, 0.75]
        with runtime.Session(first.plan, state) as second:
            assert second.param_groups[0]["lr"] == 0.5 and second.param_groups[0]["betas"] == (0.25, 0.75)
            assert torch.equal(first.step(X, Y), second.step(X, Y))
            same(second, model_with(first, model), optimizer_with(first, optimizer))


def model_with(session, model):
    model.load_state_dict(session.state_dict())
    return model


def optimizer_with(session, optimizer):
    optimizer.load_state_dict(session.optimizer_state_dict())
    return optimizer


@pytest.mark.filterwarnings("ignore::graphir.TrainingWarning")
def test_what_schedulers_keep_for_themselves_is_no_option():
    (model, optimizer), _ = twins(OPTIMIZERS["momentum"])
    programs = []
    for rate in (0.1, 0.2):
        torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=8)
        programs.append(program_of(model, optimizer))
    plans = [passes.emit(program) for program in programs]
    with (
        runtime.Session(plans[0], programs[0].state) as one,
        runtime.Session(plans[1], programs[1].state, beside=one) as two,
    ):
        one.step(X, Y)
        two.step(X, Y)


def test_an_operand_and_an_argument_are_one_too_many():
    (model, optimizer), _ = twins(OPTIMIZERS["momentum"])
    plan = passes.emit(program_of(model, optimizer))
    ops = [op._replace(args={"momentum": 0.5}) if op.type == "graphir.sgd" else op for op in plan.step.ops]
    plan = plan.with_(program=plan.program.with_(step=plan.step.with_(ops=tuple(ops))))
    with pytest.raises(graphir.PlanError, match="is given momentum twice: as an operand and as an argument"):
        runtime.Session(plan, plan.program.state)


# -- refusals and warnings


@pytest.mark.parametrize(
    ("make", "change", "message"),
    [
        ("sgd", {"weight_decay": 0.1}, r"weight_decay=0.1, the program has 0(.|\n)*capture .* weight_decay is not 0"),
        ("sgd", {"momentum": 0.9}, r"momentum=0.9, the program has 0(.|\n)*a scheduler that moves it is made before"),
        ("adam", {"eps": 0.1}, r"eps=0.1, the program has 1e-08(.|\n)*or set eps back"),
        ("adam", {"amsgrad": True}, r"amsgrad=True, the program has False"),
    ],
)
def test_what_changes_the_step_is_refused(make, change, message):
    (model, optimizer), _ = twins(OPTIMIZERS[make])
    with session_of(model, optimizer) as session:
        session.step(X, Y)
        before = dict(optimizer.param_groups[1])
        optimizer.param_groups[1].update(change)
        with pytest.raises(CoverageError, match=rf"group 1 of the optimizer has {message}"):
            session.step(X, Y)
        optimizer.param_groups[1].update(before)
        session.step(X, Y)
        assert session.steps_done == 2


def reverse(groups):
    groups.reverse()


def move(groups):
    groups[1]["params"].append(groups[0]["params"].pop())


def add(groups):
    groups.append(dict(groups[1], params=[nn.Parameter(torch.zeros(2))]))


@pytest.mark.parametrize("change", [reverse, move, add, list.clear])
def test_an_optimizer_whose_groups_get_other_parameters_is_followed_no_further(change):
    (model, optimizer), _ = twins(lambda net: SGD(groups(net), lr=0.1))
    with session_of(model, optimizer) as session:
        session.step(X, Y)
        change(optimizer.param_groups)
        with pytest.raises(SessionError, match="other parameters than when it was followed") as e:
            session.step(X, Y)
        assert "capture or compile the model again with this optimizer" in str(e.value)
        session.follow(SGD(groups(model), lr=0.2))
        session.step(X, Y)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lr": torch.tensor(0.3)}, r"lr of the optimizer has a tensor(.|\n)*set it to a number: tensor.item\(\)"),
        ({"betas": (0.9, torch.tensor(0.99))}, "betas of the optimizer has a tensor"),
        ({"lr": None}, "the learning rate None is not a number"),
        ({"betas": 0.9}, "0.9 are no betas"),
        ({"betas": (0.9,)}, r"\(0.9,\) are no betas(.|\n)*give 2 numbers"),
        ({"betas": (0.9, 0.9, 0.9)}, "are no betas"),
    ],
)
def test_what_the_followed_optimizer_has_in_place_of_numbers_is_refused(change, message):
    (model, optimizer), _ = twins(OPTIMIZERS["adam"])
    with session_of(model, optimizer) as session:
        before = dict(optimizer.param_groups[1])
        optimizer.param_groups[1].update(change)
        with pytest.raises(SessionError, match=message):
            session.step(X, Y)
        optimizer.param_groups[1].update(before)
        session.step(X, Y)


@pytest.mark.parametrize("betas", [0.5, (0.5,), (0.5, -1.0), (0.5, "x"), (0.5, float("nan"))], ids=str)
def test_what_are_no_betas_is_refused(betas):
    (model, optimizer), _ = twins(OPTIMIZERS["adam"])
    with session_of(model, optimizer, follow=False) as session:
        with pytest.raises(SessionError, match="parameter group 0"):
            session.param_groups[0]["betas"] = betas
        assert session.param_groups[0]["betas"] == (0.9, 0.999)


def test_a_number_that_is_set_ends_the_following():
    (model, optimizer), (other, alone) = twins(OPTIMIZERS["adam"])
    with session_of(model, optimizer) as session:
        optimizer.param_groups[1]["betas"] = alone.param_groups[1]["betas"] = (0.5, 0.9)
        session.param_groups[0]["lr"] = alone.param_groups[0]["lr"] = 0.05
        session.step(X, Y)
        eager_step(other, alone)
        session.param_groups[0]["betas"] = alone.param_groups[0]["betas"] = (0.3, 0.7)
        session.step(X, Y)
        eager_step(other, alone)
        same(session, other, alone)


def test_a_session_that_follows_nothing_says_so_once():
    (model, optimizer), _ = twins(OPTIMIZERS["momentum"])
    with session_of(model, optimizer, follow=False) as session:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            session.step(X, Y)
            session.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"] = 0.05
            session.step(X, Y)
        optimizer.param_groups[1]["momentum"] = 0.5
        with pytest.warns(
            TrainingWarning, match=r"momentum of parameter group 1 .* is 0\.5 now(.|\n)*with 0\.9"
        ) as told:
            session.step(X, Y)
        assert told[0].filename == __file__
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer.param_groups[1]["momentum"] = 0.4
            session.step(X, Y)


def test_a_program_does_not_keep_its_optimizer():
    (model, optimizer), _ = twins(OPTIMIZERS["momentum"])
    program = program_of(model, optimizer)
    assert program.optimizers[0]() is optimizer
    assert copy.deepcopy(program) == program and copy.deepcopy(program).optimizers == ()
    assert passes.emit(passes.replicate(program, [0, 1])).program.optimizers[0]() is optimizer
    with runtime.Session(passes.emit(program), program.state) as session:
        optimizer.param_groups[0]["lr"] = 0.5
        del optimizer
        gc.collect()
        assert program.optimizers[0]() is None
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            session.step(X, Y)


def test_a_state_whose_numbers_do_not_hold_says_so():
    (model, optimizer), _ = twins(OPTIMIZERS["momentum"])
    with session_of(model, optimizer, follow=False) as first:
        first.param_groups[0]["lr"] = 0.05
        with pytest.warns(TrainingWarning, match=r"lr is 0\.05 in the state, and 0\.1 in the optimizer"):
            runtime.Session(first.plan, first.state(), optimizer=optimizer).close()
