"""Norms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ...operator import Arg
from .. import rules
from ..facts import known
from ..layouts import as_kernel

__all__ = ["NORMS"]


def _batch_norm_statistics(args: Mapping[str, Arg]) -> tuple[str, ...]:
    return ("running_mean", "running_var") if args.get("training") else ()


def _all_statistics(args: Mapping[str, Arg]) -> tuple[str, ...]:
    return ("running_mean", "running_var")


NORMS: Final = (
    known("_batch_norm_no_update _native_batch_norm_legit_no_training", kept_varies_in_evaluation=True),
    known("_weight_norm_interface _weight_norm_interface_backward", admitted=".default"),
    known(
        "cudnn_batch_norm miopen_batch_norm",
        hidden_writes=_batch_norm_statistics,
        batch_norm=True,
        kept_varies_in_evaluation=True,
    ),
    known("_batch_norm_with_update", only_elements=True, normalised=("weight", "bias", "running_mean", "running_var")),
    known(
        "_native_batch_norm_legit",
        admitted=".default",
        only_elements=True,
        normalised=("weight", "bias", "running_mean", "running_var"),
        of={".default": {"batch_norm": True, "kept_varies_in_evaluation": True}, ".no_stats": {"batch_norm": True}},
    ),
    known("_native_batch_norm_legit_functional", label="batch_norm", batch_norm=True),
    known("batch_norm_backward", only_elements=True, unread_in_training=("running_mean", "running_var")),
    known("batch_norm_update_stats", hidden_writes=_all_statistics),
    known("embedding_renorm", only_elements=True),
    known(
        "native_batch_norm",
        admitted=".default",
        only_elements=True,
        normalised=("weight", "bias", "running_mean", "running_var"),
        hidden_writes=_batch_norm_statistics,
        batch_norm=True,
        kept_varies_in_evaluation=True,
        rule=rules.batch_norm,
    ),
    known(
        "native_batch_norm_backward",
        admitted=".default",
        only_elements=True,
        unread_in_training=("running_mean", "running_var"),
        rule=rules.batch_norm_backward,
    ),
    known(
        "native_group_norm", admitted=".default", normalised=("weight", "bias"), rule=rules.with_types(rules.normalised)
    ),
    known("native_group_norm_backward", admitted=".default", rule=rules.with_types(rules.group_norm_backward)),
    known(
        "native_layer_norm",
        admitted=".default",
        only_elements=True,
        normalised=("weight", "bias"),
        rule=rules.with_types(rules.normalised),
    ),
    known("native_layer_norm_backward", admitted=".default", rule=as_kernel),
    known("renorm", admitted=".default _.default", only_elements=True),
)
