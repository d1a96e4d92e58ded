"""Processes that judge the mutants of one subject after the other. A signal may end one of them for a mutant: kernels
do not check everything. That mutant then counts as different, and another process goes on behind it. Where a process
ends by an exception, what judges is at fault, or the subject: that is a verdict with the error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from queue import Queue
from threading import Thread

from mutations.campaign import Begun, Verdict, imported_trials, trials
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
    found: Queue[Verdict | Exception | None] = Queue()

    def attend(mine: list[str]) -> None:
        try:
            for verdict in _attended(mine, share, seed):
                found.put(verdict)
        except Exception as e:
            found.put(e)
        found.put(None)

    threads = [Thread(target=attend, args=(waiting[k::processes],), daemon=True) for k in range(processes)]
    for thread in threads:
        thread.start()
    ended = 0
    while ended < processes:
        verdict = found.get()
        if verdict is None:
            ended += 1
        elif isinstance(verdict, Exception):
            raise verdict
        else:
            yield verdict


def _attended(chosen: list[str], share: float, seed: int) -> Iterator[Verdict]:
    """The verdicts of one process after the other: of one process, if none dies."""
    start = 0
    while chosen:
        folders = [_TESTS.parent, _TESTS, _TESTS / "zoo", _TESTS / "caffe2"]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders)), "MALLOC_PERTURB_": _PERTURB}
        command = [sys.executable, "-m", "mutations.workers", str(share), str(seed), str(start), *chosen]
        with (
            tempfile.TemporaryFile("w+", errors="replace") as noise,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=noise, text=True, env=env) as process,
        ):
            assert process.stdout is not None
            begun, last = start, None
            for line in process.stdout:
                said = json.loads(line)
                if len(said) == 1:
                    (last,) = Begun(Verdict(*said[0]))
                    begun += 1
                elif said == "done":
                    chosen, start, begun = chosen[1:], 0, 0
                else:
                    yield Verdict(*said)
            code = process.wait()
            noise.seek(0)
            why = f"the process ended with {code}: {noise.read().strip().rpartition(chr(10))[2]}".rstrip(": ")
        if chosen:
            died = code < 0 and begun > start
            yield last if died and last else Verdict("no kind", chosen[0], f"mutant {begun}", "no verdict", why)
            chosen, start = (chosen, begun) if begun > start else (chosen[1:], 0)


def _work(name: str, share: float, seed: int, start: int) -> Iterator[Verdict | Begun]:
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
