"""Losses."""

from __future__ import annotations

from typing import Final

from ..facts import known
from ..layouts import as_kernel

__all__ = ["LOSSES"]

LOSSES: Final = (
    known(
        """
        binary_cross_entropy_backward huber_loss multilabel_margin_loss_backward nll_loss2d_backward
        nll_loss_backward soft_margin_loss soft_margin_loss_backward
        """,
        admitted=".default",
        only_elements=True,
    ),
    known(
        "binary_cross_entropy_with_logits mse_loss smooth_l1_loss",
        admitted=".default",
        only_elements=True,
        ambiguous=True,
    ),
    known(
        "huber_loss_backward mse_loss_backward smooth_l1_loss_backward",
        admitted=".default",
        only_elements=True,
        rule=as_kernel,
    ),
    known("_ctc_loss_backward", only_elements=True, nondeterministic="adds in no fixed order on CUDA"),
    known("binary_cross_entropy", admitted=".default", only_elements=True, alike=("self", "target")),
    known(
        "multi_margin_loss",
        admitted=".default",
        only_elements=True,
        alike=("self", "weight"),
        index_types=("target", ("i64",)),
    ),
    known("multi_margin_loss_backward", only_elements=True),
    known("multilabel_margin_loss_forward", admitted=".default", only_elements=True, index_types=("target", ("i64",))),
    known(
        "nll_loss2d_forward",
        admitted=".default",
        only_elements=True,
        label="nll_loss2d",
        alike=("self", "weight"),
        index_types=("target", ("i64",)),
    ),
    known(
        "nll_loss_forward",
        admitted=".default",
        only_elements=True,
        label="nll_loss",
        alike=("self", "weight"),
        index_types=("target", ("i64", "u8")),
    ),
)
