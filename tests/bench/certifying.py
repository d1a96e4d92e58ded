"""What ``certify`` says of programs with one change, against what running them shows; and what it takes."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from mutations.campaign import KINDS, KINDS_OF_NETS, VERDICTS, Verdict
from mutations.workers import names, verdicts

__all__ = ["rows"]

_SHOWN = 8
"""Wrong acceptances that are listed."""


def rows() -> Iterator[str]:
    """The verdicts on the mutants of every kind. The environment may choose a ``SHARE`` of them, a ``SEED``, and the
    ``SUBJECTS`` whose names a regular expression finds."""
    share, seed = float(os.environ.get("SHARE", "1")), int(os.environ.get("SEED", "0"))
    chosen = [name for name in names() if re.search(os.environ.get("SUBJECTS", ""), name)]
    found: dict[str, Counter[str]] = {}
    subjects: dict[str, set[str]] = {}
    faults: list[Verdict] = []
    for verdict in verdicts(chosen, share, seed):
        found.setdefault(verdict.kind, Counter())[verdict.verdict] += 1
        if verdict.verdict != VERDICTS[0]:
            subjects.setdefault(verdict.kind, set()).add(verdict.subject)
        if verdict.verdict == VERDICTS[2] or verdict.error:
            faults.append(verdict)
            _log(verdict)
    yield f"| kind of change | programs | mutants | {' | '.join(VERDICTS[1:])} | {VERDICTS[0]} |"
    yield "| --- " + "| ---: " * (len(VERDICTS) + 2) + "|"
    total: Counter[str] = Counter()
    for kind in [kind for kind in (*KINDS, *KINDS_OF_NETS, "no kind") if kind in found]:
        total += found[kind]
        yield _row(kind, str(len(subjects.get(kind, ()))), found[kind])
    yield _row("all", str(len(chosen)), total)
    if faults:
        yield ""
    for fault in faults[:_SHOWN]:
        yield f"{fault.verdict}: {fault.kind} of {fault.subject}: {fault.what} {fault.error}"


def _row(kind: str, programs: str, counted: Counter[str]) -> str:
    judged = [counted[column] for column in VERDICTS[1:]]
    return f"| {kind} | {programs} | {sum(judged)} | {' | '.join(map(str, judged))} | {counted[VERDICTS[0]]} |"


def _log(verdict: Verdict) -> None:
    """Every fault, where the environment says a file for them."""
    if path := os.environ.get("FAULTS"):
        with Path(path).open("a", encoding="utf-8") as file:
            print(*verdict, sep=" | ", file=file)
