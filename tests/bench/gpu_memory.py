"""Less memory than a step needs, at equal measured peak: ours, and what PyTorch has for it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import product
from typing import Any, Final, NamedTuple

import torch
from exactness import different, everything
from gpu_card import MS, Card, Section, Step, Task
from gpu_cases import CASES, Case, Eager, Way, eager
from runnable import captured
from torch import Tensor, nn
from torch._functorch import config
from torch.utils.checkpoint import checkpoint

from graphir import passes

__all__ = ["budgets", "memory"]

SHARES: Final = (0.7, 0.5, 0.9)
_NAMES: Final = ("GPT of GPT-2's sizes, 8 of 512", "ResNet-50, batch 32")
_WAY: Final = Way(False, True)
_TRIES: Final = 3
"""How many budgets are tried: each is compiled anew."""

_COLUMNS: Final = (
    "model",
    "most, of eager's peak",
    "way",
    "GiB",
    "of eager's peak",
    "ms",
    "of eager's ms",
    "ms of kernels",
    "tensors that differ from eager's",
)

Cells = Sequence[object]
Block = Callable[[nn.Module], None]


class Held(NamedTuple):
    """A step's figures.

    Attributes:
        nbytes: at its peak, as they were asked for, with model and optimizer.
        seconds: of a step.
        kernels: seconds of its kernels.
    """

    nbytes: int
    seconds: float
    kernels: float


class Baseline(NamedTuple):
    """Eager's figures, and what three of its steps make of the model."""

    case: Case
    held: Held
    trained: list[Tensor]

    def cells(self, held: Held) -> list[str]:
        return [
            f"{held.nbytes / 2**30:.2f}",
            f"{held.nbytes / self.held.nbytes:.2f}",
            f"{held.seconds * MS:.1f}",
            f"{held.seconds / self.held.seconds:.2f}",
            f"{held.kernels * MS:.1f}",
        ]


def memory(card: Card, _: float) -> Section:
    """GPT and ResNet-50 in f32, whole steps of AdamW: what keeps within shares of eager's need, at the least cost."""
    baseline = functools.cache(partial(_baseline, card))
    tasks = [Task((name, "", "eager"), partial(_eager, card, name, baseline)) for name in _NAMES]
    ways = {"ours": _ours, "checkpoint": _checkpointed, "save_on_cpu": _saved_on_cpu}
    for share, name, (label, way) in product(SHARES, _NAMES, ways.items()):
        tasks.append(Task((name, share, label), partial(_row, card, name, baseline, way, share)))
    return Section(_COLUMNS, tasks)


def budgets(card: Card, _: float) -> Section:
    """The same by ``torch.compile`` with ``activation_memory_budget``: each of a few budgets is compiled anew."""
    baseline = functools.cache(partial(_baseline, card))
    tasks = [
        Task((name, share, "activation_memory_budget"), partial(_row, card, name, baseline, _budgeted, share))
        for name, share in product(_NAMES, SHARES)
    ]
    return Section(_COLUMNS, tasks)


Make = Callable[[], Step]
Chosen = Callable[[Card, Baseline, float], Iterator[Cells]]


def _baseline(card: Card, name: str) -> Baseline:
    case = CASES[name](card.pretended)
    held = _held(card, lambda: eager(card, case, _WAY).step)
    return Baseline(case, held, _trained(eager(card, case, _WAY)))


def _eager(card: Card, name: str, baseline: Callable[[str], Baseline]) -> Iterator[Cells]:
    """Eager's own row; a second run says how far eager is from itself."""
    base = baseline(name)
    yield *base.cells(base.held), different(base.trained, _trained(eager(card, base.case, _WAY)))


def _row(card: Card, name: str, baseline: Callable[[str], Baseline], way: Chosen, share: float) -> Iterator[Cells]:
    base = baseline(name)
    yield from way(card, base, share * base.held.nbytes)


def _peak(card: Card, make: Make) -> int:
    """Bytes at the peak of a step that is made here, and is gone afterwards."""
    return _warm(card, make)[1]


def _held(card: Card, make: Make) -> Held:
    step, nbytes = _warm(card, make)
    return Held(nbytes, card.taken(step).done, card.kernels(step))


