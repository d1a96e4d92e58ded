"""Norms and attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ...operator import Arg
from .. import rules
from ..facts import ADDS, HALF, admitted, known
from ..layouts import as_kernel

__all__ = ["NORMS"]

_PARAMETERS: Final = ("weight", "bias", "running_mean", "running_var")


def _batch_norm_statistics(args: Mapping[str, Arg]) -> tuple[str, ...]:
    return ("running_mean", "running_var") if args.get("training") else ()


def _all_statistics(args: Mapping[str, Arg]) -> tuple[str, ...]:
    return ("running_mean", "running_var")


NORMS: Final = (
    known("batch_norm_backward", only_elements=True, unread_in_training=("running_mean", "running_var")),
    known("_batch_norm_no_update _native_batch_norm_legit_no_training", kept_varies_in_evaluation=True),
    known("batch_norm_update_stats", hidden_writes=_all_statistics),
    known("_batch_norm_with_update", only_elements=True, normalised=_PARAMETERS),
    known(
        "cudnn_batch_norm miopen_batch_norm",
        hidden_writes=_batch_norm_statistics,
        batch_norm=True,
        kept_varies_in_evaluation=True,
    ),
    admitted("""
        _efficient_attention_forward _flash_attention_forward _weight_norm_interface _weight_norm_interface_backward
        """),
    known("embedding_renorm", only_elements=True),
    admitted("_log_softmax", only_elements=True, ambiguous=True),
    admitted("_log_softmax_backward_data", only_elements=True, rule=as_kernel),
    admitted(
        "native_batch_norm",
        only_elements=True,
        normalised=_PARAMETERS,
        hidden_writes=_batch_norm_statistics,
        batch_norm=True,
        kept_varies_in_evaluation=True,
        rule=rules.batch_norm,
    ),
    admitted(
        "native_batch_norm_backward",
        only_elements=True,
        unread_in_training=("running_mean", "running_var"),
        rule=rules.batch_norm_backward,
    ),
    admitted(
        "_native_batch_norm_legit",
        only_elements=True,
        normalised=_PARAMETERS,
        batch_norm=True,
        kept_varies_in_evaluation=True,
    ),
    known("_native_batch_norm_legit.no_stats", only_elements=True, normalised=_PARAMETERS, batch_norm=True),
    known("_native_batch_norm_legit_functional", label="batch_norm", batch_norm=True),
    admitted("native_group_norm", normalised=("weight", "bias"), rule=rules.with_types(rules.normalised)),
    admitted("native_group_norm_backward", rule=rules.with_types(rules.group_norm_backward)),
    admitted(
        "native_layer_norm", only_elements=True, normalised=("weight", "bias"), rule=rules.with_types(rules.normalised)
    ),
    admitted("native_layer_norm_backward", rule=as_kernel),
    admitted("_safe_softmax _softmax _softmax_backward_data renorm renorm_", only_elements=True),
    known(
        """
        _scaled_dot_product_cudnn_attention_backward _scaled_dot_product_efficient_attention_backward
        _scaled_dot_product_flash_attention_backward
        """,
        nondeterministic=ADDS,
    ),
    known(
        "_scaled_dot_product_flash_attention_for_cpu",
        onednn=HALF,
        own_type="graphir.attention",
        label="scaled_dot_product_attention",
    ),
    known(
        "_scaled_dot_product_flash_attention_for_cpu_backward",
        onednn=HALF,
        own_type="graphir.attention_backward",
        label="scaled_dot_product_attention",
    ),
)
