"""A process that certifies what passes made: ``python tests/bench/certify_steps.py CASE``.

Of another checkout where its folder comes first in ``PYTHONPATH``: the page compares two.
"""

from __future__ import annotations

import sys
import time

import torch
from apart import serve
from proving import CASES

import graphir


def main(case: str) -> None:
    """Serve proofs of a case; the seconds are those of this process, since others may take the processor."""
    torch.set_num_threads(1)
    before, after = CASES[case]()
    graphir.certify(before, after)

    def timed(times: int) -> float:
        start = time.process_time()
        for _ in range(times):
            graphir.certify(before, after)
        return time.process_time() - start

    serve(timed)


if __name__ == "__main__":
    main(sys.argv[1])
