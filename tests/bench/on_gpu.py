"""A section of ``bench gpu``, in a process of its own: ``python on_gpu.py SECTION SECONDS [--pretend]``.

It prints JSON objects, one a line: ``columns`` and ``planned``, the first cells of each group of rows; then each
``row``, and behind a group's last row ``done`` with the group's number. A group that fails has a row that says so, and
the others keep theirs. A row may end in an object, which becomes a file: its cell is the file's name, and the object
comes as ``file``.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final

from gpu_card import MS, Card, Pretended, Section, Task, failed
from gpu_cases import CASES, Way
from gpu_devices import logical, several, trace
from gpu_memory import budgets, memory
from gpu_steps import compiled, steps
from gpu_tests import tests
from runnable import captured

import graphir
from graphir import passes

__all__ = ["SECTIONS", "said"]


def machine(card: Card, _: float) -> Section:
    """What ``Topology.here()`` measures, and a step as it is predicted by it."""
    return Section(
        ("device or link", "figures"),
        [Task((), partial(_here, card)), Task(("ResNet-50's step",), partial(_estimated, card))],
    )


def _here(card: Card) -> Iterator[Sequence[object]]:
    start = time.perf_counter()
    here = graphir.Topology.here()
    taken = time.perf_counter() - start
    for name, speed in here.devices.items():
        rates = ", ".join(f"{dtype} {rate / 1e12:.3g} TFLOP/s" for dtype, rate in speed.flops_per_second.items())
        calls = f"{speed.seconds_per_call * 1e6:.2f} µs a call"
        yield name, f"{rates}; {speed.bytes_per_second / 1e9:.4g} GB/s; {calls}; {(speed.memory or 0) / 2**30:.1f} GiB"
    for link in here.links:
        speed = f"{link.bytes_per_second / 1e9:.3g} GB/s, {link.latency * 1e6:.1f} µs"
        yield f"{link.source} to {link.destination}", speed
    yield "measured in", f"{taken:.1f} s"


def _estimated(card: Card) -> Iterator[Sequence[object]]:
    case = CASES["ResNet-50, batch 32"](card.pretended)
    program = captured(case.example, Way(False, True).optimizer(case.model))
    plan = passes.emit(passes.share_storage(program))
    batch = [tensor.to(card.place) for tensor in (*case.inputs, *case.targets)]
    predicted = graphir.estimate(plan).seconds
    with card.session(plan, program.state) as session:
        found = card.taken(lambda: session.step(*batch)).done
    yield (f"{predicted * MS:.2f} ms estimated, {found * MS:.2f} ms by streams",)


SECTIONS: Final[dict[str, Callable[[Card, float], Section]]] = {
    function.__name__: function
    for function in (tests, machine, steps, memory, logical, trace, several, compiled, budgets)
}


def said(card: Card, section: Section) -> Iterator[dict[str, Any]]:
    """The objects of a section, as they come."""
    keys = [[str(cell) for cell in task.key] for task in section.tasks]
    yield {"columns": section.columns, "planned": keys}
    for number, (key, task) in enumerate(zip(keys, section.tasks, strict=True)):
        try:
            for cells in task.rows():
                *shown, last = cells
                file = last if isinstance(last, dict) else None
                yield {"row": [*key, *map(str, shown), "{file}" if file else str(last)]}
                if file:
                    yield {"file": file}
        except Exception as e:
            yield {"row": [*key, failed(e)]}
        card.clear()
        yield {"done": number}


def main() -> None:
    """Print a section."""
    name, seconds, *pretend = sys.argv[1:]
    card = Pretended() if pretend else Card()
    for found in said(card, SECTIONS[name](card, float(seconds))):
        print(json.dumps(found, separators=(",", ":")), flush=True)


if __name__ == "__main__":
    main()
