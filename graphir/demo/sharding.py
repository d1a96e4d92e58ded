"""DLRM, sharded: where its tables go, what is exchanged, what devices hold, and that it trains as on one device."""

from __future__ import annotations

import copy
import time
from typing import Final

import torch
from rich.console import Console
from torch import nn

from graphir import passes, runtime

from ..analysis.memory import memory
from ..analysis.placed import placed
from ..analysis.traffic import traffic
from ..capturing.capture import capture
from ..ir.program import Program
from ..ir.text import nbytes_text
from .dlrm import KAGGLE, Dlrm, batch_dims, clicks, loss

__all__ = ["run_dlrm"]

WIDTH: Final = 100
DEVICES: Final = (0, 1, 2, 3)
BATCH: Final = 512
LINES: Final = 12


def run_dlrm(*, steps: int, seed: int) -> bool:
    """Shard a scaled-down Criteo Kaggle DLRM over four logical devices, train it, and compare it with eager PyTorch on
    the whole batch.

    Args:
        steps: of training.
        seed: of the weights and of the clicks.

    Returns:
        Whether losses and parameters agree to 1e-5.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the devices share this machine's cores
    try:
        return _Dlrm(steps, seed).run()
    finally:
        torch.set_num_threads(threads)


class _Dlrm:
    def __init__(self, steps: int, seed: int) -> None:
        self.steps, self.seed = steps, seed
        self.console = Console(width=WIDTH, highlight=False, soft_wrap=False)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model = Dlrm(KAGGLE).double()
        self.eager = copy.deepcopy(self.model)

    def run(self) -> bool:
        start = time.perf_counter()
        program = self.capture()
        sharded = self.shard(program)
        self.hold(program, sharded)
        agrees = self.train(program, sharded)
        verdict = "every check held" if agrees else "[red]the sharded model trains otherwise[/red]"
        self.console.print(f"\n{verdict}; {time.perf_counter() - start:.1f} s in all")
        return agrees

    def title(self, text: str) -> None:
        self.console.print()
        self.console.rule(f"[bold]{text}", align="left", style="dim")

    def verbatim(self, text: str) -> None:
        self.console.print(text, markup=False, overflow="ignore", no_wrap=True, crop=False)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(model.parameters(), lr=0.05)

    def capture(self) -> Program:
        self.title("capture")
        share = clicks(KAGGLE, BATCH // len(DEVICES), self.seed, torch.float64)
        start = time.perf_counter()
        program = capture(
            self.model,
            share.inputs,
            targets=(share.target,),
            loss=loss,
            optimizer=self.optimizer(self.model),
            batch_dims=batch_dims(KAGGLE),
            name="dlrm",
        )
        tables = sum(table.weight.numel() for table in self.model.emb_l)  # type: ignore[misc, operator]
        others = sum(p.numel() for p in self.model.parameters()) - tables
        self.verbatim(
            f"a training step of DLRM in {time.perf_counter() - start:.2f} s: {len(program.step.ops)} operators"
        )
        self.verbatim(f"  {len(KAGGLE.tables)} tables of {tables:,} parameters, and MLPs of {others:,}")
        return program

    def shard(self, program: Program) -> Program:
        self.title("shard: tables by bytes, the rest on every device")
        start = time.perf_counter()
        sharded = passes.inject_copies(passes.shard(program, {"emb_l.*": "balanced"}, list(DEVICES)))
        seconds = time.perf_counter() - start
        lines = str(placed(sharded)).splitlines()
        totals = [line for line in lines if line.startswith("  together")]
        tables = lines[2 : len(lines) - len(totals)]
        self.verbatim("\n".join([*lines[:2], *tables[:LINES]]))
        self.verbatim(f"  … {len(tables) - LINES} tables more")
        self.verbatim("\n".join(totals))
        self.verbatim(f"  in {seconds:.2f} s, to {len(sharded.step.ops):,} operators")
        self.title("the shuffle: bytes that cross in a step")
        rows = str(traffic(passes.emit(sharded, {"batch": BATCH // len(DEVICES)}))).splitlines()
        end = next(i for i, row in enumerate(rows) if row.startswith("  together"))
        self.verbatim("\n".join(rows[1 : end + 2]))
        return sharded

    def hold(self, program: Program, sharded: Program) -> None:
        self.title("bytes on each device at its peak")
        share = BATCH // len(DEVICES)
        for what, peak in (
            ("one device, all rows", memory(program, {"batch": BATCH}).peak),
            ("sharded", memory(sharded, {f"gpu_{device}/batch": share for device in DEVICES}).peak),
        ):
            figures = "".join(f"{nbytes_text(nbytes):>12}" for device, nbytes in peak.items() if device != "cpu:0")
            self.verbatim(f"  {what:<20}{figures}")

    def train(self, program: Program, sharded: Program) -> bool:
        self.title(f"train: {self.steps} steps of {BATCH} rows, beside eager PyTorch on the whole batch")
        optimizer = self.optimizer(self.eager)
        worst = 0.0
        with runtime.Session(passes.emit(sharded), program.state, binding="cpu") as session:
            for step in range(self.steps):
                rows = BATCH if step % 5 else BATCH - 3  # shares that are not even, too
                batch = clicks(KAGGLE, rows, self.seed + 1 + step, torch.float64)
                ours = session.step(*batch.inputs, batch.target)
                optimizer.zero_grad()
                whole = loss(self.eager(*batch.inputs), batch.target)
                whole.backward()
                optimizer.step()
                theirs = whole.detach()
                worst = max(worst, float((ours - theirs).abs() / theirs))
                if step % max(1, self.steps // 5) == 0 or step == self.steps - 1:
                    self.verbatim(f"  step {step:>3}: loss {float(ours):.4f}, of eager PyTorch {float(theirs):.4f}")
            state = session.state_dict()
        theirs_state = self.eager.state_dict()
        apart = max(
            float((state[name] - value).abs().max() / value.abs().max()) for name, value in theirs_state.items()
        )
        self.verbatim(f"  losses differ by {worst:.1e} at most, parameters by {apart:.1e}, relative")
        return worst <= 1e-5 and apart <= 1e-5
