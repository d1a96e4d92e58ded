"""Updates of whole parameters; those of rows are in :mod:`.sparse_optimizers`.

Sources: ``momentum_sgd_op.h``, ``adagrad_op.h``, ``adam_op.h``, ``rmsprop_op.cc``, ``ftrl_op.cc``, ``adadelta_op.h``,
``wngrad_op.h``, ``storm_op.h`` of ``caffe2/sgd``, ``utility_ops.h`` of ``caffe2/operators``. What a Caffe2 operator
overwrites is overwritten here.
"""

from __future__ import annotations

from math import prod

from .builder import LoweredValue
from .registry import Lowering, refuse, translates

__all__ = ["alpha_inverse", "correction", "decay", "storm"]


@translates("WeightedSum")
def _weighted_sum(c: Lowering) -> None:
    """``X0 * w0 + X1 * w1 + …``"""
    total = c.updated(0, 0)

    if c.count % 2:
        raise refuse(f"{c.count} inputs are not pairs of a tensor and its weight")
    c.alike(0, *range(2, c.count, 2))
    total = c.one("aten.mul_.Tensor", [total, c.scalar(1)])
    for i in range(2, c.count, 2):
        total = c.one("aten.addcmul_.default", [total, c[i], c.scalar(i + 1)])
    c.bind(0, total)


@translates("MomentumSGD", "MomentumSGDUpdate")
def _momentum_sgd(c: Lowering) -> None:
    """From gradient, momentum, learning rate and, for an update, the parameter.

    The momentum m becomes ``m' = momentum m + lr g``, the gradient what the parameter is lowered by: m', or with
    Nesterov's momentum ``(1 + momentum) m' - momentum m``.
    """
    momentum, nesterov = c.number("momentum"), c.integer("nesterov")
    c.alike(0, 1, *[3] * (c.op.type == "MomentumSGDUpdate"))
    grad, buffer = c.one("aten.mul.Tensor", [c[0], c.scalar(2)]), c.updated(1, 1)
    before = c.one("aten.mul.Scalar", [buffer], {"other": momentum}) if nesterov else None
    buffer = c.one("aten.mul_.Scalar", [buffer], {"other": momentum})
    buffer = c.one("aten.add_.Tensor", [buffer, grad])
    c.bind(1, buffer)
    if before is not None:
        ahead = c.one("aten.mul.Scalar", [buffer], {"other": 1.0 + momentum})
        step = c.one("aten.sub.Tensor", [ahead, before], {}, 0)
    else:
        step = c.one("aten.clone.default", [buffer], {}, 0)
    if c.op.type == "MomentumSGDUpdate":
        param = c.updated(3, 2)
        c.bind(2, c.one("aten.sub_.Tensor", [param, step]))


@translates("Adagrad")
def _adagrad(c: Lowering) -> None:
    """From parameter, moment, gradient and learning rate (negative to descend).

    The moment becomes ``h = decay h + g²``; the parameter grows by ``lr / (sqrt(h) + epsilon) g``. The effective
    learning rate and the growth are outputs 2 and 3, where they are wanted.
    """
    c.alike(0, 1, 2)
    param, moment, grad, lr = c.updated(0, 0), c.updated(1, 1), c[2], c.scalar(3)
    decay, weight_decay = c.number("decay", 1.0), c.number("weight_decay")
    if weight_decay:
        grad = c.one("aten.add.Tensor", [grad, param], {"alpha": weight_decay})
    if decay != 1:
        moment = c.one("aten.mul_.Scalar", [moment], {"other": decay})
    moment = c.one("aten.addcmul_.default", [moment, grad, grad])
    c.bind(1, moment)
    root = c.one("aten.sqrt.default", [moment])
    root = c.one("aten.add.Scalar", [root], {"other": c.number("epsilon", 1e-5)})
    wanted = len(c.op.outputs)
    rate = c.one("aten.div.Tensor", [lr, root], {}, 2 if wanted > 2 else None)
    growth = c.one("aten.mul.Tensor", [rate, grad], {}, 3 if wanted > 3 else None)
    c.bind(0, c.one("aten.add_.Tensor", [param, growth]))


