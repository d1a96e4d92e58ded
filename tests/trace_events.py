"""A trace as Perfetto's importer reads it: what breaks the Trace Event Format, or Perfetto's own rules, is an error.

The importer's rules, where they are stricter than the format: times are microseconds, which become whole nanoseconds by
rounding; slices of a thread are disjoint or nested; ids of arrows are numbers; the ends of an arrow belong to the slice
that began last on their thread, and events at one time are taken by falling duration, then in the file's order.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

_KEYS = {
    "M": {"ph", "pid", "tid", "name", "args"},
    "X": {"ph", "pid", "tid", "name", "args", "cat", "ts", "dur"},
    "s": {"ph", "pid", "tid", "name", "cat", "ts", "id"},
    "f": {"ph", "pid", "tid", "name", "cat", "ts", "id", "bp"},
}
_METADATA = {"process_name": str, "thread_name": str, "process_sort_index": int, "thread_sort_index": int}


class Slice(NamedTuple):
    """A slice, and the names of its process and its thread."""

    process: str
    thread: str
    event: Mapping[str, Any]


class Imported(NamedTuple):
    """What a viewer shows.

    Attributes:
        threads: by process, the names of its threads in the order in which they are shown.
        slices: in order of time.
        arrows: pairs of slices.
    """

    threads: dict[str, list[str]]
    slices: list[Slice]
    arrows: list[tuple[Slice, Slice]]


def imported(trace: Mapping[str, Any]) -> Imported:
    """What a viewer shows of a trace."""
    assert trace["displayTimeUnit"] in ("ms", "ns")
    events = trace["traceEvents"]
    for event in events:
        _check(event)
    processes, names = _names(events)
    threads = {process: [names[key] for key in sorted(names) if key[0] == pid] for pid, process in processes.items()}
    slices: list[Slice] = []
    stacks: dict[int, list[Slice]] = {}
    begun: dict[int, Slice] = {}
    arrows = []
    timed = [event for event in events if event["ph"] != "M"]
    for event in sorted(timed, key=lambda event: (_nanoseconds(event["ts"]), -_nanoseconds(event.get("dur", 0)))):
        now = _nanoseconds(event["ts"])
        stack = stacks.setdefault(event["tid"], [])
        if event["ph"] == "X":
            while stack and _end(stack[-1].event) <= now:
                stack.pop()
            assert not stack or now + _nanoseconds(event["dur"]) <= _end(stack[-1].event), "slices overlap"
            stack.append(Slice(processes[event["pid"]], names[event["pid"], event["tid"]], event))
            slices.append(stack[-1])
        elif event["ph"] == "s":
            assert event["id"] not in begun, "two arrows have one id"
            begun[event["id"]] = stack[-1]
        else:
            arrows.append((begun.pop(event["id"]), stack[-1]))
    assert not begun, "an arrow has no end"
    return Imported(threads, slices, arrows)


def _check(event: Mapping[str, Any]) -> None:
    phase = event["ph"]
    optional = {"tid"} if event["name"].startswith("process_") else set()
    assert _KEYS[phase] - optional <= event.keys() <= _KEYS[phase], event
    for key in event.keys() & {"pid", "tid", "id"}:
        assert type(event[key]) is int and 0 < event[key] < 1 << (53 if key == "id" else 31), event
    for key in event.keys() & {"ts", "dur"}:
        assert type(event[key]) in (int, float) and math.isfinite(event[key]) and event[key] >= 0, event
    assert all(type(event[key]) is str and event[key] for key in event.keys() & {"name", "cat"}), event
    assert event.get("bp", "e") == "e", event
    if phase == "M":
        (value,) = event["args"].values()
        assert type(value) is _METADATA[event["name"]], event


def _names(events: list[Any]) -> tuple[dict[int, str], dict[tuple[int, int], str]]:
    """The names of processes, and of threads; a thread is named by its ``tid`` alone."""
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert len({tid for _, tid in threads}) == len(threads), "two processes share a tid"
    for pid in processes:
        assert pid == min(tid for process, tid in threads if process == pid), "the first thread is not the main one"
    return processes, threads


def _nanoseconds(microseconds: float) -> int:
    return round(microseconds * 1000)


def _end(event: Mapping[str, Any]) -> int:
    return _nanoseconds(event["ts"]) + _nanoseconds(event["dur"])
