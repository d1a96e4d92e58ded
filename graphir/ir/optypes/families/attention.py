"""Attention and softmax."""

from __future__ import annotations

from typing import Final

from ..facts import known
from ..layouts import as_kernel

__all__ = ["ATTENTION"]

ATTENTION: Final = (
    known("_safe_softmax _softmax _softmax_backward_data", admitted=".default", only_elements=True),
    known(
        """
        _scaled_dot_product_cudnn_attention_backward _scaled_dot_product_efficient_attention_backward
        _scaled_dot_product_flash_attention_backward
        """,
        nondeterministic="adds in no fixed order on CUDA",
    ),
    known("_efficient_attention_forward _flash_attention_forward", admitted=".default"),
    known("_log_softmax", admitted=".default", only_elements=True, ambiguous=True),
    known("_log_softmax_backward_data", admitted=".default", only_elements=True, rule=as_kernel),
    known(
        "_scaled_dot_product_flash_attention_for_cpu",
        onednn=("bf16", "f16"),
        own_type="graphir.attention",
        label="scaled_dot_product_attention",
    ),
    known(
        "_scaled_dot_product_flash_attention_for_cpu_backward",
        onednn=("bf16", "f16"),
        own_type="graphir.attention_backward",
        label="scaled_dot_product_attention",
    ),
)
