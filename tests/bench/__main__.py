"""Run the benchmarks and print their tables; with --write, put them into docs/benchmarks.md.

A figure that misses its limit is in bold there, the last lines name its row, and the exit status is 1.

python tests/bench [capture] [scale] [passes] [synthetic] [caffe2] [step] [check] [parallel] [lock] [small] [shard]
                   [replicas] [pipeline] [pipelined] [within] [apart] [memory] [profile] [profiling] [estimate]
                   [simulate] [balance] [byhand] [more] [large] [machines] [placements] [zoo] [start] [bits] [whole]
                   [mutants] [certificates] [proofs] [cuts] [compare] [elements] [orders] [--write]
python tests/bench gpu [--seconds 240] [--json FILE] [--write] [--pretend]

The second records a GPU, and is for itself. With --write it puts what FILE has into the page, on any machine; with
--pretend the host stands in for the GPU.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import math
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), *(str(ROOT / "tests" / folder) for folder in ("", "zoo", "bench", "caffe2"))]

try:
    import gpu
    import torch
    from limits import missed

    from graphir.errors import counted
except ModuleNotFoundError as e:
    raise SystemExit(
        f"{e.name} is not installed here; docs/contributing.md says what a machine with a GPU needs"
    ) from e

PAGE = ROOT / "docs" / "benchmarks.md"
# Each is imported when it is run: some need more than others, and a machine with a GPU may have little.
TABLES: dict[str, str] = {
    "capture": "capturing.rows",
    "scale": "scaling.rows",
    "passes": "placing.resnet50_rows",
    "synthetic": "placing.synthetic_rows",
    "caffe2": "importing.rows",
    "step": "stepping.rows",
    "check": "checking.rows",
    "parallel": "parallel.rows",
    "lock": "locking.rows",
    "small": "parallel.small_rows",
    "replicas": "replicating.rows",
    "places": "places.rows",
    "steps": "typed.rows",
    "pipeline": "flowing.rows",
    "pipelined": "flowing.predicted_rows",
    "within": "keeping.rows",
    "apart": "separating.rows",
    "shard": "sharding.rows",
    "memory": "allocating.rows",
    "profile": "profiling.rows",
    "profiling": "profiling.cost_rows",
    "estimate": "estimating.rows",
    "balance": "balancing.rows",
    "byhand": "trying.rows",
    "more": "growing.rows",
    "large": "balancing.large_rows",
    "machines": "at_hand.rows",
    "placements": "choosing.rows",
    "zoo": "choosing.zoo_rows",
    "simulate": "estimating.simulation_rows",
    "start": "starting.rows",
    "bits": "exactness.bit_rows",
    "whole": "exactness.whole_batch_rows",
    "mutants": "mutating.rows",
    "certificates": "certifying.rows",
    "proofs": "proving.pass_rows",
    "cuts": "cutting.rows",
    "compare": "comparing.rows",
    "elements": "reaching.rows",
    "orders": "ordering.rows",
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
    PAGE.write_text(f"{head}{begin}\n" + "\n".join(lines) + f"\n{end}{tail}", encoding="utf-8")


def record(options: argparse.Namespace) -> None:
    """Record a GPU, or write what was recorded."""
    if options.write:
        if options.json is None:
            raise SystemExit("--write needs --json FILE, a recording")
        write("gpu", gpu.tables(options.json))
        return
    if not (torch.cuda.is_available() or options.pretend):
        raise SystemExit("torch sees no CUDA device here; with --json FILE --write a recording goes into the page")
    if not 0 < options.seconds < math.inf:
        raise SystemExit(f"--seconds {options.seconds:g} is no time; a card takes some 240")
    for line in gpu.record(options.seconds, options.json, options.pretend):
        print(line, flush=True)


def main() -> None:
    """Run the chosen tables, all of them by default."""
    parser = argparse.ArgumentParser(prog="python tests/bench")
    parser.add_argument("tables", nargs="*", help=f"of {', '.join(TABLES)}; all by default. Or gpu alone")
    parser.add_argument("--write", action="store_true", help="write them into docs/benchmarks.md")
    parser.add_argument("--seconds", type=float, default=240, help="of gpu: what all of it may take")
    parser.add_argument("--json", type=Path, help="of gpu: the file that is written, or read with --write")
    parser.add_argument("--pretend", action="store_true", help="of gpu: the host in its place, with tiny models")
    options = parser.parse_args()
    if options.tables == ["gpu"]:
        record(options)
        return
    if options.pretend or options.json is not None:
        parser.error("--pretend and --json are for gpu alone: python tests/bench gpu --pretend")
    unknown = set(options.tables) - set(TABLES)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; tables are {', '.join(TABLES)}")
    late: list[str] = []
    for name in options.tables or TABLES:
        print(f"\n{name}\n{machine()}\n")
        lines: list[str] = []
        module, rows = TABLES[name].split(".")
        made: Callable[[], Iterator[str]] = getattr(importlib.import_module(module), rows)
        for line in made():  # what is cut off leaves what it has measured
            print(line, flush=True)
            lines.append(line)
            if options.write:
                write(name, [machine(), "", *lines, "", "The run was cut off here."])
        if options.write:
            write(name, [machine(), "", *lines])
        late += [f"{name}: {line}" for line in missed(lines)]
    if late:
        one = len(late) == 1
        print(f"\n{counted(len(late), 'row')} {'misses its limit' if one else 'miss their limits'}:", *late, sep="\n")
        sys.exit(1)


main()
