"""Whether a program computes at given sizes what eager PyTorch would: some operators follow sizes piece by piece.

A convolution has several backends, and the number of elements, the number of threads, the machine and its libraries
choose one. Some keep the channels last, others don't, and the operators after it follow: a view may become a copy, and
a sum add up in another order. So where the backend lays a result out otherwise than its blob says, the step that was
captured is not the one that eager PyTorch takes.

Other operators give shapes that are no polynomial of sizes, though they are one for the sizes that were captured: a
pool with a stride rounds, a slice ends where the tensor does, a factorisation has as many columns as rows at most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

import torch

from graphir.errors import CoverageError
from graphir.ir.blob import Blob, bound_layout
from graphir.ir.calls import arrange, evaluate, filled, flatten
from graphir.ir.device import Device
from graphir.ir.meta import errors_not_logged, fresh_fake_mode
from graphir.ir.names import base_name
from graphir.ir.operator import Operator
from graphir.ir.opset import overload
from graphir.ir.optypes.table import operator_type
from graphir.ir.program import Program
from graphir.ir.size import Dims
from graphir.ir.symbols import to_torch
from graphir.ir.text import operator_text

from ..machine.surroundings import neutral

__all__ = ["check_layouts"]

_HOST: Final = torch.device("cpu")

_Geometry: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], str]


def check_layouts(program: Program, dims: Dims, places: Mapping[Device, torch.device], threads: int) -> None:
    """Raise where an operator would shape a result otherwise than its blob says, or a convolution on the host would lay
    it out otherwise; nothing is computed.

    Args:
        program: what is to be run.
        dims: the value of each dimension.
        places: the real device of each logical one; the host where one is missing.
        threads: how many threads one kernel may use.

    Raises:
        CoverageError: an operator would. A program that is captured at these sizes, in as many threads and on this
            machine, has the right shapes and layouts.
    """
    seen: set[object] = set()
    blobs = program.step.blobs
    with neutral(threads), fresh_fake_mode(), torch.no_grad(), errors_not_logged():
        for op in program.step.ops:
            on_host = places.get(op.device, _HOST).type == "cpu"
            known = operator_type(op.type)
            if not known.shaped_in_pieces and not (known.kernel_by_size and on_host):
                continue
            declared = [_geometry(blobs[name], dims) for name in (*op.inputs, *op.outputs)]
            key = (op.type, op.operands, op.results, repr(op.args), *declared)
            if key not in seen:
                seen.add(key)
                _check(program, op, dims, declared[: len(op.inputs)], declared[len(op.inputs) :])


def _geometry(blob: Blob, dims: Dims) -> _Geometry:
    """Shape, strides and element type of a lowered or captured blob."""
    return (*bound_layout(blob, dims), str(blob.dtype))


def _check(
    program: Program, op: Operator, dims: Dims, inputs: Sequence[_Geometry], outputs: Sequence[_Geometry]
) -> None:
    """Compare what an operator returns on tensors without data with the blobs of its results."""
    call = arrange(op)
    tensors = [torch.empty_strided(shape, strides, dtype=to_torch(dtype)) for shape, strides, dtype in inputs]
    positional, named = filled(call, tensors, lambda arg: evaluate(arg, dims), _HOST)
    at = ", ".join(f"{base_name(dim)} {value}" for dim, value in dims.items())
    where = f"module {op.module!r}, program {program.name!r}{at and ', at '}{at}"
    try:
        returned = flatten(call, overload(op.type)(*positional, **named))
        for position, tensor in returned.items():
            if tuple(tensor.shape) != outputs[position][0]:
                raise ValueError(
                    f"{op.outputs[position]!r} would have the shape {tuple(tensor.shape)}, in the program it has "
                    f"{outputs[position][0]}"
                )
    except (RuntimeError, ValueError, IndexError) as e:
        raise CoverageError(
            f"{op.type} does not follow the program's sizes here: {str(e).splitlines()[0]}",
            at=operator_text(op, program.step),
            where=where,
            fix="give other sizes, or capture the model at these",
        ) from None
    if not operator_type(op.type).kernel_by_size:
        return
    for position, tensor in returned.items():
        shape, strides, _ = outputs[position]
        if any(n > 1 and ours != theirs for n, ours, theirs in zip(shape, strides, tensor.stride(), strict=True)):
            raise CoverageError(
                f"{op.outputs[position]!r} would have the strides {tensor.stride()}, in the program it has {strides}: "
                f"{op.type} takes another backend here, so eager PyTorch's step may have other bits",
                at=operator_text(op, program.step),
                where=where,
                fix="capture the model at this size, in as many threads (torch.set_num_threads) and on this machine",
            )
