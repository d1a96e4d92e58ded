"""How many bytes operators allocate inside: memory that is neither operand nor result, and gone when they return.

The formulas are those of PyTorch's kernels on the host, read off the allocation events of its profiler. The scratch of
convolutions and of their gradients depends on the backend: it is that of oneDNN on x86 with AVX-512, whose blocked
layouts have 16 channels a block. AVX2's have 8, which matters only where channels are no multiple of 16; other
processors convolve without blocks. That of all other types follows from ATen's sources alone.

Not in the table: scalars, and some kilobytes that oneDNN takes for barriers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any, Final, NamedTuple

from ..ir.blob import Blob, contiguous_strides, dense_strides, same_strides
from ..ir.dtype import ITEMSIZE
from ..ir.operator import Operator, groups
from ..ir.size import Dims, bind, bind_shape

__all__ = ["SCRATCH", "Call", "Operand", "scratch"]


class Operand(NamedTuple):
    """An operand or result, its sizes bound; ``strides`` are None for contiguous ones, as a blob's are."""

    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return prod(self.shape) * ITEMSIZE[self.dtype]

    @property
    def contiguous(self) -> bool:
        """Whether its elements lie in row-major order without gaps."""
        return self.strides is None or same_strides(self.shape, self.strides, contiguous_strides(self.shape))

    @property
    def channels_last(self) -> bool:
        """Whether its elements lie so that those of dimension 1 are neighbours."""
        if self.strides is None or len(self.shape) < 4 or self.shape[1] == 1 or self.contiguous:
            return False
        wanted = dense_strides(self.shape, (1, *range(len(self.shape) - 1, 1, -1), 0))
        return same_strides(self.shape, self.strides, wanted)


class Call(NamedTuple):
    """An operator at these sizes, where kernels use so many threads. Sizes are bound as they are asked for."""

    op: Operator
    blobs: Mapping[str, Blob]
    dims: Dims
    threads: int

    @property
    def args(self) -> Mapping[str, Any]:
        """The operator's own."""
        return self.op.args

    def operand(self, position: int) -> Operand:
        """The operand at *position*."""
        return _bound(self.blobs[self.op.inputs[position]], self.dims)

    def strided(self, *positions: int) -> list[Operand]:
        """Those of these operands that may not be contiguous."""
        return [self.operand(i) for i in positions if self.blobs[self.op.inputs[i]].strides is not None]

    def result(self, position: int = 0) -> Operand:
        """The result at *position*."""
        return _bound(self.blobs[self.op.outputs[position]], self.dims)


class _Unknown(Exception):
    """The shape of an operand is not known."""


def scratch(op: Operator, blobs: Mapping[str, Blob], dims: Dims, threads: int) -> int:
    """The bytes that *op* holds at most at once, beside its operands and results, where kernels use so many threads.

    0 where its type is not in :data:`SCRATCH`, or the shape of an operand is not known.
    """
    formula = SCRATCH.get(op.type)
    if formula is None:
        return 0
    try:
        return max(formula(Call(op, blobs, dims, threads)), 0)
    except _Unknown:
        return 0


def _bound(blob: Blob, dims: Dims) -> Operand:
    if blob.shape is None or blob.dtype is None:
        raise _Unknown
    strides = None if blob.strides is None else bind_shape(blob.strides, dims)
    return Operand(bind_shape(blob.shape, dims), strides, blob.dtype)


_BLOCK: Final = 16
"""Channels of a block of oneDNN's layouts for AVX-512."""

_FEW: Final = 3
"""Channels of an image, which the gradient of a first convolution's weight reads as they are."""

_SMALL: Final = 20480
"""Elements of a single sample up to which ATen convolves without oneDNN."""


_WIDEST: Final = 13
"""The widest kernel of a first convolution whose gradient oneDNN has a kernel of its own for."""


