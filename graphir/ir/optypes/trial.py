"""A trial of a registered operator: whether it does what its schema and its fake say."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

from ..tensor import same_bits

__all__ = ["Disagreement", "disagreement", "without_data"]


class Disagreement(NamedTuple):
    """How an operator deviates from its schema, its fake or its own results, and the fix."""

    what: str
    fix: str


def disagreement(func: OpOverload, example: Sequence[Any], nondeterministic: bool) -> Disagreement | None:
    """How *func* deviates from its schema and its fake on these positional arguments; None if it does not.

    Args:
        func: is called twice, on copies of the arguments.
        example: the arguments, tensors on the host.
        nondeterministic: the two calls may give different bits.
    """
    given = [_each(value, Tensor.clone) for value in example]
    try:
        with torch.no_grad():
            made = list(_tensors(func(*given)))
            again = list(_tensors(func(*[_each(value, Tensor.clone) for value in example])))
    except Exception as e:  # whatever its kernel raises
        return Disagreement(f"fails on the example: {type(e).__name__}: {e}", "give operands that the operator takes")
    return (
        _undeclared(func, example, given, made)
        or _other_than_fake(func, example, made)
        or (None if nondeterministic else _unlike(made, again))
    )


def _undeclared(
    func: OpOverload, example: Sequence[Any], given: Sequence[Any], made: Sequence[Tensor]
) -> Disagreement | None:
    """What *func* overwrites or aliases without its schema saying so."""
    returned = {_memory(tensor) for tensor in made if tensor.numel()}
    declared = set().union(*[_aliases(result) for result in func._schema.returns])
    for argument, before, after in zip(func._schema.arguments, example, given, strict=False):
        info = argument.alias_info
        for old, new in zip(_tensors(before), _tensors(after), strict=True):
            if not (info is not None and info.is_write) and not same_bits(old, new):
                return Disagreement(
                    f"overwrites {argument.name}, which its schema does not say",
                    f"declare it, Tensor(a!) {argument.name} (mutates_args=[{argument.name!r}] of a custom_op), "
                    "or compute in a copy",
                )
            if _memory(new) in returned and not declared & _aliases(argument):
                return Disagreement(
                    f"returns memory of {argument.name}, which its schema does not say",
                    "return a clone, or declare it: Tensor(a) for both",
                )
    return None


def _aliases(declared: Any) -> set[str]:
    return set() if declared.alias_info is None else set(declared.alias_info.before_set)


def _other_than_fake(func: OpOverload, example: Sequence[Any], made: Sequence[Tensor]) -> Disagreement | None:
    try:
        with torch.no_grad():
            faked = list(_tensors(func(*[_each(value, without_data) for value in example])))
    except Exception as e:  # whatever its fake raises
        return Disagreement(f"has a fake that fails on the example: {type(e).__name__}: {e}", "mend the fake")
    if len(faked) != len(made):
        return Disagreement(
            f"returns {len(made)} tensors, but its fake returns {len(faked)}",
            "let the fake return as many tensors as the kernel",
        )
    for i, (real, fake) in enumerate(zip(made, faked, strict=True)):
        shown = [f"{t.dtype}{list(t.shape)} with strides {list(t.stride())}" for t in (real, fake)]
        if shown[0] != shown[1]:
            return Disagreement(
                f"returns {shown[0]} as result {i}, but its fake returns {shown[1]}",
                "let the fake return tensors like those of the kernel",
            )
    return None


def _unlike(made: Sequence[Tensor], again: Sequence[Tensor]) -> Disagreement | None:
    if all(map(same_bits, made, again)):
        return None
    return Disagreement(
        "gives different bits when it is called again", "say why: nondeterministic='adds in no fixed order'"
    )


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _each(value: Any, change: Any) -> Any:
    """*value* with its tensors changed."""
    if isinstance(value, Tensor):
        return change(value.detach())
    return [_each(item, change) for item in value] if isinstance(value, list | tuple) else value


def without_data(tensor: Tensor) -> Tensor:
    """A tensor of the same geometry on the meta device."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
