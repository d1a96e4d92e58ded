"""How many kernels a call launches on a card: one, except by types whose kernels in graphir's runtime call several of
torch's operators.

A formula counts torch's operators on the card. An optimizer's count of steps is on the host, and adds none. A few of
torch's operators launch several kernels, as cuDNN and cuBLAS see fit: only a profile of the card knows their number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple, TypeAlias

from ...ir.optypes.sized import SizedOperator

__all__ = ["LAUNCHES", "ONE", "Launches"]


class Launches(NamedTuple):
    """How many kernels a call launches.

    Attributes:
        each: for each operator.
        once: for all updates that are made in one call.
    """

    each: int = 1
    once: int = 0


ONE: Final = Launches()
"""What most types launch."""

Formula: TypeAlias = Callable[[SizedOperator], Launches]


def _moves(call: SizedOperator, name: str, position: int) -> bool:
    """Whether a number is not 0: an argument, or the operand at *position*."""
    return bool(call.args.get(name)) or call.has(position)


def _turned(call: SizedOperator, decay: int) -> int:
    """A gradient is negated to maximize, and another one made of it for weight decay."""
    return bool(call.args.get("maximize")) + _moves(call, "weight_decay", decay)


def _skipped(formula: Formula, found_inf: int) -> Formula:
    """The same where updates may be skipped: the host reads first whether they are."""

    def formula_of_all(call: SizedOperator) -> Launches:
        each, once = formula(call)
        return Launches(each, once + call.has(found_inf))

    return formula_of_all


def _sgd(fused: Launches, momentum: int) -> Formula:
    """SGD: the launches of its fused form, and the positions of the momentum and, behind it, the weight decay."""

    def formula(call: SizedOperator) -> Launches:
        if call.args.get("form") == "fused":
            return fused
        kept = call.has(2) and _moves(call, "momentum", momentum)
        return Launches(_turned(call, momentum + 1) + kept * (2 + bool(call.args.get("nesterov"))) + 1)

    return formula


def _adam(call: SizedOperator) -> Launches:
    if call.args.get("form") == "fused":
        return Launches(0, 2)
    return Launches(7 + _turned(call, 10) + call.has(4))


def _adagrad(call: SizedOperator) -> Launches:
    if call.args.get("form") == "fused":
        return Launches(0, 2)
    return Launches(4 + _turned(call, 6) + (call.args.get("form") == "foreach"))


def _rmsprop(call: SizedOperator) -> Launches:
    kept = call.has(3) and _moves(call, "momentum", 8)
    return Launches(_turned(call, 9) + 2 + (4 if call.has(4) else 2) + (3 if kept else 1))


def _row_wise_adagrad(call: SizedOperator) -> Launches:
    return Launches(6 + bool(call.args.get("maximize")))


def _loss(call: SizedOperator) -> Launches:
    """A reduced loss is copied out of the memory of its elements."""
    return Launches(1 if call.args.get("reduction") == 0 else 2)


def _double(call: SizedOperator) -> bool:
    return call.operand(0).dtype == "f64"


def _moments(call: SizedOperator) -> Launches:
    return Launches(6)


def _synchronised(call: SizedOperator) -> Launches:
    statistics = call.has(4) + call.has(5)
    return Launches(16 + 3 * statistics + (0 if _double(call) else 4))


def _synchronised_backward(call: SizedOperator) -> Launches:
    return Launches(13 + call.has(3) + (0 if _double(call) else 4))


LAUNCHES: Final[Mapping[str, Formula]] = {
    "graphir.sgd": _skipped(_sgd(Launches(0, 1), momentum=5), 4),
    "graphir.dampened_sgd": _skipped(_sgd(Launches(1), momentum=6), 5),
    "graphir.adam": _skipped(_adam, 7),
    "graphir.adamw": _skipped(_adam, 7),
    "graphir.adagrad": _skipped(_adagrad, 5),
    "graphir.rmsprop": _skipped(_rmsprop, 7),
    "graphir.row_wise_adagrad": _skipped(_row_wise_adagrad, 4),
    "graphir.batch_norm_moments": _moments,
    "graphir.synchronised_batch_norm": _synchronised,
    "graphir.synchronised_batch_norm_backward": _synchronised_backward,
    **dict.fromkeys(
        (
            "aten.binary_cross_entropy.default",
            "aten.mse_loss.default",
            "aten.smooth_l1_loss.default",
            "aten.soft_margin_loss.default",
        ),
        _loss,
    ),
}
"""Of the types that launch several, by type."""
