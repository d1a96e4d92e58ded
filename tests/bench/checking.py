"""What the proof of a plan costs, for each instruction, on a replicated and shifted model of Llama's shape."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

from limits import limited
from timing import in_turn, seconds

__all__ = ["rows"]

LAYERS, REPLICAS, ROUNDS = 16, 4, 15


def rows() -> Iterator[str]:
    """The table: microseconds an instruction, medians."""
    from graphir.runtime import check

    plan = _plan()
    bare = plan.with_(values={})
    size, lanes = len(plan.instructions), len(plan.lanes)
    taken = in_turn(
        {"bare": lambda: seconds(lambda: check(bare)), "whole": lambda: seconds(lambda: check(plan))}, ROUNDS
    )
    each = {name: median(times) * 1e6 / size for name, times in taken.items()}
    yield f"{size:,} instructions on {lanes} lanes:"
    yield ""
    yield "| check(plan) | µs an instruction | at most |"
    yield "| --- | ---: | ---: |"
    for what, name, limit in (("order and lifetimes", "bare", 2), ("with value numbers", "whole", 6)):
        yield f"| {what} | {limited(f'{each[name]:.2f}', at_most=limit)} | {limit} |"


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
