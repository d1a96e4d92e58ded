"""What an operator costs: its arithmetic and the bytes that it moves, from shapes, and the seconds that follow.

Where a :class:`~.profiles.Profile` has the operator's call, its seconds are those. Else the prediction is a roofline:
an operator takes as long as the longer one of its arithmetic and its memory traffic, and a constant for being called.
It leaves out what a kernel loses on small matrices and gains in caches, so it tells short operators from long ones, and
not much more.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Final, Literal, NamedTuple, TypeAlias

from ..ir.blob import Blob, dense_nbytes
from ..ir.device import Device
from ..ir.net import Net
from ..ir.operator import Operator
from ..ir.optypes.sized import SizedOperator, UnknownShape
from ..ir.optypes.table import operator_type
from ..ir.plan import issued_as
from ..ir.size import Dims
from .alike import Kinds
from .formulas.flops import flops_of
from .profiles import Profile
from .scratch import is_called

__all__ = ["NOMINAL", "Cost", "CostSource", "Rates", "Work", "operator_costs", "seconds_alike", "work", "works"]

CostSource: TypeAlias = Literal["profile", "registered", "roofline", "link", "nothing"]
"""Where an operator's seconds come from: its call was measured, in a *profile*; it is a *roofline*, of the arithmetic
that a user has *registered* or of graphir's formulas; what it moves crosses a *link*; or no kernel runs: *nothing* but
the call of a view."""

_DTYPE: Final = "f32"
"""The element type whose rate holds for what has none of its own."""


class Work(NamedTuple):
    """What one operator does.

    Attributes:
        flops: additions and multiplications of matrix products, convolutions and registered operators that say theirs;
            0 for every other type.
        nbytes: bytes of the operands that it reads and the results that it writes; 0 for views.
        dtype: the element type that it computes in; ``f32`` where it is not known.
    """

    flops: int
    nbytes: int
    dtype: str = _DTYPE


class Rates(NamedTuple):
    """How fast a device works.

    Attributes:
        flops_per_second: of large matrix products, by element type; the figure of ``f32`` holds for others.
        bytes_per_second: of large elementwise operators.
        seconds_per_call: what calling an operator takes, however small it is.
        seconds_per_view: what calling one takes that makes nothing but views.
    """

    flops_per_second: Mapping[str, float]
    bytes_per_second: float
    seconds_per_call: float
    seconds_per_view: float = 0.0

    def seconds(self, work: Work) -> float:
        """How long an operator with this work takes."""
        rates = self.flops_per_second
        arithmetic = work.flops / (rates[work.dtype] if work.dtype in rates else rates[_DTYPE]) if work.flops else 0.0
        return self.seconds_per_call + max(arithmetic, work.nbytes / self.bytes_per_second)


class Cost(NamedTuple):
    """What one instruction of an operator takes: the operator itself, or a part of a collective.

    Attributes:
        seconds: beside nothing else.
        source: where they come from.
        slowdown: how many times as long it takes beside the same one in another thread of a host; None: as long as
            whatever the host has.
        launches: how many kernels it was seen to launch on a card; None where that was not measured.
        issue: seconds that a host thread took to issue it to a card; None where that was not measured.
    """

    seconds: float
    source: CostSource
    slowdown: float | None = None
    launches: int | None = None
    issue: float | None = None


NOMINAL: Final = Rates({_DTYPE: 5e10}, bytes_per_second=1e10, seconds_per_call=2e-6, seconds_per_view=5e-7)
"""Of one core, where nothing was measured. Orders are found by proportions: costs that are off by a third make a
schedule longer by a percent."""


def work(op: Operator, net: Net, dims: Dims) -> Work:
    """The work of an operator of *net* at these sizes. What has no shape counts nothing."""
    return _work(op, net.blobs, dims, {}) if _computes(op) else Work(0, 0)


def works(net: Net, dims: Dims, kinds: Kinds) -> list[Work]:
    """The work of each operator, in the net's order; *kinds* says which operators are alike."""
    sizes: dict[str, int] = {}
    found: list[Work] = []
    for i, (op, first) in enumerate(zip(net.ops, kinds, strict=True)):
        if first != i:
            found.append(found[first])
        else:
            found.append(_work(op, net.blobs, dims, sizes) if _computes(op) else Work(0, 0))
    return found


