"""What the proof of a plan costs, for each instruction, on a replicated and shifted model of Llama's shape."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

__all__ = ["rows"]

LAYERS, REPLICAS, RUNS = 16, 4, 7


def rows() -> Iterator[str]:
    """The table: microseconds an instruction, medians."""
    from graphir.runtime import check

    plan = _plan()
    bare = plan.with_(values={})
    size, lanes = len(plan.instructions), len(plan.lanes)
    yield f"{size:,} instructions on {lanes} lanes:"
    yield ""
    yield "| check(plan) | µs an instruction | at most |"
    yield "| --- | ---: | ---: |"
    yield f"| order and lifetimes | {_microseconds(lambda: check(bare)) / size:.2f} | 2 |"
    yield f"| with value numbers | {_microseconds(lambda: check(plan)) / size:.2f} | 6 |"


def _microseconds(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(RUNS):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return median(seconds) * 1e6


def _plan() -> Any:
    import torch
    import torch.nn.functional as F
    from torch._subclasses.fake_tensor import FakeTensorMode
    from zoo_rows import library

    import graphir
    from graphir import passes

    def loss(output: Any, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output.logits.flatten(0, 1), target.flatten())

    transformers = library("transformers")
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=LAYERS,
        num_attention_heads=8, num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    with FakeTensorMode():
        model = transformers.AutoModelForCausalLM.from_config(config)
        tokens = torch.zeros(2, 64, dtype=torch.long)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    program = graphir.capture(model, (tokens,), targets=(tokens,), loss=loss, optimizer=optimizer)
    chosen = passes.find_activations(program)
    program = passes.replicate(program, devices=list(range(REPLICAS)))
    shifts = {replica: REPLICAS + replica for replica in range(REPLICAS)}
    program = passes.shift_activations(program, chosen[len(chosen) // 2 :], shifts=shifts)
    return passes.emit(passes.inject_copies(program))
