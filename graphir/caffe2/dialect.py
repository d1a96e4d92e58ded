"""Caffe2's dialect: what its operators need where, and what they say beside the fields of an operator."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Final

from ..errors import GraphirError
from ..ir.blob import Blob
from ..ir.device import Device
from ..ir.dialect import Dialect, HostOperands, register_dialect
from ..ir.operator import Operator

__all__ = ["CAFFE2", "IN_PLACE", "counts_unseen", "meaning_of_text", "mentioned"]

_HOST: Final = {
    "Adam": HostOperands(inputs=(5,)),
    "AtomicIter": HostOperands(inputs=(0, 1), outputs=(0,)),
    "Concat": HostOperands(outputs=(1,)),
    "CopyCPUToGPU": HostOperands(inputs=None),
    "CopyFromCPUInput": HostOperands(inputs=None),
    "CopyGPUToCPU": HostOperands(outputs=None),
    "EnsureCPUOutput": HostOperands(outputs=None),
    "Iter": HostOperands(inputs=(0,), outputs=(0,)),
    "LearningRate": HostOperands(inputs=(0,)),
    "Reshape": HostOperands(inputs=(1,), outputs=(1,)),
    "RowWiseSparseAdam": HostOperands(inputs=(6,)),
    "SparseAdam": HostOperands(inputs=(6,)),
    "Split": HostOperands(inputs=(1,)),
    "SplitByLengths": HostOperands(inputs=(1,)),
    "WeightScale": HostOperands(inputs=(1,)),
}
"""What Caffe2's device inference says, and for ``Iter``, ``AtomicIter`` and ``Reshape``, for which it says nothing,
what their kernels do."""

_COLLECTIVES: Final = frozenset({"NCCLAllGather", "NCCLAllreduce", "NCCLBroadcast", "NCCLReduce", "NCCLReduceScatter"})

_GPUS: Final = frozenset({"gpu", "hip"})

_FIRST: Final = ((0, 0),)
_SECOND: Final = ((1, 0),)
_EITHER: Final = ((0, 0), (1, 0))

IN_PLACE: Final[Mapping[str, tuple[tuple[int, int], ...]]] = {
    "Adadelta": ((0, 0), (1, 1), (2, 2)),
    "Adagrad": ((0, 0), (1, 1)),
    "Adam": ((0, 0), (1, 1), (2, 2)),
    "Add": _EITHER,
    "AtomicIter": _SECOND,
    "ConstantFill": _FIRST,
    "Dropout": _FIRST,
    "DropoutGrad": _FIRST,
    "Ftrl": ((0, 0), (1, 1)),
    "GaussianFill": _FIRST,
    "Iter": _FIRST,
    "MSRAFill": _FIRST,
    "MomentumSGDUpdate": ((0, 0), (1, 1), (3, 2)),
    "Mul": _EITHER,
    "Relu": _FIRST,
    "ReluGradient": _SECOND,
    "Scale": _FIRST,
    "RmsProp": ((0, 0), (1, 1), (2, 2)),
    "RowWiseSparseAdagrad": ((0, 0), (1, 1)),
    "RowWiseSparseAdam": ((0, 0), (1, 1), (2, 2)),
    "ScatterWeightedSum": _FIRST,
    "Sigmoid": _FIRST,
    "SigmoidGradient": _SECOND,
    "SparseAdadelta": ((0, 0), (1, 1), (2, 2)),
    "SparseAdagrad": ((0, 0), (1, 1)),
    "SparseAdam": ((0, 0), (1, 1), (2, 2)),
    "SparseFtrl": ((0, 0), (1, 1)),
    "SparseMomentumSGDUpdate": ((1, 1), (3, 2)),
    "SparseStorm": ((0, 0), (1, 1), (2, 2)),
    "SparseWngrad": ((0, 0), (1, 1)),
    "SpatialBN": ((0, 0), (3, 1), (4, 2), (5, 3), (6, 4)),
    "SpatialBNGradient": ((5, 1), (6, 2)),
    "StopGradient": _FIRST,
    "Storm": ((0, 0), (1, 1), (2, 2)),
    "Sum": _FIRST,
    "Tanh": _FIRST,
    "TanhGradient": _SECOND,
    "UniformFill": _FIRST,
    "UniformIntFill": _FIRST,
    "WeightedSum": _FIRST,
    "Wngrad": ((0, 0), (1, 1)),
    "XavierFill": _FIRST,
}
"""The (input, output) positions at which Caffe2's operator schemas allow (or demand) one name for both. A type that is
not here is not put in place; what a net has in place stays so. ``NCCLAllreduce`` allows it for each output and the
input at the same position."""

_ALIASES: Final = frozenset({"Alias", "AliasWithName"})

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
"""Types that take from or add to what no blob holds: queues, readers, counters, files, Python. What they do follows
from all such calls before, so that none may be left out, put elsewhere or made twice (Caffe2's operator registry,
``caffe2/operators``, ``caffe2/queue``, ``caffe2/db``)."""


class _Caffe2(Dialect):
    """Caffe2's answers. What an operator says beside its fields is the text of an ``OperatorDef``, ``op.proto``."""

    def copy(self, source: Blob, target: Blob) -> tuple[str, Device]:
        a, b = source.device, target.device
        if a.kind in _GPUS and b.kind in _GPUS:
            return "Copy", b
        if a.is_host and b.kind in _GPUS:
            return "CopyCPUToGPU", b
        if a.kind in _GPUS and b.is_host:
            return "CopyGPUToCPU", a
        raise GraphirError(
            f"nothing copies {source.name!r} from {a} to {b}",
            fix="Caffe2 has copies between gpu, hip and cpu; put the operators on these",
        )

    def copies_from(self, memory: Device, device: Device) -> bool:
        return memory.is_host is device.is_host

    def mentions(self, op: Operator) -> tuple[str, ...]:
        """Also the counter of an ``Iter`` that reads what it wrote a step before."""
        return (*(mentioned(op.proto) if op.proto else ()), *(op.outputs if counts_unseen(op) else ()))

    def nested(self, op: Operator) -> tuple[str, ...]:
        return mentioned(op.proto) if _has_nets(op) else ()

    def meaning(self, op: Operator) -> str:
        return meaning_of_text(op.proto)

    def is_ordered(self, op: Operator) -> bool:
        """An operator with nets in its arguments is, if one of theirs is; so is a counter without an input."""
        if op.type in _ORDERED or counts_unseen(op):
            return True
        return _has_nets(op) and any(f'type: "{inner}"' in op.proto for inner in _ORDERED)

    def in_place(self, op: Operator) -> tuple[tuple[int, int], ...]:
        if op.type == "NCCLAllreduce":
            return tuple([(k, k) for k in range(min(len(op.inputs), len(op.outputs)))])
        positions = IN_PLACE.get(op.type, ())
        return tuple([(i, o) for i, o in positions if i < len(op.inputs) and o < len(op.outputs)])

    def is_alias(self, op: Operator) -> bool:
        return op.type in _ALIASES

    def is_gradient(self, name: str) -> bool:
        return name.endswith("_grad")

    def infers(self, type: str) -> bool:
        """Nothing of Caffe2's types, its ``Copy`` included; a type with a dot is torch's, and no file can hold it."""
        return "." in type


def counts_unseen(op: Operator) -> bool:
    """Whether an operator is an ``Iter`` of old nets: without an input, it counts on from what its output holds."""
    return op.type == "Iter" and not op.inputs and bool(op.outputs)


def _has_nets(op: Operator) -> bool:
    return "op {" in op.proto


_MENTION: Final = re.compile(
    r'\b(?:control_input|input|output|external_input|external_output|s|strings): "((?:[^"\\]|\\.)*)"'
)


@lru_cache(maxsize=4096)
def mentioned(proto: str) -> tuple[str, ...]:
    """What the text of an ``OperatorDef`` may name beside operands: control inputs, and the blobs of nested nets."""
    return tuple(dict.fromkeys(_MENTION.findall(proto))) if '"' in proto else ()


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


CAFFE2: Final = register_dialect(
    _Caffe2(
        "caffe2",
        workspace=True,
        copies=frozenset({"Copy", "CopyCPUToGPU", "CopyGPUToCPU", "CopyFromCPUInput", "EnsureCPUOutput"}),
        host=_HOST,
        stays=_COLLECTIVES | {"Free"},
        host_scalars=False,
        translation="caffe2.lower(program) translates Caffe2's to them",
    )
)
