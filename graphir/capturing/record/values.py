"""What a recording is made of: values, the calls that make them, and the memory through which PyTorch sees them.

PyTorch's tensors are windows on memory that in-place operators overwrite; a program's values never change. So a
recording keeps two things apart::

    tensor ──Alias──▶ Store (memory, with a generation that every write raises)
                │
                └───▶ Value (what the window showed in one generation), made by a RecordedCall
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch

from ...ir.geometry import geometry_of
from ...ir.operator import Arg, Phase

__all__ = ["Alias", "RecordedCall", "Replay", "Store", "Value"]

Replay: TypeAlias = tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]]
"""An operator and its arguments, tensors included."""


class Value:
    """One value of the program, before it has a name.

    Attributes:
        index: position in the order of making; equal values of two recordings have equal indices.
        tensor: a fake tensor of its geometry; of an overwritten tensor, the one that held it.
        geometry: of that tensor.
        offset: elements from the first of its root to its own first.
        root: the value whose storage holds the bytes; itself unless this is a view.
        label: the operator's name as users know it, such as ``relu``; the whole name for inputs and state.
        scope: path of the module that made it.
        claim: path of the module whose output it is, if any.
        kind: ``param``, ``buffer``, ``state``, ``constant``, ``input``, or empty for what an operator made.
        version: how often the blob was overwritten before, for state.
        follows_input: whether it depends on an input of the step.
        known: it follows from sizes and literals alone, so that every step makes the same.
        phase: in which it was made.
        source: the forward value whose gradient was being computed when a backward operator made this one.
        call: the call that made it.
        edge: where its gradient arrives, once the tensor that held it was overwritten.
        prefix: of its name: of the micro-batch that it belongs to.
    """

    __slots__ = (
        "call",
        "claim",
        "edge",
        "follows_input",
        "geometry",
        "index",
        "kind",
        "known",
        "label",
        "offset",
        "phase",
        "prefix",
        "root",
        "scope",
        "source",
        "tensor",
        "version",
    )

    def __init__(self, index: int, tensor: torch.Tensor, label: str, scope: str, phase: Phase) -> None:
        self.index, self.tensor, self.geometry = index, tensor, geometry_of(tensor)
        self.offset = 0
        self.root = self
        self.label, self.scope, self.phase = label, scope, phase
        self.claim: str | None = None
        self.kind = ""
        self.version = 0
        self.follows_input = False
        self.known = False
        self.source: Value | None = None
        self.call: RecordedCall | None = None
        self.edge: Any = None
        self.prefix = ""

    def release(self) -> None:
        """Forget what refers to this value in turn: the collector would have to find it."""
        self.call = self.source = self.edge = None
        del self.root

    @property
    def shape(self) -> tuple[int, ...]:
        """Of its tensor."""
        return self.geometry.shape

    @property
    def strides(self) -> tuple[int, ...]:
        """Of its tensor."""
        return self.geometry.strides

    @property
    def dtype(self) -> torch.dtype:
        """Of its tensor."""
        return self.geometry.dtype

    @property
    def is_view(self) -> bool:
        """Whether another value's storage holds the bytes."""
        return self.root is not self and self.version == 0


class RecordedCall:
    """One recorded operator.

    Attributes:
        type: such as ``aten.addmm.default``.
        inputs: the values read, by the pattern ``operands``.
        outputs: the values made, by the pattern ``results``; then those overwritten without being returned.
        args: the other arguments, without defaults.
        line: of the user's code, as in ``Operator.source``.
        of: the forward value that the call belongs to, as in ``Operator.of``.
    """

    __slots__ = ("args", "inputs", "line", "of", "operands", "outputs", "phase", "results", "scope", "seed", "type")

    def __init__(
        self,
        type: str,
        inputs: tuple[Value, ...],
        operands: str | None,
        args: Mapping[str, Arg],
        scope: str,
        phase: Phase,
        seed: int | None = None,
        line: str = "",
    ) -> None:
        self.type, self.inputs, self.operands, self.args = type, inputs, operands, args
        self.outputs: tuple[Value, ...] = ()
        self.results: str | None = None
        self.scope, self.phase, self.seed, self.line = scope, phase, seed, line
        self.of: Value | None = None

    @property
    def pattern(self) -> tuple[object, ...]:
        """All but its sizes: what has to be the same in every recording of a step."""
        return (
            self.type,
            self.operands,
            self.results,
            self.seed,
            [v.index for v in self.inputs],
            [(v.index, v.root.index, v.dtype) for v in self.outputs],
            list(self.args),
        )


class Store:
    """Memory that one or several tensors look at.

    Attributes:
        base: the alias that covers all of it.
        generation: raised by every write.
        persistent: it outlives the step (parameters, buffers), so that writes to it are kept as writes.
        shared: the name of another tensor that may have some of the same memory, outside of the recording.
        storage: torch's, kept alive, so that its ``key`` stays its own.
    """

    __slots__ = ("base", "generation", "key", "persistent", "shared", "storage")

    def __init__(self, storage: torch.UntypedStorage, persistent: bool, shared: str = "") -> None:
        self.base: Alias
        self.storage, self.key = storage, int(storage._cdata)
        self.generation = 0
        self.persistent, self.shared = persistent, shared


class Alias:
    """A tensor, the memory it looks at, and the value it showed last.

    Attributes:
        tensor: kept alive, so that its ``id`` stays its own.
        value: what it showed in ``generation`` of ``store``.
        parent: the alias that it is a view of.
        replay: makes the view again; None where it shows all that its parent shows.
        position: which result of ``replay`` it is.
        geometry: the tensor's, as operators have left it.
    """

    __slots__ = ("generation", "geometry", "parent", "position", "replay", "store", "tensor", "value")

    def __init__(self, tensor: torch.Tensor, value: Value, store: Store) -> None:
        self.tensor, self.value, self.store = tensor, value, store
        self.geometry = value.geometry if value.tensor is tensor else geometry_of(tensor)
        self.generation = store.generation
        self.parent: Alias | None = None
        self.replay: Replay | None = None
        self.position = 0

    @property
    def is_exchanged(self) -> bool:
        """Whether the tensor was given other memory, or another geometry, without an operator: ``x.data = …``."""
        tensor = self.tensor
        return tensor.untyped_storage()._cdata != self.store.key or geometry_of(tensor) != self.geometry

    @property
    def is_base(self) -> bool:
        """Whether it covers all of the memory, in the base's own geometry."""
        base = self.store.base
        return self is base or self.geometry == base.geometry
