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
        only_elements: it reads nothing of its operands' storages but the operands' elements. A view has elements, and
            between and around them its storage has others. Most kernels address only the elements. Some reach further:
            ``as_strided_copy`` by its arguments, and kernels that take an operand for contiguous without asking, as
            ``native_layer_norm_backward`` does with the statistics. Where a part of a storage is copied to another
            device, only the elements arrive. So an operator of another type is given copies of whole storages, and
            certificates number its operands by their storages. The types were found by running torch's own samples of
            all operators, and the training steps of tests/zoo, on operands with gaps, once with one filling of the gaps
            and once with another: ``python tests/bench elements`` does it again. Types that rearrange storages, and
            types that neither of these called, are left out.
        geometry_only: the names of the tensor parameters of which it takes the geometry and not the value, given the
            arguments: it overwrites all of them, or makes new memory like them.
        batch_norm: in training its results do not depend on the running statistics, which some of these types update.
        unread_in_training: the names of tensor parameters that it does not read where its argument ``train`` is true.
        parts_apart: its results may be computed in separate calls, by ``output_mask``, without changing a bit: every
            backend computes the gradient of the input by one kernel and those of weight and bias by others. Norms make
            all of them in one; their parts were equal wherever tried, and together take half as long again.
        in_place: the type that takes the same arguments and writes the same bits over the first operand.
        functional: of a type that overwrites its first operand, the one that returns what it writes, where its name
            has more than an underscore less.
        label: its name as users know it, where that does not follow from torch's.
        own_type: of an operator of the CPU alone, graphir's own type that does the same on any device, and takes its
            tensors in the same order. A dropout probability, which those kernels take only as 0, is left out.
        composite: a program may name it, though torch makes it of others. But for ``unsafe_chunk`` such types make new
            memory, whatever they consist of.
        checks: it returns nothing, and raises where its operand says that something is wrong.
        rebinds: it exchanges a tensor's storage or changes its size.
        bounded: its tensors bound the numbers that it makes, whose element type is not theirs.
        rule: given torch's operator, makes what returns tensors like the results from tensors without data, where
            torch's own rule says otherwise than its kernels. The types were found by running torch's own samples of all
            operators on tensors that are contiguous, transposed, channels-last and permuted at random, forward and
            backward, with and without data.
        ambiguous: an operand that is contiguous and also has its channels last counts as the one for its kernels, and
            as the other for torch's rule. Pointwise types are so without saying it.
        onednn: the element types for which oneDNN may compute it on the CPU, where that is switched on.
        alike: parameters that have to be of one element type. This, and the next two, are of operators whose fake
            kernels, of one version of torch or another, take what the real ones refuse. They were found by running
            torch's own samples of all operators with one operand of another type, with and without data.
        normalised: parameters that have to be of the type of ``input``, or all of single precision where that is of
            half.
        index_types: the parameter that tells elements of another one, and the element types that it may have.
        sparse: of an optimizer's type, the one that updates by a sparse gradient.
        nondeterministic: why the bits of two runs on the same values may differ; empty where they do not. Source: the
            documentation of ``torch.use_deterministic_algorithms``. In-place forms count as their functional ones.
        strides_vary: the strides of its results are the backend's choice. Mkldnn, cudnn and the CPU keep channels last,
            meta does not. Fourier transforms come out as the library leaves them, and meta takes the GPU's.
        shapes_vary: the shapes of its results are the backend's choice, too: workspaces.
        kept_varies: the shapes of all its results but the first, which are kept for a backward, are the backend's
            choice.
        kept_varies_in_evaluation: the same, where its argument ``training`` is not true: some backends keep empty
            statistics then, others those that they were given.
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
    functional: str = ""
    label: str = ""
    own_type: str = ""
    composite: bool = False
    checks: bool = False
    rebinds: bool = False
    bounded: bool = False
    rule: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
    ambiguous: bool = False
    onednn: tuple[str, ...] = ()
    alike: tuple[str, ...] = ()
    normalised: tuple[str, ...] = ()
    index_types: tuple[str, tuple[str, ...]] = ("", ())
    sparse: str = ""
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
