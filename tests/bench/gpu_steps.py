"""Training steps on a card: eager PyTorch's, ours, graphs of both, and ``torch.compile``'s."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial

import torch
from gpu_card import MS, Card, Section, Step, Task, failed
from gpu_cases import CASES, WAYS, Way, eager, under
from runnable import captured

import graphir
from graphir import passes

__all__ = ["compiled", "diagonal", "steps"]

_COLUMNS = ("model", "arithmetic, AdamW", "step", "ms", "ms to return", "ms of kernels", "of eager's ms")


def diagonal(rows: Sequence[str], columns: Sequence[Way]) -> list[tuple[str, Way]]:
    """All pairs, in rounds that have each column once: each kind is measured with one model before any with all."""
    return [(rows[(i + shift) % len(rows)], column) for shift in range(len(rows)) for i, column in enumerate(columns)]


def steps(card: Card, _: float) -> Section:
    """Ours beside eager's, and a CUDA graph of eager's."""
    pairs = diagonal(list(CASES), WAYS)
    return Section(_COLUMNS, [Task((name, way), partial(_compared, card, name, way)) for name, way in pairs])


def _compared(card: Card, name: str, way: Way) -> Iterator[Sequence[object]]:
    case = CASES[name](card.pretended)
    with ExitStack() as sessions:

        @functools.cache
        def program() -> graphir.Program:
            taken = under(card, case, way)
            return captured(taken.example, way.optimizer(taken.model))

        def ours(graphs: bool) -> Step:
            plan = passes.emit(passes.share_storage(program()))
            session = sessions.enter_context(card.session(plan, program().state, graphs=graphs))
            batch = [tensor.to(card.place) for tensor in (*case.inputs, *case.targets)]
            return lambda: session.step(*batch)

        makers: dict[str, Callable[[], Step]] = {
            "eager": lambda: eager(card, case, way).step,
            "ours, by streams": lambda: ours(False),
            "ours, as graphs": lambda: ours(True),
            "CUDA graph of eager": lambda: card.graphed(eager(card, case, way, capturable=not card.pretended).step),
            "eager again": lambda: eager(card, case, way).step,
        }
        yield from _measured(card, makers)


def compiled(card: Card, _: float) -> Section:
    """The whole step by ``torch.compile``: model and loss with their backward, and the update.

    The MLP comes first, which compiles in some seconds; the forms of AdamW that are no one kernel come last.
    """
    names = [name for order in (2, 1, 0, 4, 3) for name in [list(CASES)[order]]]
    pairs = [(name, way) for ways in (WAYS[:2], WAYS[2:]) for name, way in diagonal(names, ways)]
    return Section(_COLUMNS, [Task((name, way), partial(_compiled, card, name, way)) for name, way in pairs])


def _compiled(card: Card, name: str, way: Way) -> Iterator[Sequence[object]]:
    case = CASES[name](card.pretended)
    makers: dict[str, Callable[[], Step]] = {
        "eager": lambda: eager(card, case, way).step,
        "`torch.compile`, reduce-overhead": lambda: eager(card, case, way, mode="reduce-overhead").step,
    }
    yield from _measured(card, makers)
    torch.compiler.reset()


def _measured(card: Card, makers: dict[str, Callable[[], Step]]) -> Iterator[Sequence[object]]:
    """A row of each step; of one that fails, why."""
    first = 0.0
    for label, make in makers.items():
        try:
            step = make()
            taken = card.taken(step)
            first = first or taken.done
            figures = (taken.done, taken.returned, card.kernels(step))
            yield label, *[f"{seconds * MS:.3f}" for seconds in figures], f"{taken.done / first:.2f}"
        except Exception as e:
            yield label, failed(e)
        step = None  # type: ignore[assignment]  # what it holds goes before the next one is made
        card.clear()
