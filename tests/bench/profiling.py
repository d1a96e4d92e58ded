"""How predicted bytes compare with measured ones where nobody wrote a formula, with and without a profile."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import models
import profiled_models
import torch
from allocations import measured_peak, predicted_peak
from limits import limited
from profiled_models import Case
from runnable import captured_case
from timing import seconds

import graphir
from graphir import passes, runtime

__all__ = ["cost_rows", "rows"]

STEPS_ALLOWED = 20
ALLOWED_WITH, ALLOWED_WITHOUT = 0.1, 0.5


def _plan(case: Case) -> tuple[graphir.Program, graphir.Plan]:
    program = captured_case(case)
    return program, passes.emit(passes.share_storage(program))


def rows() -> Iterator[str]:
    """The table of the most bytes that a step allocates, state and inputs apart.

    Profiles begin empty, so that each is of the model's own signatures. What a profile says follows from values is an
    upper bound; its row is marked.
    """
    yield "| model | measured | without a profile, % | operators unknown | with a profile, % | of which bounds |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: |"
    late = 0
    for name, make in {**profiled_models.MISSED, **profiled_models.OTHERS}.items():
        torch.manual_seed(0)
        case = make()
        program, plan = _plan(case)
        with tempfile.TemporaryDirectory() as folder:
            profile = graphir.profile(plan, path=Path(folder) / "profile.json")
        with runtime.Session(plan, program.state, binding="cpu", executor="serial") as session:
            batch = [*case.inputs, *case.targets]
            session.step(*batch)
            measured = measured_peak(lambda session=session, batch=batch: session.step(*batch))
        bare, full = graphir.memory(plan, profile=None).sources(), graphir.memory(plan, profile=profile).sources()
        assert not full["unknown"] and not full["computed"], "a profile has every call"
        without, with_ = (_off(predicted_peak(plan, profile=found), measured) for found in (None, profile))
        missed = (not full["bound"] and abs(with_) > ALLOWED_WITH) or (full["bound"] and with_ < -ALLOWED_WITH)
        missed |= not bare["unknown"] and abs(without) > ALLOWED_WITHOUT
        late += missed
        bounds = f"{full['bound']}" if full["bound"] else "-"
        unknown = f"{bare['unknown']} of {sum(bare.values())}"
        at_most = "≤ " if full["bound"] else ""
        shown = f"{without:+.3f}" if not bare["unknown"] else f"at least {without:+.3f}"
        yield f"| {name} | {measured:,} | {shown} | {unknown} | {at_most}{with_:+.3f} | {bounds} |"
    yield ""
    yield (
        f"{limited(str(late), at_most=0)} of these models are off by more than {ALLOWED_WITH} % with a profile, or by "
        f"more than {ALLOWED_WITHOUT} % without one where all operators are known."
    )


def cost_rows() -> Iterator[str]:
    """What profiling a step takes, in an empty file and once more."""
    yield "| step | one step, s | signatures | profiling, s | in steps | at most | again, s |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    torch.manual_seed(0)
    example = models.resnet50(batch=8, image=96)
    case = Case(example.model, example.inputs, example.targets, example.loss, options={"lr": 0.1, "momentum": 0.9})
    program, plan = _plan(case)
    with runtime.Session(plan, program.state, binding="cpu", executor="serial") as session:
        batch = [*case.inputs, *case.targets]
        step = sorted(seconds(lambda: session.step(*batch)) for _ in range(5))[2]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        first = seconds(lambda: graphir.profile(plan, path=path))
        again = seconds(lambda: graphir.profile(plan, path=path))
        calls = len(graphir.Profile.load(path).calls)
    yield (
        f"| ResNet-50, batch 8, 96 x 96 | {step:.2f} | {calls} | {first:.1f} "
        f"| {limited(f'{first / step:.1f}', at_most=STEPS_ALLOWED)} | {STEPS_ALLOWED} | {again:.2f} |"
    )


def _off(predicted: int, measured: int) -> float:
    return 100 * (predicted / measured - 1)
