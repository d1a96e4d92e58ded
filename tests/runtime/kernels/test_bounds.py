"""Kernels of torch that would read or write beyond their operands are not called on such operands."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from graphir.runtime import Session
from graphir.runtime.kernels.attention import attention, attention_backward
from graphir.runtime.kernels.bindings import fastest
from graphir.runtime.kernels.bounds import CHECKED
from graphir.runtime.kernels.optimizers import updater
from guarded_pages import CALLS
from runnable import forward_plan
from torch.utils import _pytree as pytree

from graphir.errors import RunError
from graphir.ir.opset import overload
from graphir.ir.optypes.table import ADMITTED


def test_each_checked_type_is_called_with_hostile_operands():
    assert {f"aten.{name}.default" for name in CALLS} == set(CHECKED)
    assert set(CHECKED) <= ADMITTED


@pytest.mark.parametrize("name", CALLS)
def test_operands_that_fit_are_taken_and_give_torchs_results(name):
    type = f"aten.{name}.default"
    assert fastest(type) is CHECKED[type]
    ours, theirs = (pytree.tree_leaves(call(*CALLS[name]())) for call in (CHECKED[type], overload(type)))
    for a, b in zip(ours, theirs, strict=True):
        assert a.equal(b) or (a != a).any()


def test_a_process_survives_hostile_operands():
    script = Path(__file__).with_name("guarded_pages.py")
    done = subprocess.run([sys.executable, script, "60"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr.splitlines()[-1:]
    taken, refused = map(int, done.stdout.split())
    assert taken + refused == 60 * len(CALLS)
    assert min(taken, refused) > 200


X, INDICES = torch.ones(2, 3, 4, 4), torch.zeros(2, 3, 2, 2, dtype=torch.int64)
THREE, STATISTICS = torch.ones(3), torch.ones(3, 1)
WRONG: list[tuple[str, int, Any, str]] = [
    ("max_pool2d_with_indices_backward", 7, INDICES + 16, "an index of a maximum 16 is out of bounds for 16"),
    ("max_pool2d_with_indices_backward", 7, INDICES - 1, "an index of a maximum -1 is out of bounds for 16"),
    ("max_pool2d_with_indices_backward", 7, INDICES[:1], "the operands have other shapes: "),
    ("max_pool2d_with_indices_backward", 0, X, "the gradient is not one of aten.max_pool2d_with_indices.default: "),
    ("adaptive_max_pool2d_backward", 2, INDICES + 25, "an index of a maximum 25 is out of bounds for 25"),
    ("adaptive_max_pool3d_backward", 2, torch.zeros(1).long().expand(2, 3, 2, 2, 2), "takes it for contiguous"),
    ("_adaptive_avg_pool2d_backward", 1, X[:, :2], "the gradient is not one of the operand: "),
    ("_adaptive_avg_pool2d_backward", 1, X[..., :0], "the gradient is not one of the operand: "),
    ("avg_pool2d_backward", 0, X, "the gradient is not one of aten.avg_pool2d.default: "),
    ("reflection_pad1d_backward", 0, torch.ones(2, 7), "the gradient is not one of aten.reflection_pad1d.default: "),
    ("gelu_backward", 1, torch.ones(6), r"the operands have other shapes: \[5, 6\], \[6\]"),
    ("_softmax_backward_data", 1, torch.ones(4, 5).double(), "the gradient has another element type"),
    ("native_layer_norm_backward", 2, [4], r"\[4\] are not the last sizes of the operand: \[3, 8\]"),
    ("native_layer_norm_backward", 3, torch.ones(2), "a statistic has 2 elements, not 3"),
    ("native_layer_norm_backward", 4, torch.ones(1, 1).expand(3, 1), "takes it for contiguous"),
    ("native_layer_norm_backward", 5, THREE, "the weight has 3 elements, not 8"),
    ("native_group_norm_backward", 6, 7, "the sizes 2, 7, 4 and 3 are not those of the operand: "),
    ("native_group_norm_backward", 0, torch.ones(1).expand(2, 6, 4), "takes it for contiguous"),
    ("native_batch_norm", 3, torch.ones(2), "a parameter or statistic has 2 elements, not 3"),
    ("native_batch_norm", 0, THREE, r"the operand has no channels: \[3\]"),
    ("native_batch_norm_backward", 5, None, "there are no statistics to normalise by: none"),
    ("_weight_norm_interface", 2, 1, r"g is not one of the weight along 1: \[3, 1\], \[3, 4\]"),
    ("_weight_norm_interface", 2, 5, "along its first or its last dimension, not 5"),
    ("_weight_norm_interface", 1, STATISTICS.double(), "g has another element type"),
    ("nll_loss_backward", 2, torch.tensor([0, 1, 2, 5]), "the class 5 is out of bounds for 5"),
    ("_embedding_bag", 1, torch.tensor([0, 1, 2, 3, 7]), "the index 7 is out of bounds for 7"),
    ("_embedding_bag", 2, torch.tensor([3, 1]), "an offset is smaller than the one before"),
    ("_embedding_bag", 2, torch.tensor([], dtype=torch.int64), "there are indices, and no bag"),
    ("_embedding_bag", 1, torch.ones(5, 1), "weight, indices and offsets are a matrix and two vectors"),
    ("_embedding_bag_backward", 3, torch.tensor([0, 0, 1, 1, 2]), "the bag 2 is out of bounds for 2"),
    ("_embedding_bag_backward", 10, THREE, "per_sample_weights has 3 elements, not 5"),
    ("_embedding_bag_backward", 2, torch.tensor([0]), "there is an offset and a size for each bag"),
    ("_embedding_bag_backward", 0, torch.ones(2), "the gradient is a matrix"),
    ("_embedding_bag_per_sample_weights_backward", 2, torch.tensor([0, 1, 2, 3, 7]), "the index 7 is out of bounds"),
    (
        "_embedding_bag_per_sample_weights_backward",
        4,
        torch.tensor([0, 0, 1, 1, 2]),
        "the bag 2 is out of bounds for 2",
    ),
    ("_embedding_bag_per_sample_weights_backward", 4, torch.tensor([0]), "offset2bag has 1 elements, not 5"),
    ("_embedding_bag_per_sample_weights_backward", 3, torch.tensor([0]), "there is an offset for each bag"),
    ("_embedding_bag_per_sample_weights_backward", 1, torch.ones(7, 3), "the gradient has other columns"),
    ("_embedding_bag_per_sample_weights_backward", 0, torch.ones(2), "gradient and weight are matrices"),
    ("_fft_r2c", 1, [2], r"the operand cannot be transformed along \[2\]: \[3, 4\]"),
    ("_fft_c2r", 3, 9, r"not one of 9 real elements along the last of \[0, 1\]: \[3, 3\]"),
    ("_upsample_bilinear2d_aa", 1, [5, 4], "8 elements, 0.5 times as many, are not 5"),
    ("grid_sampler_2d_backward", 0, X, "the gradient is not one of these operands: "),
]


@pytest.mark.parametrize(("name", "position", "given", "said"), WRONG)
def test_operands_that_do_not_fit_are_refused(name, position, given, said):
    arguments = list(CALLS[name]())
    arguments[position] = given
    with pytest.raises((ValueError, IndexError), match=said):
        CHECKED[f"aten.{name}.default"](*arguments)


def test_an_ignored_class_and_statistics_that_are_shown_twice_are_taken():
    CHECKED["aten.nll_loss_backward.default"](*CALLS["nll_loss_backward"]())
    arguments = list(CALLS["native_batch_norm"]())
    arguments[3] = torch.ones(1).expand(3)
    arguments[5] = False
    CHECKED["aten.native_batch_norm.default"](*arguments)


@pytest.mark.parametrize("executor", ["reference", "serial"])
def test_a_plan_is_refused_where_it_would_follow_indices_out_of_memory(executor):
    body = """
        input x : f32[1,1,4,4] @gpu:0
        g : f32[1,1,2,2] @gpu:0 = aten.full(size=[1, 1, 2, 2], fill_value=1.0)
        i : i64[1,1,2,2] @gpu:0 = aten.full(size=[1, 1, 2, 2], fill_value=2000000000, dtype=i64)
        y : f32[1,1,4,4] @gpu:0 = aten.max_pool2d_with_indices_backward(g, x, i, kernel_size=[2, 2], stride=[2, 2], padding=[0, 0], dilation=[1, 1], ceil_mode=false)
    """  # noqa: E501 - one operator a line, as printed
    with Session(forward_plan(body, "x", output="y"), {}, executor=executor) as session:
        with pytest.raises(RunError, match="an index of a maximum 2000000000 is out of bounds for 16") as caught:
            session.step(torch.ones(1, 1, 4, 4))
        assert caught.value.what.startswith("aten.max_pool2d_with_indices_backward.default failed: IndexError")
        assert session.usable


Q = torch.ones(2, 4, 3, 8)


@pytest.mark.parametrize(
    ("key", "value", "mask", "said"),
    [
        (Q[:1], Q[:1], None, r"query, key and value are \[batch, heads, sequence, size\], not"),
        (Q, Q[:, :, :2], None, "query, key and value are"),
        (Q[:, :3], Q[:, :3], None, "query, key and value are"),
        (Q.double(), Q.double(), None, "query, key and value are"),
        (Q, Q, torch.ones(3, 2), r"the mask is not one of \[2, 4, 3, 3\]: \[3, 2\]"),
    ],
)
def test_attentions_operands_fit_each_other(key, value, mask, said):
    with pytest.raises(ValueError, match=said):
        attention(Q, key, value, mask)


def test_attentions_results_fit_the_backward():
    out, sums = attention(Q, Q, Q)
    attention_backward(Q, Q, Q, Q, out, sums)
    with pytest.raises(ValueError, match="the operands have other shapes"):
        attention_backward(Q[:1], Q, Q, Q, out, sums)
    with pytest.raises(ValueError, match="the logsumexp is not one of the query"):
        attention_backward(Q, Q, Q, Q, out, sums[:1])


@pytest.mark.parametrize("type", ["graphir.adam", "graphir.adamw"])
def test_fused_updates_take_tensors_of_one_kind(type):
    update = updater(type, {"form": "fused"})
    rate = torch.tensor(0.1, dtype=torch.float64)

    def call(grad: torch.Tensor, param: torch.Tensor) -> None:
        moments = [torch.zeros_like(param), torch.zeros_like(param)]
        update([param], [grad], *([m] for m in moments), [None], [torch.zeros(())], rate)

    call(torch.ones(()), torch.ones(()))
    call(torch.ones(3, 4).t(), torch.ones(3, 4).t())
    for grad, said in (
        (torch.ones(3).double(), "a parameter, its gradient and its state have other elements"),
        (torch.ones(4), "a parameter, its gradient and its state have other elements"),
        (torch.ones(1).expand(3), r"a tensor with the strides \[0\] has gaps, or shows an element twice"),
    ):
        with pytest.raises(ValueError, match=said):
            call(grad, torch.ones(3))
