"""Translations of dense and elementwise operators, against torch's own functions and its autograd."""

import random

import pytest
import torch
import torch.nn.functional as F
from lowering import close, generator, op, program, run

from graphir import GraphirError, caffe2

SEEDS = range(4)


def fc_case(seed, transposed=False):
    rng, g = random.Random(seed), generator(seed)
    axis = rng.choice([1, 1, 2])
    lead = [rng.randint(1, 4) for _ in range(axis)]
    inner = [rng.randint(1, 4) for _ in range(rng.choice([1, 2]))]
    width, inside = rng.randint(1, 5), int(torch.tensor(inner).prod())
    x = torch.randn(*lead, *inner, generator=g)
    shape = (inside, width) if transposed else (width, inside)
    return axis, x, torch.randn(*shape, generator=g), torch.randn(width, generator=g), (*lead, width)


@pytest.mark.parametrize("type", ["FC", "FCTransposed"])
@pytest.mark.parametrize("seed", SEEDS)
def test_fully_connected(type, seed):
    axis, x, w, b, shape = fc_case(seed, type == "FCTransposed")
    (y,) = run([op(type, "x w b", "y", axis=axis)], {"x": x, "w": w, "b": b}, "y")
    weight = w.t() if type == "FCTransposed" else w
    close(y, F.linear(x.reshape(-1, weight.shape[1]), weight, b).reshape(shape))


@pytest.mark.parametrize("type", ["FC", "FCTransposed"])
@pytest.mark.parametrize("seed", SEEDS)
def test_fully_connected_gradient(type, seed):
    axis, x, w, b, shape = fc_case(seed, type == "FCTransposed")
    dy = torch.randn(*shape, generator=generator(seed + 100))
    found = run([op(f"{type}Gradient", "x w dy", "dw db dx", axis=axis)], {"x": x, "w": w, "dy": dy}, "dw db dx")
    x.requires_grad_(), w.requires_grad_(), b.requires_grad_()
    weight = w.t() if type == "FCTransposed" else w
    F.linear(x.reshape(-1, weight.shape[1]), weight, b).reshape(shape).backward(dy)
    for mine, theirs in zip(found, (w.grad, b.grad, x.grad), strict=True):
        close(mine, theirs)


def test_an_input_gradient_that_nobody_wants_is_not_made():
    inputs = {"x": torch.randn(2, 3), "w": torch.randn(4, 3), "dy": torch.randn(2, 4)}
    lowered = caffe2.lower(program([op("FCGradient", "x w dy", "dw db")], inputs))
    assert [o.type for o in lowered.step.ops].count("aten.mm.default") == 1


@pytest.mark.parametrize("batch", [(3,), (), (2, 3)], ids=str)
@pytest.mark.parametrize("trans_a", [0, 1])
@pytest.mark.parametrize("trans_b", [0, 1])
def test_batch_matmul(batch, trans_a, trans_b):
    a = torch.randn(*batch, *((5, 4) if trans_a else (4, 5)), generator=generator(1))
    b = torch.randn(*batch, *((2, 5) if trans_b else (5, 2)), generator=generator(2))
    (y,) = run([op("BatchMatMul", "a b", "y", trans_a=trans_a, trans_b=trans_b)], {"a": a, "b": b}, "y")
    close(y, (a.mT if trans_a else a) @ (b.mT if trans_b else b))


def test_one_tensor_may_be_both_factors():
    a = torch.randn(3, 4, 5, generator=generator(1))
    close(run([op("BatchMatMul", "a a", "y", trans_b=1)], {"a": a}, "y")[0], a @ a.mT)


def test_batches_that_differ_are_refused():
    with pytest.raises(GraphirError, match=r"BatchMatMul cannot be translated.*other batch dimensions"):
        run([op("BatchMatMul", "a b", "y")], {"a": torch.ones(2, 3, 4), "b": torch.ones(3, 4, 5)}, "y")


@pytest.mark.parametrize("type, function", [("Relu", torch.relu), ("Tanh", torch.tanh), ("Sigmoid", torch.sigmoid)])
def test_activations_and_their_gradients(type, function):
    x, dy = torch.randn(3, 5, generator=generator(1)), torch.randn(3, 5, generator=generator(2))
    ops = [op(type, "x", "y"), op(f"{type}Gradient", "y dy", "dx")]
    y, dx = run(ops, {"x": x, "dy": dy}, "y dx")
    x.requires_grad_()
    wanted = function(x)
    wanted.backward(dy)
    close(y, wanted.detach())
    close(dx, x.grad)


def test_in_place_activation_and_gradient():
    x, dy = torch.randn(3, 5, generator=generator(1)), torch.randn(3, 5, generator=generator(2))
    ops = [op("Relu", "x", "x"), op("ReluGradient", "x dy", "dy")]
    y, dx = run(ops, {"x": x, "dy": dy}, "x dy", executor="threads")
    close(y, torch.relu(x))
    close(dx, dy * (x > 0))


