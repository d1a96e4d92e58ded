"""Operators, which read and write blobs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, TypeAlias, TypeVar, cast, get_args

from pydantic import NonNegativeInt

from .device import Device
from .dtype import TORCH_NAME
from .size import Dims, Polynomial, bind

__all__ = [
    "ISSUES",
    "PHASES",
    "PURE",
    "RECEIVED",
    "SYMBOLS",
    "Arg",
    "Effects",
    "Group",
    "Issue",
    "Operator",
    "OperatorKind",
    "Phase",
    "Received",
    "Symbol",
    "bind_arg",
    "flattened",
    "groups",
    "leaves",
    "map_arg",
    "origin_of",
    "participants",
    "positions",
    "stored_versions",
]

_T = TypeVar("_T")

Phase: TypeAlias = Literal["init", "forward", "backward", "reduce", "update"]
PHASES: Final[tuple[str, ...]] = get_args(Phase)

Issue: TypeAlias = Literal["", "placed", "due"]
ISSUES: Final[tuple[str, ...]] = get_args(Issue)
OperatorKind: TypeAlias = Literal["", "copy", "reduce"]
_KINDS: Final[Mapping[str, OperatorKind]] = {"Copy": "copy", "AllReduce": "reduce"}
Received: TypeAlias = Literal["", "fresh"]
RECEIVED: Final[tuple[str, ...]] = get_args(Received)


class Symbol(str):
    """An argument that names one of torch's constants: an element type, a layout or a memory format."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


SYMBOLS: Final = frozenset(TORCH_NAME) | {
    "contiguous_format",
    "preserve_format",
    "channels_last",
    "channels_last_3d",
    "strided",
}
"""Every text that a :class:`Symbol` may have."""

Arg: TypeAlias = "int | float | bool | str | Polynomial | Symbol | tuple[Arg, ...] | None"
"""A non-tensor argument. Lists are tuples; a string that is a :class:`Symbol` stands for a torch constant."""


Pairs: TypeAlias = tuple[tuple[NonNegativeInt, NonNegativeInt], ...]
"""Pairs of positions: an output, and the input that the output overwrites or shows."""


class Effects(NamedTuple):
    """What an operator does beside computing fresh values.

    Attributes:
        writes: (output, input) positions: that output is the input's storage with a new value.
        views: (output, input) positions: that output is a view of the input's storage.
        random: it draws random numbers.
    """

    writes: Pairs = ()
    views: Pairs = ()
    random: bool = False

    @property
    def viewing(self) -> frozenset[int]:
        """The positions of the outputs that are views."""
        return frozenset([output for output, _ in self.views])

    @property
    def shows(self) -> bool:
        """Whether these are the effects of a view operator, which runs where the storage that it shows is."""
        return bool(self.views) and not self.writes


PURE: Final = Effects()


class Operator(NamedTuple):
    """One operator of a net. Values are immutable; ``op._replace(device=…)`` makes a changed one.

    Attributes:
        type: ``aten.convolution.default``, ``graphir.sgd``, ``Copy``, ``AllReduce``, ``FC``, …
        inputs: names of the blobs read, in the order of the type's tensor parameters.
        outputs: names of the blobs written: one for each tensor that the type returns, then one for each operand
            that it overwrites and does not return.
        args: the non-tensor arguments by the type's parameter names, without those that equal its defaults. Read-only
            in a net.
        device: where it runs.
        phase: init, forward, backward, reduce or update.
        module: path of the module that it came from.
        by: name of the pass that made, moved or changed it last; empty as captured. It is for people and decides
            nothing.
        seed: the seed id, if it draws random numbers.
        operands: how ``inputs`` fill the type's tensor parameters, see :func:`groups`; None: one each.
        results: how ``outputs`` fill what the type returns, in the same notation; None: one each.
        effects: aliases, mutations, randomness.
        input_versions: which version of each input is read; None: the first (0) of each.
        output_versions: which version of each output this makes; None: the first (0) of each.
        proto: the other fields of an operator from a Caffe2 net, as the text of an ``OperatorDef``. Only the net's
            dialect reads them.
        of: the blob of another operator that this one runs beside; empty where it has none. An operator that computes
            gradients names a result of the forward operator whose gradients these are. One that adds gradients up names
            the blob whose gradient the sum is. One that a checkpoint runs again names the result that it repeats.
            ``of`` says nothing about what is computed.
        issue: of a ``Copy``, when :func:`~graphir.passes.emit` issues it. ``placed``: alone, where it stands in the
            program, or earlier if ``ahead`` says so. ``due``: alone, where it stands and no earlier; storages that
            earlier ``due`` copies brought and that have left again are freed first. Empty: small copies are gathered
            until their first reader is near.
        received: of a ``Copy``, which memory it fills. ``fresh``: memory taken in each step and given back when the
            storage is freed. Empty: ``emit`` may give it a receive buffer, which is held from step to step.
        source: the line of a user's code that called it, or whose gradient it computes, such as ``models/net.py:42``.
            The line says nothing about what is computed: operators that differ only in ``source`` are equal, and texts
            leave it out.
    """

    type: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    args: Mapping[str, Arg]
    device: Device
    phase: Phase = "forward"
    module: str = ""
    by: str = ""
    seed: int | None = None
    operands: str | None = None
    results: str | None = None
    effects: Effects = PURE
    input_versions: tuple[int, ...] | None = None
    output_versions: tuple[int, ...] | None = None
    proto: str = ""
    of: str = ""
    issue: Issue = ""
    received: Received = ""
    source: str = ""

    # ``source`` is for people, as a location is in MLIR, and texts have none: a net equals the net read from its text.
    # An argument NaN equals a NaN, so that an operator equals the operator read from its text or file.

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Operator):
            return NotImplemented
        return self[:-1] == other[:-1] or self._equal_but_for_nan(other)

    def __ne__(self, other: object) -> bool:
        return not self == other if isinstance(other, Operator) else NotImplemented

    def _equal_but_for_nan(self, other: Operator) -> bool:
        """Whether both are equal once every NaN is one object, which Python compares by identity."""
        ours, theirs = self.args, other.args
        if self[:3] != other[:3] or self[4:-1] != other[4:-1] or ours.keys() != theirs.keys():
            return False
        return all(_without_nan(arg) == _without_nan(theirs[name]) for name, arg in ours.items())

    def on(self, device: Device, by: str) -> Operator:
        """This operator moved to *device* by a pass, at half the cost of ``_replace``, for passes over large nets."""
        return Operator._make(self[:4] + (device, self[5], self[6], by) + self[8:])  # noqa: RUF005  # half as long

    @property
    def kind(self) -> OperatorKind:
        """``copy`` for a ``Copy``, ``reduce`` for an ``AllReduce``; empty for all other types."""
        return _KINDS.get(self.type, "")

    @property
    def reads(self) -> Iterator[tuple[str, int]]:
        """(name, version) of each input."""
        versions = self.input_versions
        return zip(self.inputs, versions if versions else (0,) * len(self.inputs), strict=True)

    @property
    def makes(self) -> Iterator[tuple[str, int]]:
        """(name, version) of each output."""
        versions = self.output_versions
        return zip(self.outputs, versions if versions else (0,) * len(self.outputs), strict=True)


