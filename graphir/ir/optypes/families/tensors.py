"""Views, reductions, scans and sorting, and what makes or moves tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ...operator import Arg
from .. import rules
from ..facts import ADDS, admitted, known

__all__ = ["TENSORS"]


def _first_operand(args: Mapping[str, Arg]) -> tuple[str, ...]:
    return ("self",)


TENSORS: Final = (
    admitted("""
        _amp_foreach_non_finite_check_and_unscale _amp_update_scale_ _chunk_cat _efficientzerotensor arange
        arange.start as_strided as_strided_ as_strided_copy empty.memory_format empty_permuted empty_strided eye eye.m
        full hash_tensor ones scalar_tensor zeros
        """),
    admitted(
        """
        _histogramdd_bin_edges _histogramdd_from_bin_cts _histogramdd_from_bin_tensors _unique _unique2 alias
        alias_copy all all.dim all.dims amax amax.out amin aminmax any any.dim any.dims argmax argmin block_diag cat
        clone copy_ cummax cummin cumprod cumprod_ cumsum_ detach diag_embed diagonal_copy expand expand_copy
        fill_.Scalar fill_.Tensor flip histogram.bin_ct histogram.bins_tensor kthvalue logcumsumexp logsumexp max
        max.dim mean mean.dim median median.dim min min.dim mode nanmedian nanmedian.dim nansum narrow_copy
        norm.ScalarOpt_dim permute permute_copy prod prod.dim_int repeat roll rot90 select.int sort sort.stable
        split_with_sizes split_with_sizes_copy squeeze squeeze.dim squeeze.dims squeeze_ squeeze_.dim squeeze_.dims
        squeeze_copy squeeze_copy.dim stack std.correction std_mean.correction sum sum.dim_IntList t t_ t_copy topk
        transpose.int transpose_copy.int tril tril_ triu triu_ unbind.int unbind_copy.int unfold_copy
        unique_consecutive unsqueeze unsqueeze_ unsqueeze_copy var.correction var_mean.correction view_as_complex
        view_as_real view_copy zero_
        """,
        only_elements=True,
    ),
    admitted("arange.start_step", shaped_in_pieces=True),
    admitted("_assert_async _assert_async.msg", checks=True),
    admitted("bincount", only_elements=True, nondeterministic="adds in no fixed order on CUDA where there are weights"),
    admitted("complex", only_elements=True, alike=("real", "imag")),
    admitted("_conj", only_elements=True, conjugates=True),
    admitted(
        """
        copy empty_like fill.Scalar fill.Tensor full_like new_empty new_full new_ones new_zeros ones_like zero
        zeros_like
        """,
        only_elements=True,
        geometry_only=_first_operand,
    ),
    admitted("cumsum", only_elements=True, nondeterministic="sums in no fixed order on CUDA"),
    known("data resize set set_data _resize_output_ resize_as_", rebinds=True),
    admitted("diagonal slice.Tensor split.Tensor unfold", only_elements=True, shaped_in_pieces=True),
    admitted("histc", only_elements=True, nondeterministic=ADDS),
    known("lift unsafe_split_with_sizes", hidden_views=True),
    admitted("lift_fresh", only_elements=True, label="constant"),
    admitted(
        """
        linspace.Scalar_Tensor linspace.Tensor_Scalar linspace.Tensor_Tensor linspace logspace.Scalar_Tensor
        logspace.Tensor_Scalar logspace.Tensor_Tensor logspace
        """,
        only_elements=True,
        bounded=True,
    ),
    admitted("_neg_view", conjugates=True),
    admitted("new_empty_strided", geometry_only=_first_operand),
    admitted("polar", only_elements=True, alike=("abs", "angle")),
    admitted("_to_copy", only_elements=True, label="to"),
    admitted("transpose_", only_elements=True, functional="transpose.int"),
    known("unsafe_chunk", composite=True, hidden_views=True),
    admitted("unsafe_split.Tensor", only_elements=True, label="split", hidden_views=True, shaped_in_pieces=True),
    admitted("_unsafe_view", only_elements=True, label="view", hidden_views=True, rule=rules.viewed),
    admitted("view", only_elements=True, rule=rules.viewed),
)
