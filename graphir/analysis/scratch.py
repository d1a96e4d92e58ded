"""How many bytes operators allocate inside: memory that is neither operand nor result, and gone when they return.

The formulas are those of PyTorch's kernels on the host, read off the allocation events of its profiler. Those of
convolutions depend on the backend (:mod:`.convolutions`); all others follow from ATen's sources alone.

Not in the table: scalars, and some kilobytes that oneDNN takes for barriers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Final

from ..ir.blob import Blob, contiguous_strides
from ..ir.dtype import ITEMSIZE
from ..ir.operator import Operator, groups
from ..ir.size import Dims, bind
from .convolutions import convolution, convolution_backward
from .operands import Call, Operand, UnknownShape, copied

__all__ = ["SCRATCH", "scratch"]


def scratch(op: Operator, blobs: Mapping[str, Blob], dims: Dims, threads: int) -> int:
    """The bytes that *op* holds at most at once, beside its operands and results, where kernels use so many threads.

    0 where its type is not in :data:`SCRATCH`, or the shape of an operand is not known.
    """
    formula = SCRATCH.get(op.type)
    if formula is None:
        return 0
    try:
        return max(formula(Call(op, blobs, dims, threads)), 0)
    except UnknownShape:
        return 0


def _batch_norm(call: Call) -> int:
    """A sum and a sum of squares, or two factors, for each channel."""
    x = call.operand(0)
    return 2 * x.shape[1] * ITEMSIZE[x.dtype]


def _batch_norm_backward(call: Call) -> int:
    """Another tensor like the gradient of the input, or the output's gradient in the input's layout."""
    if not call.args.get("output_mask", (True,))[0]:
        return 0
    grad, x = call.operand(0), call.operand(1)
    return grad.nbytes if grad.contiguous == x.contiguous else copied(call, 0) or grad.nbytes


def _group_norm_backward(call: Call) -> int:
    """For each sample and channel, the sum of the gradient, and of its product with the input."""
    x = call.operand(1)
    return 2 * prod(x.shape[:2]) * ITEMSIZE[x.dtype] + copied(call, 0, 1)


def _layer_norm_backward(call: Call) -> int:
    """A sum for each weight and bias and thread."""
    return copied(call, 0, 1) + 2 * call.threads * call.result(-1).nbytes


def _split(query: Operand, key: Operand) -> tuple[int, int]:
    """How many queries and keys a thread deals with at once: ``cpu_flash_attention`` in FlashAttentionKernel.cpp."""
    queries, keys = query.shape[2], key.shape[2]
    rows = 256 if queries >= 768 else 64 if queries >= 192 else 32
    return min(rows, queries), min(512, keys)


def _attention(call: Call) -> int:
    """For each thread scores, their largest and their sum, and a part of the result."""
    query, key = call.operand(0), call.operand(1)
    rows, columns = _split(query, key)
    return 4 * call.threads * rows * (columns + 2 + query.shape[3])


def _attention_backward(call: Call) -> int:
    """For each thread scores and their gradient; for each query a sum."""
    query, key = call.operand(1), call.operand(2)
    rows, columns = _split(query, key)
    return 4 * (2 * call.threads * rows * columns + rows)


def _upsample(call: Call) -> int:
    """Small images are turned to channels last, so that the kernel for these runs, and the result turned back."""
    x, y = call.operand(0), call.result()
    if x.channels_last:
        return 0
    return x.nbytes + y.nbytes if sum(y.shape[-2:]) <= 128 else copied(call, 0)


def _dense(*positions: int) -> Callable[[Call], int]:
    """A kernel that reads these operands dense."""
    return lambda call: copied(call, *positions)


def _row_major(*positions: int) -> Callable[[Call], int]:
    """A kernel that reads these operands in row-major order."""
    return lambda call: sum(operand.nbytes for operand in call.strided(*positions) if not operand.contiguous)


def _products(*positions: int) -> Callable[[Call], int]:
    """Matrix products copy operands that BLAS cannot read: rows and columns both with gaps, or repeated."""

    def formula(call: Call) -> int:
        return sum(matrix.nbytes for matrix in call.strided(*positions) if not _blas_reads(matrix))

    return formula


def _blas_reads(matrix: Operand) -> bool:
    (rows, columns), (down, across) = matrix.shape[-2:], (matrix.strides or contiguous_strides(matrix.shape))[-2:]
    by_row = across == 1 and down >= max(columns, 1)
    return by_row or (down == 1 and across >= max(rows, 1)) or min(rows, columns) == 1


def _result(call: Call) -> int:
    return call.result().nbytes


def _logsumexp(call: Call) -> int:
    """The exponentials, and the largest of each row."""
    return call.operand(0).nbytes + call.result().nbytes


def _loss(tensors: int) -> Callable[[Call], int]:
    """A loss that is reduced after it was computed for each element, of *tensors* such tensors at once."""
    return lambda call: tensors * call.operand(0).nbytes if _reduced(call) else 0


def _reduced(call: Call) -> bool:
    return bool(call.args.get("reduction", 1))


def _cross_entropy_with_logits(call: Call) -> int:
    """Logarithms, and each element's loss; where positives have a weight, that less one as well."""
    operands = groups(call.op.operands, len(call.op.inputs))
    of_positives = operands[3] if len(operands) > 3 else None
    less_one = call.operand(of_positives).nbytes if isinstance(of_positives, int) else 0
    return (1 + _reduced(call)) * call.operand(0).nbytes + less_one