@translates("RmsProp")
def _rmsprop(c: Lowering) -> None:
    """From gradient, mean squares, momentum and learning rate: ``s += (1 - decay) (g² - s)``, and the momentum m, which
    is the new gradient too, becomes ``momentum m + lr g / sqrt(epsilon + s)``."""
    c.alike(0, 1, 2)
    grad, squares, momentum = c[0], c.updated(1, 1), c.updated(2, 2)
    square = c.one("aten.mul.Tensor", [grad, grad])
    difference = c.one("aten.sub.Tensor", [square, squares])
    squares = c.one("aten.add_.Tensor", [squares, difference], {"alpha": 1.0 - c.number("decay", 0.9)})
    c.bind(1, squares)
    root = c.one("aten.add.Scalar", [squares], {"other": c.number("epsilon", 1e-5)})
    root = c.one("aten.sqrt.default", [root])
    step = c.one("aten.div.Tensor", [c.one("aten.mul.Tensor", [grad, c.scalar(3)]), root])
    momentum = c.one("aten.mul_.Scalar", [momentum], {"other": c.number("momentum")})
    momentum = c.one("aten.add_.Tensor", [momentum, step])
    c.bind(2, momentum)
    c.one("aten.clone.default", [momentum], {}, 0)


@translates("Adam")
def _adam(c: Lowering) -> None:
    """From parameter, both moments, gradient, learning rate (negative to descend) and iteration.

    Unlike torch's, epsilon is added to the root of the second moment before its bias is corrected. Output 3, where it
    is wanted, is what the learning rate is multiplied by.
    """
    c.alike(0, 1, 2, 3)
    beta1, beta2 = c.number("beta1", 0.9), c.number("beta2", 0.999)
    param, first, second, grad = c.updated(0, 0), c.updated(1, 1), c.updated(2, 2), c[3]
    first = c.one("aten.mul_.Scalar", [first], {"other": beta1})
    first = c.one("aten.add_.Tensor", [first, grad], {"alpha": 1.0 - beta1})
    second = c.one("aten.mul_.Scalar", [second], {"other": beta2})
    second = c.one("aten.addcmul_.default", [second, grad, grad], {"value": 1.0 - beta2})
    c.bind(1, first)
    c.bind(2, second)
    unbiased, lr = correction(c, 5), c.scalar(4)
    root = c.one("aten.sqrt.default", [second])
    root = c.one("aten.add.Scalar", [root], {"other": c.number("epsilon", 1e-5)})
    if len(c.op.outputs) > 3:
        corrected = c.one("aten.mul.Tensor", [first, unbiased])
        adapted = c.one("aten.div.Tensor", [corrected, root], {}, 3)
        c.bind(0, c.one("aten.addcmul_.default", [param, adapted, lr]))
    else:
        rate = c.one("aten.mul.Tensor", [lr, unbiased])
        c.bind(0, c.one("aten.addcdiv_.default", [param, c.one("aten.mul.Tensor", [first, rate]), root]))


def correction(c: Lowering, position: int) -> LoweredValue:
    """``sqrt(1 - beta2^t) / (1 - beta1^t)`` with t one more than the iteration at an input, on the host.

    Updates that read the same iteration share it.
    """
    beta1, beta2 = c.number("beta1", 0.9), c.number("beta2", 0.999)
    key = ("Adam", c[position], beta1, beta2)
    if key not in c.builder.notes:
        number = c.host_number(position)
        host = c.builder.device(number)
        t = c.one("aten.add.Scalar", [c.cast(number, "f64")], {"other": 1}, device=host)

        def unspent(beta: float) -> LoweredValue:
            power = c.one("aten.pow.Scalar", [t], {"self": beta}, device=host)
            return c.one("aten.rsub.Scalar", [power], {"other": 1}, device=host)

        of_first, of_second = unspent(beta1), unspent(beta2)
        root = c.one("aten.sqrt.default", [of_second], device=host)
        quotient = c.one("aten.div.Tensor", [root, of_first], device=host)
        c.builder.notes[key] = c.cast(quotient, "f32")
    return c.builder.notes[key]


