"""Where the values of a net are, operator by operator, and the copies that bring them to where they are needed.

A blob lives on one device, its *home*. A memory *holds* a name if it has the name's present value: home in the blob
itself, others in copies::

    x @gpu:0 = aten.rand()                    gpu:0 holds x, at home
    x_gpu_1 @gpu:1 = Copy(x)                  so does gpu:1
    x_gpu_1;1 @gpu:1 = aten.relu_(x_gpu_1)    only gpu:1 does: relu_ overwrites x, and does not run at home
    x_gpu_2 @gpu:2 = Copy(x_gpu_1;1)          so does gpu:2, for an operator there
    x;1 @gpu:0 = Copy(x_gpu_1;1)              so does home again, for an operator there or at the end of the net

A write leaves the name in one memory, so no copy goes stale; and nothing is copied that nobody reads.

A view that is read elsewhere crosses alone, as any blob does, or it is *replayed*: its storage crosses, and the view
operators run again on the copy. The sweep takes what sends fewer bytes, everything else that is read there of the
storage counted in. Views of the same elements cross as one (:mod:`.pieces`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property, partial

from graphir.errors import GraphirError, PassError
from graphir.ir.blob import Blob, bound_layout, dense_nbytes, is_dense, overlaps
from graphir.ir.device import CPU, Device
from graphir.ir.dialect import Dialect
from graphir.ir.frozen import EMPTY
from graphir.ir.names import copy_name
from graphir.ir.net import Net
from graphir.ir.operator import PURE, Operator, Phase, stored_versions
from graphir.ir.optypes.table import operator_type
from graphir.ir.placement import is_host_scalar, required_devices
from graphir.ir.size import Dims, Size, add, multiply
from graphir.ir.text import operator_text

from .pieces import Pieces

__all__ = ["Injection", "memory_of"]


_suffix = cache(partial(copy_name, ""))
"""What a copy's name has after its blob's, by memory."""


@cache
def memory_of(device: Device) -> Device:
    """The device that stands for a memory: the host is one, whatever its number."""
    return CPU if device.is_host else device


class Injection:
    """One sweep over a net.

    Args:
        net: the net, its blobs at home.
        by: the pass that puts the copies in.
        dims: the sizes at which a view is compared with its storage.
        dialect: that of the net, some of its rules left out perhaps.
        live: names whose values shall be at home at the end, beside the net's external inputs and results.
        taken: names that copies may not have, each with the memory in which one may have it after all, or None.
        present: the copies that earlier nets made of external inputs: by name, the memories that hold it from the
            beginning, and the blobs there.

    Attributes:
        blobs: every blob, copies included.
        ops: the operators so far, copies included.
        external: the external inputs, copies that earlier nets made included as far as they are read.
        present: by name and memory, the blob that holds it. A name that is not here is held at home alone.
        last: the last version so far of each blob in ``present``; -1 before the first.
        counted: names that an operator has made elsewhere than at home. The blob at home takes fewer versions than the
            net gave it, so the sweep counts them.
        away: names that home does not hold, each with the phase of the copy that will bring it home. The phase is
            *update* only if every value of the name since home held it was made in the update. Sessions tell by the
            phase which state replicas share.
        copies: in a workspace, by name and memory, the blob that copies of it are made to.
        replayed: by name and memory, the view of a copy of its storage.
    """

    def __init__(
        self,
        net: Net,
        by: str,
        dims: Dims,
        *,
        dialect: Dialect,
        live: Iterable[str] = (),
        taken: Mapping[str, Device | None],
        present: Mapping[str, dict[Device, str]],
    ) -> None:
        self.net, self.by, self.dims, self.dialect, self.taken = net, by, dims, dialect, taken
        self.blobs = dict(net.blobs)
        self.ops: list[Operator] = []
        self.external = list(net.external_inputs)
        self.present = dict(present)
        self.last = {blob: 0 for held in present.values() for blob in held.values()}
        self.counted: set[str] = set()
        self.away: dict[str, Phase] = {}
        self.copies = {(name, memory): blob for name, held in present.items() for memory, blob in held.items()}
        self.replayed: dict[tuple[str, Device], str] = {}
        self.run()
        self.bring_home(live)

    def run(self) -> None:
        """Append every operator, with copies before it of what it needs from elsewhere.

        Nearly all operators have every operand at home and on their own device. A look-up of each operand tells this at
        a fraction of the cost of :meth:`place`.
        """
        blobs, present, counted, append = self.blobs, self.present, self.counted, self.ops.append
        host, mentions, workspace = self.dialect.host, self.dialect.mentions, self.dialect.workspace
        for op in self.net.ops:
            operands, device = op.inputs, op.device
            if workspace:  # a captured operator makes what lives on its device, or overwrites an operand
                if present and mentions(op):
                    self.settle(op)
                if op.kind == "copy" and not counted and self.copied_from(op) is blobs[operands[0]].device:
                    operands = op.outputs
                elif op.type in host:
                    self.place(op)
                    continue
                else:
                    operands += op.outputs
            if not counted or counted.isdisjoint(operands):
                for name in operands:
                    if blobs[name].device is not device:
                        break
                else:
                    if op.output_versions is not None:
                        for name in op.outputs:
                            present.pop(name, None)
                    append(op)
                    continue
            self.place(op)

    def place(self, op: Operator) -> None:
        """Append an operator of which some operand may be elsewhere."""
        needed = made = None
        if op.kind == "copy":
            needed = [self.copied_from(op)]
        elif op.type in self.dialect.elsewhere:
            needed, made = required_devices(op, self.blobs, self.dialect)
        inputs, reads, effects = op.inputs, op.input_versions, op.effects
        for i, blob, version, memory in self.away_from(op.device, inputs, reads, needed):
            inputs, reads = _replaced(inputs, reads, i, *self.bring(op, blob, version, memory))
        outputs, makes = op.outputs, op.output_versions
        for output, source in effects.writes:
            if inputs[source] != op.inputs[source] != outputs[output]:
                raise PassError(
                    f"{op.type} writes {outputs[output]!r} over {op.inputs[source]!r}, which {op.device} has a copy of",
                    at=operator_text(op, self.net),
                    fix="shift before share_storage, which puts operators in place",
                )
        if makes or self.dialect.workspace:
            over = {output: inputs[source] for output, source in effects.writes}
            for name in outputs:
                self.present.pop(name, None)
            for i, blob, version, memory in self.away_from(op.device, outputs, makes, made):
                new = self.make(blob, version, memory, op.phase, over.get(i))
                outputs, makes = _replaced(outputs, makes, i, *new)
        if inputs is op.inputs and reads is op.input_versions and outputs is op.outputs and makes is op.output_versions:
            self.ops.append(op)
            return
        if effects.writes and self.dialect.workspace:  # it may read an operand in another memory than it writes it in
            kept = tuple([(output, source) for output, source in effects.writes if outputs[output] == inputs[source]])
            effects = effects if kept == effects.writes else effects._replace(writes=kept)
        parts = (op.type, inputs, outputs) + op[3:11] + (effects, reads, makes) + op[14:]  # noqa: RUF005  # fastest
        self.ops.append(Operator._make(parts))

    def away_from(
        self, device: Device, names: Sequence[str], versions: Sequence[int] | None, wanted: Sequence[Device] | None
    ) -> Iterator[tuple[int, Blob, int, Device]]:
        """The operands that have to be brought: position, blob, version, and the memory where each is *wanted*. Without
        *wanted* all are wanted on *device*, except host scalars, which are read and updated at home."""
        blobs, counted, scalars = self.blobs, self.counted, wanted is None and self.dialect.host_scalars
        for i, name in enumerate(names):
            blob, at = blobs[name], wanted[i] if wanted else device
            if blob.device is at and name not in counted:
                continue
            if blob.shape != () or not scalars or not is_host_scalar(blob):
                yield i, blob, versions[i] if versions else 0, memory_of(at)

    def copied_from(self, op: Operator) -> Device:
        """Where an explicit ``Copy`` reads: at home if that holds the name, else elsewhere, if it can read there."""
        if len(op.inputs) != 1 or len(op.outputs) != 1:
            raise PassError("a Copy has one input and one output", at=operator_text(op, self.net))
        name = op.inputs[0]
        home, can_read = self.blobs[name].device, self.dialect.copies_from
        if name not in self.away and can_read(home, op.device):
            return home
        return next((memory for memory in self.present.get(name, ()) if can_read(memory, op.device)), op.device)

    def settle(self, op: Operator) -> None:
        """Bring home what *op* names beside its operands. Nets in its arguments may also write it."""
        nested = self.dialect.nested(op)
        for name in self.dialect.mentions(op):
            if name in self.present:
                home = memory_of(self.blobs[name].device)
                self.hold(name, 0, home, op.phase)
                if name in nested:
                    self.present[name] = {home: name}

    def bring(self, op: Operator, blob: Blob, version: int, memory: Device) -> tuple[str, int]:
        """The blob and version by which *op* reads a blob in a memory."""
        is_plain = blob.storage == blob.name and blob.strides is None
        if not is_plain and memory is not memory_of(blob.device):
            if self.is_replayed(op, blob, version, memory):
                return self.replay(blob.name, version, memory, op.phase)
            piece = self.pieces.of(blob.name)
            if piece != blob.name and self.goes_alone(self.blobs[piece], 0):
                return self.replay(blob.name, version, memory, op.phase, piece)
        return self.hold(blob.name, version, memory, op.phase)

    def is_replayed(self, op: Operator, blob: Blob, version: int, memory: Device) -> bool:
        """Whether *op* reads a blob of another memory as a view of a copy of its storage.

        It does where the storage crosses anyway, where that has no more bytes, or where a copy of the view would not
        do: *op* may read beyond the elements of the view, or the view is a conjugate, which a copy would write out.
        """
        name, storage = blob.name, self.blobs[blob.storage]
        is_view = (name, version) in self.views
        known = operator_type(op.type)
        if not known.only_elements:
            if is_view and is_dense(storage):
                return True
            if is_dense(blob) and blob[1:3] == storage[1:3]:
                return False
            raise PassError(
                f"{op.type} may read beyond the elements of {name!r}, and a copy of it on {memory} holds nothing else",
                at=operator_text(op, self.net),
                fix=f"leave {op.type} on {storage.device}, where {storage.name!r} is"
                + (", or register it with only_elements=True, if it does not" if known.registered else ""),
            )
        if not is_view or memory in self.present.get(name, ()):
            return False
        if (name, memory) in self.replayed or (blob.storage, memory) in self.whole:
            return True
        return not self.goes_alone(blob, version)

    def goes_alone(self, view: Blob, version: int) -> bool:
        """Whether a view has fewer bytes than its storage, and can be laid out alone with its own strides."""
        if dense_nbytes(view, self.dims) >= dense_nbytes(self.blobs[view.storage], self.dims):
            return False
        return not (self.is_conjugate(view.name, version) or overlaps(*bound_layout(view, self.dims)))

    @cached_property
    def whole(self) -> set[tuple[str, Device]]:
        """The storages that cross as a whole where views of them are read, each with the memory to which it crosses.

        In that memory the storage itself is read, or a view that does not go alone, or pieces that have at least as
        many bytes together. And no operator overwrites the storage before its last reader.
        """
        blobs, elsewhere = self.net.blobs, self.dialect.elsewhere
        read: dict[str, dict[Device, dict[str, int]]] = {}
        overwritten: set[str] = set()
        for op in self.net.ops:
            if not (op.effects.shows or op.type in elsewhere):
                for name, version in op.reads:
                    blob = blobs[name]
                    if blob.device is not op.device:
                        storage = blobs[blob.storage]
                        alone = operator_type(op.type).only_elements and self.goes_alone(blob, version)
                        needed = dense_nbytes(blob if alone else storage, self.dims)
                        names = read.setdefault(blob.storage, {}).setdefault(memory_of(op.device), {})
                        piece = self.pieces.of(name) if alone else name
                        names[piece] = max(needed, names.get(piece, 0))
                        if blob.storage in overwritten:
                            read[blob.storage].clear()
            overwritten.update([blobs[op.outputs[output]].storage for output, _ in op.effects.writes])
        return {
            (storage, memory)
            for storage, memories in read.items()
            for memory, names in memories.items()
            if sum(names.values()) >= dense_nbytes(blobs[storage], self.dims)
        }

    def is_conjugate(self, name: str, version: int) -> bool:
        """Whether a view is made by a conjugation or a negation, or over a view that is."""
        op = self.views.get((name, version))
        return op is not None and (
            operator_type(op.type).conjugates or any(self.is_conjugate(*read) for read in op.reads)
        )

    @cached_property
    def views(self) -> dict[tuple[str, int], Operator]:
        """The operator behind each name and version that is a view."""
        return {made: op for op in self.net.ops if op.effects.views for made in op.makes}

    @cached_property
    def pieces(self) -> Pieces:
        """Views that cross as one."""
        return Pieces(self.net, self.dims)

    def replay(self, name: str, version: int, memory: Device, phase: Phase, piece: str = "") -> tuple[str, int]:
        """Make a view again, over a copy of its storage, or of a *piece* of it."""
        if piece and self.pieces.alike(name) == piece:
            return self.hold(piece, 0, memory, phase)
        maker = self.views.get((name, version))
        if maker is None:
            return self.hold(name, version, memory, phase)
        if (name, memory) not in self.replayed:
            inputs, reads = zip(*[self.replay(*read, memory, phase, piece) for read in maker.reads], strict=True)
            made = []
            for view, (_, source) in zip(maker.outputs, sorted(maker.effects.views), strict=True):
                base = self.blobs[inputs[source]]
                before = multiply(-1, self.blobs[maker.inputs[source]].offset)
                offset = add(base.offset, add(self.blobs[view].offset, before))
                made.append(self.declare(self.blobs[view], memory, base.storage, offset))
                self.replayed[view, memory] = made[-1]
                self.last[made[-1]] = 0
            again = maker._replace(inputs=inputs, outputs=tuple(made), device=memory, phase=phase, by=self.by)
            self.ops.append(again._replace(input_versions=stored_versions(reads), output_versions=None))
        return self.replayed[name, memory], 0

    def hold(self, name: str, version: int, memory: Device, phase: Phase) -> tuple[str, int]:
        """The blob and version that hold a name in a memory; copied there if nothing does."""
        held = self.present.get(name)
        if held is None:
            held = self.present[name] = {memory_of(self.blobs[name].device): name}
            self.last[name] = version
        found = held.get(memory)
        if found is None:
            source = name
            if name in self.away:
                source = next(iter(held.values()))
                if memory is memory_of(self.blobs[name].device):
                    found, phase = name, self.away.pop(name)
            found = held[memory] = found or self.copy_at(name, memory)
            self.copy(source, found, phase)
        elif found not in self.blobs:
            self.blobs[found] = self.blobs[name]._replace(name=found, storage=found, device=memory)
            self.external.append(found)
        return found, self.last[found]

    def make(self, blob: Blob, version: int, memory: Device, phase: Phase, over: str | None) -> tuple[str, int]:
        """The blob and version by which an operator of *phase* writes a blob in a memory. It writes *over* the blob by
        which it read the old value there, if it did."""
        name, at_home = blob.name, memory is memory_of(blob.device)
        if name not in self.counted:
            if at_home:
                return name, version
            self.counted.add(name)
            self.last[name] = version - 1
        if at_home:
            found = name
        elif over and self.blobs[over].device is memory:
            found = over
        else:
            found = self.copy_at(name, memory)
        self.present[name] = {memory: found}
        if found == name:
            self.away.pop(name, None)
        elif self.away.get(name, "update") == "update":
            self.away[name] = phase
        self.last[found] = self.last.get(found, -1) + 1
        return found, self.last[found]

    def copy_at(self, name: str, memory: Device) -> str:
        """The blob that takes a name's value in a memory that is not its home: a new one; in a workspace, always the
        same one."""
        if not self.dialect.workspace:
            return self.declare(self.blobs[name], memory)
        found = self.copies.get((name, memory))
        if found is None:
            found = self.copies[name, memory] = self.declare(self.blobs[name], memory)
        return found

    def declare(self, blob: Blob, memory: Device, storage: str | None = None, offset: Size = 0) -> str:
        """A new blob in a memory for what *blob* has."""
        base = name = blob.name + _suffix(memory)
        n = 0
        while name in self.blobs or self.taken.get(name, memory) is not memory:
            n += 1
            name = f"{base}_{n}"
        parts = name, blob.shape, blob.dtype, memory, "temporary", storage or name, blob.strides, offset
        self.blobs[name] = Blob._make(parts)  # at half the cost of Blob(*parts)
        return name

    def copy(self, source: str, target: str, phase: Phase) -> None:
        """Append the operator that copies between two blobs."""
        try:
            type, device = self.dialect.copy(self.blobs[source], self.blobs[target])
        except GraphirError as e:
            raise PassError(e.what, where=f"net {self.net.name!r}", fix=e.fix) from None
        read, made = self.last[source], self.last.get(target, -1) + 1
        self.last[target] = made
        versions = (read,) if read else None, (made,) if made else None
        blobs = (source,), (target,)
        self.ops.append(Operator(type, *blobs, EMPTY, device, phase, "", self.by, None, None, None, PURE, *versions))

    def bring_home(self, live: Iterable[str]) -> None:
        """Copy home what somebody may read there after the net."""
        if self.away:
            names = (*self.net.external_inputs, *self.net.results, *live)
            wanted = {self.blobs[name].storage for name in names if name in self.blobs}
            for name, phase in list(self.away.items()):
                if self.blobs[name].storage in wanted:
                    self.hold(name, 0, memory_of(self.blobs[name].device), phase)

    @cached_property
    def result(self) -> Net:
        """The net with its copies; the same if it needs none."""
        if len(self.blobs) == len(self.net.blobs):  # without a new blob, no copy was put in and no operand replaced
            return self.net
        blobs, gradients = self.blobs, self.net.gradients
        unmade = {name for name in self.counted if self.last[name] < 0}
        if unmade:
            blobs = {name: blob for name, blob in blobs.items() if name not in unmade}
            gradients = {name: grad for name, grad in gradients.items() if unmade.isdisjoint((name, grad))}
        external = tuple(self.external)
        return self.net.with_(ops=tuple(self.ops), blobs=blobs, external_inputs=external, gradients=gradients)


def _replaced(
    names: tuple[str, ...], versions: tuple[int, ...] | None, i: int, name: str, version: int
) -> tuple[tuple[str, ...], tuple[int, ...] | None]:
    """Operands with another one at position *i*; the same ones if it is there already."""
    if versions is None and not version:
        return (names if names[i] == name else (*names[:i], name, *names[i + 1 :])), None
    given = versions or (0,) * len(names)
    if names[i] == name and given[i] == version:
        return names, versions
    return (*names[:i], name, *names[i + 1 :]), stored_versions((*given[:i], version, *given[i + 1 :]))
