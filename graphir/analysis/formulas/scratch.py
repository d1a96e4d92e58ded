"""How many bytes operators allocate inside: memory that is neither operand nor result, and gone when they return.

The formulas are those of PyTorch's kernels on the host, read off the allocation events of its profiler. Those of
convolutions depend on the backend (:mod:`.convolutions`); all others follow from ATen's sources alone.

Not in the table: scalars, and some kilobytes that oneDNN takes for barriers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import ceil, prod
from typing import Final, TypeAlias

from ...ir.blob import contiguous_strides, same_strides
from ...ir.dtype import ITEMSIZE
from ...ir.operator import groups
from ...ir.optypes.sized import SizedOperand, SizedOperator, copied
from ...ir.size import bind
from .blocks import BLOCKS
from .convolutions import convolution, convolution_backward
from .ctc import CTC_SCRATCH
from .plain_kernels import PLAIN, nothing

__all__ = ["SCRATCH"]


_REAL: Final = ("f32", "f64")


def _batch_norm(call: SizedOperator) -> int | None:
    """Two sums, or two factors, for each channel; with channels last also a sum for each thread."""
    return _normalising(call, bool(call.args.get("training")))


def _cumulative_batch_norm(call: SizedOperator) -> int | None:
    """What torch's batch norm takes in training."""
    return _normalising(call, training=True)


def _normalising(call: SizedOperator, training: bool) -> int | None:
    x = call.operand(0)
    if x.dtype not in _REAL:
        return None
    each = x.shape[1] * ITEMSIZE[x.dtype]
    if not _channels_first(x) and not _channels_last(x):
        return 0 if training else 3 * each
    by_thread = training and _channels_last(x)
    return (2 + bool(by_thread) * call.threads) * each


def _batch_norm_backward(call: SizedOperator) -> int | None:
    """Another tensor like the gradient of the input, where both are laid out alike; else a number for each channel."""
    grad, x = call.operand(0), call.operand(1)
    if x.dtype not in _REAL or not call.args.get("train"):
        return None
    each = x.shape[1] * ITEMSIZE[x.dtype]
    if not call.args.get("output_mask", (True,))[0]:
        return each
    if _channels_last(grad) and _channels_last(x):
        return max(grad.nbytes, 2 * call.threads * each)
    return grad.nbytes if _channels_first(grad) and _channels_first(x) else each


def _channels_last(x: SizedOperand) -> bool:
    """As batch norms see it: each channel's elements lie apart, also where a channel has one element of each sample."""
    return x.channels_last or (x.contiguous and prod(x.shape[2:]) == 1)


def _channels_first(x: SizedOperand) -> bool:
    return x.contiguous and not _channels_last(x)


def _group_norm(call: SizedOperator) -> int | None:
    """With channels last, two sums for each sample and channel."""
    x = call.operand(0)
    if x.channels_last:
        return 2 * prod(x.shape[:2]) * ITEMSIZE[x.dtype]
    return copied(call, 0)


def _group_norm_backward(call: SizedOperator) -> int:
    """For each sample and channel, the sum of the gradient, and of its product with the input."""
    x = call.operand(1)
    return 2 * prod(x.shape[:2]) * ITEMSIZE[x.dtype] + copied(call, 0, 1)


def _layer_norm_backward(call: SizedOperator) -> int:
    """A sum for each weight and bias and thread."""
    return copied(call, 0, 1) + 2 * call.threads * call.result(-1).nbytes


def _split(query: SizedOperand, key: SizedOperand) -> tuple[int, int]:
    """How many queries and keys a thread deals with at once: ``cpu_flash_attention`` in FlashAttentionKernel.cpp."""
    queries, keys = query.shape[2], key.shape[2]
    rows = 256 if queries >= 768 else 64 if queries >= 192 else 32
    return min(rows, queries), min(512, keys)


def _attention(call: SizedOperator) -> int | None:
    """For each thread scores, their largest and their sum, and a part of the result."""
    query, key = call.operand(0), call.operand(1)
    rows, columns = _split(query, key)
    return _each(call, call.threads * rows * (columns + 2 + query.shape[3]))


