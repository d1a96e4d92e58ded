"""The fakes of graphir's own types, which return results without data, as a user's operator has one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from ..symbols import to_symbol

__all__ = [
    "Refused",
    "all_reduce",
    "attention",
    "attention_backward",
    "batch_norm_moments",
    "copy",
    "cumulative_batch_norm",
    "embedding_bag_backward",
    "laid_out",
    "load",
    "scale",
    "sparse_sum",
    "synchronised_batch_norm",
    "synchronised_batch_norm_backward",
    "typed",
    "updated",
]


class Refused(ValueError):
    """A type does not take these operands; the text says why."""


def typed(tensor: Tensor) -> str:
    """The element type and shape of a tensor, as texts of programs have them."""
    return f"{to_symbol(tensor.dtype)}[{','.join(map(str, tensor.shape))}]"


def copy(source: Tensor) -> Tensor:
    """A tensor like the source, its strides kept."""
    return source.new_empty_strided(source.shape, source.stride())


def load(*, key: str, dim: int | None = None, first: int = 0) -> Tensor:
    """No fake: the geometry of a loaded tensor is known only once the tensor is there."""
    raise NotImplementedError


def all_reduce(inputs: Sequence[Tensor], *, reduction: str = "sum", shares: Sequence[int] = ()) -> list[Tensor]:
    """The sum for each participant.

    Raises:
        Refused: the inputs differ in shape or type, or there is not one share for each input.
    """
    first, *others = inputs
    for other in others:
        if (other.shape, other.dtype) != (first.shape, first.dtype):
            raise Refused(f"AllReduce adds {typed(first)} and {typed(other)}")
    if shares and len(shares) != len(inputs):
        raise Refused(f"AllReduce has {len(shares)} shares for {len(inputs)} participants")
    total = first
    for other in others:
        total = total + other
    return [total.div(1)] * len(inputs)


def scale(rows: Tensor, *, numerator: int, denominator: int) -> Tensor:
    """Numbers of the same shape, without gaps.

    Raises:
        Refused: the denominator is 0.
    """
    if denominator == 0:
        raise Refused(f"graphir.scale has the factor {numerator}/{denominator}")
    return rows.new_empty(rows.shape)


def sparse_sum(
    values: Sequence[Tensor],
    indices: Sequence[Tensor],
    *,
    rows: int,
    reduction: str = "sum",
    shares: Sequence[int] = (),
) -> tuple[Tensor, Tensor]:
    """Indices and values of the sum, with as many slots as all summands have together.

    Raises:
        Refused: the summands have rows of different lengths, or not an index for each row.
    """
    for value, index in zip(values, indices, strict=True):
        if value.dim() != 2 or index.shape != (1, len(value)) or value.shape[1] != values[0].shape[1]:
            shown = f"{typed(values[0])}, not {typed(value)} at {typed(index)}"
            raise Refused(f"graphir.sparse_sum adds rows of {shown}")
    lookups = sum(map(len, values))
    return indices[0].new_empty((1, lookups)), values[0].new_empty((lookups, values[0].shape[1]))


def embedding_bag_backward(grad: Tensor, indices: Tensor, *others: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """Indices and values of the gradient, with a slot for each index.

    Raises:
        Refused: *grad* is not a matrix, or *indices* is not a vector.
    """
    if grad.dim() != 2 or indices.dim() != 1:
        shown = f"{typed(grad)} and {typed(indices)}"
        raise Refused(f"graphir.embedding_bag_backward takes gradients of bags and their indices, not {shown}")
    return indices.new_empty((1, len(indices))), grad.new_empty((len(indices), grad.shape[1]))


_SINGLE: Final = (
    *("alpha_inverse", "correction", "eta", "found_inf", "keep", "lr", "mu", "mu_product", "next_dampening", "step"),
    *("beta1_now", "beta2_now", "momentum_now", "weight_decay_now"),
)
"""Operands of optimizers that are one number."""


def updated(type: str, names: Sequence[str], *, returns: bool = False) -> Callable[..., Tensor | None]:
    """The fake of an optimizer's type.

    Args:
        type: the optimizer's.
        names: of its parameters that take tensors.
        returns: whether it returns a tensor like the values of its sparse gradient.
    """

    def fake(*tensors: Tensor | None, by_rows: bool = False, **options: Any) -> Tensor | None:
        given = {name: tensor for name, tensor in zip(names, tensors, strict=False) if tensor is not None}
        param = given["param"].shape
        special: dict[str, tuple[int, ...]] = dict.fromkeys(_SINGLE, ())
        special["row_sum"] = tuple(param[:1])
        special["n_z"] = (*param, 2)
        special["row_var"], special["col_var"] = (*param[:-1], 1), (*param[:-2], 1, *param[-1:])
        if by_rows:  # the squares have one number for each row
            special["moment" if "moment" in given else "moment_2"] = tuple(param[:1])
        if "indices" in given:
            lookups = given["indices"].shape[-1:]
            special |= {"indices": (1, *lookups), "values": (*lookups, *param[1:])}
        for name, tensor in given.items():
            wanted = special.get(name, param)
            if tensor.shape != wanted:
                raise Refused(f"{type} takes {name} of shape {list(wanted)}, not {typed(tensor)}")
        return torch.empty_like(given["values"]) if returns else None

    return fake


def attention(query: Tensor, key: Tensor, value: Tensor, *options: Any, **named: Any) -> tuple[Tensor, Tensor]:
    """The output, laid out as the query, and a number for each query of each head: f64 if the query is f64, else f32.

    Before torch 2.12, torch's own rule gives f32 for all.
    """
    _check_attention(query, key, value)
    batch, heads, queries, _ = query.shape
    accumulated = torch.float64 if query.dtype == torch.float64 else torch.float32
    return torch.empty_like(query), query.new_empty((batch, queries, heads), dtype=accumulated).transpose(1, 2)


def attention_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, *options: Any, **named: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients, in memory in the order batch, sequence, heads, size."""
    _check_attention(query, key, value)
    torch._check(grad_out.shape == out.shape, lambda: f"a gradient of shape {list(grad_out.shape)}")
    found = [t.new_empty([t.shape[d] for d in (0, 2, 1, 3)]).transpose(1, 2) for t in (query, key, value)]
    return found[0], found[1], found[2]


