"""Every faster callable against the operator that it stands for."""

import pytest
import torch
from graphir.runtime.kernels.bindings import FAST, fastest

from graphir.ir.opset import overload

torch.manual_seed(0)
X, Y, ROW = torch.randn(4, 6), torch.randn(4, 6), torch.randn(6)
IMAGE, KERNEL = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3)
BATCHES = torch.randn(2, 4, 6), torch.randn(2, 6, 3)
STATISTICS = torch.randn(3), torch.rand(3), torch.randn(3), torch.rand(3)
CPU = {"device": torch.device("cpu")}

CALLS = {
    "_adaptive_avg_pool2d.default": [((IMAGE, (2, 2)), {})],
    "_log_softmax.default": [((X, 1, False), {})],
    "_log_softmax_backward_data.default": [((X, Y, 1, torch.float32), {})],
    "_softmax.default": [((X, -1, False), {})],
    "_softmax_backward_data.default": [((X, Y, 1, torch.float32), {})],
    "add.Tensor": [((X, Y), {}), ((X, ROW), {"alpha": 2}), ((X, 0.5), {})],
    "add_.Tensor": [((X, Y), {}), ((X, 3), {"alpha": 0.5})],
    "addmm.default": [((ROW, X, torch.randn(6, 6)), {}), ((ROW, X, torch.randn(6, 6).t()), {"beta": 2, "alpha": 0.5})],
    "avg_pool2d.default": [((IMAGE, (2, 2)), {}), ((IMAGE, (3, 3), (2, 2), (1, 1), True, False, None), {})],
    "bmm.default": [(BATCHES, {})],
    "cat.default": [(([X, Y],), {}), (([X, Y], -1), {})],
    "clone.default": [((X.t(),), {}), ((X.t(),), {"memory_format": torch.contiguous_format})],
    "convolution.default": [((IMAGE, KERNEL, None, (1, 1), (1, 1), (1, 1), False, (0, 0), 1), {})],
    "cos.default": [((X,), {})],
    "div.Scalar": [((X, 6), {}), ((X, 2.5), {})],
    "div.Tensor": [((X, Y), {}), ((X, 3), {})],
    "embedding.default": [((X, torch.tensor([1, 3, 1])), {}), ((X, torch.tensor([1, 3]), 1, True, False), {})],
    "empty_like.default": [],
    "eq.Scalar": [((X.round(), 0), {})],
    "eq.Tensor": [((X.round(), Y.round()), {})],
    "exp.default": [((X,), {})],
    "expand.default": [((ROW, (4, 6)), {}), ((ROW, (4, -1)), {"implicit": True})],
    "full.default": [(((2, 3), 0.5), {"dtype": torch.float64, **CPU}), (((), 1), {**CPU})],
    "full_like.default": [((X, 2), {**CPU}), ((X.t(), 2.5), {"dtype": torch.float64, **CPU})],
    "ge.Scalar": [((X, 0), {})],
    "gelu.default": [((X,), {}), ((X,), {"approximate": "tanh"})],
    "gt.Scalar": [((X, 0.1), {})],
    "le.Scalar": [((X, 0), {})],
    "log.default": [((X.abs(),), {})],
    "lt.Scalar": [((X, 0), {})],
    "masked_fill.Scalar": [((X, Y > 0, float("-inf")), {})],
    "masked_fill.Tensor": [((X, Y > 0, torch.tensor(2.0)), {})],
    "max_pool2d_with_indices.default": [((IMAGE, (2, 2)), {}), ((IMAGE, (3, 3), (2, 2), (1, 1), (1, 1), True), {})],
    "maximum.default": [((X, Y), {})],
    "mean.default": [((X,), {}), ((X,), {"dtype": torch.float64})],
    "mean.dim": [((X, (0,), True), {}), ((X, None), {}), ((X, (-1,)), {"dtype": torch.float64})],
    "minimum.default": [((X, Y), {})],
    "mm.default": [((X, Y.t()), {})],
    "mul.Scalar": [((X, 2), {})],
    "mul.Tensor": [((X, Y), {}), ((X, 0.3), {}), ((torch.tensor([1, 2]), 0.5), {})],
    "mul_.Tensor": [((X, Y), {}), ((X, 0.3), {})],
    "native_batch_norm.default": [
        ((IMAGE, *STATISTICS, True, 0.1, 1e-5), {}),
        ((IMAGE, *STATISTICS, False, 0.1, 1e-5), {}),
        ((IMAGE, None, None, None, None, True, 0.1, 1e-5), {}),
    ],
    "native_layer_norm.default": [((X, (6,), ROW, ROW, 1e-5), {}), ((X, (6,), None, None, 1e-5), {})],
    "ne.Scalar": [((X.round(), 0), {})],
    "neg.default": [((X,), {})],
    "ones_like.default": [
        ((X,), {**CPU}),
        ((X.t(),), {"dtype": torch.int64, **CPU, "memory_format": torch.contiguous_format}),
    ],
    "permute.default": [((IMAGE, (0, 2, 3, 1)), {})],
    "pow.Tensor_Scalar": [((X, 2), {}), ((X.abs(), 0.5), {})],
    "reciprocal.default": [((X,), {})],
    "relu.default": [((X,), {})],
    "relu_.default": [((X,), {})],
    "rsqrt.default": [((X.abs(),), {})],
    "select.int": [((X, 0, 2), {}), ((X, 1, -1), {})],
    "sigmoid.default": [((X,), {})],
    "silu.default": [((X,), {})],
    "sin.default": [((X,), {})],
    "split.Tensor": [((X, 2), {}), ((X, 4, 1), {})],
    "sqrt.default": [((X.abs(),), {})],
    "squeeze.dim": [((X.view(4, 1, 6), 1), {}), ((X, 0), {})],
    "stack.default": [(([X, Y],), {}), (([X, Y], 1), {})],
    "sub.Tensor": [((X, Y), {}), ((X, Y), {"alpha": 0.5}), ((X, 2), {})],
    "sub_.Tensor": [((X, Y), {}), ((X, Y), {"alpha": 0.5})],
    "sum.default": [((X,), {}), ((X > 0,), {"dtype": torch.float32})],
    "sum.dim_IntList": [((X, (0,)), {}), ((X, (0, 1), True), {}), ((X, ()), {}), ((X, None, True), {})],
    "t.default": [((X,), {}), ((ROW,), {})],
    "tanh.default": [((X,), {})],
    "transpose.int": [((IMAGE, 1, -1), {})],
    "unsqueeze.default": [((X, -1), {})],
    "view.default": [((X, (6, 4)), {}), ((X, (-1,)), {})],
    "where.self": [((X > 0, X, Y), {}), ((X > 0, X, torch.tensor(0.0)), {})],
    "zeros_like.default": [((X,), {**CPU}), ((X.t(),), {"dtype": torch.int64, **CPU})],
}  # fmt: skip


