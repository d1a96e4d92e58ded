"""Losses, their gradients, and the accuracy.

Sources: ``softmax_op.cc``, ``softmax_with_loss_op.cc``, ``cross_entropy_op.cc``, ``distance_op.cc``,
``reduction_ops.h``, ``accuracy_op.cc`` of ``caffe2/operators``.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Final

from ...ir.operator import Arg, Symbol
from .builder import LoweredValue
from .registry import Lowering, refuse, translates

__all__ = ()

_LEAST_PROBABILITY: Final = 1e-20
"""What probabilities are raised to before their logarithm is taken."""


@translates("Softmax")
def _softmax(c: Lowering) -> None:
    x = c.floating(0)
    matrix = c.rows(x, c.integer("axis", 1))
    _shaped(c, "aten._softmax.default", [matrix], {"dim": 1, "half_to_float": False}, x)


@translates("SoftmaxGradient")
def _softmax_gradient(c: Lowering) -> None:
    """From the result and its gradient."""
    c.alike(0, 1), c.floating(0)
    axis = c.integer("axis", 1)
    operands = [c.rows(c[1], axis), c.rows(c[0], axis)]
    args: dict[str, Arg] = {"dim": 1, "input_dtype": Symbol(c[0].dtype)}
    _shaped(c, "aten._softmax_backward_data.default", operands, args, c[0])


def _shaped(c: Lowering, type: str, operands: list[LoweredValue], args: Mapping[str, Arg], like: LoweredValue) -> None:
    """An operator on matrices whose result, the first output, has the shape of a tensor."""
    if operands[0].shape == like.shape:
        c.one(type, operands, args, 0)
    else:
        c.reshaped(c.one(type, operands, args), like.shape, 0)


def _labels(c: Lowering, rows: int) -> LoweredValue:
    """The labels at input 1, as a column of int64."""
    labels = c[1]
    if prod(labels.shape) != rows:
        raise refuse(f"{c.op.inputs[1]!r} is {labels.geometry}, but there are {rows} rows")
    return c.reshaped(c.cast(labels, "i64"), (rows, 1))


def _averaged(c: Lowering, total: LoweredValue, weight: LoweredValue, rows: int) -> LoweredValue:
    """*total* by the sum of the weights, or with ``average_by_batch_size`` by the number of rows."""
    if c.integer("average_by_batch_size"):
        return c.one("aten.div.Scalar", [total], {"other": rows})
    return c.one("aten.div.Tensor", [total, weight])


@translates("SoftmaxWithLoss")
def _softmax_with_loss(c: Lowering) -> None:
    """The probabilities, and the mean of the rows' losses, each by its weight if there are weights."""
    x = c.floating(0)
    matrix = c.rows(x, c.integer("axis", 1))
    rows, scale = matrix.shape[0], c.number("scale", 1.0)
    if c.integer("label_prob"):
        _shaped(c, "aten._softmax.default", [matrix], {"dim": 1, "half_to_float": False}, x)
        probabilities = c.builder.known[c.output(0)]
        assert isinstance(probabilities, LoweredValue)
        least = c.one("aten.clamp_min.default", [c.reshaped(probabilities, matrix.shape)], {"min": _LEAST_PROBABILITY})
        product = c.one("aten.mul.Tensor", [c.one("aten.log.default", [least]), c.reshaped(c[1], matrix.shape)])
        picked = c.one("aten.sum.dim_IntList", [product], {"dim": (1,), "keepdim": True})
    else:
        logs = c.one("aten._log_softmax.default", [matrix], {"dim": 1, "half_to_float": False})
        picked = c.one("aten.gather.default", [logs, _labels(c, rows)], {"dim": 1})
        _shaped(c, "aten.exp.default", [logs], {}, x)
    if c.count > 2:
        weights = c.reshaped(c[2], (rows, 1))
        total = c.one("aten.sum.default", [c.one("aten.mul.Tensor", [picked, weights])])
        weight = c.one("aten.sum.default", [weights])
        nothing = c.one("aten.eq.Scalar", [weight], {"other": 0})
        mean = c.one("aten.masked_fill.Scalar", [_averaged(c, total, weight, rows), nothing], {"value": 0.0})
    else:
        mean = c.one("aten.mean.default", [picked])
    scaled = mean if scale == 1 else c.one("aten.mul.Scalar", [mean], {"other": scale})
    c.one("aten.rsub.Scalar", [scaled], {"other": 0.0}, 1)  # not negated: no loss is +0


@translates("SoftmaxWithLossGradient")
def _softmax_with_loss_gradient(c: Lowering) -> None:
    """From logits, labels, weights if any, probabilities, and the loss's gradient."""
    probabilities = c[c.count - 2]
    matrix = c.rows(probabilities, c.integer("axis", 1))
    rows = matrix.shape[0]
    if c.integer("label_prob"):
        difference = c.one("aten.sub.Tensor", [matrix, c.reshaped(c[1], matrix.shape)])
    else:
        ones = c.full((rows, 1), -1.0)
        difference = c.one("aten.scatter_add.default", [matrix, _labels(c, rows), ones], {"dim": 1})
    scale, grad = c.number("scale", 1.0), c.scalar(c.count - 1)
    if c.count > 4:
        weights = c.reshaped(c[2], (rows, 1))
        difference = c.one("aten.mul.Tensor", [difference, weights])
        weight = c.one("aten.sum.default", [weights])
        factor = _averaged(c, c.one("aten.mul.Scalar", [grad], {"other": scale}), weight, rows)
        # As in Caffe2, where weights sum up to nothing or less, it is the gradient of the sum.
        unscaled = c.one("aten.le.Scalar", [weight], {"other": 0})
        factor = c.one("aten.masked_fill.Scalar", [factor, unscaled], {"value": 1.0})
    else:
        factor = c.one("aten.mul.Scalar", [grad], {"other": scale / max(rows, 1)})
    _shaped(c, "aten.mul.Tensor", [difference, factor], {}, probabilities)


