"""Matrix products, decompositions, distances and Fourier transforms."""

from __future__ import annotations

from typing import Final

from .. import rules
from ..facts import known

__all__ = ["LINEAR_ALGEBRA"]

LINEAR_ALGEBRA: Final = (
    known(
        """
        _linalg_det _linalg_eigh _linalg_slogdet _linalg_solve_ex _trilinear cholesky cholesky_inverse
        cholesky_solve dist dot linalg_cholesky_ex linalg_householder_product linalg_inv_ex linalg_ldl_factor_ex
        linalg_lu_solve linalg_matrix_exp linalg_solve_triangular linalg_vector_norm ormqr trace triangular_solve
        vdot
        """,
        admitted=".default",
        only_elements=True,
    ),
    known(
        "geqrf linalg_lu linalg_lu_factor_ex linalg_qr", admitted=".default", only_elements=True, shaped_in_pieces=True
    ),
    known("linalg_eigvals linalg_eigvalsh linear matmul", composite=True),
    known("_fft_c2c _fft_c2r _fft_r2c", admitted=".default", only_elements=True, strides_vary=True),
    known("_cdist_backward linalg_ldl_solve", only_elements=True),
    known("_pdist_forward linalg_lstsq", admitted=".default"),
    known(
        "addbmm baddbmm",
        admitted=".default _.default",
        only_elements=True,
        onednn=("bf16", "f16"),
        alike=("self", "batch1", "batch2"),
    ),
    known("_addmm_activation", onednn=("bf16", "f16")),
    known("_cdist_forward", admitted=".default", only_elements=True, alike=("x1", "x2")),
    known("_grouped_mm", admitted=".default", rule=rules.grouped_mm),
    known("_linalg_check_errors", admitted=".default", only_elements=True, checks=True),
    known("_linalg_svd", admitted=".default", only_elements=True, shaped_in_pieces=True, rule=rules.by_column(0, 2)),
    known(
        "addmm",
        admitted=".default .out _.default",
        only_elements=True,
        onednn=("bf16", "f16"),
        alike=("self", "mat1", "mat2"),
    ),
    known("addmv", admitted=".default _.default", only_elements=True, alike=("self", "mat", "vec")),
    known("addr", admitted=".default _.default", only_elements=True),
    known("bmm", admitted=".default", only_elements=True, onednn=("bf16", "f16"), alike=("self", "mat2")),
    known("linalg_cross", admitted=".default", only_elements=True, alike=("self", "other")),
    known("linalg_eig", admitted=".default", only_elements=True, rule=rules.by_column(1)),
    known("linalg_pinv", admitted=".atol_rtol_tensor", only_elements=True),
    known("linalg_svdvals", composite=True, shaped_in_pieces=True),
    known("lu_unpack", only_elements=True, shaped_in_pieces=True),
    known("mm", admitted=".default .out", only_elements=True, onednn=("bf16", "f16"), alike=("self", "mat2")),
    known("mv", admitted=".default", only_elements=True, alike=("self", "vec")),
    known("outer", admitted=".default", composite=True),
)