def _share(of: int, among: int) -> int:
    return -(-of // among)


def _blocks(channels: int, block: int = _BLOCK) -> int:
    return _share(channels, block) * block


class _Convolution(NamedTuple):
    """A convolution of *x* with *w* that gives *y*, as oneDNN sees it: of a transposed one, *x* is what it gives.

    ::

        forward           reorder x, w ──▶ compute y ──▶ lay y out as a plain tensor
        gradient of x     reorder dy, w ─▶ compute dx ─▶ lay dx out
        gradient of w     reorder dy, x ─▶ compute dw ─▶ lay dw out
    """

    x: Operand
    w: Operand
    y: Operand
    args: Mapping[str, Any]
    threads: int

    @property
    def groups(self) -> int:
        return int(self.args.get("groups", 1))

    @property
    def strided(self) -> bool:
        return any(step != 1 for step in self.args.get("stride", (1,)))

    @property
    def kernel(self) -> tuple[int, ...]:
        return self.w.shape[2:]

    @property
    def first(self) -> bool:
        """Whether its kernel reads few channels as they are, as that of a net's first convolution does."""
        return self.groups == 1 and self.x.shape[1] < _BLOCK and prod(self.kernel) > 1

    @property
    def depthwise(self) -> bool:
        return self.groups > 1 and self.w.shape[1] == 1

    @property
    def by_onednn(self) -> bool:
        """ATen's choice, ``ConvParams::use_mkldnn``."""
        if self.x.dtype not in ("f32", "bf16", "f16"):
            return False
        dilated = any(step != 1 for step in self.args.get("dilation", (1,)))
        worth = self.strided or dilated or prod(self.kernel) > 1 or self.x.shape[0] >= 16 or self.threads > 1
        many = self.x.shape[0] > 1 or prod(self.x.shape) > _SMALL
        return worth and (many or self.groups > 1 or min((0, 0, *self.kernel)[-2:]) > 3)

    @property
    def channels_last(self) -> bool:
        return self.x.channels_last or self.w.channels_last

    def blocked(self, operand: Operand, block: int = _BLOCK) -> int:
        """Bytes of activations in blocks of channels."""
        channels = operand.shape[1]
        return operand.nbytes // max(channels, 1) * _blocks(channels, block)

    def weights(self, inputs: int) -> int:
        """Bytes of the weights in blocks, for so many input channels a group."""
        out, *_ = self.w.shape
        if self.depthwise:
            return self.w.nbytes // out * _blocks(out)
        each = out // self.groups if (out // self.groups) % _BLOCK == 0 or self.groups == 1 else 0
        rows = self.groups * _blocks(each) if each else out
        return rows * inputs * prod(self.kernel) * ITEMSIZE[self.w.dtype]

    @property
    def packed(self) -> int:
        """Bytes of the weights in blocks of channels both ways."""
        inputs = self.w.shape[1]
        return self.weights(_blocks(inputs) if self.groups == 1 else inputs)

    def columns(self, samples: int) -> int:
        """Bytes of the windows of so many samples, laid out as the columns of a matrix."""
        return self.w.shape[1] * prod(self.kernel) * prod(self.y.shape[2:]) * samples * ITEMSIZE[self.x.dtype]

    def without_onednn(self) -> int:
        """What ATen's own kernels take: the columns of all samples; none for 1x1 kernels, which read the input."""
        plain = prod(self.kernel) == 1 and not self.strided and not any(self.args.get("padding", ()))
        return 0 if plain else self.columns(self.y.shape[0])

    def partial_sums(self) -> int:
        """How many times a gradient of *w* is kept beside the one that they are added to.

        Threads share out samples, or channels, whichever costs less: oneDNN's ``balance`` in jit_avx512_common_conv
        _kernel.cpp and jit_avx512_common_1x1_conv_kernel.cpp. Those that have other samples have other sums.
        """
        batch, channels = self.x.shape[:2]
        few, block = (channels, channels) if self.first else (_blocks(channels), _BLOCK)
        blocks_in, blocks_out = few // block, _blocks(self.y.shape[1]) // _BLOCK
        reads, writes = block * prod(self.x.shape[2:]), _BLOCK * prod(self.y.shape[2:])
        sums = (12 if prod(self.kernel) == 1 else 5) * block * _BLOCK * prod(self.kernel)

        def cost(by_batch: int, by_out: int, by_in: int) -> int:
            samples, ins, outs = _share(batch, by_batch), _share(blocks_in, by_in), _share(blocks_out, by_out)
            return samples * (ins * reads + outs * writes) + ins * outs * sums

        best, parts = cost(1, 1, 1), 1
        for by_batch in range(1, min(self.threads, batch) + 1):
            left = self.threads // by_batch
            for by_out in range(1, min(left, blocks_out) + 1):
                found = cost(by_batch, by_out, min(left // by_out, blocks_in))
                if found <= best:
                    best, parts = found, by_batch
        return parts - 1

    def forward(self) -> int:
        """The most bytes at once, its result included."""
        if not self.by_onednn:
            return self.without_onednn() + self.y.nbytes
        if self.channels_last:
            return self.y.nbytes + self.packed
        y = self.blocked(self.y)
        operands = self.weights(self.x.shape[1]) if self.first else self.blocked(self.x) + self.packed
        if prod(self.kernel) == 1 and self.strided and self.groups == 1:  # each thread gathers a sample's pixels
            operands += self.threads * self.columns(1)
        return max(operands + y, y + self.y.nbytes)

    def of_input(self) -> int:
        """The same for the gradient of *x*."""
        if self.channels_last:
            return self.x.nbytes + self.packed
        y = self.blocked(self.y)
        if self.strided and not self.depthwise:  # computed with channels last, and laid out in two steps
            return max(y + self.packed + self.x.nbytes, 3 * self.x.nbytes)
        x = self.blocked(self.x)
        return max(y + self.packed + x, x + self.x.nbytes)

    def of_weights(self) -> int:
        """The same for the gradient of *w*."""
        if self.channels_last:
            return 3 * self.w.nbytes
        channels = self.x.shape[1]
        if self.groups > 1 and not self.depthwise and self.w.shape[1] % _BLOCK:  # they are read as they are
            return 2 * self.w.nbytes
        if self.first and max(self.kernel) > _WIDEST:  # as matrices: each thread a sample's columns, and sums
            return self.w.nbytes + self.threads * (self.columns(1) + 4 * self.w.nbytes)
        if self.groups == 1 and channels <= _FEW:
            x, w = 0, self.weights(channels)
        else:
            block = _BLOCK // 2 if channels <= _BLOCK // 2 else _BLOCK
            x, w = self.blocked(self.x, block), self.weights(_blocks(channels, block))
        if self.groups > 1:
            w = self.packed
        else:
            x += self.partial_sums() * w
        return max(self.blocked(self.y) + x + w, w + self.w.nbytes)


def _copied(call: Call, *positions: int) -> int:
    """Bytes of the operands that a kernel for dense ones copies first."""
    strided = call.strided(*positions)
    return sum(operand.nbytes for operand in strided if not (operand.contiguous or operand.channels_last))


def _convolution(call: Call) -> int:
    x, w, y = call.operand(0), call.operand(1), call.result()
    copied = _copied(call, 0, 1)
    if not call.args.get("transposed"):
        return copied + _Convolution(x, w, y, call.args, call.threads).forward() - y.nbytes
    turned = _Convolution(y, w, x, call.args, call.threads)
    return copied + turned.of_input() - y.nbytes if turned.by_onednn else copied


def _convolution_backward(call: Call) -> int:
    grad, x, w = [call.operand(i) for i in range(3)]
    copied = _copied(call, 0, 1, 2)
    wanted = call.args.get("output_mask", (True, True, True))
    transposed = bool(call.args.get("transposed"))
    convolution = _Convolution(*((grad, w, x) if transposed else (x, w, grad)), call.args, call.threads)
    if not convolution.by_onednn:
        return copied + (0 if transposed else convolution.without_onednn())
    found, results = 0, 0
    if wanted[0]:
        found, results = (convolution.forward() if transposed else convolution.of_input()), x.nbytes
    if wanted[1]:
        found, results = max(found, results + convolution.of_weights()), results + w.nbytes
    return copied + found - results


def _batch_norm(call: Call) -> int:
    """A sum and a sum of squares, or two factors, for each channel."""
    x = call.operand(0)
    return 2 * x.shape[1] * ITEMSIZE[x.dtype]


def _batch_norm_backward(call: Call) -> int:
    """Another tensor like the gradient of the input, or the output's gradient in the input's layout."""
    if not call.args.get("output_mask", (True,))[0]:
        return 0
    grad, x = call.operand(0), call.operand(1)
    return grad.nbytes if grad.contiguous == x.contiguous else _copied(call, 0) or grad.nbytes


def _group_norm_backward(call: Call) -> int:
    """For each sample and channel, the sum of the gradient, and of its product with the input."""
    x = call.operand(1)
    return 2 * prod(x.shape[:2]) * ITEMSIZE[x.dtype] + _copied(call, 0, 1)


def _layer_norm_backward(call: Call) -> int:
    """A sum for each weight and bias and thread."""
    return _copied(call, 0, 1) + 2 * call.threads * call.result(-1).nbytes


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
    return x.nbytes + y.nbytes if sum(y.shape[-2:]) <= 128 else _copied(call, 0)


def _dense(*positions: int) -> Callable[[Call], int]:
    """A kernel that reads these operands dense."""
    return lambda call: _copied(call, *positions)


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
    "aten.convolution.default": _convolution,
    "aten.convolution_backward.default": _convolution_backward,
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
