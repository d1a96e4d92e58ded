"""The scratch of convolutions and of their gradients: that of oneDNN on x86 with AVX-512, and of ATen's own kernels.

OneDNN's blocked layouts have 16 channels a block. AVX2's have 8, which matters only where channels are no multiple of
16; other processors convolve without blocks; those with AMX have kernels of other scratch. So the formulas hold where
torch finds AVX-512 and no AMX; elsewhere the bytes of convolutions by oneDNN are unknown until they are measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, Final, NamedTuple

import torch

from ...ir.dtype import ITEMSIZE
from ...ir.optypes.sized import SizedOperand, SizedOperator, copied

__all__ = ["convolution", "convolution_backward"]

_BLOCK: Final = 16
"""Channels of a block of oneDNN's layouts for AVX-512."""

_FEW: Final = 3
"""Channels of an image, which the gradient of a first convolution's weight reads as they are."""

_SMALL: Final = 20480
"""Elements of a single sample up to which ATen convolves without oneDNN."""


_WIDEST: Final = 13
"""The widest kernel of a first convolution for whose gradient oneDNN has a kernel of its own."""


def _share(of: int, among: int) -> int:
    return -(-of // among)


def _blocks(channels: int, block: int = _BLOCK) -> int:
    return _share(channels, block) * block


class _Convolution(NamedTuple):
    """A convolution of *x* with *w* that gives *y*, as oneDNN sees it: of a transposed convolution, *x* is the result.

    ::

        forward           reorder x, w ──▶ compute y ──▶ lay y out as a plain tensor
        gradient of x     reorder dy, w ─▶ compute dx ─▶ lay dx out
        gradient of w     reorder dy, x ─▶ compute dw ─▶ lay dw out
    """

    x: SizedOperand
    w: SizedOperand
    y: SizedOperand
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
    def covered(self) -> bool:
        """Whether these formulas hold for the kernels that run here: whether they were compared with measurements of
        them.

        The measurements were of kernels of at most 3 elements a side, for patches, which do not overlap, and for a
        net's first convolution; with one group, or one for each channel; without dilation, and with channels first.
        """
        if not self.by_onednn:
            return self.x.dtype in ("f32", "f64")
        sides = max((1, *self.kernel))
        patches = tuple(self.args.get("stride", ())) == tuple(self.kernel)
        plain = self.x.dtype == "f32" and not self.channels_last and len(self.kernel) < 3
        grouped = self.groups > 1 and not self.depthwise
        dilated = any(step != 1 for step in self.args.get("dilation", (1,)))
        shaped = patches or (not self.args.get("transposed") and (sides <= 3 or self.of_images))
        return plain and shaped and not grouped and not dilated and _are_blocked_by_16()

    @property
    def of_images(self) -> bool:
        """Whether it is a net's first convolution, of images in colours."""
        return self.groups == 1 and self.x.shape[1] <= _FEW

    @property
    def channels_last(self) -> bool:
        return self.x.channels_last or self.w.channels_last

    def blocked(self, operand: SizedOperand, block: int = _BLOCK) -> int:
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
        """How many partial gradients of *w* are kept beside the one to which they are added.

        Threads share out samples, or channels, whichever costs less: oneDNN's ``balance`` in jit_avx512_common_conv
        _kernel.cpp and jit_avx512_common_1x1_conv_kernel.cpp. Threads with different samples have different sums.
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
            w, sums = self.packed, 0
        else:
            sums = self.partial_sums() * w
        return max(self.blocked(self.y) + x + w + sums, w + self.w.nbytes)


def _are_blocked_by_16() -> bool:
    """Whether oneDNN convolves on this machine, and by its kernels for AVX-512."""
    mkldnn = torch.backends.mkldnn
    vectors = torch.backends.cpu.get_cpu_capability() == "AVX512" and not torch.cpu._is_amx_tile_supported()
    return bool(mkldnn.is_available() and mkldnn.enabled) and vectors


def convolution(call: SizedOperator) -> int | None:
    """The scratch of ``aten.convolution.default``, in bytes; None where the formulas do not cover it."""
    x, w, y = call.operand(0), call.operand(1), call.result()
    copies = copied(call, 0, 1)
    if not call.args.get("transposed"):
        plain = _Convolution(x, w, y, call.args, call.threads)
        return copies + plain.forward() - y.nbytes if plain.covered else None
    turned = _Convolution(y, w, x, call.args, call.threads)
    if not turned.covered:
        return None
    return copies + turned.of_input() - y.nbytes if turned.by_onednn else copies


def convolution_backward(call: SizedOperator) -> int | None:
    """The scratch of ``aten.convolution_backward.default``, in bytes; None where the formulas do not cover it."""
    grad, x, w = [call.operand(i) for i in range(3)]
    copies = copied(call, 0, 1, 2)
    wanted = call.args.get("output_mask", (True, True, True))
    transposed = bool(call.args.get("transposed"))
    run = _Convolution(*((grad, w, x) if transposed else (x, w, grad)), call.args, call.threads)
    if not run.covered:
        return None
    if not run.by_onednn:
        return copies + (0 if transposed else run.without_onednn())
    most, results = 0, 0
    if wanted[0]:
        most, results = (run.forward() if transposed else run.of_input()), x.nbytes
    if wanted[1]:
        most, results = max(most, results + run.of_weights()), results + w.nbytes
    return copies + most - results
