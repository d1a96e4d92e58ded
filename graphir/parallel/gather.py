"""The replicas' outputs as one, by the rules of torch's ``gather``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..errors import warn
from .errors import ReplicationIndexError, ReplicationRuntimeError, ReplicationTypeError, ReplicationValueError
from .scatter import is_namedtuple

__all__ = ["gather"]

_WHERE = "DataParallel.gather"


def gather(outputs: Sequence[Any], place: torch.device, dim: int = 0) -> Any:
    """Put the tensors of the replicas' outputs behind each other along *dim*, in replica order.

    Tuples, lists, named tuples and dicts are mapped, by the keys of the first replica's, and so is what else is made of
    an iterable of its parts, such as a cache of transformers. None stays None. A text becomes the list of all replicas'
    texts, as in Jacinle. Gradients flow back, to each replica those of its rows. Where all replicas return a tensor
    without dimensions, such as a loss, the result is a vector, with torch's warning.

    Args:
        outputs: one for each replica, of the same structure.
        place: the real device of the result.
        dim: the dimension along which it is put together.

    Raises:
        ReplicationTypeError: an output is neither a tensor, None, a text, nor a structure of them.
        ReplicationValueError: the structures differ.
        ReplicationRuntimeError: tensors differ in other dimensions.
        ReplicationIndexError: tensors have no dimension *dim*.
    """
    return _gathered(list(outputs), place, dim, "output")


def _gathered(outputs: list[Any], place: torch.device, dim: int, path: str) -> Any:
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        return _joined(outputs, place, dim, path)
    if first is None:
        return None
    if isinstance(first, str):
        return outputs
    if isinstance(first, dict):
        _same_keys(outputs, path)
        kind: Any = type(first)
        return kind((key, _gathered([o[key] for o in outputs], place, dim, f"{path}[{key!r}]")) for key in first)
    if isinstance(first, bytes) or not isinstance(first, Iterable):
        raise ReplicationTypeError(
            f"{path} is of type {type(first).__name__}, which cannot be gathered",
            where=_WHERE,
            fix="return tensors, texts, None, or tuples, lists and dicts of them; a number as torch.tensor([number])",
        )
    parts = _same_lengths(outputs, path)
    items = [_gathered(list(values), place, dim, f"{path}[{i}]") for i, values in enumerate(zip(*parts, strict=True))]
    made: Any = type(first)
    return made._make(items) if is_namedtuple(first) else made(items)


def _joined(outputs: list[Any], place: torch.device, dim: int, path: str) -> torch.Tensor:
    for replica, tensor in enumerate(outputs):
        if not isinstance(tensor, torch.Tensor):
            raise ReplicationTypeError(
                f"{path} is a tensor in replica 0 and of type {type(tensor).__name__} in replica {replica}",
                where=_WHERE,
                fix="return the same structure in each replica",
            )
    shapes = ", ".join(str(tuple(tensor.shape)) for tensor in outputs)
    if all(not tensor.dim() for tensor in outputs) and dim == 0:
        warn(
            "Was asked to gather along dimension 0, but all input tensors were scalars; will instead unsqueeze "
            "and return a vector.",
            UserWarning,
        )
        outputs = [tensor.view(1) for tensor in outputs]
    elif any(not -tensor.dim() <= dim < tensor.dim() for tensor in outputs):
        raise ReplicationIndexError(
            f"{path} has no dimension {dim} to be gathered along: {shapes}",
            where=_WHERE,
            fix="return tensors that have it",
        )
    try:
        return torch.cat([tensor.to(place, non_blocking=True) for tensor in outputs], dim)
    except RuntimeError as e:
        raise ReplicationRuntimeError(
            f"{path} cannot be put together along dimension {dim}: {shapes}",
            where=f"{_WHERE}: {e}",
            fix="return tensors that differ in this dimension only",
        ) from e


def _same_keys(outputs: list[Any], path: str) -> None:
    first = outputs[0]
    for replica, output in enumerate(outputs):
        if not isinstance(output, dict) or output.keys() != first.keys():
            keys = sorted(map(repr, output)) if isinstance(output, dict) else type(output).__name__
            raise ReplicationValueError(
                f"{path}: all dicts must have the same keys, but replica 0 has {sorted(map(repr, first))} and replica "
                f"{replica} {keys}",
                where=_WHERE,
                fix="return the same structure in each replica",
            )


def _same_lengths(outputs: list[Any], path: str) -> list[list[Any]]:
    """What each output holds."""
    parts = [list(output) if isinstance(output, Iterable) else None for output in outputs]
    for replica, (part, output) in enumerate(zip(parts, outputs, strict=True)):
        if part is None or parts[0] is None or len(part) != len(parts[0]):
            found = type(output).__name__ if part is None else len(part)
            raise ReplicationValueError(
                f"{path} has length {len(parts[0] or ())} in replica 0 and {found} in replica {replica}",
                where=_WHERE,
                fix="return the same structure in each replica",
            )
    return [part for part in parts if part is not None]