def _attention_backward(call: SizedOperator) -> int | None:
    """For each thread scores and their gradient; for each query a sum. The output's gradient is copied if it does not
    lie in the order batch, sequence, heads, size."""
    grad, query, key = call.operand(0), call.operand(1), call.operand(2)
    rows, columns = _split(query, key)
    batch, heads, queries, size = grad.shape
    wanted = queries * heads * size, size, heads * size, 1
    copies = not same_strides(grad.shape, grad.strides or contiguous_strides(grad.shape), wanted)
    return _each(call, 2 * call.threads * rows * columns + rows + copies * batch * heads * queries * size)


def _each(call: SizedOperator, elements: int) -> int | None:
    """The bytes of so many elements, where all operands are of one type and the kernel computes in that type."""
    types = {call.blobs[name].dtype for name in call.op.inputs}
    return elements * ITEMSIZE[types.pop() or "f32"] if len(types) == 1 and types <= set(_REAL) else None


def _upsample(sources: int) -> Callable[[SizedOperator], int | None]:
    """Small images are copied to channels last, for the kernel of that layout, and the result is copied back. For other
    images the kernel makes tables: for each row and column of the result, an index and a weight for each of its
    *sources*."""

    def formula(call: SizedOperator) -> int | None:
        x, y = call.operand(0), call.result()
        if x.dtype != "f32" or not (x.contiguous or x.channels_last):
            return None
        if x.channels_last:
            return 0
        if prod(x.shape[2:]) == 1:  # it is in both layouts, and taken to have channels last
            return y.nbytes
        if sum(y.shape[-2:]) > 128:
            return sum(y.shape[-2:]) * sources * (8 + ITEMSIZE[x.dtype])
        return x.nbytes + y.nbytes

    return formula


def _upsample_backward(call: SizedOperator) -> int | None:
    grad = call.operand(0)
    plain = (grad.contiguous or grad.channels_last) and prod(grad.shape[2:]) > 1
    return 0 if grad.dtype in _REAL and plain else None


def _safe_softmax(call: SizedOperator) -> int | None:
    """Which elements are not infinite, which rows have such elements, and the number that the other rows get."""
    x = call.operand(0)
    rows = prod(x.shape) // max(x.shape[-1], 1)
    last = call.args.get("dim") in (-1, len(x.shape) - 1)
    return prod(x.shape) + rows + ITEMSIZE[x.dtype] if x.dtype in _REAL and x.contiguous and last else None


def _dense(*positions: int) -> Callable[[SizedOperator], int]:
    """A kernel that reads these operands dense."""
    return lambda call: copied(call, *positions)


def _row_major(*positions: int) -> Callable[[SizedOperator], int]:
    """A kernel that reads these operands in row-major order."""
    return lambda call: sum(operand.nbytes for operand in call.strided(*positions) if not operand.contiguous)


def _products(*positions: int) -> Callable[[SizedOperator], int | None]:
    """Matrix products copy operands that BLAS cannot read: rows and columns both with gaps, or repeated."""

    def formula(call: SizedOperator) -> int | None:
        if call.blobs[call.op.inputs[positions[0]]].dtype not in _REAL:
            return None  # in bf16 and f16 it is oneDNN that multiplies, on some processors
        return sum(matrix.nbytes for matrix in call.strided(*positions) if not _blas_reads(matrix))

    return formula


def _blas_reads(matrix: SizedOperand) -> bool:
    (rows, columns), (down, across) = matrix.shape[-2:], (matrix.strides or contiguous_strides(matrix.shape))[-2:]
    by_row = across == 1 and down >= max(columns, 1)
    return by_row or (down == 1 and across >= max(rows, 1)) or min(rows, columns) == 1


def _result(call: SizedOperator) -> int:
    return call.result().nbytes


def _logsumexp(call: SizedOperator) -> int:
    """The exponentials, and the largest of each row."""
    return call.operand(0).nbytes + call.result().nbytes


def _loss(tensors: int) -> Callable[[SizedOperator], int]:
    """A loss that is reduced after it was computed for each element: *tensors* tensors of its elements at once."""
    return lambda call: tensors * call.operand(0).nbytes if _reduced(call) else 0


def _reduced(call: SizedOperator) -> bool:
    return bool(call.args.get("reduction", 1))