@translates("Ftrl")
def _ftrl(c: Lowering) -> None:
    """From parameter, n and z side by side in a last dimension, gradient and, where it is no argument, alpha.

    ``n' = n + g²`` and ``z' = z + g - (sqrt(n') - sqrt(n)) w / alpha``. The parameter is 0 where z' is at most lambda1
    in magnitude, and else ``(lambda1 sign(z') - z') / ((beta + sqrt(n')) / alpha + lambda2)``.
    """
    c.alike(0, 2)
    param, state, grad = c.updated(0, 0), c.updated(1, 1), c[2]
    if prod(state.shape) != 2 * prod(param.shape):
        raise refuse(f"n and z are {state.geometry}, the parameter {param.geometry}", "give two numbers for each")
    pairs = c.reshaped(state, (*param.shape, 2))
    inverse = alpha_inverse(c, 3)
    n, z = [c.one("aten.select.int", [pairs], {"dim": len(param.shape), "index": i}) for i in (0, 1)]
    total = c.one("aten.add.Tensor", [n, c.one("aten.mul.Tensor", [grad, grad])])
    root = c.one("aten.sqrt.default", [total])
    grown = c.one("aten.sub.Tensor", [root, c.one("aten.sqrt.default", [n])])
    grown = c.one("aten.mul.Tensor", [c.one("aten.mul.Tensor", [grown, inverse]), param])
    new = c.one("aten.sub.Tensor", [c.one("aten.add.Tensor", [z, grad]), grown])
    lambda1 = c.number("lambda1", 0.001)
    above = c.one("aten.sub.Tensor", [_times(c, c.one("aten.sign.default", [new]), lambda1), new])
    below = c.one("aten.mul.Tensor", [_plus(c, root, c.number("beta", 1.0)), inverse])
    weight = c.one("aten.div.Tensor", [above, _plus(c, below, c.number("lambda2", 0.001))])
    small = c.one("aten.le.Scalar", [c.one("aten.abs.default", [new])], {"other": lambda1})
    weight = c.one("aten.masked_fill.Scalar", [weight, small], {"value": 0.0})
    joined = c.one("aten.stack.default", [[total, new]], {"dim": len(param.shape)})
    c.bind(1, c.one("aten.copy_.default", [state, c.reshaped(joined, state.shape)]))
    c.bind(0, c.one("aten.copy_.default", [param, weight]))


def alpha_inverse(c: Lowering, position: int) -> LoweredValue:
    """1 by Ftrl's alpha, which is an input or an argument."""
    if position >= c.count:
        return c.full((), 1.0 / c.number("alpha", 0.005))
    if "alpha" in c.op.args:
        raise refuse("alpha is an input and an argument", "give one of them")
    return c.cast(c.one("aten.reciprocal.default", [c.cast(c.scalar(position), "f64")]), "f32")


@translates("Adadelta")
def _adadelta(c: Lowering) -> None:
    """From parameter, mean squares h of gradients and d of steps, gradient and learning rate: ``h = decay h +
    (1 - decay) g²``, the step ``s = sqrt(d + epsilon) / sqrt(h + epsilon) g``, ``d = decay d + (1 - decay) s²``, and
    the parameter grows by ``lr s``."""
    c.alike(0, 1, 2, 3)
    param, squares, deltas = c.updated(0, 0), c.updated(1, 1), c.updated(2, 2)
    kept, epsilon, grad = decay(c), c.number("epsilon", 1e-5), c[3]
    above = c.one("aten.sqrt.default", [_plus(c, deltas, epsilon)])
    squares = _mean_squares(c, squares, grad, kept)
    below = c.one("aten.sqrt.default", [_plus(c, squares, epsilon)])
    step = c.one("aten.mul.Tensor", [c.one("aten.div.Tensor", [above, below]), grad])
    c.bind(1, squares)
    c.bind(2, _mean_squares(c, deltas, step, kept))
    c.bind(0, c.one("aten.add_.Tensor", [param, c.one("aten.mul.Tensor", [step, c.scalar(4)])]))


def decay(c: Lowering) -> float:
    """The share of the old mean squares that Adadelta keeps."""
    kept = c.number("decay", 0.95)
    if not 0 < kept < 1:
        raise refuse(f"argument 'decay' is {kept}", "it is more than 0 and less than 1")
    return kept


