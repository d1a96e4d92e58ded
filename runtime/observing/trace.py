"""A step as a trace in the Trace Event Format, which Perfetto and Chrome's tracing page show.

The lanes are the threads of two processes, *measured* and *predicted*, and each instruction that takes time is a slice
(``X``) on its lane. An arrow (``s`` to ``f``) leads from what a lane waited for to what it did next: from the operator
that made a value to the copy that brings it, and from the copy to its reader. An end of an arrow has the time at which
its slice begins, by which viewers find the slice.

Perfetto asks for more than the format does. It reads an arrow's ``id`` as a number, and leaves the arrow out where it
is none. It names threads by their ``tid`` alone, so no two processes share a ``tid``. It takes the thread whose ``tid``
is the ``pid`` for the main one, and shows it first, so a process's first lane has the ``pid`` as its ``tid``. It leaves
slices out that overlap without one holding the other, hence whole nanoseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

from graphir.analysis.overlap import flows, micro_batch, overlap_of
from graphir.analysis.schedule import Interval
from graphir.ir.blob import dense_nbytes
from graphir.ir.files.disk import atomic_write, path_of
from graphir.ir.plan import Event, Instruction, Plan
from graphir.ir.size import Dims
from graphir.ir.text import operator_text

from .measurement import Measurement

__all__ = ["trace_events", "write_trace"]

_SHOWN: Final = frozenset({"run", "copy", "collective", "wait"})

_Slices: TypeAlias = Mapping[int, Interval]


def write_trace(
    path: str | Path, measurement: Measurement, executor: str, reason: str, predicted: _Slices | None
) -> None:
    """Write the last measured step and its prediction as a trace, whole or not at all.

    Args:
        path: of the file.
        measurement: of at least one step.
        executor: what executed it, by name.
        reason: why it was this one, in words.
        predicted: when each instruction would have been executed; None where nobody knows how fast the lanes work.

    Raises:
        FileError: the file cannot be written.
    """
    path, plan, dims = path_of(path), measurement.setting.plan, measurement.last_dims
    first, second = 1, 1 + len(plan.lanes)
    events = trace_events(plan, dims, measurement.timed.intervals, first, "measured")
    if predicted is not None:
        events += trace_events(plan, dims, predicted, second, "predicted")
    about: dict[str, Any] = {"plan": plan.name, "executor": executor, "reason": reason}
    if flows(plan):
        shown = {"measured": measurement.timed.intervals, "predicted": predicted}
        about["overlap"] = {name: overlap_of(plan, taken).to_dict() for name, taken in shown.items() if taken}
    text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": about})
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def trace_events(plan: Plan, dims: Dims, slices: _Slices, process: int, name: str) -> list[dict[str, Any]]:
    """The events of one process: its lanes' names, their slices, and the arrows between them.

    Args:
        plan: whose instructions they are.
        dims: the sizes of the step.
        slices: when each instruction was executed.
        process: its ``pid``; this number and as many after it as there are lanes are those of its threads.
        name: of the process.
    """
    threads = {lane: number for number, lane in enumerate(plan.lanes, start=process)}
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}},
        {"ph": "M", "pid": process, "name": "process_sort_index", "args": {"sort_index": process}},
    ]
    for lane, thread in threads.items():
        of_thread = {"ph": "M", "pid": process, "tid": thread}
        events.append({**of_thread, "name": "thread_name", "args": {"name": lane}})
        events.append({**of_thread, "name": "thread_sort_index", "args": {"sort_index": thread}})
    shown = {p: i for p, i in slices.items() if _is_shown(plan.instructions[p], i)}
    for position, interval in shown.items():
        instruction = plan.instructions[position]
        start, end = _nanoseconds(interval.start), _nanoseconds(interval.end)
        events.append(
            {
                "ph": "X",
                "pid": process,
                "tid": threads[instruction.lane],
                "ts": start / 1000,
                "dur": (end - start) / 1000,
                "cat": instruction.kind,
                "name": _name(plan, instruction),
                "args": _arguments(plan, dims, position),
            }
        )
    for number, (source, target) in enumerate(_arrows(plan, shown)):
        kinds = [plan.instructions[source].kind, plan.instructions[target].kind]
        shared: dict[str, Any] = {"pid": process, "cat": "copy" if "copy" in kinds else "wait", "name": "event"}
        shared["id"] = (process << 32) + number
        for phase, at in (("s", source), ("f", target)):
            end_of = {"ph": phase, "tid": threads[plan.instructions[at].lane], **({"bp": "e"} if phase == "f" else {})}
            events.append({**shared, **end_of, "ts": _nanoseconds(slices[at].start) / 1000})
    return events


def _is_shown(instruction: Instruction, interval: Interval) -> bool:
    """Not a wait that took no time: viewers put it into the operator after it, and let that one's arrow end there."""
    waited = _nanoseconds(interval.end) > _nanoseconds(interval.start)
    return instruction.kind in _SHOWN and (waited or instruction.kind != "wait")


def _nanoseconds(seconds: float) -> int:
    """Whole ones, so that a slice that ends where the next one begins does so in the file too."""
    return round(seconds * 1e9)


def _name(plan: Plan, instruction: Instruction) -> str:
    if instruction.op < 0:
        assert instruction.event is not None
        return f"wait {instruction.event.blob} by {instruction.event.lane}"
    op = plan.step.ops[instruction.op]
    return next(iter(instruction.makes(op.outputs)), op.type)


def _arguments(plan: Plan, dims: Dims, position: int) -> dict[str, Any]:
    """What a viewer shows of a slice."""
    instruction = plan.instructions[position]
    found: dict[str, Any] = {"instruction": position}
    if instruction.op < 0:
        return found
    op = plan.step.ops[instruction.op]
    found |= {"operator": operator_text(op, plan.step), "type": op.type, "phase": op.phase}
    if (micro := micro_batch(op)) is not None:
        found["micro_batch"] = micro
    if op.module:
        found["module"] = op.module
    if op.source:
        found["source"] = op.source
    if instruction.kind == "copy":
        found["bytes"] = dense_nbytes(plan.step.blobs[op.outputs[0]], dims)
    return found


def _arrows(plan: Plan, shown: _Slices) -> Iterator[tuple[int, int]]:
    """For each wait, what its lane waited for, and what the lane did then; what only frees has no arrow."""
    last: dict[str, int] = {}
    recorded: dict[Event, int] = {}
    waiting: dict[str, list[int]] = {}
    for position, instruction in enumerate(plan.instructions):
        lane, event = instruction.lane, instruction.event
        if instruction.op >= 0 and position in shown:
            for source in waiting.pop(lane, ()):
                yield source, position
            last[lane] = position
        elif instruction.kind == "free":
            waiting.pop(lane, None)
        elif event is not None and instruction.kind == "record" and lane in last:
            recorded[event] = last[lane]
        elif event is not None and instruction.kind == "wait" and event in recorded:
            waiting.setdefault(lane, []).append(recorded[event])
