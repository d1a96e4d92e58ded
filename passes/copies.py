"""Put in the copies that a placement needs.

A copy stands directly before the first operator that needs it and serves every later reader of the same value::

    gpu_0/fc1 @gpu:0 = aten.addmm(…)            gpu_0/fc1 @gpu:0 = aten.addmm(…)
    gpu_0/relu @gpu:1 = aten.relu(gpu_0/fc1) ─▶ gpu_0/fc1_gpu_1 @gpu:1 = Copy(gpu_0/fc1)
                                                gpu_0/relu @gpu:1 = aten.relu(gpu_0/fc1_gpu_1)

Names and positions of copies are those of Caffe2's ``core.InjectCrossDeviceCopies``. But no copy goes stale, and an
update that was made to a copy is brought to where the blob lives (:mod:`.injection`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, NamedTuple, TypeVar, overload

from pydantic import Field

from graphir.errors import GraphirError, PassError
from graphir.ir.device import Device, DeviceName
from graphir.ir.net import Net
from graphir.ir.placement import blob_devices, same_memory
from graphir.ir.program import Program
from graphir.ir.size import Dims

from .base import Pass, Placed, build, register
from .injection import Injection, memory_of
from .needless import without_needless
from .sparse_reduction import ungathered

__all__ = ["InjectCopies", "InjectedCopies", "inject_caffe2_copies", "inject_copies"]


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


@register
class InjectCopies(Pass):
    """See :func:`inject_copies`; the options, which Caffe2's nets take, are those of :func:`inject_caffe2_copies`."""

    name: ClassVar[str] = "inject_copies"

    placeholder_ops: tuple[str, ...] = ()
    blob_to_device: dict[str, Placed] = Field(default_factory=dict)

    def rewrite(self, program: Program) -> Program:
        if (self.blob_to_device or self.placeholder_ops) and not program.step.dialect.workspace:
            raise PassError(
                f"program {program.name!r} is not from Caffe2", fix="leave blob_to_device and placeholder_ops out"
            )
        filled, placed = self.nets(program)
        return program.with_(init=filled.result, step=placed.result)

    def nets(self, program: Program) -> tuple[Injection, Injection]:
        """The program's nets with their copies, one after the other."""
        init, step, known = program.init, _as_shifted(program.step), _devices(self.blob_to_device)
        taken = {**_claims(known, None), **dict.fromkeys(step.blobs)}
        filled = self.net(init, program.dims, known, taken, live=step.external_inputs)
        if known or self.placeholder_ops:
            known |= {name: blob.device for name, blob in filled.blobs.items()}
        taken = {**_claims(known, None), **dict.fromkeys(init.blobs)}
        return filled, self.net(step, program.dims, known, taken)

    def net(
        self,
        net: Net,
        dims: Dims,
        known: Mapping[str, Device],
        taken: Mapping[str, Device | None],
        present: Mapping[str, dict[Device, str]] | None = None,
        live: Iterable[str] = (),
    ) -> Injection:
        """One net with its copies; the arguments are those of :class:`Injection`, and where *known* blobs live."""
        dialect = net.dialect.without(self.placeholder_ops) if self.placeholder_ops else net.dialect
        if known or self.placeholder_ops:
            given = {name: net.blobs[name].device for name in net.external_inputs}
            homes = blob_devices(net.ops, {**given, **known}, dialect)
            net = net.with_(blobs={name: blob.on(homes.get(name, blob.device)) for name, blob in net.blobs.items()})
        return Injection(net, self.name, dims, taken=taken, dialect=dialect, present=present or {}, live=live)


_Subject = TypeVar("_Subject", Program, Net)


@overload
def inject_copies(subject: _Subject, *, placeholder_ops: Sequence[str] = ()) -> _Subject: ...


@overload
def inject_copies(
    subject: Program | Net,
    *,
    blob_to_device: Mapping[str, DeviceName],
    blob_remap: Mapping[tuple[str, str], str] | None = None,
    placeholder_ops: Sequence[str] = (),
) -> InjectedCopies: ...


def inject_copies(
    subject: Program | Net,
    *,
    blob_to_device: Mapping[str, DeviceName] | None = None,
    blob_remap: Mapping[tuple[str, str], str] | None = None,
    placeholder_ops: Sequence[str] = (),
) -> Program | Net | InjectedCopies:
    """The program or net with a copy wherever an operator needs a blob that lives elsewhere.

    A copy of ``b`` is called ``b_gpu_<n>`` or ``b_cpu`` (and ``…_1`` where that name is taken). No operator is moved
    and nothing is copied that is already there. Arguments are never changed.

    A Caffe2 net's blobs that are neither its external inputs nor its external outputs count as unread after the net. A
    net that names no external outputs hands on the blobs that it does not read itself.

    Args:
        subject: a program, or a net from Caffe2.
        blob_to_device: as for :func:`inject_caffe2_copies`, which is called where this or *blob_remap* is given.
        blob_remap: the same.
        placeholder_ops: Caffe2 types that have all operands on their own device, whatever is known about them.

    Returns:
        What was given, transformed; or what :func:`inject_caffe2_copies` returns.

    Raises:
        PassError: a net or an option is given that is not from Caffe2, an operator reads what nobody has made, or
            no operator copies between two kinds of devices. Or an operator was shifted away from what
            :func:`share_storage` has it overwrite.
    """
    if blob_to_device is not None or blob_remap is not None:
        return inject_caffe2_copies(
            subject, blob_to_device=blob_to_device or {}, blob_remap=blob_remap, placeholder_ops=placeholder_ops
        )
    step = build(InjectCopies, placeholder_ops=placeholder_ops)
    if not isinstance(subject, Net):
        return step(subject)
    _require_caffe2(subject)
    return step.net(subject, {}, {}, {}).result


