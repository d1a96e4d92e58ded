"""Run torch operators on the host, one after the other: what fills the state of a lowered program."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ...ir.calls import arrange, filled, flatten
from ...ir.calls import evaluate as value_of
from ...ir.operator import Operator
from ...ir.opset import overload
from ...ir.seeds import mix

__all__ = ["evaluate", "execute"]


def evaluate(ops: Iterable[Operator], given: Mapping[str, torch.Tensor]) -> dict[tuple[str, int], torch.Tensor]:
    """Every value that *ops* make, by name and version.

    Args:
        ops: without sizes that depend on a dimension.
        given: the values of external blobs; none of them is overwritten.
    """
    values = {(name, 0): tensor.clone() for name, tensor in given.items()}
    with torch.inference_mode():
        for op in ops:
            values.update(zip(op.makes, execute(op, [values[read] for read in op.reads]), strict=True))
    return values


def execute(op: Operator, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The outputs of an operator; those that it overwrites are the inputs themselves."""
    writes = dict(op.effects.writes)
    results = flatten(arrange(op), _returned(op, inputs))
    return [inputs[writes[i]] if i in writes else results[i] for i in range(len(op.outputs))]


def _returned(op: Operator, inputs: Sequence[torch.Tensor]) -> Any:
    if op.kind == "copy":
        return inputs[0].clone()
    if op.kind == "reduce":
        total = sum(inputs[1:], inputs[0])
        return [total.clone() for _ in inputs]

    def generator() -> torch.Generator:
        assert op.seed is not None
        return torch.Generator("cpu").manual_seed(mix(0, 0, op.seed))

    positional, named = filled(arrange(op), inputs, lambda arg: value_of(arg, {}), torch.device("cpu"), generator)
    return overload(op.type)(*positional, **named)
