"""A process that makes eager steps and has no session: ``python tests/bench/eager_steps.py CASE FORM``.

Beside an open session eager steps are faster than anywhere else: the memory that they free stays in the process.
"""

from __future__ import annotations

import sys

import torch
from apart import serve
from stepping import CASES, eager_step, momentum_sgd
from timing import warmed


def main(name: str, form: str) -> None:
    """Serve eager steps of a case, with the optimizer's fused or for-loop form."""
    case = CASES[name]
    if case.alone:
        torch.set_num_threads(1)
    example = case.make()
    step = eager_step(example, momentum_sgd(example.model, fused=form == "fused"))
    serve(warmed(step, case.warm))


main(*sys.argv[1:])
