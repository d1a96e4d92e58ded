"""Measure the operators of a program where it shall run: what each allocates inside, and how long it takes.

::

    operators of the step ──signature──▶ those that are not in the file ──called one by one──▶ measured
                                                                                                  │
    graphir.memory, graphir.Profile ◀──────────────────── the file, which other processes add to ◀┘
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Final

import torch

from graphir.runtime.profiling.calls import Subject, Use, measured

from .analysis.memory import check_dims, check_threads, memory
from .analysis.profile_files import add, default_path
from .analysis.profiles import Profile, machine
from .analysis.reuse import reuse_distances
from .analysis.scratch import is_called
from .ir.files.disk import path_of
from .ir.plan import Plan, issued_as, sizes_of
from .ir.program import Program
from .ir.size import Dims
from .ir.verify import Planned, require, subject_of, verify

__all__ = ["profile"]

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
) -> Profile:
    """Measure what operators take on this machine's host: bytes that each allocates inside, and seconds.

    Each signature (type, shapes, strides, element types, arguments) is measured once, on operands that are made up for
    it, and kept in a file, to which several processes may add at once. :func:`graphir.memory` predicts with what the
    default file has.

    Args:
        subject: whose step's operators are measured; nothing of its state is read or written. A session and a compiled
            step stand for their plan.
        dims: the value of each dimension; the captured ones, or those that the plan was emitted for, by default.
        threads: how many threads one kernel uses; as many as torch now uses by default.
        path: of the file; by default this machine's, see :mod:`graphir.analysis.profile_files`.

    Returns:
        All that the file has then. What could not be measured is in ``failed``.

    Raises:
        GraphirError: *subject* is neither, *dims* or *threads* are nothing that :func:`graphir.memory` takes, or a
            profiler of PyTorch's is running.
        VerifyError: *subject* is not well-formed.
        FileError: the file cannot be read or written, is damaged, or is of another machine or version.
    """
    subject = subject_of(subject)
    require(subject, (Program, Plan), "profile")
    check_threads(threads)
    check_dims("dims", {} if dims is None else dims, subject)
    file = default_path() if path is None else path_of(path)
    count = threads or torch.get_num_threads()
    sizes = {**sizes_of(subject), **(dims or {})}
    verify(subject, dims=sizes, placed=False)
    with _measuring.setdefault(os.getpid(), threading.Lock()):
        here = machine()
        known = Profile(here, {}) if file is None else add(file, Profile(here, {}))
        wanted = _subjects(subject, sizes, count)
        found, failed = measured({key: s for key, s in wanted.items() if key not in known.calls}, count)
        made = Profile(here, {**known.calls, **found}, failed)
        return made if file is None else add(file, Profile(here, found, failed))


def _subjects(subject: Program | Plan, dims: Dims, threads: int) -> dict[str, Subject]:
    """What there is to measure, by the keys of a profile; of operators with one key, the first ones of one device.

    Calls of one device follow others of the same key, whose code is in its core's caches then. What generated code
    makes one call of is timed once.
    """
    blobs, dialect = subject.step.blobs, subject.step.dialect
    held = memory(subject, dims, threads=threads, profile=None).peak
    distances = reuse_distances(subject.step, dims, held)
    found: dict[str, Subject] = {}
    for position, (op, reuse) in enumerate(zip(subject.step.ops, distances, strict=True)):
        moves = op.type in dialect.copies | dialect.stays and issued_as(op) != "collective"
        if moves or not is_called(op):  # what a copy takes depends on what lies between two devices
            continue
        key = Profile.key(op, blobs, dims, threads)
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
