"""Run torch operators on the host, one after the other: what fills the state of a lowered program."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ...ir.operator import Arg, Operator, Symbol, groups
from ...ir.opset import overload, signature, to_torch
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
    results = _results(op, _call(op, inputs))
    return [inputs[writes[i]] if i in writes else results[i] for i in range(len(op.outputs))]


def _returned(op: Operator) -> int:
    return len(signature(op.type).results) if op.results is None else op.results.count("t")


def _call(op: Operator, inputs: Sequence[torch.Tensor]) -> Any:
    if op.type == "Copy":
        return inputs[0].clone()
    if op.type == "AllReduce":
        total = sum(inputs[1:], inputs[0])
        return [total.clone() for _ in inputs]
    sig = signature(op.type)
    given: dict[str, Any] = {name: _constant(arg) for name, arg in op.args.items()}
    for param, group in zip(sig.tensors, groups(op.operands, len(inputs)), strict=False):
        if isinstance(group, list):
            given[param.name] = [None if i is None else inputs[i] for i in group]
        elif group is not None:
            given[param.name] = inputs[group]
    names = {param.name for param in sig.params}
    if "device" in names:
        given["device"] = torch.device("cpu")
    if "generator" in names:
        given["generator"] = None if op.seed is None else torch.Generator("cpu").manual_seed(mix(0, 0, op.seed))
    positional = [given.pop(param.name, param.default) for param in sig.params if not param.keyword]
    return overload(op.type)(*positional, **given)


def _constant(arg: Arg) -> Any:
    if isinstance(arg, Symbol):
        return to_torch(arg)
    return [_constant(item) for item in arg] if isinstance(arg, tuple) else arg


def _results(op: Operator, returned: Any) -> list[torch.Tensor]:
    """The returned tensors that have a name, in order."""
    single = len(signature(op.type).results) == 1
    things = [returned] if single else list(returned or ())
    found: list[torch.Tensor] = []
    for thing, group in zip(things, groups(op.results, _returned(op)), strict=False):
        for tensor, position in zip(thing, group, strict=True) if isinstance(group, list) else [(thing, group)]:
            if position is not None:
                found.append(tensor)
    return found
