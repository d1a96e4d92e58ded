"""Run the benchmarks and print their tables; with --write, put them into docs/benchmarks.md.

A figure that misses its limit is in bold there, the last lines name its row, and the exit status is 1.

python tests/bench [capture] [scale] [passes] [synthetic] [caffe2] [step] [check] [parallel] [lock] [small] [shard]
                   [replicas] [pipeline] [pipelined] [apart] [memory] [profile] [profiling] [estimate] [simulate]
                   [balance] [large] [placements] [zoo] [start] [bits] [whole] [cuda] [fit] [mutants] [certificates]
                   [proofs] [cuts] [compare] [elements] [orders] [--write]
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), *(str(ROOT / "tests" / folder) for folder in ("", "zoo", "bench", "caffe2"))]

import accelerating
import allocating
import balancing
import capturing
import certifying
import checking
import choosing
import comparing
import cutting
import estimating
import exactness
import fitting
import flowing
import importing
import locking
import mutating
import ordering
import parallel
import placing
import profiling
import proving
import reaching
import replicating
import scaling
import separating
import sharding
import starting
import stepping
import torch
from limits import missed

from graphir.errors import counted

PAGE = ROOT / "docs" / "benchmarks.md"
TABLES: dict[str, Callable[[], Iterator[str]]] = {
    "capture": capturing.rows,
    "scale": scaling.rows,
    "passes": placing.resnet50_rows,
    "synthetic": placing.synthetic_rows,
    "caffe2": importing.rows,
    "step": stepping.rows,
    "check": checking.rows,
    "parallel": parallel.rows,
    "lock": locking.rows,
    "small": parallel.small_rows,
    "replicas": replicating.rows,
    "pipeline": flowing.rows,
    "pipelined": flowing.predicted_rows,
    "apart": separating.rows,
    "shard": sharding.rows,
    "memory": allocating.rows,
    "profile": profiling.rows,
    "profiling": profiling.cost_rows,
    "estimate": estimating.rows,
    "balance": balancing.rows,
    "large": balancing.large_rows,
    "placements": choosing.rows,
    "zoo": choosing.zoo_rows,
    "simulate": estimating.simulation_rows,
    "start": starting.rows,
    "bits": exactness.bit_rows,
    "whole": exactness.whole_batch_rows,
    "cuda": accelerating.rows,
    "fit": fitting.rows,
    "mutants": mutating.rows,
    "certificates": certifying.rows,
    "proofs": proving.pass_rows,
    "cuts": cutting.rows,
    "compare": comparing.rows,
    "elements": reaching.rows,
    "orders": ordering.rows,
}


def machine() -> str:
    """The machine and the versions, one line."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists() and (found := re.search(r"model name\s*:\s*(.+)", info.read_text(encoding="utf-8"))):
        model = found[1]
    return (
        f"Measured on {datetime.date.today().isoformat()}: {os.cpu_count()} cores of {model}, "
        f"Python {platform.python_version()}, torch {torch.__version__}, "
        f"{counted(torch.get_num_threads(), 'thread')} a kernel."
    )


def write(name: str, lines: list[str]) -> None:
    """Replace what stands between the markers of *name*."""
    page = PAGE.read_text(encoding="utf-8")
    begin, end = f"<!-- {name} -->", f"<!-- end {name} -->"
    if begin not in page:
        raise SystemExit(f"{PAGE} has no {begin}")
    head, rest = page.split(begin, 1)
    tail = rest.split(end, 1)[1]
    PAGE.write_text(f"{head}{begin}\n{machine()}\n\n" + "\n".join(lines) + f"\n{end}{tail}", encoding="utf-8")


def main() -> None:
    """Run the chosen tables, all of them by default."""
    parser = argparse.ArgumentParser(prog="python tests/bench")
    parser.add_argument("tables", nargs="*", help=f"of {', '.join(TABLES)}; all by default")
    parser.add_argument("--write", action="store_true", help="write them into docs/benchmarks.md")
    options = parser.parse_args()
    unknown = set(options.tables) - set(TABLES)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; tables are {', '.join(TABLES)}")
    late: list[str] = []
    for name in options.tables or TABLES:
        print(f"\n{name}\n{machine()}\n")
        lines: list[str] = []
        for line in TABLES[name]():  # what is cut off leaves what it has measured
            print(line, flush=True)
            lines.append(line)
            if options.write:
                write(name, [*lines, "", "The run was cut off here."])
        if options.write:
            write(name, lines)
        late += [f"{name}: {line}" for line in missed(lines)]
    if late:
        one = len(late) == 1
        print(f"\n{counted(len(late), 'row')} {'misses its limit' if one else 'miss their limits'}:", *late, sep="\n")
        sys.exit(1)


main()
