"""Kernels of ATen on the host that allocate their results and nothing else, or convert operands and nothing else.

A type stands here because it was measured: ``tests/graphir/analysis/formulas/test_plain_kernels.py`` calls each on
layouts and element types that its rule covers, and looks at what it allocates. Nothing is here by default. A rule gives
None where it does not cover the operands.

What these types have in common: torch's ``TensorIterator`` walks operands of any strides and computes in one element
type, to which it converts whole operands of another one beforehand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any, Final

import torch

from ...ir.dtype import ITEMSIZE
from ...ir.optypes.sized import SizedOperand, SizedOperator
from ...ir.symbols import to_symbol, to_torch

__all__ = ["PLAIN", "nothing"]

_REAL: Final = ("f32", "f64")


def nothing(call: SizedOperator) -> int:
    """A kernel that allocates its results and nothing else."""
    return 0


def _converted(call: SizedOperator) -> int | None:
    """Bytes of the operands that are converted to the type that an elementwise kernel computes in.

    That is the type of the result; in place, where the result's type is given, and in comparisons, whose result is
    bool, it is the one that the operands have in common. What is one number is not counted.
    """
    blobs = [call.blobs[name] for name in call.op.inputs]
    result = call.blobs[call.op.outputs[0]].dtype
    if result != "bool" and all(blob.dtype == result for blob in blobs):
        return 0
    operands = [x for x in map(call.operand, range(len(blobs))) if x.shape]
    types = {x.dtype for x in operands}
    if not types:
        return 0
    if any(dtype.startswith("c") for dtype in types):  # some give the real part's type, computed in the complex one
        return None
    if call.op.effects.writes or result == "bool":
        common = _common(types)
        if (result != "bool" and common != result) or _is_raised(call, common):
            return None
    else:
        common = str(result)
    return sum(prod(x.shape) * ITEMSIZE[common] for x in operands if x.dtype != common)


def _common(types: set[str]) -> str:
    found: Any = None
    for dtype in types:
        found = to_torch(dtype) if found is None else torch.promote_types(found, to_torch(dtype))
    return str(to_symbol(found)) if found is not None else ""


def _is_raised(call: SizedOperator, common: str) -> bool:
    """Whether a number among the operands or arguments may raise whole numbers to fractions, or bool to numbers."""
    if common.startswith(("f", "bf")):
        return False
    numbers = [arg for arg in call.op.args.values() if isinstance(arg, int | float) and not isinstance(arg, bool)]
    others = {x.dtype for x in map(call.operand, range(len(call.op.inputs))) if not x.shape}
    return bool(others - {common}) or any(isinstance(n, float) or common == "bool" for n in numbers)


def _conditional(call: SizedOperator) -> int | None:
    """A kernel that selects by a bool operand, which it reads as it is."""
    chosen = {call.blobs[name].dtype for name in call.op.inputs} - {"bool"}
    return 0 if len(chosen) <= 1 else None


def _as_result(*types: str) -> Callable[[SizedOperator], int | None]:
    """A kernel that converts its operand to the type of its result, where that is one of *types* (all by default)."""

    def rule(call: SizedOperator) -> int | None:
        x, y = call.operand(0), call.result()
        if types and y.dtype not in types:
            return None
        return 0 if x.dtype == y.dtype else prod(x.shape) * ITEMSIZE[y.dtype]

    return rule


def _of_types(*types: str) -> Callable[[SizedOperator], int | None]:
    """A kernel that allocates nothing for a first operand of these types."""
    return lambda call: 0 if call.blobs[call.op.inputs[0]].dtype in types else None


def _dense(*positions: int, types: tuple[str, ...] = _REAL) -> Callable[[SizedOperator], int | None]:
    """A kernel that reads these operands in row-major order, of these types."""

    def rule(call: SizedOperator) -> int | None:
        if call.blobs[call.op.inputs[positions[0]]].dtype not in types:
            return None
        return sum(x.nbytes for x in call.strided(*positions) if not x.contiguous)

    return rule


def _row_major(call: SizedOperator) -> int | None:
    """A kernel that copies nothing where all is in row-major order and of one type."""
    return _equal_types(call) if all(x.contiguous for x in map(call.operand, range(len(call.op.inputs)))) else None


def _over_dense(call: SizedOperator) -> int | None:
    """A kernel that copies its first operand, gaps included, and writes into the copy."""
    x = call.operand(0)
    return _equal_types(call) if x.contiguous or x.channels_last else None


def _rolled(call: SizedOperator) -> int | None:
    """A kernel that rolls along one dimension. Along several it rolls along one after the other, which the rule does
    not cover."""
    return _dense(0)(call) if len(call.args.get("dims", ())) <= 1 else None


def _one_layout(call: SizedOperator) -> int | None:
    """A kernel of images that allocates nothing where all are in row-major order, or all with channels last."""
    if call.blobs[call.op.inputs[0]].dtype not in _REAL:
        return None
    images = [*map(call.operand, range(len(call.op.inputs))), call.result()]
    plain = all(x.contiguous for x in images)
    return 0 if plain or all(x.channels_last for x in images) else None


def _equal_types(call: SizedOperator) -> int | None:
    """A kernel that joins operands of one type."""
    return 0 if len({call.blobs[name].dtype for name in (*call.op.inputs, call.op.outputs[0])}) == 1 else None


def _indexed(call: SizedOperator) -> int | None:
    """A kernel that takes whole numbers as indices. Of a mask it first makes such indices, as many as the mask
    selects."""
    indices = {call.blobs[name].dtype for name in call.op.inputs[1:]} - {call.blobs[call.op.inputs[0]].dtype}
    return 0 if indices <= {"i64"} else None


def _batched_products(call: SizedOperator) -> int | None:
    """Matrix products that BLAS reads as they are."""
    x, y = call.operand(0), call.operand(1)
    return 0 if x.dtype in _REAL and _rows(x) and _rows(y) else None


def _rows(matrices: SizedOperand) -> bool:
    """Whether the matrices lie one behind the other, each without gaps by rows or by columns."""
    if matrices.contiguous:
        return True
    _, rows, columns = matrices.shape
    return matrices.strides in ((rows * columns, 1, rows), (rows * columns, columns, 1))


def _types(names: str, *variants: str) -> list[str]:
    """The types with these names, each in these variants."""
    return [f"aten.{name}.{variant}" for name in names.split() for variant in variants]


def _in_place_too(names: str) -> str:
    return " ".join([*names.split(), *[f"{name}_" for name in names.split()]])


_UNARY: Final = """
    abs acos acosh asin asinh atan atanh bitwise_not ceil celu clamp clamp_max clamp_min cos cosh deg2rad elu erf erfc
    erfinv exp exp2 expm1 floor frac hardsigmoid hardswish hardtanh leaky_relu log log10 log1p log2 logical_not mish neg
    rad2deg reciprocal relu round rsqrt sgn sigmoid sign silu sin sinc sinh sqrt tan tanh threshold trunc
