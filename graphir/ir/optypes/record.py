"""One record for each operator type: what graphir knows of it and its schema does not say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ..operator import Arg
from .sized import SizedOperator

__all__ = ["OperatorType"]


class OperatorType(NamedTuple):
    """What is known of a type. A field at its default says that there is nothing to know.

    Attributes:
        type: such as ``aten.addmm.default``, ``graphir.sgd``, or a user's ``mylib.scale.default``.
        schema: of graphir's own types, in torch's language; of all others torch has it.
        fake: of graphir's own types, what returns tensors like the results from tensors without data.
        registered: a user has registered it.
        hidden_writes: the names of the parameters that it overwrites without declaring it, given the arguments.
        hidden_views: its results alias its first operand without declaring it.
        conjugates: its results are views whose elements are those in memory with another sign. A bit of the tensor says
            so; a copy does not have the bit, and so writes the changed elements.
        unwritten: it makes memory that it does not write.
        only_elements: it reads nothing of its operands' storages but the operands' elements.
        geometry_only: the names of the tensor parameters of which it takes the geometry and not the value, given the
            arguments: it overwrites all of them, or makes new memory like them.
        batch_norm: in training its results do not depend on the running statistics, which some of these types update.
        unread_in_training: the names of tensor parameters that it does not read where its argument ``train`` is true.
        parts_apart: its argument ``output_mask`` says which results it makes, and the first one has the same bits
            whether the others are made in the same call or not, as have the others whether the first one is.
        in_place: the type that takes the same arguments and writes the same bits over the first operand.
        nondeterministic: why the bits of two runs on the same values may differ; empty where they do not.
        strides_vary: the strides of its results are the backend's choice.
        shapes_vary: the shapes of its results are the backend's choice, too.
        kept_varies: the shapes of all its results but the first, which are kept for a backward, are the backend's
            choice.
        kept_varies_in_evaluation: the same, where its argument ``training`` is not true.
        kernel_by_size: which of several kernels computes it, and with that the strides of its results, follows from
            sizes, threads and the machine.
        shaped_in_pieces: the shapes of its results are no polynomials of sizes everywhere.
        reads_rows: of its first operand it reads about as many bytes as it writes.
        joined: generated code makes one call of operators of the type that follow each other.
        flops: of a user's type (all others: :mod:`graphir.analysis.formulas`), the additions and multiplications of a
            call, if those are what it spends its time on.
        scratch: of a user's type, the most bytes that a call holds at once beside operands and results, and has freed
            when it returns; None for operands of which that is not known.
    """

    type: str
    schema: str = ""
    fake: Callable[..., Any] | None = None
    registered: bool = False
    hidden_writes: Callable[[Mapping[str, Arg]], tuple[str, ...]] | None = None
    hidden_views: bool = False
    conjugates: bool = False
    unwritten: bool = False
    only_elements: bool = False
    geometry_only: Callable[[Mapping[str, Arg]], tuple[str, ...]] | None = None
    batch_norm: bool = False
    unread_in_training: tuple[str, ...] = ()
    parts_apart: bool = False
    in_place: str = ""
    nondeterministic: str = ""
    strides_vary: bool = False
    shapes_vary: bool = False
    kept_varies: bool = False
    kept_varies_in_evaluation: bool = False
    kernel_by_size: bool = False
    shaped_in_pieces: bool = False
    reads_rows: bool = False
    joined: bool = False
    flops: Callable[[SizedOperator], int] | None = None
    scratch: Callable[[SizedOperator], int | None] | None = None
