"""The main job, end to end, told as it goes: capture, replicate, shift, prove, run, check, save."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn

from graphir import passes, runtime

from ..analysis.certify import certify
from ..analysis.memory import CATEGORIES, Memory, memory
from ..capturing.capture import capture
from ..ir.plan import Plan
from ..ir.program import Program
from ..ir.text import nbytes_text, show
from .digits import load_digits
from .eager import ShareByShare
from .model import DigitsNet
from .sharding import run_dlrm

__all__ = ["run_demo", "run_dlrm"]

WIDTH: Final = 100
BATCH: Final = 64
TRAINING_IMAGES: Final = 1500
CHECKED_STEPS: Final = 20
PLAN_LINES: Final = 10
CROSSING_LINES: Final = 9
DEVICES: Final = (0, 1)
SHIFTS: Final[Mapping[int, int]] = {0: 2, 1: 3}


class Digits:
    """The digits, shuffled once: 1,500 to train on, the others to test with."""

    def __init__(self, seed: int) -> None:
        images, labels = load_digits()
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
        self.images, self.labels = images[order], labels[order]

    def batches(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The training images in this epoch's order; the last batch is a small one."""
        order = torch.randperm(TRAINING_IMAGES, generator=torch.Generator().manual_seed(epoch))
        for chosen in order.split(BATCH):
            yield self.images[chosen], self.labels[chosen]

    def accuracy(self, model: nn.Module) -> float:
        """The share of the test images that *model* gets right."""
        model.eval()
        with torch.no_grad():
            right: Tensor = model(self.images[TRAINING_IMAGES:]).argmax(1) == self.labels[TRAINING_IMAGES:]
        model.train()
        return right.float().mean().item()


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of the demo, for the captured module and for the eager replicas alike."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)


def run_demo(out: Path, *, epochs: int, seed: int) -> bool:
    """Run the demo and write its plan, its text and the trained state to the folder *out*.

    Args:
        out: made if it is not there.
        epochs: how often to go through the training images.
        seed: of the weights, the split and the order of the images.

    Returns:
        Whether every check held.
    """
    # Four logical devices share this machine's cores, so each kernel gets one thread, in eager PyTorch too: how many
    # threads a kernel has can change the order of its sums.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _Demo(out, epochs, seed).run()
    finally:
        torch.set_num_threads(threads)


