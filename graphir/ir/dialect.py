"""Dialects: what the names and operators of a net mean, by the net's origin.

Captured programs speak torch's dialect, imported ones Caffe2's (:mod:`graphir.caffe2.dialect`). Whoever has to know the
difference asks ``net.dialect``. :class:`Dialect` gives torch's answers; another dialect has tables of its own, and
overrides methods. A dialect registers itself under its name: ``graphir.ir`` imports nothing that stands above it.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final, NamedTuple

from ..errors import GraphirError, nearest
from .blob import Blob
from .device import Device
from .frozen import freeze, frozen
from .operator import Operator

__all__ = ["TORCH", "Dialect", "HostOperands", "dialect_called", "register_dialect"]


class HostOperands(NamedTuple):
    """The positions of operands that are in the host's memory whatever the operator's device; None: all of them."""

    inputs: tuple[int, ...] | None = ()
    outputs: tuple[int, ...] | None = ()


@dataclass(frozen=True, eq=False, repr=False)
class Dialect:
    """What operators and names of a net mean. Each dialect is one object; dialects compare by identity.

    Attributes:
        name: ``torch`` or ``caffe2``.
        workspace: nets of this dialect run in a workspace, as Caffe2's do. A name is a memory that outlives the net and
            holds tensors of one shape after the other. State may be fed into it. A net without external outputs leaves
            its unread blobs in the workspace.
        copies: types whose output has the value of their input.
        host: types that keep some operands on the host.
        stays: types whose operands stay where they live. An output that is not also an input lives where the input at
            its position lives.
        host_scalars: whether all other operators read and update 0-dim tensors on the host from any device.
        translation: the remedy, in errors, that turns operators of this dialect into operators that a session runs;
            empty if a session runs them as they are.
    """

    name: str
    workspace: bool = False
    copies: frozenset[str] = frozenset({"Copy"})
    host: Mapping[str, HostOperands] = field(default_factory=dict)
    stays: frozenset[str] = frozenset({"AllReduce"})
    host_scalars: bool = True
    translation: str = ""

    def __post_init__(self) -> None:
        freeze(self, host=frozen)

    @cached_property
    def elsewhere(self) -> frozenset[str]:
        """Types whose operands may be on other devices than the operator."""
        return self.stays.union(self.host, {"Copy"})

    def without(self, types: Container[str]) -> Dialect:
        """This dialect, with all operands of these types on the operator's own device."""
        host = {type: kept for type, kept in self.host.items() if type not in types}
        return replace(self, host=host, stays=frozenset([type for type in self.stays if type not in types]))

    def copy(self, source: Blob, target: Blob) -> tuple[str, Device]:
        """The type of the operator that copies between two blobs, and the device that it runs on.

        Raises:
            GraphirError: no operator copies between their devices.
        """
        return "Copy", target.device

    def copies_from(self, memory: Device, device: Device) -> bool:
        """Whether a ``Copy`` on *device* can read *memory*."""
        return True

    def mentions(self, op: Operator) -> tuple[str, ...]:
        """The blobs that an operator names beside its operands: those that it waits for, and those of :meth:`nested`.
        Some of the names may not be blobs."""
        return ()

    def nested(self, op: Operator) -> tuple[str, ...]:
        """The blobs that nets in an operator's arguments may read or write."""
        return ()

    def meaning(self, op: Operator) -> str:
        """The part of an operator's computation that its type, arguments and operands leave open, as text. Equal
        meanings have equal texts."""
        return ""

    def is_ordered(self, op: Operator) -> bool:
        """Whether an operator's results depend on earlier calls: the operator takes from, or adds to, something that
        no blob holds."""
        return False

    def in_place(self, op: Operator) -> tuple[tuple[int, int], ...]:
        """The (input, output) positions that may be one name. Empty for torch, whose in-place operators are types of
        their own."""
        return ()

    def is_alias(self, op: Operator) -> bool:
        """Whether outputs are the memory of inputs under other names, though the operator's effects do not say so."""
        return False

    def is_gradient(self, name: str) -> bool:
        """Whether a blob is a gradient by its name alone."""
        return False

    def infers(self, type: str) -> bool:
        """Whether the results of operators of *type* are known, so that the net's declarations are compared to them."""
        return True

    def __reduce__(self) -> tuple[object, ...]:
        return dialect_called, (self.name,)

    def __repr__(self) -> str:
        return f"<dialect {self.name}>"


_DIALECTS: Final[dict[str, Dialect]] = {}


def register_dialect(dialect: Dialect) -> Dialect:
    """Make a dialect known by its name."""
    return _DIALECTS.setdefault(dialect.name, dialect)


def dialect_called(name: str) -> Dialect:
    """The dialect with that name.

    Raises:
        GraphirError: there is none.
    """
    if name not in _DIALECTS:
        known = ", ".join(_DIALECTS)
        raise GraphirError(f"unknown dialect {name!r}{nearest(name, _DIALECTS)}", fix=f"dialects: {known}")
    return _DIALECTS[name]


TORCH: Final = register_dialect(Dialect("torch"))
