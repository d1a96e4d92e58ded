"""Measure the operators of a program where it shall run: what each allocates inside, and how long it takes.

::

    operators of the step ──signature──▶ those that are not in the file ──called one by one──▶ measured
                                                                                                  │
    graphir.memory, graphir.Profile ◀──────────────────── the file, which other processes add to ◀┘
"""

from __future__ import annotations

import os
import threading
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

import torch

from graphir.runtime.machine.places import places_of
from graphir.runtime.profiling.calls import Subject, Use, measured
from graphir.runtime.profiling.cards import TorchCard, measured_on

from ..analysis.memory import check_dims, check_threads, memory
from ..analysis.profile_files import add, default_path
from ..analysis.profiles import Machine, Profile, machine
from ..analysis.reuse import reuse_distances
from ..analysis.scratch import is_called
from ..errors import GraphirError, counted
from ..ir.device import CPU, Device, DeviceName
from ..ir.files.disk import path_of
from ..ir.plan import Plan, issued_as, sizes_of
from ..ir.program import Program
from ..ir.size import Dims
from ..ir.verify import Planned, require, subject_of, verify

__all__ = ["profile"]

_HOST: Final = torch.device("cpu")
_MOST_USES: Final = 4
"""How many calls of one key are timed, as they follow each other in a step."""

_measuring: Final[dict[int, threading.Lock]] = {}
"""By process, since a fork takes over what was locked: PyTorch's profiler runs once in a process, and calls that are
timed shall have it to themselves."""


def profile(
    subject: Program | Plan | Planned,
    dims: Dims | None = None,
    *,
    threads: int | None = None,
    path: str | Path | None = None,
    device: DeviceName | None = None,
) -> Profile:
    """Measure what operators take where they shall run: bytes that each allocates inside, and seconds; on a CUDA card
    also how many kernels each launches, and the seconds until the host has issued it.

    Each signature (type, shapes, strides, element types, arguments) is measured once, on operands that are made up for
    it, and kept in a file of the host or of the card, to which several processes may add at once.
    :func:`graphir.memory` and :func:`graphir.estimate` predict with what the default files have.

    Args:
        subject: whose step's operators are measured; nothing of its state is read or written. A session and a compiled
            step stand for their plan.
        dims: the value of each dimension; the captured ones, or those that the plan was emitted for, by default.
        threads: how many threads one kernel uses on the host; as many as torch now uses by default.
        path: of the file; by default that of the machine, see :mod:`graphir.analysis.profile_files`.
        device: where all operators are measured, as torch has it: ``cuda:1``, ``cpu``. By default each where it would
            run: where a session has its device, else on the card of its device's number if this process sees cards,
            else on the host.

    Returns:
        All that the file has then. What could not be measured is in ``failed``. Where devices are different machines,
        as cards and the host are, it has what each one's file has, and predicts for all.

    Raises:
        GraphirError: *subject* is neither, *dims* or *threads* are nothing that :func:`graphir.memory` takes, *device*
            is none or is not there, *path* is one file for several machines, or a profiler of PyTorch's is running.
        VerifyError: *subject* is not well-formed.
        FileError: the file cannot be read or written, is damaged, or is of another machine or version.
    """
    bound: Mapping[Device, torch.device] = getattr(subject, "_places", {})
    subject = subject_of(subject)
    require(subject, (Program, Plan), "profile")
    check_threads(threads)
    check_dims("dims", {} if dims is None else dims, subject)
    devices = subject.step.devices
    places = dict(bound) or places_of("auto", devices)
    if device is not None:
        places = dict.fromkeys(devices, _place(device))
    count = threads or torch.get_num_threads()
    sizes = {**sizes_of(subject), **(dims or {})}
    verify(subject, dims=sizes, placed=False)
    parts = _parts(subject, sizes, count, places)
    if path is not None and len(parts) > 1:
        named = ", ".join([str(part.machine) for part in parts])
        raise GraphirError(
            f"the step runs on several machines, and {str(path)!r} is one file: {named}",
            fix=f"say which, as device={str(parts[0].place)!r}, or leave path out: each machine has a file then",
        )
    with _measuring.setdefault(os.getpid(), threading.Lock()):
        found = [
            _measured(part, count, default_path(part.machine) if path is None else path_of(path)) for part in parts
        ]
    if len(parts) == 1:
        return found[0]
    of = {str(device): each for part, each in zip(parts, found, strict=True) for device in part.devices}
    failed = {name: why for each in found for name, why in each.failed.items()}
    return replace(found[0], failed=failed, devices=of)