_NAN: Final = object()


def _without_nan(arg: Arg) -> Any:
    """An argument with one object in the place of every NaN."""
    return map_arg(arg, lambda scalar: _NAN if scalar.__class__ is float and scalar != scalar else scalar)


def origin_of(op: Operator) -> list[str]:
    """Where an operator came from, as errors say it: its module and its source line, as far as they are known."""
    module = [f"module {op.module!r}"] if op.module else []
    return [*module, f"line {op.source}"] if op.source else module


def stored_versions(versions: Sequence[int]) -> tuple[int, ...] | None:
    """Versions as an operator holds them: None where all are the first."""
    return tuple(versions) if any(versions) else None


Group: TypeAlias = "int | list[int | None] | None"
"""One place of a pattern: the position of a tensor, a list of positions, or None. None stands for an absent tensor, in
a list too."""


def groups(pattern: str | None, count: int) -> list[Group]:
    """Arrange the positions ``0 … count-1`` by a pattern: ``t`` takes the next, ``_`` is absent, ``[…]`` a list.

    ``groups("t_[t_]", 2)`` is ``[0, None, [1, None]]``. Without a pattern each position stands alone. Positions beyond
    the pattern (operands that an operator overwrites and does not return) are left out.
    """
    if pattern is None:
        return list(range(count))
    position = 0
    arranged: list[Group] = []
    inner: list[int | None] | None = None
    for char in pattern:
        if char == "[":
            inner = []
            arranged.append(inner)
        elif char == "]":
            inner = None
        else:
            item = None
            if char == "t":
                item, position = position, position + 1
            if inner is None:
                arranged.append(item)
            else:
                inner.append(item)
    return arranged


def flattened(operands: Iterable[_T | Sequence[_T | None] | None], one: type[_T]) -> tuple[list[_T], str]:
    """The operands in a row, and the pattern by which they fill parameters: the inverse of :func:`groups`.

    Args:
        operands: for each parameter one operand, a list of operands, or None.
        one: the type of an operand.
    """
    flat: list[_T] = []
    pattern = ""
    for operand in operands:
        if operand is None:
            pattern += "_"
        elif isinstance(operand, one):
            flat.append(operand)
            pattern += "t"
        else:
            items = cast("Sequence[_T | None]", operand)
            flat += [item for item in items if item is not None]
            pattern += f"[{''.join(['_' if item is None else 't' for item in items])}]"
    return flat, pattern.rstrip("_")


def positions(group: Group) -> list[int]:
    """The positions at one place of a pattern."""
    return [i for i in (group if isinstance(group, list) else [group]) if i is not None]


def participants(op: Operator) -> Sequence[int]:
    """For each result of a collective, the participant that gets it. Some participants may get none (``[t_]``)."""
    if op.results is None or "_" not in op.results:
        return range(len(op.outputs))
    for group in groups(op.results, len(op.outputs)):
        if isinstance(group, list):
            return [participant for participant, result in enumerate(group) if result is not None]
    return range(len(op.outputs))


def map_arg(arg: Any, of: Callable[[Any], Any], together: Callable[[list[Any]], Any] = tuple) -> Any:
    """An argument with *of* applied to each of its scalars; the results of a list are put *together* again.

    Args:
        arg: an argument.
        of: called with each scalar, depth first. A size is a scalar.
        together: what a list becomes, from what its items became.
    """
    if arg.__class__ is tuple:  # False for a polynomial, a subclass of tuple
        return together([map_arg(item, of, together) for item in arg])
    return of(arg)


def bind_arg(arg: Arg, dims: Dims) -> Any:
    """*arg* with every size bound.

    Raises:
        GraphirError: a dimension has no value.
    """
    if arg.__class__ is tuple:
        return map_arg(arg, lambda scalar: bind(scalar, dims) if scalar.__class__ is Polynomial else scalar)
    return bind(arg, dims) if isinstance(arg, Polynomial) else arg


def leaves(arg: Arg) -> list[Arg]:
    """The scalars of an argument, depth first."""
    found: list[Arg] = []
    map_arg(arg, found.append)
    return found
