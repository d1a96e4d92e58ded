"""The quickest way to the bits of a step: operators in program order, each prepared once for all programs that have it.

It is not the reference executor, which it is held against in a test, but calls the same kernels. Memory that an
operator leaves unwritten, also between the elements of a copied view, is full of ones, which are NaN."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from graphir.runtime.kernels.communication import all_reduce, copy, is_marked, reduction
from graphir.runtime.kernels.invoke import perform
from torch import Tensor

from graphir.ir.blob import STATE_ROLES, bound_layout, overlaps
from graphir.ir.calls import Bound, Call, Constant, Default, Operand, OperandList, arrange, evaluate, flatten
from graphir.ir.names import prefix_of
from graphir.ir.operator import Operator
from graphir.ir.optypes.table import operator_type
from graphir.ir.program import Program
from graphir.ir.seeds import mix
from graphir.ir.size import Dims
from graphir.ir.symbols import to_torch

__all__ = ["Running"]

_HOST = torch.device("cpu")
_ONES = 0xFF

_calls: dict[tuple[Any, ...], tuple[Operator, Call]] = {}
_templates: dict[tuple[int, tuple[int, ...]], tuple[list[Any], dict[str, Any], bool]] = {}
_MOST_KEPT = 50_000


class Running:
    """A program with its state, which steps overwrite.

    Args:
        program: sound.
        given: what ``init`` loads.
    """

    def __init__(self, program: Program, given: Mapping[str, Tensor]) -> None:
        self.program = program
        self.generator = torch.Generator()
        values: dict[str, Any] = {}
        with torch.inference_mode():
            for op in program.init.ops:
                if op.type == "graphir.load":
                    values[op.outputs[0]] = _loaded(program, op, given)
                else:
                    self.execute(op, values, program.dims, 0)
            step = program.step
            held = [n for n in step.external_inputs if step.blobs[n].role in STATE_ROLES]
            self.state = {name: _own(values[name]) for name in held}

    def step(self, dims: Dims, inputs: Mapping[str, Any], step: int) -> dict[str, Tensor]:
        """The external outputs and the state after a step."""
        values: dict[str, Any] = {**self.state}
        for name, value in inputs.items():
            values[name] = value.clone() if isinstance(value, Tensor) else value
        with torch.inference_mode():
            for op in self.program.step.ops:
                self.execute(op, values, dims, step)
            for name, tensor in self.state.items():
                if values[name] is not tensor:
                    tensor.copy_(values[name])
        outputs = {name: values[name] for name in self.program.step.external_outputs}
        return {**outputs, **{f"state {name}": tensor for name, tensor in self.state.items()}}

    def execute(self, op: Operator, values: dict[str, Any], dims: Dims, step: int) -> None:
        """One operator on the values so far."""
        if op.type == "Copy":
            values[op.outputs[0]] = _copied(values[op.inputs[0]])
            return
        if op.type == "AllReduce":
            divisor, weights = reduction(op, dims)
            made = [all_reduce([values[n] for n in op.inputs], divisor, weights) for _ in op.outputs]
            values.update(zip(op.outputs, made, strict=True))
            return
        call = _arranged(op)
        positional, keyword, filled = _template(call, dims)
        inputs = [values[name] for name in op.inputs]
        if filled:
            positional = [self.given(item, op, inputs, step) for item in positional]
            keyword = {name: self.given(item, op, inputs, step) for name, item in keyword.items()}
        returned = perform(op.type, positional, keyword, _HOST)
        if call.single and call.returned == (0,) and not op.effects.writes:
            values[op.outputs[0]] = returned
            if operator_type(op.type).unwritten:
                _fill(returned)
            return
        results = flatten(call, returned)
        overwritten = dict(op.effects.writes)
        for position, name in enumerate(op.outputs):
            values[name] = inputs[overwritten[position]] if position in overwritten else results[position]

    def given(self, item: Any, op: Operator, inputs: list[Any], step: int) -> Any:
        """What stands for a place that is filled anew for each call."""
        kind = item.__class__
        if kind is Operand:
            return inputs[item.position]
        if kind is OperandList:
            return [None if i is None else inputs[i] for i in item.positions]
        if item is Bound.GENERATOR:
            assert op.seed is not None
            return self.generator.manual_seed(mix(step, self.replica(op), op.seed))
        return item

    def replica(self, op: Operator) -> int:
        """That whose random numbers the operator draws."""
        prefix = prefix_of(op.outputs[0]) if op.outputs else ""
        return self.program.replicas.index(prefix) if prefix in self.program.replicas else 0


def _arranged(op: Operator) -> Call:
    key = op.type, id(op.args), op.operands, op.results, len(op.inputs), len(op.outputs), op.seed is None
    found = _calls.get(key)
    if found is None:
        if len(_calls) > _MOST_KEPT:
            _calls.clear()
            _templates.clear()
        found = _calls[key] = op, arrange(op)  # the operator keeps its arguments' identity
    return found[1]


def _template(call: Call, dims: Dims) -> tuple[list[Any], dict[str, Any], bool]:
    """What a call is given, but for its operands and its random numbers; and whether it has such."""
    key = id(call), tuple(dims.values())
    found = _templates.get(key)
    if found is None:
        if len(_templates) > _MOST_KEPT:
            _templates.clear()
        positional = [_constant(argument, dims) for argument in call.positional]
        keyword = {name: _constant(argument, dims) for name, argument in call.keyword}
        places = (*positional, *keyword.values())
        filled = any(isinstance(item, (Operand, OperandList)) or item is Bound.GENERATOR for item in places)
        found = _templates[key] = positional, keyword, filled
    return found


def _constant(argument: Any, dims: Dims) -> Any:
    if isinstance(argument, Constant):
        return evaluate(argument.arg, dims)
    if isinstance(argument, Default):
        return argument.value
    return _HOST if argument is Bound.DEVICE else argument


def _loaded(program: Program, op: Operator, given: Mapping[str, Tensor]) -> Tensor:
    blob, source = program.init.blobs[op.outputs[0]], given[str(op.args["key"])]
    if blob.shape is None or blob.dtype is None:
        return source.clone()
    shape, strides = bound_layout(blob, {})
    return torch.empty_strided(shape, strides, dtype=to_torch(blob.dtype)).copy_(source)


def _own(value: Tensor) -> Tensor:
    """Two states never share memory."""
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).copy_(value)


def _copied(source: Tensor) -> Tensor:
    """A copy with the strides of its source; what lies between its elements is poison, where they share no memory."""
    if overlaps(source.size(), source.stride()) or is_marked(source):
        return copy(source)
    made = torch.empty_strided(source.shape, source.stride(), dtype=source.dtype)
    _fill(made)
    return made.copy_(source)


def _fill(tensor: Tensor) -> None:
    """Poison all of a new tensor's memory."""
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).fill_(_ONES)