def inject_caffe2_copies(
    subject: Program | Net,
    *,
    blob_to_device: Mapping[str, DeviceName],
    blob_remap: Mapping[tuple[str, str], str] | None = None,
    placeholder_ops: Sequence[str] = (),
) -> InjectedCopies:
    """The same for Caffe2's nets that run one after the other: each call returns the maps for the next one.

    ::

        first = inject_caffe2_copies(init, blob_to_device={})
        second = inject_caffe2_copies(step, blob_to_device=first.blob_to_device, blob_remap=first.blob_remap)

    Handing ``blob_remap`` on assumes that nothing changes the copied blobs between the two nets; of blobs that the next
    net writes itself, no copy is taken over. A net that names no external outputs hands on every blob.

    Args:
        subject: a program, or a net from Caffe2.
        blob_to_device: where blobs live that are fed, or made by earlier nets, as ``{"w": "gpu:0"}``; other external
            inputs live where the net says.
        blob_remap: copies that earlier nets made, as ``{("w", "gpu:1"): "w_gpu_1"}``.
        placeholder_ops: as for :func:`inject_copies`.

    Returns:
        The net with the maps. For a program, ``net`` is its step, and ``program`` the program.

    Raises:
        PassError: as :func:`inject_copies`; or ``blob_remap`` is given with a program, or has copies that
            ``blob_to_device`` does not have there.
    """
    step = build(InjectCopies, placeholder_ops=placeholder_ops, blob_to_device=blob_to_device)
    known = _devices(step.blob_to_device)
    if not isinstance(subject, Net):
        if blob_remap is not None:
            raise PassError(
                "blob_remap goes with a net", fix="a program begins with its init net: nothing is copied yet"
            )
        program = step(subject)
        filled, placed = step.nets(subject)
        known |= {name: blob.device for done in (filled, placed) for name, blob in done.result.blobs.items()}
        return InjectedCopies(program.step, known, _copies_left(placed), program)
    _require_caffe2(subject)
    remap = None if blob_remap is None else _copies(blob_remap)
    for (name, device), copy in (remap or {}).items():
        if copy not in known or not same_memory(known[copy], device):
            raise PassError(
                f"blob_remap has {copy!r} as the copy of {name!r} on {device}; blob_to_device does not have it there",
                fix="hand on both maps of the call for the net before",
            )
    # A blob that this net writes changes from step to step; an earlier net's copy of it does not.
    written = {name for op in subject.ops for name in op.outputs} if remap else set()
    kept = {key: copy for key, copy in (remap or {}).items() if written.isdisjoint((key[0], copy))}
    present: dict[str, dict[Device, str]] = {}
    for (name, device), copy in kept.items():
        if name in subject.external_inputs:
            home = known.get(name, subject.blobs[name].device)
            present.setdefault(name, {memory_of(home): name})[memory_of(device)] = copy
    live = () if subject.external_outputs else subject.blobs
    done = step.net(subject, {}, known, _claims(known, remap), present, live)
    known |= {name: blob.device for name, blob in done.result.blobs.items()}
    return InjectedCopies(done.result, known, {**kept, **_copies_left(done)})


def _as_shifted(net: Net) -> Net:
    """The net without copies that earlier passes put in and that are not needed where its operators now are."""
    return net if net.dialect.workspace else without_needless(ungathered(net))


def _require_caffe2(net: Net) -> None:
    """Refuse a net that is not from Caffe2, or reads what nobody has made: it is not verified, as a program is."""
    if not net.dialect.workspace:
        raise PassError(f"net {net.name!r} is not from Caffe2", fix="inject the copies into its program")
    made = set(net.external_inputs)
    for op in net.ops:
        for name in op.inputs:
            if name not in made:
                later = net.producer(name) is not None
                raise PassError(
                    f"blob {name!r} is read before {'an operator makes it' if later else 'anybody has made it'}",
                    at=f"{op.type} -> {', '.join(op.outputs)}",
                    where=f"net {net.name!r}",
                    fix="list it as an external input, or make it before",
                )
        made.update(op.outputs)


def _devices(named: Mapping[str, str]) -> dict[str, Device]:
    return {name: Device.parse(device) for name, device in named.items()}


def _copies(named: object) -> dict[tuple[str, Device], str]:
    found: dict[tuple[str, Device], str] = {}
    for key, copy in named.items() if isinstance(named, Mapping) else [(named, "")]:
        if not (isinstance(key, tuple) and len(key) == 2 and isinstance(key[0], str) and isinstance(copy, str)):
            raise PassError(f"blob_remap has {key!r}", fix='write blob_remap={("w", "gpu:1"): "w_gpu_1"}')
        try:
            found[key[0], Device.parse(key[1])] = copy
        except GraphirError as e:
            raise PassError(f"blob_remap: {e.what}", fix=e.fix) from None
    return found


def _claims(known: Mapping[str, Device], remap: Mapping[tuple[str, Device], str] | None) -> dict[str, Device | None]:
    """The names of blobs of earlier nets, which no new copy may get. Each has the one memory in which a copy may get it
    after all, because it is the blob that the same copy was made to before. Without *remap* nobody knows which blobs
    are copies, so that each may be one in the memory where it lives."""
    if remap is None:
        return {name: memory_of(device) for name, device in known.items()}
    return {**dict.fromkeys(known), **{copy: memory_of(device) for (_, device), copy in remap.items()}}


def _copies_left(done: Injection) -> dict[tuple[str, Device], str]:
    """By blob and device, the copy that holds the blob's value at the end of the net."""
    return {
        (name, done.blobs[copy].device): copy
        for name, held in done.present.items()
        if name not in done.away
        for copy in held.values()
        if copy != name and copy in done.blobs
    }
