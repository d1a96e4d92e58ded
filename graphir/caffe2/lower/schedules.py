"""Learning rates as functions of the iteration.

Sources: ``caffe2/sgd/learning_rate_op.h`` and ``learning_rate_functors.h``. What depends on the iteration is computed
on the host, in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

from ...ir.operator import Arg
from .builder import LoweredValue
from .registry import Lowering, refuse, translates

__all__ = ()


class _Schedule:
    """The arithmetic of 0-dim tensors on the host.

    Attributes:
        lowering: of the operator.
        iteration: int64.
        now: the same as float64.
    """

    def __init__(self, lowering: Lowering) -> None:
        self.lowering = lowering
        self.iteration = lowering.host_number(0)
        self.now = lowering.cast(self.iteration, "f64")

    def op(self, type: str, *operands: LoweredValue, **args: Arg) -> LoweredValue:
        device = self.lowering.builder.device(operands[0])
        return self.lowering.one(f"aten.{type}", operands, args, device=device)

    def power(self, base: float, exponent: LoweredValue) -> LoweredValue:
        """A number to the power of a tensor."""
        args: Mapping[str, Arg] = {"self": base}
        return self.lowering.one("aten.pow.Scalar", [exponent], args, device=self.lowering.builder.device(exponent))

    def quotient(self, divisor: int) -> LoweredValue:
        """How often *divisor* fits into the iteration."""
        return self.lowering.cast(self.op("floor_divide.Scalar", self.iteration, other=divisor), "f64")

    def constant(self, number: float) -> LoweredValue:
        return self.op("full_like.default", self.now, fill_value=number)

    def before(self, steps: int, early: LoweredValue, late: LoweredValue) -> LoweredValue:
        """*early* in the first *steps* iterations, then *late*."""
        return self.op("where.self", self.op("lt.Scalar", self.iteration, other=steps), early, late)

    def line(self, start: float, steps: int) -> LoweredValue:
        """From *start* to 1 in so many iterations."""
        slope = self.op("mul.Scalar", self.now, other=(1.0 - start) / steps)
        return self.before(steps, self.op("add.Scalar", slope, other=start), self.constant(1.0))

    def later(self, steps: int) -> _Schedule:
        """The same, so many iterations on."""
        found = _Schedule.__new__(_Schedule)
        found.lowering = self.lowering
        found.iteration = self.op("sub.Scalar", self.iteration, other=steps)
        found.now = self.lowering.cast(found.iteration, "f64")
        return found

    def inverse(self, gamma: float, power: float) -> LoweredValue:
        grown = self.op("add.Scalar", self.op("mul.Scalar", self.now, other=gamma), other=1.0)
        return self.op("pow.Tensor_Scalar", grown, exponent=-power)


def _positive(c: Lowering, name: str) -> int:
    value = c.integer(name)
    if value <= 0:
        raise refuse(f"argument {name!r} is {value}", "give a positive number")
    return value


def _alter(c: Lowering, s: _Schedule) -> LoweredValue:
    active, inactive, first = c.integer("active_period"), c.integer("inactive_period"), c.integer("active_first", 1)
    if active < 0 or inactive < 0 or not active + inactive:
        raise refuse(f"the periods are {active} and {inactive}", "give 'active_period' and 'inactive_period'")
    place = s.op("remainder.Scalar", s.iteration, other=active + inactive)
    early = s.op("lt.Scalar", place, other=active if first else inactive)
    one, none = s.constant(1.0), s.constant(0.0)
    return s.op("where.self", early, one if first else none, none if first else one)


def _poly(c: Lowering, s: _Schedule) -> LoweredValue:
    left = s.op("rsub.Scalar", s.op("div.Scalar", s.now, other=_positive(c, "max_iter")), other=1.0)
    return s.op("pow.Tensor_Scalar", left, exponent=c.number("power"))


def _hill(c: Lowering, s: _Schedule) -> LoweredValue:
    steps = _positive(c, "num_iter")
    after = s.later(steps).inverse(c.number("gamma"), c.number("power"))
    bounded = s.op("clamp_min.default", after, min=c.number("end_multiplier"))
    return s.before(steps, s.line(c.number("start_multiplier"), steps), bounded)


def _gate(c: Lowering, s: _Schedule) -> LoweredValue:
    early, late = [s.constant(c.number(f"multiplier_{i}", 1.0)) for i in (1, 2)]
    return s.before(c.integer("num_iter"), early, late)


def _pieces(c: Lowering, s: _Schedule) -> LoweredValue:
    first, second, third = [s.constant(c.number(f"m{i}", 0.5)) for i in (1, 2, 3)]
    return s.before(c.integer("n1"), first, s.before(c.integer("n2"), second, third))


def _constant_then_line(c: Lowering, s: _Schedule) -> LoweredValue:
    start = c.number("start_warmup_multiplier", 0.1)
    level, rise = [c.integer(f"{kind}_warmup_num_iter", 10_000_000) for kind in ("constant", "linear")]
    return s.before(level, s.constant(start), s.later(level).line(start, rise))


_Policy: TypeAlias = Callable[[Lowering, _Schedule], LoweredValue]

_POLICIES: Final[Mapping[str, _Policy]] = {
    "alter": _alter,
    "constantThenLinearWarmup": _constant_then_line,
    "constantWarmup": lambda c, s: s.before(
        c.integer("num_iter"), s.constant(c.number("multiplier", 0.5)), s.constant(1.0)
    ),
    "exp": lambda c, s: s.power(c.number("gamma"), s.now),
    "gate": _gate,
    "hill": _hill,
    "inv": lambda c, s: s.inverse(c.number("gamma"), c.number("power")),
    "linearWarmup": lambda c, s: s.line(c.number("start_multiplier"), _positive(c, "num_iter")),
    "pieceWarmup": _pieces,
    "poly": _poly,
    "step": lambda c, s: s.power(c.number("gamma"), s.quotient(_positive(c, "stepsize"))),
}
"""What the base rate is multiplied by, for each policy that depends on the iteration."""


@translates("LearningRate")
def _learning_rate(c: Lowering) -> None:
    if "base_lr" not in c.op.args:
        raise refuse("there is no argument 'base_lr'")
    base, policy = c.number("base_lr"), c.text("policy")
    if policy == "fixed":
        c.full((), base, "f32", 0)
        return
    if policy not in _POLICIES:
        raise refuse(f"policy {policy!r} is not translated", f"policies: fixed, {', '.join(sorted(_POLICIES))}")
    schedule = _Schedule(c)
    rate = schedule.op("mul.Scalar", _POLICIES[policy](c, schedule), other=base)
    c.emit("Copy", [c.cast(rate, "f32")], {}, [0], device=c.home(0))
