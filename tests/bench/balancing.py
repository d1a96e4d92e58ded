"""What `passes.balance` finds by default for known models, beside the best contiguous cut, and how long it takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple, TypeVar

import models
import torch
from graphir.passes.choice.groups import Reading, Wanted
from graphir.passes.choice.moves import placed
from graphir.passes.choice.outcome import Outcomes
from graphir.passes.choice.search import search
from limits import limited
from test_zoo import ROWS
from torch import nn
from zoo_rows import library

import graphir
from graphir import passes
from graphir.collector import collector_paused
from graphir.errors import GraphirError
from graphir.ir.device import gpu

T = TypeVar("T")

__all__ = ["large_rows", "rows"]

TOPOLOGY: Final = graphir.Topology.named("h200x8")
SECONDS: Final = 3.0
"""What a choice between two devices may take, after the capture."""


LARGE: Final = 1_000
"""Layers of the GPT whose step has about 100,000 operators."""

LARGE_SECONDS: Final = 2.0
"""What all of its choice may take but the search, which looks at plain placements alone."""

CUTS: Final = 200
"""How many contiguous cuts are tried at most."""


class Case(NamedTuple):
    """A model, its batch on ``meta``, how its loss follows, and what is asked.

    Attributes:
        longer: the most that a step may take, in steps of one device; None: no more than the best contiguous cut.
        seconds: of the search.
    """

    make: Callable[[], nn.Module]
    args: tuple[tuple[int, ...], ...]
    kwargs: dict[str, tuple[int, ...]]
    loss: Callable[..., torch.Tensor]
    targets: tuple[tuple[int, ...], ...] = ()
    devices: int = 2
    share: float = 0.6
    longer: float | None = None
    seconds: float = 2.0


def _own(output: Any) -> torch.Tensor:
    return output.loss


def _cases() -> dict[str, Case]:
    vision, t = library("torchvision").models, library("transformers")
    t5 = t.T5Config(decoder_start_token_id=0, pad_token_id=0)
    u_net = ROWS["u-net"]
    return {
        "ResNet-50, batch 64 of 224": Case(
            vision.resnet50, ((64, 3, 224, 224),), {}, nn.CrossEntropyLoss(), targets=((64,),)
        ),
        "GPT-2, batch 8 of 1024": Case(
            lambda: t.GPT2LMHeadModel(t.GPT2Config(use_cache=False)),
            (),
            dict.fromkeys(["input_ids", "labels"], (8, 1024)),
            _own,
        ),
        "BERT, batch 16 of 512": Case(
            lambda: t.BertForMaskedLM(t.BertConfig()), (), dict.fromkeys(["input_ids", "labels"], (16, 512)), _own
        ),
        "U-Net, batch 256 of 256": Case(u_net.model, ((256, 3, 256, 256),), {}, u_net.loss, targets=((256, 256, 256),)),
        "T5, batch 16 of 512": Case(
            lambda: t.T5ForConditionalGeneration(t5), (), dict.fromkeys(["input_ids", "labels"], (16, 512)), _own
        ),
        "Inception-v3, batch 64 of 299": Case(
            lambda: vision.inception_v3(weights=None, init_weights=False, aux_logits=False),
            ((64, 3, 299, 299),),
            {},
            nn.CrossEntropyLoss(),
            targets=((64,),),
            devices=4,
            share=0.3,
            longer=1.02,
            seconds=5.0,
        ),
    }


def rows() -> Iterator[str]:
    """The table: limits are shares of what one device needs, AdamW, rooflines of H200s."""
    yield (
        "| model | operators | devices | limit each | fullest | step, ms | on one device | best cut, ms | bound, ms "
        "| gap, % | looked at | of so many seconds | seconds |"
    )
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    for name, case in _cases().items():
        program = _captured(case)
        need = graphir.memory(passes.emit(program), threads=1, profile=None).peak["gpu:0"]
        limits = {f"gpu:{d}": int(case.share * need) for d in range(case.devices)}
        begun = time.perf_counter()
        cut = _best_cut(program, limits) if case.longer is None else None
        head = f"| {name} | {len(program.step.ops):,} | {case.devices} | {case.share} |"
        begun = time.perf_counter()
        try:
            found = passes.balance(program, limits, topology=TOPOLOGY, seconds=case.seconds)
        except GraphirError as e:
            kept = "none keeps within them" if cut is None else limited("1", at_most=0)
            yield f"{head} {e.what} | | | {kept} | | | | | |"
            continue
        took = time.perf_counter() - begun
        most = case.longer * found.before if case.longer is not None else cut
        fullest = max(use.after for use in found.devices) / need
        step = limited(f"{found.after * 1e3:.3f}", at_most=None if most is None else round(most * 1e3, 3))
        spent = limited(f"{took:.2f}", at_most=SECONDS if case.devices == 2 else None)
        yield (
            f"{head} {limited(f'{fullest:.3f}', at_most=case.share)} | {step} | {found.after / found.before:.3f} "
            f"| {'' if cut is None else f'{cut * 1e3:.3f}'} | {found.bound * 1e3:.3f} | {100 * found.gap:.1f} "
            f"| {found.evaluated:,} | {case.seconds:g} | {spent} |"
        )


def large_rows(runs: int = 3) -> Iterator[str]:
    """What a choice for a large step takes beside the search, in all and by parts; of some runs, the shortest."""
    example = models.gpt(layers=LARGE)
    optimizer = torch.optim.AdamW(example.model.parameters())
    program = graphir.capture(
        example.model, example.inputs, targets=example.targets, loss=example.loss, optimizer=optimizer
    )
    need = graphir.memory(program, threads=1, profile=None).peak["gpu:0"]
    limits = dict.fromkeys(["gpu:0", "gpu:1"], int(0.7 * need))
    devices = (gpu(0), gpu(1))
    wanted = Wanted(dict(zip(devices, limits.values(), strict=True)), devices, ("shift", "park", "recompute"), {}, {})
    parts: dict[str, list[float]] = {}

    def timed(name: str, call: Callable[[], T]) -> T:
        begun = time.perf_counter()
        with collector_paused():
            found = call()
        parts.setdefault(name, []).append(time.perf_counter() - begun)
        return found

    for _ in range(runs):
        reading = timed("reading", lambda: Reading(program, wanted, TOPOLOGY, None, 1))
        first = timed("groups", lambda reading=reading: reading.grouped(48))
        timed("groups of another size", lambda reading=reading: reading.grouped(24))
        found = timed("plain placements", lambda first=first: search(Outcomes(first.problem), 0.0))
        timed("its passes", lambda first=first, found=found: placed(program, first, found.choice))
        timed("in all", lambda: passes.balance(program, limits, topology=TOPOLOGY, seconds=0))
        timed("with 2 s of search", lambda: passes.balance(program, limits, topology=TOPOLOGY))
    yield "| operators | " + " | ".join([f"{name}, s" for name in parts]) + " |"
    yield "| ---: |" + " ---: |" * len(parts)
    shortest = {name: min(taken) for name, taken in parts.items()}
    most = {"in all": LARGE_SECONDS, "with 2 s of search": LARGE_SECONDS + 2}
    cells = [limited(f"{taken:.2f}", at_most=most.get(name)) for name, taken in shortest.items()]
    yield f"| {len(program.step.ops):,} | {' | '.join(cells)} |"


def _captured(case: Case) -> graphir.Program:
    with torch.device("meta"):
        model = case.make()
        args = tuple([torch.empty(shape) for shape in case.args])
        kwargs = {name: torch.empty(shape, dtype=torch.long) for name, shape in case.kwargs.items()}
        targets = tuple([torch.empty(shape, dtype=torch.long) for shape in case.targets])
    optimizer = torch.optim.AdamW(model.parameters())
    return graphir.capture(model, args, kwargs=kwargs, targets=targets, loss=case.loss, optimizer=optimizer)


def _best_cut(program: graphir.Program, limits: dict[str, int]) -> float | None:
    """The shortest step of cuts between two activations that keep within the limits; None where none does.

    Activations before the cut stay; or they move, and the others stay. All cuts are tried, or so many of them.
    """
    chosen = passes.find_activations(program)
    best: float | None = None
    for at in range(1, len(chosen), -(-len(chosen) // CUTS)):
        for moved in (chosen[at:], chosen[:at]):
            plan = passes.emit(passes.inject_copies(passes.shift_activations(program, moved, {0: 1})))
            peak = graphir.memory(plan, threads=1, profile=None).peak
            if all(peak.get(device, 0) <= limit for device, limit in limits.items()):
                seconds = graphir.estimate(plan, TOPOLOGY, profile=None).seconds
                best = seconds if best is None else min(best, seconds)
    return best
