"""What draws random numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

from ...operator import Arg
from ..facts import known
from ..layouts import as_kernel, drawn, in_format

__all__ = ["RANDOM"]


def _first_operand(args: Mapping[str, Arg]) -> tuple[str, ...]:
    return ("self",)


def _noise_in_training(args: Mapping[str, Arg]) -> tuple[str, ...]:
    return ("noise",) if args.get("training") else ()


RANDOM: Final = (
    known(
        "cauchy exponential geometric log_normal",
        admitted="_.default",
        only_elements=True,
        geometry_only=_first_operand,
    ),
    known("_standard_gamma poisson", rule=drawn(torch.contiguous_format)),
    known("native_dropout randn", admitted=".default"),
    known("rrelu_with_noise rrelu_with_noise_backward", only_elements=True),
    known(
        "bernoulli",
        admitted=".default .p _.float",
        only_elements=True,
        of={".Tensor .p": {"geometry_only": _first_operand}, "_.float": {"functional": "bernoulli.p"}},
    ),
    known("multinomial", admitted=".default", only_elements=True),
    known("native_dropout_backward", admitted=".default", only_elements=True, rule=as_kernel),
    known(
        "normal",
        admitted=".Tensor_Tensor .Tensor_float .float_float _.default",
        only_elements=True,
        of={".Tensor_Tensor": {"rule": in_format(None)}, "_.default": {"functional": "normal_functional.default"}},
    ),
    known("normal_functional", geometry_only=_first_operand),
    known("rand", admitted=".default .generator"),
    known("rand_like", of={".default .generator": {"geometry_only": _first_operand}}),
    known("randint", admitted=".default .low"),
    known(
        "randint_like",
        admitted=".default .low_dtype",
        only_elements=True,
        of={".default .low_dtype": {"geometry_only": _first_operand}},
    ),
    known(
        "randn_like",
        admitted=".default .generator",
        only_elements=True,
        of={".default .generator": {"geometry_only": _first_operand}},
    ),
    known("random", of={".default .from .to": {"geometry_only": _first_operand}}),
    known("rrelu_with_noise_functional", geometry_only=_noise_in_training),
    known(
        "uniform",
        admitted="_.default",
        only_elements=True,
        geometry_only=_first_operand,
        rule=drawn(torch.preserve_format),
    ),
)
