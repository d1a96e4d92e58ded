"""Which of torch's operators a file may name.

A file may be a stranger's, and torch's kernels do not check every index and shape. The list is of the types that the
models of tests/zoo and torch's own samples of its operators dispatch to. Those of the samples were called with hostile
operands (indices and sizes out of range, other shapes, element types and strides) between pages that no process may
touch: what crashed is not on the list, or its operands are checked by :mod:`graphir.runtime.kernels.bounds`. What a
capture in this process records is not limited, and :func:`allow_operators` adds others.
"""

from __future__ import annotations

from typing import Final

from ..errors import GraphirError, nearest
from .opset import NAMESPACES, overload
from .size import LONGEST_TEXT

__all__ = ["ADMITTED", "admitted", "allow_operators"]

_TYPES: Final = """
    _adaptive_avg_pool2d _adaptive_avg_pool2d_backward _adaptive_avg_pool3d _adaptive_avg_pool3d_backward
    _amp_foreach_non_finite_check_and_unscale _amp_update_scale_ _assert_async _assert_async.msg _cdist_forward
    _chunk_cat _conj _conj_physical _efficient_attention_forward _efficientzerotensor _embedding_bag
    _embedding_bag_backward _embedding_bag_forward_only _embedding_bag_per_sample_weights_backward
    _fft_c2c _fft_c2r _fft_r2c _flash_attention_forward
    _grouped_mm _histogramdd_bin_edges _histogramdd_from_bin_cts _histogramdd_from_bin_tensors _linalg_check_errors
    _linalg_det _linalg_eigh _linalg_slogdet _linalg_solve_ex _linalg_svd _log_softmax _log_softmax_backward_data
    _native_batch_norm_legit _neg_view _pdist_forward _prelu_kernel _prelu_kernel_backward _safe_softmax _softmax
    _softmax_backward_data _to_copy _trilinear _unique _unique2 _unsafe_view _upsample_bilinear2d_aa
    _upsample_bilinear2d_aa_backward _upsample_nearest_exact1d _upsample_nearest_exact1d_backward
    _weight_norm_interface _weight_norm_interface_backward abs abs_ acos acos_ acosh acosh_ adaptive_max_pool2d
    adaptive_max_pool2d_backward adaptive_max_pool3d adaptive_max_pool3d_backward add.Scalar add.Tensor add_.Scalar
    add_.Tensor addbmm addbmm_ addcdiv addcdiv_ addcmul addcmul_ addmm addmm.out addmm_ addmv addmv_ addr addr_
    alias alias_copy all all.dim all.dims amax amax.out amin aminmax angle any any.dim any.dims arange arange.start
    arange.start_step argmax argmin as_strided as_strided_ as_strided_copy as_strided_scatter asin asin_ asinh
    asinh_ atan atan2 atan2_ atan_ atanh atanh_ avg_pool2d avg_pool2d_backward avg_pool3d avg_pool3d_backward
    baddbmm baddbmm_ bernoulli bernoulli.p bernoulli_.float binary_cross_entropy binary_cross_entropy_backward
    binary_cross_entropy_with_logits bincount bitwise_and.Tensor bitwise_and_.Tensor bitwise_left_shift.Tensor
    bitwise_left_shift_.Tensor bitwise_not bitwise_not_ bitwise_or.Tensor bitwise_or_.Tensor
    bitwise_right_shift.Tensor bitwise_right_shift_.Tensor bitwise_xor.Tensor bitwise_xor_.Tensor block_diag bmm
    bucketize.Tensor cat cauchy_ ceil ceil_ celu celu_ channel_shuffle cholesky cholesky_inverse cholesky_solve
    clamp clamp.Tensor clamp_ clamp_.Tensor clamp_max.Tensor clamp_max_.Tensor clamp_min clamp_min.Tensor clamp_min_
    clamp_min_.Tensor clone col2im complex conj_physical_ constant_pad_nd convolution convolution_backward copy
    copy_ copysign.Tensor copysign_.Tensor cos cos_ cosh cosh_ count_nonzero count_nonzero.dim_IntList cummax cummin
    cumprod cumprod_ cumsum cumsum_ deg2rad deg2rad_ detach diag_embed diagonal diagonal_backward diagonal_copy
    diagonal_scatter digamma digamma_ dist div.Scalar div.Tensor div.Tensor_mode div.out div_.Scalar div_.Tensor
    div_.Tensor_mode dot elu elu_ elu_backward embedding embedding_dense_backward empty.memory_format empty_like
    empty_permuted empty_strided eq.Scalar eq.Tensor eq_.Scalar eq_.Tensor erf erf_ erfc erfc_ erfinv erfinv_ exp
    exp2 exp2_ exp_ expand expand_copy expm1 expm1_ exponential_ eye eye.m fill.Scalar fill.Tensor fill_.Scalar
    fill_.Tensor flip floor floor_ floor_divide floor_divide_.Tensor fmax fmin fmod.Tensor fmod_.Tensor frac frac_
    fractional_max_pool2d fractional_max_pool3d frexp.Tensor full full_like gather gcd gcd_ ge.Scalar ge.Tensor
    ge_.Scalar ge_.Tensor gelu gelu_ gelu_backward geometric_ geqrf glu glu_backward grid_sampler_2d
    grid_sampler_2d_backward grid_sampler_3d grid_sampler_3d_backward gt.Scalar gt.Tensor gt_.Scalar gt_.Tensor
    hardshrink hardshrink_backward hardsigmoid hardsigmoid_ hardsigmoid_backward hardswish hardswish_
    hardswish_backward hardtanh hardtanh_ hardtanh_backward hash_tensor heaviside heaviside_ histc histogram.bin_ct
    histogram.bins_tensor huber_loss huber_loss_backward hypot hypot_ i0 i0_ igamma igamma_ igammac igammac_ im2col
    index.Tensor index_add index_add_ index_copy index_copy_ index_fill.int_Scalar index_fill.int_Tensor
    index_fill_.int_Scalar index_fill_.int_Tensor index_put index_put_ index_reduce index_reduce_ index_select
    isin.Tensor_Tensor isinf isnan isneginf isposinf kthvalue lcm lcm_ ldexp.Tensor ldexp_ le.Scalar le.Tensor
    le_.Scalar le_.Tensor leaky_relu leaky_relu_ leaky_relu_backward lerp.Scalar lerp_.Scalar lerp_.Tensor lgamma
    lgamma_ lift_fresh linalg_cholesky_ex linalg_cross linalg_eig linalg_householder_product linalg_inv_ex
    linalg_ldl_factor_ex linalg_lstsq linalg_lu linalg_lu_factor_ex linalg_lu_solve linalg_matrix_exp
    linalg_pinv.atol_rtol_tensor linalg_qr linalg_solve_triangular linalg_vector_norm linspace
    linspace.Scalar_Tensor linspace.Tensor_Scalar linspace.Tensor_Tensor log log10 log10_ log1p log1p_ log2 log2_
    log_ log_normal_ log_sigmoid_backward log_sigmoid_forward logaddexp logaddexp2 logcumsumexp logical_and
    logical_and_ logical_not logical_not_ logical_or logical_or_ logical_xor logical_xor_ logit logit_
    logit_backward logspace logspace.Scalar_Tensor logspace.Tensor_Scalar logspace.Tensor_Tensor logsumexp lt.Scalar
    lt.Tensor lt_.Scalar lt_.Tensor masked_fill.Scalar masked_fill.Tensor masked_fill_.Scalar masked_fill_.Tensor
    masked_scatter masked_scatter_ masked_scatter_backward masked_select max max.dim max_pool2d_with_indices
    max_pool2d_with_indices_backward max_pool3d_with_indices max_pool3d_with_indices_backward max_unpool2d
    max_unpool3d maximum mean mean.dim median median.dim min min.dim minimum mish mish_ mish_backward mm mm.out mode
    mse_loss mse_loss_backward mul.Scalar mul.Tensor mul.out mul_.Scalar mul_.Tensor multi_margin_loss
    multilabel_margin_loss_backward multilabel_margin_loss_forward multinomial mv mvlgamma mvlgamma_ nan_to_num
    nan_to_num_ nanmedian nanmedian.dim nansum narrow_copy native_batch_norm native_batch_norm_backward
    native_dropout native_dropout_backward native_group_norm native_group_norm_backward native_layer_norm
    native_layer_norm_backward ne.Scalar ne.Tensor ne_.Scalar ne_.Tensor neg neg_ new_empty new_empty_strided
    new_full new_ones new_zeros nextafter nextafter_ nll_loss2d_backward nll_loss2d_forward nll_loss_backward
    nll_loss_forward nonzero nonzero_static norm.ScalarOpt_dim normal.Tensor_Tensor normal.Tensor_float
    normal.float_float normal_ ones ones_like ormqr outer permute permute_copy pixel_shuffle pixel_unshuffle polar
    polygamma polygamma_ pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor pow_.Scalar pow_.Tensor prod prod.dim_int
    put put_ rad2deg rad2deg_ rand rand.generator randint randint.low randint_like randint_like.low_dtype randn
    randn_like randn_like.generator reciprocal reciprocal_ reflection_pad1d reflection_pad1d_backward
    reflection_pad2d reflection_pad2d_backward reflection_pad3d reflection_pad3d_backward relu relu_
    remainder.Scalar remainder.Tensor remainder_.Scalar remainder_.Tensor renorm renorm_ repeat
    repeat_interleave.Tensor replication_pad1d replication_pad1d_backward replication_pad2d
    replication_pad2d_backward replication_pad3d replication_pad3d_backward roll rot90 round round.decimals round_
    round_.decimals rsqrt rsqrt_ rsub.Scalar rsub.Tensor scalar_tensor scatter.reduce scatter.src scatter.value
    scatter_.reduce scatter_.src scatter_.value scatter_add scatter_add_ scatter_reduce.two scatter_reduce_.two
    searchsorted.Tensor select.int select_backward select_scatter sgn sgn_ sigmoid sigmoid_ sigmoid_backward sign
    sign_ signbit silu silu_ silu_backward sin sin_ sinc sinc_ sinh sinh_ slice.Tensor slice_backward slice_scatter
    smooth_l1_loss smooth_l1_loss_backward soft_margin_loss soft_margin_loss_backward softplus softplus_backward
    softshrink softshrink_backward sort sort.stable special_airy_ai special_bessel_j0 special_bessel_j1
    special_bessel_y0 special_bessel_y1 special_chebyshev_polynomial_t special_chebyshev_polynomial_u
    special_chebyshev_polynomial_v special_chebyshev_polynomial_w special_entr special_erfcx
    special_hermite_polynomial_h special_hermite_polynomial_he special_i0e special_i1 special_i1e
    special_laguerre_polynomial_l special_legendre_polynomial_p special_log_ndtr special_modified_bessel_i0
    special_modified_bessel_i1 special_modified_bessel_k0 special_modified_bessel_k1 special_ndtri
    special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1 special_shifted_chebyshev_polynomial_t
    special_shifted_chebyshev_polynomial_u special_shifted_chebyshev_polynomial_v
    special_shifted_chebyshev_polynomial_w special_spherical_bessel_j0 special_xlog1py special_zeta split.Tensor
    split_with_sizes split_with_sizes_copy sqrt sqrt_ squeeze squeeze.dim squeeze.dims squeeze_ squeeze_.dim
    squeeze_.dims squeeze_copy squeeze_copy.dim stack std.correction std_mean.correction sub.Scalar sub.Tensor
    sub_.Scalar sub_.Tensor sum sum.dim_IntList t t_ t_copy take tan tan_ tanh tanh_ tanh_backward threshold
    threshold_ threshold_backward topk trace transpose.int transpose_ transpose_copy.int triangular_solve tril tril_
    triu triu_ trunc trunc_ unbind.int unbind_copy.int unfold unfold_backward unfold_copy uniform_
    unique_consecutive unsafe_split.Tensor unsqueeze unsqueeze_ unsqueeze_copy upsample_bicubic2d
    upsample_bicubic2d_backward upsample_bilinear2d upsample_bilinear2d_backward upsample_linear1d
    upsample_linear1d_backward upsample_nearest1d upsample_nearest1d_backward upsample_nearest2d
    upsample_nearest2d_backward upsample_trilinear3d upsample_trilinear3d_backward var.correction
    var_mean.correction vdot view view_as_complex view_as_real view_copy where.self xlogy.Tensor xlogy_.Tensor zero
    zero_ zeros zeros_like
"""
"""Types of ``aten``, without ``.default``."""