def _promoted(call: Call) -> int:
    """Operands of other types are converted as a whole; what is one number is not."""
    dtype = call.blobs[call.op.outputs[0]].dtype
    if all(call.blobs[name].dtype == dtype for name in call.op.inputs):
        return 0
    operands = [call.operand(i) for i in range(len(call.op.inputs))]
    return sum(prod(x.shape) * ITEMSIZE[call.result().dtype] for x in operands if x.dtype != dtype and x.shape)


def _all_reduce(call: Call) -> int:
    """A share of the batch that differs from the others scales its gradient before it is added."""
    shares = {bind(share, call.dims) for share in call.args.get("shares", ())}
    return 0 if len(shares) <= 1 else call.result().nbytes


def _update(fixed: int, coupled: bool = True) -> Callable[[Call], int]:
    """An optimizer's ``for_loop``: *fixed* tensors of the parameter's size beside the gradient that it adjusts.

    The gradient is negated, and has weight decay added where that is *coupled* to it; each makes a new tensor, while
    the one before is still there.
    """

    def formula(call: Call) -> int:
        args = call.args
        if args.get("form", "for_loop") == "fused":
            return 0
        made = bool(args.get("maximize")) + bool(coupled and args.get("weight_decay"))
        nesterov = bool(args.get("nesterov"))
        return max(min(made + nesterov, 2), fixed + min(made, 1)) * call.operand(0).nbytes

    return formula


SCRATCH: Final[Mapping[str, Callable[[Call], int]]] = {
    "aten.convolution.default": convolution,
    "aten.convolution_backward.default": convolution_backward,
    "aten.native_batch_norm.default": _batch_norm,
    "aten.native_batch_norm_backward.default": _batch_norm_backward,
    "aten.native_layer_norm.default": _dense(0),
    "aten.native_layer_norm_backward.default": _layer_norm_backward,
    "aten.native_group_norm.default": _dense(0),
    "aten.native_group_norm_backward.default": _group_norm_backward,
    "aten.upsample_nearest2d.default": _upsample,
    "aten.upsample_bilinear2d.default": _upsample,
    "aten.upsample_nearest2d_backward.default": _dense(0),
    "aten.upsample_bilinear2d_backward.default": _dense(0),
    "aten.native_dropout.default": _result,
    "aten.logsumexp.default": _logsumexp,
    "aten._softmax.default": _row_major(0),
    "aten._softmax_backward_data.default": _row_major(0, 1),
    "aten._log_softmax.default": _row_major(0),
    "aten._log_softmax_backward_data.default": _row_major(0, 1),
    "aten.binary_cross_entropy.default": _loss(1),
    "aten.huber_loss.default": _loss(1),
    "aten.mse_loss.default": _loss(2),
    "aten.smooth_l1_loss.default": _loss(2),
    "aten.soft_margin_loss.default": _loss(1),
    "aten.binary_cross_entropy_with_logits.default": _cross_entropy_with_logits,
    "aten.mm.default": _products(0, 1),
    "aten.addmm.default": _products(1, 2),
    "aten.add.Tensor": _promoted,
    "aten.sub.Tensor": _promoted,
    "aten.mul.Tensor": _promoted,
    "aten.div.Tensor": _promoted,
    "graphir.attention": _attention,
    "graphir.attention_backward": _attention_backward,
    "AllReduce": _all_reduce,
    "graphir.sgd": _update(0),
    "graphir.dampened_sgd": _update(0),
    "graphir.adam": _update(2),
    "graphir.adamw": _update(2, coupled=False),
    "graphir.adagrad": _update(1),
    "graphir.rmsprop": _update(1),
}
"""By operator type, the bytes that a call allocates inside at most at once, before it returns."""
