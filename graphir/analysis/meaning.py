"""What an operator computes, however it is called and wherever it runs: what two programs are compared by.

An in-place form computes what its functional operator does; a batch norm in training computes its results without the
running statistics that it updates; what an imported operator says of devices, of the order of execution and of its own
name is no part of its meaning.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache, lru_cache
from typing import Any, Final

from ..errors import GraphirError
from ..ir.operator import Arg, map_arg
from ..ir.opset import NAMESPACES, overload, signature
from ..ir.size import Polynomial

__all__ = [
    "BATCH_NORM",
    "IGNORES_FIRST",
    "canonical_type",
    "frozen",
    "is_ordered",
    "kernel_family",
    "meaning_of_text",
]

IGNORES_FIRST: Final = frozenset(
    {
        "aten.copy.default",
        "aten.fill.Scalar",
        "aten.fill.Tensor",
        "aten.zero.default",
        "aten.zeros_like.default",
        "aten.ones_like.default",
        "aten.full_like.default",
        "aten.rand_like.default",
        "aten.randn_like.default",
        "aten.new_zeros.default",
        "aten.new_ones.default",
        "aten.new_full.default",
        "aten.bernoulli.p",
        "aten.bernoulli.float",
        "aten.uniform.default",
        "aten.normal_functional.default",
    }
)
"""Types that take only the geometry of their first operand, not its value."""

BATCH_NORM: Final = frozenset(
    {
        "aten.native_batch_norm.default",
        "aten._native_batch_norm_legit.default",
        "aten._native_batch_norm_legit.no_stats",
        "aten._native_batch_norm_legit_functional.default",
        "aten.cudnn_batch_norm.default",
        "aten.miopen_batch_norm.default",
    }
)
"""Types whose results in training do not depend on the running statistics that some of them update."""

_ORDERED_NAMES: Final = """
    AtomicAppend AtomicFetchAdd AtomicFetchAdd64 Barrier CheckCounterDone CheckDatasetConsistency Checkpoint
    CloseBlobsQueue CloseRebatchingQueue CountDown CountUp CreateDB CreateTextFileReader CreateTreeCursor DBExists
    DequeueBlobs DequeueRebatchingQueue EnqueueBlobs EnqueueRebatchingQueue FileStoreHandlerCreate HTTPDownload
    ImageInput IndexFreeze IndexGet IndexLoad IndexStore Load Print Python PythonDLPack RandomCorruption ReadNextBatch
    ReadRandomBatch RedisStoreHandlerCreate ResetCounter ResetCursor RetrieveCount SafeDequeueBlobs SafeEnqueueBlobs
    Save Snapshot SortAndShuffle StatRegistryExport StatRegistryUpdate StoreAdd StoreGet StoreSet StoreWait
    TensorProtosDBInput TextFileReaderRead TimerBegin TimerEnd TimerGet TimerGetAndEnd VideoInput
    WeightedSampleDequeueBlobs
"""
_ORDERED: Final = frozenset(_ORDERED_NAMES.split())
"""Caffe2's types that take from or add to what no blob holds: queues, readers, counters, files, Python. What they do
follows from all such calls before, so that none may be left out, put elsewhere or made twice (Caffe2's operator
registry, ``caffe2/operators``, ``caffe2/queue``, ``caffe2/db``)."""


def is_ordered(type: str, proto: str) -> bool:
    """Whether what an operator does follows from other calls before; one with nets in its arguments, from theirs."""
    return type in _ORDERED or ("op {" in proto and any(f'type: "{inner}"' in proto for inner in _ORDERED))


@cache
def canonical_type(type: str) -> str:
    """The functional operator that computes what *type* does: ``aten.relu.default`` for ``aten.relu_.default``."""
    namespace, _, rest = type.partition(".")
    name, _, variant = rest.partition(".")
    if namespace not in NAMESPACES or not name.endswith("_") or name.endswith("__"):
        return type
    functional = f"{namespace}.{name[:-1]}.{variant}"
    try:
        overload(functional)
    except GraphirError:
        return type
    ours, theirs = signature(type).params, signature(functional).params
    same = [(p.name, p.type) for p in ours] == [(p.name, p.type) for p in theirs]
    return functional if same else type


def kernel_family(type: str) -> str:
    """Which of the kernels that compute the same function, in bits of their own, a batch norm's type names."""
    name = type.split(".")[1]
    return name.partition("_")[0] if name.startswith(("cudnn", "miopen")) else "native"


def frozen(arg: Arg) -> Any:
    """An argument as a key that tells apart whatever gives other bits: 1 from 1.0, 0.0 from -0.0."""
    return map_arg(arg, _told_apart)


def _told_apart(scalar: Any) -> Any:
    if isinstance(scalar, Polynomial):
        return ("size", scalar)
    return (type(scalar).__name__, repr(scalar) if isinstance(scalar, float) else scalar)


_TOKEN: Final = re.compile(r'"(?:[^"\\]|\\.)*"|\'(?:[^\'\\]|\\.)*\'|[{}<>:;,\[\]]|[^\s{}<>:;,\[\]"\']+|["\']')
_PLACE: Final = frozenset({"device_type", "device_id", "control_input"})
"""Fields that say where an operator runs, or after what."""


@lru_cache(maxsize=4096)
def meaning_of_text(proto: str) -> str:
    """What the text of an ``OperatorDef`` says of what is computed, nested nets included: not where, nor after what.

    Text inside of strings stands as it is: it is an argument, whatever it looks like.
    """
    kept: list[str] = []
    tokens = iter(_TOKEN.findall(proto))
    for token in tokens:
        if token in _PLACE:
            _skip_value(tokens)
        elif token == "}" and kept[-2:] == ["device_option", "{"]:
            del kept[-2:]
        else:
            kept.append(token)
    if kept[:3] == ["name", ":", '""']:
        del kept[:3]
    return " ".join(kept)


def _skip_value(tokens: Iterator[str]) -> None:
    """Pass over a field's colon and its scalar."""
    if next(tokens, "") == ":":
        next(tokens, "")
