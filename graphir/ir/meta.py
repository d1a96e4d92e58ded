"""What operators return on tensors without data, where torch's own rules differ from its kernels.

A rule takes the operator's arguments, with tensors on the meta device or fake ones, and returns such a tensor.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from types import FunctionType, SimpleNamespace
from typing import Any, Final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from .layouts import LAYOUTS, as_kernel, is_asked_if_ambiguous
from .opset import overload
from .optypes.table import operator_type
from .optypes.trial import without_data

__all__ = ["META", "errors_not_logged", "fresh_fake_mode", "rule_of"]


def fresh_fake_mode() -> FakeTensorMode:
    """A mode that asks torch for every result.

    Torch's cache of results knows neither the number of threads nor whether oneDNN was on. A convolution chooses its
    backend by both, and with the backend the layout of its result.
    """
    mode = FakeTensorMode.__new__(FakeTensorMode)
    _made_without_stack()(mode)
    mode.cache_enabled = False
    return mode


@contextlib.contextmanager
def errors_not_logged() -> Iterator[None]:
    """Keep torch from logging a traceback of an error on fake tensors that is raised as another one, or expected."""
    logging.getLogger("torch._subclasses.fake_tensor").addFilter(_QUIET)  # which it has once, however often it is added
    depth = _QUIET.depth
    try:
        _QUIET.depth = depth + 1
        yield
    finally:
        _QUIET.depth = depth


class _Quiet(threading.local, logging.Filter):
    """Drops what threads within :func:`errors_not_logged` log. Disabling the logger would silence all threads."""

    depth = 0

    def filter(self, record: logging.LogRecord) -> bool:
        return not self.depth


_QUIET: Final = _Quiet()


@cache
def _made_without_stack() -> Callable[[FakeTensorMode], None]:
    """A function that makes a mode as its class does, but does not read the stack.

    The class keeps the stack of its caller, for an error of torch's own; reading that takes longer than everything
    else.
    """
    make: Any = FakeTensorMode.__init__
    none = SimpleNamespace(extract_stack=list, format_stack=list)
    made = FunctionType(make.__code__, {**make.__globals__, "traceback": none}, closure=make.__closure__)
    made.__kwdefaults__ = make.__kwdefaults__
    return made


def _grouped_mm(
    mat_a: Tensor,
    mat_b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """A matrix product for each group: torch's rule takes bfloat16 only, its kernels take other types, too.

    Rows are padded to 16 bytes. Source: ``create_grouped_gemm_output_tensor`` in
    aten/src/ATen/native/GroupedMMUtils.h.
    """
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


def _with_matrices_by_column(type: str, matrices: Sequence[int]) -> Callable[..., Any]:
    """The rule of *type*, whose results at the positions *matrices* lie in memory column by column on the CPU.

    Torch's rule says so for fake tensors, and row by row for those on the meta device.
    """
    func = overload(type)

    def rule(*args: Any, **kwargs: Any) -> Any:
        returned = func(*args, **kwargs)
        return tuple([_by_column(t) if i in matrices and t.dim() > 1 else t for i, t in enumerate(returned)])

    return rule


def _by_column(matrices: Tensor) -> Tensor:
    *batch, rows, columns = matrices.shape
    return matrices.new_empty((*batch, columns, rows)).transpose(-2, -1)


def _with_types(
    type: str, types_of: Callable[[Sequence[Any]], tuple[torch.dtype, ...]], rule: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """The rule of *type* (or *rule*), whose results have the element types that *types_of* finds in its arguments.

    Torch's rules differ between fake tensors and those on the meta device, where an operand is of half precision.
    """
    func = rule or LAYOUTS.get(type) or overload(type)

    def typed(*args: Any, **kwargs: Any) -> Any:
        returned = func(*args, **kwargs)
        return tuple([_of_type(t, dtype) for t, dtype in zip(returned, types_of(args), strict=True)])

    return typed


def _of_type(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if tensor is None or tensor.dtype == dtype:
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=tensor.device)


def _normalised(args: Sequence[Any]) -> tuple[torch.dtype, ...]:
    """The data's type, and twice that of the parameters: the statistics have it on the CPU."""
    data, *params = (arg.dtype for arg in args if isinstance(arg, Tensor))
    statistics = params[0] if params else data
    return data, statistics, statistics


def _group_norm_backward(args: Sequence[Any]) -> tuple[torch.dtype, ...]:
    """The types of the data and, twice, of the parameters."""
    data, weight = args[1].dtype, args[4]
    params = data if weight is None else weight.dtype
    return data, params, params


def _on_meta(rule: Callable[..., Any]) -> Callable[..., Any]:
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


def _batch_norm(*args: Any) -> tuple[Tensor, ...]:
    """What a batch norm returns, of one value a channel, too: there torch's rule divides by the number of values less
    one to update running statistics, on which the results do not depend."""
    data, weight, bias, mean, var, training, *options = args
    if training and data.numel() == data.shape[1]:
        mean = var = None
    rule = LAYOUTS["aten.native_batch_norm.default"]
    if training:  # otherwise the statistics that come back are empty on the host alone
        rule = _on_meta(rule)
    returned: tuple[Tensor, ...] = rule(data, weight, bias, mean, var, training, *options)
    return returned


def _masked_batch_norm_backward(*args: Any) -> tuple[Tensor | None, ...]:
    """An input that the mask leaves out has no gradient, as with the kernels; torch's rule makes one."""
    *_, mask = args
    gradient, *others = _on_meta(LAYOUTS["aten.native_batch_norm_backward.default"])(*args)
    return (gradient if mask[0] else None, *others)


def _view_of(type: str) -> Callable[..., Any]:
    """The rule of *type*, a view in another shape, with the strides that torch's C++ computes.

    Torch's rule for fake tensors keeps strides along dimensions of one element, which decide the memory format that a
    convolution sees.
    """
    func = overload(type)

    def rule(self: Tensor, size: Sequence[int]) -> Tensor:
        with unset_fake_temporarily():
            seen = func(torch.empty_strided(self.shape, self.stride(), device="meta"), size)
        return self.as_strided(seen.shape, seen.stride())

    return rule


META: Final[Mapping[str, Callable[..., Any]]] = {
    "aten._grouped_mm.default": _grouped_mm,
    "aten._linalg_svd.default": _with_matrices_by_column("aten._linalg_svd.default", (0, 2)),
    "aten._unsafe_view.default": _view_of("aten._unsafe_view.default"),
    "aten.linalg_eig.default": _with_matrices_by_column("aten.linalg_eig.default", (1,)),
    "aten.view.default": _view_of("aten.view.default"),
    **LAYOUTS,
    "aten.native_batch_norm.default": _with_types("aten.native_batch_norm.default", _normalised, _batch_norm),
    "aten.native_batch_norm_backward.default": _masked_batch_norm_backward,
    "aten.native_group_norm.default": _with_types("aten.native_group_norm.default", _normalised),
    "aten.native_group_norm_backward.default": _with_types(
        "aten.native_group_norm_backward.default", _group_norm_backward
    ),
    "aten.native_layer_norm.default": _with_types("aten.native_layer_norm.default", _normalised),
}
"""The rules of torch's types."""


@cache
def rule_of(type: str) -> Callable[..., Any]:
    """What tells the results of an operator on tensors without data: a rule of these, or torch's own."""
    fake = operator_type(type).fake or META.get(type)
    if fake is not None:
        return fake
    return as_kernel(type, ambiguous=True) if is_asked_if_ambiguous(type) else overload(type)
