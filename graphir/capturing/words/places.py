"""Words of refusals: where a step was refused, what a tensor is called, and remedies that several refusals give."""

from __future__ import annotations

import re
from typing import Final

from ...errors import GraphirError
from .libraries import Outside

__all__ = ["DENSE", "READS_DATA", "USE_REENTRANT", "described", "in_short", "module_of", "where"]

READS_DATA: Final = (
    "compute with the tensor instead of its number: no .item(), float(), bool() or `if` on tensors; "
    "to choose by data use torch.where, to raise an error by data torch._assert_async(condition)"
)
"""The remedy where a step reads a tensor's numbers."""

DENSE: Final = Outside(
    "use dense tensors: sparse=False for an embedding; y.index_add(0, rows, values[:, None] * x[columns]) for the "
    "product with a sparse matrix"
)
"""The remedy where a step makes, reads or takes tensors that have no strides."""

USE_REENTRANT: Final = Outside(
    "pass use_reentrant=False to torch.utils.checkpoint.checkpoint; to models of transformers "
    'gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})'
)
"""The remedy for a checkpoint that runs a backward inside of the backward."""


def where(scope: str, line: str = "") -> str:
    """``module 'layer1.0', at models/net.py:42``; ``the model`` for the outermost one."""
    place = {"": "the model", "loss": "the loss function"}.get(scope, f"module {scope!r}")
    return f"{place}, at {line}" if line else place


def module_of(error: GraphirError) -> str:
    """The path of the module in which a step was refused, as :func:`where` says it; empty for the outermost one."""
    found = re.match(r"module '([^']+)'", error.where)
    return found[1] if found else ""


def described(kind: str, name: str) -> str:
    """What a parameter, buffer or input of a step is called: ``buffer 'mean'``, ``argument 'x'``."""
    return f"{'argument' if kind == 'input' else kind} {name!r}"


def in_short(error: Exception) -> str:
    """The error's type, and the first line of its message if there is one."""
    return ": ".join([type(error).__name__, *str(error).splitlines()[:1]])