def _computes(op: Operator) -> bool:
    return not op.outputs or is_called(op)


def _work(op: Operator, blobs: Mapping[str, Blob], dims: Dims, sizes: dict[str, int]) -> Work:
    """The work of an operator; *sizes* keeps the bytes of blobs from one to the next."""
    nbytes = 0
    for name in op.outputs if operator_type(op.type).reads_rows else (*op.outputs, *op.inputs):
        size = sizes.get(name)
        if size is None:
            size = sizes[name] = dense_nbytes(blobs[name], dims)
        nbytes += size
    formula = flops_of(op.type)
    if formula is None:
        return Work(0, nbytes)
    try:
        flops = formula(SizedOperator(op, blobs, dims, 1))
    except UnknownShape:
        return Work(0, nbytes)
    return Work(flops, nbytes, blobs[op.outputs[0]].dtype or _DTYPE if op.outputs else _DTYPE)


def operator_costs(
    net: Net,
    dims: Dims,
    rates: Callable[[Device], Rates],
    profile: Profile | None = None,
    threads: int = 1,
    done: Sequence[Work] | None = None,
) -> list[Cost]:
    """What one instruction of each operator takes, in the net's order.

    Copies take what their bytes take in the memory that they are written to: what lies between two devices is known of
    a :class:`~.topology.Topology`. A part of a collective reads all that the collective reads, and makes one of its
    results, in one pass for each operand after the first.

    Args:
        net: whose operators.
        dims: the value of each dimension.
        rates: how fast a device works.
        profile: what was measured of calls, which goes before what shapes say.
        threads: how many threads one kernel uses, as the profile has it.
        done: the operators' works, where a caller has them.
    """
    found: list[Cost] = []
    sizes: dict[str, int] = {}
    of_device: dict[Device, Rates] = {}
    for i, op in enumerate(net.ops):
        speed = of_device.get(op.device)
        if speed is None:
            speed = of_device[op.device] = rates(op.device)
        if not (done is not None and done[i].nbytes) and not _computes(op):
            found.append(Cost(speed.seconds_per_view, "nothing"))
            continue
        kind = issued_as(op)
        measured = None if profile is None or kind == "copy" else profile.find(op, net.blobs, dims, threads)
        if measured is not None:
            found.append(Cost(measured.seconds, "profile", measured.slowdown, measured.launches, measured.issue))
            continue
        made = _work(op, net.blobs, dims, sizes) if done is None else done[i]
        if kind == "collective":
            made = made._replace(nbytes=_reduced(op, made.nbytes // 2 // len(op.inputs)))
        own = operator_type(op.type).registered and made.flops
        found.append(Cost(speed.seconds(made), "registered" if own else "roofline"))
    return found


def seconds_alike(
    net: Net, dims: Dims, kinds: Kinds, rates: Rates | Callable[[Device], Rates] = NOMINAL
) -> list[float]:
    """What one instruction of each operator takes, by shapes, in the net's order.

    Args:
        net: whose operators.
        dims: the value of each dimension.
        kinds: which operators are alike.
        rates: how fast all devices work, or each.
    """
    keys: Sequence[Hashable] = kinds
    if not isinstance(rates, Rates):
        keys = [(first, op.device) for first, op in zip(kinds, net.ops, strict=True)]
    firsts: dict[Hashable, int] = {}
    for i, key in enumerate(keys):
        firsts.setdefault(key, i)
    some = net.with_(ops=tuple([net.ops[i] for i in firsts.values()]))
    costs = operator_costs(some, dims, (lambda _: rates) if isinstance(rates, Rates) else rates)
    seconds = {key: cost.seconds for key, cost in zip(firsts, costs, strict=True)}
    return [seconds[key] for key in keys]


def _reduced(op: Operator, nbytes: int) -> int:
    """The bytes that a part of a reduction reads and writes, of operands of so many: two are added into a sum, further
    ones to it, and a mean divides it."""
    return 3 * nbytes * max(len(op.inputs) - 1, 1) + 2 * nbytes * (op.args.get("reduction") == "mean")
