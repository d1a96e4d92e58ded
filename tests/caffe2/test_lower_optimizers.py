"""Translations of optimizers and learning rates, against Caffe2's formulas written out in Python."""

import math

import definitions
import numpy as np
import pytest
import torch
from lowering import close, generator, net, op, program, run

import graphir
from graphir import GraphirError, caffe2, passes


def tensor(seed, *shape):
    return torch.randn(*(shape or (3, 4)), generator=generator(seed))


@pytest.mark.parametrize("nesterov", [0, 1])
@pytest.mark.parametrize("steps", [1, 3])
def test_momentum_sgd(nesterov, steps):
    g, state = tensor(1), {"m": tensor(2), "w": tensor(3)}
    ops = [op("Scale", "x", "g"), op("MomentumSGDUpdate", "g m lr w", "g m w", momentum=0.9, nesterov=nesterov)]
    found = run(ops, {"x": g, "lr": torch.tensor([0.1])}, "g m w", state=state, steps=steps)
    m, w = state["m"].clone(), state["w"].clone()
    for _ in range(steps):
        new = 0.9 * m + 0.1 * g
        step = 1.9 * new - 0.9 * m if nesterov else new
        m, w = new, w - step
    for mine, theirs in zip(found, (step, m, w), strict=True):
        close(mine, theirs)


def test_momentum_sgd_without_a_parameter():
    ops = [op("Scale", "x", "g"), op("MomentumSGD", "g m lr", "g m", momentum=0.5)]
    found = run(ops, {"x": tensor(1), "lr": torch.tensor([0.1])}, "g m", state={"m": tensor(2)})
    for mine in found:
        close(mine, 0.5 * tensor(2) + 0.1 * tensor(1))


@pytest.mark.parametrize("args", [{}, {"epsilon": 1e-4, "decay": 0.5}, {"weight_decay": 0.1}, {"decay_": 0.0}], ids=str)
@pytest.mark.parametrize("outputs", ["w h", "w h rate", "w h rate growth"])
def test_adagrad(args, outputs):
    g, state = tensor(1), {"w": tensor(2), "h": tensor(3).abs()}
    ops = [op("Adagrad", "w h g lr", outputs, **args)]
    found = run(ops, {"g": g, "lr": torch.tensor(-0.1)}, outputs, state=state)
    grad = g + args.get("weight_decay", 0.0) * state["w"]
    h = args.get("decay", 1.0) * state["h"] + grad * grad
    rate = -0.1 / (h.sqrt() + args.get("epsilon", 1e-5))
    for mine, theirs in zip(found, (state["w"] + rate * grad, h, rate, rate * grad), strict=False):
        close(mine, theirs)


@pytest.mark.parametrize("args", [{}, {"decay": 0.5, "momentum": 0.8, "epsilon": 1e-3}], ids=str)
@pytest.mark.parametrize("steps", [1, 3])
def test_rmsprop(args, steps):
    g, state = tensor(1), {"s": tensor(2).abs(), "m": tensor(3)}
    ops = [op("Scale", "x", "g"), op("RmsProp", "g s m lr", "g s m", **args)]
    found = run(ops, {"x": g, "lr": torch.tensor([0.1])}, "g s m", state=state, steps=steps)
    s, m = state["s"].clone(), state["m"].clone()
    for _ in range(steps):
        s = s + (1 - args.get("decay", 0.9)) * (g * g - s)
        m = args.get("momentum", 0.0) * m + 0.1 * g / (s + args.get("epsilon", 1e-5)).sqrt()
    for mine, theirs in zip(found, (m, s, m), strict=True):
        close(mine, theirs)


@pytest.mark.parametrize("outputs", ["w m v", "w m v adapted"])
@pytest.mark.parametrize("iteration", [0, 7])
def test_adam(outputs, iteration):
    g, state = tensor(1), {"w": tensor(2), "m": tensor(3), "v": tensor(4).abs(), "it": torch.tensor([iteration])}
    ops = [op("Adam", "w m v g lr it", outputs, beta1=0.8, beta2=0.99, epsilon=1e-3)]
    found = run(ops, {"g": g, "lr": torch.tensor(-0.1)}, outputs, state=state)
    t = iteration + 1
    correction = math.sqrt(1 - 0.99**t) / (1 - 0.8**t)
    m, v = 0.8 * state["m"] + 0.2 * g, 0.99 * state["v"] + 0.01 * g * g
    adapted = correction * m / (v.sqrt() + 1e-3)
    for mine, theirs in zip(found, (state["w"] - 0.1 * adapted, m, v, adapted), strict=False):
        close(mine, theirs)