def _cross_entropy_with_logits(call: SizedOperator) -> int:
    """Logarithms, and each element's loss; where positives have a weight, also the weight minus one."""
    operands = groups(call.op.operands, len(call.op.inputs))
    of_positives = operands[3] if len(operands) > 3 else None
    less_one = call.operand(of_positives).nbytes if isinstance(of_positives, int) else 0
    return (1 + _reduced(call)) * call.operand(0).nbytes + less_one


def _antialiased(reach: int) -> Callable[[SizedOperator], int | None]:
    """An image is resized along its rows first, then along its columns; weights reach so far to both sides.

    Source: ``separable_upsample_generic_Nd_kernel_impl`` in UpSampleKernel.cpp: for each row or column that is made,
    four indices and as many weights as there are in reach.
    """

    def formula(call: SizedOperator) -> int | None:
        x, y = call.operand(0), call.result()
        if x.dtype not in _REAL or not (x.contiguous or x.channels_last):
            return None
        each = ITEMSIZE[x.dtype]

        def table(made: int, of: int) -> int:
            return made * (4 * 8 + each * (2 * ceil(reach * max(of / max(made, 1), 1)) + 1))

        tables = [table(made, of) for made, of in zip(y.shape[-2:], x.shape[-2:], strict=True)]
        return x.nbytes // max(x.shape[-1], 1) * y.shape[-1] + max(tables)

    return formula


def _of_rows(call: SizedOperator) -> int | None:
    """A kernel that allocates nothing for an operand in row-major order."""
    x = call.operand(0)
    return 0 if x.dtype in _REAL and x.contiguous else None


def _affine_grid(call: SizedOperator) -> int:
    """The grid of positions before they are transformed, one more number each than there are dimensions."""
    size = call.args["size"]
    batch, _, *extents = size if isinstance(size, tuple) else ()
    return int(batch) * prod(map(int, extents)) * (len(extents) + 1) * ITEMSIZE[call.operand(0).dtype]


def _all_reduce(call: SizedOperator) -> int:
    """A share of the batch that differs from the others scales its gradient before it is added."""
    shares = {bind(share, call.dims) for share in call.args.get("shares", ())}
    return 0 if len(shares) <= 1 else call.result().nbytes


def _batch_norm_moments(call: SizedOperator) -> int | None:
    """Mean and variance of each channel; where dense two sums too, with channels last one for each thread."""
    x = call.operand(0)
    if x.dtype not in _REAL:
        return None
    numbers = 4 + call.threads if _channels_last(x) else 4 if _channels_first(x) else 2
    return numbers * x.shape[1] * ITEMSIZE[x.dtype]


def _synchronised_batch_norm(call: SizedOperator) -> int | None:
    """Of each channel the merged moments in double precision, and the factors by which torch's kernel normalises."""
    x = call.operand(0)
    if x.dtype not in _REAL:
        return None
    strided = not (_channels_first(x) or _channels_last(x))
    return x.shape[1] * (8 * (4 if x.dtype == "f64" else 5) + strided * ITEMSIZE[x.dtype])


def _synchronised_batch_norm_backward(call: SizedOperator) -> int | None:
    """Of each channel three numbers in double precision, in single precision too where the operand is so, and its
    weight."""
    x = call.operand(1)
    if x.dtype not in _REAL:
        return None
    weighted = isinstance(groups(call.op.operands, len(call.op.inputs))[3], int)
    return 8 * x.shape[1] * ((3 if x.dtype == "f64" else 5) + weighted)


def _update(
    fixed: int, decay: int, coupled: bool = True, listed: Callable[[int], int] = int
) -> Callable[[SizedOperator], int]:
    """An optimizer's ``for_loop``: *fixed* tensors of the parameter's size beside the gradient that it adjusts.

    The gradient is negated, and has weight decay added where that is *coupled* to it; each makes a new tensor, while
    the one before is still there. The tensor parameter at *decay* has the weight decay, where that may move. The form
    ``foreach`` adjusts the gradient in one tensor, or in none, and is given their number: it holds *listed*.
    """

    def formula(call: SizedOperator) -> int:
        args = call.args
        if args.get("form", "for_loop") == "fused":
            return 0
        decays = args.get("weight_decay") or call.has(decay)
        made = bool(args.get("maximize")) + bool(coupled and decays)
        nesterov = bool(args.get("nesterov"))
        if args.get("form") == "foreach":
            return (listed(min(made, 1)) + nesterov) * call.operand(0).nbytes
        return max(min(made + nesterov, 2), fixed + min(made, 1)) * call.operand(0).nbytes

    return formula