@pytest.mark.parametrize("outputs", ["dy db", "da dy"])
def test_a_gradient_of_a_sum_may_overwrite_the_gradient(outputs):
    inputs = {name: torch.randn(3, generator=generator(i)) for i, name in enumerate(("a", "b", "x"))}
    ops = [op("Scale", "x", "dy"), op("AddGradient", "dy a b", outputs)]
    assert all(torch.equal(found, inputs["x"]) for found in run(ops, inputs, outputs))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_sum_adds_from_left_to_right(count):
    values = {f"x{i}": torch.randn(3, 4, generator=generator(i)) for i in range(count)}
    (y,) = run([op("Sum", " ".join(values), "x0")], values, "x0")
    total = values["x0"]
    for i in range(1, count):
        total = total + values[f"x{i}"]
    assert torch.equal(y, total)


def test_scale():
    x = torch.randn(3, generator=generator(1))
    a, b = run([op("Scale", "x", "a", scale=0.25), op("Scale", "x", "b")], {"x": x}, "a b")
    assert torch.equal(a, x * 0.25) and torch.equal(b, x)


@pytest.mark.parametrize(
    "shape, args, view",
    [
        ((2, 3, 4), {}, (2, 3, 4)),
        ((4,), {}, (4,)),
        ((3, 1), {}, (3, 1)),
        ((3, 4), {"broadcast": 1}, (3, 4)),
        ((3,), {"broadcast": 1, "axis": 1}, (3, 1)),
        ((2, 3), {"broadcast": 1, "axis": 0}, (2, 3, 1)),
    ],
    ids=str,
)
@pytest.mark.parametrize("type", ["Add", "Mul"])
def test_binary_operators_broadcast_and_their_gradients_sum(type, shape, args, view):
    a, b = torch.randn(2, 3, 4, generator=generator(1)), torch.randn(*shape, generator=generator(2))
    dy = torch.randn(2, 3, 4, generator=generator(3))
    ops = [op(type, "a b", "y", **args), op(f"{type}Gradient", "dy a b", "da db", **args)]
    y, da, db = run(ops, {"a": a, "b": b, "dy": dy}, "y da db")
    a.requires_grad_(), b.requires_grad_()
    wanted = a + b.view(view) if type == "Add" else a * b.view(view)
    wanted.backward(dy)
    close(y, wanted.detach())
    close(da, a.grad)
    close(db, b.grad)


GRADIENTS = [op(f"{type}Gradient", "y dy", "dx") for type in ("Relu", "Tanh", "Sigmoid")]


@pytest.mark.parametrize("each", [*GRADIENTS, op("Sum", "y dy", "dx")], ids=lambda o: o.type)
@pytest.mark.parametrize("other", [torch.ones(3), torch.ones(4, 3).double(), torch.ones(4, 3).int()], ids=str)
def test_elementwise_operands_of_other_shapes_and_types_are_refused(each, other):
    with pytest.raises(GraphirError, match=r"'dy' is \w+\[.*\], but 'y' is f32\[4,3\](.|\n)*net 'step', operator 0"):
        run([each], {"y": torch.ones(4, 3), "dy": other}, "dx")


@pytest.mark.parametrize("type", ["Relu", "Tanh", "Sigmoid", "Softmax", "MakeTwoClass"])
def test_functions_of_integers_are_refused(type):
    with pytest.raises(GraphirError, match=rf"{type} cannot be translated: 'x' is i32\[2,3\], not of floating-point"):
        caffe2.lower(program([op(type, "x", "y")], {"x": torch.ones(2, 3).int()}))


def test_binary_operands_of_other_types_are_refused():
    with pytest.raises(GraphirError, match=r"the operands are f32\[3\] and i32\[3\]"):
        run([op("Mul", "a b", "y")], {"a": torch.ones(3), "b": torch.ones(3).int()}, "y")


def test_an_axis_that_the_order_does_not_have_is_refused():
    with pytest.raises(GraphirError, match="argument 'axis_str' is 'Z'"):
        run([op("Add", "a b", "y", broadcast=1, axis_str="Z")], {"a": torch.ones(1, 2, 3, 4), "b": torch.ones(2)}, "y")


@pytest.mark.parametrize("mixed", ["x", "w"])
def test_floating_types_are_not_mixed(mixed):
    inputs = {"x": torch.ones(2, 3), "w": torch.ones(4, 3), "b": torch.ones(4)}
    inputs[mixed] = inputs[mixed].double()
    with pytest.raises(GraphirError, match=r"operands are of types f\d+ and f\d+"):
        caffe2.lower(program([op("FC", "x w b", "y")], inputs))


def test_too_few_outputs_are_refused():
    with pytest.raises(GraphirError, match="FC needs at least 1 output, 0 given"):
        run([op("FC", "x w b", "")], {"x": torch.ones(2, 3), "w": torch.ones(4, 3), "b": torch.ones(4)}, "x")