def near(found, wanted, rtol=2e-6):
    for mine, theirs in zip(found, wanted, strict=True):
        close(mine, torch.from_numpy(theirs), rtol)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("args", [{}, {"alpha": 0.1, "beta": 0.5, "lambda1": 2.0, "lambda2": 0.1}], ids=str)
@pytest.mark.parametrize("shape", [(3, 4, 2), (24,)], ids=["pairs", "flat"])
def test_ftrl(seed, steps, args, shape):
    g, state = tensor(seed), {"w": tensor(seed + 1), "nz": tensor(seed + 2, 3, 4, 2).abs().view(shape)}
    found = run([op("Ftrl", "w nz g", "w nz", **args)], {"g": g}, "w nz", state=state, steps=steps)
    w, n_z = state["w"].numpy().copy(), state["nz"].view(3, 4, 2).numpy().copy()
    for _ in range(steps):
        definitions.ftrl(w, n_z, g.numpy(), **args)
    near(found, [w, n_z.reshape(shape)], 5e-5)  # 1 by alpha multiplies what rounding makes of roots


def test_ftrl_with_its_rate_as_an_input():
    state = {"w": tensor(1), "nz": tensor(2, 3, 4, 2).abs()}
    inputs = {"g": tensor(3), "a": torch.tensor([0.03])}
    given = run([op("Ftrl", "w nz g a", "w nz")], inputs, "w nz", state=state)
    named = run([op("Ftrl", "w nz g", "w nz", alpha=0.03)], {"g": tensor(3)}, "w nz", state=state)
    assert all(map(torch.equal, given, named))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("args", [{}, {"decay": 0.8, "epsilon": 1e-3}], ids=str)
def test_adadelta(seed, args):
    g, state = tensor(seed), {"w": tensor(seed + 1), "h": tensor(seed + 2).abs(), "d": tensor(seed + 3).abs()}
    inputs = {"g": g, "lr": torch.tensor([-0.1])}
    found = run([op("Adadelta", "w h d g lr", "w h d", **args)], inputs, "w h d", state=state, steps=3)
    wanted = [state[name].numpy().copy() for name in "whd"]
    for _ in range(3):
        definitions.adadelta(*wanted, g.numpy(), -0.1, **args)
    near(found, wanted, 5e-6)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("outputs", ["w b", "w b rate", "w b rate growth"])
def test_wngrad(seed, outputs):
    g, state = tensor(seed), {"w": tensor(seed + 1), "b": torch.tensor([1.5])}
    inputs = {"g": g, "lr": torch.tensor(-0.1)}
    found = run([op("Wngrad", "w b g lr", outputs, epsilon=0.01)], inputs, outputs, state=state)
    w, b = state["w"].numpy().copy(), state["b"].numpy().copy()
    rate, growth = definitions.wngrad(w, b, g.numpy(), -0.1, epsilon=0.01)
    near(found, [w, b, np.array([rate]), growth][: len(found)])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("args", [{}, {"momentum": 2.0, "beta": 0.5}], ids=str)
def test_storm(seed, args):
    g, state = tensor(seed), {"w": tensor(seed + 1), "m": tensor(seed + 2), "s": torch.tensor([0.5])}
    inputs = {"g": g, "lr": torch.tensor(-0.1)}
    found = run([op("Storm", "w m s g lr", "w m s", **args)], inputs, "w m s", state=state, steps=3)
    w, m, s = [state[name].numpy().copy() for name in "wms"]
    for _ in range(3):
        definitions.storm(w, m, g.numpy(), *definitions.storm_rates(s, g.numpy(), -0.1, **args))
    near(found, [w, m, s])


