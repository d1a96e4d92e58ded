"""Operators that fill a new tensor, and the iteration counter's mutex.

Sources: ``caffe2/operators/filler_op.h`` and ``caffe2/sgd/iter_op.h``. Random numbers are torch's, not Caffe2's: the
distributions are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod, sqrt
from typing import Final

import torch

from ...ir.dtype import TORCH_NAME
from ...ir.operator import Arg, Symbol
from .builder import ABSENT, Static
from .registry import Lowering, refuse, translates

__all__ = ["DATA_TYPES"]

DATA_TYPES: Final[Mapping[int, str]] = {
    1: "f32", 2: "i32", 3: "u8", 5: "bool", 6: "u8", 7: "i8", 9: "i16", 10: "i64", 12: "f16", 13: "f64"
}  # fmt: skip
"""The element types that torch has, by their numbers in ``TensorProto.DataType``."""


def _shape(c: Lowering) -> tuple[int, ...]:
    """The shape argument, or that of the input, with further dimensions; a scalar's where there is neither."""
    shape = c.integers("shape")
    if not c.count:
        return shape or ()
    if c.count > 1:
        raise refuse(f"{c.count} inputs, of which {c.op.inputs[1]!r} is no shape", "give bounds as arguments")
    if c.integer("input_as_shape"):
        shape = c.static(0)
        if shape is None:
            raise refuse(
                f"the shape is the value of {c.op.inputs[0]!r}, which is not known before the step runs",
                "give the fill an argument 'shape'",
            )
    else:
        shape = c[0].shape
    return shape + (c.integers("extra_shape") or ())


@translates("ConstantFill")
def _constant(c: Lowering) -> None:
    value = c.op.args.get("value", 0)
    if not isinstance(value, (int, float)):
        raise refuse(f"argument 'value' is {value!r}, not a number")
    # Without a type, that of the value decides; without a value too, it is float.
    implied = 10 if isinstance(c.op.args.get("value"), int) else 1
    number = c.integer("dtype", implied)
    if number not in DATA_TYPES:
        raise refuse(f"argument 'dtype' is {number}", f"supported: {', '.join(map(str, DATA_TYPES))}")
    dtype = DATA_TYPES[number]
    fill = float(value) if dtype[0] == "f" else bool(value) if dtype == "bool" else int(value)
    c.full(_shape(c), fill, dtype, 0)


_GIVEN: Final = {
    "GivenTensorFill": "f32",
    "GivenTensorDoubleFill": "f64",
    "GivenTensorBoolFill": "bool",
    "GivenTensorIntFill": "i32",
    "GivenTensorInt64Fill": "i64",
}


@translates(*_GIVEN)
def _given(c: Lowering) -> None:
    values, shape = c.op.args.get("values", ()), _shape(c)
    values = values if isinstance(values, tuple) else (values,)
    if len(values) != prod(shape):
        raise refuse(f"{len(values)} values are given for the shape {list(shape)}")
    dtype = getattr(torch, TORCH_NAME[_GIVEN[c.op.type]])
    c.bind(0, Static(torch.tensor(values, dtype=dtype, device="cpu").reshape(shape)))


def _uniform(c: Lowering, low: float, high: float) -> None:
    args: dict[str, Arg] = {"size": _shape(c), "dtype": Symbol("f32")}
    empty = c.one("aten.empty.memory_format", [], args)
    c.one("aten.uniform.default", [empty], {"from": low, "to": high}, 0)


def _gaussian(c: Lowering, mean: float, std: float) -> None:
    args: dict[str, Arg] = {"mean": mean, "std": std, "size": _shape(c), "dtype": Symbol("f32")}
    c.one("aten.normal.float_float", [], args, 0)


@translates("UniformFill")
def _uniform_fill(c: Lowering) -> None:
    _uniform(c, c.number("min"), c.number("max", 1.0))


@translates("GaussianFill")
def _gaussian_fill(c: Lowering) -> None:
    _gaussian(c, c.number("mean"), c.number("std", 1.0))


@translates("UniformIntFill")
def _uniform_int(c: Lowering) -> None:
    # Caffe2's upper bound is among the numbers, torch's is not.
    low, high = c.integer("min"), c.integer("max", 1) + 1
    c.one("aten.randint.low_generator", [], {"low": low, "high": high, "size": _shape(c), "dtype": Symbol("i32")}, 0)


def _fan(shape: tuple[int, ...], dim: int) -> float:
    """How many elements there are for each place along a dimension."""
    if len(shape) <= dim or not prod(shape):
        raise refuse(f"no deviation follows from the shape {list(shape)}")
    return prod(shape) / shape[dim]


@translates("XavierFill")
def _xavier(c: Lowering) -> None:
    shape = _shape(c)
    scale = sqrt(3.0 / _fan(shape, 0))
    _uniform(c, -scale, scale)


@translates("MSRAFill")
def _msra(c: Lowering) -> None:
    shape = _shape(c)
    _gaussian(c, 0.0, sqrt(2.0 / _fan(shape, 1)))


@translates("CreateMutex")
def _mutex(c: Lowering) -> None:
    c.bind(0, ABSENT)
