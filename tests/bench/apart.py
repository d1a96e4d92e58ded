"""Steps that are timed in processes of their own, in turn with what is timed here.

Each line of such a process's input is a number of steps; it answers with the seconds that they took, and ends at 0.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

__all__ = ["apart", "serve"]


def serve(timed: Callable[[int], float]) -> None:
    """In the process: answer with what *timed* says of each number of steps."""
    while steps := int(sys.stdin.readline() or 0):
        print(timed(steps), flush=True)


@contextmanager
def apart(
    script: str, processes: Sequence[Sequence[str]], checkout: Path | None = None
) -> Iterator[Callable[[int], float]]:
    """Start *script*, a file beside this one, in a process for each of these arguments; with graphir of another
    *checkout* and that checkout's models, if one is given.

    Yields:
        what makes so many steps in all of the processes at once, and says how many seconds the slowest took.
    """
    folder = Path(__file__).resolve().parent
    root = (checkout or folder.parents[1]).resolve()
    tests = root / "tests"
    path = os.pathsep.join(map(str, [root, tests, tests / "zoo", tests / "caffe2", folder]))
    started = [
        subprocess.Popen(
            [sys.executable, str(folder / script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        for arguments in processes
    ]

    def tell(steps: int) -> None:
        for process in started:
            assert process.stdin is not None
            process.stdin.write(f"{steps}\n")
            process.stdin.flush()

    def run(steps: int) -> float:
        tell(steps)
        return max(float(process.stdout.readline()) for process in started if process.stdout)

    try:
        yield run
        tell(0)  # to all before one is waited for: processes under DDP end after a barrier
        for process in started:
            process.communicate(timeout=60)
    finally:
        for process in started:
            process.kill()
            process.wait()
