"""A sweep over a net in which storages get substitutes: from some operator on, others are read in their place.

What reads a storage reads its substitute, what overwrites it overwrites the substitute. Views that were made of the
storage are made again of the substitute where somebody reads them; views that are made from then on show the
substitute::

    x_t = aten.t(x)                        x_t   = aten.t(x)
    …                          ──▶         y     = …                      the substitute of x
                                           y_t   = aten.t(y)
    z = aten.mm(a, x_t)                    z     = aten.mm(a, y_t)
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

from graphir.ir.blob import Blob, Role
from graphir.ir.device import Device
from graphir.ir.names import fresh
from graphir.ir.net import Net
from graphir.ir.operator import Operator, Phase, stored_versions

__all__ = ["Substitutes", "with_operands"]


class Substitutes:
    """One sweep.

    Args:
        net: the net.
        by: the pass.
        suffix: what the names of views end in that are made again.
        taken: names that no new blob may have, beside the net's own.

    Attributes:
        blobs, ops: of the net so far.
        held: of each storage that has one at this point, the substitute.
        now: the version of each storage of the net that was overwritten so far; 0 of others.
        since: of each storage with a substitute, the version for which the first one of the substitute stands.
        shown: of each substitute, the views of it, by the names of those that they stand for.
    """

    def __init__(self, net: Net, by: str, suffix: str, taken: Container[str] = ()) -> None:
        self.net, self.by, self.suffix, self.taken = net, by, suffix, taken
        self.blobs = dict(net.blobs)
        self.ops: list[Operator] = []
        self.held: dict[str, str] = {}
        self.now: dict[str, int] = {}
        self.since: dict[str, int] = {}
        self.shown: dict[str, dict[str, str]] = {}
        self.makers = {name: op for op in net.ops if op.effects.views for name in op.outputs}

    def put(self, storage: str, substitute: str) -> None:
        """From here on, *substitute*, which has its present value, stands for a storage."""
        self.held[storage], self.since[storage] = substitute, self.now.get(storage, 0)

    def drop(self, storage: str) -> None:
        """From here on, the storage stands for itself again."""
        del self.held[storage], self.since[storage]

    def substitute(self, storage: str, reader: Device) -> str | None:
        """What stands for a storage at this point for an operator on a device; None: the storage itself."""
        return self.held.get(storage)

    def declare(self, blob: Blob, base: str, device: Device, role: Role = "temporary") -> str:
        """A new blob with the geometry of one that owns its storage."""
        name = self.free(base)
        self.blobs[name] = blob._replace(name=name, device=device, role=role, storage=name)
        return name

    def free(self, base: str) -> str:
        """A name that no blob has."""
        name = fresh(base, self.blobs)
        while name in self.taken:
            name = fresh(f"{name}_1", self.blobs)
        return name

    def append(self, op: Operator) -> None:
        """Append an operator of the net, with substitutes for what it touches."""
        if not self.touches((*op.inputs, *op.outputs)):
            self.ops.append(op)
            return
        reads = [self.read(*read, op.device, op.phase) for read in op.reads]
        views, makes = op.effects.viewing, list(op.makes)
        for position, (name, version) in enumerate(op.makes):
            storage = self.net.blobs[name].storage
            held = self.substitute(storage, op.device)
            if position in views:
                if held is not None:
                    self.blobs[name] = self.view(name, name, held)
                    self.shown.setdefault(held, {})[name] = name
                continue
            if held is not None:
                makes[position] = held, version - self.since.get(storage, 0)
            self.now[storage] = version
        self.ops.append(with_operands(op, reads, makes))

    def touches(self, names: Iterable[str]) -> bool:
        """Whether some of these blobs lie in storages that have substitutes."""
        blobs, held = self.net.blobs, self.held
        return any(blobs[name].storage in held for name in names)

    def read(self, name: str, version: int, reader: Device, phase: Phase) -> tuple[str, int]:
        """The blob and version by which an operator of *phase* on a device reads a blob of the net at this point."""
        storage = self.net.blobs[name].storage
        held = self.substitute(storage, reader)
        if held is None:
            return name, version
        if name == storage:
            return held, version - self.since.get(storage, 0)
        shown = self.shown.setdefault(held, {})
        if name not in shown:
            self.show(self.makers[name], held, reader, phase)
        return shown[name], 0

    def show(self, maker: Operator, held: str, reader: Device, phase: Phase) -> None:
        """Make views again, of the substitute, for an operator on a device."""
        reads = [self.read(*read, reader, phase) for read in maker.reads]
        device, makes = self.blobs[held].device, []
        for name in maker.outputs:
            again = self.free(name + self.suffix)
            self.blobs[again] = self.view(name, again, held)
            self.shown[held][name] = again
            makes.append((again, 0))
        self.ops.append(with_operands(maker, reads, makes)._replace(device=device, phase=phase, by=self.by))

    def view(self, name: str, called: str, held: str) -> Blob:
        """A view as it lies in a substitute."""
        shown = self.blobs[held]
        return self.net.blobs[name]._replace(name=called, storage=held, device=shown.device, role=shown.role)

    @property
    def result(self) -> Net:
        """The net that was made."""
        return self.net.with_(ops=tuple(self.ops), blobs=self.blobs)


def with_operands(op: Operator, reads: Sequence[tuple[str, int]], makes: Sequence[tuple[str, int]]) -> Operator:
    """An operator that reads and makes other blobs."""
    return op._replace(
        inputs=tuple([name for name, _ in reads]),
        outputs=tuple([name for name, _ in makes]),
        input_versions=stored_versions([version for _, version in reads]),
        output_versions=stored_versions([version for _, version in makes]),
    )
