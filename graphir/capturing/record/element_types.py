"""Element types that operators don't take together: PyTorch's kernels refuse them, its fake tensors often don't.

The tables hold operators whose fake kernels, of one version of torch or another, take what the real ones refuse. They
were found by running torch's own samples of all operators with one operand of another type, with and without data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final, NamedTuple

import torch

from ...errors import CaptureError
from ...ir.opset import signature
from ..words.libraries import Outside
from ..words.places import where
from .forms import Bound, Form

__all__ = ["check_element_types"]

_ALIKE: Final[Mapping[str, tuple[str, ...]]] = {
    "_cdist_forward": ("x1", "x2"),
    "_embedding_bag": ("weight", "per_sample_weights"),
    "_embedding_bag_forward_only": ("weight", "per_sample_weights"),
    "_index_put_impl": ("self", "values"),
    "_unsafe_index_put": ("self", "values"),
    "_unsafe_masked_index_put_accumulate": ("self", "values"),
    "addbmm": ("self", "batch1", "batch2"),
    "addmm": ("self", "mat1", "mat2"),
    "addmv": ("self", "mat", "vec"),
    "baddbmm": ("self", "batch1", "batch2"),
    "binary_cross_entropy": ("self", "target"),
    "bmm": ("self", "mat2"),
    "complex": ("real", "imag"),
    "convolution": ("input", "weight", "bias"),
    "grid_sampler_2d": ("input", "grid"),
    "grid_sampler_3d": ("input", "grid"),
    "heaviside": ("self", "values"),
    "index_add": ("self", "source"),
    "index_copy": ("self", "source"),
    "index_put": ("self", "values"),
    "index_reduce": ("self", "source"),
    "linalg_cross": ("self", "other"),
    "mm": ("self", "mat2"),
    "multi_margin_loss": ("self", "weight"),
    "mv": ("self", "vec"),
    "nll_loss2d_forward": ("self", "weight"),
    "nll_loss_forward": ("self", "weight"),
    "polar": ("abs", "angle"),
    "put": ("self", "source"),
}
"""Parameters that have to be of one type."""

_NORMALISED: Final[Mapping[str, tuple[str, ...]]] = {
    "_batch_norm_with_update": ("weight", "bias", "running_mean", "running_var"),
    "_native_batch_norm_legit": ("weight", "bias", "running_mean", "running_var"),
    "native_batch_norm": ("weight", "bias", "running_mean", "running_var"),
    "native_group_norm": ("weight", "bias"),
    "native_layer_norm": ("weight", "bias"),
}
"""Parameters that have to be of the type of ``input``, or all of single precision where that is of half."""

_LONG: Final = (torch.int64,)
_WHOLE: Final = (torch.int64, torch.int32)
_INDEX: Final = (torch.int64, torch.int32, torch.uint8, torch.bool)
_INDICES: Final[Mapping[str, tuple[str, tuple[torch.dtype, ...]]]] = {
    "_index_put_impl": ("indices", _INDEX),
    "_unsafe_index_put": ("indices", _INDEX),
    "_unsafe_masked_index_put_accumulate": ("indices", _INDEX),
    "embedding": ("indices", _WHOLE),
    "index_add": ("index", _WHOLE),
    "index_copy": ("index", _LONG),
    "index_fill": ("index", _LONG),
    "index_put": ("indices", _INDEX),
    "index_reduce": ("index", _WHOLE),
    "index_select": ("index", _WHOLE),
    "multi_margin_loss": ("target", _LONG),
    "multilabel_margin_loss_forward": ("target", _LONG),
    "nll_loss2d_forward": ("target", _LONG),
    "nll_loss_forward": ("target", (torch.int64, torch.uint8)),
    "put": ("index", _LONG),
    "searchsorted": ("sorter", _LONG),
    "take": ("index", _LONG),
}
"""The parameter that tells elements of another one, and the types that it may have."""

_HALF: Final = (torch.float16, torch.bfloat16)


class _Given(NamedTuple):
    """A tensor and the name of the parameter that it is given for."""

    name: str
    tensor: torch.Tensor


def check_element_types(form: Form, bound: Bound, here: Callable[[], str]) -> None:
    """Raise where the operator's kernels refuse the element types that it is given.

    Args:
        form: of the operator.
        bound: its arguments in place.
        here: path of the module that it belongs to.

    Raises:
        CaptureError: names the parameters and their types.
    """
    if form.func.namespace != "aten":
        return
    name = form.func._opname.rstrip("_")
    if name in _ALIKE:
        _check_alike(form, [g for g in _given(form, bound) if g.name in _ALIKE[name]], here)
    if name in _NORMALISED:
        _check_normalised(form, list(_given(form, bound)), here)
    if name in _INDICES:
        parameter, types = _INDICES[name]
        for given in _given(form, bound):
            if given.name == parameter and given.tensor.dtype not in types:
                raise CaptureError(
                    f"{form.type} takes {parameter} of {' or '.join(map(str, types))}, not of {given.tensor.dtype}",
                    where=where(here()),
                    fix=Outside(f"convert it, such as by .to({types[0]})"),
                )


def _check_alike(form: Form, given: list[_Given], here: Callable[[], str]) -> None:
    if len({g.tensor.dtype for g in given}) > 1:
        names = ", ".join(g.name for g in given)
        raise CaptureError(
            f"{form.type} takes {names} of one element type, not of {_types(given)}",
            where=where(here()),
            fix=Outside("bring them to one: convert the step's inputs, as by x.to(torch.float32), or the module"),
        )


def _check_normalised(form: Form, given: list[_Given], here: Callable[[], str]) -> None:
    data, *params = given
    if data.tensor.dtype in _HALF and all(g.tensor.dtype == torch.float32 for g in params):
        return
    _check_alike(form, given, here)


def _types(given: list[_Given]) -> str:
    return ", ".join(str(g.tensor.dtype) for g in given)


def _given(form: Form, bound: Bound) -> Iterator[_Given]:
    names = signature(form.type).names(bound.operands, len(bound.tensors))
    yield from map(_Given, names, bound.tensors)
