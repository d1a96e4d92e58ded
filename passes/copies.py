"""Put in the copies that a placement needs.

A copy stands directly before the first operator that needs it and serves every later reader of the same version::

    gpu_0/fc1 @gpu:0 = aten.addmm(…)            gpu_0/fc1 @gpu:0 = aten.addmm(…)
    gpu_0/relu @gpu:1 = aten.relu(gpu_0/fc1) ─▶ gpu_0/fc1_gpu_1 @gpu:1 = Copy(gpu_0/fc1)
                                                gpu_0/relu @gpu:1 = aten.relu(gpu_0/fc1_gpu_1)

It follows Caffe2's ``core.InjectCrossDeviceCopies`` (names, positions), but keys copies by version, so none goes stale,
and writes an update that was made to a copy back to where the blob lives.

Where a view is needed elsewhere, the smaller of view and storage crosses: either the view itself, its strides kept, or
the storage, on whose copy the view operators are replayed. The storage crosses, too, where the operator may read beyond
the elements of the view (:mod:`graphir.ir.elements`), and where the view is a conjugate, which a copy would write out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import ClassVar, TypeVar, overload

from pydantic import Field

from graphir.errors import PassError
from graphir.ir.blob import Blob, dense_nbytes, is_dense, overlaps
from graphir.ir.device import Device
from graphir.ir.elements import CONJUGATING, reads_only_elements
from graphir.ir.names import copy_name, fresh
from graphir.ir.net import Net
from graphir.ir.operator import PURE, Operator, Phase, stored_versions
from graphir.ir.placement import is_host_scalar, required_devices, same_memory
from graphir.ir.program import Program
from graphir.ir.size import Dims, bind_shape
from graphir.ir.text import operator_text

from .base import Pass, build, register
from .caffe2_copies import InjectedCopies, Injection, inject_by_name

__all__ = ["InjectCopies", "InjectedCopies", "inject_copies"]


@register
class InjectCopies(Pass):
    """See :func:`inject_copies`."""

    name: ClassVar[str] = "inject_copies"

    placeholder_ops: tuple[str, ...] = ()
    blob_to_device: dict[str, str] = Field(default_factory=dict)

    def rewrite(self, program: Program) -> Program:
        if program.step.dialect.workspace:
            filled, placed = self.caffe2(program)
            return program.with_(init=filled.result, step=placed.result)
        if self.blob_to_device or self.placeholder_ops:
            raise PassError(
                f"program {program.name!r} is not from Caffe2", fix="leave blob_to_device and placeholder_ops out"
            )
        return program.with_(
            init=_Sweep(program.init, program.dims).run(),
            step=_Sweep(program.step, program.dims).run(),
        )

    def caffe2(self, program: Program) -> tuple[Injection, Injection]:
        """The nets of a Caffe2 program with their copies, one after the other."""
        init, step, own = program.init, program.step, self.placeholder_ops
        given = _devices(self.blob_to_device)
        taken = step.blobs
        filled = inject_by_name(
            init, self.name, blob_to_device=given, placeholder_ops=own, live=step.external_inputs, taken=taken
        )
        known = {name: blob.device for name, blob in filled.result.blobs.items()} if given or own else {}
        live = () if step.external_outputs else None
        return filled, inject_by_name(
            step, self.name, blob_to_device={**given, **known}, placeholder_ops=own, live=live, taken=init.blobs
        )


_Subject = TypeVar("_Subject", Program, Net)


@overload
def inject_copies(subject: _Subject, *, placeholder_ops: Sequence[str] = ()) -> _Subject: ...


@overload
def inject_copies(
    subject: Program | Net,
    *,
    blob_to_device: Mapping[str, str],
    blob_remap: Mapping[tuple[str, str], str] | None = None,
    placeholder_ops: Sequence[str] = (),
) -> InjectedCopies: ...


@overload
def inject_copies(
    subject: Net,
    *,
    blob_to_device: None = None,
    blob_remap: Mapping[tuple[str, str], str],
    placeholder_ops: Sequence[str] = (),
) -> InjectedCopies: ...


def inject_copies(
    subject: Program | Net,
    *,
    blob_to_device: Mapping[str, str] | None = None,
    blob_remap: Mapping[tuple[str, str], str] | None = None,
    placeholder_ops: Sequence[str] = (),
) -> Program | Net | InjectedCopies:
    """The program or net with a copy wherever an operator needs a blob that lives elsewhere.

    A copy of ``b`` is called ``b_gpu_<n>`` or ``b_cpu`` (and ``…_1`` where that name is taken). No operator is moved
    and nothing is copied that is already there. Arguments are never changed.

    The maps are for Caffe2's nets. One after the other, each call returns the maps for the next one::

        first = inject_copies(init, blob_to_device={})
        second = inject_copies(step, blob_to_device=first.blob_to_device, blob_remap=first.blob_remap)

    Handing ``blob_remap`` on assumes that nothing changes the copied blobs between the two nets; of blobs that the next
    net writes itself, no copy is taken over. What a net leaves behind in blobs that are neither external inputs nor
    external outputs of it counts as unread. A net that names no external outputs at all hands on every blob where maps
    are given, and else those that it does not read itself.

    Args:
        subject: a program, or a net from Caffe2.
        blob_to_device: where blobs live that are fed, or made by earlier nets, as ``{"w": "gpu:0"}``; other external
            inputs live where the net says.
        blob_remap: copies that earlier nets made, as ``{("w", "gpu:1"): "w_gpu_1"}``.
        placeholder_ops: Caffe2 types that have all operands on their own device, whatever is known about them.

    Returns:
        What was given, transformed; given either map, an :class:`InjectedCopies`, which for a program has its step as
        ``net`` and the program as ``program``.

    Raises:
        PassError: maps are given with what is not from Caffe2, ``blob_remap`` with a program, an operator reads what
            nobody has made, or nothing copies between two kinds of devices. Or an operator was shifted away from what
            :func:`share_storage` has it overwrite.
    """
    mapped = blob_to_device is not None or blob_remap is not None
    step = build(
        InjectCopies,
        placeholder_ops=placeholder_ops,
        blob_to_device={} if blob_to_device is None else blob_to_device,
    )
    if not isinstance(subject, Net):
        if blob_remap is not None:
            raise PassError(
                "blob_remap goes with a net", fix="a program begins with its init net: nothing is copied yet"
            )
        program = step(subject)
        if blob_to_device is None:
            return program
        filled, placed = (sweep.injected() for sweep in step.caffe2(subject))
        return placed._replace(blob_to_device={**filled.blob_to_device, **placed.blob_to_device}, program=program)
    return _into_net(subject, step, blob_remap, mapped=mapped)


def _into_net(
    net: Net, step: InjectCopies, blob_remap: Mapping[tuple[str, str], str] | None, *, mapped: bool
) -> Net | InjectedCopies:
    """One net of Caffe2's with its copies; with the maps for the next net where *mapped*."""
    if not net.dialect.workspace:
        raise PassError(f"net {net.name!r} is not from Caffe2", fix="inject the copies into its program")
    known, copies = _devices(step.blob_to_device), None if blob_remap is None else _copies(blob_remap)
    for (name, device), copy in (copies or {}).items():
        if copy not in known or not same_memory(known[copy], device):
            raise PassError(
                f"blob_remap has {copy!r} as the copy of {name!r} on {device}; blob_to_device does not have it there",
                fix="hand on both maps of the call for the net before",
            )
    live: Iterable[str] | None = ()
    if not net.external_outputs:
        live = net.blobs if mapped else None
    done = inject_by_name(
        net,
        InjectCopies.name,
        blob_to_device=known,
        blob_remap=copies,
        placeholder_ops=step.placeholder_ops,
        live=live,
    )
    return done.injected() if mapped else done.result