class _Demo:
    def __init__(self, out: Path, epochs: int, seed: int) -> None:
        self.out, self.epochs = out, epochs
        self.console = Console(width=WIDTH, highlight=False, soft_wrap=False)
        self.digits = Digits(seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model = DigitsNet()

    def run(self) -> bool:
        start = time.perf_counter()
        self.out.mkdir(parents=True, exist_ok=True)  # better now than after a minute
        captured = self.capture()
        before, after = self.place(captured)
        unshifted, shifted = passes.emit(before), passes.emit(after)
        self.compare_memory(memory(unshifted), memory(shifted))
        self.show_plan(shifted)
        equal = self.check(captured, unshifted, shifted)
        trained = self.train(captured, shifted)
        self.save(shifted, trained)
        verdict = "every check held" if equal else "[red]the plans differ from eager PyTorch[/red]"
        self.console.print(f"\n{verdict}; {time.perf_counter() - start:.1f} s in all")
        return equal

    def title(self, text: str) -> None:
        self.console.print()
        self.console.rule(f"[bold]{text}", align="left", style="dim")

    def say(self, text: str) -> None:
        self.console.print(text, overflow="fold")

    def verbatim(self, line: str, style: str = "") -> None:
        """Print a line as it is, however long."""
        self.console.print(line, style=style, markup=False, overflow="ignore", no_wrap=True, crop=False)

    def capture(self) -> Program:
        self.title("capture")
        x, y = next(self.digits.batches(0))
        share = BATCH // len(DEVICES)
        start = time.perf_counter()
        program = capture(
            self.model,
            inputs=(x[:share],),
            targets=(y[:share],),
            loss=F.cross_entropy,
            optimizer=make_optimizer(self.model),
            name="digits",
        )
        seconds = time.perf_counter() - start
        phases = {
            phase: sum(op.phase == phase for op in program.step.ops) for phase in ("forward", "backward", "update")
        }
        parameters = sum(p.numel() for p in self.model.parameters())
        sizes = f"follow {', '.join(program.dims)}" if not program.covers.fixed else f"fixed: {program.covers.fixed}"
        self.say(f"a training step of {type(self.model).__name__}, {parameters:,} parameters, in {seconds:.2f} s")
        self.say(f"  operators    {len(program.step.ops)}: " + ", ".join(f"{n} {phase}" for phase, n in phases.items()))
        self.say(f"  sizes        {sizes}")
        activations = passes.find_activations(program)
        self.say(f"  activations  {len(activations)}: {', '.join(activations[:4])}, …, {', '.join(activations[-3:])}")
        return program

    def place(self, captured: Program) -> tuple[Program, Program]:
        self.title("place")
        activations = passes.find_activations(captured)
        replicated = passes.replicate(captured, devices=DEVICES)
        shifted = passes.shift_activations(replicated, activations[len(activations) // 2 :], shifts=SHIFTS)
        placed = passes.share_storage(passes.inject_copies(shifted))
        moved = sum(a.device != b.device for a, b in zip(replicated.step.ops, shifted.step.ops, strict=True))
        copies = sum(op.kind == "copy" for op in placed.step.ops)
        self.say(f"replicate{{devices={list(DEVICES)}}}: {len(replicated.step.ops)} operators, gradients averaged")
        self.say(f"shift_activations: the second half, {dict(SHIFTS)}: {moved} operators moved, {copies} copies put in")
        compared = certify(replicated, placed).compared
        proved = ", ".join(f"{count} {what}" for what, count in compared.items())
        self.say(f"certify: every value is the same before and after, in every step: {proved}")
        return passes.share_storage(replicated), placed

    def compare_memory(self, before: Memory, after: Memory) -> None:
        self.title("bytes on each device at its peak")
        devices = [device for device in after.peak if device.startswith("gpu")]
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column("")
        for device in devices:
            table.add_column(device, justify="right")
        for label, figures in (("before", before), ("after", after)):
            table.add_row(f"[bold]{label}", *[f"[bold]{nbytes_text(figures.peak.get(d, 0))}" for d in devices])
            for category in CATEGORIES:
                values = [figures.at_peak.get(device, {}).get(category, 0) for device in devices]
                if any(values):
                    table.add_row(f"  {category}", *[nbytes_text(value) if value else "-" for value in values])
        self.console.print(table)

    def show_plan(self, plan: Plan) -> None:
        self.title("head of the plan")
        lines = [line.strip() for line in show(plan, figures=False, attributes=False, types=False).splitlines()]
        first = next(i for i, line in enumerate(lines) if ".compute: " in line)
        crossing = next(i for i, line in enumerate(lines) if ".copy_in: wait" in line)
        self.excerpt(lines[first : first + PLAN_LINES])
        self.say(f"  … {crossing - first - PLAN_LINES} lines, then replica 0 crosses to {plan.devices[2]}:")
        self.excerpt(lines[crossing : crossing + CROSSING_LINES])
        self.say(f"  … {len(lines) - crossing - CROSSING_LINES} lines to the end")

    def excerpt(self, lines: Sequence[str]) -> None:
        for line in lines:
            cut = line if len(line) <= WIDTH - 2 else line[: WIDTH - 3] + "…"
            self.verbatim(f"  {cut}", style="dim")

    def check(self, captured: Program, unshifted: Plan, shifted: Plan) -> bool:
        self.title(f"check: {CHECKED_STEPS} steps, three ways, bit for bit")
        eager = ShareByShare(self.model, F.cross_entropy, make_optimizer, len(DEVICES))
        batches = [batch for batch in self.digits.batches(0) if len(batch[0]) == BATCH][:CHECKED_STEPS]
        with (
            runtime.Session(unshifted, captured.state, binding="cpu") as one,
            runtime.Session(shifted, captured.state, binding="cpu") as other,
        ):
            losses = [(one.step(x, y), other.step(x, y), eager.step(x, y)) for x, y in batches]
            same_plans = all(torch.equal(a, b) for a, b, _ in losses)
            same_eager = all(torch.equal(b, c) for _, b, c in losses)
            for replica, (model, optimizer) in enumerate(zip(eager.models, eager.optimizers, strict=True)):
                same_plans &= _equal(_state(one, replica), _state(other, replica))
                same_eager &= _equal(_state(other, replica), _named(model.state_dict(), optimizer.state_dict()))
        self.say("  compared: losses, and each replica's parameters, buffers and momentum")
        self.say(f"  shifted plan = unshifted plan                 {_verdict(same_plans)}")
        self.say(f"  shifted plan = eager PyTorch, share by share  {_verdict(same_eager)}")
        return same_plans and same_eager

    def train(self, captured: Program, plan: Plan) -> Program:
        """Train, and return the captured program with the state that training ended in."""
        steps = -(-TRAINING_IMAGES // BATCH)
        self.title(f"train: {len(DEVICES)} replicas on {len(plan.devices) - 1} logical devices")
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("mean loss {task.fields[loss]}  test accuracy {task.fields[accuracy]}"),
        )
        live = self.console.is_terminal
        with (
            runtime.Session(plan, captured.state, binding="cpu") as session,
            Progress(*columns, console=self.console, disable=not live) as progress,
        ):
            for epoch in range(self.epochs):
                name = f"epoch {epoch + 1}/{self.epochs}"
                task = progress.add_task(name, total=steps, loss="-", accuracy="-")
                total, seen = 0.0, 0
                for x, y in self.digits.batches(epoch):
                    total += session.step(x, y).item() * len(x)
                    seen += len(x)
                    progress.update(task, advance=1, loss=f"{total / seen:.4f}")
                self.model.load_state_dict(session.state_dict())
                accuracy = f"{self.digits.accuracy(self.model):.1%}"
                progress.update(task, accuracy=accuracy)
                if not live:
                    self.say(f"  {name}  {steps} steps  mean loss {total / seen:.4f}  test accuracy {accuracy}")
            return captured.with_(state=session.state())

    def save(self, plan: Plan, trained: Program) -> None:
        self.title("saved")
        plan.save(self.out / "digits.plan.json")
        (self.out / "digits.plan.txt").write_text(f"{plan}\n", encoding="utf-8")
        trained.save(self.out / "digits.json", state=True)
        for name, what in (
            ("digits.plan.json", "the plan; graphir.load reads it"),
            ("digits.plan.txt", "its text; graphir.parse reads it"),
            ("digits.json", "the captured program"),
            ("digits.json.safetensors", "the state after training"),
        ):
            size = nbytes_text((self.out / name).stat().st_size)
            self.verbatim(f"  {size:>9}  {what:<32}  {self.out / name}")


def _state(session: runtime.Session, replica: int) -> dict[str, Tensor]:
    return _named(session.state_dict(replica), session.optimizer_state_dict(replica))


def _named(module: Mapping[str, Tensor], optimizer: Mapping[str, Any]) -> dict[str, Tensor]:
    """A replica's parameters and buffers, and its optimizer's tensors, under one set of names."""
    held = optimizer["state"].items()
    return {**module, **{f"{i}.{name}": tensor for i, tensors in held for name, tensor in tensors.items()}}


def _equal(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def _verdict(equal: bool) -> str:
    return "[green]equal[/green]" if equal else "[red]differs[/red]"
