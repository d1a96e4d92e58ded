"""Fully connected layers, matrix products, and operators on each element.

Sources: ``fully_connected_op.h``, ``batch_matmul_op.h``, ``elementwise_ops.h``, ``utility_ops.h``, ``scale_op.h`` of
``caffe2/operators``.
"""

from __future__ import annotations

from math import prod

from .builder import LoweredValue
from .registry import Lowering, refuse, translates

__all__ = ()


@translates("FC", "FCTransposed")
def _fc(c: Lowering) -> None:
    """``Y = X W^T + b``, where X and W are seen as matrices."""
    x, w, axis = (
        c.floating(0),
        c.rows(c.floating(1), c.integer("axis_w", 1)),
        c.axis(c.integer("axis", 1), len(c[0].shape)),
    )
    matrix = c.rows(x, axis)
    weight = w if c.op.type == "FCTransposed" else c.one("aten.t.default", [w])
    operands = [c.reshaped(c[2], (weight.shape[1],)), matrix, weight]
    if axis == 1:
        c.one("aten.addmm.default", operands, {}, 0)
    else:
        product = c.one("aten.addmm.default", operands)
        c.reshaped(product, (*x.shape[:axis], weight.shape[1]), 0)


@translates("FCGradient", "FCTransposedGradient")
def _fc_gradient(c: Lowering) -> None:
    """Of W, of b, and where it is wanted of X."""
    x, w, axis = c[0], c[1], c.axis(c.integer("axis", 1), len(c[0].shape))
    matrix, weight = c.rows(x, axis), c.rows(w, c.integer("axis_w", 1))
    grad = c.rows(c[2], c.axis(axis, len(c[2].shape), end=True))
    transposed = c.op.type == "FCTransposedGradient"
    left, right = (matrix, grad) if transposed else (grad, matrix)
    _product(c, c.one("aten.t.default", [left]), right, w.shape, 0)
    c.one("aten.sum.dim_IntList", [grad], {"dim": (0,)}, 1)
    if len(c.op.outputs) > 2:
        _product(c, grad, c.one("aten.t.default", [weight]) if transposed else weight, x.shape, 2)


def _product(c: Lowering, a: LoweredValue, b: LoweredValue, shape: tuple[int, ...], out: int) -> None:
    """The matrix product, in this shape, as an output."""
    if (a.shape[0], b.shape[1]) == shape:
        c.one("aten.mm.default", [a, b], {}, out)
    else:
        c.reshaped(c.one("aten.mm.default", [a, b]), shape, out)


@translates("BatchMatMul")
def _batch_matmul(c: Lowering) -> None:
    a, b = c[0], c[1]
    if c.integer("broadcast") or len(a.shape) != len(b.shape) or a.shape[:-2] != b.shape[:-2] or len(a.shape) < 2:
        raise refuse(f"{a.geometry} and {b.geometry} have other batch dimensions", "give both the same ones")
    batch = prod(a.shape[:-2])
    flat = [c.reshaped(m, (batch, *m.shape[-2:])) for m in (a, b)]
    for i, name in enumerate(("trans_a", "trans_b")):
        if c.integer(name):
            flat[i] = c.one("aten.transpose.int", [flat[i]], {"dim0": 1, "dim1": 2})
    if len(a.shape) == 3:
        c.one("aten.bmm.default", flat, {}, 0)
    else:
        product = c.one("aten.bmm.default", flat)
        c.reshaped(product, (*a.shape[:-2], *product.shape[1:]), 0)


@translates("Relu")
def _relu(c: Lowering) -> None:
    c.one("aten.relu.default", [c.floating(0)], {}, 0)


@translates("Tanh")
def _tanh(c: Lowering) -> None:
    c.one("aten.tanh.default", [c.floating(0)], {}, 0)


@translates("Sigmoid")
def _sigmoid(c: Lowering) -> None:
    c.one("aten.sigmoid.default", [c.floating(0)], {}, 0)


@translates("ReluGradient")
def _relu_gradient(c: Lowering) -> None:
    """From the result and its gradient, as those of tanh and sigmoid."""
    c.alike(0, 1), c.floating(0)
    c.one("aten.threshold_backward.default", [c[1], c[0]], {"threshold": 0}, 0)


