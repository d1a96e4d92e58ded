"""From a model of 70 billion parameters to plans for eight devices and for sixteen, without memory for a weight."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from limits import limited

__all__ = ["rows"]

BATCH, LENGTH = 2, 2048
SECONDS, GIB = 60, 4
"""At most, of all stages on eight devices."""

LIMITS = {"emit": 35}
"""At most, in microseconds an operator of a stage on eight devices."""


def rows() -> Iterator[str]:
    """The table of stages, each way in a process of its own; peaks are of the process, imports included."""
    one = "seconds | µs each | peak, GiB"
    yield f"| stage | operators, of 8 devices | {one} | at most, µs each | operators, of 16 devices | {one} |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    columns = []
    for replicas in (4, 8):
        run = subprocess.run([sys.executable, __file__, str(replicas)], check=True, capture_output=True, text=True)
        columns.append([json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")])
    for stages in zip(*columns, strict=True):
        limit = LIMITS.get(stages[0]["stage"])
        ours, theirs = (_cells(stage, most) for stage, most in zip(stages, (limit, None), strict=True))
        yield f"| {stages[0]['stage']} | {ours} | {limit or ''} | {theirs} |"
    (ours, peak), (theirs, other_peak) = [
        (f"{sum(s['seconds'] for s in stages):.1f}", f"{stages[-1]['peak'] / 2**30:.2f}") for stages in columns
    ]
    whole = f"{limited(ours, at_most=SECONDS)} | | {limited(peak, at_most=GIB)}"
    yield f"| in all | | {whole} | | | {theirs} | | {other_peak} |"
    yield f"| at most | | {SECONDS} | | {GIB} | | | | | |"


def _cells(stage: dict[str, Any], at_most: float | None) -> str:
    count, taken = stage["operators"], stage["seconds"]
    each = limited(f"{taken / count * 1e6:.1f}", at_most=at_most) if count else ""
    return f"{count:,} | {taken:.1f} | {each} | {stage['peak'] / 2**30:.2f}"


def _llama() -> tuple[Any, Any]:
    """The model and its tokens, of the shapes of Llama 2 70B, as fake tensors of bfloat16."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from zoo_rows import library

    transformers = library("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32000, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80,
        num_attention_heads=64, num_key_value_heads=8, use_cache=False, dtype=torch.bfloat16,
    )  # fmt: skip
    with FakeTensorMode():
        return transformers.AutoModelForCausalLM.from_config(config), torch.zeros(BATCH, LENGTH, dtype=torch.long)


def _plan(replicas: int) -> None:
    """Print each stage: *replicas* copies, and of each the second half of the activations on a device of its own."""
    start = time.perf_counter()
    root = Path(__file__).resolve().parents[2]
    sys.path[:0] = [str(root), str(root / "tests" / "zoo")]
    import torch
    import torch.nn.functional as F

    import graphir
    from graphir import passes

    def done(stage: str, operators: int) -> None:
        nonlocal start
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        taken = time.perf_counter() - start
        print(json.dumps({"stage": stage, "operators": operators, "seconds": taken, "peak": peak}), flush=True)
        start = time.perf_counter()

    def loss(output: Any, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output.logits.flatten(0, 1).float(), target.flatten())

    model, tokens = _llama()
    done("imports and the model", 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    program = graphir.capture(model, (tokens,), targets=(tokens,), loss=loss, optimizer=optimizer)
    done("capture with AdamW", len(program.step.ops))
    chosen = passes.find_activations(program)
    program = passes.replicate(program, devices=list(range(replicas)))
    done("replicate", len(program.step.ops))
    shifts = {replica: replicas + replica for replica in range(replicas)}
    program = passes.shift_activations(program, chosen[len(chosen) // 2 :], shifts=shifts)
    done("shift_activations", len(program.step.ops))
    program = passes.inject_copies(program)
    done("inject_copies", len(program.step.ops))
    graphir.verify(program)
    done("verify", len(program.step.ops))
    plan = passes.emit(program)
    done("emit", len(plan.program.step.ops))
    graphir.memory(plan)
    done("memory", len(plan.program.step.ops))


if __name__ == "__main__":
    _plan(int(sys.argv[1]))
