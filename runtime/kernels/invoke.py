"""One operator, executed by itself: its arguments evaluated, its kernel called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from graphir.ir.calls import Call, arrange, evaluate, filled, flatten
from graphir.ir.operator import Operator
from graphir.ir.opset import overload
from graphir.ir.plan import Plan
from graphir.ir.program import Program
from graphir.ir.seeds import mix
from graphir.ir.size import Dims

from ..executor import Setting
from .bindings import OWN_KERNELS, view
from .communication import copy
from .optimizers import UPDATES, operands_of, updater

__all__ = ["fill", "invoke", "perform"]


def invoke(op: Operator, call: Call, inputs: Sequence[Any], setting: Setting, dims: Dims, step: int) -> Any:
    """What the operator's type returns for these inputs."""

    def generator() -> torch.Generator:
        assert op.seed is not None
        return setting.generators[op.device].manual_seed(mix(step, setting.replica(op), op.seed))

    device = setting.binding[op.device]
    positional, keyword = filled(call, inputs, lambda arg: evaluate(arg, dims), device, generator)
    return perform(op.type, positional, keyword, device)


def perform(type: str, positional: Sequence[Any], keyword: Mapping[str, Any], device: torch.device) -> Any:
    """What a type returns for these arguments."""
    if type == "Copy":
        return copy(positional[0], device)
    if type == "aten.view.default":
        return view(*positional)
    if type in UPDATES:
        given = operands_of(type, positional)
        if given.found_inf is not None and given.found_inf.item():
            return None
        numbers = {name: number for name, number in given.numbers.items() if number is not None}
        return updater(type, keyword)(*[[tensor] for tensor in given.tensors], given.rate, **numbers)
    return (OWN_KERNELS.get(type) or overload(type))(*positional, **keyword)


def fill(op: Operator, values: Mapping[str, Tensor], program: Program) -> dict[str, Tensor]:
    """Execute an operator of a program's ``init`` on the values made so far; its outputs by name."""
    binding = dict.fromkeys(program.devices, torch.device("cpu"))
    generators = {device: torch.Generator("cpu") for device in program.devices}
    setting = Setting(Plan(program, program.dims, ()), {}, (), binding, generators)
    call, inputs = arrange(op), [values[name] for name in op.inputs]
    results = flatten(call, invoke(op, call, inputs, setting, program.dims, 0))
    overwritten = dict(op.effects.writes)
    return {name: inputs[overwritten[i]] if i in overwritten else results[i] for i, name in enumerate(op.outputs)}
