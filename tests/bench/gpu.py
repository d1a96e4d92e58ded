"""One command that records a GPU: bits, the machine, steps, memory, logical devices, and several GPUs.

``python tests/bench gpu --seconds 240 --json gpu.json`` runs sections in falling order of worth, each in a process of
its own, and stops in time: rows that the time did not suffice for are named. ``python tests/bench gpu --json gpu.json
--write`` on any other machine writes the tables of such a file into the docs. ``--pretend`` has the host in the card's
place, and tiny models: everything runs, and its figures say nothing.

::

    gpu.py ──section──▶ on_gpu.py SECTION        JSON objects, one a line: what is planned first, then rows
       ▲                     │
       └─until its deadline──┘  ──▶ FILE (JSON) ──▶ docs/benchmarks.md
"""

from __future__ import annotations

import datetime
import gzip
import json
import os
import platform
import queue
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from endings import started

__all__ = ["SECTIONS", "Section", "record", "tables"]

ROOT: Final = Path(__file__).resolve().parents[2]
_FORMAT: Final = "graphir.gpu"
_VERSION: Final = 2
"""In version 1, which no file names, a section is the list of its rows."""

_LEAST: Final = 5.0
"""Seconds without which no section begins: imports take most of them."""


class Section(NamedTuple):
    """One table.

    Attributes:
        name: of the function in ``on_gpu.py`` that measures it.
        title: what stands above the table.
        by: the share of all time that has passed when it must have ended. What one section leaves is the next one's.
    """

    name: str
    title: str
    by: float


SECTIONS: Final = (
    Section("tests", "Tests that need a GPU, and the start of all others", 0.25),
    Section("machine", "The machine, as it measures itself", 0.32),
    Section("steps", "Training steps, `zero_grad` to `optimizer.step`", 0.50),
    Section("memory", "Less memory than a step needs, at equal measured peak", 0.66),
    Section("logical", "Several logical devices on one GPU", 0.74),
    Section("trace", "What the allocator does under several logical devices", 0.78),
    Section("several", "Several GPUs", 0.81),
    Section("compiled", "Training steps by `torch.compile`", 0.92),
    Section("budgets", "Less memory by `torch.compile`, at equal measured peak", 1.0),
)


def record(seconds: float, path: Path | None, pretend: bool = False) -> Iterator[str]:
    """Measure all sections, and write the file after each row.

    Args:
        seconds: that all of it may take.
        path: of the file; None: none is written. What the allocator did stands beside it, see :func:`_beside`.
        pretend: whether the host stands in for a card.

    Yields:
        lines of the tables, as they come.

    Raises:
        SystemExit: the file cannot be written.
    """
    start = time.monotonic()
    sections: dict[str, Any] = {}
    found = {"format": _FORMAT, "version": _VERSION, "pretended": pretend, "machine": machine(), "sections": sections}
    _write(path, found)  # before time is spent on what cannot be kept
    for section in SECTIONS:
        rows: list[list[str]] = []
        sections[section.name] = {"clocks": "", "rows": rows}
        yield f"\n**{section.title}.**\n"
        with _clocks() as clocks:
            for line in _lines(section, start + section.by * seconds, path, pretend):
                rows.append(line)
                yield from _markdown(rows) if len(rows) == 1 else _markdown(rows)[-1:]
                _write(path, found)
        sections[section.name]["clocks"] = "".join(clocks)
        _write(path, found)
        yield from [f"\n{line}" for line in clocks]


def _write(path: Path | None, found: Mapping[str, Any]) -> None:
    if path is None:
        return
    try:
        path.write_text(json.dumps(found, indent=1), encoding="utf-8")
    except OSError as e:
        raise SystemExit(f"{path} cannot be written: {e.strerror or e}; name another file by --json") from e


def _beside(path: Path, name: str) -> Path:
    """The file of what a section has recorded beside its rows: ``gpu.trace.json.gz``."""
    return path.with_name(f"{path.name.removesuffix('.json')}.{name}.json.gz")


def _lines(section: Section, end: float, path: Path | None, pretend: bool) -> Iterator[list[str]]:
    """The columns and rows of a section, until its time is over; then what was not reached."""
    left = end - time.monotonic()
    if left < _LEAST:
        yield ["not reached: the time was over"]
        return
    planned: list[list[str]] = []
    done, begun = -1, False
    try:
        for said in _said(section.name, left, pretend):
            if "columns" in said:
                planned = said["planned"]
                yield said["columns"]
            elif "row" in said:
                begun = True
                yield [cell.format(file=_beside(path, section.name).name if path else "none") for cell in said["row"]]
            elif "file" in said and path is not None:
                text = json.dumps(said["file"], separators=(",", ":")).encode()
                _beside(path, section.name).write_bytes(gzip.compress(text, mtime=0))
            elif "done" in said:
                done, begun = said["done"], False
        reason = "not reached"
    except TimeoutError:
        reason = f"not reached in the section's {left:.0f} s"
    except ChildProcessError as e:
        reason = str(e)
    if not planned:  # it had not begun
        yield [reason]
    missing = planned[done + 1 :]
    for key in missing:
        yield [*key, reason + (", but for the rows above" if begun and key is missing[0] else "")]


