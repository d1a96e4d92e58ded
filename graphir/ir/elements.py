"""Which operators read only the elements of their operands.

A view has elements, and between and around them its storage has others. Most kernels address only the elements. Some
reach further: ``as_strided_copy`` by its arguments, and kernels that take an operand for contiguous without asking, as
``native_layer_norm_backward`` does with the statistics. Where a part of a storage is copied to another device, only the
elements arrive. So an operator whose type is not on this list is given copies of whole storages, and certificates
number its operands by their storages.

The types were found by running torch's own samples of all operators, and the training steps of tests/zoo, on operands
with gaps, once with one filling of the gaps and once with another: ``python tests/bench elements`` does it again. Types
that rearrange storages, and types that neither of these called, are left out.
"""

from __future__ import annotations

from functools import cache
from typing import Final

from .optypes.own import OWN

__all__ = ["reads_only_elements"]

_NAMES: Final = """
    _adaptive_avg_pool2d _adaptive_avg_pool2d_backward _adaptive_avg_pool3d _adaptive_avg_pool3d_backward
    _batch_norm_with_update _cdist_backward _cdist_forward _conj _conj_physical _ctc_loss_backward _fft_c2c _fft_c2r
    _fft_r2c _histogramdd_bin_edges _histogramdd_from_bin_cts _histogramdd_from_bin_tensors _linalg_check_errors
    _linalg_det _linalg_eigh _linalg_slogdet _linalg_solve_ex _linalg_svd _log_softmax _log_softmax_backward_data
    _native_batch_norm_legit _prelu_kernel _prelu_kernel_backward _safe_softmax _segment_reduce_backward _softmax
    _softmax_backward_data _to_copy _trilinear _unique _unique2 _unsafe_masked_index
    _unsafe_masked_index_put_accumulate _unsafe_view _upsample_bilinear2d_aa _upsample_bilinear2d_aa_backward
    _upsample_nearest_exact1d _upsample_nearest_exact1d_backward _upsample_nearest_exact2d
    _upsample_nearest_exact2d_backward abs acos acosh adaptive_max_pool2d adaptive_max_pool2d_backward
    adaptive_max_pool3d add addbmm addcdiv addcmul addmm addmv addr alias alias_copy all amax amin aminmax angle any
    argmax argmin asin asinh atan atan2 atanh avg_pool2d avg_pool2d_backward avg_pool3d avg_pool3d_backward baddbmm
    batch_norm_backward bernoulli binary_cross_entropy binary_cross_entropy_backward
    binary_cross_entropy_with_logits bincount bitwise_and bitwise_left_shift bitwise_not bitwise_or
    bitwise_right_shift bitwise_xor block_diag bmm bucketize cat cauchy ceil celu channel_shuffle cholesky
    cholesky_inverse cholesky_solve clamp clamp_max clamp_min clone col2im complex conj_physical constant_pad_nd
    convolution convolution_backward copy copysign cos cosh count_nonzero cummax cummin cumprod cumsum deg2rad
    detach diag_embed diagonal diagonal_backward diagonal_copy digamma dist div dot elu
    elu_backward embedding embedding_dense_backward embedding_renorm empty_like eq erf erfc erfinv exp exp2 expand
    expand_copy expm1 exponential fill flip floor floor_divide fmax fmin fmod frac fractional_max_pool2d
    fractional_max_pool3d frexp full_like gather gcd ge gelu gelu_backward geometric geqrf glu glu_backward
    grid_sampler_2d grid_sampler_2d_backward grid_sampler_3d grid_sampler_3d_backward gt hardshrink
    hardshrink_backward hardsigmoid hardsigmoid_backward hardswish hardswish_backward hardtanh hardtanh_backward
    heaviside histc histogram huber_loss huber_loss_backward hypot i0 igamma igammac im2col index index_add
    index_copy index_fill index_put index_reduce index_select isin isinf isnan isneginf isposinf kthvalue lcm ldexp
    le leaky_relu leaky_relu_backward lerp lgamma lift_fresh linalg_cholesky_ex linalg_cross linalg_eig
    linalg_householder_product linalg_inv_ex linalg_ldl_factor_ex linalg_ldl_solve linalg_lu linalg_lu_factor_ex
    linalg_lu_solve linalg_matrix_exp linalg_pinv linalg_qr linalg_solve_triangular linalg_vector_norm linspace log
    log10 log1p log2 log_normal log_sigmoid_backward log_sigmoid_forward logaddexp logaddexp2 logcumsumexp
    logical_and logical_not logical_or logical_xor logit logit_backward logspace logsumexp lt lu_unpack masked_fill
    masked_scatter masked_scatter_backward masked_select max max_pool2d_with_indices
    max_pool2d_with_indices_backward max_pool3d_with_indices max_pool3d_with_indices_backward max_unpool2d
    max_unpool3d maximum mean median min minimum mish mish_backward mm mode mse_loss mse_loss_backward mul
    multi_margin_loss multi_margin_loss_backward multilabel_margin_loss_backward multilabel_margin_loss_forward
    multinomial mv mvlgamma nan_to_num nanmedian nansum narrow_copy native_batch_norm native_batch_norm_backward
    native_dropout_backward native_layer_norm ne neg new_empty new_full new_ones new_zeros nextafter
    nll_loss2d_backward nll_loss2d_forward nll_loss_backward nll_loss_forward nonzero nonzero_static norm normal
    ones_like ormqr permute permute_copy pixel_shuffle pixel_unshuffle polar polygamma pow prod put rad2deg
    randint_like randn_like reciprocal reflection_pad1d reflection_pad1d_backward reflection_pad2d
    reflection_pad2d_backward reflection_pad3d reflection_pad3d_backward relu remainder renorm repeat
    repeat_interleave replication_pad1d replication_pad1d_backward replication_pad2d replication_pad2d_backward
    replication_pad3d replication_pad3d_backward roll rot90 round rrelu_with_noise rrelu_with_noise_backward rsqrt
    rsub scatter scatter_add scatter_reduce searchsorted segment_reduce select select_backward sgn
    sigmoid sigmoid_backward sign signbit silu silu_backward sin sinc sinh slice slice_backward
    smooth_l1_loss smooth_l1_loss_backward soft_margin_loss soft_margin_loss_backward softplus softplus_backward
    softshrink softshrink_backward sort special_airy_ai special_bessel_j0 special_bessel_j1 special_bessel_y0
    special_bessel_y1 special_chebyshev_polynomial_t special_chebyshev_polynomial_u special_chebyshev_polynomial_v
    special_chebyshev_polynomial_w special_entr special_erfcx special_hermite_polynomial_h
    special_hermite_polynomial_he special_i0e special_i1 special_i1e special_laguerre_polynomial_l
    special_legendre_polynomial_p special_log_ndtr special_modified_bessel_i0 special_modified_bessel_i1
    special_modified_bessel_k0 special_modified_bessel_k1 special_ndtri special_scaled_modified_bessel_k0
    special_scaled_modified_bessel_k1 special_shifted_chebyshev_polynomial_t special_shifted_chebyshev_polynomial_u
    special_shifted_chebyshev_polynomial_v special_shifted_chebyshev_polynomial_w special_spherical_bessel_j0
    special_xlog1py special_zeta split split_with_sizes split_with_sizes_copy sqrt squeeze squeeze_copy stack std
    std_mean sub sum t t_copy take tan tanh tanh_backward threshold threshold_backward topk trace transpose
    transpose_copy triangular_solve tril triu trunc unbind unbind_copy unfold unfold_backward unfold_copy uniform
    unique_consecutive unsafe_split unsqueeze unsqueeze_copy upsample_bicubic2d upsample_bicubic2d_backward
    upsample_bilinear2d upsample_bilinear2d_backward upsample_linear1d upsample_linear1d_backward upsample_nearest1d
    upsample_nearest1d_backward upsample_nearest2d upsample_nearest2d_backward upsample_nearest3d
    upsample_nearest3d_backward upsample_trilinear3d upsample_trilinear3d_backward var var_mean vdot view
    view_as_complex view_as_real view_copy where xlogy zero zeros_like
"""
"""Names of torch's operators, of every variant, in place or not."""

_LISTED: Final = frozenset(_NAMES.split())


@cache
def reads_only_elements(type: str) -> bool:
    """Whether an operator of *type*, of graphir's own, torch's or Caffe2's, reads nothing of its operands' storages but
    the operands' elements."""
    if type in OWN:
        return OWN[type].only_elements
    namespace, _, rest = type.partition(".")
    if not rest:
        return True
    name = rest.partition(".")[0]
    return namespace == "aten" and (name in _LISTED or (name[-1:] == "_" and name[:-1] in _LISTED))