class _Part(NamedTuple):
    """What is measured on one machine.

    Attributes:
        machine: the host, or a card.
        place: its device; of several like cards one.
        devices: the logical devices that are there.
        wanted: what there is to measure, by the keys of a profile.
    """

    machine: Machine
    place: torch.device
    devices: list[Device]
    wanted: Mapping[str, Subject]


def _parts(subject: Program | Plan, dims: Dims, threads: int, places: Mapping[Device, torch.device]) -> list[_Part]:
    """What is measured on each machine that has something to measure; on the first one, where none has."""
    machines = {at: TorchCard(at).machine() if at.type == "cuda" else machine() for at in {_HOST, *places.values()}}
    found: dict[Machine, _Part] = {}
    for device in subject.step.devices or [CPU]:
        place = places.get(device, _HOST)
        found.setdefault(machines[place], _Part(machines[place], place, [], {})).devices.append(device)
    distances = reuse_distances(subject.step, dims, memory(subject, dims, threads=threads, profile=None).peak)
    parts = [
        part._replace(wanted=_subjects(subject, dims, threads, distances, part.devices, part.place))
        for part in found.values()
    ]
    return [part for part in parts if part.wanted] or parts[:1]


def _place(device: DeviceName) -> torch.device:
    """The real device that somebody names."""
    named, count = Device.parse(device), torch.cuda.device_count()
    if named.is_host:
        return _HOST
    if named.kind != "gpu" or named.index >= count:
        raise GraphirError(
            f"device {str(device)!r} is not there: this process sees {counted(count, 'CUDA card')}",
            fix="name one of them, such as 'cuda:0', or the host, 'cpu'",
        )
    return torch.device("cuda", named.index)


def _measured(part: _Part, threads: int, file: Path | None) -> Profile:
    """What a machine's file has when those of the calls are in it that were not."""
    here = part.machine
    known = Profile(here, {}) if file is None else add(file, Profile(here, {}))
    missing = {key: subject for key, subject in part.wanted.items() if key not in known.calls}
    on_card = part.place.type == "cuda"
    found, failed = measured_on(TorchCard(part.place), missing) if on_card else measured(missing, threads)
    made = Profile(here, {**known.calls, **found}, failed)
    return made if file is None else add(file, Profile(here, found, failed))


def _subjects(
    subject: Program | Plan,
    dims: Dims,
    threads: int,
    distances: Sequence[tuple[int | None, ...]],
    devices: Container[Device],
    place: torch.device,
) -> dict[str, Subject]:
    """What there is to measure of some devices, by the keys of a profile; of operators with one key, the first ones of
    one device.

    Calls of one device follow others of the same key, whose code is in its core's caches then. What generated code
    makes one call of is timed once.
    """
    blobs, dialect = subject.step.blobs, subject.step.dialect
    found: dict[str, Subject] = {}
    for position, (op, reuse) in enumerate(zip(subject.step.ops, distances, strict=True)):
        moves = op.type in dialect.copies | dialect.stays and issued_as(op) != "collective"
        # What a copy takes depends on what lies between two devices.
        if op.device not in devices or moves or not is_called(op):
            continue
        key = Profile.key(op, blobs, dims, None if place.type == "cuda" else threads)
        if key is None:
            continue
        known, use = found.get(key), Use(position, reuse)
        if known is None:
            found[key] = Subject(op, blobs, dims, (use,))
        elif known.is_called_with_others or blobs[op.outputs[0]].device != blobs[known.op.outputs[0]].device:
            continue
        elif len(known.uses) < _MOST_USES:
            found[key] = known._replace(uses=(*known.uses, use))
    return found