def _mean_squares(c: Lowering, mean: LoweredValue, values: LoweredValue, kept: float) -> LoweredValue:
    squares = c.one("aten.mul.Tensor", [_times(c, values, 1.0 - kept), values])
    return c.one("aten.add_.Tensor", [c.one("aten.mul_.Scalar", [mean], {"other": kept}), squares])


@translates("Wngrad")
def _wngrad(c: Lowering) -> None:
    """From parameter, a number b, gradient and learning rate: the parameter grows by ``lr / (b + epsilon) g``, and b by
    the sum of g² over ``b + epsilon``. The effective learning rate and the growth are outputs 2 and 3, where they are
    wanted."""
    c.alike(0, 2)
    param, total, grad = c.updated(0, 0), c.updated(1, 1), c[2]
    shifted, wanted = _plus(c, c.reshaped(total, ()), c.number("epsilon", 1e-5)), len(c.op.outputs)
    rate = c.one("aten.div.Tensor", [c.scalar(3), shifted])
    if wanted > 2:
        c.reshaped(rate, total.shape, 2)
        growth = c.one("aten.mul.Tensor", [grad, rate], {}, 3 if wanted > 3 else None)
    else:
        growth = c.one("aten.div.Tensor", [c.one("aten.mul.Tensor", [grad, c.scalar(3)]), shifted])
    c.bind(0, c.one("aten.add_.Tensor", [param, growth]))
    c.bind(1, c.one("aten.add_.Tensor", [total, c.one("aten.div.Tensor", [_sum_of_squares(c, grad), shifted])]))


@translates("Storm")
def _storm(c: Lowering) -> None:
    """From parameter, moment, sum of all squares, gradient and learning rate; see :func:`storm`. With its rate and
    share, the moment becomes ``m = g + share (m - g)``, and the parameter grows by ``rate m``."""
    c.alike(0, 1, 3)
    param, moment, grad = c.updated(0, 0), c.updated(1, 1), c[3]
    rate, share = storm(c, grad, 4)
    rest = c.one("aten.mul.Tensor", [c.one("aten.sub.Tensor", [moment, grad]), share])
    moment = c.one("aten.copy_.default", [moment, c.one("aten.add.Tensor", [grad, rest])])
    c.bind(1, moment)
    c.bind(0, c.one("aten.add_.Tensor", [param, c.one("aten.mul.Tensor", [moment, rate])]))


def storm(c: Lowering, grad: LoweredValue, lr: int) -> tuple[LoweredValue, LoweredValue]:
    """Storm's rate ``lr / cbrt(beta + s)``, where s is the sum of all squares, which input 2 and output 2 hold, and the
    share ``1 - momentum rate²`` of the old moment that is kept."""
    total = c.updated(2, 2)
    if prod(total.shape) != 1:
        raise refuse(f"{c.op.inputs[2]!r} should have one element, but is {total.geometry}")
    total = c.one("aten.add_.Tensor", [total, _sum_of_squares(c, grad)])
    c.bind(2, total)
    shifted = c.cast(_plus(c, c.reshaped(total, ()), c.number("beta", 0.1)), "f64")
    power = c.one("aten.pow.Tensor_Scalar", [shifted], {"exponent": -1.0 / 3.0})
    rate = c.cast(c.one("aten.mul.Tensor", [power, c.cast(c.scalar(lr), "f64")]), "f32")
    square = c.one("aten.mul.Tensor", [_times(c, rate, c.number("momentum", 10.0)), rate])
    return rate, c.one("aten.rsub.Scalar", [square], {"other": 1})


def _sum_of_squares(c: Lowering, values: LoweredValue) -> LoweredValue:
    return c.one("aten.sum.default", [c.one("aten.mul.Tensor", [values, values])])


def _plus(c: Lowering, value: LoweredValue, number: float) -> LoweredValue:
    return c.one("aten.add.Scalar", [value], {"other": number})


def _times(c: Lowering, value: LoweredValue, number: float) -> LoweredValue:
    return c.one("aten.mul.Scalar", [value], {"other": number})
