"""Reductions, scans, sorting and counting."""

from __future__ import annotations

from typing import Final

from ..facts import known

__all__ = ["REDUCTIONS"]

REDUCTIONS: Final = (
    known(
        """
        _histogramdd_bin_edges _histogramdd_from_bin_cts _histogramdd_from_bin_tensors _unique _unique2 amin
        aminmax argmax argmin cummax cummin kthvalue logcumsumexp logsumexp mode nansum topk unique_consecutive
        """,
        admitted=".default",
        only_elements=True,
    ),
    known("max mean median min nanmedian", admitted=".default .dim", only_elements=True),
    known("std std_mean var var_mean", admitted=".correction", only_elements=True),
    known("_amp_foreach_non_finite_check_and_unscale hash_tensor", admitted=".default"),
    known("all any", admitted=".default .dim .dims", only_elements=True),
    known("_amp_update_scale", admitted="_.default"),
    known("amax", admitted=".default .out", only_elements=True),
    known(
        "bincount",
        admitted=".default",
        only_elements=True,
        nondeterministic="adds in no fixed order on CUDA where there are weights",
    ),
    known("cumprod", admitted=".default _.default", only_elements=True),
    known(
        "cumsum", admitted=".default _.default", only_elements=True, nondeterministic="sums in no fixed order on CUDA"
    ),
    known("histc", admitted=".default", only_elements=True, nondeterministic="adds in no fixed order on CUDA"),
    known("histogram", admitted=".bin_ct .bins_tensor", only_elements=True),
    known("norm", admitted=".ScalarOpt_dim", only_elements=True),
    known("prod", admitted=".default .dim_int", only_elements=True),
    known("sort", admitted=".default .stable", only_elements=True),
    known("sum", admitted=".default .dim_IntList", only_elements=True),
)
