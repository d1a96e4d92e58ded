"""Nets: ordered operators over named blobs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields, replace
from functools import cached_property
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol, TypeVar

from ..errors import GraphirError, nearest
from .blob import Blob
from .device import Device
from .dialect import TORCH, Dialect
from .frozen import FrozenDict, freeze, frozen
from .operator import Operator
from .touches import Touches

if TYPE_CHECKING:
    import networkx

__all__ = ["Net", "replaced"]


class _Named(Protocol):
    """A net, a program or a plan: a dataclass with a name."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def name(self) -> str: ...


T = TypeVar("T", bound=_Named)

_ARGS: Final = itemgetter(Operator._fields.index("args"))


@dataclass(frozen=True, repr=False)
class Net:
    """An ordered list of operators over named blobs.

    A name may have several *versions*: version k is the k-th value of the name, counted from 0. External inputs have
    version 0 before the first operator. Operators say which versions they read and make; ``verify`` compares the
    versions with the order of the operators.

    Attributes:
        name: of the net, without a prefix.
        ops: in program order.
        blobs: by name, in the order of declaration: external inputs first, then as operators make them.
        external_inputs: blobs that hold a value before the first operator: parameters, state, constants, inputs.
        external_outputs: blobs whose last value is handed back: losses, outputs, and gradients without an optimizer.
        gradients: each activation's gradient blob. One gradient may serve several activations.
        dialect: what its operators and names mean: torch's, or Caffe2's.
        proto: the other fields of a net from Caffe2, as the text of a ``NetDef``, kept to be written back.
    """

    name: str
    ops: tuple[Operator, ...]
    blobs: Mapping[str, Blob]
    external_inputs: tuple[str, ...] = ()
    external_outputs: tuple[str, ...] = ()
    gradients: Mapping[str, str] = field(default_factory=dict)
    dialect: Dialect = TORCH
    proto: str = ""

    def __post_init__(self) -> None:
        freeze(self, blobs=frozen, gradients=frozen, ops=_frozen_args)

    def with_(self, **changes: Any) -> Net:  # dataclasses.replace has this signature
        """This net with some attributes replaced."""
        return replaced(self, changes)

    @cached_property
    def _producers(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for i, op in enumerate(self.ops):
            for name in op.outputs:
                found.setdefault(name, []).append(i)
        return found

    @cached_property
    def _consumers(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for i, op in enumerate(self.ops):
            for name in dict.fromkeys(op.inputs):
                found.setdefault(name, []).append(i)
        return found

    @cached_property
    def read(self) -> Mapping[str, None]:
        """The names of the blobs that some operator reads, in the order of their first reads.

        A dict, not a set: a sweep in program order looks names up in about the order in which they were inserted, so
        that each entry lies near the one before it. A sweep over a million operators takes as long as its cache misses.
        """
        return FrozenDict(dict.fromkeys(chain.from_iterable([op.inputs for op in self.ops])))

    @cached_property
    def touches(self) -> Touches:
        """Which operator touches which blob, as arrays."""
        return Touches(self.ops, self.blobs)

    @cached_property
    def unread(self) -> tuple[str, ...]:
        """The names of the blobs whose last value no operator reads: what the net leaves behind."""
        found: dict[str, None] = {}
        for op in self.ops:
            for name in op.inputs:
                found.pop(name, None)
            found.update(dict.fromkeys(op.outputs))
        return tuple(found)

    @property
    def results(self) -> tuple[str, ...]:
        """The names of the blobs that are handed back, or stay in the workspace for the next net."""
        return self.unread if self.dialect.workspace and not self.external_outputs else self.external_outputs

    def blob(self, name: str) -> Blob:
        """The blob called *name*.

        Raises:
            GraphirError: there is none; the error gives the nearest names.
        """
        try:
            return self.blobs[name]
        except KeyError:
            what = f"no blob {name!r} in net {self.name!r}{nearest(name, self.blobs)}"
            raise GraphirError(what, fix="net.blobs has them all") from None

    def producer(self, blob: str, before: int | None = None) -> Operator | None:
        """The last operator that writes *blob*, or the last one before position *before*; None if no operator does.

        Raises:
            GraphirError: there is no such blob.
        """
        self.blob(blob)
        writers = self._producers.get(blob, ())
        for i in reversed(writers):
            if before is None or i < before:
                return self.ops[i]
        return None

    def consumers(self, blob: str) -> list[Operator]:
        """The operators that read *blob*, in program order.

        Raises:
            GraphirError: there is no such blob.
        """
        self.blob(blob)
        return [self.ops[i] for i in self._consumers.get(blob, ())]

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """Every device that an operator or a blob of the net is on: gpus by number, then the cpu."""
        found = {op.device for op in self.ops} | {blob.device for blob in self.blobs.values()}
        return tuple(sorted(found, key=Device.order))

    def to_networkx(self) -> networkx.DiGraph:
        """A bipartite graph of operators and values.

        Operator nodes are ``("op", position)`` with the attribute ``op``; value nodes are ``(name, version)`` with the
        attribute ``blob``. Edges follow the flow of data.
        """
        import networkx

        graph = networkx.DiGraph(name=self.name)
        for name in self.external_inputs:
            graph.add_node((name, 0), blob=self.blobs[name])
        for i, op in enumerate(self.ops):
            graph.add_node(("op", i), op=op)
            for name, version in op.reads:
                graph.add_node((name, version), blob=self.blobs[name])
                graph.add_edge((name, version), ("op", i))
            for name, version in op.makes:
                graph.add_node((name, version), blob=self.blobs[name])
                graph.add_edge(("op", i), (name, version))
        return graph

    def __getstate__(self) -> dict[str, Any]:
        """The fields alone: cached properties are computed again."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __hash__(self) -> int:
        return hash((self.name, len(self.ops), len(self.blobs), self.external_inputs, self.external_outputs))

    def __repr__(self) -> str:
        return f"<net {self.name!r}: {len(self.ops)} operators>"

    def __str__(self) -> str:
        from .text import canonical_text

        return canonical_text(self)


def _frozen_args(ops: tuple[Operator, ...]) -> tuple[Operator, ...]:
    """The operators, with read-only arguments. A net freezes them, not the operator when it is made: most operators of
    a pass share the arguments of an earlier operator, and each would be looked at again."""
    try:
        if set(map(type, map(_ARGS, ops))) <= {FrozenDict}:
            return ops
        return tuple([op if op[3].__class__ is FrozenDict else _frozen(op) for op in ops])
    except (TypeError, IndexError):  # these are not operators: verify says so
        return ops


def _frozen(op: Operator) -> Operator:
    return Operator._make((*op[:3], frozen(op[3]), *op[4:])) if op.__class__ is Operator else op


def replaced(value: T, changes: Mapping[str, Any]) -> T:
    """*value* with some attributes replaced.

    Raises:
        GraphirError: *value* has no such attribute.
    """
    known = [field.name for field in fields(value)]
    for name in changes:
        if name not in known:
            raise GraphirError(
                f"{type(value).__name__.lower()} {value.name!r} has no attribute {name!r}{nearest(name, known)}",
                fix=f"its attributes: {', '.join(known)}",
            )
    return replace(value, **changes)
