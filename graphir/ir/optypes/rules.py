"""Rules for tensors without data, where torch's own differ from its kernels.

A rule takes an operator's arguments, with meta or fake tensors, and returns the results as meta or fake tensors. The
functions here make rules. Each is given torch's operator: called on meta or fake tensors, it is torch's own rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from .layouts import as_kernel
from .trial import without_data

__all__ = [
    "batch_norm",
    "batch_norm_backward",
    "by_column",
    "group_norm_backward",
    "grouped_mm",
    "normalised",
    "viewed",
    "with_types",
]

Rule: TypeAlias = Callable[..., Any]


def grouped_mm(func: Rule) -> Rule:
    """The rule of a matrix product for each group: torch's rule takes bfloat16 only, its kernels other types too."""
    return _grouped_mm


def _grouped_mm(
    mat_a: Tensor,
    mat_b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Rows are padded to 16 bytes. Source: ``create_grouped_gemm_output_tensor`` in
    aten/src/ATen/native/GroupedMMUtils.h."""
    torch._check(mat_a.size(-1) == mat_b.size(-2), lambda: "contraction dimension of mat_a and mat_b must match")
    rows, columns = mat_a.size(-2), mat_b.size(-1)
    groups = None
    if mat_a.dim() == mat_b.dim():
        groups = mat_a.size(0) if offs is None else offs.size(0)
    dtype = out_dtype or mat_a.dtype
    unit = 16 // dtype.itemsize
    pitch = -(-columns // unit) * unit
    if groups is None:
        return mat_a.new_empty_strided((rows, columns), (pitch, 1), dtype=dtype)
    return mat_a.new_empty_strided((groups, rows, columns), (rows * pitch, pitch, 1), dtype=dtype)


def by_column(*matrices: int) -> Callable[[Rule], Rule]:
    """Makes a rule whose results at the positions *matrices* lie in memory column by column on the CPU.

    Torch's rule agrees for fake tensors, but gives row by row for meta tensors.
    """

    def made(func: Rule) -> Rule:
        def rule(*args: Any, **kwargs: Any) -> Any:
            returned = func(*args, **kwargs)
            return tuple([_by_column(t) if i in matrices and t.dim() > 1 else t for i, t in enumerate(returned)])

        return rule

    return made


def _by_column(matrices: Tensor) -> Tensor:
    *batch, rows, columns = matrices.shape
    return matrices.new_empty((*batch, columns, rows)).transpose(-2, -1)


def with_types(types_of: Callable[[Sequence[Any]], tuple[torch.dtype, ...]]) -> Callable[[Rule], Rule]:
    """Makes a rule whose results have the element types that *types_of* finds in its arguments.

    If an operand is of half precision, torch's rules differ between fake and meta tensors.
    """

    def made(func: Rule) -> Rule:
        def typed(*args: Any, **kwargs: Any) -> Any:
            returned = func(*args, **kwargs)
            return tuple([_of_type(t, dtype) for t, dtype in zip(returned, types_of(args), strict=True)])

        return typed

    return made


def _of_type(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if tensor is None or tensor.dtype == dtype:
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=tensor.device)


def normalised(args: Sequence[Any]) -> tuple[torch.dtype, ...]:
    """The data's type, and twice the parameters' type, which the statistics have on the CPU."""
    data, *params = (arg.dtype for arg in args if isinstance(arg, Tensor))
    statistics = params[0] if params else data
    return data, statistics, statistics


def group_norm_backward(args: Sequence[Any]) -> tuple[torch.dtype, ...]:
    """The types of the data and, twice, of the parameters."""
    data, weight = args[1].dtype, args[4]
    params = data if weight is None else weight.dtype
    return data, params, params


def _on_meta(rule: Rule) -> Rule:
    """A rule whose results have the geometry and types that *rule* gives them on the meta device.

    Torch's rules of batch norms are long and in Python: each operator in them costs much more on fake tensors.
    """

    def on_meta(*args: Any) -> tuple[Tensor | None, ...]:
        data: Tensor = args[0]
        if data.is_meta:
            returned: tuple[Tensor | None, ...] = rule(*args)
            return returned
        with unset_fake_temporarily():
            returned = rule(*[without_data(arg) if isinstance(arg, Tensor) else arg for arg in args])
        return tuple([t if t is None else data.new_empty_strided(t.shape, t.stride(), dtype=t.dtype) for t in returned])

    return on_meta


def batch_norm(func: Rule) -> Rule:
    """The rule of a batch norm, for one value a channel too.

    To update running statistics, torch's rule divides by the number of values less one, here 0. The results do not
    depend on running statistics.
    """
    in_evaluation = as_kernel(func)
    in_training = _on_meta(in_evaluation)  # not in evaluation: returned statistics are empty there on the host alone

    def rule(*args: Any) -> Any:
        data, weight, bias, mean, var, training, *options = args
        if training and data.numel() == data.shape[1]:
            mean = var = None
        return (in_training if training else in_evaluation)(data, weight, bias, mean, var, training, *options)

    return with_types(normalised)(rule)


def batch_norm_backward(func: Rule) -> Rule:
    """The rule of a batch norm's backward. An input that the mask leaves out has no gradient, as with the kernels;
    torch's rule makes one."""
    unmasked = _on_meta(as_kernel(func))

    def rule(*args: Any) -> tuple[Tensor | None, ...]:
        *_, mask = args
        gradient, *others = unmasked(*args)
        return (gradient if mask[0] else None, *others)

    return rule


def viewed(func: Rule) -> Rule:
    """The rule of a view in another shape, with the strides that torch's C++ computes.

    Torch's rule for fake tensors keeps strides along dimensions of one element, which decide the memory format that a
    convolution sees.
    """

    def rule(self: Tensor, size: Sequence[int]) -> Tensor:
        with unset_fake_temporarily():
            seen = func(torch.empty_strided(self.shape, self.stride(), device="meta"), size)
        return self.as_strided(seen.shape, seen.stride())

    return rule