@translates("TanhGradient")
def _tanh_gradient(c: Lowering) -> None:
    c.alike(0, 1), c.floating(0)
    c.one("aten.tanh_backward.default", [c[1], c[0]], {}, 0)


@translates("SigmoidGradient")
def _sigmoid_gradient(c: Lowering) -> None:
    c.alike(0, 1), c.floating(0)
    c.one("aten.sigmoid_backward.default", [c[1], c[0]], {}, 0)


@translates("Scale")
def _scale(c: Lowering) -> None:
    c.one("aten.mul.Scalar", [c[0]], {"other": c.number("scale", 1.0)}, 0)


@translates("Sum")
def _sum(c: Lowering) -> None:
    """From left to right."""
    total = c.alike(0, *range(1, c.count))
    if c.count == 1:
        c.one("aten.clone.default", [total], {}, 0)
    for i in range(1, c.count):
        total = c.one("aten.add.Tensor", [total, c[i]], {}, 0 if i == c.count - 1 else None)


def _aligned(c: Lowering, a: LoweredValue, b: LoweredValue) -> LoweredValue:
    """The second operand in a shape that broadcasts to the first as Caffe2 means it.

    With ``broadcast``, its dimensions are those of the first from ``axis`` on, or the last ones; otherwise they are
    matched from the back, as torch does.
    """
    if a.dtype != b.dtype:
        raise refuse(f"the operands are {a.geometry} and {b.geometry}", "give both the same element type")
    if not c.integer("broadcast"):
        return b
    rank = len(a.shape)
    axis = c.integer("axis", -1)
    if c.text("axis_str"):
        axis = c.text("order", "NCHW").find(c.text("axis_str"))
        if axis < 0:
            raise refuse(f"argument 'axis_str' is {c.text('axis_str')!r}", f"one of {c.text('order', 'NCHW')!r}")
    if axis == -1:
        axis = rank - len(b.shape)
    after = rank - axis - len(b.shape)
    if axis < 0 or after < 0:
        raise refuse(f"{b.geometry} does not fit into {a.geometry} from axis {axis} on")
    return c.reshaped(b, b.shape + (1,) * after)


@translates("Add")
def _add(c: Lowering) -> None:
    c.one("aten.add.Tensor", [c[0], _aligned(c, c[0], c[1])], {}, 0)


@translates("Mul")
def _mul(c: Lowering) -> None:
    c.one("aten.mul.Tensor", [c[0], _aligned(c, c[0], c[1])], {}, 0)


@translates("AddGradient")
def _add_gradient(c: Lowering) -> None:
    """From the gradient and both operands."""
    grad, a, b = c[0], c[1], c[2]
    operands = (a, _aligned(c, a, b))
    # What overwrites the gradient comes last.
    for i in sorted((0, 1), key=lambda i: c.output(i) in c.op.inputs):
        _reduced(c, grad, operands[i], (a.shape, b.shape)[i], i)


@translates("MulGradient")
def _mul_gradient(c: Lowering) -> None:
    grad, a, b = c[0], c[1], c[2]
    aligned = _aligned(c, a, b)
    of_a = c.one("aten.mul.Tensor", [grad, aligned])
    of_b = c.one("aten.mul.Tensor", [grad, a])
    _reduced(c, of_a, a, a.shape, 0)
    _reduced(c, of_b, aligned, b.shape, 1)


def _reduced(c: Lowering, grad: LoweredValue, operand: LoweredValue, shape: tuple[int, ...], out: int) -> None:
    """*grad* summed over the dimensions along which *operand* was repeated, in the operand's own shape."""
    wide = (1,) * (len(grad.shape) - len(operand.shape)) + operand.shape
    dims = tuple([d for d, (n, m) in enumerate(zip(grad.shape, wide, strict=True)) if n != m])
    if dims:
        grad = c.one("aten.sum.dim_IntList", [grad], {"dim": dims, "keepdim": True})
    c.reshaped(grad, shape, out)
