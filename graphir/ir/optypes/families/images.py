"""Convolutions, pooling, padding and resampling."""

from __future__ import annotations

from typing import Final

from ..facts import ADDS, FLOATS, admitted, known
from ..layouts import in_format

__all__ = ["IMAGES"]


IMAGES: Final = (
    admitted(
        """
        _adaptive_avg_pool2d _adaptive_avg_pool3d _upsample_bilinear2d_aa _upsample_bilinear2d_aa_backward
        _upsample_nearest_exact1d _upsample_nearest_exact1d_backward adaptive_max_pool2d adaptive_max_pool3d
        avg_pool2d_backward col2im constant_pad_nd fractional_max_pool2d fractional_max_pool3d max_unpool3d
        pixel_unshuffle reflection_pad1d reflection_pad2d reflection_pad3d reflection_pad3d_backward replication_pad1d
        replication_pad3d replication_pad3d_backward upsample_linear1d upsample_nearest1d upsample_nearest1d_backward
        upsample_nearest2d_backward upsample_trilinear3d
        """,
        only_elements=True,
    ),
    admitted(
        """
        _adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward adaptive_max_pool2d_backward avg_pool3d_backward
        grid_sampler_2d_backward grid_sampler_3d_backward max_pool2d_with_indices_backward
        max_pool3d_with_indices_backward reflection_pad1d_backward replication_pad1d_backward
        upsample_bicubic2d_backward upsample_bilinear2d_backward upsample_linear1d_backward
        upsample_trilinear3d_backward
        """,
        only_elements=True,
        nondeterministic=ADDS,
    ),
    admitted("adaptive_max_pool3d_backward"),
    known("avg_pool1d", shaped_in_pieces=True),
    admitted("avg_pool2d avg_pool3d im2col max_pool3d_with_indices", only_elements=True, shaped_in_pieces=True),
    admitted("channel_shuffle max_unpool2d replication_pad2d", only_elements=True, rule=in_format(0)),
    admitted(
        "convolution",
        only_elements=True,
        onednn=FLOATS,
        alike=("input", "weight", "bias"),
        strides_vary=True,
        kernel_by_size=True,
    ),
    admitted(
        "convolution_backward",
        only_elements=True,
        onednn=FLOATS,
        parts_apart=True,
        strides_vary=True,
        kernel_by_size=True,
    ),
    known("_cudnn_rnn mkldnn_rnn_layer", shapes_vary=True),
    admitted("grid_sampler_2d grid_sampler_3d", only_elements=True, alike=("input", "grid")),
    admitted("max_pool2d_with_indices", only_elements=True, label="max_pool2d", shaped_in_pieces=True),
    admitted("pixel_shuffle", only_elements=True, strides_vary=True),
    admitted(
        "reflection_pad2d_backward replication_pad2d_backward",
        only_elements=True,
        nondeterministic=ADDS,
        rule=in_format(1),
    ),
    admitted("upsample_bicubic2d upsample_bilinear2d upsample_nearest2d", only_elements=True, ambiguous=True),
    known("_upsample_nearest_exact2d", only_elements=True, ambiguous=True),
    known("_upsample_nearest_exact2d_backward upsample_nearest3d upsample_nearest3d_backward", only_elements=True),
)
