"""On a GPU: training steps that have to keep within less memory than they need, beside what torch offers for that."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from exactness import different
from limits import limited
from timing import seconds as seconds_of
from torch import Tensor, nn
from zoo_rows import library

import graphir
from graphir import passes, runtime
from graphir.errors import GraphirError
from graphir.ir.program import Program

__all__ = ["rows"]

SHARES = (0.9, 0.75, 0.6, 0.5, 0.4)
"""Of what the step needs, what it may take."""

MORE = 1.005
"""The most that may be asked of the allocator for what the plan says, as a ratio."""

_WARM, _STEPS = 3, 10


class Case(NamedTuple):
    """A model on the host, its batch, how its loss follows, and how torch recomputes its layers."""

    make: Callable[[], nn.Module]
    batch: dict[str, Tensor]
    loss: Callable[..., Tensor]
    checkpointed: Callable[[nn.Module], None]


class Measured(NamedTuple):
    """A step's median seconds, and bytes at their peak: as asked for, and as allocated."""

    seconds: float
    requested: int
    allocated: int


def _own(output: Any) -> Tensor:
    return output.loss


def _cases() -> dict[str, Case]:
    t = library("transformers")
    text = torch.randint(50257, (8, 1024), generator=torch.Generator().manual_seed(0))
    words = torch.randint(30522, (16, 512), generator=torch.Generator().manual_seed(0))
    return {
        "GPT-2, batch 8 of 1024": Case(
            lambda: t.GPT2LMHeadModel(t.GPT2Config(use_cache=False, attn_pdrop=0.0)),
            {"input_ids": text, "labels": text.clone()},
            _own,
            lambda model: model.gradient_checkpointing_enable(),
        ),
        "BERT, batch 16 of 512": Case(
            lambda: t.BertForMaskedLM(t.BertConfig()),
            {"input_ids": words, "labels": words.clone()},
            _own,
            lambda model: model.gradient_checkpointing_enable(),
        ),
    }


def rows() -> Iterator[str]:
    """Steps whole, updates by AdamW included.

    Measured are bytes at their peak, as they were asked for, and as the allocator counts them, whose blocks are larger.
    """
    if not torch.cuda.is_available():
        yield "not run: no CUDA device"
        return
    yield f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}."
    yield ""
    yield (
        "| model | what | at most, GiB | plan's peak | asked for | of the plan's | allocated | predicted, ms "
        "| of all kept | ms | of all kept | bits |"
    )
    yield "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |"
    for name, case in _cases().items():
        yield from _torch_rows(name, case)
        yield from _our_rows(name, case)


def _torch_rows(name: str, case: Case) -> Iterator[str]:
    ways: dict[str, tuple[Callable[[nn.Module], None], Callable[[], AbstractContextManager[Any]]]] = {
        "eager": (lambda model: None, nullcontext),
        "eager, each layer a torch.utils.checkpoint": (case.checkpointed, nullcontext),
        "eager, save_on_cpu": (
            lambda model: None,
            partial(torch.autograd.graph.save_on_cpu, pin_memory=True),
        ),
    }
    first: float | None = None
    for way, (prepare, around) in ways.items():
        before = _held()
        try:
            found = _measured(_eager(case, prepare, around), before)
        except torch.OutOfMemoryError:
            yield f"| {name} | {way} | | | out of memory | | | | | | | |"
            continue
        first = first or found.seconds
        yield (
            f"| {name} | {way} | | | {_gib(found.requested)} | | {_gib(found.allocated)} | | "
            f"| {found.seconds * 1e3:.1f} | {found.seconds / first:.2f} | |"
        )


def _eager(
    case: Case, prepare: Callable[[nn.Module], None], around: Callable[[], AbstractContextManager[Any]]
) -> Callable[[], None]:
    """A training step of eager PyTorch."""
    torch.manual_seed(0)
    model = case.make().cuda()
    model.train()
    prepare(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batch = {key: tensor.cuda() for key, tensor in case.batch.items()}

    def step() -> None:
        optimizer.zero_grad()
        with around():
            loss = case.loss(model(**batch))
        loss.backward()
        optimizer.step()

    return step


def _our_rows(name: str, case: Case) -> Iterator[str]:
    torch.manual_seed(0)
    model = case.make()
    program = graphir.capture(
        model, (), kwargs=case.batch, loss=case.loss, optimizer=torch.optim.AdamW(model.parameters(), fused=True)
    )
    plan = passes.emit(passes.share_storage(program))
    need = graphir.memory(plan, threads=1, profile=None).peak["gpu:0"]
    batch = {key: tensor.cuda() for key, tensor in case.batch.items()}
    whole, kept = _run(plan, program, batch)
    predicted = graphir.estimate(plan, graphir.Topology.named("h200x8"), profile=None).seconds
    yield _row(name, "all kept", None, need, whole, predicted, (predicted, whole.seconds), "")
    for share in SHARES:
        limit = int(share * need)
        try:
            found = passes.balance(program, {"gpu:0": limit}, options=("park", "recompute"))
        except GraphirError as e:
            yield f"| {name} | {share} | {_gib(limit)} | {e.what} | | | | | | | | |"
            continue
        placed = passes.emit(passes.share_storage(passes.inject_copies(found.program)))
        peak = graphir.memory(placed, threads=1, profile=None).peak["gpu:0"]
        measured, made = _run(placed, program, batch)
        bits = different(kept, made)
        yield _row(
            name,
            str(share),
            limit,
            peak,
            measured,
            found.after,
            (predicted, whole.seconds),
            "equal" if not bits else f"{bits} tensors differ",
        )


def _row(
    name: str,
    what: str,
    limit: int | None,
    peak: int,
    found: Measured,
    predicted: float,
    kept: tuple[float, float],
    bits: str,
) -> str:
    return (
        f"| {name} | {what} | {'' if limit is None else _gib(limit)} | {_gib(peak)} | {_gib(found.requested)} "
        f"| {limited(f'{found.requested / peak:.3f}', at_most=MORE)} | {_gib(found.allocated)} | {predicted * 1e3:.1f} "
        f"| {predicted / kept[0]:.2f} | {found.seconds * 1e3:.1f} | {found.seconds / kept[1]:.2f} | {bits} |"
    )


def _run(plan: graphir.Plan, program: Program, batch: dict[str, Tensor]) -> tuple[Measured, list[Tensor]]:
    """What was measured, and what a session holds after all steps."""
    before = _held()
    binding = {str(device): "cuda:0" for device in plan.devices if not device.is_host}
    with runtime.Session(plan, program.state, binding=binding) as session:
        found = _measured(lambda: session.step(**batch), before)
        return found, [tensor.cpu() for tensor in session.state_dict().values()]


def _held() -> dict[str, int]:
    """What is there now, by figure."""
    gc.collect()
    torch.cuda.synchronize()
    found = torch.cuda.memory_stats()
    return {figure: found[f"{figure}.all.current"] for figure in ("requested_bytes", "allocated_bytes")}


def _measured(step: Callable[[], object], before: dict[str, int]) -> Measured:
    """Some steps; of the bytes, those that were there *before* do not count."""
    for _ in range(_WARM):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()

    def run() -> None:
        step()
        torch.cuda.synchronize()

    seconds = statistics.median(seconds_of(run) for _ in range(_STEPS))
    peaks = [torch.cuda.memory_stats()[f"{figure}.all.peak"] - there for figure, there in before.items()]
    return Measured(seconds, *peaks)


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f}"
