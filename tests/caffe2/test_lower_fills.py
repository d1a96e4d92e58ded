"""Translations of fills: what they give, and that they give the same each time."""

import math

import pytest
import torch
from lowering import op, program, run

from graphir import GraphirError, caffe2

DTYPES = {1: torch.float32, 2: torch.int32, 5: torch.bool, 10: torch.int64, 13: torch.float64}


def filled(*ops, names="x"):
    return run(list(ops), {}, names)


@pytest.mark.parametrize("number", DTYPES)
def test_a_constant_has_the_type_of_the_argument(number):
    value = 1.0 if number in (1, 13) else 1
    (x,) = filled(op("ConstantFill", "", "x", shape=[2, 3], value=value, dtype=number))
    assert torch.equal(x, torch.ones(2, 3, dtype=DTYPES[number])) and x.dtype == DTYPES[number]


@pytest.mark.parametrize("value, dtype", [(None, torch.float32), (0.5, torch.float32), (3, torch.int64)])
def test_without_a_type_the_value_decides(value, dtype):
    args = {} if value is None else {"value": value}
    (x,) = filled(op("ConstantFill", "", "x", shape=[2], **args))
    assert x.dtype == dtype and x.tolist() == [value or 0] * 2


def test_a_constant_takes_the_shape_of_its_input():
    inputs = {"y": torch.randn(2, 3), "scalar": torch.tensor(1.0)}
    ops = [op("ConstantFill", "y", "x", extra_shape=[4], value=2.0), op("ConstantFill", "scalar", "one", value=1.0)]
    x, one = run(ops, inputs, "x one")
    assert torch.equal(x, torch.full((2, 3, 4), 2.0)) and one.shape == () and one == 1


def test_the_value_of_an_input_may_be_the_shape_where_it_is_known():
    shape = op("GivenTensorInt64Fill", "", "s", shape=[2], values=[3, 2])
    (x,) = filled(shape, op("ConstantFill", "s", "x", input_as_shape=1))
    assert x.shape == (3, 2)
    with pytest.raises(GraphirError, match="the shape is the value of 's', which is not known before the step runs"):
        run([op("ConstantFill", "s", "x", input_as_shape=1)], {"s": torch.tensor([3, 2])}, "x")


@pytest.mark.parametrize(
    "type, values, dtype",
    [
        ("GivenTensorFill", [0.5, -1.0], torch.float32),
        ("GivenTensorDoubleFill", [0.5, -1.0], torch.float64),
        ("GivenTensorIntFill", [3, 4], torch.int32),
        ("GivenTensorInt64Fill", [3, 4], torch.int64),
        ("GivenTensorBoolFill", [0, 1], torch.bool),
    ],
)
def test_given_values(type, values, dtype):
    (x,) = filled(op(type, "", "x", shape=[2, 1], values=values))
    assert torch.equal(x, torch.tensor(values, dtype=dtype).view(2, 1))


def test_given_values_stay_the_same_though_a_step_overwrites_its_copy():
    ops = [op("GivenTensorFill", "", "x", shape=[2], values=[1.0, 2.0]), op("WeightedSum", "x w", "x")]
    (x,) = run(ops, {"w": torch.tensor(3.0)}, "x", steps=3)
    assert x.tolist() == [3.0, 6.0]


SHAPE = [50, 20, 3, 3]


@pytest.mark.parametrize(
    "type, args, low, high, std",
    [
        ("UniformFill", {}, 0, 1, 1 / math.sqrt(12)),
        ("UniformFill", {"min": -2.0, "max": 3.0}, -2, 3, 5 / math.sqrt(12)),
        ("XavierFill", {}, -math.sqrt(3 / 180), math.sqrt(3 / 180), math.sqrt(1 / 180)),
        ("GaussianFill", {}, -6, 6, 1),
        ("GaussianFill", {"mean": 5.0, "std": 0.1}, 4, 6, 0.1),
        ("MSRAFill", {}, -1, 1, math.sqrt(2 / 450)),
        ("UniformIntFill", {"min": -2, "max": 2}, -2, 2, math.sqrt(2)),
    ],
)
def test_random_numbers_have_the_distribution(type, args, low, high, std):
    (x,) = filled(op(type, "", "x", shape=SHAPE, **args))
    assert x.shape == tuple(SHAPE) and x.dtype == (torch.int32 if type == "UniformIntFill" else torch.float32)
    x = x.double()
    assert low <= x.min() and x.max() <= high
    assert abs(x.std() / std - 1) < 0.03 and abs(x.mean() - (low + high) / 2) < 0.05 * (high - low)


def test_integers_reach_both_bounds():
    (x,) = filled(op("UniformIntFill", "", "x", shape=[500], min=0, max=3))
    assert x.unique().tolist() == [0, 1, 2, 3]


def test_random_operators_draw_differently_and_each_run_the_same():
    ops = [op("GaussianFill", "", "x", shape=[9]), op("GaussianFill", "", "y", shape=[9])]
    x, y = filled(*ops, names="x y")
    again, _ = filled(*ops, names="x y")
    assert torch.equal(x, again) and not torch.equal(x, y)


def test_init_is_run_once_and_what_it_gives_is_the_state():
    init = [op("GaussianFill", "", "w", shape=[4]), op("Copy", "w", "v")]
    made = program([op("Sum", "w v", "s")], {}, init)
    first, second = caffe2.lower(made).state, caffe2.lower(made).state
    assert torch.equal(first["w"], second["w"]) and torch.equal(first["w"], first["v"]) and first["w"].any()


@pytest.mark.parametrize(
    "fill, reason",
    [
        (op("XavierFill", "", "x", shape=[0, 3]), r"no deviation follows from the shape \[0, 3\]"),
        (op("MSRAFill", "", "x", shape=[5]), r"no deviation follows from the shape \[5\]"),
        (op("XavierFill", "", "x"), r"no deviation follows from the shape \[\]"),
        (op("ConstantFill", "", "x", shape=[1], dtype=4), "argument 'dtype' is 4"),
        (op("ConstantFill", "", "x", shape=[1], value="much"), "argument 'value' is 'much', not a number"),
        (op("GivenTensorFill", "", "x", shape=[3], values=[1.0]), "1 values are given for the shape"),
    ],
    ids=str,
)
def test_fills_that_make_no_sense_are_refused(fill, reason):
    with pytest.raises(GraphirError, match=reason):
        filled(fill)


def test_a_fill_without_a_shape_is_a_scalar():
    x, y = filled(op("ConstantFill", "", "x", value=2.0), op("GivenTensorFill", "", "y", values=[3.0]), names="x y")
    assert (x.shape, x) == ((), 2) and (y.shape, y) == ((), 3)


def test_bounds_that_are_inputs_are_refused_by_name():
    inputs = {"s": torch.tensor([2]), "low": torch.tensor(0.0), "high": torch.tensor(1.0)}
    with pytest.raises(GraphirError, match="3 inputs, of which 'low' is no shape"):
        run([op("UniformFill", "s low high", "x")], inputs, "x")