"""
_BINARY: Final = "add copysign div fmod mul remainder sub"
_BACKWARDS: Final = """
    elu_backward hardshrink_backward hardsigmoid_backward hardswish_backward hardtanh_backward
    huber_loss_backward leaky_relu_backward mish_backward mse_loss_backward sigmoid_backward silu_backward
    smooth_l1_loss_backward softplus_backward softshrink_backward tanh_backward threshold_backward
"""

_ELEMENTWISE: Final = [
    *_types(_in_place_too(_UNARY), "default"),
    *_types(_in_place_too(_BINARY), "Tensor", "Scalar"),
    *_types(_in_place_too("addcdiv addcmul"), "default"),
    *_types(_in_place_too("lerp"), "Scalar", "Tensor"),
    *_types("bitwise_and bitwise_or bitwise_xor eq ge gt le lt ne rsub", "Tensor", "Scalar"),
    *_types("pow", "Scalar", "Tensor_Scalar", "Tensor_Tensor"),
    *_types("atan2 gelu hardshrink hypot logaddexp maximum minimum softplus", "default"),
    *_types("pow_", "Scalar", "Tensor"),
    *_types("xlogy", "Tensor"),
]
_MAKING: Final = [
    *_types("arange", "default", "start", "start_step"),
    *_types("empty", "memory_format"),
    *_types("empty_like empty_strided eye full full_like new_empty new_empty_strided new_full new_ones", "default"),
    *_types("new_zeros ones ones_like rand rand_like randn randn_like scalar_tensor zeros zeros_like", "default"),
    *_types("bernoulli", "p"),
]
_MOVING: Final = [
    "Copy",
    *_types("_to_copy clone constant_pad_nd flip repeat select_backward slice_backward zero_", "default"),
    *_types("fill fill_", "Scalar"),
]
_IMAGES: Final = """
    _adaptive_avg_pool2d _adaptive_avg_pool2d_backward avg_pool2d avg_pool2d_backward max_pool2d_with_indices
    max_pool2d_with_indices_backward nll_loss_backward nll_loss_forward pixel_shuffle pixel_unshuffle
"""

_RULES: Final[Mapping[Callable[[SizedOperator], int | None], list[str]]] = {
    nothing: [*_MAKING, *_MOVING, *_types("amax amin", "default")],
    _of_types("f32", "f64", "i64"): [*_types("gather scatter_add", "default"), *_types("scatter", "src", "value")],
    _row_major: _types("gelu_backward", "default"),
    _over_dense: _types("as_strided_scatter select_scatter slice_scatter", "default"),
    _rolled: _types("roll", "default"),
    _dense(0, types=("f32", "f64", "i64", "bool")): _types("tril triu", "default"),
    _dense(0, types=("f32", "f64", "bf16", "i64")): _types("index_select", "default"),
    _converted: _ELEMENTWISE,
    _conditional: [*_types("where", "self"), *_types(_in_place_too("masked_fill"), "Scalar", "Tensor")],
    _equal_types: _types(f"{_BACKWARDS} cat logical_and logical_or logical_xor stack", "default"),
    _indexed: _types("_unsafe_index index", "Tensor"),
    _as_result(*_REAL, "i64"): [*_types("sum", "default", "dim_IntList"), *_types("cumprod cumsum", "default")],
    _as_result(*_REAL): _types("mean", "default", "dim"),
    _of_types(*_REAL): [*_types("argmax argmin", "default"), *_types("max min", "dim")],
    _dense(0): _types("log_sigmoid_forward", "default"),
    _dense(0, 1): _types("embedding_dense_backward", "default"),
    _dense(1, types=("i64", "i32")): _types("embedding", "default"),
    _one_layout: _types(_IMAGES, "default"),
    _batched_products: _types("bmm", "default"),
}

PLAIN: Final[Mapping[str, Callable[[SizedOperator], int | None]]] = {
    type: rule for rule, types in _RULES.items() for type in types
}
"""By operator type, the bytes that a call allocates inside; None where its rule does not cover the operands."""