def test_defaults_are_numbers_of_float32():
    """0.999 is 0.99900001 in Caffe2, which the correction of Adam's bias multiplies."""
    state = {"w": tensor(2), "m": tensor(3), "v": tensor(4).abs(), "it": torch.tensor([3])}
    inputs = {"g": tensor(1), "lr": torch.tensor(-0.1)}
    (adapted,) = run([op("Adam", "w m v g lr it", "w m v a")], inputs, "a", state=state)
    wanted = [state[name].numpy().copy() for name in "wmv"]
    near([adapted], [definitions.adam(*wanted, tensor(1).numpy(), -0.1, 3, adapted=True)], 1e-6)


def test_results_beside_their_operands_leave_those_alone():
    state = {"w": tensor(2), "m": tensor(3), "v": tensor(4).abs()}
    inputs = {"g": tensor(1), "lr": torch.tensor(-0.1), "it": torch.tensor([0])}
    ops = [op("Adam", "w m v g lr it", "w2 m2 v2"), op("Adam", "w m v g lr it", "w m v")]
    w2, w, m2, m = run(ops, inputs, "w2 w m2 m", state=state)
    assert torch.equal(w2, w) and torch.equal(m2, m)


@pytest.mark.parametrize("shape", [(3, 4), ()], ids=str)
def test_weighted_sum(shape):
    x, y, z = tensor(1, *shape or (1,)).view(shape), tensor(2, *shape or (1,)).view(shape), torch.ones(shape)
    inputs = {"y": y, "z": z, "one": torch.ones(1), "lr": torch.tensor(-0.1), "half": torch.tensor([0.5])}
    (found,) = run([op("WeightedSum", "x one y lr z half", "x")], inputs, "x", state={"x": x})
    close(found, x - 0.1 * y + 0.5 * z)
    (beside,) = run([op("WeightedSum", "x half", "s")], {**inputs, "x": x}, "s")
    close(beside, x * 0.5)


@pytest.mark.parametrize(
    "count", [op("Iter", "it", "it"), op("AtomicIter", "mutex it", "it")], ids=["Iter", "AtomicIter"]
)
def test_the_iteration_is_counted(count):
    init = [op("ConstantFill", "", "it", shape=[1], value=0, dtype=10), op("CreateMutex", "", "mutex")]
    (found,) = run([count], {}, "it", init=init, steps=3)
    assert found.tolist() == [3] and found.dtype == torch.int64


def warm(start, steps, i):
    return start + (1 - start) * i / steps if i < steps else 1.0