def _decoupled_at_times(
    coupled: Callable[[SizedOperator], int], decoupled: Callable[[SizedOperator], int]
) -> Callable[[SizedOperator], int]:
    """The formula of an optimizer whose weight decay is coupled to the gradient or not, as its options say."""
    return lambda call: (decoupled if call.args.get("decoupled_weight_decay") else coupled)(call)


def _adafactor(call: SizedOperator) -> int:
    """Adafactor: the variance, the gradient if that is negated, and of a matrix the means of its rows and columns."""
    param = call.operand(0)
    *_, rows, columns = (1, 1, *param.shape)
    means = param.nbytes // (rows * columns) * (rows + columns) if rows * columns and len(param.shape) > 1 else 0
    return (1 + bool(call.args.get("maximize"))) * param.nbytes + means


def _muon(call: SizedOperator) -> int:
    """Muon: what is between the gradient and its momentum, and in bfloat16 two matrices like the parameter and two of
    its smaller side; and a copy, which a product of these may make. Kernels in several threads take more."""
    param = call.operand(0)
    rows, columns = param.shape
    least = min(rows, columns)
    between = (bool(call.args.get("nesterov", True)) + 1) * param.nbytes
    return between + 2 * 2 * (rows * columns + least * least)


Formula: TypeAlias = "Callable[[SizedOperator], int | None]"

SCRATCH: Final[Mapping[str, Formula]] = {
    **PLAIN,
    "aten.convolution.default": convolution,
    "aten.convolution_backward.default": convolution_backward,
    "aten.native_batch_norm.default": _batch_norm,
    "aten.native_batch_norm_backward.default": _batch_norm_backward,
    "aten.native_layer_norm.default": _dense(0),
    "aten.native_layer_norm_backward.default": _layer_norm_backward,
    "aten.native_group_norm.default": _group_norm,
    "aten.native_group_norm_backward.default": _group_norm_backward,
    "aten.upsample_nearest2d.default": _upsample(1),
    "aten.upsample_bilinear2d.default": _upsample(2),
    "aten.upsample_nearest2d_backward.default": _upsample_backward,
    "aten.upsample_bilinear2d_backward.default": _upsample_backward,
    "aten._safe_softmax.default": _safe_softmax,
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
    "aten._upsample_bilinear2d_aa.default": _antialiased(1),
    "aten._upsample_bicubic2d_aa.default": _antialiased(2),
    "aten._upsample_bilinear2d_aa_backward.default": _of_rows,
    "aten._upsample_bicubic2d_aa_backward.default": _of_rows,
    "aten.affine_grid_generator.default": _affine_grid,
    "AllReduce": _all_reduce,
    "graphir.scale": nothing,
    "graphir.sgd": _update(0, 6),
    "graphir.dampened_sgd": _update(0, 7),
    "graphir.adam": _update(2, 10, listed=lambda gradients: 1),
    "graphir.adamw": _update(2, 10, coupled=False, listed=lambda gradients: 1),
    "graphir.adagrad": _update(1, 6, listed=lambda gradients: 2),
    "graphir.rmsprop": _update(1, 9, listed=lambda gradients: gradients + 1),
    "graphir.adadelta": _update(2, 7),
    "graphir.adamax": _update(1, 9),
    "graphir.nadam": _decoupled_at_times(_update(2, 10), _update(2, 10, coupled=False)),
    "graphir.radam": _decoupled_at_times(_update(2, 9), _update(2, 9, coupled=False)),
    "graphir.asgd": _update(0, 8),
    "graphir.rprop": lambda call: 3 * call.operand(0).nbytes,
    "graphir.adafactor": _adafactor,
    "graphir.muon": _muon,
    "graphir.attention": _attention,
    "graphir.attention_backward": _attention_backward,
    "graphir.cumulative_batch_norm": _cumulative_batch_norm,
    "graphir.batch_norm_moments": _batch_norm_moments,
    "graphir.synchronised_batch_norm": _synchronised_batch_norm,
    "graphir.synchronised_batch_norm_backward": _synchronised_batch_norm_backward,
    **BLOCKS,
    **CTC_SCRATCH,
}
"""The formulas, by type of torch and of graphir."""
