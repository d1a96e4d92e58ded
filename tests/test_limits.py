"""Marks of figures that miss their limits, in the tables that benchmarks write."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from bench.limits import limited, missed

BENCH = Path(__file__).resolve().parent / "bench"
FOLDERS = ("", "bench", "zoo", "caffe2")


@pytest.mark.parametrize(
    ("figure", "limit", "marked"),
    [
        ("0.45", {"at_most": 0.45}, False),
        ("0.46", {"at_most": 0.45}, True),
        ("1,200.0", {"at_most": 1000}, True),
        ("nan", {"at_most": 1}, True),
        ("-0.731", {"at_least": -0.5, "at_most": 0.5}, True),
        ("+0.499", {"at_least": -0.5, "at_most": 0.5}, False),
        ("7", {}, False),
    ],
)
def test_a_figure_is_marked_where_it_misses_its_limit(figure: str, limit: dict[str, float], marked: bool) -> None:
    shown = limited(figure, **limit)
    assert (shown == figure) is not marked
    assert missed([f"| step | {shown} |", "| **in bold** | 3 |"]) == ([f"| step | {shown} |"] if marked else [])


def test_the_mark_says_on_which_side_of_the_limit_a_figure_is() -> None:
    assert limited("3.0", at_most=2) == "**3.0 over**"
    assert limited("0.8", at_least=0.9) == "**0.8 under**"


def test_the_command_lists_what_misses_its_limit_and_fails() -> None:
    script = f"""
import runpy, sys
sys.path[:0] = {[str(BENCH.parent / folder) for folder in FOLDERS]}
import starting
from limits import limited
sys.argv = ["bench", "start"]
for figure in ("2.0", "3.0"):
    starting.rows = lambda: iter(["| model | start |", "| MLP | " + limited(figure, at_most=2) + " |"])
    try:
        runpy.run_path({str(BENCH)!r}, run_name="__main__")
        status = 0
    except SystemExit as ended:
        status = ended.code or 0
    print("status", status)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    within, over, rest = done.stdout.split("status ")
    assert "| MLP | 2.0 |" in within and "limit" not in within
    assert "1 row misses its limit:\nstart: | MLP | **3.0 over** |" in over
    assert (over[0], rest) == ("0", "1\n")


@pytest.mark.parametrize(
    ("ours", "again", "marked"),
    [
        (1.04, [1.0, 1.0, 1.0], False),
        (1.07, [1.0, 1.0, 1.0], True),
        (1.07, [0.8, 1.0, 1.2], False),
        (0.5, [1.0, 1.0, 1.0], False),
    ],
)
def test_a_step_is_marked_that_got_slower_by_more_than_noise(
    ours: float, again: list[float], marked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    from comparing import compared

    row = compared("emit", {"ours": [ours] * 3, "theirs": [1.0] * 3, "again": again})
    assert missed([row]) == ([row] if marked else [])
