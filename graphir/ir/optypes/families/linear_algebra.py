"""Matrix products, decompositions, distances and Fourier transforms."""

from __future__ import annotations

from typing import Final

from .. import rules
from ..facts import HALF, admitted, known

__all__ = ["LINEAR_ALGEBRA"]


LINEAR_ALGEBRA: Final = (
    admitted(
        """
        _linalg_det _linalg_eigh _linalg_slogdet _linalg_solve_ex _trilinear addr addr_ cholesky cholesky_inverse
        cholesky_solve dist dot linalg_cholesky_ex linalg_householder_product linalg_inv_ex linalg_ldl_factor_ex
        linalg_lu_solve linalg_matrix_exp linalg_pinv.atol_rtol_tensor linalg_solve_triangular linalg_vector_norm
        ormqr trace triangular_solve vdot
        """,
        only_elements=True,
    ),
    admitted("addbmm addbmm_ baddbmm baddbmm_", only_elements=True, onednn=HALF, alike=("self", "batch1", "batch2")),
    admitted("addmm addmm.out addmm_", only_elements=True, onednn=HALF, alike=("self", "mat1", "mat2")),
    known("_addmm_activation", onednn=HALF),
    admitted("addmv addmv_", only_elements=True, alike=("self", "mat", "vec")),
    admitted("bmm mm mm.out", only_elements=True, onednn=HALF, alike=("self", "mat2")),
    known("_cdist_backward linalg_ldl_solve", only_elements=True),
    admitted("_cdist_forward", only_elements=True, alike=("x1", "x2")),
    admitted("_fft_c2c _fft_c2r _fft_r2c", only_elements=True, strides_vary=True),
    admitted("geqrf linalg_lu linalg_lu_factor_ex linalg_qr", only_elements=True, shaped_in_pieces=True),
    admitted("_grouped_mm", rule=rules.grouped_mm),
    admitted("_linalg_check_errors", only_elements=True, checks=True),
    admitted("linalg_cross", only_elements=True, alike=("self", "other")),
    admitted("linalg_eig", only_elements=True, rule=rules.by_column(1)),
    known("linalg_eigvals linalg_eigvalsh linear matmul", composite=True),
    admitted("_linalg_svd", only_elements=True, shaped_in_pieces=True, rule=rules.by_column(0, 2)),
    known("linalg_svdvals", composite=True, shaped_in_pieces=True),
    known("lu_unpack", only_elements=True, shaped_in_pieces=True),
    admitted("mv", only_elements=True, alike=("self", "vec")),
    admitted("outer", composite=True),
    admitted("_pdist_forward linalg_lstsq"),
)
