"""Processes that judge the mutants of one subject after the other. One of them may die of a mutant: kernels do not
check everything. That mutant then counts as different, and another process goes on behind it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from queue import Queue
from threading import Thread

from mutations.campaign import VERDICTS, Verdict, imported_trials, trials
from mutations.nets_of_caffe2 import imported
from mutations.subjects import subjects

__all__ = ["names", "verdicts"]

_TESTS = Path(__file__).resolve().parents[1]
_PERTURB = "165"
"""glibc fills memory that it hands out, and that it is given back, with bytes made of this one."""


def names() -> list[str]:
    """Every subject, the ones with more operators first, so that processes end at about the same time."""
    sorts = {"spread": 0, "training": 1, "forward": 2}
    captured = sorted(subjects(), key=lambda subject: sorts[subject.sort])
    return [*(net.name for net in imported()), *(subject.name for subject in captured)]


def verdicts(chosen: Iterable[str], share: float = 1.0, seed: int = 0, processes: int = 2) -> Iterator[Verdict]:
    """The verdicts on all mutants of these subjects, as they come."""
    waiting = list(chosen)
    found: Queue[Verdict | None] = Queue()
    threads = [
        Thread(target=_attended, args=(waiting[k::processes], share, seed, found), daemon=True)
        for k in range(processes)
    ]
    for thread in threads:
        thread.start()
    ended = 0
    while ended < processes:
        verdict = found.get()
        if verdict is None:
            ended += 1
        else:
            yield verdict


def _attended(chosen: list[str], share: float, seed: int, found: Queue[Verdict | None]) -> None:
    """Put the verdicts of one process after the other into *found*, then None: of one process, if none dies."""
    start = 0
    while chosen:
        folders = [_TESTS.parent, _TESTS, _TESTS / "zoo", _TESTS / "caffe2"]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders)), "MALLOC_PERTURB_": _PERTURB}
        command = [sys.executable, "-m", "mutations.workers", str(share), str(seed), str(start), *chosen]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env)
        assert process.stdout is not None
        begun = start
        for line in process.stdout:
            said = json.loads(line)
            if said is None:
                begun += 1
            elif said == "done":
                chosen, start, begun = chosen[1:], 0, 0
            else:
                found.put(Verdict(*said))
        code = process.wait()
        if chosen:
            why = f"the process ended with {code}"
            found.put(Verdict("no kind", chosen[0], f"mutant {begun}", VERDICTS[1] if begun > start else "", why))
            chosen, start = (chosen, begun) if begun > start else (chosen[1:], 0)
    found.put(None)


def _work(name: str, share: float, seed: int, start: int) -> Iterator[Verdict | None]:
    for subject in subjects():
        if subject.name == name:
            yield from trials(subject, share, seed, start)
    for net in imported():
        if net.name == name:
            yield from imported_trials(net, share, seed, start)


def _main() -> None:
    import warnings

    import torch

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    share, seed, start = float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    told = os.dup(1)
    os.dup2(2, 1)  # whatever else is printed is not a verdict
    with os.fdopen(told, "w") as out:
        for name in sys.argv[4:]:
            for verdict in _work(name, share, seed, start):
                print(json.dumps(verdict), file=out, flush=True)
            print(json.dumps("done"), file=out, flush=True)
            start = 0


if __name__ == "__main__":
    _main()
