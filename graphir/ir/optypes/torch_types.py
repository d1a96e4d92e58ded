"""What is known of torch's types, and torch does not declare."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ..operator import Arg
from .record import OperatorType

__all__ = ["TORCH", "UNWRITTEN"]

UNWRITTEN: Final = ("aten.empty", "aten.new_empty", "prims.empty")
"""How the types begin that make memory without writing it."""


def _batch_norm_statistics(args: Mapping[str, Arg]) -> tuple[str, ...]:
    return ("running_mean", "running_var") if args.get("training") else ()


def _all_statistics(args: Mapping[str, Arg]) -> tuple[str, ...]:
    return ("running_mean", "running_var")


def _first_operand(args: Mapping[str, Arg]) -> tuple[str, ...]:
    return ("self",)


def _noise_in_training(args: Mapping[str, Arg]) -> tuple[str, ...]:
    return ("noise",) if args.get("training") else ()


_NAMES_OF: Final[list[tuple[dict[str, Any], str]]] = [
    (
        {"hidden_writes": _batch_norm_statistics},
        "native_batch_norm.default cudnn_batch_norm.default miopen_batch_norm.default",
    ),
    ({"hidden_writes": _all_statistics}, "batch_norm_update_stats.default"),
    (
        {"hidden_views": True},
        "_unsafe_view.default lift.default unsafe_chunk.default unsafe_split.Tensor unsafe_split_with_sizes.default",
    ),
    ({"conjugates": True}, "_conj.default _neg_view.default"),
    (
        {"geometry_only": _first_operand},
        """
        bernoulli.Tensor bernoulli.p cauchy.default copy.default empty_like.default exponential.default fill.Scalar
        fill.Tensor full_like.default geometric.default log_normal.default new_empty.default new_empty_strided.default
        new_full.default new_ones.default new_zeros.default normal_functional.default ones_like.default
        rand_like.default rand_like.generator randint_like.default randint_like.low_dtype randn_like.default
        randn_like.generator random.default random.from random.to uniform.default zero.default zeros_like.default
        """,
    ),
    ({"geometry_only": _noise_in_training}, "rrelu_with_noise_functional.default"),
    (
        {"batch_norm": True},
        """
        _native_batch_norm_legit.default _native_batch_norm_legit.no_stats _native_batch_norm_legit_functional.default
        cudnn_batch_norm.default miopen_batch_norm.default native_batch_norm.default
        """,
    ),
    (
        {"unread_in_training": ("running_mean", "running_var")},
        "batch_norm_backward.default native_batch_norm_backward.default",
    ),
    # Some backends keep empty statistics in evaluation, others those that they were given.
    (
        {"kept_varies_in_evaluation": True},
        """
        _batch_norm_no_update.default _native_batch_norm_legit.default _native_batch_norm_legit_no_training.default
        cudnn_batch_norm.default miopen_batch_norm.default native_batch_norm.default
        """,
    ),
    ({"kept_varies": True}, "_embedding_bag.default _embedding_bag_forward_only.default"),
    ({"shapes_vary": True}, "_cudnn_rnn.default mkldnn_rnn_layer.default"),  # workspaces
    # Mkldnn, cudnn and the CPU keep channels last, meta does not; Fourier transforms come out as the library leaves
    # them, and meta takes the GPU's.
    (
        {"strides_vary": True},
        """
        _fft_c2c.default _fft_c2r.default _fft_r2c.default convolution.default convolution_backward.default
        pixel_shuffle.default
        """,
    ),
    ({"kernel_by_size": True}, "convolution.default convolution_backward.default"),
    # Every backend computes the gradient of the input by one kernel and those of weight and bias by others. Norms make
    # all of them in one; their parts were equal wherever tried, and together take half as long again.
    ({"parts_apart": True}, "convolution_backward.default"),
    (
        {"shaped_in_pieces": True},
        """
        _linalg_svd.default arange.start_step avg_pool1d.default avg_pool2d.default avg_pool3d.default diagonal.default
        geqrf.default im2col.default linalg_lu.default linalg_lu_factor_ex.default linalg_qr.default
        linalg_svdvals.default lu_unpack.default max_pool2d_with_indices.default max_pool3d_with_indices.default
        slice.Tensor split.Tensor unfold.default unsafe_split.Tensor
        """,
    ),
    ({"reads_rows": True}, "embedding.default gather.default index_select.default"),
    # The documentation of torch.use_deterministic_algorithms. In-place forms count as their functional ones.
    (
        {"nondeterministic": "adds in no fixed order on CUDA"},
        """
        _adaptive_avg_pool2d_backward.default _adaptive_avg_pool3d_backward.default _ctc_loss_backward.default
        _embedding_bag_dense_backward.default _scaled_dot_product_cudnn_attention_backward.default
        _scaled_dot_product_efficient_attention_backward.default _scaled_dot_product_flash_attention_backward.default
        adaptive_max_pool2d_backward.default avg_pool3d_backward.default embedding_dense_backward.default
        grid_sampler_2d_backward.default grid_sampler_3d_backward.default histc.default index_add.default
        max_pool2d_with_indices_backward.default max_pool3d_with_indices_backward.default
        reflection_pad1d_backward.default reflection_pad2d_backward.default replication_pad1d_backward.default
        replication_pad2d_backward.default scatter_add.default upsample_bicubic2d_backward.default
        upsample_bilinear2d_backward.default upsample_linear1d_backward.default upsample_trilinear3d_backward.default
        """,
    ),
    ({"nondeterministic": "adds in no fixed order on CUDA where accumulate is set"}, "index_put.default put.default"),
    ({"nondeterministic": "adds in no fixed order on CUDA where there are weights"}, "bincount.default"),
    ({"nondeterministic": "reduces in no fixed order on CUDA"}, "scatter_reduce.two"),
    ({"nondeterministic": "sums in no fixed order on CUDA"}, "cumsum.default"),
]
"""Facts, and the types of which each holds."""

_ELEMENTWISE: Final = """
    add.Tensor clamp.default clamp_min.default div.Scalar div.Tensor elu.default exp.default gelu.default
    hardswish.default hardtanh.default leaky_relu.default masked_fill.Scalar mul.Scalar mul.Tensor neg.default
    relu.default sigmoid.default silu.default sub.Tensor tanh.default
"""
"""Elementwise types whose in-place forms take the same arguments and compute the same bits."""


def _assembled() -> dict[str, OperatorType]:
    facts: dict[str, dict[str, Any]] = {}
    for fact, names in _NAMES_OF:
        for name in names.split():
            facts.setdefault(f"aten.{name}", {}).update(fact)
    for name in _ELEMENTWISE.split():
        plain, variant = name.split(".")
        facts.setdefault(f"aten.{name}", {})["in_place"] = f"aten.{plain}_.{variant}"
    return {type: OperatorType(type, **known) for type, known in facts.items()}


TORCH: Final[Mapping[str, OperatorType]] = _assembled()
"""The records of types that are not graphir's own, as far as something is known of them."""
