"""Shapes, element types and strides from the meta device."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from graphir.errors import GraphirError
from graphir.ir import infer as module
from graphir.ir.blob import Blob
from graphir.ir.device import gpu
from graphir.ir.geometry import Geometry, contiguous, geometry, same_layout
from graphir.ir.infer import Inferred, infer
from graphir.ir.operator import Effects, Operator, Symbol
from graphir.ir.size import Polynomial, dimension
from graphir.ir.symbols import to_torch


def of(shape: tuple[int, ...], dtype: str, strides: tuple[int, ...] | None = None, offset: int = 0) -> Geometry:
    """A geometry, contiguous without strides."""
    dense = contiguous(shape, to_torch(dtype))
    return dense._replace(strides=dense.strides if strides is None else strides, offset=offset)


X = of((2, 3), "f32")
BATCH = dimension("batch")


def call(type: str, inputs: list[Geometry | None], outputs: int = 1, *, dims: Any = None, **changes: Any) -> Inferred:
    names = tuple(f"i{k}" for k in range(len(inputs)))
    args = changes.pop("args", {})
    op = Operator(type, names, tuple(f"o{k}" for k in range(outputs)), args, gpu(0))._replace(**changes)
    return infer(op, inputs, dims or {})


def test_strides_and_offsets_of_views() -> None:
    assert call("aten.t.default", [X]).outputs == (of((3, 2), "f32", (1, 3)),)
    shifted = call("aten.slice.Tensor", [X], args={"dim": 1, "start": 1}).outputs
    assert shifted == (of((2, 2), "f32", (3, 1), 1),)
    assert shifted is not None and shifted[0] is not None
    again = call("aten.slice.Tensor", [shifted[0]], args={"dim": 1, "start": 1}).outputs
    assert again == (of((2, 1), "f32", (3, 1), 2),)


def test_an_argument_s_python_type_counts() -> None:
    whole = of((2,), "i64")
    for other, dtype in ((2, "i64"), (2.0, "f32"), (True, "i64")):
        assert call("aten.mul.Tensor", [whole], args={"other": other}).outputs == (of((2,), dtype),)


@pytest.mark.parametrize("held", [lambda arg: arg, lambda arg: (arg,), lambda arg: ((2, arg), 3)], ids=["1", "2", "3"])
def test_arguments_that_python_takes_for_each_other_are_kept_apart(held: Callable[[Any], Any]) -> None:
    values: tuple[Any, ...] = (0, 0.0, -0.0, False, 1, 1.0, True, "f32", Symbol("f32"), None, math.inf, -math.inf)
    keys = {module._args_key({"a": held(value)}, {}) for value in values}
    assert len(keys) == len(values)
    assert module._args_key({"a": held(BATCH)}, {"batch": 1}) in keys
    assert len({module._args_key({"a": held(value)}, {}) for value in (math.nan, -math.nan)}) == 1


def test_a_size_that_is_no_whole_number_is_refused_after_one_that_is() -> None:
    for size in ((6,), (6.0,), (True,), (6,)):
        outputs = call("aten.view.default", [X], args={"size": size}).outputs
        assert (outputs is not None) is (size == (6,) and type(size[0]) is int), size


def test_arguments_are_bound() -> None:
    args = {"size": (BATCH, 1)}
    four = of((4,), "f32")
    assert call("aten.view.default", [four], args=args, dims={"batch": 4}).outputs == (of((4, 1), "f32"),)
    assert "refuses" in call("aten.view.default", [four], args=args, dims={"batch": 3}).complaint
    with pytest.raises(GraphirError, match="dimension 'batch' has no value"):
        call("aten.view.default", [four], args=args)


def test_what_a_rule_of_torch_raises_is_a_complaint() -> None:
    complaint = call("aten.linalg_eigvals.default", [of((2, 2), "i64")]).complaint
    assert complaint == "aten.linalg_eigvals.default refuses its operands: torch.int64"


def test_a_rule_that_is_for_fake_tensors_alone_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "rule_of", lambda type: lambda tensor: tensor.fake_device)
    found = call("aten.neg.default", [of((2, 5, 7), "f64")])
    assert (found.outputs, found.complaint) == (None, "")


def test_factories_symbols_and_patterns() -> None:
    made = call("aten.full.default", [], args={"size": (2,), "fill_value": 1.0, "dtype": Symbol("f64")})
    assert made.outputs == (of((2,), "f64"),)
    joined = call("aten.cat.default", [X, X], operands="[tt]", args={"dim": 1})
    assert joined.outputs == (of((2, 6), "f32"),)
    split = call("aten.split.Tensor", [X], 2, results="[tt]", args={"split_size": 2, "dim": 1})
    assert split.outputs == (of((2, 2), "f32", (3, 1)), of((2, 1), "f32", (3, 1), 2))
    assert split.effects == Effects(views=((0, 0), (1, 0)))


def test_overwritten_operands_keep_their_geometry() -> None:
    image, channel = of((2, 3, 4, 4), "f32"), of((3,), "f32")
    args = {"training": True, "momentum": 0.1, "eps": 1e-5}
    outputs = call("aten.native_batch_norm.default", [image, *[channel] * 4], 5, args=args).outputs
    assert outputs == (image, channel, channel, channel, channel)


def test_what_an_embedding_bag_keeps_for_its_backward_is_the_backends_choice() -> None:
    table, lookups, offsets = of((20, 8), "f32"), of((12,), "i64"), of((4,), "i64")
    outputs = call("aten._embedding_bag.default", [table, lookups, offsets], 4).outputs
    assert outputs == (of((4, 8), "f32"), None, None, None)


def test_own_operators() -> None:
    strided = of((3, 2), "f32", (1, 3), 5)
    assert call("Copy", [strided]).outputs == (strided._replace(offset=0),)
    assert call("AllReduce", [X, X], 2, operands="[tt]", results="[tt]").outputs == (X, X)
    assert call("AllReduce", [X, of((3,), "f32")], 2, operands="[tt]", results="[tt]").complaint.startswith(
        "AllReduce adds"
    )
    shares = {"reduction": "mean", "shares": (1, 2, 3)}
    complaint = call("AllReduce", [X, X], 2, operands="[tt]", results="[tt]", args=shares).complaint
    assert complaint == "AllReduce has 3 shares for 2 participants"
    assert call("graphir.load", [], args={"key": "w"}).outputs is None


def test_attention() -> None:
    query, key = of((2, 4, 5, 8), "f64", (160, 8, 32, 1)), of((2, 2, 7, 8), "f64")
    out, sums = of((2, 4, 5, 8), "f64", (160, 8, 32, 1)), of((2, 4, 5), "f64", (20, 1, 4))
    assert call("graphir.attention", [query, key, key], 2).outputs == (out, sums)
    grads = call("graphir.attention_backward", [out, query, key, key, out, sums], 3).outputs
    assert grads == (query, *[of((2, 2, 7, 8), "f64", (112, 8, 16, 1))] * 2)
    assert "[batch, heads, sequence, size]" in call("graphir.attention", [query, key, query], 2).complaint
    assert "a gradient of shape" in call("graphir.attention_backward", [key, query, key, key, out, sums], 3).complaint


def test_sparse_gradients() -> None:
    values, indices, table = X, of((1, 2), "i64"), of((9, 3), "f32")
    added = call("graphir.sparse_sum", [X, X, indices, indices], 2, operands="[tt][tt]", args={"rows": 9})
    assert added.outputs == (of((1, 4), "i64"), of((4, 3), "f32"))
    other = of((1, 5), "i64")
    wrong = call("graphir.sparse_sum", [X, X, indices, other], 2, operands="[tt][tt]", args={"rows": 9})
    assert wrong.complaint.startswith("graphir.sparse_sum adds rows of f32[2,3], not f32[2,3] at i64[1,5]")
    update = [table, other, values, of((), "f64")]
    assert "takes values of shape [5, 3], not f32[2,3]" in call("graphir.sparse_sgd", update).complaint
    update[1] = indices
    assert call("graphir.sparse_sgd", update).outputs == (table,)
    bag = [X, of((4,), "i64"), *[of((2,), "i64")] * 4]
    made = call("graphir.embedding_bag_backward", bag, 2, args={"num_weights": 9})
    assert made.outputs == (of((1, 4), "i64"), of((4, 3), "f32"))
    bag[1] = indices
    assert "and their indices" in call("graphir.embedding_bag_backward", bag, 2, args={"num_weights": 9}).complaint


def test_unknown_types_and_unknown_shapes_are_left_open() -> None:
    assert call("FC", [X]).outputs is None
    assert call("aten.relu.default", [None]).outputs is None
    assert call("aten.nonzero.default", [X]).outputs is None


def test_strides_that_a_backend_chooses_are_loose() -> None:
    image, weight = of((2, 3, 4, 4), "f32"), of((5, 3, 1, 1), "f32")
    ones = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "transposed": False, "output_padding": (0, 0)}
    found = call("aten.convolution.default", [image, weight], operands="tt_", args={**ones, "groups": 1})
    assert found.loose and found.outputs == (of((2, 5, 4, 4), "f32"),)


def test_equal_signatures_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = of((1, 7, 11, 13), "f64")
    first = call("aten.relu.default", [fresh])
    monkeypatch.setattr(module, "rule_of", None)
    assert call("aten.relu.default", [fresh]) is first


def test_strides_of_single_elements_say_nothing() -> None:
    assert same_layout(of((1, 3), "f32", (7, 1)), of((1, 3), "f32"))
    assert same_layout(of((0, 3), "f32", (7, 2)), of((0, 3), "f32"))
    assert not same_layout(of((2, 3), "f32", (1, 2)), of((2, 3), "f32"))


def test_geometry_of_a_blob() -> None:
    blob = Blob("x", (BATCH, 2), "f32", gpu(0), "input", "y", (1, BATCH), Polynomial.of({("batch",): 2, (): 1}))
    assert geometry(blob, {"batch": 5}) == of((5, 2), "f32", (1, 5), 11)
    assert str(geometry(blob, {"batch": 5})) == "f32[5,2] strides [1,5] offset 11"
    assert geometry(blob._replace(shape=None), {}) is None


MOMENTS = of((2, 3, 3), "f64")
CHANNELS = of((3,), "f32")
NORMED: dict[str, tuple[str, list[Geometry | None], dict[str, Any], str]] = {
    "no such participant": (
        "graphir.batch_norm_moments",
        [X],
        {"participant": 2, "participants": 2},
        "graphir.batch_norm_moments is for participant 2 of 2",
    ),
    "no channels": (
        "graphir.batch_norm_moments",
        [CHANNELS],
        {"participant": 0, "participants": 2},
        "a batch norm takes real numbers with channels in dimension 1, not f32[3]",
    ),
    "moments of other channels": (
        "graphir.synchronised_batch_norm",
        [X, of((2, 3, 4), "f64")],
        {"momentum": 0.1, "eps": 1e-5},
        "moments of 3 channels are f64[participants,3,3], not f64[2,3,4]",
    ),
    "a weight of other channels": (
        "graphir.synchronised_batch_norm",
        [X, MOMENTS, of((4,), "f32")],
        {"momentum": 0.1, "eps": 1e-5},
        "a batch norm of 3 channels takes as many numbers as weight, not f32[4]",
    ),
    "batches that are no number": (
        "graphir.cumulative_batch_norm",
        [X, CHANNELS, CHANNELS, CHANNELS, CHANNELS, of((1,), "f32")],
        {"eps": 1e-5},
        "the number of batches is i64[], not f32[1]",
    ),
    "statistics of other channels": (
        "graphir.cumulative_batch_norm",
        [X, CHANNELS, CHANNELS, CHANNELS, of((4,), "f32"), of((), "i64")],
        {"eps": 1e-5},
        "a batch norm of 3 channels takes as many numbers as running_var, not f32[4]",
    ),
    "a gradient of another shape": (
        "graphir.synchronised_batch_norm_backward",
        [of((3, 3), "f32"), X, MOMENTS, CHANNELS, CHANNELS, CHANNELS, CHANNELS, CHANNELS],
        {},
        "graphir.synchronised_batch_norm_backward takes a gradient of shape [2, 3], not f32[3,3]",
    ),
    "no rows": (
        "graphir.synchronised_batch_norm_backward",
        [X, X, MOMENTS, CHANNELS, CHANNELS, CHANNELS, CHANNELS, CHANNELS],
        {"numerator": 4, "denominator": 0},
        "graphir.synchronised_batch_norm_backward has the factor 4/0",
    ),
}


@pytest.mark.parametrize("case", NORMED)
def test_batch_norms_over_replicas_refuse_what_does_not_fit(case: str) -> None:
    type, inputs, args, complaint = NORMED[case]
    outputs = {"graphir.synchronised_batch_norm": 3, "graphir.cumulative_batch_norm": 5}.get(type, 1)
    pattern = "t" * len(inputs)
    assert call(type, inputs, outputs, operands=pattern, args=args).complaint == complaint


def test_batch_norms_over_replicas_are_laid_out_as_torch_s() -> None:
    last = of((2, 3, 4, 4), "f32", (48, 1, 12, 3))
    made = call("graphir.synchronised_batch_norm", [last, MOMENTS], 3, args={"momentum": 0.1, "eps": 1e-5})
    assert made.outputs == (last, CHANNELS, CHANNELS)
    found = call("graphir.batch_norm_moments", [last], args={"participant": 1, "participants": 2})
    assert found.outputs == (MOMENTS,)


def test_ctc_losses() -> None:
    log_probs, lengths, losses = of((9, 2, 5), "f32"), of((2,), "i64"), of((2,), "f32")
    rows, joined = of((2, 4), "i64"), of((7,), "i64")
    for targets in (rows, joined):
        assert call("graphir.ctc_loss", [log_probs, targets, lengths, lengths]).outputs == (losses,)
        given = [losses, log_probs, targets, lengths, lengths]
        assert call("graphir.ctc_loss_backward", given).outputs == (log_probs,)
    for changed, complaint in (
        ([joined, rows, lengths, lengths], "takes log_probs of [frames, batch, classes]"),
        ([log_probs, of((3, 4), "i64"), lengths, lengths], "of 2 sequences takes as many rows of targets"),
        ([log_probs, rows, joined, lengths], "takes as many whole numbers as input_lengths, not i64[7]"),
        ([log_probs, rows, lengths, losses], "takes as many whole numbers as target_lengths, not f32[2]"),
    ):
        assert complaint in call("graphir.ctc_loss", changed).complaint
    assert "the gradient of a CTC loss is f32[2], not i64[2]" in (
        call("graphir.ctc_loss_backward", [lengths, log_probs, rows, lengths, lengths]).complaint
    )
