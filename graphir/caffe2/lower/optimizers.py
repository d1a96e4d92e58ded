"""Updates of parameters, and the iteration counter.

Sources: ``momentum_sgd_op.h``, ``adagrad_op.h``, ``adam_op.h``, ``rmsprop_op.cc``, ``iter_op.h`` of ``caffe2/sgd``,
``utility_ops.h`` of ``caffe2/operators``. What a Caffe2 operator overwrites is overwritten here.
"""

from __future__ import annotations

from .builder import Value
from .registry import Lowering, refuse, translates

__all__ = ()


@translates("Iter")
def _iter(c: Lowering) -> None:
    _count(c, 0)


@translates("AtomicIter")
def _atomic_iter(c: Lowering) -> None:
    """The lock at input 0 is left out: a program's order is fixed."""
    _count(c, 1)


def _count(c: Lowering, position: int) -> None:
    if not c.count:
        raise refuse("the counter is no input", "let it be input and output, and fill it in the init net")
    counter = c.updated(position, 0)
    device = c.builder.device(counter)
    c.bind(0, c.one("aten.add_.Scalar", [counter], {"other": 1}, device=device))


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
    correction, lr = _correction(c, beta1, beta2), c.scalar(4)
    root = c.one("aten.sqrt.default", [second])
    root = c.one("aten.add.Scalar", [root], {"other": c.number("epsilon", 1e-5)})
    if len(c.op.outputs) > 3:
        corrected = c.one("aten.mul.Tensor", [first, correction])
        adapted = c.one("aten.div.Tensor", [corrected, root], {}, 3)
        c.bind(0, c.one("aten.addcmul_.default", [param, adapted, lr]))
    else:
        rate = c.one("aten.mul.Tensor", [lr, correction])
        c.bind(0, c.one("aten.addcdiv_.default", [param, c.one("aten.mul.Tensor", [first, rate]), root]))


def _correction(c: Lowering, beta1: float, beta2: float) -> Value:
    """``sqrt(1 - beta2^t) / (1 - beta1^t)`` with t one more than the iteration, on the host.

    Updates that read the same iteration share it.
    """
    key = ("Adam", c[5], beta1, beta2)
    if key not in c.builder.notes:
        number = c.host_number(5)
        host = c.builder.device(number)
        t = c.one("aten.add.Scalar", [c.cast(number, "f64")], {"other": 1}, device=host)

        def unspent(beta: float) -> Value:
            power = c.one("aten.pow.Scalar", [t], {"self": beta}, device=host)
            return c.one("aten.rsub.Scalar", [power], {"other": 1}, device=host)

        of_first, of_second = unspent(beta1), unspent(beta2)
        root = c.one("aten.sqrt.default", [of_second], device=host)
        quotient = c.one("aten.div.Tensor", [root, of_first], device=host)
        c.builder.notes[key] = c.cast(quotient, "f32")
    return c.builder.notes[key]