def copied(value):
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).copy_(value)
    return [copied(item) for item in value] if isinstance(value, list) else value


def results(function, args, kwargs):
    """What the call returns, and its tensor arguments after it."""
    with torch.inference_mode():
        args = [copied(arg) for arg in args]
        returned = function(*args, **kwargs)
    found = list(returned) if isinstance(returned, (tuple, list)) else [returned]
    return [*found, *[arg for arg in args if isinstance(arg, torch.Tensor)]]


@pytest.mark.parametrize("name", [name.removeprefix("aten.") for name in FAST])
def test_it_computes_what_the_operator_does(name):
    for args, kwargs in CALLS[name]:
        expected = results(overload(f"aten.{name}"), args, kwargs)
        given = results(FAST[f"aten.{name}"], args, kwargs)
        for a, b in zip(expected, given, strict=True):
            assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
            assert torch.equal(a.nan_to_num(), b.nan_to_num())


def test_empty_like_gives_the_geometry_of_the_operator():
    a = overload("aten.empty_like.default")(X.t(), **CPU)
    b = fastest("aten.empty_like.default")(X.t(), **CPU)
    assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


def test_other_operators_are_called_by_their_overload():
    assert fastest("aten.threshold_backward.default") is torch.ops.aten.threshold_backward.default._op