def _devices(named: Mapping[str, str]) -> dict[str, Device]:
    return {name: Device.parse(device) for name, device in named.items()}


def _copies(named: object) -> dict[tuple[str, Device], str]:
    found: dict[tuple[str, Device], str] = {}
    for key, copy in named.items() if isinstance(named, Mapping) else [(named, "")]:
        if not (isinstance(key, tuple) and len(key) == 2 and all(isinstance(text, str) for text in (*key, copy))):
            raise PassError(f"blob_remap has {key!r}", fix='write blob_remap={("w", "gpu:1"): "w_gpu_1"}')
        found[key[0], Device.parse(key[1])] = copy
    return found


class _Sweep:
    """One sweep over a captured net.

    Attributes:
        local: for a (name, version) and a device, the (name, version) of what stands for it there.
        replayed: the same for views of a copy of the whole storage.
        versions: of each copy that is written, the last one.
        makers: the operator behind each (name, version) that is a view.
        conjugate: of these, those that a conjugation or negation leads to.
    """

    def __init__(self, net: Net, dims: Dims) -> None:
        self.net, self.dims = net, dims
        self.blobs = dict(net.blobs)
        self.elsewhere = net.dialect.elsewhere
        self.ops: list[Operator] = []
        self.local: dict[tuple[str, int, Device], tuple[str, int]] = {}
        self.replayed: dict[tuple[str, int, Device], tuple[str, int]] = {}
        self.versions: dict[str, int] = {}
        self.makers: dict[tuple[str, int], Operator] = {}
        self.conjugate: set[tuple[str, int]] = set()

    def run(self) -> Net:
        blobs, append = self.blobs, self.ops.append
        for op in self.net.ops:
            device = op.device
            for name in op.inputs:
                if blobs[name].device is not device:
                    self.place(op)
                    break
            else:
                append(op)
            if op.effects.views:
                self.makers.update((made, op) for made in op.makes)
                if op.type in CONJUGATING or not self.conjugate.isdisjoint(op.reads):
                    self.conjugate.update(op.makes)
        if len(self.ops) == len(self.net.ops):
            return self.net
        return self.net.with_(ops=tuple(self.ops), blobs=self.blobs)

    def place(self, op: Operator) -> None:
        """Append *op*, with copies before it of what it needs from elsewhere, and after it of what it updated."""
        if op.effects is PURE and op.input_versions is None and op.type not in self.elsewhere:
            # What nearly every operator is, in half the time.
            device, blobs = op.device, self.blobs
            bring = self.bring if reads_only_elements(op.type) else partial(self.bring_storage, op)
            brought = tuple([
                name if blobs[name].device == device or is_host_scalar(blobs[name])
                else bring(name, 0, device, op.phase)[0]
                for name in op.inputs
            ])  # fmt: skip
            self.ops.append(op if brought == op.inputs else Operator(op[0], brought, *op[2:]))
            return
        needed, _ = required_devices(op, self.blobs, self.net.dialect)
        bring = self.bring if reads_only_elements(op.type) else partial(self.bring_storage, op)
        inputs, versions = list(op.inputs), list(op.input_versions or (0,) * len(op.inputs))
        for i, (name, version) in enumerate(op.reads):
            if self.blobs[name].device != needed[i]:
                inputs[i], versions[i] = bring(name, version, needed[i], op.phase)
        if inputs == list(op.inputs):
            self.ops.append(op)
            return
        outputs, made = list(op.outputs), list(op.output_versions or (0,) * len(op.outputs))
        written_back = []
        for position, source in op.effects.writes:
            if inputs[source] != op.inputs[source]:
                home = outputs[position], made[position]
                if home[0] != op.inputs[source]:
                    raise PassError(
                        f"{op.type} writes {home[0]!r} over {op.inputs[source]!r}, which {op.device} has a copy of",
                        at=operator_text(op, self.net),
                        fix="shift before share_storage, which puts operators in place",
                    )
                outputs[position] = inputs[source]
                made[position] = self.next_version(inputs[source])
                written_back.append((home, (outputs[position], made[position])))
        self.ops.append(
            op._replace(
                inputs=tuple(inputs),
                outputs=tuple(outputs),
                input_versions=stored_versions(versions),
                output_versions=stored_versions(made),
            )
        )
        for home, updated in written_back:
            self.local[(*home, self.blobs[updated[0]].device)] = updated
            self.copy(updated, home, op.phase)

    def bring(self, name: str, version: int, device: Device, phase: Phase) -> tuple[str, int]:
        """What stands for a (name, version) on *device*; made now if there is nothing yet."""
        key = name, version, device
        found = self.local.get(key) or self.replayed.get(key)
        if found is None:
            blob = self.blobs[name]
            if (name, version) in self.makers and not self.crosses_as_itself(blob, version):
                return self.replay(name, version, device, phase)
            found = self.local[key] = self.declare(blob, device)
            self.copy((name, version), found, phase)
        return found

    def bring_storage(self, op: Operator, name: str, version: int, device: Device, phase: Phase) -> tuple[str, int]:
        """What stands for a (name, version) on *device* in a copy of its whole storage, as *op* needs it."""
        blob = self.blobs[name]
        storage = self.blobs[blob.storage]
        if (name, version) in self.makers and is_dense(storage):
            return self.replay(name, version, device, phase)
        if not is_dense(blob) or blob[1:3] != storage[1:3]:
            raise PassError(
                f"{op.type} may read beyond the elements of {name!r}, and a copy of it on {device} holds nothing else",
                at=operator_text(op, self.net),
                fix=f"leave {op.type} on {storage.device}, where {storage.name!r} is",
            )
        return self.bring(name, version, device, phase)

    def declare(self, blob: Blob, device: Device) -> tuple[str, int]:
        """A new blob on *device* that a copy of *blob* will fill."""
        name = fresh(copy_name(blob.name, device), self.blobs)
        self.blobs[name] = Blob(name, blob.shape, blob.dtype, device, "temporary", name, blob.strides)
        return name, 0

    def copy(self, source: tuple[str, int], target: tuple[str, int], phase: Phase) -> None:
        """Append a copy between two (name, version)s."""
        copy = Operator(
            "Copy", (source[0],), (target[0],), {}, self.blobs[target[0]].device, phase, "", InjectCopies.name
        )
        if source[1] or target[1]:
            copy = copy._replace(input_versions=source[1:], output_versions=target[1:])
        self.ops.append(copy)

    def replay(self, name: str, version: int, device: Device, phase: Phase) -> tuple[str, int]:
        """Make a view again on *device*, over a copy of its whole storage."""
        maker = self.makers.get((name, version))
        if maker is None:
            return self.bring(name, version, device, phase)
        if (name, version, device) not in self.replayed:
            inputs, versions = zip(*[self.replay(*read, device, phase) for read in maker.reads], strict=True)
            outputs = []
            for made, (position, source) in zip(maker.makes, sorted(maker.effects.views), strict=True):
                blob = self.blobs[maker.outputs[position]]
                local, _ = self.declare(blob, device)
                storage = self.blobs[inputs[source]].storage
                self.blobs[local] = self.blobs[local]._replace(storage=storage, offset=blob.offset)
                outputs.append(local)
                self.replayed[(*made, device)] = local, 0
            self.ops.append(
                maker._replace(
                    inputs=inputs,
                    outputs=tuple(outputs),
                    input_versions=stored_versions(versions),
                    output_versions=None,
                    device=device,
                    phase=phase,
                    by=InjectCopies.name,
                )
            )
        return self.replayed[name, version, device]

    def crosses_as_itself(self, view: Blob, version: int) -> bool:
        """Whether a view has fewer bytes than its storage, and can be laid out alone with its own strides."""
        storage = self.blobs[view.storage]
        if (view.name, version) in self.conjugate:
            return False
        if dense_nbytes(view, self.dims) >= dense_nbytes(storage, self.dims):
            return False
        if view.shape is None or view.strides is None:
            return True
        return not overlaps(bind_shape(view.shape, self.dims), bind_shape(view.strides, self.dims))

    def next_version(self, name: str) -> int:
        """The version that the next write to a copy makes."""
        self.versions[name] = self.versions.get(name, 0) + 1
        return self.versions[name]