def _probabilities(c: Lowering) -> LoweredValue:
    x = c[0]
    return c.rows(x) if len(x.shape) > 1 else c.reshaped(x, (1, prod(x.shape)))


@translates("LabelCrossEntropy")
def _label_cross_entropy(c: Lowering) -> None:
    x = _probabilities(c)
    picked = c.one("aten.gather.default", [x, _labels(c, x.shape[0])], {"dim": 1})
    least = c.one("aten.clamp_min.default", [picked], {"min": _LEAST_PROBABILITY})
    negative = c.one("aten.neg.default", [c.one("aten.log.default", [least])])
    c.reshaped(negative, (x.shape[0],), 0)


@translates("LabelCrossEntropyGradient")
def _label_cross_entropy_gradient(c: Lowering) -> None:
    """From probabilities, labels, and the gradient of each row's loss."""
    x = _probabilities(c)
    labels = _labels(c, x.shape[0])
    picked = c.one("aten.gather.default", [x, labels], {"dim": 1})
    least = c.one("aten.clamp_min.default", [picked], {"min": _LEAST_PROBABILITY})
    negative = c.one("aten.neg.default", [c.reshaped(c[2], (x.shape[0], 1))])
    quotient = c.one("aten.div.Tensor", [negative, least])
    zeros = c.full(x.shape, 0.0)
    _shaped(c, "aten.scatter.src", [zeros, labels, quotient], {"dim": 1}, c[0])


@translates("MakeTwoClass")
def _make_two_class(c: Lowering) -> None:
    x = c.floating(0)
    other = c.one("aten.rsub.Scalar", [x], {"other": 1.0})
    c.one("aten.stack.default", [[other, x]], {"dim": len(x.shape)}, 0)


@translates("MakeTwoClassGradient")
def _make_two_class_gradient(c: Lowering) -> None:
    grad = c[0]
    first, second = [c.one("aten.select.int", [grad], {"dim": len(grad.shape) - 1, "index": i}) for i in (0, 1)]
    c.one("aten.sub.Tensor", [second, first], {}, 0)


@translates("AveragedLoss")
def _averaged_loss(c: Lowering) -> None:
    c.one("aten.mean.default", [c[0]], {}, 0)


@translates("AveragedLossGradient")
def _averaged_loss_gradient(c: Lowering) -> None:
    shape = c[0].shape
    each = c.one("aten.mul.Scalar", [c.scalar(1)], {"other": 1.0 / max(prod(shape), 1)})
    c.one("aten.expand_copy.default", [each], {"size": shape}, 0)


@translates("SquaredL2Distance")
def _squared_distance(c: Lowering) -> None:
    """Half the squared distance of each pair of rows."""
    x, y = c.alike(0, 1), c[1]
    difference = c.reshaped(c.one("aten.sub.Tensor", [x, y]), (prod(x.shape[:1]), prod(x.shape[1:])))
    square = c.one("aten.mul.Tensor", [difference, difference])
    c.one("aten.mul.Scalar", [c.one("aten.sum.dim_IntList", [square], {"dim": (1,)})], {"other": 0.5}, 0)


@translates("SquaredL2DistanceGradient")
def _squared_distance_gradient(c: Lowering) -> None:
    """Of both operands, from them and the gradient of each distance."""
    x, y = c.alike(0, 1), c[1]
    if prod(c[2].shape) != prod(x.shape[:1]):
        raise refuse(f"{c.op.inputs[2]!r} is {c[2].geometry}, but {c.op.inputs[0]!r} is {x.geometry}")
    factor = c.reshaped(c[2], x.shape[:1] + (1,) * (len(x.shape) - 1)) if x.shape else c.scalar(2)
    first = c.one("aten.mul.Tensor", [c.one("aten.sub.Tensor", [x, y]), factor], {}, 0)
    c.one("aten.neg.default", [first], {}, 1)


@translates("Accuracy")
def _accuracy(c: Lowering) -> None:
    """The share of the rows whose label is among the ``top_k`` best; of equal scores the first is the better one."""
    x = c[0]
    labels = _labels(c, x.shape[0])
    own = c.one("aten.gather.default", [x, labels], {"dim": 1})
    classes = c.one("aten.arange.default", [], {"end": x.shape[1], "dtype": Symbol("i64")})
    earlier = c.one("aten.lt.Tensor", [classes, labels])
    equal = c.one("aten.logical_and.default", [c.one("aten.eq.Tensor", [x, own]), earlier])
    better = c.one("aten.logical_or.default", [c.one("aten.gt.Tensor", [x, own]), equal])
    count = c.one("aten.sum.dim_IntList", [better], {"dim": (1,)})
    correct = c.one("aten.lt.Scalar", [count], {"other": c.integer("top_k", 1)})
    c.one("aten.mean.default", [correct], {"dtype": Symbol("f32")}, 0)