def _check_attention(query: Tensor, key: Tensor, value: Tensor) -> None:
    fits = query.dim() == key.dim() == 4 and key.shape == value.shape
    fits = fits and (query.shape[0], query.shape[3]) == (key.shape[0], key.shape[3])
    shapes = ", ".join(str(list(t.shape)) for t in (query, key, value))
    torch._check(
        fits and query.shape[1] % key.shape[1] == 0,
        lambda: f"query, key and value are [batch, heads, sequence, size], not {shapes}",
    )


def batch_norm_moments(input: Tensor, *, participant: int, participants: int) -> Tensor:
    """A row of counts, means and sums of squares for each participant.

    Raises:
        Refused: there is no such participant, or the input has no channels.
    """
    if not 0 <= participant < participants:
        raise Refused(f"graphir.batch_norm_moments is for participant {participant} of {participants}")
    return input.new_empty((participants, 3, _channels(input)), dtype=torch.float64)


def cumulative_batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    batches: Tensor,
    *,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """What torch's batch norm in training returns, in the same layout.

    Raises:
        Refused: parameters or statistics are not those of the input's channels, or batches is not one number.
    """
    given = {"weight": weight, "bias": bias, "running_mean": running_mean, "running_var": running_var}
    _check_parameters(_channels(input), given)
    _check_batches(batches)
    return _normalised(input, given)


def synchronised_batch_norm(
    input: Tensor,
    moments: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    batches: Tensor | None = None,
    *,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """What torch's batch norm in training returns, in the same layout.

    Raises:
        Refused: moments, parameters or statistics are not those of the input's channels, or batches is not one number.
    """
    given = {"weight": weight, "bias": bias, "running_mean": running_mean, "running_var": running_var}
    _check_channels(input, moments, given)
    if batches is not None:
        _check_batches(batches)
    return _normalised(input, given)


def _normalised(input: Tensor, given: Mapping[str, Tensor | None]) -> tuple[Tensor, Tensor, Tensor]:
    statistics = next((tensor.dtype for tensor in given.values() if tensor is not None), input.dtype)
    saved = [input.new_empty((_channels(input),), dtype=statistics) for _ in range(2)]
    return laid_out(input), saved[0], saved[1]


def synchronised_batch_norm_backward(
    grad_out: Tensor,
    input: Tensor,
    moments: Tensor,
    weight: Tensor | None,
    save_mean: Tensor,
    save_invstd: Tensor,
    grad_weight: Tensor,
    grad_bias: Tensor,
    *,
    numerator: int = 1,
    denominator: int = 1,
) -> Tensor:
    """The gradient of the input, laid out as torch's batch norm has it.

    Raises:
        Refused: operands are not those of the input's channels, or the denominator is 0.
    """
    if grad_out.shape != input.shape:
        raise Refused(f"{_BACKWARD} takes a gradient of shape {list(input.shape)}, not {typed(grad_out)}")
    saved = {"save_mean": save_mean, "save_invstd": save_invstd}
    _check_channels(input, moments, {"weight": weight, **saved, "grad_weight": grad_weight, "grad_bias": grad_bias})
    if denominator == 0:
        raise Refused(f"{_BACKWARD} has the factor {numerator}/{denominator}")
    return laid_out(input)


_BACKWARD: Final = "graphir.synchronised_batch_norm_backward"


def _channels(input: Tensor) -> int:
    if input.dim() < 2 or not input.dtype.is_floating_point:
        raise Refused(f"a batch norm takes real numbers with channels in dimension 1, not {typed(input)}")
    return input.shape[1]


def _check_channels(input: Tensor, moments: Tensor, given: Mapping[str, Tensor | None]) -> None:
    channels = _channels(input)
    if moments.dim() != 3 or moments.shape[1:] != (3, channels) or moments.dtype != torch.float64:
        raise Refused(f"moments of {channels} channels are f64[participants,3,{channels}], not {typed(moments)}")
    _check_parameters(channels, given)


def _check_parameters(channels: int, given: Mapping[str, Tensor | None]) -> None:
    for name, tensor in given.items():
        if tensor is not None and tensor.shape != (channels,):
            raise Refused(f"a batch norm of {channels} channels takes as many numbers as {name}, not {typed(tensor)}")


def _check_batches(batches: Tensor) -> None:
    if batches.dim() or batches.dtype != torch.int64:
        raise Refused(f"the number of batches is i64[], not {typed(batches)}")


def laid_out(input: Tensor) -> Tensor:
    """A tensor in the layout of torch's batch norm results: channels-last if the input is channels-last and not
    contiguous, else contiguous."""
    memory_format = torch.contiguous_format if input.is_contiguous() else suggest_memory_format(input)
    return torch.empty_like(input, memory_format=memory_format)
