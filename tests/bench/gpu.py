"""One command that records a GPU: bits, the machine, steps, memory, logical devices, and several GPUs.

``python tests/bench gpu --seconds 240 --json gpu.json`` runs sections in falling order of worth, each in a process of
its own, and stops in time: sections that the time did not suffice for are named. Needs a checkout, torch and pydantic.
``python tests/bench gpu --json gpu.json --write`` on any other machine writes the tables of such a file into the docs.

::

    gpu.py ──section──▶ on_gpu.py SECTION        one JSON list a line: columns first, then rows
       ▲                     │
       └── until the deadline┘  ──▶ FILE (JSON) ──▶ docs/benchmarks.md
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

__all__ = ["record", "tables"]

ROOT: Final = Path(__file__).resolve().parents[2]


class Section(NamedTuple):
    """One table.

    Attributes:
        name: of the function in ``on_gpu.py`` that measures it.
        title: what stands above the table.
        most: seconds that it may take, of those that are left.
    """

    name: str
    title: str
    most: float


SECTIONS: Final = (
    Section("tests", "Tests that need a GPU, and the first half minute of all others", 60),
    Section("machine", "The machine, as it measures itself", 30),
    Section("steps", "Training steps, `zero_grad` to `optimizer.step`: issued by the host, and done by the device", 90),
    Section("memory", "Less memory than a step needs, at equal measured peak", 90),
    Section("logical", "Several logical devices on one GPU", 60),
    Section("several", "Several GPUs", 60),
    Section("compiled", "Training steps by `torch.compile`", 120),
)


def record(seconds: float, path: Path | None) -> Iterator[str]:
    """Measure all sections, and write the file after each.

    Args:
        seconds: that all of it may take.
        path: of the file; None: none is written.

    Yields:
        lines of the tables, as they come.
    """
    until = time.monotonic() + seconds
    found: dict[str, Any] = {"format": "graphir.gpu", "machine": machine(), "sections": {}}
    for section in SECTIONS:
        lines: list[list[str]] = []
        found["sections"][section.name] = lines
        yield f"\n**{section.title}.**\n"
        for line in _lines(section, until):
            lines.append(line)
            yield from _markdown(lines) if len(lines) == 1 else _markdown(lines)[-1:]
            if path is not None:
                path.write_text(json.dumps(found, indent=1), encoding="utf-8")


def _lines(section: Section, until: float) -> Iterator[list[str]]:
    """The columns and rows of a section, until its time is over."""
    left = min(until - time.monotonic(), section.most)
    if left < 5:
        yield ["not reached: the time was over"]
        return
    folders = [ROOT, *(ROOT / "tests" / folder for folder in ("", "zoo", "bench"))]
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "tests" / "bench" / "on_gpu.py"), section.name, str(left)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])},
    )
    said: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            said.put(line)
        said.put("")

    threading.Thread(target=read, daemon=True).start()
    end, some = time.monotonic() + left, False
    try:
        while line := said.get(timeout=max(end - time.monotonic(), 0.01)):
            some = True
            yield json.loads(line)
        if process.wait() or not some:
            yield [f"ended with status {process.returncode}"]
    except queue.Empty:
        yield [f"stopped after {left:.0f} s; what is missing was not reached"]
    finally:
        with contextlib.suppress(ProcessLookupError):  # what it has started goes too: it would run beside the next one
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _markdown(lines: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    if not lines:
        return []
    columns, *rows = lines
    shown = [f"| {' | '.join(columns)} |", f"| {' | '.join(['---'] * len(columns))} |"]
    return shown + [f"| {' | '.join([*row, *[''] * (len(columns) - len(row))])} |" for row in rows]


def tables(path: Path) -> list[str]:
    """The lines of all tables in a file, the machine first.

    Raises:
        SystemExit: there is no such file, or it is another one.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["format"] != "graphir.gpu":
            raise KeyError("format")
        lines = [f"Measured on {found['machine']['date']}: {_named(found['machine'])}."]
        for section in SECTIONS:
            rows = found["sections"].get(section.name) or [["not reached"]]
            lines += ["", f"**{section.title}.**", "", *_markdown(rows)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise SystemExit(
            f"{path} is no recording of a GPU ({type(e).__name__}: {e}); bench gpu --json writes one"
        ) from e
    return lines


def _named(found: Mapping[str, str]) -> str:
    return ", ".join([f"{key} {value}" if key != "gpu" else value for key, value in found.items() if key != "date"])


def machine() -> dict[str, str]:
    """What was measured on: the date, the cards, driver and clocks, and versions."""
    cards = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    asked = "driver_version,clocks.sm,clocks.mem,clocks.max.sm"
    try:
        said = subprocess.run(
            ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"], capture_output=True, text=True, timeout=20
        ).stdout.splitlines()
    except (OSError, subprocess.TimeoutExpired):
        said = []
    driver, *clocks = [part.strip() for part in (said or ["unknown, unknown"])[0].split(",")]
    return {
        "date": datetime.date.today().isoformat(),
        "gpu": f"{len(cards)} x {cards[0]}" if cards else "no GPU",
        "driver": driver,
        "clocks (SM, memory, most SM)": " / ".join(clocks),
        "CUDA": str(torch.version.cuda),
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "cores": str(os.cpu_count()),
    }
