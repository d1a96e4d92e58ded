"""Write the tables of docs/caffe2.md: case by case, what Caffe2 made of a net and what graphir makes of it.

python tests/caffe2/differences.py
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "caffe2")]

import cases
from test_inject import chained, copies, injected, without_copies_for_copies
from test_memonger import bytes_of, high_water, program_of

import graphir
from graphir import Program, caffe2, passes
from graphir.errors import EquivalenceError, GraphirError, PlacementError, VerifyError

PAGE = ROOT / "docs" / "caffe2.md"


def verdict(before: Program, theirs: Program) -> str:
    """What is wrong with Caffe2's result; empty where nothing is."""
    try:
        graphir.certify(before, theirs)
    except EquivalenceError as e:
        found = re.search(r"(state|output) '([^']+)' (differs|is missing)", e.what)
        kind, name = (found[1], found[2]) if found else ("blob", e.what)
        return f"wrong: {kind} `{name}` has another value"
    except VerifyError as e:
        return f"wrong: {e.what.splitlines()[0]}"
    try:
        graphir.verify(theirs)
    except PlacementError as e:
        found = re.match(r"(\d+) invariants", e.what)
        return f"misplaced: {found[1] + ' operands are' if found else 'an operand is'} on another device than needed"
    return ""


def shift_rows() -> Iterator[str]:
    """One row for each recorded shift."""
    yield "| case | copies, Caffe2 | copies, graphir | Caffe2's result |"
    yield "| --- | ---: | ---: | --- |"
    for case in cases.cases("shift"):
        call, expected = case.record["call"], case.record["expected"]
        program = case.program()
        shifts = dict(map(tuple, call["shifts"]))
        try:
            ours = passes.inject_copies(passes.shift_activations(program, call["activations"], shifts, strict=False))
        except GraphirError as e:
            yield f"| {case.name} | - | - | both refuse: {e.what.partition(': ')[2]} |"
            continue
        mine = added(ours, program)
        if not case.has("after_net"):
            raised = next(e for e in (expected.get("net", {}).get("exception"), expected["exception"]) if e)
            yield f"| {case.name} | - | {mine} | raised {raised['type']} |"
            continue
        model = cases.Case(case.root, "model", case.record["before"]["net"].split("/")[1]).record
        options = {option: model[option] for option in ("devices", "device_prefix", "params")}
        theirs = caffe2.load_program(case.net("after_net"), case.net("after_param_init_net"), **options)
        wrong = verdict(program, theirs)
        same = all(
            without_copies_for_copies(a) == without_copies_for_copies(b)
            for a, b in ((ours.init, theirs.init), (ours.step, theirs.step))
        )
        result = wrong or ("the same" if same else "right, with copies to spare")
        yield f"| {case.name} | {added(theirs, program)} | {mine} | {result} |"


def added(after: Program, before: Program) -> int:
    return sum(copies(a) - copies(b) for a, b in ((after.init, before.init), (after.step, before.step)))


def inject_rows() -> Iterator[str]:
    """One row for each recorded injection."""
    yield "| case | copies, Caffe2 | copies, graphir | Caffe2's result |"
    yield "| --- | ---: | ---: | --- |"
    for case in cases.cases("inject"):
        try:
            before, ours, theirs = injected(case)
        except GraphirError as e:
            raised = next(step["exception"]["type"] for step in case.record["steps"] if step["exception"])
            yield f"| {case.name} | - | - | raised {raised}; graphir: {e.what} |"
            continue
        mine = sum(map(copies, ours)) - sum(map(copies, before))
        if len(theirs) < len(ours):
            raised = next(step["exception"]["type"] for step in case.record["steps"] if step["exception"])
            yield f"| {case.name} | - | {mine} | raised {raised} |"
            continue
        program = chained(before)
        wrong = verdict(program, chained(theirs, program.step.external_outputs))
        pairs = zip(ours, theirs, strict=True)
        same = all(without_copies_for_copies(a) == without_copies_for_copies(b) for a, b in pairs)
        its = sum(map(copies, theirs)) - sum(map(copies, before))
        yield f"| {case.name} | {its} | {mine} | {wrong or ('the same' if same else 'right, with copies to spare')} |"


def memory_rows() -> Iterator[str]:
    """One row for each net that memonger planned."""
    yield "| net | bytes before | memonger's best | `share_storage` | high water, freed when used | at last use |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: |"
    for case in cases.cases("memonger"):
        results, program = case.record["results"], program_of(case)
        best = min(result["after"]["bytes"] for result in results.values())
        ours = bytes_of(passes.share_storage(program))
        recorded = results["release_blobs_when_used"]["estimate_after"]["highwater_bytes"]
        figures = bytes_of(program), best, ours, recorded, high_water(program, "last use")
        yield f"| {case.name} | {' | '.join(f'{figure:,}' for figure in figures)} |"


def main() -> None:
    """Replace what stands between the markers of each table."""
    page = PAGE.read_text(encoding="utf-8")
    for name, rows in (("memory", memory_rows()), ("shift", shift_rows()), ("inject", inject_rows())):
        begin, end = f"<!-- {name} -->", f"<!-- end {name} -->"
        head, rest = page.split(begin, 1)
        page = head + begin + "\n" + "\n".join(rows) + "\n" + end + rest.split(end, 1)[1]
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
