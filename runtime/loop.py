"""Steps over the batches of a loader."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from itertools import chain
from types import FrameType
from typing import Any, Final

from torch import Tensor

from graphir.errors import SessionError, counted

__all__ = ["run_loader"]

_LOOK_SECONDS: Final = 0.1


def run_loader(
    step: Callable[..., Any],
    loader: Iterable[Any],
    steps: int | None,
    progress: bool,
    results: list[Any],
    where: str,
) -> None:
    """Call *step* with each batch, at most *steps* of them, and append what it returns to *results*.

    No batch is taken that is not used. Ctrl-C is held back while a step runs, so that it strikes between steps; a
    second one strikes at once.

    Args:
        step: of a session.
        loader: gives batches: a tuple or list is taken as arguments, a mapping as keyword arguments, all else as one
            argument.
        steps: the most steps; None: as many as there are batches.
        progress: whether to show progress on the terminal.
        results: filled.
        where: the plan, for messages.

    Raises:
        SessionError: the loader is none, or fails, with its exception as the cause; *steps* is no number of steps.
        KeyboardInterrupt: on Ctrl-C; all steps that were begun are finished.
    """
    if steps is not None and (type(steps) is not int or steps < 0):
        raise SessionError(f"steps={steps!r} is no number of steps", where=where, fix="give a whole number, or None")
    if not any(hasattr(type(loader), name) for name in ("__iter__", "__getitem__")):
        what = f"the loader is a {type(loader).__name__}, which has no batches"
        raise SessionError(what, where=where, fix="give a DataLoader, or any iterable of batches")
    batches = _batches(loader, results, where)
    with _interrupts(results) as held, _bar(loader, steps, progress, results) as show:
        while steps is None or len(results) < steps:
            try:
                batch = next(batches)
            except StopIteration:
                return
            with held():
                results.append(_call(step, batch, where))
            show()


def _call(step: Callable[..., Any], batch: Any, where: str) -> Any:
    if isinstance(batch, Mapping):
        for name in batch:
            if not isinstance(name, str):
                what = f"a batch gives an argument under {name!r}, which is no name"
                raise SessionError(
                    what, where=where, fix="give a mapping of keyword arguments, or a tuple of arguments"
                )
        return step(**batch)
    return step(*batch) if isinstance(batch, tuple | list) else step(batch)


def _batches(loader: Iterable[Any], results: list[Any], where: str) -> Iterator[Any]:
    try:
        yield from chain(loader)  # which has no close(): a generator may be handed over again, so it stays open
    except Exception as e:
        raise SessionError(
            f"the loader failed after {counted(len(results), 'step')}: {_reason(e)}",
            where=where,
            fix="the session is whole: session.results has what the steps returned, and step() and run() go on",
        ) from e


def _reason(error: Exception) -> str:
    """Its type, and the ends of its message: a worker process puts the whole traceback of what it raised into one."""
    lines = str(error).strip().splitlines()
    ends = " … ".join([*lines[:1], *lines[1:][-1:]])
    return f"{type(error).__name__}: {ends}" if ends else type(error).__name__


@contextmanager
def _interrupts(results: list[Any]) -> Iterator[Callable[[], Any]]:
    """What holds Ctrl-C back for as long as a step runs. Handlers that the program has set itself stay as they are."""
    held: list[int] = []
    stepping = [False]

    def interrupt() -> KeyboardInterrupt:
        return KeyboardInterrupt(
            f"stopped after {counted(len(results), 'step')}, which session.results has; the session is whole"
        )

    def handle(number: int, frame: FrameType | None) -> None:
        if held:
            raise KeyboardInterrupt
        if not stepping[0]:
            raise interrupt()
        held.append(number)

    @contextmanager
    def step() -> Iterator[None]:
        stepping[0] = True
        try:
            yield
        finally:
            stepping[0] = False
        if held:
            raise interrupt()

    own = threading.current_thread() is threading.main_thread()
    if not own or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield step
        return
    try:
        signal.signal(signal.SIGINT, handle)
        yield step
    finally:
        if signal.getsignal(signal.SIGINT) is handle:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _on_terminal() -> bool:
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):  # there is none, it is of the program's own making, or closed
        return False


def _length(loader: Iterable[Any]) -> int | None:
    """How many batches it says it has. A ``DataLoader`` over an iterable data set has a length, and raises."""
    try:
        return len(loader) if isinstance(loader, Sized) else None
    except (TypeError, NotImplementedError):
        return None


@contextmanager
def _bar(
    loader: Iterable[Any], steps: int | None, wanted: bool, results: Sequence[Any]
) -> Iterator[Callable[[], None]]:
    """What shows the steps done, and the last loss, on a terminal; nothing elsewhere."""
    if not wanted or not _on_terminal():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    counts = [n for n in (steps, _length(loader)) if n is not None]
    columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    with Progress(*columns, TextColumn("{task.fields[loss]}"), console=Console(stderr=True)) as bar:
        task = bar.add_task("steps", total=min(counts, default=None), loss="")
        due = 0.0

        def tell_loss() -> None:
            result = results[-1] if results else None
            if isinstance(result, Tensor) and result.numel() == 1:
                bar.update(task, loss=f"loss {result.item():.4g}")

        def show() -> None:
            nonlocal due
            bar.update(task, advance=1)
            # Reading a loss waits for its device, so only as often as people look, and at the end.
            if time.monotonic() >= due:
                tell_loss()
                due = time.monotonic() + _LOOK_SECONDS

        yield show
        tell_loss()
