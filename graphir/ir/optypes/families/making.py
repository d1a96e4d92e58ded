"""What makes memory, copies it, or moves elements."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ...operator import Arg
from ..facts import known

__all__ = ["MAKING"]


def _first_operand(args: Mapping[str, Arg]) -> tuple[str, ...]:
    return ("self",)


MAKING: Final = (
    known("block_diag cat clone diag_embed flip repeat roll rot90 stack", admitted=".default", only_elements=True),
    known(
        "empty_like full_like new_empty new_full new_ones new_zeros ones_like zeros_like",
        admitted=".default",
        only_elements=True,
        geometry_only=_first_operand,
    ),
    known("_efficientzerotensor empty_permuted empty_strided full ones scalar_tensor zeros", admitted=".default"),
    known("data resize set set_data _resize_output_ resize_as_", rebinds=True),
    known("copy zero", admitted=".default _.default", only_elements=True, geometry_only=_first_operand),
    known(
        "linspace logspace",
        admitted=".Scalar_Tensor .Tensor_Scalar .Tensor_Tensor .default",
        only_elements=True,
        bounded=True,
    ),
    known("tril triu", admitted=".default _.default", only_elements=True),
    known("_assert_async", admitted=".default .msg", checks=True),
    known("_to_copy", admitted=".default", only_elements=True, label="to"),
    known("arange", admitted=".default .start .start_step", of={".start_step": {"shaped_in_pieces": True}}),
    known("complex", admitted=".default", only_elements=True, alike=("real", "imag")),
    known("empty", admitted=".memory_format"),
    known("eye", admitted=".default .m"),
    known(
        "fill",
        admitted=".Scalar .Tensor _.Scalar _.Tensor",
        only_elements=True,
        of={".Scalar .Tensor": {"geometry_only": _first_operand}},
    ),
    known("new_empty_strided", admitted=".default", geometry_only=_first_operand),
    known("polar", admitted=".default", only_elements=True, alike=("abs", "angle")),
)
