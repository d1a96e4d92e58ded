"""Several logical devices on one card, the allocator under them, and several cards."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import permutations, product
from pathlib import Path
from typing import Any, Final

import models
import torch
from endings import started
from exactness import different, everything
from gpu_card import MS, Card, Event, Section, Task
from gpu_cases import Way
from runnable import captured
from torch import Tensor

import graphir
from graphir import passes

__all__ = ["logical", "several", "trace"]

Cells = Sequence[object]

_WAY: Final = Way(False, True)
_REPLICAS: Final = 2
_MADE: Final[dict[str, Callable[[int, bool], models.Example]]] = {
    "residual net": lambda batch, tiny: (
        models.resnet(batch) if tiny else models.resnet(batch, blocks=4, channels=32, image=16, dropout=0.2)
    ),
    "GPT": lambda batch, tiny: (
        models.gpt(batch) if tiny else models.gpt(batch, length=128, width=256, heads=8, layers=4, dropout=0.1)
    ),
}
"""What two replicas train; each has half of the batch."""

DDP_ROWS, DDP_WARM, DDP_STEPS = 8, 5, 20


class _Placed:
    """A model's step on two replicas, on a logical device each or with half of the activations on two others."""

    def __init__(self, card: Card, name: str) -> None:
        share, whole = (_MADE[name](batch, card.pretended) for batch in (8, 16))
        self.program = captured(share, _WAY.optimizer(share.model))
        self.batch = [tensor.to(card.place) for tensor in (*whole.inputs, *whole.targets)]

    def plan(self, devices: int) -> graphir.Plan:
        placed = passes.replicate(self.program, range(_REPLICAS))
        if devices > _REPLICAS:
            acts = passes.find_activations(placed)
            placed = passes.shift_activations(placed, acts[len(acts) // 2 :], {0: 2, 1: 3})
        return passes.emit(passes.share_storage(passes.inject_copies(placed)))


def logical(card: Card, _: float) -> Section:
    """Two replicas, whole and with half of their activations on devices of their own, all on one card."""
    columns = (
        "model",
        "logical devices",
        "tensors that differ from two devices",
        "ms",
        "ms to return",
        "ms of kernels",
        "predicted, MiB",
        "asked for, MiB",
        "allocated, MiB",
        "reserved, MiB",
    )
    placed = functools.cache(partial(_Placed, card))
    first: dict[str, list[Tensor]] = {}
    tasks = [
        Task((name, devices), partial(_logical, card, name, devices, placed, first))
        for name, devices in product(_MADE, (2, 4))
    ]
    return Section(columns, tasks)


def _logical(
    card: Card, name: str, devices: int, placed: Callable[[str], _Placed], first: dict[str, list[Tensor]]
) -> Iterator[Cells]:
    made = placed(name)
    plan = made.plan(devices)
    card.clear()
    before = card.held()
    with card.session(plan, made.program.state) as session:
        found = [session.step(*made.batch).clone().cpu() for _ in range(10)]
        for replica in range(_REPLICAS):
            held = everything(session.state_dict(replica), session.optimizer_state_dict(replica))
            found += [tensor.cpu() for tensor in held]
        unlike = different(first.setdefault(name, found), found)
        step = partial(session.step, *made.batch)
        held_most = card.peak(step).above(before)
        taken = card.taken(step)
        kernels = card.kernels(step)
    predicted = sum(n for d, n in graphir.memory(plan, threads=1, profile=None).peak.items() if d != "cpu:0")
    seconds = (taken.done, taken.returned, kernels)
    yield unlike, *[f"{s * MS:.3f}" for s in seconds], *[f"{n / 2**20:.1f}" for n in (predicted, *held_most)]


def trace(card: Card, _: float) -> Section:
    """The allocator's events while a session is made and steps three times, for simulations of what it reserves."""
    columns = ("model", "logical devices", "steps", "events", "allocated, MiB", "reserved, MiB", "trace")
    return Section(columns, [Task(("GPT", 4), partial(_traced, card, "GPT", 4))])


def _traced(card: Card, name: str, devices: int, steps: int = 3) -> Iterator[Cells]:
    made = _Placed(card, name)
    plan = made.plan(devices)
    peaks = []

    def run() -> None:
        with card.session(plan, made.program.state) as session:
            peaks.append(card.peak(lambda: [session.step(*made.batch) for _ in range(steps)]))

    card.clear()
    before = card.held()
    events = card.traced(run)
    most = peaks[0].above(before)
    recorded = {
        "format": "graphir.allocations",
        "version": 1,
        "torch": torch.__version__,
        "settings": {name: os.environ.get(name, "") for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")},
        "model": name,
        "replicas": _REPLICAS,
        "logical devices": devices,
        "steps": 2 * steps,
        "held before": before._asdict(),
        "peak above": most._asdict(),
        **compact(events),
    }
    yield steps, len(events), *[f"{n / 2**20:.1f}" for n in most[1:]], recorded


def compact(events: Sequence[Event]) -> dict[str, Any]:
    """Events as lists of whole numbers: the action's, the block's, bytes, the stream's.

    Actions are numbered as in ``actions``; addresses and streams in the order in which they come. An address that is
    given back and taken again keeps its number.
    """
    actions: dict[str, int] = {}
    blocks: dict[int, int] = {}
    streams: dict[int, int] = {}
    rows = [
        [
            actions.setdefault(event.action, len(actions)),
            blocks.setdefault(event.address, len(blocks)),
            event.nbytes,
            streams.setdefault(event.stream, len(streams)),
        ]
        for event in events
    ]
    return {"actions": list(actions), "columns": ["action", "block", "bytes", "stream"], "events": rows}


def several(card: Card, _: float) -> Section:
    """Copies between cards, replicas on each card beside DistributedDataParallel, and a pipeline over all."""
    cards = card.count()
    columns = ("what", "figure", "ms to return", "ms of kernels")
    if cards < 2:
        return Section(columns, [Task(("not run",), lambda: iter([(f"{cards} GPU",)]))])
    tasks = [
        Task((f"copy from {a} to {b}, 256 MiB",), partial(_copied, card, a, b))
        for a, b in permutations(range(cards), 2)
    ]
    for replicas in sorted({1, 2, cards}):
        key = f"GPT, {replicas} replicas, {DDP_ROWS * replicas} rows"
        tasks.append(Task((key,), partial(_replicated, card, replicas)))
        tasks.append(Task((f"{key}, DDP",), partial(_ddp, card, replicas)))
    parts = (1 if card.pretended else 4) * cards
    tasks.append(Task((f"GPT, {cards} stages, {parts} micro-batches",), partial(_pipelined, card, cards, parts)))
    return Section(columns, tasks)


def example(rows: int, tiny: bool) -> models.Example:
    """What several cards train."""
    return models.gpt(rows) if tiny else models.gpt(rows, length=128, width=512, heads=8, layers=8)


def _copied(card: Card, a: int, b: int) -> Iterator[Cells]:
    places = [torch.device("cpu") if card.pretended else torch.device("cuda", i) for i in (a, b)]
    x = torch.empty(1 << (10 if card.pretended else 28), dtype=torch.uint8, device=places[0])
    y = torch.empty_like(x, device=places[1])
    y.copy_(x)
    card.settle()
    start = time.perf_counter()
    for _ in range(5):
        y.copy_(x)
    card.settle()
    yield (f"{5 * x.nbytes / (time.perf_counter() - start) / 1e9:.1f} GB/s",)


def _stepped(card: Card, program: graphir.Program, placed: graphir.Program, batch: Sequence[Tensor]) -> Iterator[Cells]:
    plan = passes.emit(passes.share_storage(placed))
    with card.session(plan, program.state, apart=True) as session:
        step = partial(session.step, *batch)
        taken, kernels = card.taken(step), card.kernels(step)
    yield f"{taken.done * MS:.2f} ms", f"{taken.returned * MS:.2f}", f"{kernels * MS:.2f}"


def _replicated(card: Card, replicas: int) -> Iterator[Cells]:
    share = example(DDP_ROWS, card.pretended)
    program = captured(share, _WAY.optimizer(share.model))
    batch = [torch.cat([tensor] * replicas).to(card.place) for tensor in (*share.inputs, *share.targets)]
    yield from _stepped(card, program, passes.replicate(program, range(replicas)), batch)


def _pipelined(card: Card, stages: int, parts: int) -> Iterator[Cells]:
    """Layers in as many equal parts as there are cards, zero-bubble order."""
    whole = example(DDP_ROWS * parts, card.pretended)
    program = captured(whole, _WAY.optimizer(whole.model), accumulate=parts)
    layers = len(whole.model.get_submodule("layers"))  # type: ignore[arg-type]
    placed = program
    for stage in range(1, stages):
        first, last = stage * layers // stages, (stage + 1) * layers // stages
        placed = passes.shift_modules(placed, {f"layers[{first}:{last}]": stage})
    placed = passes.pipeline(passes.inject_copies(placed))
    batch = [tensor.to(card.place) for tensor in (*whole.inputs, *whole.targets)]
    yield from _stepped(card, program, placed, batch)


def _ddp(card: Card, world: int) -> Iterator[Cells]:
    """A process for each replica; the first one says how long a step takes."""
    with tempfile.TemporaryDirectory() as folder:
        store, script = Path(folder) / "store", Path(__file__).with_name("gpu_ddp.py")
        kind = "gloo" if card.pretended else "nccl"
        command = [sys.executable, str(script), str(world), str(store), kind]
        with ExitStack() as processes:
            others = [processes.enter_context(started([*command, str(rank)])) for rank in range(1, world)]
            first = processes.enter_context(started([*command, "0"], stdout=subprocess.PIPE))
            said, _ = first.communicate(timeout=60)
            for process in others:
                process.wait(10)
    yield (f"{float(said) * MS:.2f} ms",)
