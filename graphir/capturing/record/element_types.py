"""Element types that operators don't take together: PyTorch's kernels refuse them, its fake tensors often don't."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import torch

from ...errors import CaptureError
from ...ir.opset import signature
from ...ir.symbols import to_torch
from ..words.libraries import Outside
from ..words.places import where
from .forms import Bound, Form

__all__ = ["check_element_types"]

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
    known = form.known
    if known.alike:
        _check_alike(form, [g for g in _given(form, bound) if g.name in known.alike], here)
    if known.normalised:
        _check_normalised(form, list(_given(form, bound)), here)
    parameter, symbols = known.index_types
    if symbols:
        types = list(map(to_torch, symbols))
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