POLICIES = {
    "fixed": ({}, lambda i: 1.0),
    "step": ({"stepsize": 4, "gamma": 0.5}, lambda i: 0.5 ** (i // 4)),
    "exp": ({"gamma": 0.9}, lambda i: 0.9**i),
    "inv": ({"gamma": 0.1, "power": 0.75}, lambda i: (1 + 0.1 * i) ** -0.75),
    "poly": ({"power": 2.0, "max_iter": 20}, lambda i: (1 - i / 20) ** 2),
    "linearWarmup": ({"start_multiplier": 0.2, "num_iter": 6}, lambda i: warm(0.2, 6, i)),
    "constantWarmup": ({"multiplier": 0.25, "num_iter": 6}, lambda i: 0.25 if i < 6 else 1.0),
    "alter": ({"active_period": 3, "inactive_period": 2}, lambda i: float(i % 5 < 3)),
    "gate": ({"multiplier_1": 2.0, "multiplier_2": 0.5, "num_iter": 4}, lambda i: 2.0 if i < 4 else 0.5),
    "pieceWarmup": (
        {"m1": 0.1, "n1": 3, "m2": 0.4, "n2": 8, "m3": 0.9},
        lambda i: 0.1 if i < 3 else 0.4 if i < 8 else 0.9,
    ),
    "hill": (
        {"num_iter": 5, "start_multiplier": 0.1, "gamma": 0.5, "power": 2.0, "end_multiplier": 0.2},
        lambda i: warm(0.1, 5, i) if i < 5 else max(0.2, (1 + 0.5 * (i - 5)) ** -2),
    ),
    "constantThenLinearWarmup": (
        {"start_warmup_multiplier": 0.3, "constant_warmup_num_iter": 4, "linear_warmup_num_iter": 5},
        lambda i: 0.3 if i < 4 else warm(0.3, 5, i - 4),
    ),
}


@pytest.mark.parametrize("device", ["cpu:0", "gpu:0"])
@pytest.mark.parametrize("policy", POLICIES)
def test_learning_rates_follow_their_policy(policy, device):
    args, multiplier = POLICIES[policy]
    for i in (0, 1, 3, 4, 5, 8, 12):
        rate = op("LearningRate", "it", "lr", device, base_lr=-0.1, policy=policy, **args)
        (lr,) = run([rate], {}, "lr", state={"it": torch.tensor([i])})
        close(lr, torch.tensor(-0.1 * multiplier(i)))


def test_a_period_of_inactivity_may_come_first():
    rates = []
    for i in range(5):
        rate = op(
            "LearningRate", "it", "lr", base_lr=1.0, policy="alter", active_period=3, inactive_period=2, active_first=0
        )
        rates += run([rate], {}, "lr", state={"it": torch.tensor([i])})
    assert rates == [0, 0, 1, 1, 1]


@pytest.mark.parametrize(
    "args, reason",
    [
        ({"policy": "fixed"}, "no argument 'base_lr'"),
        ({"base_lr": 0.1, "policy": "cyclic"}, "policy 'cyclic' is not translated"),
        ({"base_lr": 0.1, "policy": "step", "gamma": 0.1}, "argument 'stepsize' is 0"),
    ],
    ids=str,
)
def test_rates_that_make_no_sense_are_refused(args, reason):
    with pytest.raises(GraphirError, match=reason):
        run([op("LearningRate", "it", "lr", **args)], {"it": torch.tensor([0])}, "lr")


UPDATES = [
    op("WeightedSum", "w lr g lr", "w"),
    op("WeightedSum", "w g", "w"),
    op("MomentumSGDUpdate", "g m lr w", "g2 m w"),
    op("MomentumSGD", "g m lr", "g2 m"),
    op("Adagrad", "w m g lr", "w m"),
    op("RmsProp", "g m v lr", "g2 m v"),
    op("Adam", "w m v g lr it", "w m v"),
    op("Ftrl", "w m g", "w m"),
    op("Adadelta", "w m v g lr", "w m v"),
    op("Storm", "w m s g lr", "w m s"),
    op("Wngrad", "w s g lr", "w s"),
]


@pytest.mark.parametrize("update", UPDATES, ids=lambda o: f"{o.type}{len(o.input)}")
@pytest.mark.parametrize("grad", [tensor(1, 4), tensor(1, 3, 4).double()], ids=["shape", "type"])
def test_gradients_that_do_not_fit_are_refused(update, grad):
    inputs = {"g": grad, "lr": torch.tensor(0.1), "it": torch.tensor([0])}
    given = {name: inputs[name] for name in update.input if name in inputs}
    state = {name: tensor(2) for name in update.input if name not in inputs}
    reason = "'g' should have one element" if list(update.input) == ["w", "g"] else r"f(32|64)\[(3,)?4\]"
    with pytest.raises(GraphirError, match=rf"{update.type} cannot be translated: .*{reason}(.|\n)*operator 0"):
        run([update], given, update.output[-1], state=state)


@pytest.mark.parametrize(
    "update, reason",
    [
        (op("Ftrl", "w m g", "w m"), r"n and z are f32\[3,4\], the parameter f32\[3,4\]"),
        (op("Ftrl", "w nz g lr", "w nz", alpha=0.1), "alpha is an input and an argument"),
        (op("Adadelta", "w m v g lr", "w m v", decay=0.0), "argument 'decay' is 0.0"),
        (op("Storm", "w m v g lr", "w m v"), "'v' should have one element"),
        (op("Wngrad", "w m g lr", "w m"), "cannot be seen as"),
    ],
    ids=lambda o: getattr(o, "type", o),
)
def test_state_and_arguments_that_make_no_sense_are_refused(update, reason):
    inputs = {"g": tensor(1), "lr": torch.tensor(0.1)}
    given = {name: inputs[name] for name in update.input if name in inputs}
    state = {name: tensor(2, *(3, 4, 2)[: 3 if name == "nz" else 2]) for name in update.input if name not in inputs}
    with pytest.raises(GraphirError, match=f"{update.type} cannot be translated: .*{reason}"):
        run([update], given, "w", state=state)


@pytest.mark.parametrize(
    "update, name",
    [
        (op("WeightedSum", "w lr w lr", "w"), "w"),
        (op("WeightedSum", "w lr m lr", "m"), "m"),
        (op("Adagrad", "w m m lr", "w m"), "m"),
    ],
    ids=str,
)
def test_an_update_of_what_is_another_operand_too_is_refused(update, name):
    with pytest.raises(GraphirError, match=f"output '{name}' overwrites an input that is still read"):
        run([update], {"lr": torch.tensor(0.1)}, "w", state={"w": tensor(1), "m": tensor(2)})


def test_a_result_that_overwrites_what_is_still_read_is_refused():
    adagrad = op("Adagrad", "w m g lr", "w m g")
    with pytest.raises(GraphirError, match="'g' is read after an output overwrote it"):
        run([adagrad], {"g": tensor(3), "lr": torch.tensor(0.1)}, "w", state={"w": tensor(1), "m": tensor(2)})


def counting(step, init=(), state=None, steps=3):
    """The counter after each step."""
    lowered = caffe2.lower(program(step, state or {}, init), state=state, outputs=["it"])
    with graphir.runtime.Session(passes.emit(lowered), lowered.state) as session:
        found = [session.step()["it"] for _ in range(steps)]
        assert torch.equal(session.state_dict().get("it", found[-1]), found[-1])
    assert all(number.dtype == torch.int64 for number in found)
    return [number.tolist() for number in found]


LEGACY = op("Iter", "", "it")


def test_a_counter_without_an_input_begins_at_nothing_and_goes_on():
    assert counting([LEGACY]) == [[1], [2], [3]]
    assert counting([LEGACY, LEGACY]) == [[2], [4], [6]]


def test_a_counter_without_an_input_counts_on_from_what_there_is():
    fill = op("ConstantFill", "", "it", shape=[1], value=7, dtype=10)
    assert counting([LEGACY], [fill]) == [[8], [9], [10]]
    assert counting([LEGACY], [LEGACY]) == [[2], [3], [4]]
    assert counting([LEGACY], [fill, LEGACY]) == [[9], [10], [11]]
    assert counting([LEGACY], state={"it": torch.tensor([5])}) == [[6], [7], [8]]
    assert counting([fill, LEGACY]) == [[8], [8], [8]]


def test_a_counter_without_an_input_drives_a_rate_and_keeps_its_blob():
    """Sharing names leaves the counter its own, and copies leave it on the host."""
    rate = op("LearningRate", "it", "lr", "gpu:0", base_lr=-1.0, policy="exp", gamma=0.5)
    ops = [op("Iter", "", "it", "gpu:0"), rate, op("Scale", "x", "a"), op("Scale", "a", "b"), op("Scale", "b", "c")]
    imported = program(ops, {"x": tensor(1)})
    placed = passes.inject_copies(imported)
    graphir.certify(imported, placed)
    shared = passes.share_storage(placed)
    assert [o.outputs for o in shared.step.ops if "it" in (*o.inputs, *o.outputs)] == [("it",), ("lr",)]
    lowered = caffe2.lower(shared, outputs=["lr", "c"])
    with graphir.runtime.Session(passes.emit(lowered), lowered.state) as session:
        assert [session.step(x=tensor(1))["lr"].item() for _ in range(3)] == [-0.5, -0.25, -0.125]


def test_two_counters_without_an_input_are_no_one_counter():
    twice = program([LEGACY, LEGACY], {})
    with pytest.raises(GraphirError, match="'it'"):
        graphir.certify(twice, program([LEGACY], {}))


def test_lowering_leaves_a_net_with_such_a_counter_as_it_is():
    imported = caffe2.load_program(net([LEGACY], (), ("it",), "step"))
    before = str(imported.step)
    caffe2.lower(imported)
    assert str(imported.step) == before and imported.step.external_inputs == ()


def test_periods_of_nothing_are_refused():
    with pytest.raises(GraphirError, match="the periods are 0 and 0"):
        run([op("LearningRate", "it", "lr", base_lr=0.1, policy="alter")], {"it": torch.tensor([0])}, "lr")