def _warm(card: Card, make: Make) -> tuple[Step, int]:
    """A step after some runs, and the bytes at its peak."""
    card.clear()
    before = card.held()
    step = make()
    for _ in range(2):
        step()
    return step, card.peak(step).above(before).requested


def _trained(made: Eager, steps: int = 3) -> list[Tensor]:
    """Losses of some steps, and all that they change, on the host."""
    losses: list[Any] = [made.step() for _ in range(steps)]
    held = everything(made.model.state_dict(), made.optimizer.state_dict())
    return [tensor.detach().cpu() for tensor in (*losses, *held)]


def _ours(card: Card, base: Baseline, most: float) -> Iterator[Cells]:
    """What ``balance`` chooses."""
    case = base.case
    program = captured(case.example, _WAY.optimizer(case.model))
    found = passes.balance(program, {"gpu:0": int(most)}, options=("park", "recompute"))
    plan = passes.emit(passes.share_storage(passes.inject_copies(found.program)))
    batch = [tensor.to(card.place) for tensor in (*case.inputs, *case.targets)]
    with card.session(plan, program.state) as session:
        losses = [session.step(*batch).clone() for _ in range(3)]
        held = everything(session.state_dict(), session.optimizer_state_dict())
        trained = [tensor.cpu() for tensor in (*losses, *held)]
    with ExitStack() as sessions:

        def make() -> Step:
            session = sessions.enter_context(card.session(plan, program.state))
            return lambda: session.step(*batch)

        yield *base.cells(_held(card, make)), different(base.trained, trained)


def _fewest(card: Card, base: Baseline, most: float, change: Block) -> Iterator[Cells]:
    """The fewest blocks that have to be changed to keep within *most* bytes, from the first on."""

    def made(count: int) -> Eager:
        def prepare(blocks: Sequence[nn.Module]) -> None:
            for block in blocks[:count]:
                change(block)

        return eager(card, base.case, _WAY, prepare=prepare)

    low, high, found = 1, len(base.case.blocks), 0
    while low <= high:
        middle = (low + high) // 2
        if _peak(card, lambda middle=middle: made(middle).step) <= most:  # type: ignore[misc]
            found, high = middle, middle - 1
        else:
            low = middle + 1
    if not found:
        yield (f"more, with all {len(base.case.blocks)} blocks",)
        return
    yield *base.cells(_held(card, lambda: made(found).step)), different(base.trained, _trained(made(found)))


def _checkpointed(card: Card, base: Baseline, most: float) -> Iterator[Cells]:
    def change(block: nn.Module) -> None:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]

    yield from _fewest(card, base, most, change)


def _saved_on_cpu(card: Card, base: Baseline, most: float) -> Iterator[Cells]:
    def change(block: nn.Module) -> None:
        forward = block.forward

        def saving(*args: Any, **kwargs: Any) -> Any:
            with torch.autograd.graph.save_on_cpu(pin_memory=not card.pretended):
                return forward(*args, **kwargs)

        block.forward = saving  # type: ignore[method-assign]

    yield from _fewest(card, base, most, change)


def _budgeted(card: Card, base: Baseline, most: float) -> Iterator[Cells]:
    """The first of a few falling budgets that keeps within *most* bytes: the share of activations that there is room
    for, if all else were parameters, gradients and two moments, and less."""
    fixed = 4 * sum(p.numel() * p.element_size() for p in base.case.model.parameters())
    room = max((most - fixed) / max(base.held.nbytes - fixed, 1), 0.0)
    tried = [round(room * (1 - i / _TRIES), 2) for i in range(_TRIES)]
    least = ""
    for budget in dict.fromkeys(tried):
        with config.patch(activation_memory_budget=min(budget, 1.0)):

            def made() -> Eager:
                return eager(card, base.case, _WAY, mode="default")

            try:
                held = _held(card, lambda: made().step)
                if held.nbytes <= most:
                    unlike = different(base.trained, _trained(made()))
                    yield *base.cells(held), f"{unlike}, at a budget of {budget:g}"
                    return
                least = f"more: {held.nbytes / 2**30:.2f} GiB at a budget of {budget:g}"
            finally:
                torch.compiler.reset()
                card.clear()
    yield (least,)
