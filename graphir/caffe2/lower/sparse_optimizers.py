"""Updates of the rows that indices name.

Each slot (an index and a row of the gradient) updates its row by itself, in the order of the slots: see
``graphir.caffe2_sparse_adagrad`` and its like. Sources: ``adagrad_op.h``, ``adam_op.h``, ``momentum_sgd_op.h``,
``ftrl_op.cc``, ``adadelta_op.h``, ``wngrad_op.h``, ``storm_op.h`` of ``caffe2/sgd``, ``utility_ops.h`` of
``caffe2/operators``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...ir.operator import Arg
from .builder import LoweredValue
from .optimizers import alpha_inverse, correction, decay, storm
from .registry import Lowering, refuse, translates
from .sparse import indices

__all__ = ()


def _slots(c: Lowering, param: LoweredValue, index: int, grad: int) -> list[LoweredValue]:
    """The indices and the values of the gradient at two inputs, as a sparse gradient has them."""
    rows = c.cast(indices(c, index), "i64")
    (count,) = rows.shape
    return [c.reshaped(rows, (1, count)), c.reshaped(c.padded(grad), (count, *param.shape[1:]))]


def _state(c: Lowering, param: LoweredValue, position: int, output: int, *, by_rows: bool = False) -> LoweredValue:
    """State that is overwritten: of the parameter's shape, or with a number for each of its rows."""
    value = c.updated(position, output)
    if value.shape != (param.shape[:1] if by_rows else param.shape):
        raise refuse(f"{c.op.inputs[position]!r} is {value.geometry}, the parameter {param.geometry}")
    return value


def _update(
    c: Lowering,
    rule: str,
    operands: Sequence[LoweredValue],
    args: Mapping[str, Arg],
    overwritten: Sequence[int],
    out: int | None = None,
) -> None:
    """Append an update.

    Args:
        c: of the operator.
        rule: which one.
        operands, args: of its type.
        overwritten: the outputs that the operands become which it overwrites.
        out: the output that what it returns becomes, if there is one that wants it.
    """
    values = c.emit(f"graphir.caffe2_sparse_{rule}", operands, args, [out])
    for output, value in zip(overwritten, values[len(values) - len(overwritten) :], strict=True):
        c.bind(output, value)


@translates("SparseAdagrad", "RowWiseSparseAdagrad")
def _adagrad(c: Lowering) -> None:
    """From parameter, moment, indices, gradients and learning rate. By rows, there is one moment for each, and the mean
    of a row's squares is added to it."""
    by_rows = c.op.type == "RowWiseSparseAdagrad"
    if c.number("decay", 1.0) != 1:
        raise refuse("decay is not translated, as Caffe2 has none for rows", "leave it out")
    param = c.updated(0, 0)
    operands = [param, _state(c, param, 1, 1, by_rows=by_rows), *_slots(c, param, 2, 3), c.scalar(4)]
    args = {"epsilon": c.number("epsilon", 1e-5), "weight_decay": c.number("weight_decay"), "by_rows": by_rows}
    _update(c, "adagrad", operands, args, (0, 1))


@translates("SparseAdam", "RowWiseSparseAdam")
def _adam(c: Lowering) -> None:
    """From parameter, both moments, indices, gradients, learning rate and iteration. Output 3, where it is wanted, is
    what the learning rate is multiplied by. By rows, there is one second moment for each."""
    by_rows, wanted = c.op.type == "RowWiseSparseAdam", len(c.op.outputs) > 3
    if c.integer("enableRAdam"):
        raise refuse("enableRAdam is not translated", "leave it out")
    param = c.updated(0, 0)
    moments = [_state(c, param, 1, 1), _state(c, param, 2, 2, by_rows=by_rows)]
    operands = [param, *moments, *_slots(c, param, 3, 4), c.scalar(5), correction(c, 6)]
    args: dict[str, Arg] = {"beta1": c.number("beta1", 0.9), "beta2": c.number("beta2", 0.999)}
    args |= {"epsilon": c.number("epsilon", 1e-5), "by_rows": by_rows, "adapted": wanted}
    _update(c, "adam", operands, args, (0, 1, 2), 3 if wanted else None)


@translates("SparseMomentumSGDUpdate")
def _momentum_sgd(c: Lowering) -> None:
    """From gradients, momentum, learning rate, parameter and indices; the gradients become what rows are lowered by."""
    param = c.updated(3, 2)
    rows, values = _slots(c, param, 4, 0)
    operands = [param, _state(c, param, 1, 1), rows, values, c.scalar(2)]
    args: dict[str, Arg] = {"momentum": c.number("momentum"), "nesterov": bool(c.integer("nesterov"))}
    _update(c, "momentum_sgd", operands, args, (2, 1), 0)


@translates("SparseFtrl")
def _ftrl(c: Lowering) -> None:
    """From parameter, n and z side by side, indices, gradients and, where it is no argument, alpha."""
    param, state = c.updated(0, 0), c.updated(1, 1)
    if state.shape != (*param.shape, 2):
        raise refuse(f"n and z are {state.geometry}, the parameter {param.geometry}", "give two numbers for each")
    args = {name: c.number(name, default) for name, default in (("beta", 1.0), ("lambda1", 0.001), ("lambda2", 0.001))}
    _update(c, "ftrl", [param, state, *_slots(c, param, 2, 3), alpha_inverse(c, 4)], args, (0, 1))


@translates("SparseAdadelta")
def _adadelta(c: Lowering) -> None:
    """From parameter, mean squares of gradients and of steps, indices, gradients and learning rate."""
    param = c.updated(0, 0)
    operands = [param, _state(c, param, 1, 1), _state(c, param, 2, 2), *_slots(c, param, 3, 4), c.scalar(5)]
    _update(c, "adadelta", operands, {"epsilon": c.number("epsilon", 1e-5), "decay": decay(c)}, (0, 1, 2))


@translates("SparseStorm")
def _storm(c: Lowering) -> None:
    """From parameter, moment, sum of all squares, gradients, indices and learning rate."""
    param = c.updated(0, 0)
    rows, values = _slots(c, param, 4, 3)
    rate, share = storm(c, values, 5)
    _update(c, "storm", [param, _state(c, param, 1, 1), rows, values, rate, share], {}, (0, 1))


@translates("SparseWngrad")
def _wngrad(c: Lowering) -> None:
    """From parameter, a number b, indices, gradients and learning rate: rows grow by ``lr g / (b + epsilon)``, and b by
    the sum of g² over b, without epsilon."""
    param, total = c.updated(0, 0), c.updated(1, 1)
    found = indices(c, 2)
    chosen = c.cast(found, "i64")
    values = c.reshaped(c.padded(3), (chosen.shape[0], *param.shape[1:]))
    before = c.scalar(1)
    shifted = c.one("aten.add.Scalar", [before], {"other": c.number("epsilon", 1e-5)})
    growth = c.one("aten.div.Tensor", [c.one("aten.mul.Tensor", [values, c.scalar(4)]), shifted])
    if found.padded:  # the gradient of a slot that Unique leaves empty is 0, which row 0 can have added
        chosen = c.one("aten.clamp_min.default", [chosen], {"min": 0})
    square = c.one("aten.sum.default", [c.one("aten.mul.Tensor", [values, values])])
    c.bind(0, c.one("aten.index_add_.default", [param, chosen, growth], {"dim": 0}))
    c.bind(1, c.one("aten.add_.Tensor", [total, c.one("aten.div.Tensor", [square, before])]))
