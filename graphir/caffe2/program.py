"""Caffe2's nets as graphir's: files in and out, and a training step with the net that fills its parameters."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, NoReturn

from ..errors import GraphirError, nearest
from ..ir.blob import Blob, Role
from ..ir.covers import Covers
from ..ir.device import Device, DeviceName
from ..ir.dtype import ITEMSIZE
from ..ir.files.disk import path_of
from ..ir.names import replica_prefix
from ..ir.net import Net
from ..ir.placement import blob_devices
from ..ir.program import Program
from ..ir.size import LARGEST
from ..ir.verify import require
from .convert import decode, encode
from .dialect import CAFFE2
from .files import read_net, write_net

__all__ = ["load_net", "load_program", "save_net"]

_FIXED: Final = "a Caffe2 net does not name its dimensions"


def load_net(path: str | Path) -> Net:
    """Read a Caffe2 ``NetDef`` as a net; :func:`save_net` writes it back as it was.

    Types, names, arguments and order are kept. Operators without a device are on ``cpu:0``; external inputs are on the
    net's device, or ``cpu:0``. Shapes and element types are not known. An input that no operator makes and that is not
    external is declared, so that ``verify`` names it.

    Args:
        path: of a ``.pb``, ``.pbtxt``, ``.pb.gz`` or ``.pbtxt.gz``.

    Raises:
        FileError: the file is missing or damaged, holds something else than a ``NetDef``, has control inputs in a
            cycle, or names a device that there is not.
    """
    path = path_of(path)
    return decode(read_net(path), str(path))


def save_net(net: Net, path: str | Path) -> None:
    """Write a net of Caffe2's operators as a ``NetDef``, in the form that the end of *path* says.

    One net gives the same bytes each time. What passes moved has its new device, and what they added is written as
    Caffe2 would add it. Phases, modules, shapes, seed ids and the names of passes are not part of a ``NetDef``.

    Args:
        net: a net that was loaded from Caffe2, or what passes made of it.
        path: ending in ``.pb``, ``.pbtxt``, ``.pb.gz`` or ``.pbtxt.gz``.

    Raises:
        GraphirError: an operator, argument or name is not Caffe2's; the operator is named.
        FileError: the file cannot be written; one that stood there before is as it was.
    """
    require(net, (Net,), "save_net")
    write_net(encode(net), path)


def load_program(
    step: str | Path | Net,
    init: str | Path | Net | None = None,
    devices: Sequence[DeviceName] = (),
    device_prefix: str = "gpu",
    params: Sequence[str] = (),
    shapes: Mapping[str, tuple[Sequence[int], str]] | None = None,
) -> Program:
    """Read a training or inference step, and the net that fills its parameters, as a program.

    External inputs of the step are parameters (*params*), state (what else *init* makes or the step overwrites) or
    inputs. They live where *init* makes them. Parameters and state that it does not make are fed before the first step.

    Args:
        step: one step (Caffe2's ``model.net``), a path or a net.
        init: what fills the parameters (``model.param_init_net``); without one they are fed.
        devices: the devices that the replicas' prefixes name, as numbers or as they are printed; ``[0, 1]`` for
            ``gpu_0/`` and ``gpu_1/``. Without any the program has one replica without a prefix.
        device_prefix: what stands before the number: ``gpu`` or ``cpu``.
        params: the parameters, prefixes included; by default the external inputs that the step overwrites and for
            which it makes a gradient, ``<name>_grad``.
        shapes: shape and short element type of the blobs where they are known: ``{"gpu_0/data": ([8, 16], "f32")}``.

    Raises:
        FileError: as :func:`load_net`.
        GraphirError: an operator reads what nobody makes, or only a later operator; a parameter, device or shape is not
            of the step.
    """
    net, where = _loaded(step, "step")
    _refuse_undefined(net, where)
    first = None
    if init is not None:
        first, first_where = _loaded(init, "init")
        _refuse_undefined(first, first_where)
    known = _shapes({} if shapes is None else shapes, (net,) if first is None else (net, first))
    replicas = _replicas(net, devices, device_prefix, where)
    roles = _roles(net, first, _strings(params, "params"), where)
    if first is None:
        first = Net("init", (), {}, dialect=CAFFE2)
    given = set(first.external_inputs)
    in_init: dict[str, Role] = {n: roles.get(n, "input" if n in given else "temporary") for n in first.blobs}
    in_first = _devices(first, {})
    blobs = _described(net, _devices(net, in_first), roles, known)
    ops = tuple([op._replace(phase="init") for op in first.ops])
    first = first.with_(ops=ops, blobs=_described(first, in_first, in_init, known))
    return Program(net.name, first, net.with_(blobs=blobs), covers=Covers(fixed=_FIXED), replicas=replicas)


def _loaded(source: object, argument: str) -> tuple[Net, str]:
    """A net, and what it is called in errors."""
    if isinstance(source, Net):
        return source.with_(dialect=CAFFE2), f"net {source.name!r}"
    if not isinstance(source, str | os.PathLike):
        what = f"load_program takes a path or a Net as {argument}, not {type(source).__name__}"
        raise GraphirError(what, fix="give the path of a .pb or .pbtxt, or what load_net returned")
    return load_net(Path(source)), str(source)


def _refuse_undefined(net: Net, where: str) -> None:
    """Refuse operators and outputs that name what has no value there."""
    made = set(net.external_inputs)
    for position, op in enumerate(net.ops):
        for name in op.inputs:
            if name not in made:
                what = f"nobody makes the blob {name!r}{nearest(name, made)}"
                fix = "add it to external_input, or an operator that makes it"
                if net.producer(name):
                    what, fix = f"blob {name!r} is read before it is made", "put what makes it before what reads it"
                at = f"{', '.join(op.outputs)} = {op.type}({', '.join(op.inputs)})"
                raise GraphirError(what, at=at, where=f"{where}, at op[{position}]", fix=fix)
        made.update(op.outputs)
    for name in net.external_outputs:
        if name not in made:
            what = f"nobody makes the external output {name!r}{nearest(name, made)}"
            raise GraphirError(what, where=where, fix="take it out of external_output")


def _strings(names: object, argument: str) -> tuple[str, ...]:
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise GraphirError(f"{argument} is {names!r}, not a list of names", fix=f"write {argument}=[…]")
    found = tuple(names)
    for name in found:
        if not isinstance(name, str):
            raise GraphirError(
                f"{argument} has {name!r}, which is not a name", fix="give the names of blobs, as strings"
            )
    return found


def _replicas(net: Net, devices: object, prefix: object, where: str) -> tuple[str, ...]:
    """The prefix of each replica."""
    if not isinstance(prefix, str):
        raise GraphirError(f"device_prefix is {prefix!r}, not a string", fix='write "gpu" or "cpu"')
    if isinstance(devices, str) or not isinstance(devices, Iterable):
        raise GraphirError(f"devices is {devices!r}, not a list", fix="write devices=[0, 1]")
    found = []
    for device in devices:
        named = Device.parse(device)
        if not isinstance(device, int) and named.kind != prefix:
            what = f"devices has {device!r}, but device_prefix is {prefix!r}"
            raise GraphirError(what, fix=f"write device_prefix={named.kind!r}, or devices=[{named.index}]")
        replica = replica_prefix(named.index, prefix)
        if replica in found:
            raise GraphirError(f"device {device} is listed twice", fix="list each device once")
        if not any(name.startswith(replica) for name in net.blobs):
            there = dict.fromkeys(name.partition("/")[0] for name in net.blobs if "/" in name)
            what = f"no blob of net {net.name!r} is named after device {device}: none begins with {replica!r}"
            fix = f"prefixes there: {', '.join(list(there)[:8]) or 'none'}; give devices and device_prefix to match"
            raise GraphirError(what, where=where, fix=fix)
        found.append(replica)
    return tuple(found) or ("",)


def _roles(net: Net, init: Net | None, params: tuple[str, ...], where: str) -> dict[str, Role]:
    """The role of each external input of the step."""
    external = dict.fromkeys(net.external_inputs)
    for name in params:
        if name not in external:
            what = f"parameter {name!r} is not an external input of net {net.name!r}{nearest(name, external)}"
            raise GraphirError(what, where=where, fix="params are names of external inputs, prefixes included")
    made = set() if init is None else {name for op in init.ops for name in op.outputs} | set(init.external_inputs)
    if not params:
        written = {name for op in net.ops for name in op.outputs}
        trained = (
            written & external.keys() & {name.removesuffix("_grad") for name in net.blobs if name.endswith("_grad")}
        )
        params = tuple(name for name in external if name in trained)
    chosen, kept = set(params), made | {name for op in net.ops for name in op.outputs}
    return {name: "param" if name in chosen else "state" if name in kept else "input" for name in external}


def _shapes(shapes: object, nets: Sequence[Net]) -> dict[str, tuple[tuple[int, ...], str]]:
    """The shapes that were given, checked."""
    if not isinstance(shapes, Mapping):
        raise GraphirError(f"shapes is a {type(shapes).__name__}, not a mapping", fix=_SHAPE_FIX)
    names = dict.fromkeys(name for net in nets for name in net.blobs)
    found: dict[str, tuple[tuple[int, ...], str]] = {}
    for name, described in shapes.items():
        if name not in names:
            raise GraphirError(f"shapes has {name!r}, which is no blob{nearest(name, names)}", fix=_SHAPE_FIX)
        if not isinstance(described, tuple | list) or len(described) != 2:
            _refuse_shape(name, described)
        shape, dtype = described
        if not isinstance(dtype, str) or dtype not in ITEMSIZE:
            what = f"{dtype!r}, of blob {name!r}, is not an element type{nearest(dtype, ITEMSIZE)}"
            raise GraphirError(what, fix=f"element types: {', '.join(ITEMSIZE)}")
        if not isinstance(shape, tuple | list) or not all(type(n) is int and 0 <= n <= LARGEST for n in shape):
            _refuse_shape(name, described)
        found[name] = tuple(shape), dtype
    return found


_SHAPE_FIX: Final = 'write shapes={"data": ([8, 16], "f32")}'


def _refuse_shape(name: str, described: object) -> NoReturn:
    raise GraphirError(f"{described!r}, of blob {name!r}, is not a shape and an element type", fix=_SHAPE_FIX)


def _devices(net: Net, known: Mapping[str, Device]) -> dict[str, Device]:
    """Where each blob of the net lives: where *known* says, else what is external where it is."""
    external = {name: net.blobs[name].device for name in net.external_inputs}
    return blob_devices(net.ops, {**external, **known}, CAFFE2)


def _described(
    net: Net,
    devices: Mapping[str, Device],
    roles: Mapping[str, Role],
    shapes: Mapping[str, tuple[tuple[int, ...], str]],
) -> dict[str, Blob]:
    """The blobs of the net, with their devices, roles and shapes."""
    blobs = {}
    for name, blob in net.blobs.items():
        shape, dtype = shapes.get(name, (blob.shape, blob.dtype))
        blobs[name] = Blob(name, shape, dtype, devices[name], roles.get(name, blob.role), name)
    return blobs
