"""Pointwise operators, activations, losses, and their gradients."""

from __future__ import annotations

from typing import Final

from ..facts import ADDS, FLOATS, admitted, known
from ..layouts import as_kernel, in_format

__all__ = ["POINTWISE"]


POINTWISE: Final = (
    admitted(
        """
        add.Tensor clamp clamp_min div.Scalar div.Tensor elu exp hardtanh leaky_relu mul.Scalar mul.Tensor neg relu
        sigmoid silu sub.Tensor tanh
        """,
        only_elements=True,
        in_place=True,
    ),
    admitted(
        """
        _conj_physical _prelu_kernel abs abs_ acos acos_ acosh acosh_ add.Scalar add_.Scalar add_.Tensor addcdiv
        addcdiv_ addcmul addcmul_ angle asin asin_ asinh asinh_ atan atan_ atan2 atan2_ atanh atanh_
        binary_cross_entropy_backward bitwise_and.Tensor bitwise_and_.Tensor bitwise_left_shift.Tensor
        bitwise_left_shift_.Tensor bitwise_not bitwise_not_ bitwise_or.Tensor bitwise_or_.Tensor
        bitwise_right_shift.Tensor bitwise_right_shift_.Tensor bitwise_xor.Tensor bitwise_xor_.Tensor ceil ceil_ celu
        celu_ clamp.Tensor clamp_.Tensor clamp_ clamp_max.Tensor clamp_max_.Tensor clamp_min.Tensor clamp_min_.Tensor
        clamp_min_ conj_physical_ copysign_.Tensor cos cos_ cosh cosh_ deg2rad deg2rad_ digamma digamma_ div.out
        div_.Scalar div_.Tensor div_.Tensor_mode elu_ eq.Scalar eq.Tensor eq_.Scalar eq_.Tensor erf erf_ erfc erfc_
        erfinv erfinv_ exp_ exp2 exp2_ expm1 expm1_ floor floor_ fmax fmin fmod.Tensor fmod_.Tensor frac frac_
        frexp.Tensor gcd gcd_ ge.Scalar ge.Tensor ge_.Scalar ge_.Tensor gt.Scalar gt.Tensor gt_.Scalar gt_.Tensor
        hardshrink hardshrink_backward hardsigmoid hardsigmoid_ hardswish_ hardtanh_ huber_loss hypot hypot_ i0 i0_
        igamma igamma_ igammac igammac_ isnan isneginf isposinf lcm lcm_ ldexp.Tensor ldexp_ le.Scalar le.Tensor
        le_.Scalar le_.Tensor leaky_relu_ lerp.Scalar lerp_.Scalar lerp_.Tensor lgamma lgamma_ log log_ log10 log10_
        log1p log1p_ log2 log2_ log_sigmoid_backward logaddexp logaddexp2 logical_and logical_and_ logical_not
        logical_not_ logical_or logical_or_ logical_xor logical_xor_ logit logit_ lt.Scalar lt.Tensor lt_.Scalar
        lt_.Tensor maximum minimum mish mish_ mul.out mul_.Scalar mul_.Tensor multilabel_margin_loss_backward mvlgamma
        mvlgamma_ nan_to_num nan_to_num_ ne.Scalar ne.Tensor ne_.Scalar ne_.Tensor neg_ nextafter nextafter_
        nll_loss2d_backward nll_loss_backward polygamma polygamma_ pow.Tensor_Scalar pow.Tensor_Tensor rad2deg
        rad2deg_ reciprocal reciprocal_ relu_ remainder.Scalar remainder.Tensor remainder_.Scalar remainder_.Tensor
        round.decimals round round_.decimals round_ rsqrt rsqrt_ rsub.Scalar rsub.Tensor sgn sgn_ sigmoid_
        sigmoid_backward sign sign_ signbit silu_ silu_backward sin sin_ sinc sinc_ sinh sinh_ soft_margin_loss
        soft_margin_loss_backward softplus softshrink softshrink_backward special_airy_ai special_bessel_j0
        special_bessel_j1 special_bessel_y0 special_bessel_y1 special_chebyshev_polynomial_t
        special_chebyshev_polynomial_u special_chebyshev_polynomial_v special_chebyshev_polynomial_w special_entr
        special_erfcx special_hermite_polynomial_h special_hermite_polynomial_he special_i0e special_i1 special_i1e
        special_laguerre_polynomial_l special_legendre_polynomial_p special_log_ndtr special_modified_bessel_i0
        special_modified_bessel_i1 special_modified_bessel_k0 special_modified_bessel_k1 special_ndtri
        special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1 special_shifted_chebyshev_polynomial_t
        special_shifted_chebyshev_polynomial_u special_shifted_chebyshev_polynomial_v
        special_shifted_chebyshev_polynomial_w special_spherical_bessel_j0 special_zeta sqrt sqrt_ sub.Scalar
        sub_.Scalar sub_.Tensor tan tan_ tanh_ tanh_backward threshold threshold_ threshold_backward trunc trunc_
        xlogy_.Tensor
        """,
        only_elements=True,
    ),
    admitted(
        """
        copysign.Tensor div.Tensor_mode elu_backward floor_divide hardsigmoid_backward hardswish_backward
        hardtanh_backward huber_loss_backward log_sigmoid_forward logit_backward mse_loss_backward pow.Scalar
        smooth_l1_loss_backward softplus_backward special_xlog1py xlogy.Tensor
        """,
        only_elements=True,
        rule=as_kernel,
    ),
    admitted("binary_cross_entropy", only_elements=True, alike=("self", "target")),
    known("_ctc_loss_backward", only_elements=True, nondeterministic=ADDS),
    admitted("floor_divide_.Tensor", only_elements=True, functional="floor_divide.default"),
    admitted("gelu", only_elements=True, onednn=FLOATS, in_place=True),
    admitted("gelu_ gelu_backward", only_elements=True, onednn=FLOATS),
    admitted("glu_backward", only_elements=True, rule=in_format(None)),
    admitted("hardswish", only_elements=True, in_place=True, ambiguous=True),
    admitted("heaviside heaviside_", only_elements=True, alike=("self", "values")),
    admitted("multi_margin_loss", only_elements=True, alike=("self", "weight"), index_types=("target", ("i64",))),
    known("conj_physical multi_margin_loss_backward", only_elements=True),
    admitted("multilabel_margin_loss_forward", only_elements=True, index_types=("target", ("i64",))),
    admitted(
        "nll_loss2d_forward",
        only_elements=True,
        label="nll_loss2d",
        alike=("self", "weight"),
        index_types=("target", ("i64",)),
    ),
    admitted(
        "nll_loss_forward",
        only_elements=True,
        label="nll_loss",
        alike=("self", "weight"),
        index_types=("target", ("i64", "u8")),
    ),
    admitted("pow_.Scalar", only_elements=True, functional="pow.Tensor_Scalar"),
    admitted("pow_.Tensor", only_elements=True, functional="pow.Tensor_Tensor"),
    admitted(
        """
        _prelu_kernel_backward binary_cross_entropy_with_logits glu leaky_relu_backward mish_backward mse_loss
        smooth_l1_loss
        """,
        only_elements=True,
        ambiguous=True,
    ),
)
