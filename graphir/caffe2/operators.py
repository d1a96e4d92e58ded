"""What is known of Caffe2's operator types: which draw random numbers, and to which phase of a step they belong."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Final

from ..ir.names import prefix_of
from ..ir.operator import Arg, Phase

__all__ = ["is_random", "phase_of"]

_RANDOM: Final = frozenset(
    {
        "Float16UniformFill",
        "FloatToFusedRandRowwiseQuantized",
        "GaussianFill",
        "MSRAFill",
        "SparseDropoutWithReplacement",
        "UniformFill",
        "UniformIntFill",
        "UniqueUniformFill",
        "WeightedSample",
        "XavierFill",
    }
)

_REDUCTIONS: Final = frozenset({"Allgather", "Allreduce", "Barrier", "Broadcast", "Reduce", "ReduceScatter"})

_UPDATES: Final = frozenset(
    {
        "Adadelta",
        "Adagrad",
        "Adam",
        "AtomicIter",
        "FP16MomentumSGDUpdate",
        "FP32MomentumSGDUpdate",
        "Ftrl",
        "GFtrl",
        "Iter",
        "Lars",
        "LearningRate",
        "LearningRateAdaption",
        "MomentumSGD",
        "MomentumSGDUpdate",
        "RmsProp",
        "RowWiseSparseAdam",
        "SparseAdadelta",
        "SparseAdam",
        "SparseFtrl",
        "SparseMomentumSGDUpdate",
        "SparseStorm",
        "SparseWngrad",
        "Storm",
        "WeightScale",
        "Wngrad",
        "YellowFin",
    }
)

_UPDATE_FAMILIES: Final = ("RowWiseSparseAdagrad", "SparseAdagrad")
"""These and what they are fused with."""

_UPDATES_IN_PLACE: Final = frozenset({"ScatterWeightedSum", "WeightedSum"})
"""Plain SGD, where they overwrite their first input."""


def is_random(type: str, args: Mapping[str, Arg]) -> bool:
    """Whether an operator draws random numbers; ``Dropout`` does in training."""
    return type in _RANDOM or (type == "Dropout" and not args.get("is_test", 0))


def phase_of(
    type: str, inputs: Sequence[str], outputs: Sequence[str], is_gradient: bool, gradients: Container[str]
) -> Phase:
    """The phase of an operator of a step, by this rule:

    1. *update*: optimizers, learning rates and iteration counters, by their type; a weighted sum in place.
    2. *backward*: what Caffe2 marks as a gradient operator.
    3. *reduce*: collectives, by their type; what reads a gradient and has operands of several replicas.
    4. *backward*: what else reads a gradient, and what makes a blob called ``…_grad``.
    5. *forward*: all else.

    Args:
        type: of the operator.
        inputs: the blobs that it reads.
        outputs: the blobs that it writes.
        is_gradient: Caffe2's ``is_gradient_op``.
        gradients: the blobs that operators of the phases backward and reduce have made so far.
    """
    if type in _UPDATES or type.startswith(_UPDATE_FAMILIES):
        return "update"
    if type in _UPDATES_IN_PLACE and outputs and inputs and outputs[0] == inputs[0]:
        return "update"
    if is_gradient:
        return "backward"
    if type in _REDUCTIONS or type.startswith("NCCL"):
        return "reduce"
    if any(name in gradients for name in inputs):
        return "reduce" if len({prefix_of(name) for name in (*inputs, *outputs)}) > 1 else "backward"
    return "backward" if any(name.endswith("_grad") for name in outputs) else "forward"