ADMITTED: Final = frozenset(f"aten.{name}" if "." in name else f"aten.{name}.default" for name in _TYPES.split())
"""Torch's types that any file may name."""

_allowed: Final[set[str]] = set()


def allow_operators(*types: str) -> None:
    """Let files that are read from now on name these types of torch's operators, in this process.

    For types that are not admitted, nobody has seen that torch's kernels refuse every operand with which they would
    read or write out of bounds. Trust a file that names them as you would trust code.

    Args:
        types: such as ``aten.binomial.default``, with the overload's name.

    Raises:
        GraphirError: torch has no such operator, or no program may have it; none was added.
    """
    for type in types:
        overload(type)
    _allowed.update(types)


def admitted(type: str) -> str:
    """The operator type, as a file names it.

    Raises:
        GraphirError: it is one of torch's that files may not name, or longer than a text may have it.
    """
    if len(type) > LONGEST_TEXT:
        raise GraphirError(
            f"the operator type {type[:20]}… has {len(type)} characters", fix=f"write at most {LONGEST_TEXT}"
        )
    if type in ADMITTED or type.partition(".")[0] not in NAMESPACES or type in _allowed:
        return type
    raise GraphirError(
        f"a file may not name the operator {type!r}{nearest(type, ADMITTED)}",
        fix=f"if you trust the file: graphir.allow_operators({type!r}) before it is read",
    )
