"""Tests on a machine with a card: those that need one, and the start of all others."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from endings import started
from gpu_card import Card, Section, Task

__all__ = ["marked", "outcome", "tests"]

ROOT: Final = Path(__file__).resolve().parents[2]
_SHARE: Final = 0.65
"""Of the time, what the tests that need a card may take."""


def tests(card: Card, seconds: float) -> Section:
    """The tests marked ``cuda``, and how far all others come: both by pytest, if there is one."""
    until = time.monotonic() + seconds - 3  # for the ends of what runs then
    first = ["--collect-only"] if card.pretended else []
    rows = {
        "`pytest -m cuda`": partial(_said, [*_workers("8"), "-m", "cuda", *first, *marked()], until, _SHARE),
        "`pytest -n auto`, all others": partial(_said, [*_workers("auto"), *(first and marked()), *first], until, 1.0),
    }
    return Section(("what", "outcome"), [Task((what,), run) for what, run in rows.items()])


def marked() -> list[str]:
    """The files that have tests marked ``cuda``; pytest collects no others for them."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    found = [path for path in files if "mark.cuda" in path.read_text(encoding="utf-8")]
    return [str(path.relative_to(ROOT)) for path in sorted(found, key=lambda path: "hardware" not in path.name)]


def _workers(count: str) -> list[str]:
    return ["-n", count] if importlib.util.find_spec("xdist") else []


def _said(arguments: Sequence[str], until: float, share: float) -> Iterator[Sequence[object]]:
    yield (outcome(arguments, share * (until - time.monotonic())),)


def outcome(arguments: Sequence[str], seconds: float, root: Path = ROOT) -> str:
    """The last line of pytest, or how many tests had which outcome when the time was over. No process of its stays."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    with tempfile.TemporaryFile("w+", encoding="utf-8") as file:  # no pipe, which fills or is held open
        with started(command, cwd=root, stdout=file, stderr=subprocess.STDOUT) as process:
            try:
                status = f"status {process.wait(max(seconds, 0))}"
            except subprocess.TimeoutExpired:
                status = ""
        file.seek(0)
        said = file.read()
    if not status:
        dots = "".join(re.findall(r"^([.sFExX]+)(?: +\[|$)", said, re.M))
        counts = {kind: dots.count(mark) for kind, mark in (("passed", "."), ("failed", "F"), ("errors", "E"))}
        return f"in {seconds:.0f} s: " + ", ".join(f"{count} {kind}" for kind, count in counts.items())
    return said.strip().splitlines()[-1] if said.strip() else status
