"""Copies in Caffe2's nets, where a name is written again and again and blobs outlive the net.

This follows ``core.InjectCrossDeviceCopies``: names and positions of the copies, and their types, are Caffe2's. A name
lives on one device, its *home*. The sweep knows at which devices a name's present value is::

    x @gpu:0 = GaussianFill()                      x is at gpu:0
    x_gpu_1 @gpu:1 = Copy(x)                       and at gpu:1
    x_gpu_1;1 @gpu:1 = Relu(x_gpu_1)               only at gpu:1: Relu overwrites x, and is not on its home
    x_gpu_2 @gpu:2 = Copy(x_gpu_1;1)               and at gpu:2, for somebody there
    x;1 @gpu:0 = Copy(x_gpu_1;1)                   and at home, once somebody reads it there or the net ends

so that no copy goes stale, an update that was made to a copy is brought back, and nothing is copied that nobody reads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple, NoReturn

from graphir.errors import GraphirError, PassError
from graphir.ir.blob import Blob
from graphir.ir.device import CPU, Device
from graphir.ir.names import copy_name, fresh
from graphir.ir.net import Net
from graphir.ir.operator import Operator, Phase, stored_versions
from graphir.ir.placement import blob_devices, required_devices
from graphir.ir.program import Program

__all__ = ["InjectedCopies", "Injection", "inject_by_name"]


class InjectedCopies(NamedTuple):
    """A net with its copies, and what the injection of a following net starts from.

    Attributes:
        net: the net.
        blob_to_device: where every blob lives, those of the map that was given included.
        blob_remap: for each (blob, device) the copy that has the blob's value there at the end of the net.
        program: the program whose step the net is; None where a net was given.
    """

    net: Net
    blob_to_device: Mapping[str, Device]
    blob_remap: Mapping[tuple[str, Device], str]
    program: Program | None = None


def inject_by_name(
    net: Net,
    by: str,
    *,
    blob_to_device: Mapping[str, Device] | None = None,
    blob_remap: Mapping[tuple[str, Device], str] | None = None,
    placeholder_ops: Collection[str] = (),
    live: Iterable[str] | None = (),
    taken: Collection[str] = (),
) -> Injection:
    """A Caffe2 net with a copy wherever an operator needs a blob that lives elsewhere, as ``.result``.

    Args:
        net: the net; its blobs say where external inputs live that *blob_to_device* does not know.
        by: the pass that puts them in.
        blob_to_device: where blobs of earlier nets live.
        blob_remap: copies that earlier nets have made.
        placeholder_ops: types that have all operands on their own device.
        live: names whose value is wanted at their home after the net, beside external inputs and outputs; None: those
            whose last value no operator reads.
        taken: names that a copy may not get, beside those of the net.

    Raises:
        PassError: an operator reads what nobody has made, or nothing copies between two kinds of devices.
    """
    sweep = Injection(net, by, dict(blob_to_device or {}), blob_remap, frozenset(placeholder_ops), taken)
    sweep.run()
    live = sweep.unread if live is None else live
    sweep.bring_home(dict.fromkeys([*net.external_outputs, *net.external_inputs, *live]))
    return sweep


@cache
def _memory(device: Device) -> Device:
    """The device that stands for a memory: the host is one, whatever its number."""
    return CPU if device.is_host else device


@cache
def _on_host(device: Device) -> bool:
    """``device.is_host``, which the sweep asks of every copy."""
    return device.is_host


class Injection:
    """One sweep over a net, made by :func:`inject_by_name`.

    Attributes:
        known, taken: ``blob_to_device`` and ``taken`` of :func:`inject_by_name`.
        blobs: every blob; an original one is at its home.
        settled: of each name that has a value: its home, as long as the net's own versions of it are made there; None
            once one was made elsewhere.
        present: the blob that holds a name's present value, by name and memory; a name that is not here is at its home
            alone.
        last: of each blob in ``present``, the last version that was made; -1 before the first.
        unread: names whose present value was not made at home, and nobody has read.
        away: names whose present value was not made at home, and the phase of what brings it there: before the update
            if anything since it was last at home was made before, since sessions ask that of a state.
        copies: by name and memory, the blob that copies of it are made to.
        remap: the copies that earlier nets made of what this one does not write.
        inherited: the same by name and memory.
        claimed: of what each copy is that earlier nets made, and where; None if that is not known.
    """

    def __init__(
        self,
        net: Net,
        by: str,
        known: dict[str, Device],
        remap: Mapping[tuple[str, Device], str] | None,
        own: frozenset[str],
        taken: Collection[str],
    ) -> None:
        self.net, self.by, self.known = net, by, known
        self.dialect = net.dialect.without(own)
        self.taken = taken
        self.blobs = dict(net.blobs)
        if known or own:
            given = {name: net.blobs[name].device for name in net.external_inputs}
            homes = blob_devices(net.ops, given | known, self.dialect)
            self.blobs = {name: blob.on(homes.get(name, blob.device)) for name, blob in net.blobs.items()}
        self.ops: list[Operator] = []
        self.external = list(net.external_inputs)
        self.settled: dict[str, Device | None] = {name: self.blobs[name].device for name in net.external_inputs}
        self.present: dict[str, dict[Device, str]] = {}
        self.last: dict[str, int] = {}
        self.unread: dict[str, None] = {}
        self.away: dict[str, Phase] = {}
        self.copies: dict[tuple[str, Device], str] = {}
        # What this net writes may have another value from step to step than when it was copied.
        written = {name for op in net.ops for name in op.outputs} if remap else set()
        self.remap = {k: copy for k, copy in (remap or {}).items() if k[0] not in written and copy not in written}
        self.claimed = None
        if remap is not None:
            self.claimed = {copy: (name, _memory(device)) for (name, device), copy in remap.items()}
        self.inherited = {(name, _memory(device)): copy for (name, device), copy in self.remap.items()}

    def run(self) -> None:
        """Append every operator, with copies before it of what it needs from elsewhere.

        Nearly all have every operand at its home, on their own device. Look-ups alone tell that of an operator, in a
        fraction of the time of :meth:`place`, which takes the others and whatever is not sure.
        """
        settled, present, blobs, append = self.settled, self.present, self.blobs, self.ops.append
        elsewhere, mentions = self.dialect.elsewhere, self.dialect.mentions
        home_of = settled.get
        for op in self.net.ops:
            device, near = op.device, True
            if present and mentions(op):
                self.settle(op)
            if op.type == "Copy":
                if len(op.inputs) != 1 or len(op.outputs) != 1:
                    self.refuse("a Copy has one input and one output", op, "")
                source, copies = home_of(op.inputs[0]), present.get(op.inputs[0])
                near = source is not None and _on_host(source) is _on_host(device)
                if copies is not None and device in copies:
                    near = False
            elif op.type in elsewhere:
                near = False
            else:
                for name in op.inputs:
                    if home_of(name) != device:
                        near = False
                        break
            if near:
                for name in op.outputs:
                    home = home_of(name, device)
                    if home != device or blobs[name].device != device:
                        break
                    if name in present:
                        del present[name]
                    settled[name] = device
                else:
                    append(op)
                    continue
            self.place(op)

    def place(self, op: Operator) -> None:
        """Append an operator of which some operand may be elsewhere."""
        settled, needed, made = self.settled, None, None
        if op.type == "Copy":
            needed = [self.copied_from(op)]
        elif op.type in self.dialect.elsewhere:
            needed, made = required_devices(op, self.blobs, self.dialect)
        inputs, read = op.inputs, op.input_versions
        for i, name in enumerate(op.inputs):
            wanted = op.device if needed is None else needed[i]
            if settled.get(name) != wanted:
                version = read[i] if read else 0
                found = self.bring(name, self.holders(name, version, op), wanted, op.phase)
                inputs, read = _replaced(inputs, read, i, *found)
        outputs, written = op.outputs, op.output_versions
        for i, name in enumerate(op.outputs):
            version = written[i] if written else 0
            if made is None and settled.get(name) == op.device and name not in self.present:
                continue
            new = self.make(name, version, op.device if made is None else made[i], op.phase)
            if new != (name, version):
                outputs, written = _replaced(outputs, written, i, *new)
        if inputs is op.inputs and outputs is op.outputs and read is op.input_versions:
            self.ops.append(op)
            return
        effects = op.effects
        if effects.writes:
            kept = tuple([pair for pair in effects.writes if outputs[pair[0]] == inputs[pair[1]]])
            if kept != effects.writes:
                effects = effects._replace(writes=kept)
        made_here = (op[0], inputs, outputs) + op[3:11] + (effects, read, written, *op[14:])  # noqa: RUF005  # fastest
        self.ops.append(Operator._make(made_here))

    def copied_from(self, op: Operator) -> Device:
        """Where an explicit ``Copy`` reads: where the value is already, on the copy's own side of the bus."""
        name, device = op.inputs[0], op.device
        home = self.settled.get(name)
        if home is not None and name not in self.present:
            return home if _on_host(home) is _on_host(device) else device
        holders = self.holders(name, next(op.reads)[1], op)
        for memory in (_memory(device), _memory(self.blobs[name].device), *holders):
            if memory in holders and _on_host(memory) is _on_host(device):
                return memory
        return device

    def holders(self, name: str, version: int, op: Operator) -> dict[Device, str]:
        """The blobs that hold the present value of what *op* reads, by memory."""
        if self.unread:
            self.unread.pop(name, None)
        found = self.present.get(name)
        if found is None:
            if name not in self.settled:
                later = any(name in other.outputs for other in self.net.ops)
                what = f"blob {name!r} is read before {'an operator makes it' if later else 'anybody has made it'}"
                self.refuse(what, op, "list it as an external input, or make it before")
            found = self.present[name] = {_memory(self.blobs[name].device): name}
            self.last[name] = version
        return found

    def refuse(self, what: str, op: Operator, fix: str) -> NoReturn:
        raise PassError(what, at=f"{op.type} -> {', '.join(op.outputs)}", where=f"net {self.net.name!r}", fix=fix)

    def settle(self, op: Operator) -> None:
        """Bring home what a control input or a nested net of *op* names; a nested net may also write it."""
        nested = self.dialect.nested(op)
        for name in self.dialect.mentions(op):
            if name in self.present:
                home = self.blobs[name].device
                self.bring(name, self.present[name], home, op.phase)
                if name in nested:
                    self.present[name] = {_memory(home): name}

    def bring(self, name: str, holders: dict[Device, str], device: Device, phase: Phase) -> tuple[str, int]:
        """The (name, version) that holds a name's present value on *device*; copied there if it is not."""
        memory = _memory(device)
        found = holders.get(memory) or (self.inherit(name, memory) if self.inherited else None)
        if found is None:
            source = holders.get(_memory(self.blobs[name].device)) or next(iter(holders.values()))
            found = self.blob_at(name, device)
            self.copy(source, found, self.away.get(name, phase) if found == name else phase)
            holders[memory] = found
        return found, self.last[found]

    def make(self, name: str, version: int, device: Device, phase: Phase) -> tuple[str, int]:
        """The (name, version) that an operator of *phase* makes which writes a name on *device*."""
        home = self.blobs[name].device
        settled = self.settled.get(name, home)
        if settled is not None:
            if home is device or _memory(home) == _memory(device):
                self.settled[name] = home
                self.present.pop(name, None)
                self.away.pop(name, None)
                return name, version
            self.settled[name] = None
            self.last[name] = version - 1
        found = self.blob_at(name, device)
        self.present[name] = {_memory(device): found}
        self.unread[name] = None
        if self.away.get(name, "update") == "update":
            self.away[name] = phase
        self.last[found] = self.last.get(found, -1) + 1
        return found, self.last[found]

    def blob_at(self, name: str, device: Device) -> str:
        """The blob for a name's value on *device*: itself at home, elsewhere one that copies of it are made to."""
        memory = _memory(device)
        if memory == _memory(self.blobs[name].device):
            return name
        found = self.copies.get((name, memory))
        if found is None:
            found = copy_name(name, device)
            if self.known or found in self.blobs or found in self.taken:
                found = fresh(found, _Names(self, name, memory))
            blob = self.blobs[name]
            self.blobs[found] = Blob(found, blob.shape, blob.dtype, device, "temporary", found, blob.strides)
            self.copies[name, memory] = found
        return found

    def inherit(self, name: str, memory: Device) -> str | None:
        """The copy that an earlier net has made of a name that still has the value from there."""
        found = self.inherited.get((name, memory))
        if found is not None:
            if found not in self.blobs:
                device = self.known[found]
                self.blobs[found] = self.blobs[name]._replace(name=found, storage=found, device=device)
                self.external.append(found)
            self.copies[name, memory] = self.present[name][memory] = found
            self.last.setdefault(found, 0)
        return found

    def copy(self, source: str, target: str, phase: Phase) -> None:
        """Append the operator that copies between two devices."""
        try:
            type, device = self.dialect.copy(self.blobs[source], self.blobs[target])
        except GraphirError as e:
            raise PassError(e.what, where=f"net {self.net.name!r}", fix=e.fix) from None
        read, made = self.last[source], self.last.get(target, -1) + 1
        self.last[target] = made
        copy = Operator(type, (source,), (target,), {}, device, phase, "", self.by)
        if read or made:
            copy = copy._replace(input_versions=(read,), output_versions=(made,))
        self.ops.append(copy)

    def bring_home(self, names: Iterable[str]) -> None:
        """Copy back the values of *names* that are not at home."""
        for name in names:
            if name in self.present:
                self.bring(name, self.present[name], self.blobs[name].device, self.away.get(name, "update"))

    @cached_property
    def result(self) -> Net:
        """The net with its copies; the same if it needs none."""
        unmade = [name for name in self.present if self.settled[name] is None and self.last[name] < 0]
        for name in unmade:
            del self.blobs[name]
        if not self.copies:
            return self.net if self.blobs == self.net.blobs else self.net.with_(blobs=self.blobs)
        gradients = self.net.gradients
        if unmade:
            gradients = {a: g for a, g in gradients.items() if a in self.blobs and g in self.blobs}
        external = tuple(self.external)
        return self.net.with_(ops=tuple(self.ops), blobs=self.blobs, external_inputs=external, gradients=gradients)

    def injected(self) -> InjectedCopies:
        """The net with what the injection of a following net starts from."""
        result = self.result
        devices = {**self.known, **{name: blob.device for name, blob in self.blobs.items()}}
        remap = dict(self.remap)
        for name, present in self.present.items():
            if name in self.blobs and present.get(_memory(self.blobs[name].device)) == name:
                remap.update({(name, self.blobs[c].device): c for c in present.values() if c != name})
        return InjectedCopies(result, devices, remap)


@dataclass(frozen=True)
class _Names:
    """The names that the copy of a blob may not get: those of other blobs, of earlier nets too.

    Where it is not known which blobs of earlier nets are copies, one that lives where the copy will is taken for it.
    """

    injection: Injection
    blob: str
    memory: Device

    def __contains__(self, name: object) -> bool:
        at = self.injection
        if name in at.blobs or name in at.taken:
            return True
        if name not in at.known:
            return False
        if at.claimed is None:
            return _memory(at.known[str(name)]) != self.memory
        return at.claimed.get(str(name)) != (self.blob, self.memory)


def _replaced(
    names: tuple[str, ...], versions: tuple[int, ...] | None, i: int, name: str, version: int
) -> tuple[tuple[str, ...], tuple[int, ...] | None]:
    """Operands with another one at position *i*."""
    given = versions or (0,) * len(names)
    return (*names[:i], name, *names[i + 1 :]), stored_versions((*given[:i], version, *given[i + 1 :]))
