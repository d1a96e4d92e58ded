"""Pointwise operators, and activations with their gradients."""

from __future__ import annotations

from typing import Final

from ..facts import known
from ..layouts import as_kernel, in_format

__all__ = ["POINTWISE"]

POINTWISE: Final = (
    known(
        """
        abs acos acosh addcdiv addcmul asin asinh atan atan2 atanh bitwise_not ceil celu cos cosh deg2rad digamma
        erf erfc erfinv exp2 expm1 floor frac gcd hardsigmoid hypot i0 igamma igammac lcm lgamma log log10 log1p
        log2 logical_and logical_not logical_or logical_xor logit mish mvlgamma nan_to_num nextafter polygamma
        rad2deg reciprocal rsqrt sgn sign sin sinc sinh sqrt tan threshold trunc
        """,
        admitted=".default _.default",
        only_elements=True,
    ),
    known(
        """
        _conj_physical _prelu_kernel angle fmax fmin hardshrink hardshrink_backward isnan isneginf isposinf
        log_sigmoid_backward logaddexp logaddexp2 maximum minimum sigmoid_backward signbit silu_backward softplus
        softshrink softshrink_backward special_airy_ai special_bessel_j0 special_bessel_j1 special_bessel_y0
        special_bessel_y1 special_chebyshev_polynomial_t special_chebyshev_polynomial_u
        special_chebyshev_polynomial_v special_chebyshev_polynomial_w special_entr special_erfcx
        special_hermite_polynomial_h special_hermite_polynomial_he special_i0e special_i1 special_i1e
        special_laguerre_polynomial_l special_legendre_polynomial_p special_log_ndtr special_modified_bessel_i0
        special_modified_bessel_i1 special_modified_bessel_k0 special_modified_bessel_k1 special_ndtri
        special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1 special_shifted_chebyshev_polynomial_t
        special_shifted_chebyshev_polynomial_u special_shifted_chebyshev_polynomial_v
        special_shifted_chebyshev_polynomial_w special_spherical_bessel_j0 special_zeta tanh_backward
        threshold_backward
        """,
        admitted=".default",
        only_elements=True,
    ),
    known(
        "elu exp hardtanh leaky_relu neg relu sigmoid silu tanh",
        admitted=".default _.default",
        only_elements=True,
        in_place=True,
    ),
    known(
        """
        elu_backward hardsigmoid_backward hardswish_backward hardtanh_backward log_sigmoid_forward logit_backward
        softplus_backward special_xlog1py
        """,
        admitted=".default",
        only_elements=True,
        rule=as_kernel,
    ),
    known(
        "bitwise_and bitwise_left_shift bitwise_or bitwise_right_shift bitwise_xor clamp_max fmod",
        admitted=".Tensor _.Tensor",
        only_elements=True,
    ),
    known("eq ge gt le lt ne remainder", admitted=".Scalar .Tensor _.Scalar _.Tensor", only_elements=True),
    known(
        "_prelu_kernel_backward glu leaky_relu_backward mish_backward",
        admitted=".default",
        only_elements=True,
        ambiguous=True,
    ),
    known(
        "add sub", admitted=".Scalar .Tensor _.Scalar _.Tensor", only_elements=True, of={".Tensor": {"in_place": True}}
    ),
    known("clamp clamp_min", admitted=".Tensor .default _.Tensor _.default", only_elements=True, in_place=True),
    known("copysign xlogy", admitted=".Tensor _.Tensor", only_elements=True, of={".Tensor": {"rule": as_kernel}}),
    known("conj_physical", admitted="_.default", only_elements=True),
    known(
        "div",
        admitted=".Scalar .Tensor .Tensor_mode .out _.Scalar _.Tensor _.Tensor_mode",
        only_elements=True,
        of={".Scalar .Tensor": {"in_place": True}, ".Tensor_mode": {"rule": as_kernel}},
    ),
    known(
        "floor_divide",
        admitted=".default _.Tensor",
        only_elements=True,
        of={".default": {"rule": as_kernel}, "_.Tensor": {"functional": "floor_divide.default"}},
    ),
    known("frexp", admitted=".Tensor", only_elements=True),
    known("gelu", admitted=".default _.default", only_elements=True, onednn=("bf16", "f16", "f32"), in_place=True),
    known("gelu_backward", admitted=".default", only_elements=True, onednn=("bf16", "f16", "f32")),
    known("glu_backward", admitted=".default", only_elements=True, rule=in_format(None)),
    known("hardswish", admitted=".default _.default", only_elements=True, in_place=True, ambiguous=True),
    known("heaviside", admitted=".default _.default", only_elements=True, alike=("self", "values")),
    known("ldexp", admitted=".Tensor _.default", only_elements=True),
    known("lerp", admitted=".Scalar _.Scalar _.Tensor", only_elements=True),
    known(
        "mul",
        admitted=".Scalar .Tensor .out _.Scalar _.Tensor",
        only_elements=True,
        of={".Scalar .Tensor": {"in_place": True}},
    ),
    known(
        "pow",
        admitted=".Scalar .Tensor_Scalar .Tensor_Tensor _.Scalar _.Tensor",
        only_elements=True,
        of={
            ".Scalar": {"rule": as_kernel},
            "_.Scalar": {"functional": "pow.Tensor_Scalar"},
            "_.Tensor": {"functional": "pow.Tensor_Tensor"},
        },
    ),
    known("round", admitted=".decimals .default _.decimals _.default", only_elements=True),
    known("rsub", admitted=".Scalar .Tensor", only_elements=True),
)