def _said(name: str, seconds: float, pretend: bool) -> Iterator[dict[str, Any]]:
    """What the process of a section says.

    Raises:
        TimeoutError: its time is over.
        ChildProcessError: it ended with a status.
    """
    folders = [ROOT, *(ROOT / "tests" / folder for folder in ("", "bench", "zoo"))]
    command = [sys.executable, str(ROOT / "tests" / "bench" / "on_gpu.py"), name, str(seconds)]
    end = time.monotonic() + seconds
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")]),
    }
    with started([*command, *["--pretend"] * pretend], stdout=subprocess.PIPE, env=environment) as process:
        lines: queue.SimpleQueue[str] = queue.SimpleQueue()

        def read() -> None:
            assert process.stdout is not None
            with suppress(ValueError):  # closed
                for line in process.stdout:
                    lines.put(line)
            lines.put("")

        threading.Thread(target=read, daemon=True).start()
        try:
            while line := lines.get(timeout=max(end - time.monotonic(), 0.01)):
                yield json.loads(line)
        except queue.Empty:
            raise TimeoutError from None
        if status := process.wait():
            raise ChildProcessError(f"ended with status {status}")


@contextmanager
def _clocks() -> Iterator[list[str]]:
    """What the first card's clocks, power and temperature were meanwhile: one line, which is there afterwards."""
    found: list[str] = []
    names = {"clocks.sm": "SM, MHz", "clocks.mem": "memory, MHz", "power.draw": "W", "temperature.gpu": "°C"}
    command = ["nvidia-smi", "-i", "0", f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits", "-l", "1"]
    with ExitStack() as stack, tempfile.TemporaryFile("w+", encoding="utf-8") as file:
        with suppress(OSError):  # no such command
            stack.enter_context(started(command, stdout=file))
        yield found
        stack.close()
        file.seek(0)
        rows = [re.findall(r"[\d.]+", line) for line in file]
        columns = list(zip(*[map(float, row) for row in rows if len(row) == len(names)], strict=True))
        shown = [f"{name} {min(seen):g} to {max(seen):g}" for name, seen in zip(names.values(), columns, strict=False)]
        if shown:
            found.append(f"Meanwhile: {'; '.join(shown)}.")


def _markdown(lines: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    if not lines:
        return []
    columns, *rows = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    shown = [f"| {' | '.join(columns)} |", f"| {' | '.join(['---'] * len(columns))} |"]
    return shown + [f"| {' | '.join([*row, *[''] * (len(columns) - len(row))])} |" for row in rows]


def tables(path: Path) -> list[str]:
    """The lines of all tables in a file, the machine first.

    Raises:
        SystemExit: there is no such file, or it is another one, or one of a pretended card.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["format"] != _FORMAT:
            raise KeyError("format")
        if (version := found.get("version", 1)) > _VERSION:
            raise ValueError(f"version {version} of its format; this one reads up to {_VERSION}")
        if found.get("pretended"):
            raise ValueError("the host stood in for a card")
        lines = [f"Measured on {found['machine']['date']}: {_named(found['machine'])}."]
        for section in SECTIONS:
            held = found["sections"].get(section.name, [])
            rows, clocks = (held, "") if isinstance(held, list) else (held["rows"], held["clocks"])
            lines += ["", f"**{section.title}.**", "", *_markdown(rows or [["not reached"]])]
            lines += ["", clocks] if clocks else []
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise SystemExit(
            f"{path} is no recording of a GPU ({type(e).__name__}: {e}); bench gpu --json writes one"
        ) from e
    return lines


def _named(found: Mapping[str, str]) -> str:
    return ", ".join([f"{key} {value}" if key != "gpu" else value for key, value in found.items() if key != "date"])


def machine() -> dict[str, str]:
    """What was measured on: the date, the cards, driver, and versions."""
    cards = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    asked = ["nvidia-smi", "-i", "0", "--query-gpu=driver_version,clocks.max.sm", "--format=csv,noheader"]
    try:
        said = subprocess.run(asked, capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        said = ""
    driver, most = [part.strip() for part in said.split(",")] if said.count(",") == 1 else ["unknown", "unknown"]
    return {
        "date": datetime.date.today().isoformat(),
        "gpu": f"{len(cards)} x {cards[0]}" if cards else "no GPU",
        "driver": driver,
        "SM clock at most": most,
        "CUDA": str(torch.version.cuda),
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "cores": str(os.cpu_count()),
    }
