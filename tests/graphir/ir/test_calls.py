"""Calls: how patterns place operands and results, and how what does not fit is refused."""

import pytest
import torch

from graphir.errors import PlanError
from graphir.ir.calls import arrange, call_of, evaluate, filled, flatten
from graphir.ir.device import gpu
from graphir.ir.operator import Operator, Symbol, bind_arg, map_arg
from graphir.ir.size import dimension

BATCH = dimension("batch")


def values(call, *inputs):
    return filled(call, inputs, lambda arg: evaluate(arg, {"batch": 3}), torch.device("cpu"))


def test_a_pattern_places_operands_and_arguments():
    call = call_of("aten.index_put.default", {"accumulate": True}, "t[_t]t", 3)
    assert values(call, "x", "i", "v") == (["x", [None, "i"], "v", True], {})


def test_defaults_at_the_end_are_left_to_torch():
    call = call_of("aten.sum.dim_IntList", {"dim": (1,), "dtype": Symbol("f64")}, None, 1)
    assert values(call, "x") == (["x", (1,)], {"dtype": torch.float64})


def test_sizes_are_bound_and_a_device_is_supplied():
    call = call_of("aten.full.default", {"size": (BATCH, 2), "fill_value": 1}, "", 0)
    assert values(call) == ([(3, 2), 1], {"device": torch.device("cpu")})


def test_own_types_take_every_tensor_by_position():
    call = call_of("graphir.sgd", {"momentum": 0.9}, "ttt_t", 4)
    assert values(call, "p", "g", "lr", "inf") == (["p", "g", "lr", None, "inf", None, None], {"momentum": 0.9})


def test_results_go_to_the_outputs_that_name_them():
    call = call_of("aten.native_layer_norm.default", {"normalized_shape": (2,), "eps": 1e-5}, "t", 1, "t_t")
    assert flatten(call, ("y", "mean", "rstd")) == {0: "y", 1: "rstd"}
    split = call_of("aten.split.Tensor", {"split_size": 1}, "t", 1, "[t_t]")
    assert flatten(split, ["a", "b", "c"]) == {0: "a", 1: "c"}


def test_an_output_without_a_pattern_is_the_one_item_of_a_list():
    assert flatten(call_of("aten.split.Tensor", {"split_size": 4}, "t", 1), ["a"]) == {0: "a"}
    assert flatten(call_of("AllReduce", {}, "[t]", 1), ["sum"]) == {0: "sum"}


@pytest.mark.parametrize(
    ("type", "results", "returned", "why"),
    [
        ("aten.relu.default", "[tt]", torch.ones(2), "returns 1 tensors, but 2 are named"),
        ("aten.split.Tensor", "[tt]", ["a"], "returns 1 tensors, but 2 are named"),
        ("aten.native_layer_norm.default", "t", ("y", "mean", "rstd"), "returns 3 results, but 1 are named"),
    ],
)
def test_other_results_are_refused(type, results, returned, why):
    operands, args = "t", {"split_size": 1} if "split" in type else {}
    with pytest.raises(ValueError, match=why):
        flatten(call_of(type, args, operands, 1, results), returned)


@pytest.mark.parametrize(
    ("inputs", "outputs", "args", "why"),
    [
        (("x", "y"), ("z",), {}, "takes 1 tensors, 2 given"),
        (("x",), ("z",), {"inplace": True}, "takes no argument 'inplace'"),
        (("x",), (), {}, "returns 1 tensors, the operator has 0 outputs"),
    ],
)
def test_an_operator_that_does_not_fit_its_type_is_refused(inputs, outputs, args, why):
    with pytest.raises(PlanError, match=why) as raised:
        arrange(Operator("aten.relu.default", inputs, outputs, args, gpu(0)))
    assert raised.value.at.startswith("aten.relu.default -> ")


def test_one_walk_maps_the_scalars_of_an_argument():
    assert map_arg((1, (BATCH, ()), "x"), str) == ("1", ("batch", ()), "x")
    assert map_arg((1, (2,)), str, "".join) == "12"
    assert bind_arg((BATCH, (2, Symbol("f32"))), {"batch": 3}) == (3, (2, "f32"))
