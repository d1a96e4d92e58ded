"""One record for each operator type: what graphir knows of it and its schema does not say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ..operator import Arg
from .sized import SizedOperator

__all__ = ["OperatorType"]


class OperatorType(NamedTuple):
    """What is known of a type. A field at its default says that there is nothing special to know.

    Attributes:
        type: such as ``aten.addmm.default``, ``graphir.sgd``, or a user's ``mylib.scale.default``.
        schema: for graphir's own types, in torch's language; torch has the schemas of all others.
        fake: for graphir's own types, the function that returns results without data from operands without data.
        registered: a user has registered it.
        hidden_writes: given the arguments, the names of the parameters that it overwrites, though its schema does not
            say so.
        hidden_views: its results alias its first operand, though its schema does not say so.
        conjugates: its results are views that show the elements in memory with another sign. A bit of the tensor says
            so. A copy does not have the bit, and so holds the changed elements.
        unwritten: it makes memory that it does not write.
        only_elements: it reads only the elements of its operands. The storage of a view has other elements between and
            around the view's own. Most kernels address only the view's own. Some reach further: ``as_strided_copy`` by
            its arguments, and kernels that take an operand for contiguous without asking, as
            ``native_layer_norm_backward`` does with the statistics. If a part of a storage is copied to another device,
            only the view's own elements arrive. So an operator of a type without this fact is given copies of whole
            storages, and certificates number its operands by their storages. The types were found by running torch's
            own samples of all operators, and the training steps of tests/zoo, on operands with gaps, with two fillings
            of the gaps: ``python tests/bench elements`` does it again. Types that rearrange storages, and types that
            neither samples nor steps called, are left out.
        geometry_only: given the arguments, the names of the tensor parameters whose geometry it takes, and not their
            value: it overwrites all of them, or makes new memory like them.
        batch_norm: in training its results do not depend on the running statistics, which some of these types update.
        unread_in_training: the names of tensor parameters that it does not read where its argument ``train`` is true.
        parts_apart: its results may be computed in separate calls, by ``output_mask``, without changing a bit: every
            backend computes the gradient of the input by one kernel and those of weight and bias by others. Norms make
            all gradients in one kernel. Made apart, these were equal wherever tried, and took half as long again.
        in_place: the type that takes the same arguments and writes the same bits over the first operand.
        functional: for a type that overwrites its first operand, the type that returns the values written, if its name
            differs by more than the underscore.
        label: its name as users know it, if that name does not follow from torch's.
        own_type: for a type of the CPU alone, graphir's own type that does the same on any device, and takes its
            tensors in the same order. A dropout probability is left out: the CPU's kernels take only 0.
        composite: a program may name it, though torch composes it of others. All these types but ``unsafe_chunk`` make
            new memory, whatever they consist of.
        checks: it returns nothing, and raises where its operand says that something is wrong.
        rebinds: it exchanges a tensor's storage or changes its size.
        bounded: its tensors are bounds of the numbers that it makes; the numbers have another element type.
        rule: given torch's operator, makes the function that returns results without data from operands without data,
            if torch's own rule differs from its kernels. The types were found by running torch's own samples of all
            operators on tensors that are contiguous, transposed, channels-last and permuted at random, forward and
            backward, with and without data.
        ambiguous: its kernels take an operand that is contiguous and channels-last at once for one of the two, and
            torch's rule for the other. Every pointwise type counts as ambiguous without this field.
        onednn: the element types for which oneDNN may compute it on the CPU, if oneDNN is switched on.
        alike: parameters that must have one element type. This field and the next two are for operators whose fake
            kernels, in some versions of torch, take operands that the real kernels refuse. These operators were found
            by running torch's own samples of all operators with one operand of another type, with and without data.
        normalised: parameters that must have the type of ``input``, or all single precision if ``input`` is of half
            precision.
        index_types: the parameter that indexes another one, and the element types that it may have.
        sparse: for an optimizer's type, the type that updates by a sparse gradient.
        nondeterministic: why the bits of two runs on the same values may differ; empty if they do not. Source: the
            documentation of ``torch.use_deterministic_algorithms``. In-place forms count as their functional ones.
        strides_vary: the strides of its results are the backend's choice. Mkldnn, cudnn and the CPU keep channels last,
            meta does not. Fourier transforms come out as the library leaves them, and meta takes the GPU's.
        shapes_vary: the shapes of its results are the backend's choice, too: workspaces.
        kept_varies: the shapes of all its results but the first, which are kept for a backward, are the backend's
            choice.
        kept_varies_in_evaluation: the same, if its argument ``training`` is not true: some backends then keep empty
            statistics, some the given ones.
        kernel_by_size: sizes, threads and the machine decide which of several kernels computes it, and so the strides
            of its results.
        shaped_in_pieces: the shapes of its results are polynomials of sizes only piecewise.
        reads_rows: it reads about as many bytes of its first operand as it writes.
        joined: generated code makes one call of consecutive operators of the type.
        flops: for a user's type (all others: :mod:`graphir.analysis.formulas`), the additions and multiplications of a
            call, if the call spends its time on them.
        scratch: for a user's type, the workspace of a call: the most bytes that it holds at once beside operands and
            results, and has freed when it returns. None if not known for the operands.
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
