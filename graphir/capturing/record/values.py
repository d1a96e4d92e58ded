"""The parts of a recording: values, the calls that make them, and the memory through which PyTorch sees them.

PyTorch's tensors are windows on memory that in-place operators overwrite. A program's values never change. So a
recording keeps memory and values apart::

    tensor ──Alias──▶ Store (memory, with a generation that every write raises)
                │
                └───▶ Value (what the window showed in one generation), made by a RecordedCall
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

import torch

from ...ir.geometry import geometry_of
from ...ir.operator import Arg, Phase

__all__ = ["UPDATE", "Alias", "RecordedCall", "Replay", "Store", "Value"]

Replay: TypeAlias = tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]]
"""An operator and its arguments, tensors included."""

UPDATE: Final = "update"
"""The type of a call that updates a parameter by a gradient: the program has the optimizer's operator in its place. The
call reads the parameter, then the gradient (the indices and the values of a sparse one), then what may tell it not to
update; it makes the parameter's next version."""


class Value:
    """One value of the program, before it has a name.

    Attributes:
        index: position in the order in which values are made; a value has the same index in every recording.
        tensor: a fake tensor of its geometry; after a write, still the tensor that showed the value.
        geometry: the geometry of ``tensor``.
        offset: distance of its first element from the first element of its root, in elements.
        root: the value whose storage holds the bytes: the base of a view, the first version of state, else itself.
        label: the operator's name as users know it, such as ``relu``; for inputs and state, the whole name.
        scope: path of the module that made it.
        claim: the name that it has as a module's output, such as ``layer1``; None if it is no output.
        kind: ``param``, ``buffer``, ``state``, ``constant``, ``input``; empty for an operator's result.
        version: for state, how often the blob was overwritten before.
        follows_input: whether it depends on an input of the step.
        known: whether it follows from sizes and literals alone, so that every step makes the same numbers.
        phase: the phase in which it was made.
        source: for a result of a backward operator, the forward value whose gradient the operator helps to compute.
        call: the call that made it; None for values from outside of the step.
        edge: the tensor or edge of autograd's graph where its gradient arrives; None if unknown.
        prefix: the part of its name that says the micro-batch.
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
        """Break reference cycles through this value, which only the garbage collector would free."""
        self.call = self.source = self.edge = None
        del self.root

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of its tensor."""
        return self.geometry.shape

    @property
    def strides(self) -> tuple[int, ...]:
        """The strides of its tensor."""
        return self.geometry.strides

    @property
    def dtype(self) -> torch.dtype:
        """The element type of its tensor."""
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
        outputs: the values made, by the pattern ``results``; then new versions of state that the operator overwrites
            but does not return.
        args: the other arguments, without defaults.
        line: the source line in the user's code, as in ``Operator.source``.
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
        """The parts of a call that are the same in every recording of a step: all but its sizes."""
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
        persistent: whether it outlives the step (parameters, buffers), so that writes to it are recorded as writes.
        shared: the name of another tensor whose real memory may overlap; empty if there is none.
        storage: torch's storage, kept alive, so that no other store gets its ``key``.
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
        tensor: the tensor, kept alive, so that no other tensor gets its ``id``.
        value: the value that the tensor showed in ``generation`` of ``store``.
        parent: the alias that it is a view of; None for the base.
        replay: makes the view again; None if it shows the same value as its parent.
        position: which result of ``replay`` it is.
        geometry: the tensor's geometry, as operators have left it.
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
        """Whether the tensor got other memory or another geometry without an operator: ``x.data = …``."""
        tensor = self.tensor
        return tensor.untyped_storage()._cdata != self.store.key or geometry_of(tensor) != self.geometry

    @property
    def is_base(self) -> bool:
        """Whether the tensor covers all of the memory, in the base's own geometry."""
        base = self.store.base
        return self is base or self.geometry == base.geometry
