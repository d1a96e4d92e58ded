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
from functools import cache
from typing import Final, NamedTuple

from graphir.errors import PassError
from graphir.ir.blob import Blob
from graphir.ir.device import CPU, Device
from graphir.ir.names import fresh
from graphir.ir.net import Net
from graphir.ir.operator import Operator, Phase
from graphir.ir.placement import ELSEWHERE, blob_devices, required_devices
from graphir.ir.program import Program

__all__ = ["InjectedCopies", "inject_by_name"]

_GPUS: Final = frozenset({"gpu", "hip"})


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
    taken: Iterable[str] = (),
) -> InjectedCopies:
    """A Caffe2 net with a copy wherever an operator needs a blob that lives elsewhere.

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
    sweep = _Sweep(net, by, dict(blob_to_device or {}), dict(blob_remap or {}), frozenset(placeholder_ops), taken)
    for op in net.ops:
        sweep.operator(op)
    live = sweep.unread if live is None else live
    sweep.bring_home(dict.fromkeys([*net.external_outputs, *net.external_inputs, *live]))
    return sweep.result()


@cache
def _memory(device: Device) -> Device:
    """The device that stands for a memory: the host is one, whatever its number."""
    return CPU if device.is_host else device


class _Sweep:
    """One sweep over a net.

    Attributes:
        blobs: every blob; an original one is at its home.
        names: those that a copy may not get.
        settled: the home of each name that has a value, and only there; None for a name in ``present``.
        present: of every other name: by memory, the blob that holds its present value there.
        last: of these names and of copies, the last version that was made; -1 before the first.
        unread: names whose present value was not made at home, and nobody has read.
        copies: by name and memory, the blob that copies of it are made to.
        remap: the copies that earlier nets made of what this one does not write.
        inherited: the same by name and memory.
    """

    def __init__(
        self,
        net: Net,
        by: str,
        known: dict[str, Device],
        remap: dict[tuple[str, Device], str],
        own: frozenset[str],
        taken: Iterable[str],
    ) -> None:
        self.net, self.by, self.known, self.own = net, by, known, own
        self.names = {*net.blobs, *taken}
        self.blobs = dict(net.blobs)
        if known or own:
            given = {name: net.blobs[name].device for name in net.external_inputs}
            homes = blob_devices(net.ops, given | known, own=own)
            self.blobs = {name: blob.on(homes.get(name, blob.device)) for name, blob in net.blobs.items()}
        self.ops: list[Operator] = []
        self.external = list(net.external_inputs)
        self.settled: dict[str, Device | None] = {name: self.blobs[name].device for name in net.external_inputs}
        self.present: dict[str, dict[Device, str]] = {}
        self.last: dict[str, int] = {}
        self.unread: dict[str, None] = {}
        self.copies: dict[tuple[str, Device], str] = {}
        # What this net writes may have another value from step to step than when it was copied.
        written = {name for op in net.ops for name in op.outputs} if remap else set()
        self.remap = {key: copy for key, copy in remap.items() if key[0] not in written}
        self.inherited = {(name, _memory(device)): copy for (name, device), copy in self.remap.items()}

    def operator(self, op: Operator) -> None:
        """Append *op*, with copies before it of what it needs from elsewhere."""
        device, settled, blobs = op.device, self.settled, self.blobs
        if op.type == "Copy":
            source = settled.get(op.inputs[0])
            near = source is not None and source.is_host == device.is_host
        elif op.type in ELSEWHERE:
            near = False
        else:
            near = True
            for name in op.inputs:
                if settled.get(name) != device:
                    near = False
                    break
        if near:
            for name in op.outputs:
                if settled.get(name, device) != device or blobs[name].device != device:
                    break
            else:
                for name in op.outputs:
                    settled[name] = device
                self.ops.append(op)
                return
        self.place(op)

    def place(self, op: Operator) -> None:
        """Append an operator of which some operand may be elsewhere."""
        kind, device, settled, blobs = op.type, op.device, self.settled, self.blobs
        needed = made = None
        if kind in ELSEWHERE:
            needed, made = required_devices(op, blobs, self.own)
        reads, makes = op.input_versions, op.output_versions
        inputs, read = list(op.inputs), [0] * len(op.inputs) if reads is None else list(reads)
        for i, name in enumerate(op.inputs):
            wanted = device if needed is None else needed[i]
            if settled.get(name) != wanted or (kind == "Copy" and wanted.is_host != device.is_host):
                self.unsettle(name, read[i], op)
                inputs[i], read[i] = self.source(name, op) if kind == "Copy" else self.bring(name, wanted, op.phase)
        outputs, written = list(op.outputs), [0] * len(op.outputs) if makes is None else list(makes)
        for i, name in enumerate(op.outputs):
            wanted = device if made is None else made[i]
            home = blobs[name].device
            if settled.get(name, home) is not None and (home is wanted or _memory(home) == _memory(wanted)):
                settled[name] = home
            else:
                outputs[i], written[i] = self.make(name, written[i], wanted)
        effects = op.effects
        if effects.writes:
            kept = tuple([pair for pair in effects.writes if outputs[pair[0]] == inputs[pair[1]]])
            if kept != effects.writes:
                effects = effects._replace(writes=kept)
        self.ops.append(
            Operator(
                kind,
                tuple(inputs),
                tuple(outputs),
                *op[3:11],
                effects,
                tuple(read) if any(read) else None,
                tuple(written) if any(written) else None,
                op.proto,
            )
        )

    def unsettle(self, name: str, version: int, op: Operator) -> None:
        """From now on look where the present value of a name is."""
        self.unread.pop(name, None)
        if name in self.present:
            return
        if name not in self.settled:
            later = any(name in other.outputs for other in self.net.ops)
            raise PassError(
                f"blob {name!r} is read before {'an operator makes it' if later else 'anybody has made it'}",
                at=f"{op.type} -> {', '.join(op.outputs)}",
                where=f"net {self.net.name!r}",
                fix="list it as an external input, or make it before",
            )
        self.settled[name] = None
        self.present[name] = {_memory(self.blobs[name].device): name}
        self.last[name] = version

    def bring(self, name: str, device: Device, phase: Phase) -> tuple[str, int]:
        """The (name, version) that holds a name's present value on *device*; copied there if it is not."""
        memory, present = _memory(device), self.present[name]
        found = present.get(memory) or self.inherit(name, memory)
        if found is None:
            source = present.get(_memory(self.blobs[name].device)) or next(iter(present.values()))
            found = self.blob_at(name, device)
            self.copy(source, found, phase)
            present[memory] = found
        return found, self.last[found]

    def source(self, name: str, op: Operator) -> tuple[str, int]:
        """What an explicit ``Copy`` reads: the value where it is already, on the copy's side of the bus."""
        present = self.present[name]
        for memory in (_memory(op.device), _memory(self.blobs[name].device), *present):
            if memory in present and memory.is_host == op.device.is_host:
                return present[memory], self.last[present[memory]]
        return self.bring(name, op.device, op.phase)

    def make(self, name: str, version: int, device: Device) -> tuple[str, int]:
        """The (name, version) that an operator makes which writes a name on *device*."""
        if name not in self.present:
            self.settled[name] = None
            self.last[name] = version - 1
        memory = _memory(device)
        found = self.blob_at(name, device)
        self.present[name] = {memory: found}
        self.unread[name] = None
        self.last[found] = self.last.get(found, -1) + 1
        return found, self.last[found]

    def blob_at(self, name: str, device: Device) -> str:
        """The blob for a name's value on *device*: itself at home, elsewhere one that copies of it are made to."""
        memory = _memory(device)
        if memory == _memory(self.blobs[name].device):
            return name
        found = self.copies.get((name, memory))
        if found is None:
            base = f"{name}_{'cpu' if device.is_host else f'gpu_{device.index}'}"
            found = fresh(base, self.names)
            self.names.add(found)
            blob = self.blobs[name]
            self.blobs[found] = Blob(found, blob.shape, blob.dtype, device, "temporary", found, blob.strides)
            self.copies[name, memory] = found
        return found

    def inherit(self, name: str, memory: Device) -> str | None:
        """The copy that an earlier net has made of a name that still has the value from there."""
        found = self.inherited.get((name, memory))
        if found is not None:
            if found not in self.blobs:
                self.blobs[found] = self.blobs[name]._replace(name=found, storage=found, device=memory)
                self.external.append(found)
            self.copies[name, memory] = self.present[name][memory] = found
            self.last.setdefault(found, 0)
        return found

    def copy(self, source: str, target: str, phase: Phase) -> None:
        """Append the operator that copies between two devices."""
        a, b = self.blobs[source].device, self.blobs[target].device
        if a.kind in _GPUS and b.kind in _GPUS:
            type, device = "Copy", b
        elif a.is_host and b.kind in _GPUS:
            type, device = "CopyCPUToGPU", b
        elif a.kind in _GPUS and b.is_host:
            type, device = "CopyGPUToCPU", a
        else:
            raise PassError(
                f"nothing copies {source!r} from {a} to {b}",
                where=f"net {self.net.name!r}",
                fix="Caffe2 has copies between gpu, hip and cpu; put the operators on these",
            )
        read, made = self.last[source], self.last.get(target, -1) + 1
        self.last[target] = made
        versions = ((read,), (made,)) if read or made else (None, None)
        self.ops.append(
            Operator(
                type,
                (source,),
                (target,),
                {},
                device,
                phase,
                by=self.by,
                input_versions=versions[0],
                output_versions=versions[1],
            )
        )

    def bring_home(self, names: Iterable[str]) -> None:
        """Copy back the values of *names* that are not at home."""
        phase: Phase = "init" if self.net.ops and self.net.ops[-1].phase == "init" else "update"
        for name in names:
            if name in self.present:
                self.bring(name, self.blobs[name].device, phase)

    def result(self) -> InjectedCopies:
        devices = {**self.known, **{name: blob.device for name, blob in self.blobs.items()}}
        remap = dict(self.remap)
        for name, present in self.present.items():
            if present.get(_memory(self.blobs[name].device)) == name:
                remap.update({(name, self.blobs[c].device): c for c in present.values() if c != name})
        if not self.present and self.blobs == self.net.blobs:
            return InjectedCopies(self.net, devices, remap)
        net = self.net.with_(ops=tuple(self.ops), blobs=self.blobs, external_inputs=tuple(self.external))
        return InjectedCopies(net, devices, remap)
