"""What draws random numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

from ...operator import Arg
from ..facts import admitted, known
from ..layouts import as_kernel, drawn, in_format

__all__ = ["RANDOM"]


def _first_operand(args: Mapping[str, Arg]) -> tuple[str, ...]:
    return ("self",)


def _noise_in_training(args: Mapping[str, Arg]) -> tuple[str, ...]:
    return ("noise",) if args.get("training") else ()


RANDOM: Final = (
    admitted(
        """
        bernoulli cauchy_ exponential_ geometric_ log_normal_ multinomial normal.Tensor_float normal.float_float
        uniform_
        """,
        only_elements=True,
    ),
    known("bernoulli.Tensor cauchy exponential geometric log_normal", only_elements=True, geometry_only=_first_operand),
    admitted(
        "bernoulli.p randint_like randint_like.low_dtype randn_like randn_like.generator",
        only_elements=True,
        geometry_only=_first_operand,
    ),
    admitted("bernoulli_.float", only_elements=True, functional="bernoulli.p"),
    admitted("native_dropout rand rand.generator randint randint.low randn"),
    admitted("native_dropout_backward", only_elements=True, rule=as_kernel),
    admitted("normal.Tensor_Tensor", only_elements=True, rule=in_format(None)),
    admitted("normal_", only_elements=True, functional="normal_functional.default"),
    known("normal_functional rand_like rand_like.generator random random.from random.to", geometry_only=_first_operand),
    known("rrelu_with_noise rrelu_with_noise_backward", only_elements=True),
    known("rrelu_with_noise_functional", geometry_only=_noise_in_training),
    known("_standard_gamma poisson", rule=drawn(torch.contiguous_format)),
    known("uniform", only_elements=True, geometry_only=_first_operand, rule=drawn(torch.preserve_format)),
)
